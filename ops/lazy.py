"""Names of an operator's package, resolved on first use: importing the package imports neither torch nor tilelang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def names(package: str, homes: Mapping[str, str]) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__all__`, `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`. homes: public name -> submodule that defines it, or that it is.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        value = module if homes[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted(set(vars(sys.modules[package])) | set(homes))

    return list(homes), find, listed
