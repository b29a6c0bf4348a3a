"""Planes of a packed weight: its tensors, their dtypes, and their shapes as functions of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.ops.products.codes import BLOCK_ROWS, BLOCK_WORDS, SCALE_BYTES, Codes

UNIT_K = 128
"""k that packed weights are padded to a multiple of."""
_FACTOR_BYTES = BLOCK_ROWS * 4


@dataclass(frozen=True)
class Size:
    """Of a weight [n, k]. group: k of a scale, k or more for one. scale_dtype: of packed scales. zeros: whether zero
    points are stored. block: whether scales are those of blocks, even where k is one block."""

    n: int
    k: int
    group: int
    scale_dtype: str = ""
    zeros: bool = False
    block: bool = False

    @property
    def row_blocks(self) -> int:
        """Of 64 rows, padding included."""
        return -(-self.n // BLOCK_ROWS)

    @property
    def rows(self) -> int:
        """Padding included."""
        return self.row_blocks * BLOCK_ROWS

    @property
    def units(self) -> int:
        """Of 128 k, padding included."""
        return -(-self.k // UNIT_K)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Plane:
    """A tensor of a packed weight.

    Attributes:
        name: of the field. dtype: as torch names it.
        shape: of each weight that has these sizes; None: it follows n or k, and may be absent.
    """

    name: str
    dtype: str
    shape: Callable[[Codes, Size], Shape] | None = None


def block_words(codes: Codes, size: Size) -> Shape:
    """Words of blocks of codes, without parameters."""
    return codes.blocks(size.units * UNIT_K), size.row_blocks, BLOCK_WORDS


def record_bytes(codes: Codes, size: Size) -> Shape:
    """Records of 64 rows' scales and zero points, then those of the rows' factors."""
    record = BLOCK_ROWS * (SCALE_BYTES[size.scale_dtype] * codes.record_groups + size.zeros)
    if size.group >= size.k and codes.one_group:
        groups = int(not codes.row_factors)
    else:
        groups = size.units * UNIT_K // (size.group * codes.record_groups)
    return groups + (_FACTOR_BYTES // record if codes.row_factors else 0), size.row_blocks, record


def unit_words(codes: Codes, size: Size) -> Shape:
    """Units of 64 rows by 128 k: codes, then a record of 128 bytes for each group of k."""
    records = UNIT_K // min(size.group, UNIT_K)
    return size.units, size.row_blocks, codes.words(BLOCK_ROWS, UNIT_K) + 32 * records


def whole_words(codes: Codes, size: Size) -> Shape:
    """Units of 64 rows by 128 k of codes alone."""
    return size.units, size.row_blocks, codes.words(BLOCK_ROWS, UNIT_K)


def of_channels(codes: Codes, size: Size) -> Shape:
    """A number for each row."""
    return (size.rows,)


def scales_and_sums(codes: Codes, size: Size) -> Shape:
    """A scale for each row, then the sum of its codes."""
    return 2, size.rows


def row_or_block_scales(codes: Codes, size: Size) -> Shape:
    """A scale for each row, or for each 128 k of 16 rows."""
    return (size.units, size.row_blocks * 4) if size.block else (1, size.rows)


_WORDS, _PARAMS, _BIAS = Plane("words", "int32", block_words), Plane("params", "uint8", record_bytes), Plane("bias", "")
_SMOOTH, _CHANNELS = Plane("smooth", "float32"), Plane("channel_scales", "float32", of_channels)
RECORDS = (_WORDS, _PARAMS, _BIAS)
"""Blocks of codes, and records of parameters."""
ORDERED = (_WORDS, _PARAMS, Plane("perm", "int32"), _BIAS)
"""The same, of which x may have another order (act-order)."""
UNITS = (Plane("words", "int32", unit_words), _CHANNELS, _SMOOTH, _BIAS)
ROWS = (Plane("words", "int32", whole_words), Plane("scales", "float32", scales_and_sums), _SMOOTH, _BIAS)
BLOCKS = (Plane("words", "int32", whole_words), Plane("scales", "float32", row_or_block_scales), _SMOOTH, _BIAS)
MIXED = (
    Plane("words", "int32", unit_words), Plane("channel_scales", "float32"), Plane("permutation", "int32"), _BIAS,
)  # fmt: skip
