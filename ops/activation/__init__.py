"""Gated activations with what follows them in a decoder layer: smooth vectors, quantization, in one kernel.

    q = terrazzo.ops.activation.act_and_mul(gate_up, quant="int8")              # silu(gate) * up
    y = terrazzo.ops.w4a8.gemm(q, down)

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = ["act_and_mul", "kernel_requests"]

if TYPE_CHECKING:
    from terrazzo.ops.activation.entry import act_and_mul
    from terrazzo.ops.activation.op import kernel_requests
else:
    __getattr__, __dir__ = lazy.attach(__name__, {"entry": "act_and_mul", "op": "kernel_requests"})
