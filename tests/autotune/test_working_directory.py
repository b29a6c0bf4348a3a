"""Nothing that lies in the working directory is imported or run by a tuning job; nothing of a killed one stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from terrazzo.autotune import isolation

PLANTED = (
    "ctypes", "json", "signal", "functools", "multiprocessing", "numpy", "torch", "filelock", "tempfile", "subprocess",
    "select", "xgboost", "matplotlib", "sitecustomize", "usercustomize", "tvm_ffi", "terrazzo_more",
)  # fmt: skip
PROGRAMS = ("nvidia-smi", "git", "nvcc", "g++", "python", "python3", "cuobjdump")


@pytest.fixture
def planted(tmp_path) -> Path:
    """A folder with modules and programs of well-known names, each of which leaves a file when it is used."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / ('imported.' + name))!r}, 'w').close()\n")
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f"#!/bin/sh\n: > '{tmp_path}/run.{name}'\nexit 1\n")
        program.chmod(0o755)
    return folder


def used(planted: Path) -> list[str]:
    return sorted(path.name for pattern in ("imported.*", "run.*") for path in planted.parent.glob(pattern))


def command(*arguments: str, safe: bool = True) -> list[str]:
    """The `terrazzo` command as its script starts it: with the script's folder first on the path, not this one."""
    start = "import sys; sys.path[:] = [it for it in sys.path if it]; from terrazzo.cli import main; sys.exit(main())"
    return [sys.executable, "-c", start, *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    own = {"TERRAZZO_CACHE_DIR": str(folder.parent / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, **more}


def test_the_measuring_process_imports_nothing_from_there(planted):
    """The real one, which says why it cannot measure, or its machine: it has imported all that it needs by then."""
    line = ["tune", "--shape", "512x1024", "--m", "8", "--strategy", "top-k", "--trials", "1", "--workers", "1"]
    env = environment(planted)
    done = subprocess.run(command(*line), cwd=planted, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "nothing can be measured here: " in done.stderr, done.stderr
    assert "GPU" in done.stderr and not used(planted), (used(planted), done.stderr)


def test_a_path_through_the_working_directory_finds_no_program_there(planted):
    env = environment(planted, PATH=f":.:{os.environ['PATH']}:")
    line = ["tune", "--shape", "512x1024", "--m", "8", "--strategy", "top-k", "--gpus", "all"]
    done = subprocess.run(command(*line), cwd=planted, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not used(planted), (used(planted), done.stderr)


def test_the_working_directory_is_left_out_of_what_processes_import_from(tmp_path, monkeypatch):
    home = str(Path(sys.modules["terrazzo"].__file__).resolve().parents[1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), str(tmp_path / "link"), "/usr/lib/python3", home])
    assert isolation.importable() == ["/usr/lib/python3", home]
    monkeypatch.chdir(home)
    assert isolation.importable()[-1] == home
