"""The public calls: their arguments, and whether they are launched or become a node of a graph that is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from terrazzo.ops import row_calls
from terrazzo.ops.norm import op

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations

    Normed = torch.Tensor | QuantizedActivations | BlockQuantizedActivations


def rms_norm(
    x: Array,
    weight: SupportsDLPack,
    *,
    eps: float = 1e-6,
    style: str = "llama",
    smooth: SupportsDLPack | None = None,
    quant: str | None = None,
    numerics: str = "fused",
    also_plain: bool = False,
    column_scales: bool = False,
    target: str | None = None,
) -> Normed | tuple[Normed, torch.Tensor]:
    """y = x / sqrt(mean(x^2) + eps) * weight along the last dimension, on the current stream, in one kernel.

    Args:
        x: float16 or bfloat16 [..., K], K a multiple of 8 up to 32768; on a CPU the reference computes y.
        weight: [K], of x's dtype or float32. eps: added to the mean square.
        style: "llama" multiplies with weight, and so does "gpt_oss"; "gemma" with 1 + weight. They round differently
            with numerics="model".
        smooth: float [K]; y is divided by it, in float32, before it is quantized.
        quant: None for y in x's dtype; codes of "int8" or "e4m3" (sm_89 and newer) with a scale for each token, as
            `w4a8.gemm` takes them; "int8_block128" or "e4m3_block128" with one for each 128 columns of a token.
        numerics: "fused" rounds y, or codes, alone; "model" rounds where transformers does before codes are made.
        also_plain: whether y leaves, too, not divided by smooth: what a router reads.
        column_scales: scales of blocks as float32 [K/128, M4], M4 = M rounded up to 4.
        target: "sm_80" runs its program on newer GPUs.

    Returns:
        y [..., K]; or QuantizedActivations or BlockQuantizedActivations; with also_plain (codes, y).

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy. CaptureError: a kernel
            that was never launched is met in CUDA graph capture. ToolchainError, CompileError: the kernel is not
            compiled yet and cannot be.
    """
    options = style, quant, numerics, also_plain, column_scales, target
    call = op.Call(x, None, weight, None, smooth, eps, eps, *options)
    y, codes = op.run(call) or _first(rms_norm, call)
    return y if codes is None else row_calls.returned(y, codes)


def fused_add_rms_norm(
    x: Array,
    residual: SupportsDLPack,
    weight: SupportsDLPack,
    *,
    eps: float = 1e-6,
    style: str = "llama",
    post_weight: SupportsDLPack | None = None,
    post_eps: float | None = None,
    smooth: SupportsDLPack | None = None,
    quant: str | None = None,
    numerics: str = "fused",
    also_plain: bool = False,
    column_scales: bool = False,
    target: str | None = None,
) -> Normed | tuple[Normed, torch.Tensor]:
    """residual += x, rounded to its dtype, in place; then `rms_norm` of the residual, in the same kernel.

    Args:
        x: what is added, float16 or bfloat16 [..., K]. residual: [..., K] like x, contiguous; written.
        weight: [K], as of `rms_norm`.
        post_weight: [K], of weight's dtype: x is normed by it before it is added (Gemma's sandwich).
        post_eps: that norm's, None for eps.
        eps, style, smooth, quant, numerics, also_plain, column_scales, target: see `rms_norm`.

    What is returned and raised: see `rms_norm`.
    """
    post_eps = eps if post_eps is None else post_eps
    options = style, quant, numerics, also_plain, column_scales, target
    call = op.Call(x, residual, weight, post_weight, smooth, eps, post_eps, *options)
    y, codes = op.run(call) or _first(fused_add_rms_norm, call)
    return y if codes is None else row_calls.returned(y, codes)


def _first(operator: Callable, call: op.Call) -> tuple[Any, Any]:
    """(y, codes) of a call whose equal was not launched before, or (all that it gives, None)."""
    from terrazzo.ops.norm import torch_op

    made = row_calls.apart(operator, call, op.check, torch_op)
    return op.run(call, new=True) if made is None else (made, None)
