"""Low-bit integers to 8-bit operands, and the identities.

LQQ (LiquidGEMM, specs.md D): every byte lane of q*s + a stays below 256 (q <= 15, s <= 16, a <= 255 - q*s), so one
32-bit multiply-add serves four values; XOR 0x80 makes the signed byte, or the consumer multiplies it as u8. Of
signed codes, whose nibbles become q + 8 in the instruction that masks them, a = 128 - 8 s leaves q * s.
x16 (COMET, specs.md E.2): a signed nibble moved into the upper half of its byte is 16 * q with the right sign.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters.base import Converter, lop3, register

LOW, HIGH, FLIP = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0), np.uint32(0x80808080)
EIGHTS = np.uint32(0x08080808)


def _nibbles(words) -> list[np.ndarray]:
    return [words & LOW, (words >> 4) & LOW]


register(
    Converter(
        "u4_u8",
        "u4",
        "uint8",
        4,
        8,
        _nibbles,
        "out[0] = w & 0x0f0f0f0fu;\nout[1] = (w >> 4) & 0x0f0f0f0fu;",
        instructions=3,
    )
)
register(
    Converter(
        "u4_u8_lqq",
        "u4",
        "uint8",
        4,
        8,
        lambda w, s, a: [q * s + a for q in _nibbles(w)],
        "out[0] = (w & 0x0f0f0f0fu) * s + a;\nout[1] = ((w >> 4) & 0x0f0f0f0fu) * s + a;",
        instructions=5,
        params=("s", "a"),
    )
)
register(
    Converter(
        "u4_s8_lqq",
        "u4",
        "int8",
        4,
        8,
        lambda w, s, a: [(q * s + a) ^ FLIP for q in _nibbles(w)],
        "unsigned lo = w & 0x0f0f0f0fu, hi = (w >> 4) & 0x0f0f0f0fu;\n"
        "out[0] = (lo * s + a) ^ 0x80808080u;\nout[1] = (hi * s + a) ^ 0x80808080u;",
        instructions=7,
        params=("s", "a"),
    )
)
register(
    Converter(
        "s4_s8_lqq",
        "s4",
        "int8",
        4,
        8,
        lambda w, s, a: [((q ^ EIGHTS) * s + a) ^ FLIP for q in _nibbles(w)],
        "unsigned lo, hi;\n"
        + lop3("lo", "w", 0x0F0F0F0F, 0x08080808, 0x6A)
        + "\n"
        + lop3("hi", "w >> 4", 0x0F0F0F0F, 0x08080808, 0x6A)
        + "\nout[0] = (lo * s + a) ^ 0x80808080u;\nout[1] = (hi * s + a) ^ 0x80808080u;",
        instructions=7,
        params=("s", "a"),
    )
)
register(
    Converter(
        "s4_s8_x16",
        "s4",
        "int8",
        4,
        8,
        lambda w: [(w << 4) & HIGH, w & HIGH],
        "out[0] = (w << 4) & 0xf0f0f0f0u;\nout[1] = w & 0xf0f0f0f0u;",
        instructions=3,
        scale_exp2=(4, 4),
    )
)
register(
    Converter(
        "u2_u8",
        "u2",
        "uint8",
        2,
        8,
        lambda w: [(w >> 2 * o) & np.uint32(0x03030303) for o in range(4)],
        "out[0] = w & 0x03030303u;\n" + "\n".join(f"out[{o}] = (w >> {2 * o}) & 0x03030303u;" for o in (1, 2, 3)),
        instructions=7,
    )
)


def _identity(short: str, operand: str, bits: int) -> None:
    """Operands as they are."""
    register(Converter(f"{short}_{short}", short, operand, bits, bits, lambda w: [w], "out[0] = w;", instructions=0))


_identity("f16", "float16", 16)
_identity("bf16", "bfloat16", 16)
_identity("s8", "int8", 8)
_identity("u8", "uint8", 8)
_identity("e4m3", "float8_e4m3", 8)
_identity("s4", "int4", 4)
_identity("u4", "uint4", 4)
