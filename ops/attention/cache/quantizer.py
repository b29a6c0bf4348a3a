"""Quantize keys and values, and read them back: plain torch, the definition that every kernel is held to (specs.md C).

Every step is one correctly rounded f32 or f16 operation, so that all devices agree on every bit:
zero = f16(min), scale = f16((max - zero) / (2^b - 1)), code = clamp(rint((x - zero) / scale)); scale 0 gives code 0.
A minimum over zeros of both signs counts as +0, whatever their order.

A rotated format stores tokens in another basis: `rotate` takes them there, `encode` stores what is there already,
`decoded` reads it; `quantize` and `dequantize` are these with the way there and back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.attention.cache.layout import QuantizedBlock
from terrazzo.ops.products.kv import CLIP_STEPS, CLIPS, KVFormat, get_format, hadamard_scale

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import SupportsDLPack

F16_MAX, E4M3_MAX = 65504.0, 448.0


@dlpack.accepting
def quantize(x: SupportsDLPack, fmt: str | KVFormat, static: SupportsDLPack | None = None) -> QuantizedBlock:
    """Store x [..., T, D] (f16, bf16 or f32; finite) in a format; a rotated one rotates it first.

    Args:
        fmt: name of `FORMATS`; for channel-wise formats T must be a multiple of the group.
        static: f32 scales that broadcast against [..., T, D], for static formats.

    Raises:
        ArgumentError: x no float tensor, static scales missing, superfluous or of another shape, T no multiple of the
            group.
    """
    import torch

    fmt = get_format(fmt)
    weights.check_floats("x", x, "[..., T, D]", "pass keys or values")
    if x.dim() < 2:
        raise ArgumentError("x", list(x.shape), "must be [..., T, D]", "pass keys or values")
    if (static is not None) != (fmt.static):
        constraint = f"format {fmt} {'needs' if fmt.static else 'takes no'} static scales"
        seen = list(static.shape) if isinstance(static, torch.Tensor) else static
        raise ArgumentError("static", seen, constraint, "see KVFormat")
    if fmt.rotation and (x.shape[-1] < 2 or x.shape[-1] & (x.shape[-1] - 1)):
        constraint = f"format {fmt} rotates a power of two of dimensions"
        raise ArgumentError("x", list(x.shape), constraint, "pass whole heads of 64, 128 or 256 dimensions")
    if static is not None:
        static = weights.as_tensor("static", static)
        if not _broadcasts(tuple(static.shape), tuple(x.shape)):
            constraint = f"must broadcast against {list(x.shape)}"
            raise ArgumentError("static", list(static.shape), constraint, "one scale for each dimension")
    return encode(rotate(x) if fmt.rotation else x, fmt, static)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] times the Hadamard matrix over sqrt(D), float16: sums and differences in f32, for each bit of the
    dimension from the lowest on, then one product with 1 / sqrt(D), then the rounding."""
    x = _butterflies(x.float())
    return (x * hadamard_scale(x.shape[-1])).clamp(-F16_MAX, F16_MAX).half()


def rotated_exactly(x: torch.Tensor) -> torch.Tensor:
    """The same in float64 without the rounding; it is its own inverse."""
    return _butterflies(x.double()) / math.sqrt(x.shape[-1])


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    import torch

    for bit in range(x.shape[-1].bit_length() - 1):
        a, b = x.unflatten(-1, (-1, 2, 1 << bit)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x


def encode(x: torch.Tensor, fmt: KVFormat, static: torch.Tensor | None = None) -> QuantizedBlock:
    """Store x, whose tokens are rotated already where the format's are; see `quantize`."""
    import torch

    if fmt.plain:
        dtype = torch.float16 if fmt.storage == "f16" else torch.bfloat16
        limit = F16_MAX if fmt.storage == "f16" else torch.finfo(torch.bfloat16).max
        return QuantizedBlock(x.float().clamp(-limit, limit).to(dtype).view(torch.int16))
    x = x.float()
    if fmt.static:
        scaled = x / static
        if fmt.storage == "e4m3":
            return QuantizedBlock(scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8))
        return QuantizedBlock((scaled.round().clamp(-127, 127) - fmt.bias).to(torch.uint8))
    if fmt.scaling == "channel":
        if x.shape[-2] % fmt.group:
            constraint = f"its {x.shape[-2]} tokens must be a multiple of the group {fmt.group}"
            raise ArgumentError("x", list(x.shape), constraint, "keep the rest in the residual block")
        groups = x.unflatten(-2, (-1, fmt.group))
        scale, zero = _range(groups, -2, fmt.levels)
        codes = _codes(groups, scale.unsqueeze(-2), zero.unsqueeze(-2), fmt.levels).flatten(-3, -2)
    else:
        scale, zero = _clipped_range(x) if fmt.clip else _range(x, -1, fmt.levels)
        codes = _codes(x, scale.unsqueeze(-1), zero.unsqueeze(-1), fmt.levels)
    return QuantizedBlock(codes, scale, zero)


def _broadcasts(shape: tuple[int, ...], against: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` broadcasts to `against`."""
    return len(shape) <= len(against) and all(a in (1, b) for a, b in zip(shape[::-1], against[::-1]))


def _range(x: torch.Tensor, dim: int, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) in f16 of the values along `dim`."""
    return _parameters(x.amin(dim), x.amax(dim), levels)


def _parameters(low: torch.Tensor, high: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) in f16 of values low .. high."""
    zero = (low.clamp(-F16_MAX, F16_MAX) + 0.0).half()
    scale = (((high - zero.float()) / levels).clamp(0, F16_MAX) + 0.0).half()
    return scale, zero


def _clipped_range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) in f16 of two-bit codes of x [..., D], f16 values: of the ranges `CLIPS` around the middle, the one
    with the least squared error, the widest of equals. Distances from the middle are taken in f16 and count in whole
    steps: their sums are the same in any order. Codes lie at +-c and +-c / 3; what is beyond 2 c / 3 goes to the outer
    ones. Ranges below 2^-9 stay whole.
    """
    import torch

    low, high = x.amin(-1), x.amax(-1)
    middle, half = (low + high) * 0.5, (high - low) * 0.5
    inverse = CLIP_STEPS / half
    inverse = torch.where(inverse <= F16_MAX, inverse, 0.0).half()
    far = (x.half() - middle.half().unsqueeze(-1)).abs() * inverse.unsqueeze(-1)
    far = ((far.clamp(max=CLIP_STEPS) + 1024) - 1024).int()
    total, least, best = far.sum(-1), None, None
    for outer in CLIPS:
        beyond = far > 2 * outer // 3
        count, sum_ = beyond.sum(-1), torch.where(beyond, far, 0).sum(-1)
        error = (outer // 3) ** 2 * (x.shape[-1] - count) + outer**2 * count
        error = error - 2 * (outer // 3 * (total - sum_) + outer * sum_)
        if least is None:
            least, best = error, torch.ones_like(half)
        else:
            best = torch.where((error < least) & (total > 0), outer / CLIP_STEPS, best)
            least = torch.minimum(error, least)
    half = half * best
    whole = best == 1.0
    return _parameters(torch.where(whole, low, middle - half), torch.where(whole, high, middle + half), 3)


def _codes(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    import torch

    scale = scale.float()
    steps = torch.where(scale > 0, (x - zero.float()) / scale, 0.0)
    return steps.round_().clamp_(0, levels).to(torch.uint8)


@dlpack.accepting
def dequantize(q: QuantizedBlock, fmt: str | KVFormat, static: SupportsDLPack | None = None) -> torch.Tensor:
    """The stored values, float64 [..., T, D]: (code + bias) * scale + zero without any rounding, rotated back.

    Args:
        q: what `quantize` gives. fmt: the format, or its name. static: f32 [..., D], scales of static formats.

    Raises:
        ArgumentError: no QuantizedBlock, or one of another format.
    """

    fmt = get_format(fmt)
    if not isinstance(q, QuantizedBlock):
        raise ArgumentError("q", type(q).__name__, "must be a QuantizedBlock", "make one with quantize")
    if (q.scale is None) != (fmt.scaling in ("none", "static")) or (static is None) != (not fmt.static):
        constraint = "must come with the scales of the block, or static ones"
        raise ArgumentError("fmt", str(fmt), constraint, "pass the format and static scales that quantize was given")
    return rotated_exactly(decoded(q, fmt, static)) if fmt.rotation else decoded(q, fmt, static)


def decoded(q: QuantizedBlock, fmt: KVFormat, static: torch.Tensor | None = None) -> torch.Tensor:
    """What is stored, float64 [..., T, D]; of a rotated format, rotated. See `dequantize`."""
    import torch

    if fmt.storage in ("f16", "bf16"):
        return q.codes.view(torch.float16 if fmt.storage == "f16" else torch.bfloat16).double()
    steps = q.codes.view(torch.float8_e4m3fn).double() if fmt.storage == "e4m3" else q.codes.double() + fmt.bias
    if fmt.static:
        return steps * static.double()
    if fmt.scaling == "channel":
        scale, zero = (p.double().repeat_interleave(fmt.group, -2) for p in (q.scale, q.zero))
        return steps * scale + zero
    return steps * q.scale.double().unsqueeze(-1) + q.zero.double().unsqueeze(-1)
