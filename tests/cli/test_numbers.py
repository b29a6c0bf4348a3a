"""Numbers that are typed: every option of every command has bounds, and names itself where they are left."""

from __future__ import annotations

import os

import click
import pytest
import torch
from terrazzo.cli import main
from terrazzo.cli import terrazzo as command

from tests.cli.test_hostile_words import verbs

KINDS = (click.types.IntParamType, click.types.FloatParamType)
NUMBERS = {
    (path, option.opts[-1]): option.type for path, verb in verbs(command).items() for option in verb.params
    if isinstance(option.type, KINDS)
}  # fmt: skip


def test_every_number_has_bounds():
    unbounded = [place for place, kind in NUMBERS.items() if None in (getattr(kind, "min", None), kind.max)]
    assert not unbounded and len(NUMBERS) > 15


@pytest.mark.parametrize(("path", "option"), NUMBERS, ids=lambda it: it if isinstance(it, str) else " ".join(it))
def test_numbers_out_of_bounds_are_refused_by_the_options_name(path, option, capsys):
    kind = NUMBERS[path, option]
    for bad in (kind.min - 1, kind.max + 1, -(10**30), 10**30, "nan", "inf", "-inf", "1e400", "x", "9" * 5000):
        assert main([*path, option, str(bad)]) == 2
        said = capsys.readouterr().err
        assert option in said and said.count("\n") == 1, (bad, said)


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.nn.test_quantized_folder import write_source
    from tests.nn.tiny_text import byte_tokenizer

    byte_tokenizer().save_pretrained(write_source(tmp_path / "float"))
    assert transformers
    return tmp_path / "float"


def test_a_calibration_that_is_no_file_is_refused_and_none_is_waited_for(folder, tmp_path, capsys):
    """A pipe that nobody writes, a device without an end, a folder."""
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path / "pipe", "/dev/zero", "/dev/null", tmp_path):
        assert main(["quantize", str(folder), "-o", str(tmp_path / "out"), "--calibration", str(bad)]) == 2
        said = capsys.readouterr().err
        assert "--calibration" in said and str(bad) in said and said.count("\n") == 1
        assert "is no file" in said or "is a directory" in said
    assert not (tmp_path / "out").exists()


def test_a_job_that_is_no_file_is_refused_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for option in ("--job", "--shapes"):
        for bad in (tmp_path / "pipe", "/dev/zero", tmp_path):
            assert main(["tune", option, str(bad), "--dry-run"]) == 2
            said = capsys.readouterr().err
            assert str(bad) in said and "is no file" in said and said.count("\n") == 1


def test_of_a_huge_text_only_the_beginning_is_read(folder, tmp_path):
    """32 bytes for a token; what is no UTF-8 is replaced."""
    from terrazzo.commands_quantize import _tokens_of

    with (tmp_path / "text").open("wb") as file:
        file.write("é".encode() * 40 + b"\xff")
        file.truncate(1 << 38)  # 256 GiB, of which nothing is on the disk
    tokens = _tokens_of(folder, tmp_path / "text", 16, False)
    assert tokens.shape == (1, 16) and tokens.dtype == torch.long
