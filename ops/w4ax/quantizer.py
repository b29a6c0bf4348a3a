"""Quantize a float weight to s4 with a scale for each output channel and block of 128 input channels.

Two-level scales (the default) are a channel's scale times an integer 1..16, see format.py; the paper leaves them open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.quantizers.rows import best_of, divide, row_chunks
from terrazzo.ops.w4ax.fmpq import BLOCK, BlockPlan
from terrazzo.ops.w4ax.format import LARGEST_MULTIPLIER, SCALES, PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

QMAX = 7
"""Largest code that the quantizer makes; the format stores -8 too."""
CLIP_STEPS = 16
SMALLEST_CLIP = 0.6


@dlpack.accepting
def quantize(
    weight: SupportsDLPack,
    plan: BlockPlan,
    *,
    importance: SupportsDLPack | None = None,
    folded: bool = False,
    bias: SupportsDLPack | None = None,
    scales: str = SCALES[0],
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite, columns in the order of the input; it is quantized where it lies.
        importance: float [K], of its error. bias: float [N], kept with the weight.
        plan, folded, scales: see `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    made = quantize_weight(weight, plan, importance=importance, folded=folded, bias=bias, scales=scales)
    return pack(made, target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    plan: BlockPlan,
    *,
    importance: SupportsDLPack | None = None,
    clip_steps: int = CLIP_STEPS,
    smallest_clip: float = SMALLEST_CLIP,
    folded: bool = False,
    bias: SupportsDLPack | None = None,
    scales: str = SCALES[0],
) -> QuantizedWeight:
    """Round to nearest, symmetric, with a searched clipping of each block of a row, on the weight's device.

    A block's scale is bfloat16(clip * max |w| / 7); of `clip_steps` values of clip from 1 down to `smallest_clip`, the
    one with the least squared error wins. Two-level: the channel's scale is bfloat16(max |w| / 7 / 16) of its row; of
    the `clip_steps` multipliers from the first that covers the block down, none below `smallest_clip` of it, that one.

    Args:
        weight: float [N, K], finite, columns in the order of the input.
        plan: of the layer's input, see `plan_blocks`; its order is put on the columns.
        importance: float [K], >= 0: weights of the squared error, `ActivationStatistics.mean_square`; None for 1.
        clip_steps: 1 keeps the maximum.
        folded: activations arrive in the plan's order (see `fold`), so the weight keeps no permutation.
        bias: float [N], kept with the weight.
        scales: "two_level" or "block", a scale of its own for each block (COMET's form, as specs.md E.1 reads it).

    Raises:
        ArgumentError: for anything that does not fit.
    """
    import torch

    importance = _check(weight, plan, importance, clip_steps, smallest_clip)
    if scales not in SCALES:
        raise ArgumentError("scales", scales, f"must be one of {SCALES}", f"use {SCALES[0]!r}")
    kept = plan.folded() if folded else plan
    n, k = weight.shape
    codes = torch.empty(n, plan.padded, dtype=torch.int8, device=weight.device)
    f32 = dict(dtype=torch.float32, device=weight.device)
    found = torch.empty(n, plan.blocks, **f32)
    channel = torch.empty(n, **f32) if scales == "two_level" else None
    share = None if importance is None else plan.arrange(importance).view(-1, BLOCK)
    for part in row_chunks(n, k, weight.device.type):
        w = plan.arrange(weight[part].float()).view(-1, plan.blocks, BLOCK)
        if channel is None:
            codes[part], found[part] = _blocks(w, share, clip_steps, smallest_clip)
        else:
            codes[part], found[part], channel[part] = _two_level(w, share, clip_steps, smallest_clip)
    facts = dict(k=k, blocks8=plan.blocks8, permutation=kept.permutation, bias=bias, channel_scales=channel)
    return QuantizedWeight.canonical(codes, found, **facts)


def _blocks(
    w: torch.Tensor, share: torch.Tensor | None, steps: int, smallest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, Kp], scales [R, B]) of float32 [R, B, 128]."""
    largest = divide(w.abs().amax(dim=-1), QMAX)
    clips = [1.0 if steps == 1 else 1.0 - (1.0 - smallest) * step / (steps - 1) for step in range(steps)]
    tried = ((largest * clip).bfloat16().float() for clip in clips)
    return _cheapest(w, share, (scale.where(scale > 0, 1.0) for scale in tried))


def _two_level(
    w: torch.Tensor, share: torch.Tensor | None, steps: int, smallest: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [R, Kp], scales [R, B], channel scales [R]) of float32 [R, B, 128]."""
    largest = divide(w.abs().amax(dim=-1), QMAX)
    channel = (largest.amax(dim=-1) / LARGEST_MULTIPLIER).bfloat16().float()
    channel = channel.where(channel > 0, 1.0)
    first = (largest / channel[:, None]).ceil().clamp(1, LARGEST_MULTIPLIER)
    last = (first * smallest).ceil()
    steps = min(steps, int(LARGEST_MULTIPLIER * (1 - smallest)) + 1)  # no more than there are
    codes, scales = _cheapest(w, share, ((first - step).maximum(last) * channel[:, None] for step in range(steps)))
    return codes, scales, channel


def _cheapest(
    w: torch.Tensor, share: torch.Tensor | None, tried: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, Kp], scales [R, B]): of the scales tried, the first with the least squared error of its block."""

    def error(scale: torch.Tensor) -> torch.Tensor:
        found = (_round(w, scale) * scale[..., None] - w).square_()
        return (found if share is None else found * share).sum(dim=-1)

    (scales,) = best_of((error(scale), scale) for scale in tried)
    return _round(w, scales).flatten(1), scales


def _round(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (w / scale[..., None]).round_().clamp_(-QMAX, QMAX)


def _check(weight, plan, importance, clip_steps: int, smallest_clip: float) -> torch.Tensor | None:
    """What `quantize_weight` is given; the importance in float32 beside the weight."""
    _, k = weights.check_matrix(weight)
    if not isinstance(plan, BlockPlan) or plan.k != k:
        seen = getattr(plan, "k", type(plan).__name__)
        raise ArgumentError("plan", seen, f"must be a BlockPlan of {k} channels", "use plan_blocks")
    weights.check_count("clip_steps", clip_steps, "pass 1 to keep the maximum")
    weights.check_share("smallest_clip", smallest_clip)
    return weights.importance_of(importance, k, weight.device)
