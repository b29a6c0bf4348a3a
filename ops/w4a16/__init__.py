"""W4A16: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in 4-bit codes with a scale and a zero point for each group along K.

    w = terrazzo.ops.w4a16.load_layer("model/", "model.layers.0.mlp.down_proj")  # or pack, from_gptq, quantize
    y = terrazzo.ops.w4a16.gemm(x, w)

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "dequantize",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "gemm",
    "grouped_gemm",
    "grouped_requests",
    "iter_layers",
    "kernel_requests",
    "load_layer",
    "load_model",
    "pack",
    "quantize",
    "quantize_weight",
    "read_awq",
    "read_compressed_tensors",
    "read_gptq",
    "read_layer",
    "weight_requests",
]

if TYPE_CHECKING:
    from terrazzo.ops.grouped import GroupedWeight
    from terrazzo.ops.w4a16.importers import (
        from_awq,
        from_compressed_tensors,
        from_gptq,
        iter_layers,
        load_layer,
        load_model,
        read_awq,
        read_compressed_tensors,
        read_gptq,
        read_layer,
    )
    from terrazzo.ops.w4a16.reference import dequantize
    from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
    from terrazzo.ops.weight_only.integer_quantizer import quantize, quantize_weight
    from terrazzo.ops.weight_only.integers import PackedWeight, QuantizedWeight, pack
    from terrazzo.ops.weight_only.op import grouped_requests, kernel_requests, weight_requests
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "terrazzo.ops.weight_only.integers": "PackedWeight QuantizedWeight pack",
            "importers": "from_awq from_compressed_tensors from_gptq read_awq read_compressed_tensors read_gptq"
            " iter_layers load_layer load_model read_layer",
            "terrazzo.ops.weight_only.integer_quantizer": "quantize quantize_weight",
            "reference": "dequantize",
            "terrazzo.ops.grouped": "GroupedWeight",
            "terrazzo.ops.weight_only.entry": "gemm grouped_gemm",
            "terrazzo.ops.weight_only.op": "grouped_requests kernel_requests weight_requests",
        },
    )
