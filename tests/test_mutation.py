"""The damage that readers are held to is seeded, and leaves what it is made from alone."""

from __future__ import annotations

import json
from collections import Counter
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
