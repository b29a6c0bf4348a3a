"""`torch.ops.terrazzo.w4a8_gemm` and its like: the operators as torch.compile, export and fake tensors see them."""

from __future__ import annotations

from math import prod

import torch
from terrazzo.ops import launching
from terrazzo.ops.call.linear import calls_of
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a8 import mxfp4_format
from terrazzo.ops.w4a8.activations import QuantizedActivations, padded
from terrazzo.ops.w4a8.format import PackedWeight


def quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, eps: float, target: object,
    codes: str = "int8",
) -> QuantizedActivations:  # fmt: skip
    """`quantize_activations` as one opaque node of a graph."""
    arch = "" if target is None else str(getattr(target, "arch", target))
    if codes == "e4m3":
        q, scales = torch.ops.terrazzo.w4a8_fp8_quantize(x, smooth, rms_weight, eps, arch)
        return QuantizedActivations(q, scales, None, tuple(x.shape))
    q, scales, sums = torch.ops.terrazzo.w4a8_quantize(x, smooth, rms_weight, eps, arch)
    return QuantizedActivations(q, scales, sums, tuple(x.shape))


def call(
    x: torch.Tensor | QuantizedActivations,
    w: PackedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    dequantization: str,
    pipeline: str,
) -> torch.Tensor:
    """`gemm` as one opaque node of a graph (two, if x must be quantized first); see `terrazzo.ops.w4a8.gemm`."""
    if not isinstance(x, QuantizedActivations):
        launching.check_last(x, w.k)
        out_dtype = out_dtype or x.dtype
        x = quantize(x, w.smooth, None, 0.0, "sm_80" if w.target == "sm_80" else None, w.ACTIVATIONS)
    out_dtype = out_dtype or torch.float16
    if bias is None and w.bias is not None and out_dtype != torch.int32:
        bias = w.bias
    fields = (w.words, w.channel_scales, bias, w.n, w.k, w.group_size, w.layout, w.target or "", out_dtype)
    if w.ACTIVATIONS == "e4m3":
        y = torch.ops.terrazzo.w4a8_fp8_gemm(x.q, x.scales, *fields, pipeline)
    else:
        y = torch.ops.terrazzo.w4a8_gemm(x.q, x.scales, x.row_sums, *fields, dequantization, pipeline)
    return y.view(*x.shape[:-1], w.n)


@torch.library.custom_op("terrazzo::w4a8_quantize", mutates_args=())
def w4a8_quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, eps: float, target: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [M, K16], scales [M], row sums [M] of x [..., K]."""
    from terrazzo.ops.w4a8 import activations, reference

    if not x.is_cuda:
        activations.check_dtype(x)
        activations.check_vectors(smooth, rms_weight, x.shape[-1], x.device)
        q, scales, sums = reference.quantize_activations(x.reshape(-1, x.shape[-1]), smooth, rms_weight, eps)
        return torch.nn.functional.pad(q, (0, padded(x.shape[-1]) - x.shape[-1])), scales, sums
    made = activations.run(x, smooth, rms_weight, eps, None, target or None)
    return made.q, made.scales, made.row_sums


@w4a8_quantize.register_fake
def _(x, smooth, rms_weight, eps, target):
    m = prod(x.shape[:-1])
    make = lambda *shape, dtype: x.new_empty(shape, dtype=dtype)
    return make(m, padded(x.shape[-1]), dtype=torch.int8), make(m, dtype=torch.float32), make(m, dtype=torch.int32)


@torch.library.custom_op("terrazzo::w4a8_fp8_quantize", mutates_args=())
def w4a8_fp8_quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, eps: float, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q float8_e4m3fn [M, K16], scales [M] of x [..., K]."""
    from terrazzo.ops.w4a8 import activations, fp8_reference

    if not x.is_cuda:
        activations.check_dtype(x)
        activations.check_vectors(smooth, rms_weight, x.shape[-1], x.device)
        q, scales = fp8_reference.quantize_activations(x.reshape(-1, x.shape[-1]), smooth, rms_weight, eps)
        rest = q.new_zeros(len(q), padded(x.shape[-1]) - x.shape[-1])
        return torch.cat([q, rest], dim=1), scales
    made = activations.run(x, smooth, rms_weight, eps, None, target or None, "e4m3")
    return made.q, made.scales


@w4a8_fp8_quantize.register_fake
def _(x, smooth, rms_weight, eps, target):
    m = prod(x.shape[:-1])
    q = x.new_empty((m, padded(x.shape[-1])), dtype=torch.float8_e4m3fn)
    return q, x.new_empty(m, dtype=torch.float32)


@torch.library.custom_op("terrazzo::w4a8_fp8_gemm", mutates_args=())
def w4a8_fp8_gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    layout: str,
    target: str,
    out_dtype: torch.dtype,
    pipeline: str,
) -> torch.Tensor:
    """y [M, n] from e4m3 activations [M, k] and the fields of an fp8.PackedWeight, or one of mxfp4_fp8."""
    from terrazzo.ops.w4a8 import fp8_reference

    w = mxfp4_format.of_e4m3(layout)(words, channel_scales, n, k, group_size, layout, None, None, target or None)
    if not q.is_cuda:
        return fp8_reference.gemm(q[:, :k], scales, w, bias).to(out_dtype)
    x = QuantizedActivations(q, scales, None, (q.shape[0], k))
    return calls_of("w4a8").run(x, q, w, bias, None, out_dtype, ("auto", pipeline))


@w4a8_fp8_gemm.register_fake
def _(q, scales, words, channel_scales, bias, n, k, group_size, layout, target, out_dtype, pipeline):
    return q.new_empty((q.shape[0], n), dtype=out_dtype)


@torch.library.custom_op("terrazzo::w4a8_gemm", mutates_args=())
def w4a8_gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    row_sums: torch.Tensor,
    words: torch.Tensor,
    channel_scales: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    layout: str,
    target: str,
    out_dtype: torch.dtype,
    dequantization: str,
    pipeline: str,
) -> torch.Tensor:
    """y [M, n] from quantized activations [M, k] and the fields of a PackedWeight."""
    from terrazzo.ops.w4a8 import reference

    w = PackedWeight(words, channel_scales, n, k, group_size, layout, None, None, target or None)
    if not q.is_cuda:
        return reference.forward(q[:, :k], scales, w, bias, out_dtype)
    x = QuantizedActivations(q, scales, row_sums, (q.shape[0], k))
    return calls_of("w4a8").run(x, q, w, bias, None, out_dtype, (dequantization, pipeline))


@w4a8_gemm.register_fake
def _(q, scales, row_sums, words, channel_scales, bias, n, k, group_size, layout, target, out_dtype, dequantization,
      pipeline):  # fmt: skip
    return q.new_empty((q.shape[0], n), dtype=out_dtype)


def call_grouped(
    x: torch.Tensor | QuantizedActivations,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    dequantization: str,
) -> torch.Tensor:
    """`grouped_gemm` as one opaque node of a graph (two, if x must be quantized first)."""
    s = w.stacked
    if not isinstance(x, QuantizedActivations):
        out_dtype = out_dtype or x.dtype
        x = quantize(x, s.smooth, None, 0.0, None, s.ACTIVATIONS)
    out_dtype = out_dtype or torch.float16
    if bias is None and s.bias is not None and out_dtype != torch.int32:
        bias = s.bias
    fields = (s.words, s.channel_scales, expert_offsets, bias, s.n, s.k, s.group_size, s.layout, s.target or "")
    if s.ACTIVATIONS == "e4m3":
        return torch.ops.terrazzo.w4a8_fp8_grouped_gemm(x.q, x.scales, *fields, out_dtype)
    return torch.ops.terrazzo.w4a8_grouped_gemm(x.q, x.scales, x.row_sums, *fields, out_dtype, dequantization)


@torch.library.custom_op("terrazzo::w4a8_grouped_gemm", mutates_args=())
def w4a8_grouped_gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    row_sums: torch.Tensor,
    words: torch.Tensor,
    channel_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    layout: str,
    target: str,
    out_dtype: torch.dtype,
    dequantization: str,
) -> torch.Tensor:
    """y [M, n] from quantized activations [M, k] sorted by expert and the fields of a GroupedWeight."""
    from terrazzo.ops.w4a8 import reference

    w = GroupedWeight(PackedWeight(words, channel_scales, n, k, group_size, layout, None, None, target or None))
    if not q.is_cuda:
        calls_of("w4a8").check_call(
            (len(q), k), q.device, w, expert_offsets, bias, None, out_dtype, (dequantization, "imfp")
        )
        rows = torch.arange(len(q), device=q.device)
        product = lambda at, one, b: reference.forward(q[at, :k], scales[at], one, b, out_dtype)
        return w.reference(product, rows, expert_offsets, bias)
    x = QuantizedActivations(q, scales, row_sums, (q.shape[0], k))
    return calls_of("w4a8").run_experts(x, q, w, expert_offsets, bias, None, out_dtype, (dequantization, "imfp"))


@w4a8_grouped_gemm.register_fake
def _(q, scales, row_sums, words, channel_scales, expert_offsets, bias, n, k, group_size, layout, target, out_dtype,
      dequantization):  # fmt: skip
    return q.new_empty((q.shape[0], n), dtype=out_dtype)


@torch.library.custom_op("terrazzo::w4a8_fp8_grouped_gemm", mutates_args=())
def w4a8_fp8_grouped_gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    channel_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    layout: str,
    target: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y [M, n] from e4m3 activations [M, k] sorted by expert and the fields of a GroupedWeight of `fp8`."""
    from terrazzo.ops.w4a8 import fp8_reference

    stacked = mxfp4_format.of_e4m3(layout)(words, channel_scales, n, k, group_size, layout, None, None, target or None)
    w = GroupedWeight(stacked)
    if not q.is_cuda:
        calls_of("w4a8").check_call((len(q), k), q.device, w, expert_offsets, bias, None, out_dtype, ("auto", "imfp"))
        rows = torch.arange(len(q), device=q.device)
        product = lambda at, one, b: fp8_reference.gemm(q[at, :k], scales[at], one, b).to(out_dtype)
        return w.reference(product, rows, expert_offsets, bias)
    x = QuantizedActivations(q, scales, None, (q.shape[0], k))
    return calls_of("w4a8").run_experts(x, q, w, expert_offsets, bias, None, out_dtype, ("auto", "imfp"))


@w4a8_fp8_grouped_gemm.register_fake
def _(q, scales, words, channel_scales, expert_offsets, bias, n, k, group_size, layout, target, out_dtype):
    return q.new_empty((q.shape[0], n), dtype=out_dtype)
