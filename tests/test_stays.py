"""x's way through a warm call stays short: tests/tools/stays.py counts it."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "tools" / "stays.py"
MOST = {
    "w4a16.gemm": (5, 3), "w4a8.gemm": (12, 5), "w4ax.gemm": (13, 5), "attention.decode": (12, 5),
    "attention.rope_append": (11, 4), "w8a8.gemm": (13, 6), "norm.rms_norm": (6, 5),
    "norm.fused_add_rms_norm": (9, 5), "activation.act_and_mul": (5, 5), "rope.apply_rope": (8, 4),
    "nn.DecoderLayer": (90, 22),
}  # fmt: skip
"""Call -> most stays and files. These only go down."""


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (line.replace(":", "").split() for line in done.stdout.splitlines())
    return {name: (int(stays), int(files)) for name, stays, _, _, files, _ in lines}


def test_every_call_is_counted(counted):
    assert set(counted) == set(MOST)


@pytest.mark.parametrize("name", MOST)
def test_a_warm_call_enters_few_functions_in_few_files(counted, name):
    stays, files = counted[name]
    most = MOST[name]
    assert 3 <= stays <= most[0] and files <= most[1], f"{stays} in {files}: see `python {TOOL} {name}`"
