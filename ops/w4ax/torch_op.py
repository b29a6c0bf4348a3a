"""`torch.ops.terrazzo.w4ax_gemm`, `w4ax_quantize`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from math import prod

import torch
from terrazzo.ops import launching
from terrazzo.ops.w4ax.activations import QuantizedActivations, default_granularity, sizes
from terrazzo.ops.w4ax.format import PackedWeight


def quantize(
    x: torch.Tensor,
    w: PackedWeight,
    rms_weight: torch.Tensor | None,
    eps: float,
    granularity: str,
    static_scales: torch.Tensor | None,
) -> QuantizedActivations:
    """`quantize_activations` as one opaque node of a graph."""
    q4, q8, scales = torch.ops.terrazzo.w4ax_quantize(
        x, rms_weight, eps, granularity, static_scales, *_fields(w), w.permutation
    )
    return QuantizedActivations(q4, q8, scales, tuple(x.shape), w.blocks8, w.order, granularity)


def call(
    x: torch.Tensor | QuantizedActivations, w: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """`gemm` as one opaque node of a graph (two, if x must be quantized first); see `terrazzo.ops.w4ax.gemm`."""
    if not isinstance(x, QuantizedActivations):
        launching.check_last(x, w.k)
        out_dtype = out_dtype or x.dtype
        x = quantize(x, w, None, 0.0, default_granularity(w), None)
    y = torch.ops.terrazzo.w4ax_gemm(
        x.q4, x.q8, x.scales, x.m, x.order, x.granularity, w.bias if bias is None else bias, *_fields(w),
        out_dtype or torch.float16,
    )  # fmt: skip
    return y.view(*x.shape[:-1], w.n)


def _fields(w: PackedWeight) -> tuple:
    return w.words, w.channel_scales, w.n, w.k, w.blocks8, w.layout, w.target, w.order


@torch.library.custom_op("terrazzo::w4ax_quantize", mutates_args=())
def w4ax_quantize(
    x: torch.Tensor,
    rms_weight: torch.Tensor | None,
    eps: float,
    granularity: str,
    static_scales: torch.Tensor | None,
    words: torch.Tensor,
    channel_scales: torch.Tensor | None,
    n: int,
    k: int,
    blocks8: int,
    layout: str,
    target: str,
    order: str,
    permutation: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q4, q8, scales of x [..., K] for the weight with these fields."""
    from terrazzo.ops.w4ax import activations, reference

    w = PackedWeight(words, n, k, blocks8, layout, target, order, permutation, channel_scales=channel_scales)
    if x.is_cuda:
        made = activations.run(x, w, rms_weight, eps, granularity, static_scales)
    else:
        options = dict(rms_weight=rms_weight, eps=eps, granularity=granularity, static_scales=static_scales)
        facts = dict(blocks8=blocks8, permutation=permutation, wide=not w.native)
        made = activations.from_codes(
            *reference.quantize_activations(x.flatten(0, -2), **facts, **options), w, granularity
        )
    return made.q4, made.q8, made.scales


@w4ax_quantize.register_fake
def _(
    x, rms_weight, eps, granularity, static_scales, words, channel_scales, n, k, blocks8, layout, target, order, perm
):
    w = PackedWeight(words, n, k, blocks8, layout, target, channel_scales=channel_scales)
    m, low, high = sizes(prod(x.shape[:-1]), k, blocks8, not w.native)
    make = lambda *shape, dtype: x.new_empty(shape, dtype=dtype)
    return (
        make(m, low, dtype=torch.uint8),
        make(m, high, dtype=torch.int8),
        make(w.blocks, (m + 3) // 4 * 4, dtype=torch.float32),
    )


@torch.library.custom_op("terrazzo::w4ax_gemm", mutates_args=())
def w4ax_gemm(
    q4: torch.Tensor,
    q8: torch.Tensor,
    scales: torch.Tensor,
    m: int,
    x_order: str,
    granularity: str,
    bias: torch.Tensor | None,
    words: torch.Tensor,
    channel_scales: torch.Tensor | None,
    n: int,
    k: int,
    blocks8: int,
    layout: str,
    target: str,
    order: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y [M, n] from quantized activations and the fields of a PackedWeight."""
    from terrazzo.ops.w4ax import op, reference

    w = PackedWeight(words, n, k, blocks8, layout, target, order, channel_scales=channel_scales)
    x = QuantizedActivations(q4, q8, scales, (m, k), blocks8, x_order, granularity)
    if not q8.is_cuda:
        return reference.gemm(x.codes(), x.token_scales(), w, bias).to(out_dtype)
    return op.run(x, w, bias, None, out_dtype)


@w4ax_gemm.register_fake
def _(
    q4,
    q8,
    scales,
    m,
    x_order,
    granularity,
    bias,
    words,
    channel_scales,
    n,
    k,
    blocks8,
    layout,
    target,
    order,
    out_dtype,
):
    return q8.new_empty((m, n), dtype=out_dtype)
