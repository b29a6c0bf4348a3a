"""AWQ: codes and zero points packed along N."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions import auto_round, gptq
from terrazzo.ops.checkpoints.conventions.base import (
    GROUP,
    WORD,
    Convention,
    LayerConfig,
    Leaf,
    Method,
    Tensors,
    needs_zeros,
)
from terrazzo.ops.checkpoints.groups import exact_groups
from terrazzo.ops.checkpoints.words import check_bits, check_float, check_group, check_words, nibbles
from terrazzo.ops.weight_only.integers import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.products.product import Product

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column 8c + j of a row lies in nibble AWQ_ORDER[j] of word c."""


def unpack_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str = "gemm",
) -> QuantizedWeight:
    """Codes of a layer; arguments and errors as of `w4a16.read_awq`."""
    if not isinstance(version, str) or version.lower() != "gemm":
        constraint = "must be 'gemm': gemv, gemv_fast and marlin store other layouts"
        raise ArgumentError("version", version, constraint, "export the model again with version='gemm'")
    check_bits(bits)
    check_float("scales", scales, "[G, N]")
    n = scales.shape[1]
    if n % 8:
        raise ArgumentError(
            "scales", list(scales.shape), "AWQ packs 8 columns to a word: N must be a multiple of 8", "pad the layer"
        )
    k = check_words("qweight", qweight, (None, n // 8))[0]
    zeros = None
    if qzeros is not None:
        check_words("qzeros", qzeros, (scales.shape[0], n // 8))
        zeros = _awq_nibbles(qzeros).T
    codes = _awq_nibbles(qweight).T
    size = exact_groups(k, scales.shape[0], check_group(group_size))
    return QuantizedWeight.canonical(codes, scales.T, zeros, group_size=size, bias=bias)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    values = nibbles(words)
    return values.view(values.shape[0], -1, 8)[..., list(AWQ_ORDER)].view(values.shape)


def _read(tensors: Tensors, config: LayerConfig, product: Product, **options: object) -> QuantizedWeight:
    needs_zeros(tensors, "awq", config)
    facts = dict(bits=config.bits_for(product), group_size=config.group_size, version=config.version or "gemm")
    return unpack_awq(**({"qzeros": None} | tensors | facts))


def _holds(checkpoint: Checkpoint, prefix: str, leaf: str) -> bool:
    """By what the config states, else by the shapes: a word of codes has 8 columns of scales."""
    if checkpoint.has(prefix, "s1_scales"):
        return False
    stated = checkpoint.config.layer(prefix).format
    if stated in ("awq", *gptq.CONVENTION.formats):
        return stated == "awq"
    shapes = [checkpoint.shape(prefix, name) for name in ("qweight", "scales")]
    if None in shapes or checkpoint.has(prefix, "g_idx"):
        return False
    words, scales = (shape[-1:] for shape in shapes)  # [] of tensors without dimensions
    return [8 * columns for columns in words] == scales


CONVENTION = Convention(
    "awq",
    (
        Leaf("qweight", n=(1, WORD), k=(0, 1)),
        Leaf("qzeros", n=(1, WORD), k=(0, GROUP), optional=True),
        Leaf("scales", n=(1, 1), k=(0, GROUP)),
    ),
    read=_read,
    holds=_holds,
    formats=("awq",),
    divided=True,
)


def _layer(raw: Stated, name: str) -> LayerConfig:
    skip = fields.left_out(raw, name, "modules_to_not_convert")
    versions = [raw[key].lower() for key in ("version", "checkpoint_format", "format") if raw.get(key)]
    return LayerConfig(
        "awq",
        fields.whole(raw, "bits" if "bits" in raw else "w_bit", 4),
        fields.whole(raw, "group_size" if "group_size" in raw else "q_group_size"),
        next((version for version in versions if version != "gemm"), raw.get("version") or "gemm"),
        symmetric=True if raw.get("zero_point") is False else None,
        skip=skip,
        excluded=bool(skip),
    )


METHOD = Method(
    "awq",
    _layer,
    read=f"{fields.SIZES} version format checkpoint_format zero_point",
    neutral=f"{auto_round.WRITTEN} {gptq.WRITTEN} do_fuse fuse_max_seq_len modules_to_fuse ignore sym duo_scaling "
    "modules_to_not_convert n_grid apply_clip",
    unnamed=lambda raw: bool({"w_bit", "version"} & set(raw)),
    by_tensors=True,
)
