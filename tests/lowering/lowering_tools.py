"""Helpers of the ground floor's tests (a module, so that tests/gpu can use them too)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from terrazzo.lowering import KernelRequest
from terrazzo.lowering.toolchain import toolchain

HERE = Path(__file__).parent

needs_compiler = pytest.mark.skipif(
    bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"
)


def request_for(program: str, target: str = "sm_80", flags=(), **params) -> KernelRequest:
    return KernelRequest(f"test.{program}", f"programs:{program}", params, target, flags=flags)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python text in a process of its own that finds `programs`."""
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
