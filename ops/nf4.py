"""NF4: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in codes of the NF4 codebook with a scale for each 64 input channels.

    w = terrazzo.ops.nf4.quantize(weight)          # or pack(codes, scales), from_bitsandbytes, load_layer
    y = terrazzo.ops.nf4.gemm(x, w)                # x bfloat16 or float16

Format and numerics: `NF4` of terrazzo.ops.products.codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack, weights
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import bitsandbytes as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products import codes as known
from terrazzo.ops.products.wide import NF4
from terrazzo.ops.quantizers.rows import row_chunks
from terrazzo.ops.quantizers.scales import check_scale_dtype, check_scales
from terrazzo.ops.weight_only import format, op
from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
from terrazzo.ops.weight_only.format import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.op import weight_requests

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "from_bitsandbytes",
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
GROUP_SIZE = 64
_FACTS = dict(symmetric=True, weight="nf4")

FAMILY: loaders.Family[QuantizedWeight, PackedWeight] = loaders.family_of(NF4, pack=format.pack)


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
        codes: uint8 [N, K], 0..15, places in the codebook; or a QuantizedWeight (then the other tensors must be left
            out).
        scales: float [N, ceil(K / 64)], finite. float32 ones multiply sums of 64 k; bfloat16 or float16 ones are folded
            into operands of activations of that dtype, which takes less memory and rounds each weight once more.
        bias: [N]. target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    return format.pack(format.made(codes, scales, bias, "nf4", GROUP_SIZE), target=target)


@dlpack.accepting
def from_bitsandbytes(
    weight: SupportsDLPack,
    state: Mapping[str, torch.Tensor],
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of bitsandbytes' 4-bit NF4, packed.

    Args:
        weight: uint8 [N * K / 2, 1], or another dtype of the same bytes (`bnb_4bit_quant_storage`).
        state: what `QuantState.as_dict(packed=True)` gives and a file has after "weight.": "absmax", "quant_map",
            "quant_state.bitsandbytes__nf4", and with double quantization "nested_absmax" and "nested_quant_map".
        bias: float [N]. target: see `pack`.

    Raises:
        ArgumentError: a tensor that is missing, is none or does not fit, another codebook, blocks of other than 64
            weights, or blocks across rows (K is no multiple of 64).
    """
    return format.pack(published.unpack(weight, state, bias=bias), target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack, *, scale_dtype: torch.dtype | None = None, bias: SupportsDLPack | None = None
) -> QuantizedWeight:
    """The nearest values of the codebook, with the largest magnitude of each 64 k as scale.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included. bias: float [N], kept with the weight.
        scale_dtype: torch.bfloat16 or torch.float16, None for float32, which bitsandbytes has: see `pack`.

    Raises:
        ArgumentError: for anything else, and where `scale_dtype` is too narrow for the scale of a group.
    """
    import torch

    n, k = weights.check_matrix(weight)
    scale_dtype = torch.float32 if scale_dtype is None else scale_dtype
    check_scale_dtype(scale_dtype)
    groups = -(-k // GROUP_SIZE)
    table = torch.tensor(known.NF4.values, device=weight.device)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.empty(n, groups * GROUP_SIZE, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=scale_dtype, device=weight.device)
    for part in row_chunks(n, groups * GROUP_SIZE, weight.device.type):
        given = torch.nn.functional.pad(weight[part].contiguous(), (0, groups * GROUP_SIZE - k))
        w = given.float().view(-1, groups, GROUP_SIZE)
        scales[part] = w.abs().amax(-1).to(scales.dtype)
        check_scales(scales[part], given.view(w.shape).any(-1))
        each = scales[part].float()[..., None]
        relative = torch.where(each > 0, w / each, torch.zeros_like(w))
        codes[part] = torch.bucketize(relative, between).to(torch.uint8).view(-1, groups * GROUP_SIZE)
    return QuantizedWeight.canonical(codes[:, :k], scales, weight="nf4", group_size=GROUP_SIZE, bias=bias)


def quantize(
    weight: SupportsDLPack,
    *,
    scale_dtype: torch.dtype | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        scale_dtype: see `quantize_weight`. bias: float [N], kept with the weight.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    return format.pack(quantize_weight(weight, scale_dtype=scale_dtype, bias=bias), target=target)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int = GROUP_SIZE,
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    target: Target | str,
    bias: bool = False,
    scale_dtype: str = "float32",
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. group_size: 64. m: numbers of tokens.
        dtype: of activations and output, "float16" or "bfloat16". bias: whether one is added.
        scale_dtype: of the scales, "float32" or that of activations.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    facts = dict(group_size=group_size, scale_dtype=scale_dtype, **_FACTS)
    return op.kernel_requests(n, k, m=m, dtype=dtype, target=target, bias=bias, **facts)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int = GROUP_SIZE,
    m: int | tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    bias: bool = False,
    scale_dtype: str = "float32",
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size, dtype, bias, scale_dtype: see `kernel_requests`.

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
