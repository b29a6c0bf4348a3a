"""MXFP4: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in e2m1 codes with a power of two (e8m0) for each 32 input channels.

    w = terrazzo.ops.mxfp4.quantize(weight)        # or pack(codes, scales)
    y = terrazzo.ops.mxfp4.gemm(x, w)              # x bfloat16 (no weight is rounded) or float16

Format and numerics: `MXFP4` of terrazzo.ops.formats.weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.weight_only import format, grouped, op
from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
from terrazzo.ops.weight_only.format import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.op import weight_requests
from terrazzo.ops.weight_only.quantizer import quantize_mxfp4 as quantize_weight

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "gemm",
    "grouped_gemm",
    "grouped_requests",
    "kernel_requests",
    "pack",
    "quantize",
    "quantize_weight",
    "weight_requests",
]
GROUP_SIZE = 32
_FACTS = dict(group_size=GROUP_SIZE, symmetric=True, scale_dtype="e8m0", weight="mxfp4")


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        codes: uint8 [N, K], 0..15: sign, two bits of exponent, one of mantissa; or a QuantizedWeight (then the other
            tensors must be left out).
        scales: uint8 [N, ceil(K / 32)], e8m0: 2^(scale - 127), not 255. bias: [N].
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    return format.pack(format.made(codes, scales, bias, "mxfp4", GROUP_SIZE), target=target)


def quantize(
    weight: SupportsDLPack, *, bias: SupportsDLPack | None = None, target: Target | str | None = None
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(weight, bias=bias), target=target)`."""
    return format.pack(quantize_weight(weight, bias=bias), target=target)


def kernel_requests(
    n: int,
    k: int,
    *,
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    target: Target | str,
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. m: numbers of tokens.
        dtype: of activations and output, "float16" or "bfloat16". bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    return op.kernel_requests(n, k, m=m, dtype=dtype, target=target, bias=bias, **_FACTS)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        dtype, bias: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves, or a target without warpgroup instructions.
        TargetError: an unknown target.
    """
    return grouped.grouped_requests(n, k, experts, m=m, dtype=dtype, bias=bias, target=target, **_FACTS)
