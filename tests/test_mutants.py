"""The tool that puts faults into copies of the tree, and the file about faults that no test found."""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "tools"))
import mutants

ROOT = Path(__file__).parents[1]
KEPT = json.loads((ROOT / "tests/data/mutants.json").read_text())
CODE = """'''Words < more words.'''
def clamp(x: int, most: int = 9) -> int:
    if x > most:
        raise ValueError(f"{x + 1} is above {most}")
    return max(x, 0)
"""
TESTS = """from ops.sizes import clamp
import pytest, pathlib
def test_text(): assert pathlib.Path("ops/sizes.py").read_text().count("\\n") == 5
def test_most():
    assert clamp(9) == 9
    with pytest.raises(ValueError): clamp(11)
"""


def test_a_mutant_is_another_program_that_can_be_read():
    found = [mutant for of in mutants.sites("layouts").values() for mutant in of]
    assert len(mutants.sites("layouts")) > 10 and len(found) > 500
    for mutant in random.Random(0).sample(found, 60):
        source = (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant


def test_equal_seeds_draw_equal_mutants(monkeypatch):
    monkeypatch.setattr(mutants, "TURNS", ("layouts",))
    assert mutants.drawn(3, 8) == mutants.drawn(3, 8) != mutants.drawn(4, 8)


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A house of one module and its tests."""
    for name, text in (("ops/sizes.py", CODE), ("tests/ops/test_sizes.py", TESTS), ("ops/__init__.py", "")):
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "house")
    monkeypatch.setattr(mutants, "TURNS", ("ops",))
    caches = (mutants.sites, mutants.modules, mutants.imported, mutants.distances, mutants.tests_of)
    for each in caches:
        each.cache_clear()
    yield tmp_path
    for each in caches:
        each.cache_clear()


def test_what_tests_find_is_killed_and_what_only_reads_the_text_kills_nothing(house):
    found = {(one.operator, one.old): one for of in mutants.sites("ops").values() for one in of}
    assert not any(old in ("1", "x + 1") for _, old in found)  # words
    chosen = [
        ("comparison", "x > most"), ("negated condition", "x > most"), ("constant", "9"),
        ("min / max, any / all", "max(x, 0)"), ("constant", "0"),
    ]  # fmt: skip
    made = [found[key] for key in chosen]
    done = mutants.run(made, 1, house / "out.json", float("inf"), {})
    said = [(one.verdict, one.test.rpartition("::")[2]) for one in done]
    assert said == [("killed", "test_most")] * 2 + [("survived", "")] + [("killed", "test_most"), ("survived", "")]
    assert (house / "house/ops/sizes.py").read_text() == CODE
    written = json.loads((house / "out.json").read_text())
    assert written["counts"] == {"killed": 3, "survived": 2}
    assert mutants.found_again(written["mutants"]) == [found[chosen[2]], found[chosen[4]]]


@pytest.mark.parametrize("entry", KEPT["mutants"], ids=lambda entry: f"{entry['file']}:{entry['line']}")
def test_each_survivor_has_its_test_or_the_reason_why_not(entry):
    said = entry["said"]
    assert len(said) > 15 and entry["operator"] and entry["old"] != entry["new"] and (ROOT / entry["file"]).exists()
    for name in re.findall(r"\S+\.py::\w+", said):
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name
    assert said.startswith("test written: ") == bool(re.search(r"\.py::\w+", said))
