"""W8A8: y[M, N] = x[M, K] w[N, K]^T (+ bias), both in int8 or in e4m3, multiplied as they are.

    w = terrazzo.ops.w8a8.quantize(weight)                      # int8, a scale for each row, x by token
    w = terrazzo.ops.w8a8.quantize(weight, codes="e4m3", granularity="block")     # DeepSeek's and Qwen's 128 x 128
    y = terrazzo.ops.w8a8.gemm(x, w)                            # x bfloat16 or float16, quantized as w wants it
    y = terrazzo.ops.w8a8.gemm(terrazzo.ops.w8a8.quantize_activations(x, w), w)

`terrazzo.ops.w4a8.w8a8.reference` says what is computed, and how accurately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.w4a8.w8a8 import format as w8_format
from terrazzo.ops.w4a8.w8a8.entry import gemm, quantize_activations
from terrazzo.ops.w4a8.w8a8.format import PackedWeight, QuantizedWeight
from terrazzo.ops.w4a8.w8a8.op import kernel_requests, weight_requests
from terrazzo.ops.w4a8.w8a8.quantizer import quantize, quantize_weight

if TYPE_CHECKING:
    from typing import Any

    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "PackedWeight",
    "QuantizedWeight",
    "gemm",
    "kernel_requests",
    "pack",
    "quantize",
    "quantize_activations",
    "quantize_weight",
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
