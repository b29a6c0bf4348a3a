"""Small floats to f16 and bf16: move sign and magnitude bits into place, then multiply by the exponents' difference.

A small float's exponent, moved unchanged into a wider one, stands for a value smaller by 2^(bias difference); one exact
multiplication repairs normals, subnormals and zeros alike (specs.md B.2). The e4m3 NaN (0x7F) becomes 480.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, mul_bf16, mul_f16, register

# (storage, bits, exponent bits + mantissa bits, mantissa bits, exponent bias) and the same of the operands
SOURCES = {"e4m3": (8, 3, 7), "e2m1": (4, 1, 1)}
OPERANDS = {
    "f16": ("float16", 10, 15, arith.half, arith.hmul2, mul_f16),
    "bf16": ("bfloat16", 7, 127, arith.brain, arith.bmul2, mul_bf16),
}


def _moves(bits: int, mantissa: int, wide_mantissa: int) -> list[tuple[int, int]]:
    """For every output register, the left shifts (negative = right) of the sign bit and of the magnitude bits."""
    return [(16 - bits * (o + 1), wide_mantissa - mantissa - bits * o) for o in range(16 // bits)]


def _shift(words, by: int):
    return words << by if by >= 0 else words >> -by


def _shift_text(by: int) -> str:
    return "w" if by == 0 else f"(w << {by})" if by > 0 else f"(w >> {-by})"


for _storage, (_bits, _mantissa, _bias) in SOURCES.items():
    for _short, (_operand, _wide, _wide_bias, _encode, _mul, _mul_text) in OPERANDS.items():
        _plan = _moves(_bits, _mantissa, _wide)
        _magnitude = int(arith.pair(((1 << (_bits - 1)) - 1) << (_wide - _mantissa)))
        _scale = int(arith.pair(_encode(2.0 ** (_wide_bias - _bias))))
        _lines = [
            f"out[{o}] = ({_shift_text(sign)} & 0x80008000u) | ({_shift_text(rest)} & {_magnitude:#010x}u);"
            for o, (sign, rest) in enumerate(_plan)
        ]
        register(
            Converter(
                f"{_storage}_{_short}",
                _storage,
                _operand,
                _bits,
                16,
                lambda w, plan=_plan, magnitude=_magnitude, scale=_scale, mul=_mul: [
                    mul(
                        _shift(w, sign) & np.uint32(0x80008000) | _shift(w, rest) & np.uint32(magnitude),
                        np.uint32(scale),
                    )
                    for sign, rest in plan
                ],
                "\n".join(
                    _lines + [_mul_text(f"out[{o}]", f"out[{o}]", f"{_scale:#010x}u") for o in range(len(_plan))]
                ),
                # per register: up to two shifts, two LOP3, one multiply
                instructions=sum((sign != 0) + (rest != 0) + 3 for sign, rest in _plan),
            )
        )

# Without the multiplication every value is 2^-8 of what it stands for, exactly: consumers fold the 2^8 into a scale.
_E4M3 = _moves(8, 3, 10)
register(
    Converter(
        "e4m3_f16_moved",
        "e4m3",
        "float16",
        8,
        16,
        lambda w: [
            _shift(w, sign) & np.uint32(0x80008000) | _shift(w, rest) & np.uint32(0x3F803F80) for sign, rest in _E4M3
        ],
        "\n".join(
            f"out[{o}] = ({_shift_text(sign)} & 0x80008000u) | ({_shift_text(rest)} & 0x3f803f80u);"
            for o, (sign, rest) in enumerate(_E4M3)
        ),
        instructions=7,
        scale_exp2=(-8, -8),
    )
)
