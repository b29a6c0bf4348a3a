"""Bytecode of a package where Python finds none: made once, read from the cache, never written beside the modules."""

from __future__ import annotations

import importlib
import importlib.util
import marshal
import os
import shutil
import sys
from pathlib import Path

import mutation
import pytest
from fake_kernels import rehash
from terrazzo.lowering import bytecode, cache, folders
from terrazzo.lowering.bytecode import bytecode_of
from terrazzo.lowering.errors import CacheError
from test_mutations import damage_file


def write(part: Path, value: int) -> None:
    """A module of one size and one time, whatever its text."""
    part.write_text(f"VALUE = {value}\n", encoding="utf-8")
    os.utime(part, (10**9, 10**9))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A package of a name of its own, with a module and a file that is none."""
    folder = tmp_path_factory.mktemp("site") / "wordy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import part\n")
    write(folder / "part.py", 1)
    (folder / "broken.py").write_text("no python (\n")
    return folder


@pytest.fixture
def package(site, cache_dir, monkeypatch) -> Path:
    """The package as it was, which this process may import and has no bytecode of."""
    write(site / "part.py", 1)
    shutil.rmtree(site / "__pycache__", ignore_errors=True)
    monkeypatch.syspath_prepend(str(site.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == site.name]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def filled(site, tmp_path_factory) -> Path:
    """A cache with the package's bytecode, made once."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERRAZZO_CACHE_DIR", str(folder))
        with bytecode_of(site):
            importlib.invalidate_caches()
    return folder


@pytest.fixture
def entry(package, filled, cache_dir) -> Path:
    """The entry of the package's bytecode in a copy of that cache."""
    shutil.copytree(filled, cache_dir)
    (found,) = made()
    return found


def imported(package: Path):
    """The package's module, newly imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]
    importlib.invalidate_caches()
    with bytecode_of(package):
        importlib.import_module(package.name)
    return sys.modules[f"{package.name}.part"]


def made() -> list[Path]:
    return list(cache.room(cache.VERSION, cache.BYTECODE).iterdir())


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Modules that this process compiled from their text, in order."""
    texts = []
    original = importlib.machinery.SourceFileLoader.source_to_code

    def noted(self, data, path, *rest, **more):
        texts.append(Path(path).name)
        return original(self, data, path, *rest, **more)

    monkeypatch.setattr(importlib.machinery.SourceFileLoader, "source_to_code", noted)
    return texts


def test_modules_are_read_from_the_cache(package, compiled):
    before = list(sys.meta_path)
    assert imported(package).VALUE == 1 and sys.meta_path == before
    (entry,) = made()
    assert not compiled and not list(package.rglob("__pycache__"))
    (row,) = cache.verify()
    assert row == {"key": entry.name, "kind": "bytecode", "ok": True, "problem": ""}
    written = (entry / cache.MODULES).stat()
    assert imported(package).VALUE == 1 and not compiled and made() == [entry]
    assert (entry / cache.MODULES).stat().st_ctime_ns == written.st_ctime_ns


def test_a_module_that_changed_is_compiled_from_its_text(package, entry, compiled):
    write(package / "part.py", 2)
    assert imported(package).VALUE == 2 and compiled == ["part.py"]


PLANTED = "VALUE = 666\n"


def plant(entry: Path, package: Path) -> None:
    """Bytecode of another text in the place of a module's, which Python takes for the module's own."""
    codes = marshal.loads((entry / cache.MODULES).read_bytes())
    path = importlib.util.cache_from_source(str(package / "part.py"))
    codes[path] = codes[path][:16] + marshal.dumps(compile(PLANTED, "part.py", "exec"))
    (entry / cache.MODULES).write_bytes(marshal.dumps(codes))


def test_what_is_planted_counts_where_it_is_trusted(package, entry):
    """The attack below is one: where nothing is checked, its code runs."""
    plant(entry, package)
    rehash(entry)
    assert imported(package).VALUE == 666


@pytest.mark.parametrize("how", ["digest", "mode", "folder", "room", "link", "room is a link"])
def test_planted_bytecode_does_not_run(package, entry, tmp_path, how):
    plant(entry, package)
    if how != "digest":
        rehash(entry)
    if how == "mode":
        (entry / cache.MODULES).chmod(0o666)
    elif how == "folder":
        entry.chmod(0o777)
    elif how == "room":
        entry.parent.chmod(0o777)
    elif how.endswith("link"):
        moved = entry.parent if how.startswith("room") else entry
        os.rename(moved, tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")
    assert imported(package).VALUE == 1
    if how.startswith("room"):
        with pytest.raises(CacheError):
            cache.verify()
    else:  # where only a digest is wrong, the entry was moved away and made again
        assert [row["ok"] for row in cache.verify()] == [how == "digest"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("level", ["", cache.MODULES])
def test_another_users_bytecode_does_not_run(package, entry, level):
    plant(entry, package)
    rehash(entry)
    os.chown(entry / level, 12345, -1)
    assert imported(package).VALUE == 1
    assert ["belongs to user 12345" in row["problem"] for row in cache.verify()] == [True]


def test_bytecode_of_an_older_cache_is_not_taken(package, entry, compiled):
    """Folders that had Python's own files, and nothing that vouches for them."""
    shutil.rmtree(entry)
    pyc = entry / str(package / "part.cpython.pyc").lstrip("/")
    pyc.parent.mkdir(parents=True)
    pyc.write_bytes(b"")
    assert imported(package).VALUE == 1 and not compiled
    assert [row["ok"] for row in cache.verify()] == [True]
    assert len(list(cache.room(cache.VERSION, "quarantine").iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "zeroed", "gone"])
def test_damaged_bytecode_is_made_again(package, entry, compiled, damage):
    data = (entry / cache.MODULES).read_bytes()
    if damage == "gone":
        (entry / cache.MODULES).unlink()
    else:
        (entry / cache.MODULES).write_bytes(data[:100] if damage == "cut" else bytes(len(data)))
    assert [row["ok"] for row in cache.verify()] == [False]
    assert imported(package).VALUE == 1 and not compiled and (entry / cache.MODULES).read_bytes() == data
    assert [row["ok"] for row in cache.verify()] == [True]


def test_damage_of_any_kind_changes_no_module(package, entry, tmp_path, monkeypatch, tries):
    original = shutil.copytree(entry, tmp_path / "original")
    make = lambda package, private: shutil.copy(original / cache.MODULES, private)  # Python takes a second
    monkeypatch.setattr(bytecode, "_compile", make)
    good = folders.parse_json((entry / folders.MANIFEST).read_bytes())
    for random in tries(80):
        shutil.rmtree(entry, ignore_errors=True)
        shutil.copytree(original, entry)
        if random.random() < 0.3:
            (entry / folders.MANIFEST).write_bytes(mutation.text(mutation.value(good, random), random))
        else:
            damage_file(entry, random)
        if random.random() < 0.3:
            mutation.survives(cache.verify)
        assert imported(package).VALUE == 1


def test_bytecode_beside_the_modules_is_what_python_takes(package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    importlib.import_module(package.name)
    assert Path(imported(package).__cached__).is_file() and not made()


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


def test_clearing_the_cache_removes_it(entry):
    cache.clear()
    assert not made()
