"""`torch.ops.terrazzo.w8a8_gemm` and its like: W8A8 as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from terrazzo.ops import launching, quantized
from terrazzo.ops.call.linear import calls_of
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations
from terrazzo.ops.w4a8.w8a8 import activations as w8_activations
from terrazzo.ops.w4a8.w8a8 import op as w8_op
from terrazzo.ops.w4a8.w8a8 import reference as w8_reference
from terrazzo.ops.w4a8.w8a8.format import BLOCK, PackedWeight

Activations = QuantizedActivations | BlockQuantizedActivations


def quantize(x: torch.Tensor, w: PackedWeight) -> Activations:
    """`quantize_activations` as one opaque node of a graph."""
    launching.check_last(x, w.k)
    facts = (w.k, w.codes, w.block, w.input_scale, w.input_zero, w.asymmetric, w.target or "", w.ue8m0)
    q, scales, more = torch.ops.terrazzo.w8a8_quantize(x, w.smooth, *facts)
    return _made(q, scales, more, tuple(x.shape), w)


def _made(q: torch.Tensor, scales: torch.Tensor, more: torch.Tensor, shape: tuple[int, ...], w: Any) -> Activations:
    if w.block:
        return BlockQuantizedActivations(q, scales, shape, True)
    zeros = w8_activations.has_zeros(w)
    sums = more if not zeros and not w8_activations.form_of(w) and w.codes == "int8" else None
    return QuantizedActivations(q, scales, sums, shape, more if zeros else None)


def call(
    x: torch.Tensor | Activations, w: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None,
    accumulate: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """`gemm` as one opaque node of a graph (two, if x must be quantized first); see `terrazzo.ops.w8a8.gemm`."""
    if isinstance(x, torch.Tensor):
        out_dtype = out_dtype or x.dtype
        x = quantize(x, w)
    w8_op.check_activations(x, w)
    out_dtype = out_dtype or torch.float16
    if bias is None and w.bias is not None and out_dtype != torch.int32:
        bias = w.bias
    fields = (w.words, w.scales, bias, w.n, w.k, w.codes, w.block, w.layout, w.target or "")
    y = torch.ops.terrazzo.w8a8_gemm(x.q, x.scales, getattr(x, "zeros", None), *fields, out_dtype, accumulate)
    return y.view(*x.shape[:-1], w.n)


def call_grouped(
    x: torch.Tensor | Activations, w: GroupedWeight, expert_offsets: torch.Tensor, bias: torch.Tensor | None,
    out_dtype: torch.dtype | None, accumulate: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """`grouped_gemm` as one opaque node of a graph (two, if x must be quantized first)."""
    s = w.stacked
    if isinstance(x, torch.Tensor):
        out_dtype = out_dtype or x.dtype
        x = quantize(x, s)
    w8_op.check_activations(x, s)
    out_dtype = out_dtype or torch.float16
    if bias is None and s.bias is not None and out_dtype != torch.int32:
        bias = s.bias
    zeros, fields = getattr(x, "zeros", None), (s.n, s.k, s.codes, s.block, s.layout, s.target or "")
    operands = (x.q, x.scales, zeros, s.words, s.scales, expert_offsets, bias)
    return torch.ops.terrazzo.w8a8_grouped_gemm(*operands, *fields, out_dtype, accumulate)


def _weight(
    words: torch.Tensor, scales: torch.Tensor, n: int, k: int, codes: str, block: bool, layout: str, target: str
) -> PackedWeight:
    return PackedWeight(words, scales, n, k, codes, block, layout, target=target or None)


def _activations(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, k: int, block: bool) -> Activations:
    shape = (q.shape[0], k)
    if block:
        return BlockQuantizedActivations(q, scales, shape, True)
    return QuantizedActivations(q, scales, None, shape, zeros)


@torch.library.custom_op("terrazzo::w8a8_quantize", mutates_args=())
def w8a8_quantize(
    x: torch.Tensor,
    smooth: torch.Tensor | None,
    k: int,
    codes: str,
    block: bool,
    input_scale: float | None,
    input_zero: int,
    asymmetric: bool,
    target: str,
    ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [M, K16], scales [M] or [ceil(K / 128), M4], and row sums or zero points int32 [M] ([0]: neither)."""
    none = x.new_empty(0, dtype=torch.int32)
    w = PackedWeight(
        none, none, 1, k, codes, block, "", input_scale, input_zero, asymmetric, smooth, None, target or None, ue8m0
    )
    made = w8_activations.run(x, w)
    more = getattr(made, "zeros", None)
    more = getattr(made, "row_sums", None) if more is None else more
    return made.q, made.scales, none if more is None else more


@w8a8_quantize.register_fake
def _(x, smooth, k, codes, block, input_scale, input_zero, asymmetric, target, ue8m0=False):
    m = prod(x.shape[:-1])
    scales = (-(-k // BLOCK), (m + 3) // 4 * 4) if block else (m,)
    several = codes == "int8" and (asymmetric or input_zero != 0 or input_scale is None)
    return (
        x.new_empty((m, quantized.padded(k)), dtype=getattr(torch, quantized.CODES[codes])),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty(m if several else 0, dtype=torch.int32),
    )


@torch.library.custom_op("terrazzo::w8a8_gemm", mutates_args=())
def w8a8_gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    words: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    codes: str,
    block: bool,
    layout: str,
    target: str,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """y [M, n] from quantized activations [M, K16] and the fields of a w8a8.PackedWeight."""
    w, made = (
        _weight(words, channel_scales, n, k, codes, block, layout, target),
        _activations(q, scales, zeros, k, block),
    )
    if not q.is_cuda:
        w8_op.numerics_of(codes, block, zeros is not None, accumulate)
        return w8_reference.forward(made, w, bias, out_dtype)
    return calls_of("w4a8.w8a8").run(made, q, w, bias, None, out_dtype, accumulate)


@torch.library.custom_op("terrazzo::w8a8_grouped_gemm", mutates_args=())
def w8a8_grouped_gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    words: torch.Tensor,
    channel_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    codes: str,
    block: bool,
    layout: str,
    target: str,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """y [M, n] from quantized activations [M, K16] sorted by expert and the fields of a GroupedWeight."""
    w = GroupedWeight(_weight(words, channel_scales, n, k, codes, block, layout, target))
    x = _activations(q, scales, zeros, k, block)
    if not q.is_cuda:
        calls_of("w4a8.w8a8").check_call((len(q), k), q.device, w, expert_offsets, bias, None, out_dtype, accumulate)
        product = lambda rows, one, b: w8_reference.forward(x.of_tokens(rows), one, b, out_dtype)
        return w.reference(product, torch.arange(len(q)), expert_offsets, bias)
    return calls_of("w4a8.w8a8").run_experts(x, q, w, expert_offsets, bias, None, out_dtype, accumulate)


@w8a8_grouped_gemm.register_fake
def _(q, scales, zeros, words, channel_scales, expert_offsets, bias, n, k, codes, block, layout, target, out_dtype,
      accumulate):  # fmt: skip
    return q.new_empty((q.shape[0], n), dtype=out_dtype)


@w8a8_gemm.register_fake
def _(q, scales, zeros, words, channel_scales, bias, n, k, codes, block, layout, target, out_dtype, accumulate):
    return q.new_empty((q.shape[0], n), dtype=out_dtype)
