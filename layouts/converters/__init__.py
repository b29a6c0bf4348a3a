"""Converters: storage words to operand registers, with exact emulation and device source."""

from terrazzo.layouts.converters import (  # noqa: F401  (importing registers)
    codebook,
    e4m3,
    float_words,
    floats,
    integer,
    u2,
    u4,
    u8,
)
from terrazzo.layouts.converters.base import CONVERTERS, Converter, get_converter, interleave, register

__all__ = ["CONVERTERS", "Converter", "get_converter", "interleave", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)
