"""Quantize a float weight, or activations, for W4A8 on e4m3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack
from terrazzo.ops.quantizers.rows import best_of
from terrazzo.ops.w4a8 import entry
from terrazzo.ops.w4a8.activations import QuantizedActivations
from terrazzo.ops.w4a8.format import GROUPS, UNIT_K
from terrazzo.ops.w4a8.fp8_format import PackedWeight, QuantizedWeight, pack, split_scales
from terrazzo.ops.w4a8.quantizer import check_weight, row_chunks, share_of, smoothed

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

DIVISORS = (-8.0, -8.6, -9.4, 7.0, 7.6, 8.4)
"""Candidates: a group's largest value becomes this code, or is cut to -8 or 7."""


def quantize_activations(
    x: SupportsDLPack,
    *,
    smooth: SupportsDLPack | None = None,
    rms_weight: SupportsDLPack | None = None,
    eps: float = 1e-6,
    out: QuantizedActivations | None = None,
) -> QuantizedActivations:
    """`w4a8.quantize_activations` with codes in e4m3, scale max / 448.

    Args:
        x: float16 or bfloat16 [..., K]. smooth: float32 [K]. rms_weight: [K], with `eps`, of an RMSNorm in front.
        out: codes and scales to write to. All as there.

    Raises:
        ArgumentError: as there.
    """
    return entry.quantize_activations(
        x, smooth=smooth, rms_weight=rms_weight, eps=eps, out=out, codes="e4m3"
    )  # fmt: skip


@dlpack.accepting
def quantize(
    weight: SupportsDLPack,
    *,
    group_size: int = 128,
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
        group_size: see `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    made = quantize_weight(weight, group_size=group_size, smooth=smooth, importance=importance, bias=bias)
    return pack(made, target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    *,
    group_size: int = 128,
    smooth: SupportsDLPack | None = None,
    importance: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
) -> QuantizedWeight:
    """Round to nearest with the scale of `DIVISORS` that leaves each group the smallest squared error.

    Scales have the sign that puts a group's largest value on the side of -8, or not, whichever is better; they are
    rounded to what is stored before codes are chosen. On the weight's device.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included.
        group_size: 32, 64, 128, or K for one scale in a row.
        smooth: positive float [K], multiplied into the weight and kept with it: activations are divided by it.
        importance: float [K], >= 0: weights of the squared error, the mean square of each channel of x; None for 1.
        bias: float [N], kept with the weight.

    Raises:
        ArgumentError: for anything else.
    """
    import torch

    n, k, factor = check_weight(weight, smooth)
    if type(group_size) is not int or group_size not in (*GROUPS, k):
        raise ArgumentError("group_size", group_size, f"must be one of {GROUPS}, or K = {k}", "use 128")
    groups, share = -(-k // group_size), share_of(importance, k, factor, weight.device, group_size)
    codes = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.float16, device=weight.device)
    channel_scales = torch.empty(n, dtype=torch.float32, device=weight.device)
    for part in row_chunks(n, k, weight.device.type):
        codes[part], scales[part], channel_scales[part] = _round(smoothed(weight[part], factor), group_size, share)
    if group_size not in GROUPS:
        scales, group_size = scales.expand(n, -(-k // UNIT_K)), UNIT_K
    return QuantizedWeight.canonical(
        codes, scales, channel_scales, group_size=group_size, smooth=factor, bias=bias
    )  # fmt: skip


def _round(
    w: torch.Tensor, group_size: int, share: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes int8 [R, K], factors f16 [R, G], channel scales f32 [R]) of float32 rows; share [G, g] weights errors."""
    import torch

    rows, k = w.shape
    short = -k % group_size
    v = torch.nn.functional.pad(w, (0, short)).view(rows, -1, group_size)
    index = v.abs().argmax(dim=-1, keepdim=True)
    peak = v.gather(-1, index)[..., 0]
    _, channel = split_scales(peak / min(abs(d) for d in DIVISORS))

    def tried(divisor: float) -> tuple[torch.Tensor, ...]:
        factors = (peak / divisor / channel[:, None]).half()
        scale = (factors.float() * channel[:, None])[..., None]
        codes = torch.where(scale == 0, 0, v / scale).round_().clamp_(-8, 7)
        error = (codes * scale - v).square_()
        return (error if share is None else error.mul_(share)).sum(-1), codes, factors

    codes, factors = best_of(map(tried, DIVISORS))
    return codes.to(torch.int8).view(rows, -1)[:, :k], factors, channel
