"""The public calls: their arguments, and whether they are launched or become a node of a graph that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import dlpack, grouped, launching
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4ax import activations, op
from terrazzo.ops.w4ax import grouped as grouped_op
from terrazzo.ops.w4ax.activations import QuantizedActivations
from terrazzo.ops.w4ax.format import PackedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack


def gemm(
    x: Array | QuantizedActivations,
    w: PackedWeight,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    out_dtype: torch.dtype | None = None,
) -> Array:
    """y[..., N] = x[..., K] w[N, K]^T + bias, on the current stream; the same bits in every run.

    On sm_90a both kinds of blocks run on int8 tensor cores: the result is that of INT4 and INT8 blocks, the speed that
    of W4A8.

    Args:
        x: activations quantized for this weight, or float16 or bfloat16 [..., K] on w's GPU, which are quantized first,
            with scales of the weight's form, in one more kernel.
        w: packed weight. Its own bias is added unless `bias` is given.
        bias: float [N]; added in float32.
        out: contiguous [..., N] of the output dtype, written and returned; no memory of x. M = 0 writes nothing.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32. None takes x's dtype, or float16.

    x, bias and out may be arrays of another library (ops/dlpack.py); the result is then one of x's library, or out.

    Works under torch.compile(fullgraph=True) and, once each M was called, in CUDA graph capture. Calls on different
    streams use different workspaces; two graphs captured on one stream must not be replayed at the same time, nor one
    beside calls on that stream. After a write to w that PyTorch does not count, call `terrazzo.forget(w)`. There is no
    gradient: x that requires one is refused unless gradients are off.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    import torch

    if not isinstance(w, PackedWeight):
        raise launching.not_packed(w, "w4ax")
    held = x.q8 if isinstance(x, QuantizedActivations) else x
    if (
        torch.compiler.is_compiling()
        or type(held) is not torch.Tensor
        or held.layout is not torch.strided
        or held.is_nested
    ):
        if dlpack.is_foreign(held):
            return dlpack.call(gemm, locals())
        launching.check_tensor(held, "x", "[..., {}], or QuantizedActivations of w4ax", w.k)
        if launching.is_traced(held):
            from terrazzo.ops.w4ax import torch_op

            launching.check_no_grad(held, "gemm")
            if bias is not None:
                launching.check_bias(bias, w.n, None, held.device)
            return launching.copy_out(out, torch_op.call(x, w, bias, out_dtype))
    if held is x:
        out_dtype = out_dtype or held.dtype
        if not x.shape or x.shape[-1] != w.k:
            launching.check_last(x, w.k)
        launching.check_written(x, w.n, bias, out, out_dtype)
        x = activations.run(x, w, None, 0.0, None, None)
        return op.multiply(x, w, bias, out, out_dtype)
    return op.run(x, w, bias, out, out_dtype or torch.float16)


def grouped_gemm(
    x: Array | QuantizedActivations,
    w: GroupedWeight,
    expert_offsets: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    out_dtype: torch.dtype | None = None,
) -> Array:
    """y[i] = x[i] w[e]^T + bias[e] for every row i of expert e, in one launch; rows are sorted by expert.

    The result of a row is that of `gemm` with its expert's weight, inside the same error bound. Like `gemm` it works
    under torch.compile and in CUDA graph capture.

    Args:
        x: activations [M, K] quantized for `w`, whose experts share one plan, or float16 or bfloat16, which are
            quantized first.
        w: packed experts; their own bias is added unless `bias` is given.
        expert_offsets: int32 [E + 1] on x's device, ascending: rows offsets[e] .. offsets[e + 1] - 1 are expert e's.
            They are not read on the host. Rows of no expert are not written; values outside 0..M count as 0 and M.
        bias: float [E, N]. out: contiguous [M, N] of the output dtype, written and returned; no memory of x.
        out_dtype: see `gemm`.

    Raises:
        ArgumentError: an operand that does not fit, or a GPU without warpgroup instructions.
        LayoutMismatchError, TargetError, CaptureError, ToolchainError, CompileError: see `gemm`.
    """
    import torch

    grouped.check_kind(w, PackedWeight, "w4ax")
    held = x.q8 if isinstance(x, QuantizedActivations) else x
    if dlpack.is_foreign(held):
        return dlpack.call(grouped_gemm, locals())
    if launching.is_traced(held):
        from terrazzo.ops.w4ax import torch_op

        grouped.check_traced(x, held, w, expert_offsets, bias)
        if not torch.compiler.is_compiling():
            grouped_op.check_out_dtype(out_dtype or (held.dtype if held is x else torch.float16))
        return grouped.copy_out(out, torch_op.call_grouped(x, w, expert_offsets, bias, out_dtype), expert_offsets)
    launching.check_tensor(held, "x", "[M, {}], or QuantizedActivations of w4ax", w.k)
    if held is x:
        launching.check_no_grad(x, "grouped_gemm")
        grouped.check_dtype(x)
        out_dtype = out_dtype or x.dtype
        grouped_op.check(x.shape, x.device, w, expert_offsets, bias, out, out_dtype)
        x = activations.run(x, w.stacked, None, 0.0, None, None)
        return grouped_op.multiply(x, w, expert_offsets, bias, out, out_dtype)
    return grouped_op.run(x, w, expert_offsets, bias, out, out_dtype or torch.float16)


def quantize_activations(
    x: SupportsDLPack,
    w: PackedWeight,
    *,
    rms_weight: SupportsDLPack | None = None,
    eps: float = 1e-6,
    granularity: str | None = None,
    static_scales: SupportsDLPack | None = None,
    residual: SupportsDLPack | None = None,
    activation: str | None = None,
) -> activations.QuantizedActivations:
    """Quantize activations for a weight, and for every weight of the same plan, on the current stream, in one kernel.

    Channels are put in the weight's order. With `rms_weight`, RMSNorm stands in front: x / sqrt(mean(x^2) + eps) *
    rms_weight, without rounding in between. `reference.quantize_activations` defines the codes to the bit.

    Two kernels that stand in front of a layer may come with it, K being a multiple of 8. The codes are then those of
    their outputs: of `residual += x`, or of `ops.activation.act_and_mul`.

    Args:
        x: float16 or bfloat16 [..., K] on w's GPU; leading dimensions may be strided (then they are copied).
        w: gives channel order, precision of the blocks and target.
        rms_weight: float [K], in the order of x. A float32 form is kept until PyTorch counts a write to it; after
            another one (through `.data`, say), call `terrazzo.forget(rms_weight)`.
        granularity: "two_level": in INT4 blocks a small integer times a unit of the token, in INT8 blocks one scale of
            the token; "block": a scale for each token and block; "token": one for each token and precision; "static":
            `static_scales`. None: "two_level" or "block", as the weight's scales are. On sm_90a a weight with two-level
            scales takes "two_level" and "token" only.
        static_scales: float [Kp/128], those of all tokens, of "static" only.
        residual: [..., K] like x, contiguous; x is added to it, rounded to its dtype, in place, and the sum is normed
            and quantized.
        activation: "silu", "gelu_tanh" or "gelu": x is [..., 2 K], gate and up, and activation(gate) * up, rounded to
            x's dtype, is quantized.

    Raises:
        ArgumentError: an operand that does not fit. CaptureError: a kernel that was never launched is met during CUDA
            graph capture. ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """

    import torch

    if not isinstance(w, PackedWeight):
        raise launching.not_packed(w, "w4ax")
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
        if dlpack.is_foreign(x):
            return dlpack.call(quantize_activations, locals())
        launching.check_tensor(x, "x", "[..., {}]", w.k)
        if launching.is_traced(x):
            from terrazzo.ops.w4ax import torch_op

            launching.check_no_grad(x, "quantize_activations")
            activations.front_of(x, w, rms_weight, residual, activation)
            for name, vector in (("rms_weight", rms_weight), ("static_scales", static_scales)):
                if vector is not None:
                    launching.check_tensor(vector, name, "float [{}]", w.k if name == "rms_weight" else w.blocks)
            return torch_op.quantize(
                x, w, rms_weight, eps, granularity or activations.default_granularity(w), static_scales, residual,
                activation,
            )  # fmt: skip
    return activations.run(x, w, rms_weight, eps, granularity, static_scales, residual, activation)
