"""Published checkpoint layers -> W4A16 weights: AWQ gemm, GPTQ v1 and v2, compressed-tensors pack-quantized.

`read_*` give a `QuantizedWeight`, `from_*` pack it as well; `ops/checkpoints` reads the words. Everything runs on the
device of the tensors passed in. `read_layer`, `load_layer`, `iter_layers` and `load_model` take files. There a layer is
a name prefix ("model.layers.0.mlp.down_proj") whose tensors are `<prefix>.qweight`, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions.awq import unpack_awq
from terrazzo.ops.checkpoints.conventions.compressed_tensors import unpack_packed
from terrazzo.ops.checkpoints.conventions.gptq import unpack_gptq
from terrazzo.ops.checkpoints.loaders import Layer
from terrazzo.ops.products.wide import W4A16
from terrazzo.ops.weight_only.integers import PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack


def from_awq(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_awq(...), target=target)`: the arguments and errors of `read_awq`."""
    return pack(read_awq(*tensors, **options), target=target)


def from_gptq(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_gptq(...), target=target)`: the arguments and errors of `read_gptq`."""
    return pack(read_gptq(*tensors, **options), target=target)


def from_compressed_tensors(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_compressed_tensors(...), target=target)`: the arguments and errors of `read_compressed_tensors`."""
    return pack(read_compressed_tensors(*tensors, **options), target=target)


@dlpack.accepting
def read_awq(
    qweight: SupportsDLPack,
    qzeros: SupportsDLPack | None,
    scales: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str = "gemm",
) -> QuantizedWeight:
    """AWQ "gemm" (AutoAWQ): w[k, n] = (q - z) * s, codes packed along N in the order 0 2 4 6 1 3 5 7.

    Args:
        qweight: int32 [K, N/8].
        qzeros: int32 [G, N/8], same order; None only for a symmetric layer (zero point 8).
        scales: f16 [G, N].
        bias: [N].
        group_size: what the config states (-1: one group); None takes K / G.
        bits, version: what the config states; only 4 and "gemm" are read.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits, or version gemv, gemv_fast, marlin.
    """
    facts = dict(bias=bias, group_size=group_size, bits=bits, version=version)
    return unpack_awq(qweight, qzeros, scales, **facts)


@dlpack.accepting
def read_gptq(
    qweight: SupportsDLPack,
    qzeros: SupportsDLPack | None,
    scales: SupportsDLPack,
    g_idx: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str | None = None,
    symmetric: bool | None = None,
    desc_act: bool | None = None,
    zero_overflow: str = "wrap",
) -> QuantizedWeight:
    """GPTQ (AutoGPTQ, GPTQModel): w[k, n] = (q - z[g_idx[k]]) * s[g_idx[k]], codes packed along K, zero points along N.

    Args:
        qweight: int32 [K/8, N], of 2 bits [K/16, N].
        qzeros: int32 [G, ceil(N/8)], of 2 bits [G, ceil(N/16)]; None only for a symmetric layer.
        scales: f16 [G, N].
        g_idx: int32 [K], group of each input channel; None means k // group_size.
        bias: [N].
        group_size: what the config states (-1: one group); None takes ceil(K / G).
        bits: what the config states, 4 or 2. Codes of 2 bits are packed in 4, with the values that they have.
        version: "gptq" (v1: zero points are stored minus one) or "gptq_v2"; None accepts only a layer whose zero
            points tell (every stored nibble 7 is a symmetric v1 layer, every 8 a symmetric v2 one).
        symmetric, desc_act: what the config states; a contradiction with the tensors is an error. None believes the
            tensors.
        zero_overflow: a v1 nibble 15 is zero point 0 ("wrap", as the exllama kernels read it) or 16 ("16", as the
            torch paths do).

    Act-order: columns are sorted by group into `perm`. Groups of unequal size are split into units of 128, 64 or 32
    channels.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits, a marlin layer, a g_idx with no common unit, a contradicted
            config.
    """
    facts = dict(bias=bias, group_size=group_size, bits=bits, version=version)
    facts |= dict(symmetric=symmetric, desc_act=desc_act, zero_overflow=zero_overflow)
    return unpack_gptq(qweight, qzeros, scales, g_idx, **facts)


@dlpack.accepting
def read_compressed_tensors(
    weight_packed: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_zero_point: SupportsDLPack | None = None,
    weight_shape: SupportsDLPack | tuple[int, int] | None = None,
    weight_g_idx: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    bits: int = 4,
    format: str = "pack-quantized",
    symmetric: bool | None = None,
) -> QuantizedWeight:
    """compressed-tensors "pack-quantized" (llm-compressor): signed codes plus 8, packed along K in natural order.

    Args:
        weight_packed: int32 [N, ceil(K/8)].
        weight_scale: f16, bf16 or f32 [N, G].
        weight_zero_point: int32 [ceil(N/8), G] packed along N plus 8, or int8 [N, G] signed (older files); None when
            symmetric.
        weight_shape: (N, K); None takes K = 8 * columns.
        weight_g_idx: int32 [K] (actorder "group"); all -1 counts as none.
        bias: [N].
        group_size: what the config states (-1 or None for strategy "channel"); None takes ceil(K / G).
        bits, format: what the config states; only 4 and "pack-quantized" are read.
        symmetric: what the config states; a contradiction with the tensors is an error.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits or formats, a contradicted config.
    """
    facts = dict(bias=bias, group_size=group_size, bits=bits, format=format, symmetric=symmetric)
    tensors = weight_packed, weight_scale, weight_zero_point, weight_shape, weight_g_idx
    return unpack_packed(*tensors, **facts)


FAMILY: loaders.Family[QuantizedWeight, PackedWeight] = loaders.family_of(W4A16, pack=pack)


def read_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    zero_overflow: str = "wrap",
) -> QuantizedWeight:
    """Canonical weight of one layer.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        format: "awq", "gptq", "gptq_v2", "compressed_tensors", or auto-round's "auto_round", "auto_round:auto_gptq",
            "auto_round:auto_awq". It is obeyed whatever the config says, and needed when neither config nor tensors
            tell (asymmetric GPTQ in a bare file).
        device: where the weight is built, as torch names it: "cuda", "cuda:1", 1, a torch.device.
        zero_overflow: see `read_gptq`.

    Raises:
        ArgumentError: no such layer, a missing tensor, a layer that W4A16 cannot take, or one that its config or
            further tensors give another meaning (`load_model` skips it with the same reason).
    """
    return FAMILY.one(path, name, format=format, device=device, zero_overflow=zero_overflow)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    zero_overflow: str = "wrap",
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of a checkpoint, packed: `pack(read_layer(...), target=target)`; it lies on `device`.

    Args:
        path, name, format, device, zero_overflow: see `read_layer`. target: see `pack`.

    Raises:
        ArgumentError: see both. TargetError: see `Target.parse`.
    """
    return pack(read_layer(path, name, format=format, device=device, zero_overflow=zero_overflow), target=target)


def iter_layers(
    path: str | Path,
    *,
    select: str = "",
    packed: bool = True,
    strict: bool = False,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    zero_overflow: str = "wrap",
    target: Target | str | None = None,
) -> Iterator[Layer]:
    """Read a checkpoint one layer at a time, in the order of the names; at most one layer is held.

    Args:
        path: a Hugging Face folder (sharded or not) or a .safetensors file; a config beside the file is read too.
        select: regular expression searched in the layer's name; others are passed over.
        packed: False yields canonical weights.
        strict: raise for a 4-bit layer that cannot be read instead of yielding the reason.
        format, device, zero_overflow: see `read_layer`. target: see `pack`.

    Yields:
        a `Layer` for every 4-bit layer and for every other tensor (with the reason why it is skipped).

    Raises:
        ArgumentError: path, device, select or the checkpoint's config is no such thing; with `strict`, a 4-bit layer
            cannot be read. TargetError: an unknown target.
    """
    yield from FAMILY.each(
        path, select=select, packed=packed, strict=strict, format=format, device=device, target=target,
        zero_overflow=zero_overflow,
    )  # fmt: skip


load_model = FAMILY.load_model
"""All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
