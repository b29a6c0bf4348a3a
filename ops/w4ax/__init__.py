"""W4Ax (COMET): y[M, N] = x[M, K] w[N, K]^T (+ bias), 4-bit weights, activations of 4 bits and, where outliers are, 8.

    statistics = terrazzo.ops.w4ax.ActivationStatistics.empty(k)
    for x in batches: statistics.observe(x)
    plan = terrazzo.ops.w4ax.plan_blocks(statistics)                 # FMPQ: which channels form the INT8 blocks
    w = terrazzo.ops.w4ax.quantize(weight, plan, target="sm_90a")
    y = terrazzo.ops.w4ax.gemm(x, w)                                 # x float16 or bfloat16: quantized first

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "ActivationStatistics",
    "BlockPlan",
    "FmpqReport",
    "GroupedWeight",
    "PackedWeight",
    "QuantizedActivations",
    "QuantizedWeight",
    "dequantize",
    "fold",
    "gemm",
    "grouped_gemm",
    "grouped_requests",
    "kernel_requests",
    "pack",
    "plan_blocks",
    "quantize",
    "quantize_activations",
    "quantize_weight",
    "report",
    "weight_requests",
]

if TYPE_CHECKING:
    from terrazzo.ops.w4ax.activations import QuantizedActivations
    from terrazzo.ops.w4ax.entry import GroupedWeight, gemm, grouped_gemm, quantize_activations
    from terrazzo.ops.w4ax.fmpq import ActivationStatistics, BlockPlan, fold, plan_blocks
    from terrazzo.ops.w4ax.fmpq_report import FmpqReport, report
    from terrazzo.ops.w4ax.format import PackedWeight, QuantizedWeight, pack
    from terrazzo.ops.w4ax.op import grouped_requests, kernel_requests, weight_requests
    from terrazzo.ops.w4ax.quantizer import quantize, quantize_weight
    from terrazzo.ops.w4ax.reference import dequantize
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "activations": "QuantizedActivations",
            "entry": "GroupedWeight gemm grouped_gemm quantize_activations",
            "fmpq": "ActivationStatistics BlockPlan fold plan_blocks",
            "fmpq_report": "FmpqReport report",
            "format": "PackedWeight QuantizedWeight pack",
            "op": "grouped_requests kernel_requests weight_requests",
            "quantizer": "quantize quantize_weight",
            "reference": "dequantize",
        },
    )
