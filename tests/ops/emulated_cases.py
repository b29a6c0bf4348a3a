"""Cases of the tests that compile kernels: which of them `make test` runs, and their kernels, each compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.parallel import compile_many
from terrazzo.lowering.request import KernelRequest


def cases(every: Iterable, quick: Iterable) -> list:
    """Parameters of a test; those that are not quick run in `make test-slow`."""
    kept = list(quick)
    values = [it if isinstance(it, tuple) else (it,) for it in every]
    slow = lambda value: (value if len(value) > 1 else value[0]) not in kept
    return [pytest.param(*value, marks=[pytest.mark.slow] * slow(value)) for value in values]


class Compiled(dict):
    """Folders of kernels by name: the quick ones are compiled at once, others when they are asked for."""

    def __init__(self, request: Callable[[str], KernelRequest], quick: Iterable[str]) -> None:
        names = list(quick)
        super().__init__(zip(names, compile_many([request(name) for name in names])))
        self.request = request

    def __missing__(self, name: str) -> Path:
        self[name] = compile_request(self.request(name))
        return self[name]
