"""The public calls on 16-bit activations, and what they hand in to the path of all calls (ops/call/linear.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.ops.call.linear import Linear
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import PRODUCTS, of_codes
from terrazzo.ops.weight_only import op
from terrazzo.ops.weight_only.packed import WeightOnly

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack


class Calls(Linear):
    """Of weights of every format for 16-bit activations; the choice is `numerics`."""

    families = ", ".join(one.root for one in PRODUCTS if one.codes.name in WIDE)
    packed, scales = WeightOnly, "params"

    def name(self, w: WeightOnly[Any]) -> str:
        return of_codes(w.format).record

    def facts(self, w: WeightOnly[Any]) -> tuple:
        return w.weight, w.n, w.k, w.group_size, w.symmetric, w.scale_dtype, w.target, w.layout

    def check_choices(self, w: WeightOnly[Any], out_dtype: str, numerics: str) -> None:
        op.check_numerics(numerics, w.weight)

    def product(self, w: WeightOnly[Any], key: tuple, experts: int) -> op.Facts:
        _, _, dtype, numerics, no_bias, _ = key[-6:]
        return op.facts_of(w, str(dtype)[6:], numerics, not no_bias, experts)

    def node(
        self, x: torch.Tensor, w: WeightOnly[Any], bias: torch.Tensor | None,
        out_dtype: torch.dtype | None, numerics: str, offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        from terrazzo.ops.weight_only import torch_op

        return torch_op.call(x, w, bias, out_dtype, numerics, offsets)


CALLS = Calls()


def gemm(
    x: Array,
    w: WeightOnly[Any],
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    numerics: str = "auto",
) -> Array:
    """y[..., N] = x[..., K] w[N, K]^T + bias, on the current stream; the same bits in every run.

    Args:
        x: float16 or bfloat16 [..., K] on w's GPU; leading dimensions may be strided (then they are copied).
        w: packed weight of w4a16, w8a16, mxfp4, nvfp4, fp8 or nf4. Its own bias is added unless `bias` is given.
        bias: [N] in x's dtype.
        out: contiguous [..., N] in x's dtype, written and returned; no memory of x. M = 0 writes nothing.
        numerics: "exact" scales each weight with one rounding; "fused" is fma(q, s, -z*s), as TurboMind; "post"
            applies scale and zero point to the f32 sum of each group (specs.md B.3). "auto" is post where the
            small-batch program runs (up to 16 tokens), else exact (post where the scales are not in x's dtype).
            MXFP4 and NVFP4 have "exact" alone and FP8 "post" alone; they round no weight in bfloat16.

    x, bias and out may be arrays of another library (ops/dlpack.py); the result is then one of x's library, or out.

    Works under torch.compile(fullgraph=True) and, once each M bucket was called, in CUDA graph capture. Calls on
    different streams use different workspaces; two graphs captured on one stream must not be replayed at the same time,
    nor one during calls on that stream. After a write to w that PyTorch does not count (through `.data`, by a
    communication library), call `terrazzo.forget(w)`. There is no gradient: x that requires one is refused unless
    gradients are off.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    return CALLS.gemm(x, w, bias, out, None, numerics)


def grouped_gemm(
    x: Array,
    w: GroupedWeight,
    expert_offsets: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    numerics: str = "auto",
) -> Array:
    """y[i] = x[i] w[e]^T + bias[e] for the rows i of expert e, offsets[e] <= i < offsets[e + 1]; on the current stream.

    One launch, whatever the offsets hold: the tiles are found on the device, empty experts cost nothing, and nothing
    waits for the GPU. With warpgroup instructions (sm_90a) it has one CTA for each SM, else one for each tile that
    there may be. The same bits in every run.

    Args:
        x: float16 or bfloat16 [M, K], tokens sorted by expert (`ops.moe.sort_by_expert`).
        w: `GroupedWeight.stack` of the experts' packed weights, without act-order. Their own biases are added unless
            `bias` is given.
        expert_offsets: int32 [E + 1] on the GPU, ascending; rows outside of offsets[0] .. offsets[E] are not written.
        bias: [E, N] in x's dtype.
        out: contiguous [M, N] in x's dtype, written and returned; no memory of x.
        numerics: see `gemm`; "auto" is exact, or post where the scales are not in x's dtype.

    Raises:
        ArgumentError: an operand that does not fit.
        LayoutMismatchError, TargetError, CaptureError, ToolchainError, CompileError: see `gemm`.
    """
    return CALLS.grouped_gemm(x, w, expert_offsets, bias, out, None, numerics)
