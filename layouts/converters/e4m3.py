"""Four-bit codes to e4m3, all sixteen exactly and without a table: signed integers, and e2m1.

Signed integers, because small e4m3 numbers are equally spaced:

The e4m3 bytes 0x00..0x10 stand for 0..16 times 2^-9: the subnormals and the first normals have one step. So an integer
magnitude is its own e4m3 byte, and only the sign must move to bit 7. Codes are stored zigzag (0, -1, 1, -2, .. 7, -8 as
0..15), with the sign in bit 0: the upper three bits, left where they are, are twice the magnitude, one less for a
negative number; a multiply-add of the sign bits by 0x82 adds what is missing and the sign. The byte is 2 |q|, which
stands for q * 2^-8.

e2m1 is a narrower float: sign, exponent and mantissa move unchanged, and the byte stands for 2^-6 of the number,
subnormals included (float_words.py). Bits lie in a word so that a register needs one shift at most for each of them.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters.base import Converter, register

SIGNS, HALVES = np.uint32(0x01010101), np.uint32(0x0E0E0E0E)


def _bytes(words) -> list[np.ndarray]:
    return [(w & HALVES) + (w & SIGNS) * np.uint32(0x82) for w in (words, words >> np.uint32(4))]


register(
    Converter(
        "z4_e4m3",
        "z4",
        "float8_e4m3",
        4,
        8,
        _bytes,
        "unsigned hi = w >> 4;\n"
        "out[0] = (w & 0x01010101u) * 0x82u + (w & 0x0e0e0e0eu);\n"
        "out[1] = (hi & 0x01010101u) * 0x82u + (hi & 0x0e0e0e0eu);",
        instructions=7,
        scale_exp2=(-8, -8),
    )
)

E2M1_BITS = ((2, 3, 4, 7), (0, 1, 6, 5))
"""Output register -> bits of a byte of the word that hold mantissa, exponent (lowest bit first) and sign."""
E2M1_MAP = tuple(bit + 8 * element for element in range(4) for bits in E2M1_BITS for bit in bits)


def _moved(words) -> list[np.ndarray]:
    left, right = words << np.uint32(2), words >> np.uint32(2)
    return [words & np.uint32(0x9C9C9C9C), left & np.uint32(0x8C8C8C8C) | right & np.uint32(0x10101010)]


register(
    Converter(
        "e2m1_e4m3",
        "e2m1",
        "float8_e4m3",
        4,
        8,
        _moved,
        "out[0] = w & 0x9c9c9c9cu;\nout[1] = ((w << 2) & 0x8c8c8c8cu) | ((w >> 2) & 0x10101010u);",
        instructions=5,
        scale_exp2=(-6, -6),
        bit_map=E2M1_MAP,
    )
)


def zigzag(codes):
    """0..15 (uint8) of signed codes -8..7, numpy or torch int8."""
    return ((codes << 1) ^ (codes >> 7)) & 15


def unzigzag(stored):
    """The inverse of `zigzag`: int8 -8..7 of 0..15, numpy or torch int8."""
    return (stored >> 1) ^ -(stored & 1)
