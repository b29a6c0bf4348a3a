"""The public calls of W4Ax, and what they hand in to the path of all calls (ops/call/linear.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, launching
from terrazzo.ops.call.linear import Linear
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear.mixed.scales import OUT_DTYPES
from terrazzo.ops.w4ax import activations, op
from terrazzo.ops.w4ax.activations import QuantizedActivations
from terrazzo.ops.w4ax.format import PackedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.launching import Plan


class Calls(Linear):
    """Of mixed W4A4 and W4A8, where nothing is to choose."""

    operator = families = "w4ax"
    packed, quantized, plane = PackedWeight, (QuantizedActivations,), "q8"
    given, usual = ", or QuantizedActivations of w4ax", None

    def facts(self, w: PackedWeight) -> tuple:
        return w.n, w.k, w.blocks8, w.layout, w.target, w.two_level

    def check_choices(self, w: PackedWeight, out_dtype: str, choices: None) -> None:
        if out_dtype not in OUT_DTYPES:
            raise ArgumentError("out_dtype", out_dtype, f"must be one of {OUT_DTYPES}", "leave out_dtype out")

    def product(self, w: PackedWeight, key: tuple, experts: int) -> op.Facts:
        if experts:
            PackedWeight.alike([w])  # of a GroupedWeight that `stack` did not make
        own = dict(out_dtype=str(key[-4])[6:], bias=not key[-2], two_level=w.two_level)
        return op.Facts(w.n, w.k, blocks8=w.blocks8, **own, experts=experts)

    def quantize(self, x: torch.Tensor, w: PackedWeight, alone: bool) -> QuantizedActivations:
        return activations.run(x, w, None, 0.0, None, None)

    def check_activations(self, x: QuantizedActivations, w: PackedWeight) -> None:
        import torch

        if not torch.compiler.is_compiling():  # the node asks: torch.compile follows what names layouts for long
            op.check_inputs(x, w)

    def stand_ins(
        self, x: QuantizedActivations, w: PackedWeight, plan: Plan, target: Target, device: Target, m: int
    ) -> tuple[tuple, tuple]:
        """The lists of a persistent kernel, and what stands for planes without columns and no channel scales."""
        lists = op.work_lists(w, m, plan.listed, target, device, x.device)
        return lists, (activations.stand_ins(x.device), bool(lists))

    def operands(
        self, x: QuantizedActivations, words: torch.Tensor, scales: torch.Tensor | None, more: tuple[dict, bool]
    ) -> tuple:
        none, planes = more
        scales = none["float32"] if scales is None else scales
        if not planes:
            return x.q8, words, x.scales, scales
        q4, q8 = x.q4 if x.q4.shape[1] else none["uint8"], x.q8 if x.q8.shape[1] else none["int8"]
        return q4, q8, words, x.scales, scales

    def node(
        self, x: torch.Tensor | QuantizedActivations, w: PackedWeight, bias: torch.Tensor | None,
        out_dtype: torch.dtype | None, choices: None, offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        from terrazzo.ops.w4ax import torch_op

        return torch_op.call(x, w, bias, out_dtype, choices, offsets)


CALLS = Calls()


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
    during calls on that stream. After a write to w that PyTorch does not count, call `terrazzo.forget(w)`. There is no
    gradient: x that requires one is refused unless gradients are off.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    return CALLS.gemm(x, w, bias, out, out_dtype, None)


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
    return CALLS.grouped_gemm(x, w, expert_offsets, bias, out, out_dtype, None)


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

    Two kernels that stand in front of a layer may come with it, K being a multiple of 8. The codes are then made of
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
        static_scales: float [Kp/128], for all tokens, of "static" only.
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
