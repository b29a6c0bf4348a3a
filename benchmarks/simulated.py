"""Quantization simulated in a float transformers model: the numbers of the kernels in plain torch products.

`benchmarks.accuracy` sets the kernels beside it, so that what a format costs is told from what a kernel does. Weights
and activations are those that terrazzo.load's layers hold and quantize, dequantized; keys and values pass through
terrazzo.ops.attention.cache.quantizer. Products and sums are float32, layer inputs and outputs have the model's dtype.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from terrazzo.nn import products
from terrazzo.ops.attention.cache import quantizer
from terrazzo.ops.attention.cache.format import kept_in_f16
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.products.kv import get_format
from torch import nn
from torch.nn import functional as F

ATTENTION = "terrazzo_simulated"


class SimulatedLinear(nn.Module):
    """y = x̂ ŵ^T + bias in float32, cast to x's dtype: ŵ dequantized, x̂ quantized as the format does and dequantized.

    Args:
        packed: the weight. rows: its output features that this layer gives; all of them unless given.
        activations: whether x is quantized; False tells what the format's weights cost alone.
    """

    def __init__(self, packed: Any, rows: slice = slice(None), activations: bool = True) -> None:
        super().__init__()
        self.packed, self.activations = packed, activations
        # a weight that was divided by a smooth vector multiplies activations that are divided by it, too
        weight = dequantized(packed) if activations else plain(packed)
        self.register_buffer("weight", weight[rows], persistent=False)
        self.register_buffer("bias", None if packed.bias is None else packed.bias[rows].float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = products.quantize(x, self.packed) if self.activations else x
        seen = seen if isinstance(seen, torch.Tensor) else seen.dequantize().view(*x.shape[:-1], -1)
        return F.linear(seen.float(), self.weight, self.bias).to(x.dtype)


def dequantized(packed: Any) -> torch.Tensor:
    """float32 [N, K] that multiplies the quantized activations: in their order, smooth vectors not divided out."""
    from terrazzo.ops.w4a8 import reference
    from terrazzo.ops.w4ax.reference import BLOCK, arrange

    if getattr(packed, "smooth", None) is not None:
        return reference.dequantize(packed, smoothed=False).float()
    weight = packed.dequantize().float()
    if hasattr(packed, "permutation"):
        return arrange(weight, -(-packed.k // BLOCK), packed.permutation)
    return weight


def plain(packed: Any) -> torch.Tensor:
    """float32 [N, K] that multiplies x itself."""
    weight = packed.dequantize().float()
    smooth = getattr(packed, "smooth", None)
    return weight if smooth is None else weight / smooth.float()


PARTS = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}
"""Our layers of a decoder layer, and transformers' that each one stands for."""


def simulate_linears(model: nn.Module, loaded: Any, activations: bool = True) -> int:
    """Put SimulatedLinears over the weights of `loaded`, the model of terrazzo.load, in the place of each layer that it
    has packed; how many. Layers that one product joins keep what they have in common: W4Ax's plan, a smooth vector.
    `activations` as in SimulatedLinear.
    """
    count = 0
    for theirs, ours in zip(model.model.layers, loaded.decoder.layers, strict=True):
        for block, layers in PARTS.items():
            for own, names in layers.items():
                layer, first = getattr(getattr(ours, block), own), 0
                for name, size in zip(names, getattr(layer, "sizes", (layer.out_features,)), strict=True):
                    made = SimulatedLinear(layer.packed, slice(first, first + size), activations)
                    setattr(getattr(theirs, block), name, made)
                    first, count = first + size, count + 1
    return count


def simulate_cache(model: nn.Module, k_format: str, v_format: str) -> None:
    """Let attention read keys and values as a cache of these formats returns them while tokens are decoded."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, simulated_attention)
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
            module.simulated_cache = (get_format(k_format), get_format(v_format, "values"))


def simulated_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of whole windows [B, H, T, D], token by token: row t reads the cache of tokens 0 .. t.

    The newest and the first tokens are f16 as a KVCache of these formats keeps them; rows that see as many packed
    tokens are computed together. The mask is not looked at.
    """
    k_format, v_format = module.simulated_cache
    ring, sink = kept_in_f16(k_format)
    layout = CacheLayout(k_format.name, v_format.name, query.shape[3], sink)
    block = k_format.group
    length, repeat = query.shape[2], query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    whole = length - length % block if block else length
    packed = [stored(x[:, :, :whole], f) for x, f in ((key, k_format), (value, v_format))]
    fresh = [x.half().float() for x in (key, value)]
    out = torch.empty_like(query)
    for first, end, cut in spans(length, layout, ring):
        at = min(sink, cut)
        parts = ((f[:, :, :at], p[:, :, at:cut], f[:, :, cut:end]) for p, f in zip(packed, fresh))
        k, v = (torch.cat(part, 2) for part in parts)
        q = query[:, :, first:end].float().unflatten(1, (-1, repeat))
        scores = q @ k.unsqueeze(2).transpose(-1, -2) * scale
        own = torch.arange(first, end, device=query.device)[:, None]
        scores.masked_fill_(torch.arange(end, device=query.device)[None] > own, -math.inf)
        out[:, :, first:end] = (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def spans(length: int, layout: CacheLayout, ring: int) -> list[tuple[int, int, int]]:
    """(first row, end, packed tokens) of rows that see as many packed tokens; without a ring every token is packed."""
    if not ring:
        return [(0, length, length)]
    cuts = [layout.packed(row + 1, ring) for row in range(length)]
    edges = [0, *(row for row in range(1, length) if cuts[row] != cuts[row - 1]), length]
    return [(a, b, cuts[a]) for a, b in pairwise(edges)]


def stored(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    """float32: x [B, H, T, D] as the cache returns it."""
    return quantizer.dequantize(quantizer.quantize(x, fmt), fmt).float()
