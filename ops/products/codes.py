"""Codes of a weight: bits, groups, dtypes of scales, values, and how programs of 16-bit operands find them in memory.

A packed block is what a warpgroup fetches with one 16-byte load of each thread: 64 rows by 256 / bits k. Its words lie
as layout inference puts them; blocks of one k stand side by side along the rows, so that a tile's are one bulk copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from terrazzo.layouts.converters.codebook import NF4 as _NF4
from terrazzo.lowering.errors import ArgumentError

BLOCK_ROWS = 64
BLOCK_WORDS = 512
TILE_WORDS = BLOCK_WORDS // 4
"""Of 16 rows of a block: what a warp fetches at once."""
SMALL_SCALES = ("e8m0", "e4m3")
"""Scales of a byte each, which operands of either dtype take."""
SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "e8m0": 1, "e4m3": 1}
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32")


@dataclass(frozen=True)
class Codes:
    """Codes of a weight as a caller hands them over, and what of them programs ask for.

    Attributes:
        name: "u4", by which programs of 16-bit operands ask for them.
        bits: of a code.
        groups: k extents of a scale besides one for the whole row; one_group: whether there may be one for the row.
        usual: the group that is taken where nobody says one; 0 is one group.
        scales: dtypes that a caller's scales may have. "e8m0" is a byte d for 2^-d; "e4m3", of positive numbers, a
            byte of five bits of exponent with bias 21 and three of mantissa, in which none is subnormal.
        values: of the codes, in order, where they are numbers as they are; none: integers less a zero point.
        zero: zero point of a weight that stores none.
        symmetric: whether a caller chooses to store no zero points.
        row_factors: whether each row has a float32 of its own, which its sums are multiplied by at last. With a scale
            for the whole row this is the scale, and there are no others.
        signed: whether scales may be below zero.
        record_groups: groups whose scales are one record of parameters.
        lacks: dtype of scales -> exponent of two that they are stored with beside their value, which operands lack.
        outer: dtype of operands -> exponent of two beside code times scale, which the row's factor undoes.
    """

    name: str
    bits: int
    groups: tuple[int, ...]
    one_group: bool
    usual: int
    scales: tuple[str, ...]
    values: tuple[float, ...] = field(default=(), hash=False, repr=False)
    zero: int = 0
    symmetric: bool = False
    row_factors: bool = False
    signed: bool = False
    record_groups: int = 1
    lacks: Mapping[str, int] = field(default_factory=dict, hash=False)
    outer: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def block_k(self) -> int:
        """k of a packed block."""
        return 32 * BLOCK_WORDS // (BLOCK_ROWS * self.bits)

    def blocks(self, k: int) -> int:
        """Packed blocks along k, a multiple of `block_k`."""
        return k // self.block_k

    @property
    def step_words(self) -> int:
        """Words of a thread that make its operand of a k16 step, four registers."""
        return self.bits // 4

    def words(self, rows: int, k: int) -> int:
        """int32 words of the codes."""
        return rows * k * self.bits // 32

    def nbytes(self, rows: int, k: int) -> int:
        """Bytes of the codes."""
        return 4 * self.words(rows, k)


def e4m3_value(code: int) -> float:
    """What a byte of e4m3 stands for; those of NaN as if they were numbers."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if code & 128 else value


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 without a sign, which the fourth bit is."""
_E2M1 = (*E2M1, *(-value for value in E2M1))
_E4M3 = tuple(e4m3_value(code) for code in range(256))

U4 = Codes("u4", 4, (32, 64, 128), True, 128, FLOATS, zero=8, symmetric=True)
U8 = Codes("u8", 8, (32, 64, 128), True, 0, FLOATS, zero=128, symmetric=True)
"""Bytes less 128, or less the zero point of their group: a difference is exact in either dtype."""
MXFP4 = Codes("mxfp4", 4, (32,), False, 32, ("e8m0",), _E2M1, row_factors=True)
"""e2m1 with a power of two for each 32 k. The largest of a row's powers of two is its factor, others are relative to
it, so that no product of code and scale overflows. A bf16 operand is exact; an f16 one down to 2^-23 of the row's
largest scale, and 2^-25 of it or less is lost below."""
NVFP4 = Codes(
    "nvfp4", 4, (16,), False, 16, ("e4m3",), _E2M1, row_factors=True, record_groups=4,
    outer={"float16": -8, "bfloat16": -8},
)  # fmt: skip
"""e2m1 with an e4m3 scale for each 16 k and a float32 for each row. Code times scale has six significant bits, so that
operands of either dtype are exact. A thread reads the scales of its two rows and 64 k at once: word p of two holds
those of groups 2p and 2p + 1 (`PAIRED`)."""
PAIRED = 0x0FF00FF0
"""Bits of a word of NVFP4's scales that hold those of an even group, a half for each of the rows g and g + 8; turned
left by eight, the word has the odd group's there."""
FP8 = Codes(
    "fp8", 8, (128,), True, 0, ("float32", "bfloat16", "float16"), _E4M3, row_factors=True, lacks={"bfloat16": 120}
)
"""e4m3 with a float32 for each row, or for each 128 k of it: no weight is rounded. 16-bit scales of 128 k are folded
into operands of their dtype, which rounds each weight once; they are stored relative to a power of two of the row."""
NF4 = Codes("nf4", 4, (64,), False, 64, ("float32", "bfloat16", "float16"), _NF4, row_factors=True, signed=True)
"""A codebook with a float32 absmax for each 64 k. An operand has the float32 values of the codebook rounded once to its
dtype, at most 2^-12 of a value in f16, 2^-9 in bf16. Scales that are 16-bit floats are folded into it, which rounds the
product once more; they are stored relative to a power of two of the row. absmax of bitsandbytes that was quantized in
its turn may come out below zero."""
U4_LQQ = Codes("u4_lqq", 4, (32, 64, 128), False, 64, ("float32",), zero=8)
"""Four bits with an integer scale and offset of the group, and a float32 of the channel, whose product is int8."""
Z4 = Codes("z4", 4, (32, 64, 128), True, 128, HALVES)
"""Integers -8..7, which are exact in e4m3, with a scale for each group."""
MXFP4_UNITS = Codes("mxfp4_units", 4, (32,), False, 32, ("e8m0",), _E2M1)
"""MXFP4's codes where activations are e4m3."""
MXFP4_GROUPS = replace(MXFP4_UNITS, name="mxfp4_groups")
"""The same where these have a power of two for each 32 k, too."""
S8 = Codes("int8", 8, (), True, 0, ("float32",))
E4M3 = Codes("e4m3", 8, (128,), True, 0, ("float32",), _E4M3)
"""Bytes that are operands as they are, with a scale for each row, or of e4m3 for each block of 128 x 128."""
S4 = Codes("s4", 4, (128,), False, 128, ("bfloat16",))
"""Integers -8..7, with a scale for each block of 128 channels."""

WIDE: dict[str, Codes] = {one.name: one for one in (U4, MXFP4, NVFP4, U8, FP8, NF4)}
"""Those that become 16-bit operands."""


def get_codes(name: str | Codes) -> Codes:
    """Codes of this name that become 16-bit operands.

    Raises:
        ArgumentError: there are none.
    """
    if isinstance(name, Codes):
        return name
    if name not in WIDE:
        raise ArgumentError("weight", name, "is no registered weight format", f"use one of {', '.join(WIDE)}")
    return WIDE[name]
