"""Weight-only FP8: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in e4m3 codes with a scale for each row or 128 x 128 block.

    w = terrazzo.ops.fp8.quantize(weight, granularity="channel")        # or pack(codes, scales)
    y = terrazzo.ops.fp8.gemm(x, w)                                     # x bfloat16 or float16; no weight is rounded

Format and numerics: `FP8` of terrazzo.ops.products.codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import fp8 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.wide import FP8
from terrazzo.ops.weight_only import format, op
from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
from terrazzo.ops.weight_only.format import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.op import weight_requests
from terrazzo.ops.weight_only.quantizer import quantize_fp8 as quantize_weight

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "from_checkpoint",
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
_FACTS = dict(symmetric=True, weight="fp8")

FAMILY: loaders.Family[QuantizedWeight, PackedWeight] = loaders.family_of(FP8, pack=format.pack)


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    *,
    group_size: int | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        codes: float8_e4m3fn [N, K], or its bytes as uint8; or a QuantizedWeight (then the other tensors must be left
            out).
        scales: float, what codes are multiplied by: [] or [1] for all rows, [N] or [N, 1] for each,
            [ceil(N / 128), ceil(K / 128)] for blocks, [N, ceil(K / 128)] for 128 k of a row. 16-bit ones of blocks are
            folded into operands, see `quantize_weight`.
        group_size: 128, or K for one scale; None takes 128 for matrices with more than one column or row of blocks.
        bias: [N]. target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    if (
        group_size is None
        and not getattr(codes, "is_nested", False)
        and hasattr(codes, "shape")
        and len(codes.shape) == 2
    ):
        n, k = codes.shape
        shape = tuple(getattr(scales, "shape", ()))
        rows = shape in ((), (1,), (n,), (n, 1)) or (shape == (1, 1) and k <= 128)
        group_size = k if rows else 128
    return format.pack(format.made(codes, scales, bias, "fp8", group_size), target=target)


@dlpack.accepting
def from_checkpoint(
    weight: SupportsDLPack,
    weight_scale: SupportsDLPack | None = None,
    weight_scale_inv: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of compressed-tensors' float-quantized, or of a checkpoint with quant_method "fp8", packed.

    Args:
        weight: float8_e4m3fn [N, K].
        weight_scale: float [], [1], [N], [N, 1] or [ceil(N / 128), ceil(K / 128)].
        weight_scale_inv: as weight_scale, [ceil(N / 128), ceil(K / 128)] in files with blocks; a multiplier, too. One
            of both is given.
        bias: [N]. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes, a code that is NaN, or a scale that is not finite or negative.
    """
    return format.pack(published.unpack(weight, weight_scale, weight_scale_inv, bias=bias), target=target)


def quantize(
    weight: SupportsDLPack,
    *,
    granularity: str = "channel",
    scale_dtype: torch.dtype | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        bias: float [N], kept with the weight.
        granularity, scale_dtype: see `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    made = quantize_weight(weight, granularity=granularity, scale_dtype=scale_dtype, bias=bias)
    return format.pack(made, target=target)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int,
    scale_dtype: str = "float32",
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    target: Target | str,
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. m: numbers of tokens.
        group_size: 128 for scales of blocks, k for scales of rows or of the tensor. scale_dtype: of blocks.
        dtype: of activations and output, "float16" or "bfloat16". bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    facts = dict(m=m, dtype=dtype, bias=bias, target=target, scale_dtype=scale_dtype)
    return op.kernel_requests(n, k, group_size=group_size, **facts, **_FACTS)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int,
    scale_dtype: str = "float32",
    m: int | tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size, scale_dtype, dtype, bias: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    facts = dict(m=m, dtype=dtype, bias=bias, target=target, scale_dtype=scale_dtype)
    return op.grouped_requests(n, k, experts, group_size=group_size, **facts, **_FACTS)


read_layer = FAMILY.read_layer
"""Canonical weight of one layer: see `Family.read_layer`."""
load_layer = FAMILY.load_layer
"""One layer, packed."""
iter_layers = FAMILY.iter_layers
"""Layers one at a time."""
load_model = FAMILY.load_model
"""All layers, as one object with a printable report."""
