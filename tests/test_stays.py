"""x's way through a warm call stays short: tests/tools/stays.py counts it."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "tools" / "stays.py"
MOST_STAYS, MOST_FILES = 15, 6


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (line.replace(":", "").split() for line in done.stdout.splitlines())
    return {name: (int(stays), int(files)) for name, stays, _, _, files, _ in lines}


def test_four_calls_are_counted(counted):
    assert set(counted) == {"w4a16.gemm", "w4a8.gemm", "w4ax.gemm", "attention.decode"}


@pytest.mark.parametrize("name", ["w4a16.gemm", "w4a8.gemm", "w4ax.gemm", "attention.decode"])
def test_a_warm_call_enters_few_functions_in_few_files(counted, name):
    stays, files = counted[name]
    assert 3 <= stays <= MOST_STAYS and files <= MOST_FILES, f"see `python {TOOL} {name}`"
