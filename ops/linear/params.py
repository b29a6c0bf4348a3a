"""From a record of parameters to registers: macros that the programs of 16-bit operands share.

Registers u, uint32 [3], hold what a thread has loaded for its rows g and g + 8: u[0] two scales of 8 or 16 bits, or
u[0] and u[1] two of float32; u[2] two zero points, a byte each. Scales of e4m3 are two words of four groups, in the
order of `PAIRED` (products/codes.py).
"""

from dataclasses import dataclass

from terrazzo.layouts.converters import Converter
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.products.codes import PAIRED
from terrazzo.ops.tiles.calls import byte_perm, lds32, pack2, prefetch, unpack
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Call, Expr, Macro

_WORDS = {"b0": 0, "s0": 1, "b1": 2, "s1": 3, "s01": 1}
"""Parameter of a converter -> its place behind v[at]."""


@dataclass(frozen=True)
class Params:
    """Macros of `param_macros`, and a function: the words that a converter takes."""

    scales: Macro
    bias_words: Macro
    scale_words: Macro
    pair_word: Macro
    of_converter: Call


def param_macros(op: Operand) -> Params:
    """Scales; and the (bias, scale) words of converters that scale.

    Words v[at .. at + 3] are bias and scale of row g, then of row g + 8, each twice in a word; v[at + 1] of `pair_word`
    is both scales.
    """
    bf16 = op.dtype == "bfloat16"
    one = 0x3F803F80 if bf16 else 0x3C003C00
    powers = op.scale_dtype == "e8m0"
    offsets = op.scaling_converter.param_bias
    # 2^126 or 2^14, what the operand's exponent lacks, and the step from a power of two to the next smaller one
    top, step = (0x7E807E80, 0x00800080) if bf16 else (0x74007400, 0x04000400)

    def power(code):
        """Twice 2^-code of what the operand lacks; with 2^-14, the least of f16, nothing is left of any code."""
        return T.uint32(top) - (code if bf16 else T.min(code, T.uint32(28))) * T.uint32(step)

    @T.macro
    def scales(s, at, u):
        """s[at] and s[at + 1], float32: the scales."""
        if op.scale_dtype == "float32":
            s[at] = T.reinterpret(u[0], "float32")
            s[at + 1] = T.reinterpret(u[1], "float32")
        elif powers:
            s[at] = T.reinterpret((T.uint32(127) - (u[0] & T.uint32(255))) << T.uint32(23), "float32")
            s[at + 1] = T.reinterpret((T.uint32(127) - (u[0] >> T.uint32(8))) << T.uint32(23), "float32")
        else:
            s[at] = unpack(0, u[0], bf16=op.scale_dtype == "bfloat16")
            s[at + 1] = unpack(1, u[0], bf16=op.scale_dtype == "bfloat16")

    @T.macro
    def bias_words(v, at, u):
        """What is subtracted from a converted field: the power of two that it was put behind, and the zero point."""
        if "b0" in op.scaling_converter.params:
            if offsets == (-128, -128):
                for e in T.unroll(2):
                    own = T.cast(u[2] >> T.uint32(8 * e) & T.uint32(255), "float32") - T.float32(128)
                    v[at + 2 * e] = pack2(own, own, bf16=bf16)
            elif offsets == (1024, 1024):
                v[at] = byte_perm(u[2], T.uint32(0x64646464), 0x4040)
                v[at + 2] = byte_perm(u[2], T.uint32(0x64646464), 0x4141)
            elif bf16:
                v[at] = byte_perm(u[2], T.uint32(0x43434343), 0x4040)
                v[at + 2] = byte_perm(u[2], T.uint32(0x43434343), 0x4141)
            else:
                v[at] = byte_perm(u[2], T.uint32(0x64646464), 0x4040)
                v[at + 2] = (u[2] >> T.uint32(8)) * T.uint32(0x100010) + T.uint32(0x54005400)

    @T.macro
    def scale_words(v, at, u):
        """The scales, or (numerics "post") ones."""
        if powers:
            v[at + 1] = power(u[0] & T.uint32(255))
            v[at + 3] = power(u[0] >> T.uint32(8))
        elif "s0" in op.scaling_converter.params:
            v[at + 1] = T.uint32(one) if op.numerics == "post" else byte_perm(u[0], u[0], 0x1010)
            v[at + 3] = T.uint32(one) if op.numerics == "post" else byte_perm(u[0], u[0], 0x3232)

    @T.macro
    def pair_word(v, at, word, odd):
        """The scales of a group, of a word that holds an even one and the odd one behind it, as `odd` says: a byte in
        front of an operand's bits. In f16 they are 2^6 times what they stand for; in bf16 2^118, by a constant."""
        if bf16:
            turned = T.if_then_else(odd, word << T.uint32(8) | word >> T.uint32(24), word)
            v[at + 1] = turned & T.uint32(PAIRED) | T.uint32(0x70007000)
        else:
            turned = T.if_then_else(odd, word << T.uint32(11) | word >> T.uint32(21), word << T.uint32(3))
            v[at + 1] = turned & T.uint32(PAIRED << 3)

    def of_converter(converter: Converter, v: Buffer, at: Expr) -> list[Expr]:
        """The words that a converter takes."""
        return [v[at + _WORDS[name]] for name in converter.params]

    return Params(scales, bias_words, scale_words, pair_word, of_converter)


@dataclass(frozen=True)
class Factors:
    """Of `factor_macros`: a function and two macros."""

    at: Call
    load: Macro
    fetch: Macro


def factor_macros(op: Operand, n: Expr, k_padded: Expr) -> Factors | None:
    """None where rows have no factors. They lie behind the records of groups in P
    [records, row blocks, bytes], in the order of the rows.

    `at`: the element of P where that of a row begins. `load`: f[to], float32, of a row that may lie past the last one;
    `fetch`: to L2, some time before; `first`: record of the matrix's first one.
    """
    if not op.format.row_factors:
        return None
    groups, rec = op.groups(k_padded), op.record_bytes

    def at(P: Buffer, row: Expr, first: Expr = 0) -> Expr:
        nbyte = row % 64 * 4
        return P[first + groups + nbyte // rec, row // 64, nbyte % rec]

    @T.macro
    def load(P, f, to, row, first=0):
        f[to] = T.reinterpret(lds32(at(P, T.min(row, n - 1), first)), "float32") * T.float32(op.undone)

    @T.macro
    def fetch(P, row, first=0):
        prefetch(at(P, T.min(row, n - 1), first))

    return Factors(at, load, fetch)
