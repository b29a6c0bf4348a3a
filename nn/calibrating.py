"""Calibration: text through a float decoder, one layer at a time, for formats that want to see activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.architectures import Builder
from terrazzo.nn.config_fields import check_length
from terrazzo.nn.decoder import Embedding, positions_of
from terrazzo.nn.dense import Dense
from terrazzo.nn.formats import Format
from terrazzo.ops import w4a8, w4ax
from terrazzo.ops.attention.cache.quantizer import E4M3_MAX
from terrazzo.ops.attention.kv_cache import KVCache
from terrazzo.ops.products.kv import FORMATS

ROWS = 512
"""Activations of a layer that are kept as they are."""
PAGE = 128
TINY = 2.0**-20
"""The least magnitude that scales are made for: dimensions of zeros get one, too."""


@dataclass
class Seen:
    """What a projection has read: statistics of all of it, and some rows [ROWS, K]."""

    statistics: w4ax.ActivationStatistics
    rows: torch.Tensor

    def options(self, form: Format, weight: torch.Tensor) -> dict[str, Any]:
        """What the quantizer of a format makes of it: importance of channels for the search of ranges, and FMPQ's plan
        for W4Ax, a smooth vector for W4A8."""
        importance = self.statistics.mean_square
        if form.product.calibration == "plan":
            return {"plan": w4ax.plan_blocks(self.statistics), "importance": importance}
        if form.product.calibration == "smooth":
            found = w4a8.search_smooth(self.rows, weight.float(), group_size=form.group_size)
            return {"smooth": found.smooth, "importance": importance, "rule": "search"}
        return {"importance": importance} if form.product.calibration else {}


class Calibration:
    """Hidden states of some text, as far as the float model's layers have taken them.

    Args:
        builder: of the float model's layers. tokens: integers [sequences, length].

    Raises:
        ArgumentError: no such tokens, or too long sequences; a model with experts, which read what routers choose.
    """

    def __init__(self, builder: Builder, tokens: torch.Tensor) -> None:
        shape, source = builder.shape, builder.source
        if any(shape.sparse):
            remedy = "leave calibration out"
            raise ArgumentError("calibration", shape.kind, "experts are not calibrated", remedy)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or not tokens.numel():
            seen = list(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise ArgumentError("calibration", seen, "must be token numbers [sequences, length]", "tokenize some text")
        self.builder = builder
        rows, length = tokens.shape
        check_length(length, 0, shape.positions, "calibration")
        cache = KVCache(
            *[str(source.dtype).removeprefix("torch.")] * 2, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            pages=rows * -(-length // PAGE), page_size=PAGE, sequences=rows, device=source.device,
        )  # fmt: skip
        self.largest: list[torch.Tensor] = []
        self.batch = cache.extend({cache.new(): length for _ in range(rows)})
        embedding = source.vector(f"{builder.root}embed_tokens.weight", "")
        self.h = Embedding(embedding, shape.embedding_scale)(tokens.to(source.device).flatten())
        self.delta, self.post = None, None

    def layer(self, index: int, own: str) -> dict[str, Seen]:
        """Take the hidden states through a layer; own name of each projection -> what it has read."""
        made = self.builder.layer(index, own)
        made.self_attn.layer = 0  # of a cache that serves one layer after another
        parts = {"self_attn": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")}
        found = {
            f"{own}.{part}.{name}": _watch(getattr(getattr(made, part), name)) for part, all_ in parts.items()
            for name in all_
        }  # fmt: skip
        angles = [rotary(positions_of(self.batch)) for rotary in self.builder.rotaries]
        self.h, self.delta = made(self.h, self.delta, self.post, angles, self.batch)
        self.post = made.post_mlp
        self.largest.append(self._largest())
        return found

    def _largest(self) -> torch.Tensor:
        """float32 [2, kv_heads, D]: magnitudes of the layer's keys, as they are stored, and values."""
        held, heads = self.batch.layer(0), self.builder.shape.kv_heads
        made = [[held.dequantize(row, head) for row in range(len(self.batch.sequences))] for head in range(heads)]
        parts = [[torch.stack([x[part].abs().amax(0) for x in rows]).amax(0) for rows in made] for part in (0, 1)]
        return torch.stack([torch.stack(part) for part in parts]).float()

    def static(self, formats: tuple[str, str]) -> tuple[torch.Tensor | None, ...]:
        """float32 [layers, kv_heads, D] scales of keys and values that take the largest ones to the ends of the codes;
        None for formats that have none. For the layers seen so far."""
        largest, made = torch.stack(self.largest).clamp_min(TINY), []
        for part, fmt in enumerate(FORMATS[name] for name in formats):
            end = E4M3_MAX if fmt.storage == "e4m3" else 127.0
            made.append(largest[:, part] / end if fmt.scaling == "static" else None)
        return tuple(made)


def _watch(layer: Dense) -> Seen:
    """From now on what the layer multiplies is noted."""
    seen = Seen(w4ax.ActivationStatistics.empty(layer.in_features, device=layer.weight.device), layer.weight[:0])
    inner = layer.product

    def product(x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        seen.statistics.observe(x)
        pick = torch.linspace(0, len(x) - 1, min(len(x), ROWS)).round().long()
        seen.rows = torch.cat([seen.rows, x[pick.to(x.device)]])[-ROWS:]
        return inner(x, out_dtype)

    layer.product = product  # type: ignore[method-assign]
    return seen
