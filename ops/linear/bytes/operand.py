"""From packed words and (s, a) records to 8-bit operand registers: macros that every W4A8 program uses."""

from dataclasses import dataclass

from terrazzo.ops.linear.bytes.problem import Gemm
from terrazzo.ops.tiles.calls import call
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Macro


@dataclass(frozen=True)
class ByteOperand:
    """Macros `convert`, whose scratch `registers()` makes, `word` and `mma` (mma.sync); with e4m3 `factors` of a
    record."""

    registers: Call
    convert: Macro
    word: Macro
    mma: Macro
    factors: Macro | None = None


def operand_macros(gemm: Gemm) -> ByteOperand:
    """On int8 activations."""
    name, split = gemm.converter.device_name, gemm.groups == 4

    @T.macro
    def word(w, at, o, v, row):
        """Word w[at] into o[0] and o[1], low and high nibbles, with factor and offset v[row] and v[row + 1]."""
        T.call_extern("handle", name, w[at], T.access_ptr(o, "w", 2), v[row], v[row + 1])

    @T.macro
    def mma(acc, to, a, at, x, b):
        """m16n8k32: acc[to .. to + 3] += a[at .. at + 3] x[b .. b + 1]."""
        if gemm.unsigned:
            call("mma_u8s8", T.access_ptr(acc[to], "rw", 4), T.access_ptr(a[at], "r", 4), T.access_ptr(x[b], "r", 2))
        else:
            T.ptx_mma(
                "int32", "m16n8k32", "row", "col", "int8", "int8", "int32", a.data, at, x.data, b, acc.data, to,
                T.bool(False),
            )  # fmt: skip

    @T.macro
    def convert(w, at, u, a, to, held, h):
        """Words w[at .. at + 3] of block `h` of a unit into a[to .. to + 7]: A fragments of two k32 steps.

        u: parameter words of the unit's groups. Low nibbles are the first k32, high nibbles the second.
        """
        for e in T.unroll(2):
            if e == 0 or split:  # groups of 32: each k32 has parameters of its own
                call("lqq_params", u[(h * 2 + e) * gemm.groups // 4], T.access_ptr(held.v, "w"))
            for r in T.unroll(4):  # registers 0 and 2 hold row g, 1 and 3 row g + 8
                if e == 0 or split:
                    T.call_extern(
                        "handle", name, w[at + r], T.access_ptr(held.o[r * 2], "w", 2), held.v[r % 2 * 2],
                        held.v[r % 2 * 2 + 1],
                    )  # fmt: skip
                a[to + e * 4 + r] = held.o[r * 2 + e]

    return ByteOperand(lambda: Buffers(v=(4, "uint32"), o=(8, "uint32")), convert, word, mma)
