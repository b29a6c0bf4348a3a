"""compute-sanitizer finds no bad access and no race in a small case of every program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ORACLES = {name: Path(__file__).with_name(name) for name in ("oracles.py", "w4a8_oracles.py")}
# One case for each program and each of its forms: X alone or shared by a cluster, split along k, shared tiles.
CASES = {
    "small_batch": ("Case(Spec(256, 512), 4, kind='integer')", None),
    "small_batch cluster": ("Case(Spec(257, 512, 64), 16, kind='integer')", None),
    "small_batch split": ("Case(Spec(128, 10944), 8, kind='integer')", None),
    "stream_k": ("Case(Spec(257, 640, bias=True), 64, kind='integer')", None),
    "stream_k post": ("Case(Spec(256, 512, 32, scale='float32'), 33, kind='integer')", None),
    "multistage": ("Case(Spec(256, 512), 64, kind='integer')", "sm_80"),
    "w4a8 small_batch": ("Case(Spec(257, 512, 64), 7, 'int32')", None),
    "w4a8 small_batch split": ("Case(Spec(128, 10944, 32), 16, dequantization='unsigned')", None),
    "w4a8 stream_k": ("Case(Spec(257, 640, bias=True, smooth=True), 64)", None),
    "w4a8 stream_k shared": ("Case(Spec(256, 4096, 128), 100, 'bfloat16', 'unsigned')", None),
    "w4a8 sm_80": ("Case(Spec(257, 512, 64), 40, 'int32')", "sm_80"),
}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", CASES)
def test_no_finding(name, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer on the PATH")
    case, target = CASES[name]
    script = str(ORACLES["w4a8_oracles.py" if name.startswith("w4a8") else "oracles.py"])
    env = os.environ | ({"TERRAZZO_TEST_TARGET": target} if target else {})
    # compiled first: the sanitizer need not watch the compiler
    plain = subprocess.run([sys.executable, script, case], capture_output=True, text=True, env=env)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, script, case]
    watched = subprocess.run(command, capture_output=True, text=True, env=env)
    if "Device not supported" in watched.stdout + watched.stderr:
        pytest.skip("compute-sanitizer does not support this device's runtime")
    assert watched.returncode == 0, (watched.stdout + watched.stderr)[-3000:]
