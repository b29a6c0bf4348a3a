"""int-quantized of compressed-tensors: int8 [N, K] of 4 or 8 bits, and 8-bit activations beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints.conventions import compressed_tensors
from terrazzo.ops.checkpoints.conventions.base import GROUP, Convention, LayerConfig, Leaf, Tensors
from terrazzo.ops.checkpoints.words import one_number, static_scale
from terrazzo.ops.products.direct import W8A8

if TYPE_CHECKING:
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.weight.base import AnyCanonical


def _direct(tensors: Tensors, config: LayerConfig) -> dict[str, Any]:
    """What `w8a8.QuantizedWeight.canonical` takes, of a layer.

    Raises:
        ArgumentError: groups of scales, weights with zero points, a static scale or zero point that is announced and
            not there, or a zero point beside a config of symmetric activations.
    """
    scale, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    if config.group_size not in (None, -1) or (scale.ndim == 2 and scale.shape[1] != 1):
        constraint = "must have one column: W8A8 has scales of rows"
        raise ArgumentError("weight_scale", weights.described(scale), constraint, "load it with w8a16")
    if zeros is not None and bool((zeros != 0).any()):
        raise ArgumentError("weight_zero_point", "not 0", "W8A8 weights are symmetric", "load it with w8a16")
    stated = config.activations or ""
    found = static_scale(tensors, "static" in stated, config.activations is None)
    zero, asymmetric = tensors.get("input_zero_point"), "asymmetric" in stated
    if "input_scale" in found:
        if zero is None and asymmetric:
            constraint = "the config states static activations with a zero point"
            raise ArgumentError("input_zero_point", None, constraint, "get the missing shard")
        found["input_zero"] = 0 if zero is None else int(one_number("input_zero_point", zero))
        if stated and found["input_zero"] and not asymmetric:
            constraint = "the config states symmetric activations"
            raise ArgumentError("input_zero_point", found["input_zero"], constraint, "get the checkpoint again")
    found["asymmetric"] = asymmetric and "input_scale" not in found
    return dict(codes=tensors["weight"], scales=scale, bias=tensors.get("bias")) | found


def _write(weight: AnyCanonical, block: bool) -> Tensors:
    compressed_tensors.each_group(weight)
    return {"weight": weight.codes, "weight_scale": weight.scales[:, None]}


def _holds(checkpoint: Checkpoint, prefix: str, leaf: str) -> bool:
    return checkpoint.has(prefix, "weight_scale") and checkpoint.stores(prefix, leaf, "I8")


CONVENTION = Convention(
    "int_quantized",
    (
        Leaf("weight", n=(0, 1), k=(1, 1)),
        Leaf("weight_scale", n=(0, 1), k=(1, GROUP)),
        Leaf("weight_zero_point", n=(0, 1), k=(1, GROUP), optional=True),
        Leaf("weight_shape", optional=True),
        Leaf("input_scale", optional=True),
        Leaf("input_zero_point", optional=True),
    ),
    read=compressed_tensors.read,
    direct=_direct,
    holds=_holds,
    within=("compressed_tensors",),
    writes=(W8A8,),
    write=_write,
    published="int-quantized",
)
