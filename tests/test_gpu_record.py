"""The record of tests on GPUs: what counts as a run of a file, and what a later run leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_tests
from tests.gpu import record

ROOT = Path(__file__).parents[1]
RUN = """
import sys, pathlib, pytest
from tests.gpu.record import Recorder
path, card, *arguments = sys.argv[1:]
facts = {"commit": "abc", "card": card, "cards": 1, "driver": "1", "torch": "2", "date": "2026-01-02"}
pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[Recorder(pathlib.Path(path), facts)])
"""
A = """
import pytest
@pytest.fixture
def bad(): 1 / 0
@pytest.fixture
def late():
    yield
    1 / 0
def test_1(): ...
def test_2(): pytest.skip('no')
def test_3(bad): ...
def test_4(late): ...
"""
TESTS = {"test_a.py": A, "test_b.py": "def test_1(): ...\ndef test_2(): assert 0\ndef test_3(): ...\n"}


@pytest.fixture
def run(tmp_path):
    """Function that runs tests of a folder with a recorder, and returns the record and what was printed."""
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "out" / "record.json"

    def run(card: str, *arguments: str):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(path), card, f"--rootdir={tmp_path}", *arguments],
            cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        return json.loads(path.read_text())["files"] if path.exists() else {}, done.stdout + done.stderr

    return run


def counts(run):
    return [run[word] for word in record.OUTCOMES]


def test_a_file_counts_once_all_of_its_tests_have_run(run):
    for arguments in (("test_b.py::test_1",), ("-k", "test_1"), ("-x", "test_b.py")):
        found, said = run("H100", *arguments)
        assert not found and "not recorded, as not all of their tests ran: " in said and "test_b.py" in said
    found, _ = run("H100", "-x", "test_b.py::test_1", "test_a.py")
    assert not found  # test_3 of test_a.py fails, and test_4 never ran
    found, said = run("H100")
    assert {name: counts(runs[0]) for name, runs in found.items()} == {"test_a.py": [1, 2, 1], "test_b.py": [2, 1, 0]}
    assert found["test_a.py"][0]["commit"] == "abc" and "2 files of tests recorded" in said


def test_runs_of_other_files_and_of_other_cards_stay(run, tmp_path):
    run("H100", "test_a.py")
    run("H100", "test_b.py")
    (tmp_path / "test_b.py").write_text("def test_1(): ...\n")
    run("A100", "test_b.py")
    found, _ = run("H100", "test_b.py::test_1", "test_a.py")
    assert {name: [run["card"] for run in runs] for name, runs in found.items()} == {
        "test_a.py": ["H100"],
        "test_b.py": ["A100", "H100"],
    }
    assert [counts(run) for run in found["test_b.py"]] == [[1, 0, 0], [2, 1, 0]]
    found, _ = run("H100", "test_b.py")
    assert [counts(run) for run in found["test_b.py"]] == [[1, 0, 0], [1, 0, 0]]


def test_a_commit_with_changes_is_not_that_commit(tmp_path):
    git = lambda *words: subprocess.run(
        ("git", "-c", "user.name=A", "-c", "user.email=a@b", *words), cwd=tmp_path, check=True, capture_output=True
    )
    path, code = tmp_path / "record.json", tmp_path / "code.py"
    assert record.commit_of(tmp_path, path) == ""
    git("init")
    code.write_text("1")
    path.write_text("{}")
    git("add", ".")
    git("commit", "-m", "first")
    commit = record.commit_of(tmp_path, path)
    assert len(commit) == 12
    path.write_text("{ }")
    assert record.commit_of(tmp_path, path) == commit
    code.write_text("2")
    assert record.commit_of(tmp_path, path) == commit + "+changes"


def test_every_test_of_the_gpus_folder_has_the_mark():
    """Also where a file says nothing of it: one file stands for all, which take ten seconds to collect."""
    given = ("-q", "--collect-only", "-p", "no:cacheprovider", "-m", "not gpu")
    files = ("tests/gpu/test_sanitizer.py", "tests/test_mutation.py")
    done = subprocess.run([sys.executable, "-m", "pytest", *given, *files], cwd=ROOT, capture_output=True, text=True)
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {"tests/test_mutation.py"} and " deselected" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_recorded_without_a_gpu(tmp_path):
    path = tmp_path / "record.json"
    given = ("-m", "pytest", "-q", "tests/gpu/test_sanitizer.py", "--record", str(path))
    done = subprocess.run([sys.executable, *given], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4 and "torch sees none" in done.stderr and not path.exists()


def test_the_table_says_what_ran_where():
    run = {"commit": "abcdefabcdef", "card": "NVIDIA H100", "cards": 1, "driver": "580.1", "torch": "2.13", "date": "d"}
    counted = {"passed": 3, "failed": 1, "skipped": 0}
    other = {**run, **counted, "commit": "0123+changes", "card": "NVIDIA A100"}
    text = gpu_tests.table({"files": {"test_a.py": [other, {**run, **counted}], "test_b.py": [{**run, **counted}]}})
    rows = [line for line in text.splitlines() if line.startswith("| `test_")]
    assert rows[0] == "| `test_a.py` | NVIDIA A100 | d | `0123` and changes | 3 | 1 | 0 | 580.1 | 2.13 |"
    assert len(rows) == 3 and "`abcdefabcdef`" in rows[2]
    assert gpu_tests.table({}) == "No run is recorded yet."
