"""The public call: its arguments, and whether it is launched or becomes a node of a graph that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import dlpack, launching, row_calls, weights
from terrazzo.ops.activation import op

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations

LIMIT = 7.0
"""gpt-oss's bound of gate and up."""


@dlpack.accepting
def act_and_mul(
    x: Array,
    *,
    activation: str = "silu",
    layout: str = "gate_up",
    alpha: float = 1.702,
    limit: float | None = None,
    smooth: SupportsDLPack | None = None,
    expert_offsets: SupportsDLPack | None = None,
    quant: str | None = None,
    numerics: str = "fused",
    column_scales: bool = False,
    target: str | None = None,
) -> torch.Tensor | QuantizedActivations | BlockQuantizedActivations:
    """h = act(gate) * up of joined projections, on the current stream, in one kernel.

    Args:
        x: float16 or bfloat16 [..., 2 F], F a multiple of 8 up to 32768; on a CPU the reference computes h.
        activation: "silu"; "gelu_tanh"; "gelu", by erf; "swiglu_oai", gpt-oss's gate sigmoid(alpha gate) (up + 1).
        layout: "gate_up" or "up_gate" halves, or "interleaved" columns, gate first.
        alpha: of "swiglu_oai". limit: gate is at most this, up within it; None: none, 7 for "swiglu_oai".
        smooth: float [F], or [E, F] with offsets of E experts; h is divided by it, in float32, before it is quantized.
        expert_offsets: int32 [E + 1], where the rows of each expert start; of rows of none nothing is written.
        quant, numerics, column_scales, target: see `ops.norm.rms_norm`.

    Returns:
        h [..., F]; or QuantizedActivations or BlockQuantizedActivations.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy. CaptureError: a kernel
            that was never launched is met in CUDA graph capture. ToolchainError, CompileError: the kernel is not
            compiled yet and cannot be.
    """
    if limit is None and activation == "swiglu_oai":
        limit = LIMIT
    op.check_operands(x, smooth, expert_offsets, alpha, limit)
    experts = 0 if expert_offsets is None else len(expert_offsets) - 1
    op.check_choices(
        x.shape[-1] // 2, weights.dtype_name(x), activation, layout, quant, numerics, column_scales,
        smooth is not None, experts,
    )  # fmt: skip
    given = (x, smooth, expert_offsets, activation, layout, alpha, limit, quant, numerics, column_scales)
    if not x.is_cuda or launching.is_traced(x):
        from terrazzo.ops.activation import reference, torch_op

        return torch_op.call(*given) if launching.is_traced(x) else row_calls.returned(*reference.act_and_mul(*given))
    return row_calls.returned(*op.run(*given, target))
