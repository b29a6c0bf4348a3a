"""NVFP4: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in e2m1 codes with an e4m3 scale for each 16 k and a float32 of rows.

    w = terrazzo.ops.nvfp4.quantize(weight)        # or pack(codes, scales, factors), from_modelopt
    y = terrazzo.ops.nvfp4.gemm(x, w)              # x bfloat16 or float16; no weight is rounded

Format and numerics: `NVFP4` of terrazzo.ops.products.codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import nvfp4 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.wide import NVFP4
from terrazzo.ops.weight_only import format, op
from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
from terrazzo.ops.weight_only.format import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.op import weight_requests
from terrazzo.ops.weight_only.quantizer import quantize_nvfp4 as quantize_weight

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "from_compressed_tensors",
    "from_modelopt",
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
    "read_layer",
    "weight_requests",
]
GROUP_SIZE = 16
_FACTS = dict(symmetric=True, scale_dtype="e4m3", weight="nvfp4")

FAMILY: loaders.Family[QuantizedWeight, PackedWeight] = loaders.family_of(NVFP4, pack=format.pack)


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    factors: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        codes: uint8 [N, K], 0..15: sign, two bits of exponent, one of mantissa; or a QuantizedWeight (then the other
            tensors must be left out).
        scales: float8_e4m3fn [N, ceil(K / 16)], or its bytes as uint8. A negative one changes signs of its codes.
        factors: float32 [], [1] or [N], above 0: what rows are multiplied by, too; None for 1. bias: [N].
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    return format.pack(format.made(codes, scales, bias, "nvfp4", GROUP_SIZE, factors), target=target)


@dlpack.accepting
def from_modelopt(
    weight: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_scale_2: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of modelopt's NVFP4 or W4A16_NVFP4, packed: codes times weight_scale times weight_scale_2.

    Args:
        weight: uint8 [N, K/2], the first of two codes in the lower half. weight_scale: float8_e4m3fn [N, K/16].
        weight_scale_2: float32 [] or [1]. bias: float [N]. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes (scales that are swizzled, too), or a scale that is NaN.
    """
    return format.pack(published.unpack_modelopt(weight, weight_scale, weight_scale_2, bias=bias), target=target)


@dlpack.accepting
def from_compressed_tensors(
    weight_packed: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_global_scale: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of compressed-tensors' nvfp4-pack-quantized, packed: codes times weight_scale over weight_global_scale.

    Args:
        weight_packed: uint8 [N, K/2], the first of two codes in the lower half. weight_scale: float8_e4m3fn [N, K/16].
        weight_global_scale: float32 [1], a divisor. bias: float [N]. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes (scales that are swizzled, too), or a scale that is NaN.
    """
    return format.pack(published.unpack(weight_packed, weight_scale, weight_global_scale, bias=bias), target=target)


def quantize(
    weight: SupportsDLPack, *, bias: SupportsDLPack | None = None, target: Target | str | None = None
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        bias: float [N], kept with the weight.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    return format.pack(quantize_weight(weight, bias=bias), target=target)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int = GROUP_SIZE,
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    target: Target | str,
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. group_size: 16. m: numbers of tokens.
        dtype: of activations and output, "float16" or "bfloat16". bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    return op.kernel_requests(n, k, group_size=group_size, m=m, dtype=dtype, target=target, bias=bias, **_FACTS)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int = GROUP_SIZE,
    m: int | tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size, dtype, bias: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    facts = dict(m=m, dtype=dtype, bias=bias, target=target)
    return op.grouped_requests(n, k, experts, group_size=group_size, **facts, **_FACTS)


read_layer = FAMILY.read_layer
"""Canonical weight of one layer: see `Family.read_layer`."""
load_layer = FAMILY.load_layer
"""One layer, packed."""
iter_layers = FAMILY.iter_layers
"""Layers one at a time."""
load_model = FAMILY.load_model
"""All layers, as one object with a printable report."""
