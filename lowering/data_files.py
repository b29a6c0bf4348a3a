"""Files of data that others wrote, JSON and TOML: bounded, and one kind of error for whatever is wrong with them."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.lowering.errors import ArgumentError

MOST_BYTES = 64 << 20
MOST = 2**31 - 1
"""The largest size, count or schedule parameter that is taken from a file: kernels compute with 32 bits."""


Given, Found = TypeVar("Given"), TypeVar("Found")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, not UTF-8, nested too deeply, with an integer of thousands of digits, a name of two values.
    """
    return _parse(partial(json.loads, object_pairs_hook=_object), text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names have one value each: readers differ in which of two counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        for name, value in pairs:
            if made[name] != value:
                raise ValueError(f"{name[:80]!r} has two values")
    return made


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: as `parse_json`.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return _parse(tomllib.loads, text)


def _parse(loads: Callable[[Given], Found], text: Given) -> Found:
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("lists or tables are nested too deeply") from None


def read_json(path: Path | str, argument: str, remedy: str, most: int = MOST_BYTES) -> Any:
    """The value of a JSON file.

    Args:
        argument, remedy: of the error, what the caller named the file by and what is to be done instead.
        most: bytes that the file may have.

    Raises:
        ArgumentError: it cannot be read, or is no JSON.
    """
    return _read(path, argument, remedy, most, parse_json)


def read_toml(path: Path | str, argument: str, remedy: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """The tables of a TOML file; arguments and errors as `read_json`."""
    return _read(path, argument, remedy, most, parse_toml)


def _read(path: Path | str, argument: str, remedy: str, most: int, parse: Callable[[str], Found]) -> Found:
    return _explained(path, argument, remedy, lambda: parse(_text(Path(path), most)))


def read_text(path: Path | str, argument: str, remedy: str, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8; arguments and errors as `read_json`."""
    return _explained(path, argument, remedy, lambda: _text(Path(path), most))


def read_start(path: Path | str, argument: str, remedy: str, most: int) -> str:
    """The first `most` bytes of a file's text in UTF-8, what is none replaced; arguments and errors as `read_json`."""
    return _explained(path, argument, remedy, lambda: _bytes(Path(path), most).decode(errors="replace"))


def _explained(path: Path | str, argument: str, remedy: str, read: Callable[[], Found]) -> Found:
    try:
        return read()
    except (OSError, ValueError) as error:  # ValueError: of the parsers, of UTF-8, of a path with a null byte
        raise ArgumentError(argument, os.fspath(path), f"cannot be read: {error}", remedy) from error


def _text(path: Path, most: int) -> str:
    found = _bytes(path, most + 1)
    if len(found) > most:
        raise ValueError(f"it has more than {most} bytes")
    return found.decode()


def _bytes(path: Path, most: int) -> bytes:
    """The first bytes of a file. OSError for what is none: a pipe would be waited for, a device has no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is no file (a folder, pipe or device)")
        with open(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)


def is_count(value: object, least: int = 0, most: int = MOST) -> bool:
    """Whether a value from a file is an integer (a bool is none) in a range."""
    return type(value) is int and least <= value <= most


def is_number(value: object, least: float, most: float) -> bool:
    """Whether a value from a file is a finite number (a bool is none) in a range."""
    return type(value) in (int, float) and least <= value <= most and math.isfinite(value)


def is_text(value: object, most: int = 1000) -> bool:
    """Whether a value from a file is text that may be printed: not too long, without control characters."""
    return isinstance(value, str) and len(value) <= most and value.isprintable()
