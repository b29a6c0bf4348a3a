"""Eight-bit integers to f16 and bf16 (specs.md B.2).

f16: a byte permute puts u under 0x64, which is 1024 + u. bf16 has too short a mantissa for that, so the bytes go
through f32: 0x4700uu00 is 32768 + u; after the subtraction u needs only eight significant bits, so the upper half of
the f32 *is* the bf16 and a permute replaces the rounding conversion. s8 is offset binary after one XOR with 0x80.

Centred, a byte stands for u - 128. Then bf16 needs no detour: its seven bits of mantissa hold the low bits of u, 128 +
(u mod 128), and bit 7 is the lowest one of the exponent, 128 or, flipped, 256; the difference of both is u - 128.

| u - 128 of 8 bytes | instructions | times the scale of the row | less the zero point, times the scale |
|---|---:|---:|---:|
| f16 | 8 | 12 | 12 |
| bf16 | 14 | 18 | 22 |
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, lop3, mul_bf16, mul_f16, register, sub_bf16, sub_f16

FLIP = 0x80808080
LOW, LOW_MAGIC = 0x007F007F, 0x43004300
TOP, TOP_MAGIC = 0x00800080, 0x43804380
PAIR16 = (0x4240, 0x4341)  # PRMT selectors: bytes (0, 2) and (1, 3), each under byte 0 of the magic word


def _f16(words, offset: int) -> list[np.ndarray]:
    magic = arith.pair(arith.half(1024 + offset))
    return [arith.hsub2(arith.prmt(words, 0x64646464, select), magic) for select in PAIR16]


def _bf16(words, offset: int) -> list[np.ndarray]:
    wide = [arith.prmt(words, 0x47000000, 0x7604 | byte << 4).view(np.float32) for byte in range(4)]
    exact = [(value - np.float32(32768 + offset)).view(np.uint32) for value in wide]
    return [arith.prmt(exact[o], exact[o + 2], 0x7632) for o in range(2)]


def _f16_text(offset: int) -> list[str]:
    magic = f"{int(arith.pair(arith.half(1024 + offset))):#010x}u"
    merge = [f"out[{o}] = __byte_perm(w, 0x64646464u, {PAIR16[o]:#06x});" for o in range(2)]
    return merge + [sub_f16(f"out[{o}]", f"out[{o}]", magic) for o in range(2)]


def _bf16_text(offset: int) -> list[str]:
    wide = [
        f"unsigned f{i} = __float_as_uint(__uint_as_float(__byte_perm(w, 0x47000000u, {0x7604 | i << 4:#06x}))"
        f" - {32768 + offset}.0f);"
        for i in range(4)
    ]
    return wide + [f"out[{o}] = __byte_perm(f{o}, f{o + 2}, 0x7632);" for o in range(2)]


for _storage, _flip, _offset in (("u8", 0, 0), ("s8", FLIP, 128)):
    _first = ["w ^= 0x80808080u;"] if _flip else []
    register(
        Converter(
            f"{_storage}_f16",
            _storage,
            "float16",
            8,
            16,
            lambda w, flip=_flip, offset=_offset: _f16(w ^ np.uint32(flip), offset),
            "\n".join(_first + _f16_text(_offset)),
            instructions=4 + len(_first),
        )
    )
    register(
        Converter(
            f"{_storage}_bf16",
            _storage,
            "bfloat16",
            8,
            16,
            lambda w, flip=_flip, offset=_offset: _bf16(w ^ np.uint32(flip), offset),
            "\n".join(_first + _bf16_text(_offset)),
            instructions=10 + len(_first),
        )
    )

register(
    Converter(
        "u8_f16_subnormal",
        "u8",
        "float16",
        8,
        16,
        lambda w: [w & np.uint32(0x00FF00FF), (w >> 8) & np.uint32(0x00FF00FF)],
        "out[0] = w & 0x00ff00ffu;\nout[1] = __byte_perm(w, 0u, 0x4341);",
        instructions=2,
        scale_exp2=(-24, -24),
    )
)

_AFFINE = ("b0", "s0", "b1", "s1")


def _f16_biased(words) -> list[np.ndarray]:
    return [arith.prmt(words, 0x64646464, select) for select in PAIR16]


def _bf16_centred(words) -> list[np.ndarray]:
    parts = [words, words >> np.uint32(8)]
    return [
        arith.bsub2(part & np.uint32(LOW) | np.uint32(LOW_MAGIC), part & np.uint32(TOP) ^ np.uint32(TOP_MAGIC))
        for part in parts
    ]


def _bf16_centred_text() -> list[str]:
    lines = ["unsigned y = w >> 8, top;"]
    for o in range(2):
        lines += [lop3(f"out[{o}]", "wy"[o], LOW, LOW_MAGIC), lop3("top", "wy"[o], TOP, TOP_MAGIC, 0x6A)]
        lines += [sub_bf16(f"out[{o}]", f"out[{o}]", "top")]
    return lines


_BIASED_TEXT = [f"out[{o}] = __byte_perm(w, 0x64646464u, {PAIR16[o]:#06x});" for o in range(2)]
_ZERO = arith.pair(arith.half(1024 + 128))
for _name, _operand, _emulation, _lines, _instructions, _more in (
    (
        "u8_f16_centred",
        "float16",
        lambda w: [arith.hsub2(x, _ZERO) for x in _f16_biased(w)],
        _BIASED_TEXT + [sub_f16(f"out[{o}]", f"out[{o}]", f"{int(_ZERO):#010x}u") for o in range(2)],
        4,
        dict(bias=(-128, -128)),
    ),
    (
        "u8_f16_exact",
        "float16",
        lambda w, b0, s0, b1, s1: [
            arith.hmul2(arith.hsub2(x, b), s) for x, b, s in zip(_f16_biased(w), (b0, b1), (s0, s1))
        ],
        _BIASED_TEXT
        + [sub_f16(f"out[{o}]", f"out[{o}]", f"b{o}") for o in range(2)]
        + [mul_f16(f"out[{o}]", f"out[{o}]", f"s{o}") for o in range(2)],
        6,
        dict(params=_AFFINE, param_bias=(1024, 1024)),
    ),
    ("u8_bf16_centred", "bfloat16", _bf16_centred, _bf16_centred_text(), 7, dict(bias=(-128, -128))),
    (
        "u8_bf16_scaled",
        "bfloat16",
        lambda w, s0, s1: [arith.bmul2(x, s) for x, s in zip(_bf16_centred(w), (s0, s1))],
        _bf16_centred_text() + [mul_bf16(f"out[{o}]", f"out[{o}]", f"s{o}") for o in range(2)],
        9,
        dict(params=("s0", "s1"), bias=(-128, -128)),
    ),
    (
        "u8_bf16_exact",
        "bfloat16",
        lambda w, b0, s0, b1, s1: [
            arith.bmul2(arith.bsub2(x, b), s) for x, b, s in zip(_bf16_centred(w), (b0, b1), (s0, s1))
        ],
        _bf16_centred_text()
        + [sub_bf16(f"out[{o}]", f"out[{o}]", f"b{o}") for o in range(2)]
        + [mul_bf16(f"out[{o}]", f"out[{o}]", f"s{o}") for o in range(2)],
        11,
        dict(params=_AFFINE, param_bias=(-128, -128)),
    ),
):
    register(Converter(_name, "u8", _operand, 8, 16, _emulation, "\n".join(_lines), _instructions, **_more))
