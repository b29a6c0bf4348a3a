"""Four-bit integers to f16 and bf16 (specs.md B.2; subnormal form: no arithmetic at all).

f16: OR-ing a nibble into the mantissa of 1024 (0x6400, ulp 1) adds q; one nibble higher, in the mantissa of 64 (0x5400,
ulp 1/16), q << 4 adds q as well. So four mask-ors and one shift by 8 reach all eight nibbles. Without the magic number
the same masked halves are the subnormals q * 2^-24 and q * 2^-20, which tensor cores take exactly.
bf16 has seven mantissa bits, so only the low nibble fits (0x4300 = 128, ulp 1) and each register needs its own shift.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import (
    Converter,
    fma_bf16,
    fma_f16,
    lop3,
    mul_bf16,
    mul_f16,
    register,
    sub_bf16,
    sub_f16,
)

F16_MASK, F16_MAGIC, F16_BIAS = (0x000F000F, 0x00F000F0), (0x64006400, 0x54005400), (1024, 64)
BF16_MASK, BF16_MAGIC, BF16_BIAS = 0x000F000F, 0x43004300, 128
SIGNED = {"u4": 0, "s4": 8}  # s4 is read as offset binary: flip the sign bit, then subtract 8 more


def _f16_biased(words, flip: int = 0) -> list[np.ndarray]:
    y = words >> 8
    return [
        ((words, y)[o // 2] & np.uint32(F16_MASK[o % 2]))
        ^ np.uint32(F16_MAGIC[o % 2] ^ (flip << 4 * (o % 2)) * 0x10001)
        for o in range(4)
    ]


def _f16_biased_text(flip: int = 0) -> list[str]:
    lut = 0x6A if flip else 0xEA
    magic = [F16_MAGIC[o % 2] ^ (flip << 4 * (o % 2)) * 0x10001 for o in range(4)]
    return ["unsigned y = w >> 8;"] + [lop3(f"out[{o}]", "wwyy"[o], F16_MASK[o % 2], magic[o], lut) for o in range(4)]


def _bf16_biased(words, flip: int = 0) -> list[np.ndarray]:
    return [((words >> 4 * o) & np.uint32(BF16_MASK)) ^ np.uint32(BF16_MAGIC ^ flip * 0x10001) for o in range(4)]


def _bf16_biased_text(flip: int = 0) -> list[str]:
    lut, magic = (0x6A if flip else 0xEA), BF16_MAGIC ^ flip * 0x10001
    return [lop3(f"out[{o}]", f"w >> {4 * o}" if o else "w", BF16_MASK, magic, lut) for o in range(4)]


def _f16(name: str, emulation, lines: list[str], instructions: int, storage: str = "u4", **more) -> None:
    register(Converter(name, storage, "float16", 4, 16, emulation, "\n".join(lines), instructions, **more))


def _bf16(name: str, emulation, lines: list[str], instructions: int, storage: str = "u4", **more) -> None:
    register(Converter(name, storage, "bfloat16", 4, 16, emulation, "\n".join(lines), instructions, **more))


_f16(
    "u4_f16_subnormal",
    lambda w: [(w >> 8 * (o // 2)) & np.uint32(F16_MASK[o % 2]) for o in range(4)],
    ["unsigned y = w >> 8;", *(f"out[{o}] = {'wwyy'[o]} & {F16_MASK[o % 2]:#010x}u;" for o in range(4))],
    instructions=5,
    scale_exp2=(-24, -20, -24, -20),
)
_bf16("u4_bf16_biased", _bf16_biased, _bf16_biased_text(), instructions=7, bias=(BF16_BIAS,) * 4)

for _storage, _flip in SIGNED.items():
    _sub16 = [arith.pair(arith.half(F16_BIAS[o % 2] + _flip)) for o in range(4)]
    _subb = arith.pair(arith.brain(BF16_BIAS + _flip))
    _suffix = "" if _flip else "_magic"
    _f16(
        f"{_storage}_f16{_suffix}",
        lambda w, flip=_flip, subs=_sub16: [arith.hsub2(x, s) for x, s in zip(_f16_biased(w, flip), subs)],
        _f16_biased_text(_flip) + [sub_f16(f"out[{o}]", f"out[{o}]", f"{int(_sub16[o]):#010x}u") for o in range(4)],
        instructions=9,
        storage=_storage,
    )
    _bf16(
        f"{_storage}_bf16{_suffix}",
        lambda w, flip=_flip, sub=_subb: [arith.bsub2(x, sub) for x in _bf16_biased(w, flip)],
        _bf16_biased_text(_flip) + [sub_bf16(f"out[{o}]", f"out[{o}]", f"{int(_subb):#010x}u") for o in range(4)],
        instructions=11,
        storage=_storage,
    )

_AFFINE = ("b0", "s0", "b1", "s1")

# exact: the zero point rides in the magic subtraction (1024 + q) - (1024 + z), so q - z is exact and the product with s
# is the only rounding: the correctly rounded (q - z) * s.
_f16(
    "u4_f16_exact",
    lambda w, b0, s0, b1, s1: [
        arith.hmul2(arith.hsub2(x, (b0, b1)[o % 2]), (s0, s1)[o % 2]) for o, x in enumerate(_f16_biased(w))
    ],
    _f16_biased_text()
    + [sub_f16(f"out[{o}]", f"out[{o}]", f"b{o % 2}") for o in range(4)]
    + [mul_f16(f"out[{o}]", f"out[{o}]", f"s{o % 2}") for o in range(4)],
    instructions=13,
    params=_AFFINE,
    param_bias=F16_BIAS,
)
_bf16(
    "u4_bf16_exact",
    lambda w, b0, s0, b1, s1: [
        arith.bmul2(arith.bsub2(x, (b0, b1)[o % 2]), (s0, s1)[o % 2]) for o, x in enumerate(_bf16_biased(w))
    ],
    _bf16_biased_text()
    + [sub_bf16(f"out[{o}]", f"out[{o}]", f"b{o % 2}") for o in range(4)]
    + [mul_bf16(f"out[{o}]", f"out[{o}]", f"s{o % 2}") for o in range(4)],
    instructions=15,
    params=_AFFINE,
    param_bias=(BF16_BIAS, BF16_BIAS),
)

# fused: fma(q, s, m) with m = round(-z * s), as TurboMind computes it; two roundings in all, kept for bit parity.
_f16(
    "u4_f16_fused",
    lambda w, b0, s0, b1, s1: [
        arith.hfma2(arith.hsub2(x, arith.pair(arith.half(F16_BIAS[o % 2]))), (s0, s1)[o % 2], (b0, b1)[o % 2])
        for o, x in enumerate(_f16_biased(w))
    ],
    _f16_biased_text()
    + [sub_f16(f"out[{o}]", f"out[{o}]", f"{F16_MAGIC[o % 2]:#010x}u") for o in range(4)]
    + [fma_f16(f"out[{o}]", f"out[{o}]", f"s{o % 2}", f"b{o % 2}") for o in range(4)],
    instructions=13,
    params=_AFFINE,
)
_bf16(
    "u4_bf16_fused",
    lambda w, b0, s0, b1, s1: [
        arith.bfma2(arith.bsub2(x, np.uint32(BF16_MAGIC)), (s0, s1)[o % 2], (b0, b1)[o % 2])
        for o, x in enumerate(_bf16_biased(w))
    ],
    _bf16_biased_text()
    + [sub_bf16(f"out[{o}]", f"out[{o}]", f"{BF16_MAGIC:#010x}u") for o in range(4)]
    + [fma_bf16(f"out[{o}]", f"out[{o}]", f"s{o % 2}", f"b{o % 2}") for o in range(4)],
    instructions=15,
    params=_AFFINE,
)
