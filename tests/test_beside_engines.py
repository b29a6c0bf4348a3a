"""Beside an engine: what pip would install together, how much the base install brings, and how fast it starts."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINES = ("vllm==0.26.0", "vllm==0.33.0")
BASE = ("torch", "numpy")  # what a process that serves a model has anyway


def uv(*arguments: str, given: str = "") -> str:
    """What uv says; a skip where there is none, or no package index."""
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("uv is not installed: pip install 'terrazzo[test]'")
    done = subprocess.run([found, *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode and re.search(r"error sending request|Connect|Could not resolve|dns error", done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def resolve(*requirements: str) -> dict[str, str]:
    """name -> version of all that the requirements bring, on Linux with Python 3.11."""
    platform = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
    said = uv("pip", "compile", "--quiet", "--no-annotate", *platform, "-", given="\n".join(requirements))
    return dict(re.findall(r"^([\w.-]+)(?:==| @ )(\S+)", said, re.MULTILINE))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info", "tests", "benchmarks", "docs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("terrazzo-*.whl")
    return built


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_and_terrazzo_install_together(wheel, engine):
    alone, both = resolve(engine), resolve(engine, f"terrazzo @ file://{wheel}")
    changed = {name: (version, both.get(name)) for name, version in alone.items() if both.get(name) != version}
    assert not changed, "terrazzo changes what the engine has"
    assert {"tilelang", "apache-tvm-ffi"} <= set(both)  # the engine's own


@pytest.mark.slow
def test_the_base_install_is_small(wheel, tmp_path):
    """Beside torch and numpy: 10 MB to download, 40 MB on the disk."""
    there = resolve(*BASE)
    brought = {name: version for name, version in resolve(f"terrazzo @ file://{wheel}").items() if name not in there}
    packages = [str(wheel), *(f"{name}=={version}" for name, version in brought.items() if name != "terrazzo")]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d"]
    subprocess.run([*download, str(tmp_path / "wheels"), *packages], check=True, capture_output=True)
    wheels = list((tmp_path / "wheels").iterdir())
    assert sum(file.stat().st_size for file in wheels) < 10e6, sorted(file.name for file in wheels)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*install, str(tmp_path / "site"), *map(str, wheels)], check=True, capture_output=True)
    assert sum(file.stat().st_size for file in (tmp_path / "site").rglob("*") if file.is_file()) < 40e6


def cpu_seconds(*command: str) -> float:
    """CPU time of a process, the least of three: the clock's time says how busy the machine is."""
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(used)


def test_an_import_costs_nearly_nothing():
    """0.05 s are promised on an idle core; here neighbours may take as much again, and once more."""
    nothing = cpu_seconds(sys.executable, "-c", "pass")
    assert cpu_seconds(sys.executable, "-c", "import terrazzo") - nothing < 0.15


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_information_comes_at_once(tmp_path, monkeypatch):
    """2 s are promised on an idle core, with a full cache or an empty one."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    assert cpu_seconds(sys.executable, "-m", "terrazzo", "info") < 4


VLLM_CPU = "TERRAZZO_TEST_VLLM_CPU"
BOTH = """
import sys
def engine():
    import xgrammar
    from vllm import LLM
def ours():
    from terrazzo.lowering import get_kernel, load_bundle
    return get_kernel(load_bundle(sys.argv[2], target="sm_90a").requests[0])
if sys.argv[1] == "engine":
    engine()
    kernel = ours()
else:
    kernel = ours()
    engine()
import torch
try:
    kernel(torch.zeros(1, 4096, dtype=torch.float16), 1)
except ValueError as error:
    assert "takes" in str(error), error
assert "tilelang" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.skipif(VLLM_CPU not in os.environ, reason=f"{VLLM_CPU} names no interpreter (see CONTRIBUTING.md)")
@pytest.mark.parametrize("first", ["engine", "ours"])
def test_an_engine_and_terrazzo_run_in_one_process(wheel, tmp_path, first):
    from terrazzo.lowering import write_bundle
    from terrazzo.ops import w4a16

    python = os.environ[VLLM_CPU]
    uv("pip", "install", "--quiet", "--no-deps", "--reinstall", "--python", python, str(wheel))
    facts = {"group_size": 128, "symmetric": False, "scale_dtype": "float16", "m": [1], "target": "sm_90a"}
    bundle = write_bundle(tmp_path / "bundle", w4a16.kernel_requests(4096, 4096, **facts))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, "-c", BOTH, first, str(bundle)]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
