"""Which operator multiplies a layer of a published checkpoint: what `load`, `compile` and `serve-check` agree on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints.loaders import Family
from terrazzo.ops.products import converted, wide
from terrazzo.ops.products.table import PRODUCTS
from terrazzo.ops.products.ways import INT8
from terrazzo.ops.w4a8.w8a8.op import runs_on

if TYPE_CHECKING:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.conventions.base import LayerConfig
    from terrazzo.ops.products.product import Product

FAMILIES: dict[str, Family[Any, Any]] = {
    one.root if one.direct else one.record: import_module(f"terrazzo.ops.{one.module}").load_model.__self__
    for one in PRODUCTS
    if one.conventions
}
"""Operator -> what reads its layers. W8A8's is also that of e4m3."""
QUANTIZED = {one.x.quant: one for one in PRODUCTS if one.on_request}
"""What callers may ask of the activations of MXFP4 weights -> the product that quantizes them so."""
_INTEGERS = {one.x.quant: one for one in (wide.W4A16, converted.W4A8, converted.W4A8_FP8)}
"""What a config says of activations -> product of 4-bit integers."""


def of_mxfp4(activations: str | None) -> Product:
    """The product of MXFP4 weights and such activations, None for 16 bits.

    Raises:
        ArgumentError: other ones.
    """
    if activations is None:
        return wide.MXFP4
    if not isinstance(activations, str) or activations not in QUANTIZED:
        known = " or ".join(f'"{name}"' for name in QUANTIZED)
        raise ArgumentError("activations", activations, f"must be None or {known}", "leave it out for 16 bits")
    return QUANTIZED[activations]


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
        activations: "e4m3" or "mxfp8" quantizes those of MXFP4 layers.
    """
    found = _product(convention, config, target, weight_only, activations)
    return found.root if found.direct else found.record


def _product(
    convention: str, config: LayerConfig, target: Target | None, weight_only: bool, activations: str | None
) -> Product:
    readers = [one for one in PRODUCTS if convention in one.conventions]
    floats = all(one.codes.values for one in readers)
    if not floats:
        bits = 8 if config.bits == 8 else 4  # others are refused by name where they are read
        readers = [one for one in readers if one.conventions[convention] == bits] or readers
    kept = next((one for one in readers if one.wide), None)
    follows = next((one for one in readers if one.direct), None)
    if follows is not None and kept is not None:  # bytes: with activations in bytes, or in 16 bits
        if follows.x.quant == INT8.quant:
            if config.activations == "other" and not weight_only:
                return follows  # which refuses them by name
            by_row = config.group_size in (None, -1) and config.symmetric is not False
            stated = by_row and (config.activations or "").startswith(INT8.quant)
        else:
            powers = config.inputs == "e4m3 ue8m0" and config.group_size == 128
            stated = powers or config.inputs in ("e4m3", "e4m3 static")
        return follows if stated and not weight_only and runs_on(target, follows.codes.name) else kept
    if floats:
        return next((one for one in readers if one.on_request and one.x.quant == activations), kept)
    if kept is not None and kept.codes.bits == 8:
        return kept
    if kept is None and len(readers) == 1:
        return readers[0]
    return _INTEGERS.get(config.activations, wide.W4A16)
