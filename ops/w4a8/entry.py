"""The public calls on bytes, and what they hand in to the path of all calls (ops/call/linear.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import dlpack, launching
from terrazzo.ops.call.linear import Linear
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes.fp8_problem import CONVERTERS
from terrazzo.ops.w4a8 import activations, mxfp8, op
from terrazzo.ops.w4a8.activations import QuantizedActivations

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.launching import Plan


class Calls(Linear):
    """Of 4-bit weights for bytes; the choices are `dequantization` and `pipeline`."""

    operator = families = "w4a8"
    packed, quantized = op.WEIGHTS, (QuantizedActivations,)
    given, usual = ", or QuantizedActivations of w4a8", ("auto", "auto")

    def facts(self, w: op.Weight) -> tuple:
        return w.n, w.k, w.group_size, w.target, w.ACTIVATIONS, w.layout

    def check_choices(self, w: op.Weight, out_dtype: str, choices: tuple[str, str]) -> None:
        for name, value in zip(("dequantization", "pipeline"), choices):
            if type(value) is not str:
                raise ArgumentError(name, value, "must be a string", f"leave {name} out")
        op.check_choices(w.k, out_dtype, *choices)
        if op.dequantization_of(w, choices[0]) in CONVERTERS:
            fp8_problem.check_out_dtype(out_dtype)

    def product(self, w: op.Weight, key: tuple, experts: int) -> op.Facts:
        _, _, out_dtype, choices, no_bias, _ = key[-6:]
        return op.facts_of(w, str(out_dtype)[6:], not no_bias, choices, experts)

    def sums_dtype(self, w: op.Weight) -> str:
        return "int32" if w.ACTIVATIONS == "int8" else "float32"

    def step(self, plan: Plan, m: int) -> int:
        return op.tokens_per_launch(plan, m)

    def quantize(self, x: torch.Tensor, w: op.Weight, alone: bool) -> QuantizedActivations:
        if w.ACTIVATIONS == mxfp8.FORM:
            return mxfp8.run(x)
        at = "sm_80" if alone and w.target == "sm_80" else None
        return activations.run(x, w.smooth, None, 0.0, None, at, w.ACTIVATIONS, alone)

    def check_activations(self, x: QuantizedActivations, w: op.Weight) -> None:
        op.check_codes(x, w)
        op.check_sums(x, w)

    def stand_ins(
        self, x: QuantizedActivations, w: op.Weight, plan: Plan, target: Target, device: Target, m: int
    ) -> tuple[tuple, object]:
        """On e4m3 there are no row sums."""
        import torch

        if w.ACTIVATIONS == "int8":
            return (), None
        return (), launching.argument(*launching.stand_ins(x.device, torch.int32))

    def operands(self, x: QuantizedActivations, words: torch.Tensor, scales: torch.Tensor, no_sums: object) -> tuple:
        of_tokens, sums = x.__dict__.get("_arguments") or (x.scales, x.row_sums)
        if no_sums is None:
            return x.q, words, scales, of_tokens, sums
        import torch

        return x.q.view(torch.int8), words, scales, of_tokens, no_sums

    def part(self, x: QuantizedActivations, part: slice) -> QuantizedActivations:
        sums = None if x.row_sums is None else x.row_sums[part]
        return replace(x, q=x.q[part], scales=x.scales[part], row_sums=sums)

    def node(
        self, x: torch.Tensor | QuantizedActivations, w: op.Weight, bias: torch.Tensor | None,
        out_dtype: torch.dtype | None, choices: tuple[str, str], offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        from terrazzo.ops.w4a8 import torch_op

        return torch_op.call(x, w, bias, out_dtype, choices, offsets)


CALLS = Calls()


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
            (mma.sync after a ring of cp.async), "small_batch" (mma.sync, 32 tokens for each launch), "auto" by M, size
            and target.

    x, bias and out may be arrays of another library (ops/dlpack.py); the result is then one of x's library, or out.

    Works under torch.compile(fullgraph=True) and, once each M bucket was called, in CUDA graph capture. Calls on
    different streams use different workspaces; two graphs captured on one stream must not be replayed at the same time,
    nor one during calls on that stream. After a write to w that PyTorch does not count, call `terrazzo.forget(w)`.
    Between calls on 16-bit activations each thread keeps memory for their codes, up to 8 MiB for each stream. There is
    no gradient: x that requires one is refused unless gradients are off.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    return CALLS.gemm(x, w, bias, out, out_dtype, (dequantization, pipeline))


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
    return CALLS.grouped_gemm(x, w, expert_offsets, bias, out, out_dtype, (dequantization, "imfp"))


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
        codes: "int8", or "e4m3" for weights of `fp8` (sm_89, sm_90a); "mxfp8", of `mxfp4_mxfp8`, has neither smooth
            vectors nor norms, and makes `MXActivations`.

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
            if codes == mxfp8.FORM:
                mxfp8.check_plain(smooth, rms_weight)
            else:
                activations.check_codes(codes)
            found = torch_op.quantize(x, smooth, rms_weight, eps, target, codes)
            return found if out is None else activations.copy_into(out, found)
    if codes == mxfp8.FORM:
        mxfp8.check_plain(smooth, rms_weight)
        return mxfp8.run(x, out)
    return activations.run(
        x, smooth, rms_weight, eps, out, None if target is None else Target.parse(target).arch, codes
    )
