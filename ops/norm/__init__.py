"""RMSNorm with what stands around it in a decoder layer: residual sum, smooth vector, quantization, in one kernel.

    y = terrazzo.ops.norm.rms_norm(x, weight, eps=1e-6)
    q = terrazzo.ops.norm.fused_add_rms_norm(x, residual, weight, eps=1e-6, quant="int8")   # residual += x, in place
    y = terrazzo.ops.w4a8.gemm(q, w)

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = ["fused_add_rms_norm", "kernel_requests", "rms_norm"]

if TYPE_CHECKING:
    from terrazzo.ops.norm.entry import fused_add_rms_norm, rms_norm
    from terrazzo.ops.norm.op import kernel_requests
else:
    __getattr__, __dir__ = lazy.attach(__name__, {"entry": "fused_add_rms_norm rms_norm", "op": "kernel_requests"})
