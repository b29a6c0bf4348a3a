"""Emulated kernels under ThreadSanitizer and AddressSanitizer: what compute-sanitizer looks for, without a GPU.

A process that starts with a sanitizer's runtime runs tests of the emulated kernels, whose C++ is compiled for it. Every
CUDA thread is a thread of the sanitizer's; only what CUDA says orders memory (barriers, syncwarp, acquire and release,
the end of a copy or of a wgmma) orders their accesses, so that a race is found in whatever order the fibers run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cuda_on_cpu
import pytest
import test_w4a8_fp8_emulated
from cuda_on_cpu import CpuKernel
from terrazzo.lowering.toolchain import toolchain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
HERE = Path(__file__).parent
ALL = "TERRAZZO_EMULATE_ALL"
"""Environment variable: watch every emulated case, which takes hours."""
OPTIONS = {
    "thread": "ignore_noninstrumented_modules=1 report_signal_unsafe=0 history_size=1",
    "address": "detect_leaks=0 detect_stack_use_after_return=0 use_sigaltstack=0 detect_odr_violation=0",
}
START = "import os, sys; del os.environ['LD_PRELOAD']; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
USUAL = (
    "attention/test_attention_emulated.py::test_decode[two clusters]",
    "attention/test_attention_codes_emulated.py::test_codes_are_those_of_a_quantizer_behind_the_kernel"
    "[int8, splits and clusters]",
    "w4a16/test_w4a16_emulated.py::test_small_batch[one row of x]",
    "w4a16/test_w4a16_emulated.py::test_stream_k[clusters]",
    "w4a8/test_w4a8_fp8_emulated.py::test_kernel[stream_k]",
    "w4a8/test_w4a8_grouped_emulated.py::test_grouped[mma, split k]",
    "w4a8/test_w4a8_small_batch_emulated.py::test_small_batch[four tiles, split k]",
    "w4ax/test_w4ax_emulated.py::test_stream_k[narrow]",
    "tiles/test_examples_emulated.py::test_the_product_is_right[sm_90a]",
)


def watched(kind: str, tests: tuple[str, ...], folder: Path, **changes: str) -> subprocess.CompletedProcess:
    """The tests in a process of their own under a sanitizer; skips where there is none."""
    runtime = subprocess.run(
        ["g++", f"-print-file-name=lib{kind[0]}san.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    log = folder / "reports"
    env = os.environ | changes | {
        "LD_PRELOAD": runtime, cuda_on_cpu.SANITIZER: f"{kind}:{log}",
        f"{kind[0].upper()}SAN_OPTIONS": f"{OPTIONS[kind]} log_path={log}",
    }  # fmt: skip
    starts = [sys.executable, "-c", "print('starts')"]
    tried = subprocess.run(starts, env=env, capture_output=True, text=True)
    if "starts" not in tried.stdout:
        pytest.skip(f"Python does not start with {runtime}: {tried.stderr[-200:]}")
    command = [sys.executable, "-c", START, "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-x", *tests]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE)


@pytest.mark.parametrize("kind", OPTIONS)
def test_nothing_is_found(kind, tmp_path):
    every = tuple(sorted(str(path.relative_to(HERE)) for path in HERE.glob("*/test_*_emulated.py")))
    tests = every if os.environ.get(ALL) else USUAL
    done = watched(kind, tests, tmp_path)
    reports = "".join(path.read_text()[:6000] for path in tmp_path.glob("reports*"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:] + reports
    assert " passed" in done.stdout


@pytest.mark.skipif(cuda_on_cpu.SANITIZER not in os.environ, reason="run by test_a_planted_fault_is_found")
@pytest.mark.parametrize("fault", ["fence", "size"])
def test_planted(fault, monkeypatch, tmp_path):
    """A kernel that gives a stage back before the warp has read it; one whose weight ends too early."""
    made, called = CpuKernel.__init__, CpuKernel.__call__

    def without_fence(self, source, *others):
        fence = r"tz_syncwarp\(\);(\s*if \([^{]*\{\s*tz_arrive\([^;]*;)"
        changed, count = re.subn(fence, r"\1", source)
        assert count
        made(self, changed, *others)

    def shorter(self, grid, /, **values):
        called(self, grid, **values | {"W": values["W"].flatten()[:-1].clone()})

    if fault == "fence":
        monkeypatch.setattr(CpuKernel, "__init__", without_fence)
    else:
        monkeypatch.setattr(CpuKernel, "__call__", shorter)
    test_w4a8_fp8_emulated.test_kernel("stream_k", tmp_path)


@pytest.mark.parametrize(("kind", "fault", "said"), [("thread", "fence", "data race"), ("address", "size", "overflow")])
def test_a_planted_fault_is_found(kind, fault, said, tmp_path):
    done = watched(kind, (f"{Path(__file__).name}::test_planted[{fault}]",), tmp_path)
    reports = "".join(path.read_text() for path in tmp_path.glob("reports*"))
    assert done.returncode and said in reports, done.stdout[-3000:] + done.stderr[-3000:]
