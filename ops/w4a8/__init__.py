"""W4A8: y[M, N] = x[M, K] w[N, K]^T (+ bias), 4-bit codes with two levels of scales, x int8 with a scale per token.

    w = terrazzo.ops.w4a8.quantize(weight)               # or load_layer, pack, from_qserve, from_compressed_tensors
    y = terrazzo.ops.w4a8.gemm(x, w)                     # x float16 or bfloat16: quantized first, in one kernel
    y = terrazzo.ops.w4a8.gemm(quantize_activations(x), w)

`fp8` holds the form on e4m3 activations (sm_89, sm_90a). Names are resolved on first use, so that importing this
package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedActivations",
    "QuantizedWeight",
    "dequantize",
    "fp8",
    "from_compressed_tensors",
    "from_qserve",
    "gemm",
    "grouped_gemm",
    "grouped_requests",
    "iter_layers",
    "kernel_requests",
    "load_layer",
    "load_model",
    "pack",
    "quantize",
    "quantize_activations",
    "quantize_weight",
    "read_compressed_tensors",
    "read_layer",
    "read_qserve",
    "search_smooth",
    "weight_requests",
]

if TYPE_CHECKING:
    from terrazzo.ops.w4a8 import fp8
    from terrazzo.ops.w4a8.activations import QuantizedActivations
    from terrazzo.ops.w4a8.entry import GroupedWeight, gemm, grouped_gemm, quantize_activations
    from terrazzo.ops.w4a8.format import PackedWeight, QuantizedWeight, pack
    from terrazzo.ops.w4a8.importers import (
        from_compressed_tensors,
        from_qserve,
        iter_layers,
        load_layer,
        load_model,
        read_compressed_tensors,
        read_layer,
        read_qserve,
    )
    from terrazzo.ops.w4a8.op import grouped_requests, kernel_requests, weight_requests
    from terrazzo.ops.w4a8.quantizer import quantize, quantize_weight
    from terrazzo.ops.w4a8.reference import dequantize
    from terrazzo.ops.w4a8.smooth import search_smooth
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "activations": "QuantizedActivations",
            "entry": "GroupedWeight gemm grouped_gemm quantize_activations",
            "format": "PackedWeight QuantizedWeight pack",
            "fp8": "fp8",
            "importers": "from_compressed_tensors from_qserve read_compressed_tensors read_qserve"
            " iter_layers load_layer load_model read_layer",
            "op": "grouped_requests kernel_requests weight_requests",
            "quantizer": "quantize quantize_weight",
            "reference": "dequantize",
            "smooth": "search_smooth",
        },
    )
