"""W4A16: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in 4-bit codes with a scale and a zero point for each group along K.

    w = terrazzo.ops.w4a16.load_layer("model/", "model.layers.0.mlp.down_proj")  # or pack, from_gptq, quantize
    y = terrazzo.ops.w4a16.gemm(x, w)

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from terrazzo.ops import lazy

_HOME = {
    "gemm": "op",
    "kernel_requests": "op",
    "weight_requests": "op",
    "grouped_gemm": "grouped",
    "grouped_requests": "grouped",
    "GroupedWeight": "grouped",
    "QuantizedWeight": "format",
    "PackedWeight": "format",
    "pack": "format",
    "from_awq": "importers",
    "from_gptq": "importers",
    "from_compressed_tensors": "importers",
    "read_awq": "importers",
    "read_gptq": "importers",
    "read_compressed_tensors": "importers",
    "quantize": "quantizer",
    "quantize_weight": "quantizer",
    "load_layer": "checkpoint",
    "read_layer": "checkpoint",
    "iter_layers": "checkpoint",
    "load_model": "checkpoint",
    "dequantize": "reference",
}

__all__, __getattr__, __dir__ = lazy.names(__name__, _HOME)
