"""Nothing that lies in the working directory is imported or run by a tuning job; nothing of a killed one stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def command(*arguments: str) -> list[str]:
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


def test_the_module_that_is_run_imports_nothing_from_there(planted):
    """`python -m terrazzo`: all but what Python itself has imported until then."""
    (planted / "functools.py").unlink()
    line = [sys.executable, "-m", "terrazzo", "tune", "--shape", "512x1024", "--m", "8", "--dry-run"]
    done = subprocess.run(line, cwd=planted, env=environment(planted), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not used(planted), (used(planted), done.stderr)


def test_a_path_through_the_working_directory_finds_no_program_there(planted):
    env = environment(planted, PATH=f":.:{os.environ['PATH']}:")
    line = ["tune", "--shape", "512x1024", "--m", "8", "--strategy", "top-k", "--gpus", "all"]
    done = subprocess.run(command(*line), cwd=planted, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not used(planted), (used(planted), done.stderr)


KILLED = """
import sys, threading
from terrazzo.lowering import parallel
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
pool = parallel.CompilePool(print, 2)
for at in range(2):
    pool.submit(KernelRequest("x", "sleeper:build", (("at", at),), Target.parse("sm_80")))
threading.Event().wait()
"""
SLEEPER = """
import os, subprocess
def build(**_):
    child = subprocess.Popen(["sleep", "600"])
    open(f"{os.environ['PIDS']}/{os.getpid()}.{child.pid}", "x").close()
    child.wait()
"""


def test_a_killed_job_leaves_no_compiling_process(tmp_path):
    """kill -9 while kernels are compiled: the workers end, and the compilers that they had started."""
    (tmp_path / "pids").mkdir()
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    env = {**os.environ, "TERRAZZO_CACHE_DIR": str(tmp_path / "cache"), "PIDS": str(tmp_path / "pids")}
    job = subprocess.Popen([sys.executable, "-c", KILLED], env={**env, "PYTHONPATH": str(tmp_path)})
    try:
        found = until(lambda: [*(tmp_path / "pids").iterdir()] if len([*(tmp_path / "pids").iterdir()]) == 2 else [])
    finally:
        job.kill()
        job.wait()
    pids = [int(pid) for path in found for pid in path.name.split(".")]
    assert len(pids) == 4 and until(lambda: not any(map(running, pids)))


def until(call, seconds: float = 120.0):
    """What a call returns once that is something."""
    end = time.monotonic() + seconds
    while not (found := call()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
