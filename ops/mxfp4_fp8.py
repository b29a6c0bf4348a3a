"""MXFP4 weights on e4m3 activations (sm_89, sm_90a): e2m1 codes with a power of two for each 32 input channels, x in
float8_e4m3fn with a scale for each token.

    w = terrazzo.ops.mxfp4_fp8.quantize(weight)         # or pack(codes, scales), load_layer, from_gpt_oss
    y = terrazzo.ops.mxfp4_fp8.gemm(x, w)               # x float16 or bfloat16: quantized first, in one kernel
    y = terrazzo.ops.mxfp4_fp8.gemm(quantize_activations(x), w)

No weight is rounded: a code is an e4m3 number, and its scale enters float32 sums. Files are as in `ops.mxfp4`.
Format: terrazzo.ops.w4a8.mxfp4_format; what is computed, and how accurately: terrazzo.ops.w4a8.fp8_reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import mxfp4 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.converted import MXFP4_FP8
from terrazzo.ops.w4a8 import mxfp4_format, op
from terrazzo.ops.w4a8.activations import QuantizedActivations
from terrazzo.ops.w4a8.entry import gemm, grouped_gemm
from terrazzo.ops.w4a8.fp8_quantizer import quantize_activations
from terrazzo.ops.w4a8.mxfp4_format import GROUP, PackedWeight, QuantizedWeight
from terrazzo.ops.w4a8.op import weight_requests
from terrazzo.ops.weight_only import format
from terrazzo.ops.weight_only.quantizer import quantize_mxfp4

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedActivations",
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
    "quantize_activations",
    "quantize_weight",
    "read_layer",
    "weight_requests",
]
_FORM = "e2m1"


def __dir__() -> list[str]:
    return sorted(__all__)


def _own(weight: format.QuantizedWeight) -> QuantizedWeight:
    """The same weight, which is packed for e4m3."""
    return QuantizedWeight(weight.codes, weight.scales, weight.group_size, weight.weight, weight.bias, weight.factors)


FAMILY = loaders.family_of(MXFP4_FP8, pack=mxfp4_format.pack, made=_own)


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
        codes: uint8 [N, K], 0..15: sign, two bits of exponent, one of mantissa; or a canonical weight of this module or
            of `ops.mxfp4` (then the other tensors must be left out).
        scales: uint8 [N, ceil(K / 32)], e8m0: 2^(scale - 127), at most 240. bias: [N].
        target: GPU target to record; None takes the codes' device, or any target with e4m3 for CPU codes.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`; scales of a row that lie more than 39 binades apart; a target
            without e4m3. TargetError: see `Target.parse`.
    """
    made = codes if scales is None and bias is None else format.made(codes, scales, bias, "mxfp4", GROUP)
    return mxfp4_format.pack(made, target=target)


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
        ArgumentError: wrong shapes or dtypes, a scale that is NaN (255), or what `pack` refuses.
    """
    return mxfp4_format.pack(published.unpack(weight_packed, weight_scale, bias=bias), target=target)


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
        gate_up: see `mxfp4.from_gpt_oss`. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes, a scale that is NaN (255), or what `pack` refuses.
    """
    experts = published.unpack_experts(blocks, scales, bias, gate_up=gate_up)
    return GroupedWeight.stack([mxfp4_format.pack(one, target=target) for one in experts])


@dlpack.accepting
def quantize_weight(weight: SupportsDLPack, *, bias: SupportsDLPack | None = None) -> QuantizedWeight:
    """`mxfp4.quantize_weight`.

    Args:
        weight: float [N, K], finite. bias: float [N], kept with the weight.

    Raises:
        ArgumentError: as there.
    """
    return _own(quantize_mxfp4(weight, bias=bias))


@dlpack.accepting
def quantize(
    weight: SupportsDLPack, *, bias: SupportsDLPack | None = None, target: Target | str | None = None
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        bias: float [N], kept with the weight. target: see `pack`.

    Raises:
        ArgumentError: see `quantize_weight` and `pack`. TargetError: see `Target.parse`.
    """
    return mxfp4_format.pack(quantize_weight(weight, bias=bias), target=target)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int = GROUP,
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    out_dtype: str | None = None,
    target: Target | str,
    pipeline: str = "auto",
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. group_size: 32. m: numbers of tokens.
        dtype: of the activations that are quantized, "float16" or "bfloat16"; None leaves their kernel out.
        out_dtype: "float16" or "bfloat16"; None takes dtype. pipeline: see `gemm`. bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    facts = dict(m=m, dtype=dtype, out_dtype=out_dtype, target=target, pipeline=pipeline, bias=bias)
    return op.kernel_requests(n, k, group_size=group_size, dequantization=_FORM, **facts)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int = GROUP,
    m: int | tuple[int, ...] | None = None,
    out_dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size, out_dtype, bias: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    facts = dict(m=m, group_size=group_size, out_dtype=out_dtype, bias=bias, target=target)
    return op.grouped_requests(n, k, experts, dequantization=_FORM, **facts)


read_layer = FAMILY.read_layer
"""Canonical weight of one layer: see `Family.read_layer`."""
load_layer = FAMILY.load_layer
"""One layer, packed."""
iter_layers = FAMILY.iter_layers
"""Layers one at a time."""
load_model = FAMILY.load_model
"""All layers, as one object with a printable report."""
