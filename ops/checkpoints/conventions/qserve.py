"""QServe (OmniServe, QoQ): signed bytes of a channel scale, cut into 4-bit codes by groups or by channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Leaf, Method, Tensors
from terrazzo.ops.checkpoints.words import check_bits, check_int8, check_plain

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.products.product import Product

LAYOUT = "qserve_g128"


@dataclass(frozen=True, eq=False)
class TwoLevels:
    """w = (((codes * scales + shifts) mod 256) - 128) * channel_scales.

    Attributes:
        codes: uint8 [N, K]. scales, shifts: int32 [N, G]. channel_scales: float32 [N].
        group_size: input channels of a group, K for one. bias: [N].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor
    channel_scales: torch.Tensor
    group_size: int
    bias: torch.Tensor | None = None


def unpack_qserve(
    qweight: torch.Tensor,
    s1_scales: torch.Tensor,
    s2_scales: torch.Tensor | None = None,
    s2_zeros: torch.Tensor | None = None,
    s1_szeros: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> TwoLevels:
    """Both levels of a layer; arguments and errors as of `w4a8.read_qserve`."""
    import torch
    from terrazzo.layouts import get_instance

    layout = get_instance(LAYOUT)
    check_int8("qweight", qweight, (None, None))
    n, k = qweight.shape[0], qweight.shape[1] * 2
    if n % layout.block_rows or k % layout.block_k:
        raise ArgumentError(
            "qweight", list(qweight.shape), "N and K must be multiples of 32", "QServe stores whole 32 x 32 blocks"
        )
    _check_scales("s1_scales", s1_scales, (n,))
    words = qweight.contiguous().view(torch.int32).view(*layout.blocks(n, k), layout.words_per_block)
    codes = layout.unpack(words, n, k)
    if (s2_scales is None) != (s2_zeros is None) or (s2_scales is None) == (s1_szeros is None):
        constraint = "a per-group layer has s2_scales and s2_zeros, a per-channel layer has s1_szeros"
        remedy = "pass all tensors of the layer"
        raise ArgumentError("s2_scales", None if s2_scales is None else "given", constraint, remedy)
    if s2_scales is None:
        _check_scales("s1_szeros", s1_szeros, (n,))
        zeros = _channel_zeros(s1_scales, s1_szeros)
        scales, shifts, group = torch.ones_like(zeros)[:, None], (128 - zeros)[:, None], k
    else:
        check_int8("s2_scales", s2_scales, (None, n))
        check_int8("s2_zeros", s2_zeros, tuple(s2_scales.shape))
        group = k // s2_scales.shape[0]
        if s2_scales.shape[0] * group != k:
            raise ArgumentError(
                "s2_scales", list(s2_scales.shape), f"must divide K = {k} into groups", "pass all of it"
            )
        scales, shifts = (_rows(t).int() for t in (s2_scales, s2_zeros))
        shifts = (shifts + 128) & 255
    return TwoLevels(codes, scales, shifts, s1_scales.float(), group, bias)


def _rows(stored: torch.Tensor) -> torch.Tensor:
    """[G, N] in QServe's row order (0 8 16 24 1 9 ...) -> [N, G]."""
    groups, n = stored.shape
    return stored.view(groups, n // 32, 8, 4).permute(1, 3, 2, 0).reshape(n, groups)


def _channel_zeros(s1_scales: torch.Tensor, s1_szeros: torch.Tensor) -> torch.Tensor:
    """int32 [N], 0..15: zero points of a per-channel layer; a row of scale 0 and product 0 is all 0."""
    ratio = (s1_szeros.double() / s1_scales.double()).masked_fill((s1_scales == 0) & (s1_szeros == 0), 0)
    zeros = ratio.round()
    # Zero points up to 15, rounded twice to the 8 bits of bfloat16, are off by 15 / 128 at most.
    wrong = ~(((ratio - zeros).abs() <= 0.125) & (zeros >= 0) & (zeros <= 15))
    if bool(wrong.any()):
        seen = f"{float(s1_szeros[wrong][0]):.6g} of scale {float(s1_scales[wrong][0]):.6g}"
        constraint = "must be s1_scales times a whole zero point, 0..15"
        raise ArgumentError("s1_szeros", seen, constraint, "pass s1_scales and s1_szeros of the same layer")
    return zeros.int()


def _check_scales(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    import torch

    check_plain(name, tensor)
    fits = isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point and tuple(tensor.shape) == shape
    if not fits:
        constraint = f"must be a tensor, float {list(shape)}"
        raise ArgumentError(name, weights.described(tensor), constraint, "add the layer's tensor")
    if not bool(tensor.isfinite().all()):
        raise ArgumentError(name, "NaN or infinity", "must be finite", "the checkpoint is damaged: get it again")


def _read(tensors: Tensors, config: LayerConfig, product: Product) -> TwoLevels:
    check_bits(config.bits)
    k, levels = 2 * tensors["qweight"].shape[-1] if tensors["qweight"].ndim else 0, tensors.get("s2_scales")
    if config.group_size is not None and levels is not None and levels.ndim == 2:
        if config.group_size * levels.shape[0] != k:
            constraint = f"K = {k} with {levels.shape[0]} rows of s2_scales needs another"
            raise ArgumentError("group_size", config.group_size, constraint, "correct the config")
    return unpack_qserve(**({"s1_scales": None} | tensors))


def _holds(checkpoint: Checkpoint, prefix: str, leaf: str) -> bool:
    return checkpoint.has(prefix, "s1_scales")


CONVENTION = Convention(
    "qserve",
    (
        Leaf("qweight", n=(0, 1)),
        Leaf("s1_scales", n=(0, 1)),
        Leaf("s2_scales", n=(1, 1), optional=True),
        Leaf("s2_zeros", n=(1, 1), optional=True),
        Leaf("s1_szeros", n=(0, 1), optional=True),
    ),
    read=_read,
    holds=_holds,
    formats=("qserve",),
    rows=32,
)


def _layer(raw: Stated, name: str) -> LayerConfig:
    bits = next((key for key in ("w_bit", "bits", "wbits", "weight_bits") if key in raw), "bits")
    return LayerConfig("qserve", fields.whole(raw, bits, 4), fields.whole(raw, "group_size"), activations="int8")


METHOD = Method(
    "qserve", _layer, read=fields.SIZES, neutral="version zero_point modules_to_not_convert", aliases=("qoq",)
)
