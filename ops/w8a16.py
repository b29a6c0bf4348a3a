"""W8A16: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in 8-bit integers with scale and zero point of each group along K.

    w = terrazzo.ops.w8a16.load_layer("model/", "model.layers.0.mlp.down_proj")  # or pack, from_gptq, quantize
    y = terrazzo.ops.w8a16.gemm(x, w)                                            # x float16 or bfloat16

Format and numerics: `U8` of terrazzo.ops.products.codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions import compressed_tensors, gptq
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.wide import W8A16
from terrazzo.ops.weight_only import integer_quantizer, integers, op
from terrazzo.ops.weight_only.byte_integers import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
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
    "from_compressed_tensors",
    "from_gptq",
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
    "read_compressed_tensors",
    "read_gptq",
    "read_layer",
    "weight_requests",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    zeros: SupportsDLPack | None = None,
    *,
    group_size: int | None = None,
    perm: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack an 8-bit weight for the kernels, on the device where its codes are.

    Args:
        codes: integers [N, K] 0..255, signed ones plus 128; or a QuantizedWeight (then the other tensors must be left
            out).
        scales: float [N, G]. zeros: integers [N, G] 0..255, or None for 128. perm: int [K]. bias: float [N].
        group_size: input channels for each scale. All of them: see `QuantizedWeight.canonical`.
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Any N >= 1 and K >= 1: rows are padded to 64 and input channels to 128 with code 0 and scale 0.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`; a PackedWeight. TargetError: see `Target.parse`.
    """
    return integers.made(QuantizedWeight, codes, scales, zeros, group_size, perm, bias).pack(target=target)


def quantize(weight: SupportsDLPack, *, target: Target | str | None = None, **options: Any) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(weight, **options), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        options: of `quantize_weight`.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    return pack(quantize_weight(weight, **options), target=target)


@dlpack.accepting
def quantize_weight(
    weight: SupportsDLPack,
    *,
    group_size: int = -1,
    symmetric: bool = True,
    scale_dtype: torch.dtype | None = None,
    clip_steps: int = 1,
    clip_min: float = 0.5,
    importance: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
) -> QuantizedWeight:
    """Round to nearest, on the weight's device; codes are for the rounded scale.

    Args:
        weight: float [N, K], finite; any K, a ragged last group included.
        group_size: 32, 64, 128, or -1 (or K) for one scale of a row.
        symmetric: zero point 128 everywhere (codes - 128 in -127..127), else one of 0..255 for each group.
        scale_dtype: f16, bf16 or f32; None takes the weight's dtype if that is 16-bit, else f16.
        clip_steps, clip_min: see `w4a16.quantize_weight`. importance: float [K], of its error.
        bias: float [N], kept with the weight.

    Raises:
        ArgumentError: for anything else.
    """
    options = dict(symmetric=symmetric, scale_dtype=scale_dtype, clip_steps=clip_steps, clip_min=clip_min)
    facts = dict(group_size=group_size, importance=importance, bias=bias)
    return integer_quantizer.of_float(QuantizedWeight, weight, **facts, **options)


def from_gptq(*tensors: Any, target: Target | str | None = None, **options: Any) -> PackedWeight:
    """`pack(read_gptq(...), target=target)`: the arguments and errors of `read_gptq`."""
    return pack(read_gptq(*tensors, **options), target=target)


def from_compressed_tensors(*tensors: Any, target: Target | str | None = None, **options: Any) -> PackedWeight:
    """`pack(read_compressed_tensors(...), target=target)`: the arguments and errors of `read_compressed_tensors`."""
    return pack(read_compressed_tensors(*tensors, **options), target=target)


@dlpack.accepting
def read_gptq(
    qweight: SupportsDLPack,
    qzeros: SupportsDLPack | None,
    scales: SupportsDLPack,
    g_idx: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    bits: int = 8,
    version: str | None = None,
    symmetric: bool | None = None,
    desc_act: bool | None = None,
) -> QuantizedWeight:
    """GPTQ and AutoRound in 8 bits, as `w4a16.read_gptq` reads them in 4.

    Args:
        qweight: int32 [K/4, N].
        qzeros: int32 [G, ceil(N/4)]; None only for a symmetric layer.
        scales: f16 [G, N]. g_idx: int32 [K], group of each input channel. bias: [N].
        group_size, symmetric, desc_act: what the config states. bits: only 8 is read.
        version: "gptq" (v1: zero points are stored minus one, 127 for 128, 255 for 0) or "gptq_v2"; None accepts only
            a layer whose zero points tell.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits, a g_idx with no common unit, a contradicted config.
    """
    facts = dict(bias=bias, group_size=group_size, bits=bits, version=version, symmetric=symmetric, desc_act=desc_act)
    return gptq.unpack_gptq(qweight, qzeros, scales, g_idx, **facts, code_bits=8)


@dlpack.accepting
def read_compressed_tensors(
    weight: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_zero_point: SupportsDLPack | None = None,
    weight_shape: SupportsDLPack | tuple[int, int] | None = None,
    weight_g_idx: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    bits: int = 8,
    format: str | None = None,
    symmetric: bool | None = None,
) -> QuantizedWeight:
    """compressed-tensors in 8 bits: "pack-quantized", or "int-quantized" with activations left in 16 bits.

    Args:
        weight: int32 [N, ceil(K/4)] of signed codes plus 128, or int8 [N, K].
        weight_scale: f16, bf16 or f32 [N, G]; [N] for scales of rows, [1] for one of the tensor.
        weight_zero_point: int32 [ceil(N/4), G] packed along N plus 128, or int8 [N, G] signed; None when symmetric.
        weight_shape: (N, K); None takes what the columns hold.
        weight_g_idx: int32 [K] (actorder "group"), of packed codes; all -1 counts as none. bias: [N].
        group_size, symmetric: what the config states (-1 or None for strategy "channel"). bits: only 8 is read.
        format: "pack-quantized" or "int-quantized"; None believes the tensors.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits or formats, a contradicted config.
    """
    tensors = weight, weight_scale, weight_zero_point, weight_shape, weight_g_idx
    facts = dict(bias=bias, group_size=group_size, bits=bits, format=format, symmetric=symmetric)
    return compressed_tensors.unpack_bytes(*tensors, **facts)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int,
    symmetric: bool = True,
    scale_dtype: str = "float16",
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    target: Target | str,
    numerics: str = "auto",
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. m: numbers of tokens. group_size: 32, 64, 128, or k for one scale of a row.
        symmetric: whether there are no zero points. scale_dtype: of scales.
        dtype: of activations and output, "float16" or "bfloat16". numerics: see `gemm`. bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, numerics=numerics)
    return op.kernel_requests(n, k, m=m, dtype=dtype, target=target, bias=bias, weight="u8", **facts)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int,
    symmetric: bool = True,
    scale_dtype: str = "float16",
    m: int | tuple[int, ...] | None = None,
    dtype: str = "float16",
    numerics: str = "auto",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size, symmetric, scale_dtype, dtype, numerics, bias: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, numerics=numerics)
    return op.grouped_requests(n, k, experts, m=m, dtype=dtype, bias=bias, target=target, weight="u8", **facts)


FAMILY: loaders.Family[QuantizedWeight, PackedWeight] = loaders.family_of(W8A16, pack=pack, bits=8)
read_layer = FAMILY.read_layer
"""Canonical weight of one layer: see `Family.read_layer`."""
load_layer = FAMILY.load_layer
"""One layer, packed."""
iter_layers = FAMILY.iter_layers
"""Layers one at a time."""
load_model = FAMILY.load_model
"""All layers, as one object with a printable report."""
