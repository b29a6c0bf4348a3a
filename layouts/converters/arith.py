"""Bit-exact numpy models of the register instructions that converters use.

A register is a uint32; a packed pair (f16x2, bf16x2) holds element 0 in the low half. Every floating operation is one
fused multiply-add with one rounding, as the hardware's HADD2 / HMUL2 / HFMA2 are.
"""

from __future__ import annotations

import numpy as np

U32 = np.uint32


def u32(value) -> np.ndarray:
    """As a uint32 array (ints wrap)."""
    return np.asarray(np.asarray(value, dtype=np.int64) & 0xFFFFFFFF, dtype=U32)


def pair(bits16: int) -> np.ndarray:
    """The register with the same 16 bits in both halves."""
    return U32(bits16 * 0x10001)


def prmt(a, b, selector: int) -> np.ndarray:
    """PRMT (byte permute): byte i of the result is byte selector[4i..4i+3] of the eight bytes b:a."""
    a, b = np.broadcast_arrays(u32(a), u32(b))
    out = np.zeros_like(a)
    for byte in range(4):
        pick = selector >> (4 * byte) & 0xF
        source = b if pick & 4 else a
        out = out | ((source >> U32(8 * (pick & 3))) & U32(0xFF)) << U32(8 * byte)
    return out


def _halves(word) -> np.ndarray:
    word = u32(word)
    return np.stack([word & U32(0xFFFF), word >> U32(16)], axis=-1).astype(np.uint16)


def _join(halves: np.ndarray) -> np.ndarray:
    wide = halves.astype(U32)
    return wide[..., 0] | wide[..., 1] << U32(16)


def f16_values(word) -> np.ndarray:
    """The two f16 of a register as float64, last axis 2."""
    return _halves(word).view(np.float16).astype(np.float64)


def bf16_values(word) -> np.ndarray:
    """The two bf16 of a register as float64, last axis 2."""
    return (_halves(word).astype(U32) << U32(16)).view(np.float32).astype(np.float64)


def to_f16(values: np.ndarray) -> np.ndarray:
    """float64 (already rounded to odd where inexact) to f16 bits, nearest even."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float64).astype(np.float16).view(np.uint16)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float64 to bf16 bits, nearest even, without double rounding (through f32 rounded to odd)."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    wide = near.astype(np.float64)
    bits = near.view(U32).astype(np.int64)
    inexact = np.isfinite(near) & (wide != values)
    bits = np.where(inexact, (bits - (np.abs(wide) > np.abs(values))) | 1, bits)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _fma(a, b, c) -> np.ndarray:
    """a*b + c in float64 rounded to odd: the product is exact, so the later rounding is the only one."""
    product = a * b
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    toward = np.where((lost > 0) == (total > 0), 0, -1)
    return np.where((lost != 0) & np.isfinite(lost), (bits + toward) | 1, bits).view(np.float64)


def hfma2(a, b, c) -> np.ndarray:
    """f16x2 fused multiply-add."""
    a, b, c = np.broadcast_arrays(f16_values(a), f16_values(b), f16_values(c))
    return _join(to_f16(_fma(a, b, c)))


def bfma2(a, b, c) -> np.ndarray:
    """bf16x2 fused multiply-add."""
    a, b, c = np.broadcast_arrays(bf16_values(a), bf16_values(b), bf16_values(c))
    return _join(to_bf16(_fma(a, b, c)))


def hsub2(a, b) -> np.ndarray:
    return hfma2(b, pair(0xBC00), a)


def hmul2(a, b) -> np.ndarray:
    return hfma2(a, b, pair(0x8000))


def bsub2(a, b) -> np.ndarray:
    return bfma2(b, pair(0xBF80), a)


def bmul2(a, b) -> np.ndarray:
    return bfma2(a, b, pair(0x8000))


def half(value: float) -> int:
    """The f16 bits of a value that f16 holds exactly."""
    return int(np.float16(value).view(np.uint16))


def brain(value: float) -> int:
    """The bf16 bits of a value that bf16 holds exactly."""
    return int(np.float32(value).view(U32)) >> 16


def elements(word, operand: str) -> np.ndarray:
    """The values of an operand register, float64 (integers too), last axis its elements, low bits first."""
    word = u32(word)
    if operand == "float16":
        return f16_values(word)
    if operand == "bfloat16":
        return bf16_values(word)
    bits = int("".join(filter(str.isdigit, operand.split("_")[0])))
    fields = np.stack([(word >> U32(at)) & U32((1 << bits) - 1) for at in range(0, 32, bits)], axis=-1).astype(np.int64)
    if operand.startswith("float8_e4m3"):
        exponent, mantissa = fields >> 3 & 15, fields & 7
        value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
        return np.where(fields & 0x7F == 0x7F, np.nan, np.where(fields & 0x80, -value, value))
    signed = operand.startswith("int")
    return np.where(signed & (fields >> (bits - 1) == 1), fields - (1 << bits), fields).astype(np.float64)
