"""Names that no file system takes: an error that names the place, from every call and verb that is given one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_kernels import SCALE, fake_entry
from terrazzo.autotune import jobs
from terrazzo.autotune.database import Database
from terrazzo.cli import main
from terrazzo.lowering import cache, compilers, load_bundle, write_bundle
from terrazzo.lowering.bundle import read_bundle
from terrazzo.lowering.errors import TerrazzoError
from terrazzo.lowering.settings import COMPILER
from terrazzo.lowering.wheel_file import write_wheel
from terrazzo.schedules import records

LONG = {"name": "x" * 300, "path": "/".join(["y" * 200] * 30)}


@pytest.fixture(params=LONG)
def place(request, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    return str(tmp_path / LONG[request.param])


def merged(place: str, folder: Path) -> None:
    with Database(folder / "t.db") as trials:
        trials.merge(place)


CALLS = {
    "load_bundle": lambda place, _: load_bundle(place, "sm_80"),
    "read_bundle": lambda place, _: read_bundle(place),
    "write_bundle": lambda place, _: write_bundle(place, [SCALE]),
    "replace a bundle": lambda place, _: write_bundle(place, [SCALE], replace=True),
    "write_wheel": lambda place, _: write_wheel(place, [SCALE]),
    "a database": lambda place, _: Database(place),
    "a database to read": lambda place, _: Database(place, create=False),
    "merge": merged,
    "a job": lambda place, _: jobs.read_job(Path(place)),
    "shapes": lambda place, _: jobs.read_shapes(Path(place)),
    "a table": lambda place, _: records.Table.read(Path(place)),
    "set_compiler": lambda place, _: compilers.set_compiler(place),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_refuse_it_by_name(place, call, tmp_path):
    fake_entry(SCALE)
    with pytest.raises(TerrazzoError, match="xxx|yyy"):
        CALLS[call](place, tmp_path)


@pytest.mark.parametrize("call", [cache.list_entries, cache.verify, cache.clear, cache.tilelang_folder])
def test_a_cache_of_such_a_name_is_refused(place, call, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", place)
    with pytest.raises(TerrazzoError, match="TERRAZZO_CACHE_DIR"):
        call()


def test_a_configuration_of_such_a_name_is_none(place, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", place)
    monkeypatch.delenv(compilers.VARIABLE, raising=False)
    assert COMPILER.find() is None
    with pytest.raises(TerrazzoError, match=compilers.VARIABLE):
        compilers.set_compiler(None)


SHAPE = ("--shape", "512x1024", "--target", "sm_80")
VERBS = [
    ("info",), ("compile",), ("serve-check",), ("tune", "list", "--database"), ("tune", "import"), ("tune", "merge"),
    ("compile", "--op", "w4a16", *SHAPE, "-o"), ("compile", "--op", "w4a16", *SHAPE, "--wheel"),
    ("tune", "run", "--job"), ("tune", "run", "--shapes"), ("tune", "run", "--dry-run", "--m", "8", *SHAPE, "--export"),
]  # fmt: skip


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_verbs_refuse_it_in_one_line(place, words, capsys, monkeypatch):
    """Before they begin: here, whatever they would compile fails a test."""
    monkeypatch.setattr("terrazzo.building.Build.run", lambda self: pytest.fail("it was begun"))
    code, said = main([*words, place]), capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and ("xxx" in said or "yyy" in said)
