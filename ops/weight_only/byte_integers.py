"""The two forms of an 8-bit weight: those of ops/weight_only/integers.py, with codes 0..255 and zero point 128."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.ops.products.wide import W8A16
from terrazzo.ops.weight_only import integers

if TYPE_CHECKING:
    from terrazzo.ops.products.product import Product


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(integers.QuantizedWeight):
    """An 8-bit weight [N, K] in plain rows: attributes and `canonical`, which checks it, as of 4 bits."""

    _product: ClassVar[Product] = W8A16
    weight: ClassVar[str] = "u8"
    bits: ClassVar[int] = 8


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(integers.PackedWeight, of=QuantizedWeight):
    """An 8-bit weight in the derived layout that every W8A16 kernel of every target reads.

    Attributes:
        words: int32 [Kp/32, Np/64, 512]; 4 codes to a word, in the order of layout `w8a16`. Others: as of
            `w4a16.PackedWeight`; without a zeros plane every zero point is 128.
    """

    VERSION = W8A16.version
    weight: ClassVar[str] = "u8"


def of_bits(bits: int) -> type[integers.QuantizedWeight]:
    """The canonical class of codes of 4 or 8 bits."""
    return {4: integers.QuantizedWeight, 8: QuantizedWeight}[bits]
