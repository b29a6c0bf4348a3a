"""W8A8: y[M, N] = x[M, K] w[N, K]^T (+ bias), both in int8 or in e4m3, multiplied as they are.

    w = terrazzo.ops.w8a8.quantize(weight)                      # int8, a scale for each row, x by token
    w = terrazzo.ops.w8a8.quantize(weight, codes="e4m3", granularity="block")     # DeepSeek's and Qwen's 128 x 128
    y = terrazzo.ops.w8a8.gemm(x, w)                            # x bfloat16 or float16, quantized as w wants it
    y = terrazzo.ops.w8a8.gemm(terrazzo.ops.w8a8.quantize_activations(x, w), w)
    y = terrazzo.ops.w8a8.grouped_gemm(x, terrazzo.ops.w8a8.GroupedWeight.stack(experts), expert_offsets)

`terrazzo.ops.w4a8.w8a8.reference` says what is computed, and how accurately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.direct import W8A8, W8A8_FP8
from terrazzo.ops.w4a8.w8a8 import format as w8_format
from terrazzo.ops.w4a8.w8a8.entry import gemm, grouped_gemm, quantize_activations
from terrazzo.ops.w4a8.w8a8.format import PackedWeight, QuantizedWeight
from terrazzo.ops.w4a8.w8a8.op import grouped_requests, kernel_requests, weight_requests
from terrazzo.ops.w4a8.w8a8.quantizer import quantize, quantize_weight

if TYPE_CHECKING:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Tensors
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
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
    "read_layer",
    "weight_requests",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    *,
    target: Target | str | None = None,
    **options: Any,
) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        codes: int8 or float8_e4m3fn [N, K]; or a QuantizedWeight (then nothing but `target` may be given).
        scales: float [] or [1], [N] or [N, 1], or of e4m3 [ceil(N / 128), ceil(K / 128)].
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.
        options: `input_scale`, `input_zero`, `asymmetric`, `smooth` and `bias`, see `QuantizedWeight.canonical`.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    if isinstance(codes, QuantizedWeight) and scales is None and not options:
        return w8_format.pack(codes, target=target)
    return w8_format.pack(QuantizedWeight.canonical(codes, scales, **options), target=target)


def _read(convention: Convention, product: Product, tensors: Tensors, config: LayerConfig) -> QuantizedWeight:
    """Errors of static activations name what does without them."""
    try:
        with weights.renamed(input_zero="input_zero_point"):
            return QuantizedWeight.canonical(**convention.direct(tensors, config))
    except ArgumentError as error:
        if error.argument not in ("input_scale", "input_zero_point"):
            raise
        remedy = f"{error.remedy}, or pass weight_only=True to terrazzo.load, which multiplies 16-bit activations"
        raise ArgumentError(error.argument, error.value, error.constraint, remedy) from None


FAMILY = loaders.family_of(W8A8, W8A8_FP8, pack=w8_format.pack, read=_read, bits=8)
"""How layers of published checkpoints are read."""
read_layer = FAMILY.read_layer
"""Canonical weight of one layer: see `Family.read_layer`."""
load_layer = FAMILY.load_layer
"""One layer, packed."""
iter_layers = FAMILY.iter_layers
"""Layers one at a time."""
load_model = FAMILY.load_model
"""All layers, as one object with a printable report."""
