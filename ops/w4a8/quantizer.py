"""Quantize a float weight to W4A8: bytes with a scale for each row, then codes with an integer scale for each group.

Level 1 keeps to [-119, 119]: the 8 values left on either side are what rounding at level 2 can add, half of the largest
scale, so that no byte overflows (specs.md D, equation 11; by brute force, 119 is the largest range that is safe).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.quantizers.rows import best_of, divide, row_chunks
from terrazzo.ops.w4a8.format import GROUPS, LARGEST_SCALE, PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

RANGE = 119
"""Largest magnitude of a byte of level 1."""
RULES = ("best2", "nearest", "ceil", "search")
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that "search" tries."""


@dlpack.accepting
def quantize(
    weight: SupportsDLPack,
    *,
    group_size: int = 64,
    rule: str = "best2",
    smooth: SupportsDLPack | None = None,
    importance: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        smooth: positive float [K], of `search_smooth`. importance: float [K], of its error.
        bias: float [N], kept with the weight.
        group_size, rule: see `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    facts = dict(group_size=group_size, rule=rule, smooth=smooth, importance=importance, bias=bias)
    return pack(quantize_weight(weight, **facts), target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    *,
    group_size: int = 64,
    rule: str = "best2",
    smooth: SupportsDLPack | None = None,
    importance: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
) -> QuantizedWeight:
    """Round to nearest at both levels, on the weight's device.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included.
        group_size: 32, 64 or 128.
        rule: scale of a group whose bytes span r: "nearest" round(r / 15), codes clamped to 15 (the paper's rule, which
            omits the clamp); "ceil" ceil(r / 15); "best2" floor or ceil, whichever leaves the smaller squared error;
            "search" the same, of the whole range and of shares of it down to 0.7, around its middle.
        smooth: positive float [K], multiplied into the weight and kept with it: activations are divided by it.
        importance: float [K], >= 0: weights of the squared error that "search" looks at, the mean square of each
            channel of x; None for 1.
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
    if importance is not None and rule != "search":
        raise ArgumentError("importance", "given", f"is not looked at by rule {rule!r}", "use rule='search'")
    groups, share = -(-k // group_size), share_of(importance, k, factor, weight.device, group_size)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.uint8, device=weight.device)
    offsets, channel_scales = torch.empty_like(scales), torch.empty(n, dtype=torch.float32, device=weight.device)
    for part in row_chunks(n, k, weight.device.type):
        s1, values = first_level(smoothed(weight[part], factor))
        codes[part], scales[part], offsets[part] = second_level(values, group_size, rule, share)
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
    values: torch.Tensor, group_size: int, rule: str = "best2", share: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [R, K], scales uint8 [R, G], offsets uint8 [R, G]) of bytes [R, K] given as float32 integers; share
    [G, g] weights the errors of "search"."""
    import torch

    rows, k = values.shape
    groups = -(-k // group_size)
    short = groups * group_size - k
    if short:  # repeat the last column: neither the range nor the choice of the scale's rule may see padding
        values = torch.cat([values, values[:, -1:].expand(rows, short)], dim=1)
    v = values.view(rows, groups, group_size)
    if rule == "search":
        codes, scale, low = _searched(v, _counted(group_size * groups, k, v.device).view(groups, -1), share)
        return codes.to(torch.uint8).view(rows, -1)[:, :k], scale.to(torch.uint8), (low + 128).to(torch.uint8)
    low = v.amin(-1, keepdim=True)
    v = v - low
    steps = divide(v.amax(-1, keepdim=True), 15)
    if rule == "nearest":
        scale = (steps + 0.5).floor_().clamp_(1, LARGEST_SCALE)
    elif rule == "ceil":
        scale = steps.ceil().clamp_(1, LARGEST_SCALE)
    else:
        below, above = steps.floor().clamp_(1, LARGEST_SCALE), steps.ceil().clamp_(1, LARGEST_SCALE)
        weight = _counted(group_size * groups, k, v.device)
        errors = [((_round(v, s) * s - v).square_() * weight.view(groups, group_size)).sum(-1) for s in (below, above)]
        scale = torch.where((errors[0] < errors[1])[..., None], below, above)
    codes = _round(v, scale).to(torch.uint8).view(rows, -1)[:, :k]
    return codes, scale[..., 0].to(torch.uint8), (low[..., 0] + 128).to(torch.uint8)


def _counted(padded: int, k: int, device: torch.device) -> torch.Tensor:
    """float32 [padded]: 1, and 0 after the k-th."""
    import torch

    weight = torch.ones(padded, dtype=torch.float32, device=device)
    weight[k:] = 0
    return weight


def _searched(
    v: torch.Tensor, counted: torch.Tensor, share: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [R, G, g], scales [R, G], lowest bytes [R, G]) with the least error over CLIPS and both roundings.

    A byte is at most half a scale above its value, or the lowest one, so that none overflows, as without clipping.
    """
    low, high = v.amin(-1, keepdim=True), v.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    weight = counted if share is None else counted * share

    def tried() -> Iterator[tuple[torch.Tensor, ...]]:
        for clip in CLIPS:
            bottom = (middle - half * clip + 0.5).floor_()
            steps = divide(2 * half * clip, 15)
            for scale in (steps.floor().clamp_(1, LARGEST_SCALE), steps.ceil().clamp_(1, LARGEST_SCALE)):
                error = (_round(v - bottom, scale) * scale + bottom - v).square_() * weight
                yield error.sum(-1, keepdim=True), scale, bottom

    scale, bottom = best_of(tried())
    return _round(v - bottom, scale), scale[..., 0], bottom[..., 0]


def _round(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """round half up(v / scale) in 0..15: the quotients of small integers are rounded right in float32."""
    return (v / scale).add_(0.5).floor_().clamp_(0, 15)


def share_of(
    importance: torch.Tensor | None, k: int, smooth: torch.Tensor | None, device: torch.device, group_size: int
) -> torch.Tensor | None:
    """float32 [G, g]: the importance of channels of x / smooth, zeros after the last one."""
    import torch

    share = weights.importance_of(importance, k, device)
    if share is None:
        return None
    share = share if smooth is None else share / smooth.square()
    return torch.nn.functional.pad(share, (0, -k % group_size)).view(-1, group_size)


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
