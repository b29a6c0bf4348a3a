"""What all tests share."""

from __future__ import annotations

import os

import pytest

# Importing tilelang puts its own TVM on PYTHONPATH; processes that later tests start must not inherit that.
_BEFORE = {name: os.environ.get(name) for name in ("PYTHONPATH", "TVM_LIBRARY_PATH")}


@pytest.fixture(autouse=True)
def environment_of_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _BEFORE.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
