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
TILE_WORDS = BLOCK_WORDS // 4
"""Of 16 rows of a block: what a warp fetches at once."""


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a weight.

    Attributes:
        name: "u4".
        bits: of a code, 4 or 8.
        scaled: dtype of the operand -> numerics -> converter (terrazzo.layouts) that makes scaled operands, or with
            scales of one and for numerics "post", unscaled ones.
        unscaled: dtype -> converter without parameters, whose sums are scaled; its `scale_exp2` and `bias` are undone.
        scales: dtypes that scales may have.
        zero: zero point of a weight that stores none; 0 for codes that are numbers as they are.
    """

    name: str
    bits: int
    scaled: Mapping[str, Mapping[str, str]] = field(hash=False)
    unscaled: Mapping[str, str] = field(hash=False)
    scales: tuple[str, ...]
    zero: int

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
    def numerics(self) -> tuple[str, ...]:
        """How scales may enter: "exact" and "fused" fold them into the operand, "post" scales the sums of a group."""
        return (*next(iter(self.scaled.values())), "post")


U4 = WeightFormat(
    name="u4",
    bits=4,
    scaled={
        "float16": {"exact": "u4_f16_exact", "fused": "u4_f16_fused"},
        "bfloat16": {"exact": "u4_bf16_exact", "fused": "u4_bf16_fused"},
    },
    unscaled={"float16": "u4_f16_subnormal", "bfloat16": "u4_bf16_biased"},
    scales=("float16", "bfloat16", "float32"),
    zero=8,
)

WEIGHTS: dict[str, WeightFormat] = {one.name: one for one in (U4,)}


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
