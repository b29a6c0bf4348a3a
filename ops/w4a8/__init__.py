"""W4A8: y[M, N] = x[M, K] w[N, K]^T (+ bias), 4-bit codes with two levels of scales, x int8 with a scale per token.

    w = terrazzo.ops.w4a8.quantize(weight)               # or pack, from_qserve, from_compressed_tensors
    y = terrazzo.ops.w4a8.gemm(x, w)                     # x float16 or bfloat16: quantized first, in one kernel
    y = terrazzo.ops.w4a8.gemm(quantize_activations(x), w)

`fp8` holds the form on e4m3 activations (sm_89, sm_90a). Names are resolved on first use, so that importing this
package imports neither torch nor tilelang.
"""

from __future__ import annotations

from terrazzo.ops import lazy

_HOME = {
    "gemm": "op",
    "kernel_requests": "op",
    "weight_requests": "op",
    "QuantizedActivations": "activations",
    "quantize_activations": "activations",
    "grouped_gemm": "grouped",
    "grouped_requests": "grouped",
    "GroupedWeight": "grouped",
    "QuantizedWeight": "format",
    "PackedWeight": "format",
    "pack": "format",
    "from_qserve": "importers",
    "from_compressed_tensors": "importers",
    "read_qserve": "importers",
    "read_compressed_tensors": "importers",
    "quantize": "quantizer",
    "quantize_weight": "quantizer",
    "search_smooth": "smooth",
    "dequantize": "reference",
    "fp8": "fp8",
}

__all__, __getattr__, __dir__ = lazy.names(__name__, _HOME)
