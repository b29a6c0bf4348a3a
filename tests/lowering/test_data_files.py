"""Files of data that others wrote: whatever is wrong with one is one error, which names it."""

from __future__ import annotations

import json
from random import Random

import mutation
import pytest
from terrazzo.lowering import data_files
from terrazzo.lowering.errors import ArgumentError

BAD_JSON = {
    "no JSON": b"{'a': 1}",
    "deep": b"[" * 200_000,
    "digits": b'{"a": ' + mutation.DIGITS.encode() + b"}",
    "bytes": b'"\xff\xfe"',
    "empty": b"",
    "two values": b'{"a": 1, "a": 2}',
}
BAD_TOML = {
    "no TOML": b"a = = 1",
    "deep": b"a = " + b"[" * 100_000 + b"]" * 100_000,
    "digits": b"a = " + mutation.DIGITS.encode(),
    "bytes": b"a = '\xff'",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_cannot_be_read_is_an_argument_error(name, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(BAD_JSON[name])
    with pytest.raises(ArgumentError, match=rf"^table = '{path}': cannot be read: .*; name a table$"):
        data_files.read_json(path, "table", "name a table")
    with pytest.raises(ValueError):
        data_files.parse_json(BAD_JSON[name])


@pytest.mark.parametrize("name", BAD_TOML)
def test_toml_that_cannot_be_read_is_an_argument_error(name, tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(BAD_TOML[name])
    with pytest.raises(ArgumentError, match=rf"^job = '{path}': cannot be read: (.|\n)*; name a job$"):
        data_files.read_toml(path, "job", "name a job")


def test_files_have_a_bound_and_places_are_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": [1, 2.5, "é"]}))
    assert data_files.read_json(path, "x", "y") == {"a": [1, 2.5, "é"]}
    with pytest.raises(ArgumentError, match="more than 5 bytes"):
        data_files.read_json(path, "x", "y", most=5)
    for nowhere in (tmp_path, tmp_path / "nothing", "a\0b", "/dev/zero"):
        with pytest.raises(ArgumentError, match="cannot be read"):
            data_files.read_text(nowhere, "x", "y", most=1000)


def test_any_damage_is_read_or_refused(tries):
    for random in tries(200):
        damaged = mutation.text({"rows": [{"n": 1, "us": 1.5, "name": "a"}]}, random)
        mutation.survives(lambda text=damaged: data_files.parse_json(text), ValueError)


def test_numbers_and_text_from_files_are_what_they_say():
    assert data_files.is_count(3) and not any(map(data_files.is_count, (True, 3.0, -1, 2**31, "3", None)))
    assert data_files.is_number(0.5, 0, 1) and data_files.is_number(1, 0, 1)
    assert not any(data_files.is_number(it, 0, 1e9) for it in (True, float("nan"), float("inf"), 10**400, "1", None))
    assert data_files.is_text("NVIDIA H200") and not any(map(data_files.is_text, ("\x1b[1m", "\ud800", "a" * 1001, 5)))


def test_errors_show_any_value():
    deep = mutation.nested(100_000, Random(0))
    for value, said in ((10**5000, "int that cannot be shown"), (deep, "list|dict"), ("x" * 9000, "9002 characters")):
        assert len(str(ArgumentError("x", value, "is odd", "pass another"))) < 700
        with pytest.raises(ArgumentError, match=said):
            raise ArgumentError("x", value, "is odd", "pass another")
