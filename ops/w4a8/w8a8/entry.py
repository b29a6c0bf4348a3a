"""The public calls of W8A8, and what they hand in to the path of all calls (ops/call/linear.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import dlpack, launching
from terrazzo.ops.call.linear import Linear
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations
from terrazzo.ops.w4a8.w8a8 import activations as w8_activations
from terrazzo.ops.w4a8.w8a8 import op as w8_op
from terrazzo.ops.w4a8.w8a8.format import PackedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.launching import Plan

Activations = QuantizedActivations | BlockQuantizedActivations


class Calls(Linear):
    """Of bytes by bytes; the choice is `accumulate`."""

    operator = families = "w8a8"
    packed, quantized = PackedWeight, (QuantizedActivations, BlockQuantizedActivations)
    scales = "scales"
    given = ", or what w8a8.quantize_activations makes"

    def facts(self, w: PackedWeight) -> tuple:
        return w.n, w.k, w.codes, w.block, w.target, w.layout

    def check_choices(self, w: PackedWeight, out_dtype: str, accumulate: str) -> None:
        w8_op.check_out_dtype(out_dtype, w.codes)
        w8_op.numerics_of(w.codes, w.block, False, accumulate)

    def product(self, w: PackedWeight, key: tuple, experts: int) -> w8_op.Facts:
        _, _, out_dtype, accumulate, no_bias, no_zeros = key[-6:]
        numerics = w8_op.numerics_of(w.codes, w.block, not no_zeros, accumulate)
        own = dict(numerics=numerics, out_dtype=str(out_dtype)[6:], bias=not no_bias)
        return w8_op.Facts(w.n, w.k, **own, experts=experts)

    def sums_dtype(self, w: PackedWeight) -> str:
        return "int32" if w.codes == "int8" else "float32"

    def quantize(self, x: torch.Tensor, w: PackedWeight, alone: bool) -> Activations:
        if not x.is_cuda:
            raise launching.elsewhere(x, w.device)
        return w8_activations.run(x, w)

    def check_activations(self, x: Activations, w: PackedWeight) -> None:
        w8_op.check_activations(x, w)

    def check_tensors(self, x: Activations) -> None:
        w8_op.check_tensors(x)

    def stand_ins(
        self, x: Activations, w: PackedWeight, plan: Plan, target: Target, device: Target, m: int
    ) -> tuple[tuple, object]:
        """For no zero points."""
        import torch

        return (), (launching.argument(*launching.stand_ins(x.device, torch.int32)), w.block)

    def operands(self, x: Activations, words: torch.Tensor, scales: torch.Tensor, more: tuple[object, bool]) -> tuple:
        import torch

        no_zeros, block = more
        q, zeros = x.q, getattr(x, "zeros", None)
        q = q if q.dtype == torch.int8 else q.view(torch.int8)
        return q, words, scales if block else scales.view(-1), x.scales, no_zeros if zeros is None else zeros

    def node(
        self, x: torch.Tensor | Activations, w: PackedWeight, bias: torch.Tensor | None,
        out_dtype: torch.dtype | None, accumulate: str, offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        from terrazzo.ops.w4a8.w8a8 import torch_op

        return torch_op.call(x, w, bias, out_dtype, accumulate, offsets)


CALLS = Calls()


def gemm(
    x: Array | Activations,
    w: PackedWeight,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "auto",
) -> Array:
    """y[..., N] = x[..., K] w[N, K]^T + bias, on the current stream; the same bits in every run.

    Args:
        x: quantized activations, or float16 or bfloat16 [..., K] on w's GPU, which are quantized as w wants them first,
            in one more kernel.
        w: packed weight. Its own bias is added unless `bias` is given.
        bias: float [N]; added in float32.
        out: contiguous [..., N] of the output dtype, written and returned; no memory of x. M = 0 writes nothing.
        out_dtype: torch.float16, torch.bfloat16, or of int8 codes torch.int32: the sums of products less
            zero points' share, without scales or bias, bit-exact. None takes x's dtype, or float16.
        accumulate: of e4m3 with scales of channels. "promoted" ("auto"): the tensor core, with 13 fraction bits,
            sums each 128 k; these join float32 sums. "fast": the tensor core sums all of K.

    x, bias and out may be arrays of another library (ops/dlpack.py); the result is then one of x's library, or out.
    Works under torch.compile(fullgraph=True) and, once each M bucket was called, in CUDA graph capture; streams as of
    `w4a8.gemm`. There is no gradient: x that requires one is refused unless gradients are off.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    return CALLS.gemm(x, w, bias, out, out_dtype, accumulate)


def grouped_gemm(
    x: Array | Activations,
    w: GroupedWeight,
    expert_offsets: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "auto",
) -> Array:
    """y[i] = x[i] w[e]^T + bias[e] for the rows i of expert e, offsets[e] <= i < offsets[e + 1]; on the current stream.

    One launch of one CTA for each SM, whatever the offsets hold: the tiles are partitioned on the device, empty experts
    cost nothing, and nothing waits for the GPU. The same bits in every run; on int8 as `gemm` for each expert, on e4m3
    inside the same error bound.

    Args:
        x: [M, K], tokens sorted by expert (`ops.moe.sort_by_expert`): quantized activations, or float16 or bfloat16,
            which are quantized as w wants them first.
        w: `GroupedWeight.stack` of the experts' packed weights. Their own biases are added unless `bias` is given.
        expert_offsets: int32 [E + 1] on the GPU, ascending; rows outside of offsets[0] .. offsets[E] are not written.
        bias: float [E, N]; added in float32.
        out: contiguous [M, N] of the output dtype, written and returned; no memory of x.
        out_dtype, accumulate: see `gemm`.

    Raises:
        ArgumentError: an operand that does not fit, or a GPU without warpgroup instructions (sm_90a has them).
        LayoutMismatchError, TargetError, CaptureError, ToolchainError, CompileError: see `gemm`.
    """
    return CALLS.grouped_gemm(x, w, expert_offsets, bias, out, out_dtype, accumulate)


def quantize_activations(x: SupportsDLPack, w: PackedWeight) -> Activations:
    """Quantize activations as a weight multiplies them, on the current stream, in one kernel.

    `w8_reference` and `reference` of terrazzo.ops.w4a8 define codes and scales to the bit.

    Args:
        x: float16 or bfloat16 [..., K] on w's CUDA device; leading dimensions may be strided (then they are copied).
        w: packed weight, whose `smooth`, `input_scale`, `input_zero` and `asymmetric` say how; of experts one of them.

    Raises:
        ArgumentError: an operand that does not fit. CaptureError: a kernel that was never launched is met during CUDA
            graph capture. ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    import torch

    if not isinstance(w, PackedWeight):
        raise launching.not_packed(w, "w8a8")
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
        if dlpack.is_foreign(x):
            return dlpack.call(quantize_activations, locals())
        launching.check_tensor(x, "x", "[..., {}]", w.k)
        if launching.is_traced(x):
            from terrazzo.ops.w4a8.w8a8 import torch_op as w8_torch_op

            launching.check_no_grad(x, "quantize_activations")
            return w8_torch_op.quantize(x, w)
    if not x.is_cuda:
        raise launching.elsewhere(x, w.device)
    return w8_activations.run(x, w)
