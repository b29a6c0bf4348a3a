"""What the programs on e4m3 activations share with those on int8 (`problem`), and what is their own."""

from dataclasses import dataclass

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes import direct, problem
from terrazzo.ops.linear.bytes.operand import ByteOperand
from terrazzo.ops.products.codes import MXFP4_GROUPS, MXFP4_UNITS, Z4
from terrazzo.ops.products.ways import WAYS
from terrazzo.ops.tiles.calls import call
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Expr

E4M3, E2M1, E2M1_MX = "e4m3", "e2m1", "e2m1_mx"
CONVERTERS = {way.name: way.converter() for codes in (Z4, MXFP4_UNITS, MXFP4_GROUPS) for way in WAYS[codes.name]}
"""The `dequantization` of this form, of integers and of e2m1 -> the converter: codes become e4m3 operands, and their
sums are float32. "e2m1_mx": of tokens whose groups of 32 k have scales, too."""
OUT_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Gemm(problem.Gemm):
    """y[M, n] = x[M, k] w[n, k]^T as `problem.Gemm`, x e4m3; a record holds a float16 factor for each of 64 rows."""

    row_values = False
    float_sums = True

    def __post_init__(self):
        check_out_dtype(self.out_dtype)
        problem.Gemm(self.n, self.k, self.group, self.out_dtype, "xor", self.bias)  # the checks that both share
        if self.dequantization in (E2M1, E2M1_MX) and self.group != 32:
            raise ArgumentError("group", self.group, "must be 32 of MXFP4", "leave it out")

    @property
    def converter(self) -> Converter:
        return get_converter(CONVERTERS[self.dequantization])

    @property
    def grouped_tokens(self) -> bool:
        return self.dequantization == E2M1_MX

    @property
    def schedule_form(self) -> str:
        return "e4m3 mx" if self.grouped_tokens else "e4m3 post"


def check_out_dtype(out_dtype: str) -> None:
    """Raise ArgumentError unless the float32 sums can be written in it."""
    if out_dtype not in OUT_DTYPES:
        raise ArgumentError("out_dtype", out_dtype, f"must be one of {OUT_DTYPES}: sums are floats", "cast y")


def of(n: int, k: int, group: int, out_dtype: str, dequantization: str, bias: bool) -> problem.Gemm:
    """The Gemm of a program's parameters: of 4-bit codes on e4m3 or int8 activations, or of bytes on bytes."""
    kind = Gemm if dequantization in CONVERTERS else direct.Gemm if dequantization in direct.NUMERICS else problem.Gemm
    return kind(n, k, group, out_dtype, dequantization, bias)


def power_of(word: Expr, group: Expr | int) -> Expr:
    """float32 2^(byte - 127) of byte `group` of four e8m0 in a word; 0 of byte 0, infinite of 255."""
    return T.reinterpret((word >> T.cast(group * 8, "uint32") & T.uint32(255)) << T.uint32(23), "float32")


def operand_macros(gemm: problem.Gemm) -> ByteOperand:
    """As `operand.operand_macros`."""
    name = gemm.converter.device_name

    @T.macro
    def word(w, at, o, v, row):
        """Word w[at] into o[0] and o[1], low and high nibbles; e4m3 needs no parameters v."""
        T.call_extern("handle", name, w[at], T.access_ptr(o, "w", 2))

    @T.macro
    def mma(acc, to, a, at, x, b, f, row):
        """m16n8k32: acc[to .. to + 3] += a[at .. at + 3] x[b .. b + 1], times f[row], f[row + 1] of rows g, g + 8."""
        call(
            "mma_e4m3", T.access_ptr(acc[to], "rw", 4), T.access_ptr(a[at], "r", 4), T.access_ptr(x[b], "r", 2), f[row],
            f[row + 1],
        )  # fmt: skip

    @T.macro
    def mma_groups(acc, to, a, at, x, b, f, row, words, token, group):
        """The same, times the scales of this group in the words of XS of two tokens, words[token] and the next."""
        call(
            "mma_e4m3_groups", T.access_ptr(acc[to], "rw", 4), T.access_ptr(a[at], "r", 4), T.access_ptr(x[b], "r", 2),
            f[row], f[row + 1], power_of(words[token], group), power_of(words[token + 1], group),
        )  # fmt: skip

    @T.macro
    def convert(w, at, u, a, to, held, h):
        """Words w[at .. at + 3] into a[to .. to + 7]: A fragments of two k32 steps, low nibbles first."""
        for r in T.unroll(4):
            word(w, at + r, held.o, None, 0)
            a[to + r] = held.o[0]
            a[to + 4 + r] = held.o[1]

    @T.macro
    def factors(f, at, u):
        """f[at], f[at + 1]: of rows g and g + 8, from the word u of their record."""
        f[at] = call("unpack<false, 0>", u, returns="float32")
        f[at + 1] = call("unpack<false, 1>", u, returns="float32")

    return ByteOperand(
        lambda: Buffers(o=(2, "uint32")), convert, word, mma_groups if gemm.grouped_tokens else mma, factors
    )
