"""compute-sanitizer finds no bad access and no race in a small case of every program, and does find a planted one; in
refilled ring stages nothing but what sanitizer_report.py explains.

Kernels are compiled beforehand. One process for each family and tool runs all cases of the family; they run side by
side, because most of their time goes into starting Python under the tool.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from sanitized import FAMILIES, PLANTED
from sanitizer_report import unknown_findings

SCRIPT, RING = (Path(__file__).with_name(name) for name in ("sanitized.py", "refilled_ring.cu"))
FOUND, LIMIT_S = 9, 300
RUNS = [*((family, tool) for family in FAMILIES for tool in ("memcheck", "racecheck")), (PLANTED.name, "memcheck")]


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, compiled) -> Iterator[dict[tuple[str, str], subprocess.Popen]]:
    """The watched processes of the selected tests, started together."""
    sanitizer = shutil.which("compute-sanitizer")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer on the PATH")
    ours = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["run"] for item in ours if "run" in item.callspec.params}
    started = {}
    for name, tool in (run for run in RUNS if run in wanted):
        # without PyTorch's pool every tensor is an allocation of its own, whose end memcheck knows
        env = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
        # with padding, what is read behind a tensor is not the next tensor
        padding = ["--padding", "512"] if tool == "memcheck" else []
        command = [sanitizer, "--tool", tool, *padding, "--error-exitcode", str(FOUND), sys.executable, str(SCRIPT)]
        command.append(name)
        started[name, tool] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
    yield started
    for process in started.values():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the watched process too, which holds the pipe
        process.communicate()


@pytest.mark.parametrize(
    ("run", "cases"),
    [pytest.param(run, FAMILIES.get(run[0], (PLANTED,)), id="-".join(run)) for run in RUNS],
)
def test_findings(run, cases, processes):
    process = processes[run]
    said = process.communicate(timeout=LIMIT_S)[0]
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device's runtime")
    if run[0] == PLANTED.name:
        assert process.returncode == FOUND and "Invalid __global__ read" in said, said[-3000:]
        return
    report = "\n".join(line for line in said.splitlines() if not line.startswith("=========     Host Frame"))
    if run == ("refills", "racecheck"):
        assert process.returncode in (0, FOUND) and said.splitlines().count("ok") == 1, report[-6000:]
        assert not unknown_findings(report), report[-6000:]
        return
    assert process.returncode == 0 and said.count(run[0]) >= len(cases), report[-6000:]


@pytest.mark.parametrize(("every", "found"), [(1, 0), (0, FOUND)])
def test_racecheck_follows_only_threads_that_arrive(every, found, tmp_path):
    """Why `unknown_findings` lets some pass. Once racecheck knows better, they are no longer to be let pass."""
    sanitizer, nvcc = shutil.which("compute-sanitizer"), shutil.which("nvcc")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of sm_90")
    if sanitizer is None or nvcc is None:
        pytest.skip("needs compute-sanitizer and nvcc on the PATH")
    program = tmp_path / "ring"
    subprocess.run(
        [nvcc, "-arch=sm_90a", f"-DEVERY={every}", "-o", str(program), str(RING)], check=True, timeout=LIMIT_S
    )
    assert subprocess.run([str(program)], timeout=LIMIT_S).returncode == 0
    command = [sanitizer, "--tool", "racecheck", "--error-exitcode", str(FOUND), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device's runtime")
    assert done.returncode == found, done.stdout[-3000:]
