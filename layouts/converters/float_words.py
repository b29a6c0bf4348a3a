"""Small floats to f16 and bf16 from words whose bits lie where a bf16 wants them.

Sign, exponent and mantissa of a code are moved unchanged into a wider float, which then stands for a value smaller by
2^(difference of the exponents' biases); one multiplication by a power of two, which may contain the row's scale, makes
it right, zeros and subnormals included (specs.md B.2). In the order of fields, sign and magnitude of a register need a
shift each. Here one shift serves both, wherever bits are left for that:

| codes | bf16, of 8 weights | in the order of fields | f16 of the same words |
|---|---:|---:|---:|
| e2m1 with scale | 15 instructions | 19 | 19 |
| the same, parts of a word turned | 13 | 19 | 21 |
| e4m3 | 14 | 18 | 18, without a multiplication |
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, mul_bf16, mul_f16, mul_half, register

BITS = {
    "e2m1": ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14)),
    "e2m1 turned": ((6, 7, 8, 15), (12, 13, 14, 21), (0, 1, 2, 9), (10, 3, 4, 11)),
    "e4m3": ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)),
}
"""Output register -> bits of a word that hold mantissa, exponent (lowest bits first) and sign of its first element.
The second element's are sixteen bits further, from the word's end on at its beginning."""
BIT_MAP = {
    storage: tuple((bit + 16 * element) % 32 for element in range(2) for register_ in bits for bit in register_)
    for storage, bits in BITS.items()
}
_SCALES = ("s0", "s1")

# For each register what is or-ed: (left shift, right where negative, a turn to the left from 16 on; mask of a half).
E4M3_MOVES = {
    "bf16": (((0, 0x87F0),), ((4, 0x80F0), (-4, 0x0700))),
    "f16": (((3, 0x3F80), (0, 0x8000)), ((7, 0x0780), (-1, 0x3800), (4, 0x8000))),
}
MOVES = {
    "bf16": (((0, 0x81C0),), ((3, 0x81C0),), ((6, 0x81C0),), ((-4, 0x00C0), (-5, 0x0100), (1, 0x8000))),
    "f16": (
        ((3, 0x0E00), (0, 0x8000)),
        ((6, 0x0E00), (3, 0x8000)),
        ((9, 0x0E00), (6, 0x8000)),
        ((-1, 0x0600), (-2, 0x0800), (1, 0x8000)),
    ),
}
TURNED_MOVES = {
    "bf16": (((0, 0x81C0),), ((26, 0x81C0),), ((6, 0x81C0),), ((4, 0x8180), (-4, 0x0040))),
    "f16": (
        ((3, 0x0E00), (0, 0x8000)),
        ((-3, 0x0E00), (26, 0x8000)),
        ((9, 0x0E00), (6, 0x8000)),
        ((7, 0x0C00), (-1, 0x0200), (4, 0x8000)),
    ),
}


def _shifted(words, by: int):
    if by >= 16:
        return words << np.uint32(by) | words >> np.uint32(32 - by)
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
    turn = lambda by: f"w << {by} | w >> {32 - by}" if by >= 16 else f"w << {by}"
    shift = lambda by: "w" if by == 0 else turn(by) if by > 0 else f"w >> {-by}"
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
            bit_map=BIT_MAP["e2m1"],
        )
    )

for _short, _operand, _mul, _instructions in (
    ("bf16", "bfloat16", arith.bmul2, 13),
    ("f16", "float16", arith.hmul2, 21),
):
    register(
        Converter(
            f"e2m1_{_short}_paired",
            "e2m1",
            _operand,
            4,
            16,
            lambda w, s01, moves=TURNED_MOVES[_short], mul=_mul: [
                mul(out, arith.prmt(s01, s01, (0x1010, 0x3232)[o % 2])) for o, out in enumerate(_moved(w, moves))
            ],
            "\n".join(
                _text(TURNED_MOVES[_short])
                + [mul_half(f"out[{o}]", f"out[{o}]", "s01", o % 2, _short == "bf16") for o in range(4)]
            ),
            _instructions,
            params=("s01",),
            bit_map=BIT_MAP["e2m1 turned"],
        )
    )

TO_BF16 = int(arith.pair(arith.brain(2.0**120)))
register(
    Converter(
        "e4m3_bf16_words",
        "e4m3",
        "bfloat16",
        8,
        16,
        lambda w: [arith.bmul2(out, np.uint32(TO_BF16)) for out in _moved(w, E4M3_MOVES["bf16"])],
        "\n".join(
            _text(E4M3_MOVES["bf16"]) + [mul_bf16(f"out[{o}]", f"out[{o}]", f"{TO_BF16:#010x}u") for o in range(2)]
        ),
        instructions=7,
        bit_map=BIT_MAP["e4m3"],
    )
)
register(
    Converter(
        "e4m3_f16_words",
        "e4m3",
        "float16",
        8,
        16,
        lambda w: _moved(w, E4M3_MOVES["f16"]),
        "\n".join(_text(E4M3_MOVES["f16"])),
        instructions=9,
        scale_exp2=(-8, -8),
        bit_map=BIT_MAP["e4m3"],
    )
)
for _short, _operand, _mul, _mul_text, _exp2 in (
    ("bf16", "bfloat16", arith.bmul2, mul_bf16, 0),
    ("f16", "float16", arith.hmul2, mul_f16, -8),
):
    register(
        Converter(
            f"e4m3_{_short}_scaled",
            "e4m3",
            _operand,
            8,
            16,
            lambda w, s0, s1, moves=E4M3_MOVES[_short], mul=_mul: [
                mul(out, (s0, s1)[o]) for o, out in enumerate(_moved(w, moves))
            ],
            "\n".join(_text(E4M3_MOVES[_short]) + [_mul_text(f"out[{o}]", f"out[{o}]", f"s{o}") for o in range(2)]),
            instructions={"bf16": 7, "f16": 11}[_short],
            params=_SCALES,
            scale_exp2=(_exp2, _exp2),
            bit_map=BIT_MAP["e4m3"],
        )
    )
