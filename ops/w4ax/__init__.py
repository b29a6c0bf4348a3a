"""W4Ax (COMET): y[M, N] = x[M, K] w[N, K]^T (+ bias), 4-bit weights, activations of 4 bits and, where outliers are, 8.

    statistics = terrazzo.ops.w4ax.ActivationStatistics.empty(k)
    for x in batches: statistics.observe(x)
    plan = terrazzo.ops.w4ax.plan_blocks(statistics)                 # FMPQ: which channels form the INT8 blocks
    w = terrazzo.ops.w4ax.quantize(weight, plan, target="sm_90a")
    y = terrazzo.ops.w4ax.gemm(x, w)                                 # x float16 or bfloat16: quantized first

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from terrazzo.ops import lazy

_HOME = {
    "gemm": "op",
    "kernel_requests": "op",
    "weight_requests": "op",
    "QuantizedActivations": "activations",
    "quantize_activations": "activations",
    "ActivationStatistics": "fmpq",
    "BlockPlan": "fmpq",
    "plan_blocks": "fmpq",
    "fold": "fmpq",
    "FmpqReport": "fmpq_report",
    "report": "fmpq_report",
    "QuantizedWeight": "format",
    "PackedWeight": "format",
    "pack": "format",
    "quantize": "quantizer",
    "quantize_weight": "quantizer",
    "dequantize": "reference",
}

__all__, __getattr__, __dir__ = lazy.names(__name__, _HOME)
