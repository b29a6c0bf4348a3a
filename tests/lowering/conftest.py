"""Fixtures of the ground floor: private caches, kernels compiled once, a CUDA driver that only takes notes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from lowering_tools import DRIVE, run_python
from terrazzo.lowering.toolchain import find_host_compiler, find_nvcc

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def forget():
    """No test sees kernels or bundles that another one loaded."""
    from terrazzo.lowering import kernels

    yield
    kernels.forget_kernels()


@pytest.fixture(autouse=True)
def usual_umask():
    """What tests write by hand is not written by others, whatever the umask that they are started with."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch) -> Path:
    """An empty kernel cache of this test's own."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory) -> Path:
    """A kernel cache for the whole test session, all workers of it; tests that damage entries use `cache_dir`."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def compiled(shared_cache, monkeypatch):
    """Function that compiles a request once for all tests and returns its folder."""
    from terrazzo.lowering import compile_request

    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(shared_cache))
    return compile_request


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory) -> Path:
    """Folder with a libcuda.so.1 that writes what it is asked to $FAKE_DRIVER_LOG."""
    folder = tmp_path_factory.mktemp("driver")
    command = [
        find_nvcc(),
        "-ccbin",
        find_host_compiler(),
        "-shared",
        "-cudart",
        "none",
        "-Xcompiler",
        "-fPIC",
        "-Xlinker",
    ]
    subprocess.run(
        [*command, "-soname=libcuda.so.1", "-o", folder / "libcuda.so.1", HERE / "fake_driver.cpp"], check=True
    )
    return folder


@pytest.fixture
def drive(fake_driver, tmp_path):
    """Function that runs code with `launch` and `tensor` and returns the driver's notes, or the process if it fails.

    `before` is run before anything is imported, by a process that finds packages of the folder `path` first."""

    def run(folder, params: str, code: str, before: str = "", path: Path | None = None, **environment: str):
        log = tmp_path / "driver.log"
        log.write_text("")
        notes = {"FAKE_DRIVER_LOG": str(log), "FAKE_DRIVER_PARAMS": params, "LD_LIBRARY_PATH": str(fake_driver)}
        done = run_python(f"FOLDER = {str(folder)!r}\n{before}\n{DRIVE}\n{code}", path, **notes, **environment)
        return done if done.returncode else [json.loads(line) for line in log.read_text().splitlines()]

    return run
