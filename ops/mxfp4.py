"""MXFP4: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in e2m1 codes with a power of two (e8m0) for each 32 input channels.

    w = terrazzo.ops.mxfp4.quantize(weight)        # or pack(codes, scales)
    y = terrazzo.ops.mxfp4.gemm(x, w)              # x bfloat16 (no weight is rounded) or float16

Format and numerics: `MXFP4` of terrazzo.ops.products.codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import mxfp4 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.wide import MXFP4
from terrazzo.ops.weight_only import format, op
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
    "from_compressed_tensors",
    "from_gpt_oss",
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
GROUP_SIZE = 32
_FACTS = dict(symmetric=True, scale_dtype="e8m0", weight="mxfp4")

FAMILY: loaders.Family[QuantizedWeight, PackedWeight] = loaders.family_of(MXFP4, pack=format.pack)


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


@dlpack.accepting
def from_compressed_tensors(
    weight_packed: SupportsDLPack,
    weight_scale: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of compressed-tensors' mxfp4-pack-quantized, packed.

    Args:
        weight_packed: uint8 [N, K/2], the first of two codes in the lower half. weight_scale: uint8 [N, K/32].
        bias: float [N]. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes, or a scale that is NaN (255).
    """
    return format.pack(published.unpack(weight_packed, weight_scale, bias=bias), target=target)


@dlpack.accepting
def from_gpt_oss(
    blocks: SupportsDLPack,
    scales: SupportsDLPack,
    bias: SupportsDLPack | None = None,
    *,
    gate_up: str | None = None,
    target: Target | str | None = None,
) -> GroupedWeight:
    """The experts of a gpt-oss projection, packed and stacked.

    Args:
        blocks: uint8 [E, N, K/32, 16] ("gate_up_proj_blocks"). scales: uint8 [E, N, K/32]. bias: float [E, N].
        gate_up: "interleaved" for gate_up_proj, whose row 2i is gate i and row 2i + 1 is up i: the packed rows are then
            all gates, then all ups. "halves" or None leaves rows as they are.
        target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes, or a scale that is NaN (255).
    """
    experts = published.unpack_experts(blocks, scales, bias, gate_up=gate_up)
    return GroupedWeight.stack([format.pack(one, target=target) for one in experts])


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
        n, k: of the weight. group_size: 32. m: numbers of tokens.
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
