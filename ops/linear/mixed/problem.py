"""What every W4Ax program shares: its parameters' meaning, and the way from packed words to operand registers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes import problem as w4a8_problem
from terrazzo.ops.linear.mixed.scales import OUT_DTYPES
from terrazzo.ops.tiles.calls import address, call
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro, Place

UNIT_K = 128  # channels of a block, which is what a ring stage holds
UNIT_WORDS = 1056  # int32 of 64 rows by 128 channels: codes, then a bfloat16 for each row
BLOCK_WORDS = 512  # of 64 rows by 64 channels in an 8-bit fragment
SCALES = 2 * BLOCK_WORDS  # first word of the scales behind them
TILE4_WORDS = 264  # of 16 rows by 128 channels in the s4 fragment, scales included


@dataclass(frozen=True)
class Gemm:
    """y[M, n] = x[M, k] w[n, k]^T (+ bias), w in units of 64 rows by 128 channels, k a multiple of 128.

    Args:
        blocks8: INT8 blocks of x, the last ones.
        out_dtype: "float16", "bfloat16" or "float32".
        bias: float32 [n] is added.
        two_level: the scale of a weight's block is an integer times that of its output channel, see ops/w4ax/format.py.
    """

    n: int
    k: int
    blocks8: int
    out_dtype: str
    bias: bool
    two_level: bool = False

    def __post_init__(self):
        if self.out_dtype not in OUT_DTYPES:
            raise ArgumentError("out_dtype", self.out_dtype, f"must be one of {OUT_DTYPES}", "cast y")
        if self.k % UNIT_K or self.k < UNIT_K:
            raise ArgumentError("k", self.k, f"must be a multiple of {UNIT_K}", "pad the channels")
        if type(self.blocks8) is not int or not 0 <= self.blocks8 <= self.units:
            raise ArgumentError("blocks8", self.blocks8, f"must be 0..{self.units}", "count blocks of 128")

    @property
    def converter(self) -> Converter:
        """Of blocks that are converted to bytes: 16 times the code, three instructions for eight of them."""
        return get_converter("s4_s8_x16")

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows, padding included."""
        return -(-self.n // 64)

    @property
    def units(self) -> int:
        """Blocks of 128 channels."""
        return self.k // UNIT_K

    @property
    def blocks4(self) -> int:
        return self.units - self.blocks8

    @property
    def out_bytes(self) -> int:
        return 4 if self.out_dtype == "float32" else 2


class ByteGemm(w4a8_problem.Gemm):
    """The same with every block's codes times its multiplier as bytes: a W4A8 weight of groups of 128, signed codes."""

    converters: ClassVar[Mapping[str, str]] = {"signed": "s4_s8_lqq"}


def byte_gemm(gemm: Gemm) -> ByteGemm:
    """What the macros of W4A8 take; its output is what W4Ax makes of the int32 sums."""
    return ByteGemm(gemm.n, gemm.k, UNIT_K, "int32", "signed", False)


def scaled(y: Expr, total: Expr, token: Expr, row: Expr) -> Expr:
    """The int32 sum of a block, times the scales of its token and row, added to y."""
    return call("scaled", y, T.cast(total, "float32"), token, row, returns="float32")


def row_scales(to: Place, word: Expr) -> Expr:
    """Two bfloat16 scales of a word as floats."""
    return call("row_scales", address(to, "w", 8), word)


def convert_macros(gemm: Gemm) -> tuple[Call, Macro]:
    """Function `registers`, the scratch of macro `convert`, and that."""
    name = gemm.converter.device_name

    @T.macro
    def convert(w, at, a, to, held):
        """Words w[at .. at + 3], 64 channels, into a[to .. to + 7]: A fragments of two k32, 16 times the codes."""
        for r in T.unroll(4):
            T.call_extern("handle", name, w[at + r], T.access_ptr(held.o, "w", 2))
            a[to + r] = held.o[0]
            a[to + 4 + r] = held.o[1]

    return lambda: Buffers(o=(2, "uint32")), convert
