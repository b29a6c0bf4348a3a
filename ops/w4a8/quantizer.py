"""Quantize a float weight to W4A8: bytes with a scale for each row, then codes with an integer scale for each group.

Level 1 keeps to [-119, 119]: the 8 values left on either side are what rounding at level 2 can add, half of the largest
scale, so that no byte overflows (specs.md D, equation 11; by brute force, 119 is the largest range that is safe).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.quantizers.rows import divide, row_chunks
from terrazzo.ops.w4a8.format import GROUPS, LARGEST_SCALE, PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

RANGE = 119
"""Largest magnitude of a byte of level 1."""
RULES = ("best2", "nearest", "ceil")
"""Weights quantized at a time: the CPU's caches, or a few hundred MB of scratch memory on a GPU."""


@dlpack.accepting
def quantize(
    weight: SupportsDLPack,
    *,
    group_size: int = 64,
    rule: str = "best2",
    smooth: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`."""
    return pack(quantize_weight(weight, group_size=group_size, rule=rule, smooth=smooth, bias=bias), target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    *,
    group_size: int = 64,
    rule: str = "best2",
    smooth: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
) -> QuantizedWeight:
    """Round to nearest at both levels, on the weight's device.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included.
        group_size: 32, 64 or 128.
        rule: scale of a group whose bytes span r: "nearest" round(r / 15), codes clamped to 15 (the paper's rule, which
            omits the clamp); "ceil" ceil(r / 15); "best2" floor or ceil, whichever leaves the smaller squared error.
        smooth: positive float [K], multiplied into the weight and kept with it: activations are divided by it.
        bias: float [N], kept with the weight.

    Raises:
        ArgumentError: for anything else.
    """
    import torch

    n, k, factor = check_weight(weight, smooth)
    if type(group_size) is not int or group_size not in GROUPS:
        raise ArgumentError("group_size", group_size, f"must be one of {GROUPS}", "use 64")
    if rule not in RULES:
        raise ArgumentError("rule", rule, f"must be one of {RULES}", "use 'best2'")
    groups = -(-k // group_size)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.uint8, device=weight.device)
    offsets, channel_scales = torch.empty_like(scales), torch.empty(n, dtype=torch.float32, device=weight.device)
    for part in row_chunks(n, k, weight.device.type):
        s1, values = first_level(smoothed(weight[part], factor))
        codes[part], scales[part], offsets[part] = second_level(values, group_size, rule)
        channel_scales[part] = s1
    return QuantizedWeight.canonical(
        codes, scales, offsets, channel_scales, group_size=group_size, smooth=factor, bias=bias
    )


def first_level(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(channel scales f32 [R], bytes f32 [R, K] in [-119, 119]) of float32 rows; a row of zeros gets scale 1."""
    s1 = divide(w.abs().amax(dim=1), RANGE)
    s1 = s1.where(s1 > 0, 1.0)
    return s1, (w / s1[:, None]).round_().clamp_(-RANGE, RANGE)


def second_level(
    values: torch.Tensor, group_size: int, rule: str = "best2"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [R, K], scales uint8 [R, G], offsets uint8 [R, G]) of bytes [R, K] given as float32 integers."""
    import torch

    rows, k = values.shape
    groups = -(-k // group_size)
    short = groups * group_size - k
    if short:  # repeat the last column: neither the range nor the choice of the scale's rule may see padding
        values = torch.cat([values, values[:, -1:].expand(rows, short)], dim=1)
    v = values.view(rows, groups, group_size)
    low = v.amin(-1, keepdim=True)
    v = v - low
    steps = divide(v.amax(-1, keepdim=True), 15)
    if rule == "nearest":
        scale = (steps + 0.5).floor_().clamp_(1, LARGEST_SCALE)
    elif rule == "ceil":
        scale = steps.ceil().clamp_(1, LARGEST_SCALE)
    else:
        below, above = steps.floor().clamp_(1, LARGEST_SCALE), steps.ceil().clamp_(1, LARGEST_SCALE)
        weight = torch.ones(group_size * groups, dtype=torch.float32, device=v.device)
        weight[k:] = 0
        errors = [((_round(v, s) * s - v).square_() * weight.view(groups, group_size)).sum(-1) for s in (below, above)]
        scale = torch.where((errors[0] < errors[1])[..., None], below, above)
    codes = _round(v, scale).to(torch.uint8).view(rows, -1)[:, :k]
    return codes, scale[..., 0].to(torch.uint8), (low[..., 0] + 128).to(torch.uint8)


def _round(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """min(15, round half up(v / scale)): the quotients of small integers are rounded right in float32."""
    return (v / scale).add_(0.5).floor_().clamp_(max=15)


def check_weight(weight: torch.Tensor, smooth: torch.Tensor | None) -> tuple[int, int, torch.Tensor | None]:
    """(N, K, smooth vector in float32 beside the weight) of a float weight to quantize; else an ArgumentError."""
    import torch

    n, k = weights.check_matrix(weight)
    if smooth is None:
        return n, k, None
    given = weights.as_tensor("smooth", smooth, weight.device)
    if tuple(given.shape) != (k,) or given.is_complex():
        seen = f"{given.dtype} {list(given.shape)}"
        raise ArgumentError("smooth", seen, f"must be positive, finite [{k}]", "use search_smooth")
    factor = given.to(torch.float32)
    if not bool(((factor > 0) & factor.isfinite()).all()):
        seen = "zero, negative or not finite"
        raise ArgumentError("smooth", seen, f"must be positive, finite [{k}] in float32", "use search_smooth")
    return n, k, factor


def smoothed(weight: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Rows of a weight times the smooth vector, float32; ArgumentError where that leaves its range."""
    if factor is None:
        return weight.float()
    w = weight.float() * factor
    if not bool(w.isfinite().all()):
        raise ArgumentError("smooth", float(factor.max()), "times the weight must fit float32", "use search_smooth")
    return w
