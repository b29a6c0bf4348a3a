"""e2m1 (FP4) to f16 and bf16 from words whose bits lie where a bf16 wants them, with the scale of the row.

Sign, exponent and mantissa of a code are moved unchanged into a wider float, which then stands for a value smaller by
2^(difference of the exponents' biases), 2^-126 in bf16 and 2^-14 in f16; one multiplication by a power of two that
contains the row's scale makes it right, zeros and the subnormal 0.5 included (specs.md B.2). In the order of nibbles
sign and magnitude of a register need a shift each. Here the bits of registers 0 to 2 lie three apart, sign included, so
that one shift serves both, and register 3 takes the bits that are left: 15 instructions for 8 weights to bf16, where
nibbles would take 19. The same words serve f16, whose exponents begin three bits higher, with 19.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, mul_bf16, mul_f16, register

BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
"""Output register -> bits of a 16-bit half that hold mantissa, exponent (two bits) and sign of its element there."""
BIT_MAP = tuple(BITS[field % 4][bit] + 16 * (field // 4) for field in range(8) for bit in range(4))
_SCALES = ("s0", "s1")

# For each register what is or-ed: (left shift, or right shift where negative; mask of a half).
MOVES = {
    "bf16": (((0, 0x81C0),), ((3, 0x81C0),), ((6, 0x81C0),), ((-4, 0x00C0), (-5, 0x0100), (1, 0x8000))),
    "f16": (
        ((3, 0x0E00), (0, 0x8000)),
        ((6, 0x0E00), (3, 0x8000)),
        ((9, 0x0E00), (6, 0x8000)),
        ((-1, 0x0600), (-2, 0x0800), (1, 0x8000)),
    ),
}


def _shifted(words, by: int):
    return words << np.uint32(by) if by >= 0 else words >> np.uint32(-by)


def _moved(words, moves) -> list[np.ndarray]:
    """Output registers, each value 2^(difference of biases) of what it stands for."""
    out = []
    for parts in moves:
        register_ = np.uint32(0)
        for by, mask in parts:
            register_ = register_ | _shifted(words, by) & arith.pair(mask)
        out.append(register_)
    return out


def _text(moves) -> list[str]:
    shift = lambda by: "w" if by == 0 else f"w << {by}" if by > 0 else f"w >> {-by}"
    parts = lambda each: " | ".join(f"(({shift(by)}) & {int(arith.pair(mask)):#010x}u)" for by, mask in each)
    return [f"out[{o}] = {parts(each)};" for o, each in enumerate(moves)]


for _short, _operand, _mul, _mul_text, _instructions in (
    ("bf16", "bfloat16", arith.bmul2, mul_bf16, 15),
    ("f16", "float16", arith.hmul2, mul_f16, 19),
):
    register(
        Converter(
            f"e2m1_{_short}_scaled",
            "e2m1",
            _operand,
            4,
            16,
            lambda w, s0, s1, moves=MOVES[_short], mul=_mul: [
                mul(out, (s0, s1)[o % 2]) for o, out in enumerate(_moved(w, moves))
            ],
            "\n".join(_text(MOVES[_short]) + [_mul_text(f"out[{o}]", f"out[{o}]", f"s{o % 2}") for o in range(4)]),
            _instructions,
            params=_SCALES,
            bit_map=BIT_MAP,
        )
    )
