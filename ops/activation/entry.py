"""The public call: its arguments, and whether it is launched or becomes a node of a graph that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import row_calls
from terrazzo.ops.activation import op

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations

LIMIT = 7.0
"""gpt-oss's bound of gate and up."""


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
    options = (activation, layout, alpha, limit, quant, numerics, column_scales, target)
    call = op.Call(x, smooth, expert_offsets, *options)
    made = op.run(call)
    if made is None:
        from terrazzo.ops.activation import torch_op

        if (made := row_calls.apart(act_and_mul, call, op.check, torch_op)) is not None:
            return made
        made = op.run(call, new=True)
    y, codes = made
    return y if codes is None else row_calls.returned(y, codes)
