"""Formats of keys and values by one word: "int8", "int8/int4", or the name of what is most accurate at some bits."""

from __future__ import annotations

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.spelling import did_you_mean
from terrazzo.ops.attention.cache.format import PRESETS
from terrazzo.ops.products.kv import FORMATS, get_format


def pair_of(kv: object) -> tuple[str, str]:
    """Names of the formats of keys and values that `kv` asks for: one name, "keys/values", or a pair.

    Raises:
        ArgumentError: names `kv`: no such format, or none for its role.
    """
    if isinstance(kv, str) and kv in PRESETS:
        return PRESETS[kv]
    if isinstance(kv, str):
        pair = tuple(part.strip() for part in kv.split("/")) if "/" in kv else (kv, kv)
    else:
        pair = tuple(kv) if isinstance(kv, tuple | list) else (kv, kv)
    if len(pair) != 2:
        raise ArgumentError("kv", kv, "must be one format or a pair", 'write "int8", or "int4_channel64/int4"')
    if isinstance(kv, str) and kv in FORMATS and not FORMATS[kv].for_values:
        pair = (kv, f"int{FORMATS[kv].storage[1:]}")
    for name, role in zip(pair, ("keys", "values")):
        try:
            get_format(name, role)
        except ArgumentError as error:
            hint = did_you_mean(name, FORMATS if pair[0] != pair[1] else {**FORMATS, **PRESETS})
            hint = "" if isinstance(name, str) and name in FORMATS else hint
            raise ArgumentError("kv", name, f"for {role}: {error.constraint}", f"{hint}{error.remedy}") from None
    return pair
