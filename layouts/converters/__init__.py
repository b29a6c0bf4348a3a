"""Converters: storage words to operand registers, with exact emulation and device source."""

from terrazzo.layouts.converters import u4  # noqa: F401  (importing a family registers it)
from terrazzo.layouts.converters.base import CONVERTERS, Converter, get_converter, interleave, register

__all__ = ["CONVERTERS", "Converter", "get_converter", "interleave", "register"]
