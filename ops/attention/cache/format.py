"""What caches are given for a name, and what they keep in f16 where nobody said."""

from __future__ import annotations

from terrazzo.ops.products.kv import TILE_TOKENS, KVFormat, get_format

PRESETS = {
    "int4": ("int4_hadamard", "int4"),
    "int2": ("int2_hadamard", "int2_hadamard"),
    "int8int4": ("int8", "int4"),
}
"""What models are given for one name: keys and values of the least error at these bits (docs/kv-formats.md)."""


def kept_in_f16(
    k_format: str | KVFormat, residual: int | None = None, sink_tokens: int | None = None
) -> tuple[int, int]:
    """(newest, first) tokens of a sequence that a cache of these keys keeps in f16, where that was not said (None).

    What channel-wise keys need; a ring of 128 tokens where keys are rotated, and with two bits the first 16 tokens,
    whose outliers would set the range of the others'; else none.
    """
    fmt = get_format(k_format)
    if residual is None:
        residual = fmt.group or 128 * bool(fmt.rotation)
    if sink_tokens is None:
        sink_tokens = TILE_TOKENS if residual and fmt.rotation and fmt.bits == 2 else 0
    return residual, sink_tokens
