"""The damage that readers are held to is seeded, and leaves what it is made from alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import mutation
import pytest
from terrazzo.lowering.errors import ArgumentError

GOOD = {"schema": 1, "rows": [{"n": 5, "us": 1.5, "name": "a", "on": True}], "none": None}


def test_damage_is_seeded_and_leaves_what_it_is_made_from():
    before, damaged = json.dumps(GOOD), set()
    for seed in range(300):
        first, again = (mutation.value(GOOD, Random(seed)) for _ in range(2))
        assert repr(first) == repr(again)
        damaged.add(repr(first))
        assert mutation.text(first, Random(seed)) == mutation.text(first, Random(seed))
    assert json.dumps(GOOD) == before and len(damaged) > 150


def test_bytes_are_cut_changed_and_prolonged():
    kinds = Counter()
    for seed in range(300):
        made = mutation.data(b"0123456789" * 50, Random(seed))
        kinds[(len(made) > 500) - (len(made) < 500)] += 1
    assert len(kinds) == 3
    assert mutation.data(b"", Random(0)) is not None


def test_a_reader_survives_with_errors_of_its_own_only():
    def refuse():
        raise ArgumentError("x", 1, "is wrong", "pass another")

    assert mutation.survives(lambda: None) and not mutation.survives(refuse)
    assert not mutation.survives(lambda: {}["x"], KeyError)
    with pytest.raises(KeyError):
        mutation.survives(lambda: {}["x"])


def test_an_answer_that_takes_long_is_none():
    with pytest.raises(AssertionError, match="took"):
        mutation.survives(lambda: time.sleep(0.02), seconds=0.01)


INSIDE = """
def test_third(tries):
    for number, random in enumerate(tries(5)):
        print("drawn", random.random())
        assert number < 2

def test_counted(tries):
    print("counted", sum(1 for _ in tries(3)))
"""


def run_inside(folder, **variables: str) -> str:
    """What pytest prints of tests with `tries` in a run of its own, with the fixtures of this one."""
    (folder / "conftest.py").write_bytes((Path(__file__).parent / "conftest.py").read_bytes())
    (folder / "test_inside.py").write_text(INSIDE, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  random\n  attack\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-m", "attack", "--hypothesis-seed=5"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TERRAZZO_", "PYTEST_"))}
    done = subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, check=False)
    return done.stdout.decode()


def test_tries_are_multiplied_and_one_that_fails_can_be_run_alone(tmp_path):
    many = run_inside(tmp_path, TERRAZZO_ATTACK="4")
    draws = re.findall(r"drawn (\S+)", many)
    assert "counted 12" in many and "1 failed, 1 passed" in many and len(set(draws)) == 3
    assert "TERRAZZO_TRY=2 pytest --hypothesis-seed=5 'test_inside.py::test_third'" in many
    assert re.findall(r"drawn (\S+)", run_inside(tmp_path, TERRAZZO_TRY="2")) == draws[2:]
