"""Every example runs, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    expected = {
        "quantized_linear.py", "derive_a_layout.py", "ahead_of_time.py", "attention_block.py", "sm_scheduling.py",
    }  # fmt: skip
    assert {path.name for path in EXAMPLES} == expected


SLOW = ("ahead_of_time",)  # compiles a bundle for two targets


@pytest.mark.parametrize(
    "example", [pytest.param(it, id=it.stem, marks=[pytest.mark.slow] * (it.stem in SLOW)) for it in EXAMPLES]
)
def test_example(example, tmp_path):
    env = {**os.environ, "TERRAZZO_CACHE_DIR": os.environ.get("TERRAZZO_CACHE_DIR") or str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and not list(tmp_path.glob("*.py"))
