"""MXFP4 weights on MXFP8 activations (sm_89, sm_90a): both have a power of two for each 32 input channels, x of each
token, as OCP's Microscaling formats have.

    w = terrazzo.ops.mxfp4_mxfp8.quantize(weight)       # or pack(codes, scales), load_layer, from_gpt_oss
    y = terrazzo.ops.mxfp4_mxfp8.gemm(x, w)             # x float16 or bfloat16: quantized first, in one kernel
    y = terrazzo.ops.mxfp4_mxfp8.gemm(MXActivations.of(q, scales), w)    # as another library quantized it

No weight is rounded: scales of both enter float32 sums of 32 products, exactly. Files and weights are the same as of
`ops.mxfp4`; `ops.mxfp4_fp8` multiplies them with one scale for each token, which is faster (docs/operators.md).
Format: terrazzo.ops.w4a8.mxfp8; what is computed, and how accurately: terrazzo.ops.w4a8.fp8_reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import mxfp4 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.converted import MXFP4_MXFP8
from terrazzo.ops.w4a8 import entry, mxfp8, op
from terrazzo.ops.w4a8.entry import gemm, grouped_gemm
from terrazzo.ops.w4a8.mxfp8 import GROUP, MXActivations, PackedWeight, QuantizedWeight
from terrazzo.ops.w4a8.op import weight_requests
from terrazzo.ops.weight_only import format
from terrazzo.ops.weight_only.quantizer import quantize_mxfp4

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "MXActivations",
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
    "quantize_activations",
    "quantize_weight",
    "read_layer",
    "weight_requests",
]
_FORM = dict(dequantization=MXFP4_MXFP8.ways[0].name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _own(weight: format.QuantizedWeight) -> QuantizedWeight:
    """The same weight, which is packed for MXFP8."""
    return QuantizedWeight(weight.codes, weight.scales, weight.group_size, weight.weight, weight.bias, weight.factors)


FAMILY = loaders.family_of(MXFP4_MXFP8, pack=mxfp8.pack, made=_own)


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
        codes, scales, bias, target: see `mxfp4_fp8.pack`.

    Raises:
        ArgumentError: as there. TargetError: see `Target.parse`.
    """
    made = codes if scales is None and bias is None else format.made(codes, scales, bias, "mxfp4", GROUP)
    return mxfp8.pack(made, target=target)


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
        weight_packed, weight_scale, bias, target: see `mxfp4_fp8.from_compressed_tensors`.

    Raises:
        ArgumentError: as there.
    """
    return mxfp8.pack(published.unpack(weight_packed, weight_scale, bias=bias), target=target)


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
        blocks, scales, bias, gate_up, target: see `mxfp4_fp8.from_gpt_oss`.

    Raises:
        ArgumentError: as there.
    """
    experts = published.unpack_experts(blocks, scales, bias, gate_up=gate_up)
    return GroupedWeight.stack([mxfp8.pack(one, target=target) for one in experts])


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
    return mxfp8.pack(quantize_weight(weight, bias=bias), target=target)


def quantize_activations(x: SupportsDLPack, *, out: MXActivations | None = None) -> MXActivations:
    """Quantize activations to MXFP8, on the current stream, in one kernel; `mxfp8.reference` has the same bits.

    Args:
        x: float16 or bfloat16 [..., K] on a CUDA device. out: written and returned instead of new tensors.

    Raises:
        ArgumentError: an operand that does not fit. CaptureError, ToolchainError, CompileError: see
            `w4a8.quantize_activations`.
    """
    return entry.quantize_activations(x, out=out, codes=mxfp8.FORM)


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
        n, k, group_size, m, dtype, out_dtype, pipeline, bias: see `mxfp4_fp8.kernel_requests`. target: as there.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    facts = dict(m=m, dtype=dtype, out_dtype=out_dtype, target=target, pipeline=pipeline, bias=bias)
    return op.kernel_requests(n, k, group_size=group_size, **facts, **_FORM)


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
        n, k, experts, group_size, m, out_dtype, bias, target: see `mxfp4_fp8.grouped_requests`.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    facts = dict(m=m, group_size=group_size, out_dtype=out_dtype, bias=bias, target=target)
    return op.grouped_requests(n, k, experts, **facts, **_FORM)


read_layer = FAMILY.read_layer
"""Canonical weight of one layer: see `Family.read_layer`."""
load_layer = FAMILY.load_layer
"""One layer, packed."""
iter_layers = FAMILY.iter_layers
"""Layers one at a time."""
load_model = FAMILY.load_model
"""All layers, as one object with a printable report."""
