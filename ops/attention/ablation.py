"""Packed formats whose codes are converted one by one: what the masks of the usual converters are compared with.

The bytes of a cache are the same. Each field is shifted and masked into a register of its own and converted by the
machine's integer-to-float instruction, which runs at a quarter of the rate of an ALU instruction or less.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from terrazzo.layouts.converters import Converter
from terrazzo.ops.attention.format import KVFormat, get_format
from terrazzo.ops.attention.layout import CacheLayout


@lru_cache(maxsize=4)
def plain_converter(bits: int) -> Converter:
    """Unsigned codes of 2, 4 or 8 bits to f16, in the field order of every converter (layouts/converters/base.py)."""
    outputs, mask = 16 // bits, (1 << bits) - 1
    statements = []
    for o in range(outputs):
        low, high = (f"w >> {bits * field} & {mask}u" for field in (o, o + outputs))
        statements.append(f"out[{o}] = tz_plain({low}) | tz_plain({high}) << 16;")

    def emulation(words: np.ndarray) -> list[np.ndarray]:
        def code(field: int) -> np.ndarray:
            values = (words >> np.uint32(bits * field)) & np.uint32(mask)
            return values.astype(np.float16).view(np.uint16).astype(np.uint32)

        return [code(o) | code(o + outputs) << np.uint32(16) for o in range(outputs)]

    return Converter(
        f"u{bits}_f16_plain", f"u{bits}", "float16", bits, 16, emulation, "\n".join(statements),
        instructions=5 * outputs,
    )  # fmt: skip


@dataclass(frozen=True)
class PlainFormat(KVFormat):
    """A format of unsigned integer codes with the plain converter."""

    @property
    def converter(self) -> Converter:
        return plain_converter(int(self.storage[1:]))


def plain(fmt: KVFormat) -> KVFormat:
    """The format with plain conversions; formats that are not unsigned integers stay as they are."""
    if fmt.storage not in ("u2", "u4", "u8"):
        return fmt
    return PlainFormat(**{f.name: getattr(fmt, f.name) for f in fields(KVFormat)})


@dataclass(frozen=True)
class PlainLayout(CacheLayout):
    """The same bytes, read with plain conversions."""

    @property
    def k(self) -> KVFormat:
        return plain(get_format(self.k_format, "keys"))

    @property
    def v(self) -> KVFormat:
        return plain(get_format(self.v_format, "values"))
