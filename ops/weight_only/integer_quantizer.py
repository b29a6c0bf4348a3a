"""Quantize a float weight to integers: round to nearest, each group clipped where its squared error is least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.quantizers.rows import best_of, row_chunks
from terrazzo.ops.weight_only.integers import GROUPS, PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

_TINY = 2.0**-120
"""Scales up to here count as 0: their reciprocal is not a float32."""


@dlpack.accepting
def quantize(
    weight: SupportsDLPack,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
    clip_steps: int = 24,
    clip_min: float = 0.5,
    importance: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        importance: float [K], of its error. bias: float [N], kept with the weight.
        group_size, symmetric, scale_dtype, clip_steps, clip_min: see `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    options = dict(symmetric=symmetric, scale_dtype=scale_dtype, clip_steps=clip_steps, clip_min=clip_min)
    facts = dict(group_size=group_size, importance=importance, bias=bias)
    return pack(of_float(QuantizedWeight, weight, **facts, **options), target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
    clip_steps: int = 24,
    clip_min: float = 0.5,
    importance: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
) -> QuantizedWeight:
    """Round to nearest, on the weight's device; codes are for the rounded scale, so the error counted is the real one.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included.
        group_size: 32, 64, 128, or -1 (or K) for one group over all of K.
        symmetric: zero point 8 everywhere (codes - 8 in -8..7), else one integer zero point 0..15 for each group.
        scale_dtype: f16, bf16 or f32; None takes the weight's dtype if that is 16-bit, else f16. Groups whose scale is
            too small for it count as 0 next to larger ones; a weight of nothing else is refused.
        clip_steps: clipping ratios tried, evenly from 1 down to `clip_min`; 1 turns the search off.
        importance: float [K], >= 0: weights of the squared error, the mean square of each input channel; None for 1.
        bias: float [N], kept with the weight.

    Raises:
        ArgumentError: for anything else.
    """
    options = dict(symmetric=symmetric, scale_dtype=scale_dtype, clip_steps=clip_steps, clip_min=clip_min)
    return of_float(QuantizedWeight, weight, group_size=group_size, importance=importance, bias=bias, **options)


def of_float(
    kind: type[QuantizedWeight],
    weight: torch.Tensor,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype | None,
    clip_steps: int,
    clip_min: float,
    importance: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> QuantizedWeight:
    """`quantize_weight` of a canonical form with codes of its bits."""
    import torch

    n, k, group, scale_dtype = _check(weight, group_size, scale_dtype, clip_steps, clip_min)
    if type(symmetric) is not bool:
        raise ArgumentError("symmetric", symmetric, "must be True or False", "pass True for codes without zero points")
    zero = 1 << kind.bits - 1
    groups, share = -(-k // group), weights.importance_of(importance, k, weight.device)
    if share is not None:
        share = torch.nn.functional.pad(share, (0, groups * group - k)).view(groups, group)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=scale_dtype, device=weight.device)
    zeros = torch.empty(n, groups, dtype=torch.uint8, device=weight.device)
    ratios = torch.linspace(1.0, clip_min, clip_steps, dtype=torch.float32, device="cpu").tolist()
    for part in row_chunks(n, 2 * groups * group, weight.device.type):  # 2: the search holds more beside them
        # A padded 0 is exactly representable at any scale: it moves neither the range nor the error of a ragged group.
        w = torch.nn.functional.pad(weight[part].float(), (0, groups * group - k)).view(-1, groups, group)
        q, s, z = _search(w, symmetric, scale_dtype, ratios, share, zero)
        codes[part], scales[part], zeros[part] = q.view(-1, groups * group)[:, :k], s, z
    if not bool(torch.isfinite(scales).all()):
        raise ArgumentError(
            "scale_dtype",
            str(scale_dtype),
            "cannot hold the scale of this weight",
            "scale the weight down" if scale_dtype == torch.float32 else "use torch.float32 or torch.bfloat16",
        )
    facts = torch.finfo(scale_dtype)
    # A scale of few of the smallest steps has fewer bits than a code; beside larger groups, their rounding costs more.
    if not bool((scales >= max(zero * facts.tiny * facts.eps, _TINY)).any()) and bool(weight.any()):
        raise ArgumentError(
            "scale_dtype",
            str(scale_dtype),
            f"is too coarse for the scales of this weight, whose largest magnitude is {float(weight.abs().max()):.3g}",
            "use torch.float32 or torch.bfloat16" if scale_dtype == torch.float16 else "scale the weight up",
        )
    return kind.canonical(codes, scales, None if symmetric else zeros, group_size=group, bias=bias)


def _search(
    w: torch.Tensor,
    symmetric: bool,
    scale_dtype: torch.dtype,
    ratios: list[float],
    share: torch.Tensor | None,
    zero: int,
):
    """Best (codes [R, G, g] uint8, scales [R, G], zeros [R, G]) of float32 w [R, G, g] over the clipping ratios; share
    [G, g] weights errors. zero: of symmetric codes, half of how many there are."""
    import torch

    high = w.amax(-1).clamp_min(0)
    low = w.amin(-1).clamp_max(0)
    # Symmetric: zero - 1 steps reach the largest magnitude on either side; the search finds those below it, too.
    span, levels = (torch.maximum(high, -low), zero - 1.0) if symmetric else (high - low, 2.0 * zero - 1)
    last = 2 * zero - 1

    def tried(ratio: float) -> tuple[torch.Tensor, ...]:
        s = (span * (ratio / levels)).to(scale_dtype)
        s = torch.where(s > _TINY, s, 0.0)  # an all-zero (or underflowing) group: scale 0, codes at the zero point
        z = torch.full_like(span, zero) if symmetric else (-low * ratio * _inverse(s)).round_().clamp_(0, last)
        error = _round(w, s, z, last).sub_(z[..., None]).mul_(s.float()[..., None]).sub_(w).square_()
        return (error if share is None else error.mul_(share)).sum(-1), s, z

    s, z = best_of(map(tried, ratios))
    return _round(w, s, z, last).to(torch.uint8), s, z.to(torch.uint8)


def _inverse(s: torch.Tensor) -> torch.Tensor:
    s = s.float()
    return s.reciprocal().where(s > 0, 0.0)


def _round(w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, last: int) -> torch.Tensor:
    """Codes of w for the scale and zero point of each group, as floats."""
    return (w * _inverse(s)[..., None]).round_().add_(z[..., None]).clamp_(0, last)


def _check(weight, group_size, scale_dtype, clip_steps, clip_min):
    import torch

    n, k = weights.check_matrix(weight)
    group = k if group_size in (-1, k) else group_size
    if type(group_size) is not int or group not in (k, *GROUPS):
        raise ArgumentError("group_size", group_size, f"must be one of {GROUPS}, or -1 for all of K = {k}", "use 128")
    floats = (torch.float16, torch.bfloat16, torch.float32)
    if scale_dtype is None:
        scale_dtype = weight.dtype if weight.dtype in floats[:2] else torch.float16
    if scale_dtype not in floats:
        raise ArgumentError(
            "scale_dtype", str(scale_dtype), f"must be one of {tuple(map(str, floats))}", "use torch.float16"
        )
    weights.check_count("clip_steps", clip_steps, "pass 1 for no search")
    weights.check_share("clip_min", clip_min)
    return n, k, min(group, k), scale_dtype
