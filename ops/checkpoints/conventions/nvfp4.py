"""NVFP4 as published: two e2m1 codes in a byte, the first in its lower half, and e4m3 scales of 16 k.

Beside them lies a float32 of the tensor: modelopt multiplies by `weight_scale_2` = amax / 2688, compressed-tensors
divides by `weight_global_scale` = 2688 / amax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints.conventions import base, compressed_tensors, mxfp4
from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Leaf, Tensors
from terrazzo.ops.checkpoints.conventions.mxfp4 import nibbles
from terrazzo.ops.products.wide import NVFP4
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.products.product import Product
    from terrazzo.ops.weight.base import AnyCanonical

GROUP = 16


def unpack_modelopt(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """A layer of modelopt; arguments and errors as of `nvfp4.from_modelopt`. input_scale, of x, is not read."""
    codes = _codes("weight", weight, weight_scale)
    factor = _factor("weight_scale_2", weight_scale_2)
    with weights.renamed(codes="weight", scales="weight_scale", factors="weight_scale_2"):
        facts = dict(weight="nvfp4", group_size=GROUP, bias=bias, factors=factor)
        return QuantizedWeight.canonical(codes, weight_scale, **facts)


def unpack(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    input_global_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """A layer of compressed-tensors; arguments and errors as of `nvfp4.from_compressed_tensors`. input_global_scale, of
    x, is not read."""
    codes = _codes("weight_packed", weight_packed, weight_scale)
    factor = 1.0 / _factor("weight_global_scale", weight_global_scale).double()
    with weights.renamed(codes="weight_packed", scales="weight_scale", factors="weight_global_scale"):
        facts = dict(weight="nvfp4", group_size=GROUP, bias=bias, factors=factor.float())
        return QuantizedWeight.canonical(codes, weight_scale, **facts)


def _codes(name: str, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K]; errors name the scale that does not fit, too."""
    if getattr(packed, "ndim", 0) != 2 or weights.dtype_name(packed) != "uint8":
        seen = weights.described(packed)
        raise ArgumentError(name, seen, "must be uint8 [N, K/2]", "pass the layer's tensor")
    n, k = packed.shape[0], 2 * packed.shape[1]
    shape = (n, -(-k // GROUP))
    if weights.dtype_name(scale) != "float8_e4m3fn" or tuple(scale.shape) != shape:
        constraint = f"must be float8_e4m3fn {list(shape)}, a scale for each 16 k of a row"
        remedy = "scales in one dimension or in uint8 are swizzled for another GPU: export the model without that"
        raise ArgumentError("weight_scale", weights.described(scale), constraint, remedy)
    return nibbles(packed)


def _factor(name: str, value: torch.Tensor) -> torch.Tensor:
    """A float32 of the tensor, or one of each row."""
    if not hasattr(value, "dtype") or not value.dtype.is_floating_point:
        seen = weights.described(value)
        raise ArgumentError(name, seen, "must be float32 [] or [1]", "add the layer's tensor of that name")
    if not bool((value.isfinite() & (value > 0)).all()):
        constraint = "must be finite and above 0"
        raise ArgumentError(name, float(value.min()), constraint, "the checkpoint is damaged: get it again")
    return value.flatten()


def _read(tensors: Tensors, config: LayerConfig, product: Product) -> QuantizedWeight:
    """The words of modelopt, or those of compressed-tensors."""
    return (unpack_modelopt if "weight" in tensors else unpack)(**tensors)


def _write(weight: AnyCanonical, block: bool) -> Tensors:
    """compressed-tensors' words: one factor of all rows, as its reciprocal."""
    import torch

    factor = weight.factors[:1]
    if not bool((weight.factors == factor).all()):
        constraint = "differ from row to row, and a layer of compressed-tensors has one for all"
        raise ArgumentError("factors", "unlike ones", constraint, compressed_tensors.PACKED)
    made = mxfp4.write(weight, block)
    scales = made["weight_scale"].view(torch.float8_e4m3fn)
    return made | {"weight_scale": scales, "weight_global_scale": factor.double().reciprocal().float()}


_FACTORS = {"weight": "weight_scale_2", "weight_packed": "weight_global_scale"}


def _holds(checkpoint: Checkpoint, prefix: str, leaf: str) -> bool:
    return checkpoint.has(prefix, _FACTORS[leaf]) and checkpoint.stores(prefix, leaf, "U8")


CONVENTION = Convention(
    "nvfp4",
    (
        Leaf("weight", n=(0, 1), k=(1, 2), instead="weight_packed"),
        Leaf("weight_packed", n=(0, 1), k=(1, 2), instead="weight"),
        Leaf("weight_scale", n=(0, 1), k=(1, base.GROUP)),
        Leaf("weight_scale_2", instead="weight_global_scale"),
        Leaf("weight_global_scale", instead="weight_scale_2"),
        Leaf("input_scale", optional=True),
        Leaf("input_global_scale", optional=True),
    ),
    read=_read,
    holds=_holds,
    formats=("nvfp4",),
    within=("compressed_tensors",),
    group=GROUP,
    writes=(NVFP4,),
    write=_write,
    published="nvfp4-pack-quantized",
)
