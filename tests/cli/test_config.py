"""`terrazzo config compiler`: shown, set, forgotten, and refused where it would not work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from terrazzo.cli import main


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TERRAZZO_COMPILER", raising=False)
    return tmp_path / "terrazzo" / "config.json"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(("config", "compiler", *arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_without_one_this_environment_compiles(capsys):
    code, out, _ = run(capsys)
    assert code in (0, 1) and out.startswith("this environment compiles")
    assert json.loads(run(capsys, "--json")[1])["python"] is None


@pytest.mark.parametrize(
    ("lacks", "problem"), [(["tilelang"], None), (["tilelang", "nvcc"], None), (None, "nvcc cannot be run")]
)
def test_an_environment_that_cannot_compile_is_not_said_to(capsys, monkeypatch, lacks, problem):
    known = {"tilelang": None, "tvm_ffi": "0.1.9", "nvcc": None, "toolkit": None}
    report = {"python": None, "named_by": None, "toolchain": known, "missing": lacks, "problem": problem}
    for module in ("environment", "compilers"):
        monkeypatch.setattr(f"terrazzo.lowering.{module}.compiler_report", lambda: report)
    code, out, _ = run(capsys)
    assert code == 1 and "this environment compiles" not in out and all(name in out for name in lacks or [problem])
    assert main(("info",)) == 0
    (line,) = (it for it in capsys.readouterr().out.splitlines() if it.startswith("compiler"))
    assert "this environment lacks" in line and "compiles" not in line


def test_it_is_set_shown_and_forgotten(capsys, own_settings, monkeypatch):
    code, out, err = run(capsys, sys.executable)
    assert code == 0, err
    assert out.startswith(f"{sys.executable}, named by {own_settings}") and "tilelang" in out
    assert json.loads(own_settings.read_text()) == {"compiler": sys.executable}
    code = main(("info",))
    assert code == 0 and "named by" in capsys.readouterr().out
    monkeypatch.setenv("TERRAZZO_COMPILER", "")
    assert run(capsys)[1].startswith("this environment compiles")
    monkeypatch.delenv("TERRAZZO_COMPILER")
    assert run(capsys, "--unset")[1].startswith("this environment compiles") and not own_settings.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/absent/python",), "/absent/python"),
        (("/bin/true",), "does not answer as terrazzo does"),
        (("/bin/false",), "has no terrazzo that works"),
        ((sys.executable, "--unset"), "give one"),
        ((str(Path(__file__).parent),), "is a directory"),
    ],
)
def test_what_would_not_work_is_refused_and_not_kept(capsys, own_settings, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1 and not own_settings.exists()


def test_one_that_is_broken_is_shown_with_its_problem(capsys, own_settings):
    own_settings.parent.mkdir()
    own_settings.write_text('{"compiler": "/absent/python"}')
    own_settings.chmod(0o600)
    code, out, _ = run(capsys)
    assert code == 1 and out.startswith("/absent/python") and "does not exist" in out
