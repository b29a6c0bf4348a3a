"""Formats of weights whose codes become 16-bit operands: a value says what codes are; programs ask it for every number.

A packed block is what a warpgroup fetches with one 16-byte load of each thread: 64 rows by 256 / bits k. Its words lie
as layout inference puts them; blocks of one k stand side by side along the rows, so that a tile's are one bulk copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from terrazzo.lowering.errors import ArgumentError

BLOCK_ROWS = 64
BLOCK_WORDS = 512
SMALL_SCALES = ("e8m0", "e4m3")
"""Scales of a byte each, which operands of either dtype take."""
TILE_WORDS = BLOCK_WORDS // 4
"""Of 16 rows of a block: what a warp fetches at once."""


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a weight.

    Attributes:
        name: "u4".
        operator: whose public calls, records and files it has, "w4a16".
        layout: instance of `terrazzo.layouts` that packs codes.
        bits: of a code, 4 or 8.
        groups: k extents of a scale besides one for the whole row; one_group: whether there may be one for the row.
        scaled: dtype of the operand -> numerics -> converter (terrazzo.layouts) that makes scaled operands, or with
            scales of one and for numerics "post", unscaled ones.
        unscaled: dtype -> converter without parameters, whose sums are scaled; its `scale_exp2` and `bias` are undone.
        scales: dtypes that the scales of groups may have. "e8m0" is a byte d for 2^-d; "e4m3", of positive numbers, a
            byte of five bits of exponent with bias 21 and three of mantissa, in which none is subnormal.
        zero: zero point of a weight that stores none; 0 for codes that are numbers as they are.
        lacks: dtype of scales -> exponent of two that they are stored with beside their value, which operands lack.
        plain: dtype -> converter that makes scaled operands of weights without zero points, where that is another one
            than `scaled` names.
        values: of the codes, in order, where they are numbers as they are.
        row_factors: whether each row has a float32 of its own, which its sums are multiplied by at last. With a scale
            for the whole row this is the scale, and there are no others.
        outer: dtype -> exponent of two that operands have beside code times scale, which the row's factor undoes.
        record_groups: groups whose scales are one record of parameters.
    """

    name: str
    operator: str
    layout: str
    bits: int
    groups: tuple[int, ...]
    scaled: Mapping[str, Mapping[str, str]] = field(hash=False)
    unscaled: Mapping[str, str] = field(hash=False)
    scales: tuple[str, ...]
    zero: int
    one_group: bool = True
    lacks: Mapping[str, int] = field(default_factory=dict, hash=False)
    plain: Mapping[str, str] = field(default_factory=dict, hash=False)
    values: tuple[float, ...] = field(default=(), hash=False, repr=False)
    row_factors: bool = False
    outer: Mapping[str, int] = field(default_factory=dict, hash=False)
    record_groups: int = 1

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

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of operands."""
        return tuple(self.scaled or self.unscaled)

    @property
    def numerics(self) -> tuple[str, ...]:
        """How scales may enter: "exact" and "fused" fold them into the operand, "post" scales the sums of a group."""
        folded = next(iter(self.scaled.values())) if self.scaled else ()
        return (*folded, *(["post"] if self.unscaled else []))

    def choose_numerics(self, scale_dtype: str, dtype: str, few: bool) -> str:
        """What "auto" stands for. few: in the program for small batches."""
        folds = scale_dtype in (dtype, *SMALL_SCALES)
        return "exact" if folds and not (few and self.zero) else "post"


U4 = WeightFormat(
    name="u4",
    operator="w4a16",
    layout="w4a16",
    bits=4,
    groups=(32, 64, 128),
    scaled={
        "float16": {"exact": "u4_f16_exact", "fused": "u4_f16_fused"},
        "bfloat16": {"exact": "u4_bf16_exact", "fused": "u4_bf16_fused"},
    },
    unscaled={"float16": "u4_f16_subnormal", "bfloat16": "u4_bf16_biased"},
    scales=("float16", "bfloat16", "float32"),
    zero=8,
)
U8 = WeightFormat(
    name="u8",
    operator="w8a16",
    layout="w8a16",
    bits=8,
    groups=(32, 64, 128),
    scaled={"float16": {"exact": "u8_f16_exact"}, "bfloat16": {"exact": "u8_bf16_exact"}},
    unscaled={"float16": "u8_f16_centred", "bfloat16": "u8_bf16_centred"},
    scales=("float16", "bfloat16", "float32"),
    zero=128,
    plain={"bfloat16": "u8_bf16_scaled"},
)
"""Bytes less 128, or less the zero point of their group: a difference is exact in either dtype."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = WeightFormat(
    name="mxfp4",
    operator="mxfp4",
    layout="mxfp4",
    bits=4,
    groups=(32,),
    scaled={"bfloat16": {"exact": "e2m1_bf16_scaled"}, "float16": {"exact": "e2m1_f16_scaled"}},
    unscaled={},
    scales=("e8m0",),
    zero=0,
    one_group=False,
    values=(*E2M1, *(-value for value in E2M1)),
    row_factors=True,
)
"""e2m1 with a power of two for each 32 k. The largest of a row's powers of two is its factor, others are relative to
it, so that no product of code and scale overflows. A bf16 operand is exact; an f16 one down to 2^-23 of the row's
largest scale, and 2^-25 of it or less is lost below."""
NVFP4 = WeightFormat(
    name="nvfp4",
    operator="nvfp4",
    layout="nvfp4",
    bits=4,
    groups=(16,),
    scaled={"bfloat16": {"exact": "e2m1_bf16_paired"}, "float16": {"exact": "e2m1_f16_paired"}},
    unscaled={},
    scales=("e4m3",),
    zero=0,
    one_group=False,
    values=MXFP4.values,
    row_factors=True,
    outer={"bfloat16": -8, "float16": -8},
    record_groups=4,
)
"""e2m1 with an e4m3 scale for each 16 k and a float32 for each row. Code times scale has six significant bits, so that
operands of either dtype are exact. A thread reads the scales of its two rows and 64 k at once: word p of two holds
those of groups 2p and 2p + 1 (`PAIRED`)."""

PAIRED = 0x0FF00FF0
"""Bits of a word of NVFP4's scales that hold those of an even group, a half for each of the rows g and g + 8; turned
left by eight, the word has the odd group's there."""


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if code & 128 else value


FP8 = WeightFormat(
    name="fp8",
    operator="fp8",
    layout="fp8",
    bits=8,
    groups=(128,),
    scaled={"bfloat16": {"exact": "e4m3_bf16_scaled"}, "float16": {"exact": "e4m3_f16_scaled"}},
    unscaled={"bfloat16": "e4m3_bf16_words", "float16": "e4m3_f16_words"},
    scales=("float32", "bfloat16", "float16"),
    zero=0,
    lacks={"bfloat16": 120},
    values=tuple(_e4m3(code) for code in range(256)),
    row_factors=True,
)
"""e4m3 with a float32 for each row, or for each 128 k of it: no weight is rounded. 16-bit scales of 128 k are folded
into operands of their dtype, which rounds each weight once; they are stored relative to a power of two of the row."""

WEIGHTS: dict[str, WeightFormat] = {one.name: one for one in (U4, MXFP4, NVFP4, U8, FP8)}
OPERATORS: dict[str, WeightFormat] = {one.operator: one for one in WEIGHTS.values()}


def get_weight_format(name: str | WeightFormat) -> WeightFormat:
    """The format of this name.

    Raises:
        ArgumentError: there is none.
    """
    if isinstance(name, WeightFormat):
        return name
    if name not in WEIGHTS:
        raise ArgumentError("weight", name, "is no registered weight format", f"use one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name]
