"""How scales enter a product, and which converter makes operands of codes: the ways of each kind of codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from terrazzo.ops.products import codes
from terrazzo.ops.products.codes import HALVES, SMALL_SCALES, Codes

FOLD, POST, INTEGER, DIRECT, BLOCK = "fold", "post", "integer", "direct", "block"
"""Rules: into the operand, on f32 sums of a group, an integer of the group in the operand, on sums of a tile, on s32
sums of each 128 k (docs/architecture.md)."""


@dataclass(frozen=True)
class Input:
    """Form of the activations.

    Attributes:
        code: dtype of their codes, "" for 16 bits.
        rate: dtype of the tensor cores' operands. operand: the same, as schedules call it.
        quant: what norms and gates make for it; None: 16 bits, or the layer quantizes them itself.
    """

    code: str
    rate: str
    operand: str
    quant: str | None = None

    @property
    def wide(self) -> bool:
        """Whether they keep 16 bits."""
        return not self.code


F16 = Input("", "f16", "f16")
INT8 = Input("int8", "s8", "s8", "int8")
E4M3 = Input("float8_e4m3fn", "e4m3", "e4m3", "e4m3")
E4M3_BLOCKS = Input("float8_e4m3fn", "e4m3", "e4m3", "e4m3_block128")
MXFP8 = Input("float8_e4m3fn", "e4m3", "e4m3", "mxfp8")
MIXED = Input("int4+int8", "s8", "s4_s8")


@dataclass(frozen=True)
class Way:
    """One numerics of a product, with its rule of scales.

    Attributes:
        name: what plans are asked for.
        rule: how scales enter.
        converters: dtype of operands, "" for bytes -> converter (terrazzo.layouts).
        plain: the same of weights without zero points, where it is another one.
        cost: what schedules call the rule, if not so.
        x: form of the activations, if not the product's.
        asked: whether a caller may choose it; others follow from the weight.
    """

    name: str
    rule: str
    converters: Mapping[str, str] = field(hash=False)
    plain: Mapping[str, str] = field(default_factory=dict, hash=False)
    cost: str = ""
    x: Input | None = None
    asked: bool = True

    def converter(self, dtype: str = "", symmetric: bool = False) -> str:
        """Name of the converter to operands of this dtype. symmetric: of a weight without zero points."""
        return (self.plain.get(dtype) if symmetric else None) or self.converters[dtype]


def _halves(name: str, rule: str, f16: str, bf16: str, plain: Mapping[str, str] | None = None) -> Way:
    return Way(name, rule, dict(zip(HALVES, (f16, bf16))), plain or {})


def _bytes(name: str, rule: str, converter: str, cost: str = "", x: Input | None = None, asked: bool = True) -> Way:
    return Way(name, rule, {"": converter}, cost=cost, x=x, asked=asked)


WAYS: dict[str, tuple[Way, ...]] = {
    codes.U4.name: (
        _halves("exact", FOLD, "u4_f16_exact", "u4_bf16_exact"),
        _halves("fused", FOLD, "u4_f16_fused", "u4_bf16_fused"),
        _halves("post", POST, "u4_f16_subnormal", "u4_bf16_biased"),
    ),
    codes.U8.name: (
        _halves("exact", FOLD, "u8_f16_exact", "u8_bf16_exact", {"bfloat16": "u8_bf16_scaled"}),
        _halves("post", POST, "u8_f16_centred", "u8_bf16_centred"),
    ),
    codes.MXFP4.name: (_halves("exact", FOLD, "e2m1_f16_scaled", "e2m1_bf16_scaled"),),
    codes.NVFP4.name: (_halves("exact", FOLD, "e2m1_f16_paired", "e2m1_bf16_paired"),),
    codes.FP8.name: (
        _halves("exact", FOLD, "e4m3_f16_scaled", "e4m3_bf16_scaled"),
        _halves("post", POST, "e4m3_f16_words", "e4m3_bf16_words"),
    ),
    codes.NF4.name: (
        _halves("exact", FOLD, "nf4_f16_scaled", "nf4_bf16_scaled"),
        _halves("post", POST, "nf4_f16_words", "nf4_bf16_words"),
    ),
    codes.U4_LQQ.name: (_bytes("xor", INTEGER, "u4_s8_lqq"), _bytes("unsigned", INTEGER, "u4_u8_lqq")),
    codes.Z4.name: (_bytes("e4m3", POST, "z4_e4m3"),),
    codes.MXFP4_UNITS.name: (_bytes("e2m1", POST, "e2m1_e4m3"),),
    codes.MXFP4_GROUPS.name: (_bytes("e2m1_mx", POST, "e2m1_e4m3", cost="mx"),),
    codes.S8.name: (_bytes("s8", DIRECT, "s8_s8", asked=False), _bytes("s8_zeros", DIRECT, "s8_s8", asked=False)),
    codes.E4M3.name: (
        _bytes("promoted", DIRECT, "e4m3_e4m3", cost="promoted"),
        _bytes("fast", DIRECT, "e4m3_e4m3", cost="fast"),
        _bytes("block", BLOCK, "e4m3_e4m3", x=E4M3_BLOCKS, asked=False),
    ),
    codes.S4.name: (_bytes("two_level", INTEGER, "s4_s8_lqq"), _bytes("block", BLOCK, "s4_s8_x16")),
}
"""Name of codes -> their ways, the usual one first."""


def get_way(of: Codes, name: str) -> Way:
    """The way of this name."""
    return next(way for way in WAYS[of.name] if way.name == name)


def numerics_of(of: Codes) -> tuple[str, ...]:
    """What a caller may choose besides "auto"."""
    return tuple(way.name for way in WAYS[of.name] if way.asked)


def choose_way(of: Codes, scale_dtype: str, dtype: str, few: bool) -> Way:
    """What "auto" stands for with 16-bit activations: scales are folded into operands of their dtype.

    Args:
        few: in the program for small batches, where zero points would cost time.
    """
    folds = scale_dtype in (dtype, *SMALL_SCALES) and not (few and of.zero)
    known = WAYS[of.name]
    return next((way for way in known if way.rule == (FOLD if folds else POST)), known[-1])
