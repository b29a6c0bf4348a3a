"""All conventions and all methods, and the formats that a caller may name."""

from __future__ import annotations

from terrazzo.ops.checkpoints.conventions import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    int_quantized,
    modelopt,
    mxfp4,
    nvfp4,
    qserve,
)
from terrazzo.ops.checkpoints.conventions.base import Convention, Method

_ALL = (awq, gptq, compressed_tensors, int_quantized, qserve, auto_round, modelopt, fp8, nvfp4, mxfp4, bitsandbytes)
CONVENTIONS: dict[str, Convention] = {it.CONVENTION.name: it.CONVENTION for it in _ALL if hasattr(it, "CONVENTION")}
METHODS: dict[str, Method] = {it.METHOD.name: it.METHOD for it in _ALL if hasattr(it, "METHOD")}
ALIASES = {alias: one.name for one in METHODS.values() for alias in (one.name, *one.aliases)}
"""What `quant_method` may be -> the method."""
STATED = {name: name for one in CONVENTIONS.values() for name in one.formats} | auto_round.FORMATS
"""What a caller may name -> `LayerConfig.format`."""
_OF_FORMAT = {name: one.name for one in CONVENTIONS.values() for name in one.formats}
FORMATS = {name: _OF_FORMAT[format] for name, format in STATED.items()}
"""What a caller may name -> the tensors that a layer of it has. "auto_round" is GPTQ with zero points as they are."""
WRITERS = {product.record: one for one in CONVENTIONS.values() for product in one.writes}
"""Record of a product -> the convention that its weights are written in, in folders of compressed-tensors."""
_BY_CODES: dict[str, list[Convention]] = {}
for _one in sorted(CONVENTIONS.values(), key=lambda one: one.holds is None):
    for _leaf in _one.codes:
        _BY_CODES.setdefault(_leaf, []).append(_one)
BY_CODES = {leaf: tuple(found) for leaf, found in _BY_CODES.items()}
"""Name of a tensor of codes -> the conventions that may have it; the one that has all others comes last."""
