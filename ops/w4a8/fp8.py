"""W4A8 on e4m3 activations (sm_89, sm_90a): 4-bit codes with a free scale for each group, x with a scale per token.

    w = terrazzo.ops.w4a8.fp8.quantize(weight)           # or load_layer, pack(QuantizedWeight.canonical(codes, ...))
    y = terrazzo.ops.w4a8.gemm(x, w)                     # the same gemm as on int8: the weight says which
    y = terrazzo.ops.w4a8.gemm(fp8.quantize_activations(x), w)
    y = terrazzo.ops.w4a8.grouped_gemm(x, fp8.GroupedWeight.stack(experts), expert_offsets)

`fp8_reference` says what is computed, and how accurately.
"""

from __future__ import annotations

from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a8.activations import QuantizedActivations
from terrazzo.ops.w4a8.entry import gemm, grouped_gemm
from terrazzo.ops.w4a8.fp8_format import PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a8.fp8_importers import (
    from_compressed_tensors,
    iter_layers,
    load_layer,
    load_model,
    read_compressed_tensors,
    read_layer,
)
from terrazzo.ops.w4a8.fp8_quantizer import quantize, quantize_activations, quantize_weight
from terrazzo.ops.w4a8.op import weight_requests

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedActivations",
    "QuantizedWeight",
    "from_compressed_tensors",
    "gemm",
    "grouped_gemm",
    "iter_layers",
    "load_layer",
    "load_model",
    "pack",
    "quantize",
    "quantize_activations",
    "quantize_weight",
    "read_compressed_tensors",
    "read_layer",
    "weight_requests",
]


def __dir__() -> list[str]:
    return sorted(__all__)
