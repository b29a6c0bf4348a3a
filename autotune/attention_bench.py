"""Decode attention over a random packed cache: its storage, its oracle on a few heads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from terrazzo.autotune import gemm_bench, measure
from terrazzo.autotune.subjects import Subject
from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache

    Found = tuple[int, slice, torch.Tensor, torch.Tensor]

CHECKED_HEADS = 3
"""kv heads of the first and of the last sequence that are compared with the reference."""


@dataclass(frozen=True)
class Shape:
    """batch x query heads / kv heads x tokens."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Of "8x32/8x32k".

        Raises:
            ArgumentError: something else, or a number in it is 0.
        """
        number = r"(\d{1,9})"
        pattern = f"{number}x{number}/{number}x{number}(k?)"
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        if not found or not all(map(int, found.groups()[:4])):
            constraint = "is no cache of positive numbers"
            raise ArgumentError("cache", text, constraint, "write batch x heads / kv heads x tokens, as 8x32/8x32k")
        b, h, k, n = map(int, found.groups()[:4])
        return Shape(b, h, k, n * (1024 if found.group(5) else 1))

    def __str__(self) -> str:
        size = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"{self.batch}x{self.heads}/{self.kv_heads}x{size}"


def random_cache(
    k_format: str, v_format: str, shape: Shape, head_dim: int, page: int, seed: int = 0, residual: int | None = None
) -> Any:
    """A packed cache of random codes with parameters like those of normal data, made in place.

    Args:
        residual: tokens of the f16 ring; None for what a KVCache of these keys has.
    """
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache, residual_of, residual_words
    from terrazzo.ops.attention.cache.format import kept_in_f16
    from terrazzo.ops.attention.cache.layout import CacheLayout

    layout = CacheLayout(k_format, v_format, head_dim, kept_in_f16(k_format, residual)[1])
    residual = residual_of(layout, residual)
    rng = torch.Generator(gemm_bench.DEVICE).manual_seed(seed)
    per = -(-shape.tokens // page) if page else 1  # the last page or block may be full in part
    count, tokens = shape.batch * per, page or shape.tokens
    blocks = -(-tokens // layout.block_tokens)
    words = torch.empty(count, shape.kv_heads, blocks, layout.block_words, dtype=torch.int32, device=gemm_bench.DEVICE)
    words.random_(-(1 << 31), 1 << 31, generator=rng)
    body = words[..., layout.channel_words :].unflatten(-1, (-1, layout.tile_words))
    for fmt, at, size in ((layout.k, 0, layout.k_words), (layout.v, layout.k_words, layout.v_words)):
        if fmt.scaling == "none":
            dtype = torch.float16 if fmt.storage == "f16" else torch.bfloat16
            for page_words in body[..., at : at + size]:
                values = torch.randn((*page_words.shape[:-1], 2 * size), generator=rng, device=gemm_bench.DEVICE)
                page_words.copy_(values.to(dtype).view(torch.int32))
        elif fmt.storage == "e4m3":
            body[..., at : at + size] &= 0x3F3F3F3F | -0x80000000 | 0x00808080

    def limit(*size: int) -> torch.Tensor:
        """Ends of value ranges of about -3..3."""
        return torch.rand(size, generator=rng, device=gemm_bench.DEVICE) / 2 + 2.5

    token_wise = [f.levels for f in (layout.k, layout.v) if f.scaling == "token"]
    for part in body[..., layout.param_offset :]:
        for i, levels in enumerate(token_wise):
            lanes = part.unflatten(-1, (8, len(token_wise), 2))[..., i, :]
            made = torch.stack([limit(*lanes.shape) * (2 / levels), -limit(*lanes.shape)], -1)
            lanes.copy_(made.half().view(torch.int32).squeeze(-1))
    for part in words[..., : layout.channel_words] if layout.channel_words else ():
        size = (*part.shape[:-1], layout.channel_words)
        part.copy_(torch.cat([limit(*size) * (2 / layout.k.levels), -limit(*size)], -1).half().view(torch.int32))
    static = [
        torch.full((shape.kv_heads, head_dim), 0.03, device=gemm_bench.DEVICE) if f.scaling == "static" else None
        for f in (layout.k, layout.v)
    ]
    ring = None
    if residual:
        size = (shape.batch, shape.kv_heads, 2 * residual_words(layout, residual))
        ring = torch.randn(size, generator=rng, device=gemm_bench.DEVICE).half().view(torch.int32)
    return PackedCache(
        layout, words.reshape(count, shape.kv_heads, -1),
        torch.full((shape.batch,), shape.tokens, dtype=torch.int32, device=gemm_bench.DEVICE), shape.tokens,
        block_table=torch.randperm(count, generator=rng, device=rng.device).int().reshape(-1, per) if page else None,
        page_size=page,
        residual=ring,
        k_static=static[0], v_static=static[1],
    )  # fmt: skip


def expected(q: torch.Tensor, cache: PackedCache) -> list[Found]:
    """(sequence, query heads, output, bound) of a few heads of the first and the last sequence."""
    from terrazzo.ops.attention.decoding import reference

    group, options, found = q.shape[2] // cache.kv_heads, reference.Options(), []
    for b in sorted({0, q.shape[0] - 1}):
        for h in range(0, cache.kv_heads, -(-cache.kv_heads // CHECKED_HEADS)):
            span = slice(h * group, (h + 1) * group)
            rows, (k, v) = q[b, :, span], cache.dequantize(b, h)
            out, _, weights = reference.attend(rows, k, v, options)
            found.append((b, span, out, reference.forward_error_bound(rows, cache, b, h, out, weights, options)))
    return found


def wrong(y: torch.Tensor, found: Sequence[Found]) -> str:
    """What is wrong with an output, or ""; `found` is of `expected`."""
    missing = int(y.isnan().sum())
    if missing:
        return f"{missing} elements of the output are NaN"
    for b, span, out, bound in found:
        problem = measure.check_outputs(y[b, :, span], out, bound)
        if problem:
            return f"sequence {b}, query heads from {span.start}: {problem}"
    return ""


class Decode(Subject):
    """The cache of one batch.

    Args:
        shape: of the batch. q_len: new tokens of each sequence.
    """

    def __init__(
        self, formats: tuple[str, str], shape: Shape, head_dim: int, page: int, q_len: int, dtype: str
    ) -> None:
        self.shape, self.head_dim, self.q_len, self.dtype = shape, head_dim, q_len, dtype
        self.caches = [random_cache(*formats, shape, head_dim, page)]

    def inputs(self, m: int) -> tuple:
        import torch

        rng = torch.Generator(gemm_bench.DEVICE).manual_seed(m)
        return torch.randn(self._size, generator=rng, device=gemm_bench.DEVICE).to(getattr(torch, self.dtype))

    def copies(self, m: int) -> Sequence[Any]:
        from terrazzo.lowering.targets import Target

        first = self.caches[0]
        wanted = measure.copies_beyond_l2(4 * first.pages.numel(), Target.detect().l2_bytes)
        while len(self.caches) < wanted:
            self.caches.append(replace(first, pages=first.pages.clone()))
        return self.caches

    def output(self, m: int) -> torch.Tensor:
        import torch

        return measure.poisoned(self._size, getattr(torch, self.dtype), gemm_bench.DEVICE)

    @property
    def _size(self) -> tuple[int, ...]:
        """Of q and of the output."""
        return self.shape.batch, self.q_len, self.shape.heads, self.head_dim

    def launch(self, given: tuple, copy: PackedCache, out: torch.Tensor) -> None:
        from terrazzo.ops import attention

        attention.decode(given, copy, out=out)

    def expected(self, given: tuple, m: int) -> tuple:
        return expected(given, self.caches[0])

    def wrong(self, out: torch.Tensor, expected: tuple) -> str:
        return wrong(out, expected)


class Prefill(Decode):
    """The cache of one batch whose last `q_len` tokens are new."""

    def launch(self, given: tuple, copy: PackedCache, out: torch.Tensor) -> None:
        from terrazzo.ops import attention

        attention.prefill(given.flatten(0, 1), copy, self._starts(given), self.q_len, out=out.view(-1, *out.shape[2:]))

    def _starts(self, q: torch.Tensor) -> torch.Tensor:
        import torch

        if not hasattr(self, "starts"):
            self.starts = self.q_len * torch.arange(self.shape.batch + 1, dtype=torch.int32, device=q.device)
        return self.starts

    def expected(self, given: tuple, m: int) -> tuple:
        """All of it, in one piece."""
        from terrazzo.ops.attention.prefilling import prefill_reference

        out, _, bound = prefill_reference.prefill(given.flatten(0, 1), self.caches[0], self._starts(given))
        return out.view(given.shape), bound.view(given.shape)

    def wrong(self, out: torch.Tensor, expected: tuple) -> str:
        missing = int(out.isnan().sum())
        return f"{missing} elements of the output are NaN" if missing else measure.check_outputs(out, *expected)
