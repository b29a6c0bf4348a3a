"""The public calls: their arguments, and whether they are launched or become a node of a graph that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.targets import Target
from terrazzo.ops import dlpack, grouped, launching
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes.fp8_problem import CONVERTERS
from terrazzo.ops.w4a8 import activations, op
from terrazzo.ops.w4a8 import grouped as grouped_op
from terrazzo.ops.w4a8.activations import QuantizedActivations

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack


def gemm(
    x: Array | QuantizedActivations,
    w: op.Weight,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    out_dtype: torch.dtype | None = None,
    dequantization: str = "auto",
    pipeline: str = "auto",
) -> Array:
    """y[..., N] = x[..., K] w[N, K]^T + bias, on the current stream; the same bits in every run.

    Args:
        x: quantized activations, or float16 or bfloat16 [..., K] on w's GPU, which are divided by w.smooth and
            quantized first, in one more kernel.
        w: packed weight, of this package (int8 activations) or of `fp8` (e4m3). Its own bias is added unless `bias` is
            given.
        bias: float [N]; added in float32.
        out: contiguous [..., N] of the output dtype, written and returned; no memory of x. M = 0 writes nothing.
        out_dtype: torch.float16, torch.bfloat16, or torch.int32: the sums of products of bytes, without scales or bias,
            bit-exact for every schedule and target (not with e4m3). None takes x's dtype, or float16.
        dequantization: "xor" makes signed bytes, "unsigned" leaves 128 in them and takes it off the sums by the row
            sums of x (K up to 66311); "auto" is xor. Both give the same bits. Weights of `fp8` have one form, "e4m3".
        pipeline: "imfp" (one producer, consumers that dequantize and multiply rows of one tile; wgmma), "multistage"
            (mma.sync behind a ring of cp.async), "small_batch" (mma.sync, 32 tokens for each launch), "auto" by M, size
            and target.

    x, bias and out may be arrays of another library (ops/dlpack.py); the result is then one of x's library, or out.

    Works under torch.compile(fullgraph=True) and, once each M bucket was called, in CUDA graph capture. Calls on
    different streams use different workspaces; two graphs captured on one stream must not be replayed at the same time,
    nor one beside calls on that stream. After a write to w that PyTorch does not count, call `terrazzo.forget(w)`.
    Between calls on 16-bit activations each thread keeps memory for their codes, up to 8 MiB for each stream. There is
    no gradient: x that requires one is refused unless gradients are off.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    import torch

    if not isinstance(w, op.WEIGHTS):
        raise launching.not_packed(w, "w4a8")
    held = x.q if isinstance(x, QuantizedActivations) else x
    if (
        torch.compiler.is_compiling()
        or type(held) is not torch.Tensor
        or held.layout is not torch.strided
        or held.is_nested
    ):
        if dlpack.is_foreign(held):
            return dlpack.call(gemm, locals())
        launching.check_tensor(held, "x", "[..., {}], or QuantizedActivations of w4a8", w.k)
        if launching.is_traced(held):
            from terrazzo.ops.w4a8 import torch_op

            launching.check_no_grad(held, "gemm")
            if held is not x:
                op.check_codes(x, w)
            op.check_types(out_dtype or torch.float16, dequantization=dequantization, pipeline=pipeline)
            raw = str(out_dtype or (held.dtype if held is x else torch.float16)).removeprefix("torch.")
            if op.dequantization_of(w, dequantization) in CONVERTERS:
                fp8_problem.check_out_dtype(raw)
            op.check_choices(w.k, raw, dequantization, pipeline)
            if bias is not None:
                launching.check_bias(bias, w.n, None, held.device)
                launching.check_sums_bias(out_dtype)
            return launching.copy_out(out, torch_op.call(x, w, bias, out_dtype, dequantization, pipeline))
    if held is x:
        if x.requires_grad:
            launching.check_no_grad(x, "gemm")
        if not x.shape or x.shape[-1] != w.k:
            launching.check_last(x, w.k)
        at, out_dtype = "sm_80" if w.target == "sm_80" else None, out_dtype or held.dtype
        launching.check_written(x, w.n, bias, out, out_dtype)
        x = activations.run(x, w.smooth, None, 0.0, None, at, w.ACTIVATIONS, scratch=True)
    return op.run(x, w, bias, out, out_dtype or torch.float16, dequantization, pipeline)


def grouped_gemm(
    x: Array | QuantizedActivations,
    w: GroupedWeight,
    expert_offsets: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    out_dtype: torch.dtype | None = None,
    dequantization: str = "auto",
) -> Array:
    """y[i] = x[i] w[e]^T + bias[e] for the rows i of expert e, offsets[e] <= i < offsets[e + 1]; on the current stream.

    One launch of one CTA for each SM, whatever the offsets hold: the tiles are partitioned on the device, empty experts
    cost nothing, and nothing waits for the GPU. The same bits in every run; on int8 as `gemm` for each expert, on e4m3
    inside the same error bound.

    Args:
        x: [M, K], tokens sorted by expert (`ops.moe.sort_by_expert`): quantized activations, or float16 or bfloat16,
            which are divided by w's smooth vector and quantized first.
        w: `GroupedWeight.stack` of the experts' packed weights, of this package (int8 activations) or of `fp8` (e4m3).
            Their own biases are added unless `bias` is given.
        expert_offsets: int32 [E + 1] on the GPU, ascending; rows outside of offsets[0] .. offsets[E] are not written.
        bias: float [E, N]; added in float32.
        out: contiguous [M, N] of the output dtype, written and returned; no memory of x.
        out_dtype, dequantization: see `gemm`.

    Raises:
        ArgumentError: an operand that does not fit, or e4m3 on a GPU without it.
        LayoutMismatchError, TargetError, CaptureError, ToolchainError, CompileError: see `gemm`.
    """
    import torch

    grouped.check_kind(w, op.WEIGHTS, "w4a8")
    held = x.q if isinstance(x, QuantizedActivations) else x
    if dlpack.is_foreign(held):
        return dlpack.call(grouped_gemm, locals())
    if launching.is_traced(held):
        from terrazzo.ops.w4a8 import torch_op

        grouped.check_traced(x, held, w, expert_offsets, bias)
        if held is not x:
            op.check_codes(x, w.stacked)
        if not torch.compiler.is_compiling():
            dtype = out_dtype or (held.dtype if held is x else torch.float16)
            grouped_op.check_choices(w, bias, dtype, dequantization)
        return grouped.copy_out(
            out, torch_op.call_grouped(x, w, expert_offsets, bias, out_dtype, dequantization), expert_offsets
        )
    launching.check_tensor(held, "x", "[M, {}], or QuantizedActivations of w4a8", w.k)
    if held is x:
        launching.check_no_grad(x, "grouped_gemm")
        grouped.check_dtype(x)
        out_dtype = out_dtype or x.dtype
        grouped_op.check(x.shape, x.device, w, expert_offsets, bias, out, out_dtype, dequantization)
        x = activations.run(x, w.stacked.smooth, None, 0.0, None, None, w.stacked.ACTIVATIONS)
        return grouped_op.multiply(x, w, expert_offsets, bias, out, out_dtype, dequantization)
    return grouped_op.run(x, w, expert_offsets, bias, out, out_dtype or torch.float16, dequantization)


def quantize_activations(
    x: SupportsDLPack,
    *,
    smooth: SupportsDLPack | None = None,
    rms_weight: SupportsDLPack | None = None,
    eps: float = 1e-6,
    out: QuantizedActivations | None = None,
    target: Target | str | None = None,
    codes: str = "int8",
) -> QuantizedActivations:
    """Quantize activations to bytes with a scale for each token, on the current stream, in one kernel.

    With `rms_weight`, RMSNorm stands in front: x / sqrt(mean(x^2) + eps) * rms_weight, without rounding in between.
    `reference.quantize_activations` (`fp8_reference` for e4m3) defines the codes to the bit, and without `rms_weight`
    the scales too.

    Args:
        x: float16 or bfloat16 [..., K] on a CUDA device, K up to 65536; leading dimensions may be strided (then they
            are copied).
        smooth: float [K]; x is multiplied with its float32 reciprocal. Pass the weight's own, `w.smooth`.
        rms_weight: float [K]. Of both a float32 form is kept until PyTorch counts a write to them; after another one
            (through `.data`, say), call `terrazzo.forget(rms_weight)`.
        out: written and returned instead of new tensors.
        target: "sm_80" runs the program of that target on a newer GPU.
        codes: "int8", or "e4m3" for weights of `fp8` (sm_89, sm_90a).

    Raises:
        ArgumentError: an operand that does not fit. CaptureError: a kernel that was never launched is met during CUDA
            graph capture. ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    import torch

    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
        if dlpack.is_foreign(x):
            return dlpack.call(quantize_activations, locals())
        launching.check_tensor(x, "x", "[..., K]")
        if launching.is_traced(x):
            from terrazzo.ops.w4a8 import torch_op

            launching.check_no_grad(x, "quantize_activations")
            for name, vector in (("smooth", smooth), ("rms_weight", rms_weight)):
                if vector is not None:
                    launching.check_tensor(vector, name, "float [{}]", x.shape[-1] if x.ndim else "K")
            activations.check_codes(codes)
            found = torch_op.quantize(x, smooth, rms_weight, eps, target, codes)
            return found if out is None else activations.copy_into(out, found)
    return activations.run(
        x, smooth, rms_weight, eps, out, None if target is None else Target.parse(target).arch, codes
    )
