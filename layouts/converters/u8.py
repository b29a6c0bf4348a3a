"""Eight-bit integers to f16 and bf16 (specs.md B.2).

f16: a byte permute puts u under 0x64, which is 1024 + u. bf16 has too short a mantissa for that, so the bytes go
through f32: 0x4700uu00 is 32768 + u; after the subtraction u needs only eight significant bits, so the upper half of
the f32 *is* the bf16 and a permute replaces the rounding conversion. s8 is offset binary after one XOR with 0x80.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, register, sub_f16

FLIP = 0x80808080
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
