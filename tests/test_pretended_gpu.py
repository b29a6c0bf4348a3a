"""Compiling for a GPU that another machine has; each run is a process of its own, which keeps pretending to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONLY_NAMES = """
import terrazzo.lowering
from terrazzo.lowering import parallel

def names(requests, *_, **options):
    print(*sorted({f"asked for {it.name} {it.target.arch}" for it in requests}), sep="\\n")
    return []

terrazzo.lowering.compile_many = parallel.compile_many = names
"""


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess:
    """A Python command that names its kernels instead of compiling them, in the repository's root."""
    (tmp_path / "only_names.py").write_text(ONLY_NAMES)
    start = f"import sys, runpy; sys.path[:0] = ['.', {str(tmp_path)!r}]; import only_names; "
    start += "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    text = [sys.executable, "-c", start, *command]
    env = os.environ | {"TERRAZZO_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.run(text, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_a_benchmark(tmp_path):
    job = ("--compile-only", "--formats", "w4a16", "--shapes", "tuned", "--m", "1,64")
    options = ("--gpu", "nvidia/nvidia-h200", "linear", *job)
    done = run(tmp_path, "benchmarks.compile_ahead", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("w4a16.small_batch", "w4a16.stream_k"):
        assert f"asked for {name} sm_90a" in done.stdout
    done = run(tmp_path, "benchmarks.compile_ahead", "--gpu", "nvidia/none", "linear")
    assert done.returncode == 2 and "nvidia/none" in done.stderr


CASES = [
    pytest.param("calls", "w4a8.small_batch", marks=pytest.mark.slow),
    ("attention_cache", "attention.write"),
]


@pytest.mark.parametrize(("tests", "name"), CASES)
def test_gpu_tests(tmp_path, tests, name):
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--compile-only", "--gpu", "nvidia/nvidia-h200")
    cold = ("-p", "only_names", f"tests/gpu/test_{tests}_gpu.py")
    done = run(tmp_path, "pytest", *options, *cold)
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"asked for {name} sm_90a" in done.stdout
    without = run(tmp_path, "pytest", *(it for it in options if it != "--compile-only"), *cold)
    assert without.returncode == 4 and "add --compile-only" in without.stderr
