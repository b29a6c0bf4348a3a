"""Storage formats decoded from their definitions, one value at a time: the tests' own oracle."""

from __future__ import annotations

import itertools
from fractions import Fraction
from statistics import NormalDist

import numpy as np


def decode(storage: str, code: int) -> float:
    """The value of a stored code."""
    kind, bits = storage[0], int(storage[1:]) if storage[1:].isdigit() else 0
    if kind == "u":
        return float(code)
    if kind == "s":
        return float(code - (1 << bits) if code >> (bits - 1) else code)
    if kind == "z":
        return float(-(code + 1) // 2 if code & 1 else code // 2)
    if storage == "nf4":
        return nf4()[code]
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e2m1": (2, 1, 1)}[storage]
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def nf4() -> list[float]:
    """Quantiles of a normal distribution, seven below zero and eight above, as bitsandbytes' create_normal_map has
    them: those of evenly spaced probabilities up to 0.9677083, over the largest."""
    quantile, last = NormalDist().inv_cdf, 0.9677083
    above = [quantile(last + (0.5 - last) * i / 8) for i in range(8)]
    below = [-quantile(last + (0.5 - last) * i / 7) for i in range(7)]
    return [value / above[0] for value in sorted([*above, *below, 0.0])]


def rounded(values: np.ndarray, operand: str) -> np.ndarray:
    """Nearest-even f16 or bf16; others as they are."""
    kept = {"float16": (11, -24), "bfloat16": (8, -133)}.get(operand)
    if kept is None:
        return values
    return np.array([float(round_to(Fraction(value), *kept)) for value in values])


def table(storage: str, bits: int) -> np.ndarray:
    return np.array([decode(storage, code) for code in range(1 << bits)])


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """[..., 32 // bits] fields of uint32 words, lowest first."""
    return np.stack([words.astype(np.int64) >> at & ((1 << bits) - 1) for at in range(0, 32, bits)], axis=-1)


def every_half_word() -> np.ndarray:
    """2^16 words in which every half-word occurs in the low half and every half-word in the high half."""
    low = np.arange(1 << 16, dtype=np.uint32)
    high = (low * np.uint32(40503) + np.uint32(12345)) & np.uint32(0xFFFF)  # an odd multiplier permutes 2^16
    return low | high << np.uint32(16)


def round_to(value: Fraction, significand: int, least: int) -> Fraction:
    """Nearest-even rounding of an exact value to ``significand`` bits, exponents from 2^least (the subnormal step)."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()  # floor(log2) or one more
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** max(least, exponent - significand + 1)
    count = magnitude / step
    whole = count.numerator // count.denominator
    rest = count - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    return (whole * step) * (1 if value > 0 else -1)


def product(*axes):
    return np.array(list(itertools.product(*axes)))
