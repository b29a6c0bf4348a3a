"""Bytecode of a package where Python finds none: made once, read from the cache, never written beside the modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from terrazzo.lowering import cache
from terrazzo.lowering.bytecode import bytecode_of


@pytest.fixture
def package(cache_dir, tmp_path, monkeypatch) -> Path:
    """A package of a name of its own, with a module and a file that is none, which this process may import."""
    folder = tmp_path / "site" / f"wordy_{tmp_path.name}"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from . import part\n")
    (folder / "part.py").write_text("VALUE = 1\n")
    (folder / "broken.py").write_text("no python (\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def imported(package: Path):
    """The package's module, newly imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]
    importlib.invalidate_caches()
    with bytecode_of(package):
        importlib.import_module(package.name)
    return sys.modules[f"{package.name}.part"]


def made() -> list[Path]:
    return list(cache.room(cache.VERSION, "bytecode").iterdir())


def test_modules_are_read_from_the_cache(package):
    part = imported(package)
    (folder,) = made()
    assert Path(part.__cached__).is_relative_to(folder) and Path(part.__cached__).is_file()
    assert sys.pycache_prefix is None and not list(package.rglob("__pycache__"))
    Path(part.__cached__).touch()
    written = Path(part.__cached__).stat().st_mtime_ns
    again = imported(package)
    assert made() == [folder] and Path(again.__cached__).stat().st_mtime_ns == written


def test_a_module_that_changed_is_compiled_from_its_text(package):
    imported(package)
    (package / "part.py").write_text("VALUE = 23\n")
    assert imported(package).VALUE == 23


def test_bytecode_beside_the_modules_is_what_python_takes(package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    importlib.import_module(package.name)
    assert Path(imported(package).__cached__).parent == package / "__pycache__" and not made()


def test_a_prefix_of_the_user_stays(package, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "own"))
    assert Path(imported(package).__cached__).is_relative_to(tmp_path / "own")
    assert sys.pycache_prefix == str(tmp_path / "own") and not made()


def test_without_a_cache_python_compiles_as_ever(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert imported(package).VALUE == 1 and sys.pycache_prefix is None


@pytest.mark.parametrize("python", ["", "/bin/true"])
def test_a_python_that_makes_nothing_leaves_nothing(package, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    assert imported(package).VALUE == 1 and sys.pycache_prefix is None and not made()


def test_clearing_the_cache_removes_it(package):
    imported(package)
    assert made()
    cache.clear()
    assert not made()
