"""MXFP4 as published: two e2m1 codes in a byte, the first of them in its lower half, and e8m0 scales of 32 k.

gpt-oss stores experts as `<projection>_blocks` uint8 [E, N, K/32, 16] and `<projection>_scales` uint8 [E, N, K/32];
compressed-tensors (mxfp4-pack-quantized) layers as `weight_packed` uint8 [N, K/2] and `weight_scale` uint8 [N, K/32].
The last two dimensions of blocks are one in memory, so both are the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions import compressed_tensors
from terrazzo.ops.checkpoints.conventions.base import GROUP, Convention, LayerConfig, Leaf, Method, Tensors
from terrazzo.ops.checkpoints.words import pairs
from terrazzo.ops.products.wide import MXFP4
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.weight.base import AnyCanonical

GATE_UP = ("interleaved", "halves")


def unpack(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, bias: torch.Tensor | None = None
) -> QuantizedWeight:
    """A layer of compressed-tensors; arguments and errors as of `mxfp4.from_compressed_tensors`."""
    if getattr(weight_packed, "ndim", 0) != 2 or weights.dtype_name(weight_packed) != "uint8":
        raise _wrong("weight_packed", weight_packed, "uint8 [N, K/2]")
    if weights.dtype_name(weight_scale) == "float8_e8m0fnu":
        import torch

        weight_scale = weight_scale.view(torch.uint8)
    n, k = weight_packed.shape[0], 2 * weight_packed.shape[1]
    if weights.dtype_name(weight_scale) != "uint8" or tuple(weight_scale.shape) != (n, -(-k // 32)):
        raise _wrong("weight_scale", weight_scale, f"uint8 [{n}, {-(-k // 32)}], e8m0 for each 32 k")
    with weights.renamed(codes="weight_packed", scales="weight_scale"):
        return QuantizedWeight.canonical(nibbles(weight_packed), weight_scale, weight="mxfp4", group_size=32, bias=bias)


def unpack_experts(
    blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None, *, gate_up: str | None = None
) -> list[QuantizedWeight]:
    """The experts of gpt-oss; arguments and errors as of `mxfp4.from_gpt_oss`."""
    if getattr(blocks, "ndim", 0) != 4 or weights.dtype_name(blocks) != "uint8" or blocks.shape[3] != 16:
        raise _wrong("blocks", blocks, "uint8 [E, N, K/32, 16]")
    experts, n, groups, _ = blocks.shape
    if weights.dtype_name(scales) != "uint8" or tuple(scales.shape) != (experts, n, groups):
        raise _wrong("scales", scales, f"uint8 [{experts}, {n}, {groups}]")
    if bias is not None and tuple(bias.shape) != (experts, n):
        raise _wrong("bias", bias, f"[{experts}, {n}]")
    if gate_up not in (None, *GATE_UP):
        raise ArgumentError("gate_up", gate_up, f"must be None or one of {GATE_UP}", "see the model's code")
    if gate_up == "interleaved":
        if n % 2:
            raise ArgumentError("blocks", list(blocks.shape), "interleaved rows come in pairs", "pass gate_up=None")
        order = [*range(0, n, 2), *range(1, n, 2)]
        blocks, scales = blocks[:, order], scales[:, order]
        bias = None if bias is None else bias[:, order]
    return [unpack(blocks[e].reshape(n, -1), scales[e], bias=None if bias is None else bias[e]) for e in range(experts)]


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of uint8 [..., K/2]: lower half first."""
    import torch

    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def write(weight: AnyCanonical, block: bool) -> Tensors:
    """e2m1 codes, two in a byte, and the scales of groups as their bytes."""
    compressed_tensors.each_group(weight)
    return {"weight_packed": pairs(weight.codes), "weight_scale": weight.scales}


def _wrong(name: str, value: object, constraint: str) -> ArgumentError:
    return ArgumentError(name, weights.described(value), f"must be {constraint}", "pass the layer's tensor")


def _holds(checkpoint: Checkpoint, prefix: str, leaf: str) -> bool:
    packed = checkpoint.stores(prefix, leaf, "U8") and not checkpoint.has(prefix, "weight_global_scale")
    return packed and checkpoint.stores(prefix, "weight_scale", "U8", "F8_E8M0")


CONVENTION = Convention(
    "mxfp4",
    (Leaf("weight_packed", n=(0, 1), k=(1, 2)), Leaf("weight_scale", n=(0, 1), k=(1, GROUP))),
    read=lambda tensors, config, product: unpack(**tensors),
    holds=_holds,
    formats=("mxfp4",),
    within=("compressed_tensors",),
    group=32,
    writes=(MXFP4,),
    write=write,
    published="mxfp4-pack-quantized",
)


def _layer(raw: Stated, name: str) -> LayerConfig:
    """Of gpt-oss, whose experts alone are quantized; their tensors are no layer's (`terrazzo.load` reads them)."""
    skip = fields.left_out(raw, name, "modules_to_not_convert", glob=True)
    return LayerConfig("mxfp4", 4, 32, activations="", skip=skip, excluded=bool(skip))


METHOD = Method("mxfp4", _layer, read="quant_method modules_to_not_convert", neutral="dequantize")
