"""Names of a package, resolved on first use: importing the package imports neither torch nor tilelang.

A package writes its names three times: in `__all__`, as imports under TYPE_CHECKING, which type checkers and editors
read, and in the table that is given to `attach`. tests/test_public_names.py holds the three together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def attach(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__`, and a `__dir__` that lists its `__all__`.

    Args:
        package: its `__name__`. homes: module inside the package, or another one's whole name, -> names
            that it defines, with spaces between; a module that is public itself stands for its own name.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        module = import_module(home if home.startswith("terrazzo.") else f"{package}.{home}")
        value = module if home.rpartition(".")[2] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(sys.modules[package].__all__)
