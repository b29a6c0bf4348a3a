"""Which operator multiplies a layer of a published checkpoint: what `load`, `compile` and `serve-check` agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import fp8, mxfp4, mxfp4_fp8, nvfp4, w8a8, w8a16
from terrazzo.ops.w4a8.fp8_importers import FAMILY as W4A8_FP8
from terrazzo.ops.w4a8.importers import FAMILY as W4A8
from terrazzo.ops.w4a8.w8a8.op import runs_on
from terrazzo.ops.w4a16.importers import FAMILY as W4A16

if TYPE_CHECKING:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.conventions.base import LayerConfig

FAMILIES = {
    "w4a16": W4A16, "w4a8": W4A8, "w4a8_fp8": W4A8_FP8, "mxfp4": mxfp4.FAMILY, "fp8": fp8.FAMILY,
    "w8a16": w8a16.FAMILY, "nvfp4": nvfp4.FAMILY, "w8a8": w8a8.FAMILY, "mxfp4_fp8": mxfp4_fp8.FAMILY,
}  # fmt: skip
"""Operator -> what reads its layers. "w8a8" is also that of e4m3; "mxfp4_fp8" is taken where it is asked for."""


def operator_of(
    convention: str,
    config: LayerConfig,
    target: Target | None = None,
    *,
    weight_only: bool = False,
    activations: str | None = None,
) -> str:
    """Key of `FAMILIES`, by how a layer is stored and what its config says of activations.

    Bytes follow the config: where that quantizes activations to 8 bits and the target multiplies such bytes, they are
    W8A8's. Activations stay in 16 bits where it says nothing or bounds their scales, where INT8 weights have groups or
    zero points, and where the target has no such instruction. MXFP4 keeps 16 bits, whatever the config says: they cost
    no time on an H100, and no accuracy. Rows of INT8 beside activations that no kernel multiplies, as those of 4 bits,
    are refused unless `weight_only` says that they stay in 16 bits.

    Args:
        convention: key of `Checkpoint.layers()`'s values. target: None is any that has the instructions.
        weight_only: whether activations of FP8 and INT8 layers stay in 16 bits whatever the config says.
        activations: "e4m3" quantizes those of MXFP4 layers.
    """
    if convention == "mxfp4" and activations == "e4m3":
        return "mxfp4_fp8"
    if convention in ("mxfp4", "nvfp4"):
        return convention
    if convention == "fp8":
        powers = config.inputs == "e4m3 ue8m0" and config.group_size == 128
        follows = powers or config.inputs in ("e4m3", "e4m3 static")
        follows = follows and not weight_only and runs_on(target, "e4m3")
        return "w8a8" if follows else "fp8"
    if convention == "int_quantized" and config.bits == 8:
        if config.activations == "other" and not weight_only:
            return "w8a8"  # which refuses them by name
        by_row = config.group_size in (None, -1) and config.symmetric is not False
        follows = not weight_only and by_row and (config.activations or "").startswith("int8")
        return "w8a8" if follows and runs_on(target, "int8") else "w8a16"
    if config.bits == 8 and convention in w8a16.FAMILY.readers:
        return "w8a16"
    if convention == "qserve" or config.activations == "int8":
        return "w4a8"
    return "w4a8_fp8" if config.activations == "e4m3" else "w4a16"
