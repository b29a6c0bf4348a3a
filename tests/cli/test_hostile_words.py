"""Whatever is typed, the command answers with an exit code and a line, never with a traceback."""

from __future__ import annotations

import random

import click
import pytest
from terrazzo.cli import main
from terrazzo.cli import terrazzo as command
from terrazzo.lowering.errors import CompileError

WORDS = (
    "", " ", "-", "--", "-1", "0", "1", "3", "00", "1.5", "-0.0", "nan", "inf", "1e9", "9" * 25, "9" * 5000, "²",
    "٣", "x", "NxK", "64x128", "64x0", "1x1", "128x", "x128", "64,128", "1,2,,3", "K", "-1,2", "a" * 3000, "../..",
    ".", "/dev/null", "/proc/self", "/dev/null/x", "/absent/x", "~", "~nobody/x", "[bold]", "[/]", "%s", "{}",
    "\\", "'", '"', "\n", "\t", "\x1b[31m", "\x00", "\udcff", "😀", "ﬀ", "llama-3-8b", "llama-9", "w4a16", "w4a8",
    "w4ax", "attention", "w4a16_grouped", "attention_prefill", "sm_90a", "sm_80", "nvidia/nvidia-h100", "nvidia/",
    "auto", "f16", "bf16", "f32", "int4/int4", "int4/", "/", "fp8/fp8", "float16/float16", "int4_channel64/int4",
    "32/8", "7/2", "0/0", "8x32/8x4k", "8x32/8x", "10m", "0s", "200 trials", "local", "ray", "all", "0,1", "post",
    "fused", "e4m3", "marlin_u4", "--help",
)  # fmt: skip
LONG = {("demo",), ("bench",), ("tune", "throughput"), ("tune", "report")}
"""Verbs that do minutes of work where their arguments are right."""


def verbs(group: click.Group, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found = {}
    for name, it in group.commands.items():
        found |= verbs(it, (*above, name)) if isinstance(it, click.Group) else {(*above, name): it}
    return found


VERBS = verbs(command)


def typed(rng: random.Random) -> list[str]:
    """A verb with options of its own, of another verb and of none, each with some word."""
    path = rng.choice(list(VERBS))
    words = list(path)
    for _ in range(rng.randint(0, 5)):
        own = rng.random() < 0.9
        options = [it for it in VERBS[path if own else rng.choice(list(VERBS))].params if isinstance(it, click.Option)]
        if not options or rng.random() < 0.15:
            words.append(rng.choice(WORDS))
            continue
        option = rng.choice(options)
        words.append(rng.choice(option.opts))
        if not option.is_flag or rng.random() < 0.05:
            words.append(rng.choice(WORDS))
    if path == ("tune", "run"):
        words.append("--dry-run")
    if path in LONG:
        words.append("--no-such-option")
    return words


@pytest.fixture
def nothing_is_done(tmp_path, monkeypatch):
    """Kernels are not compiled, files are written below a folder of the test."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("terrazzo.building.Build.run", lambda self: [CompileError("no")] * len(self.requests))


def test_no_words_make_a_traceback(nothing_is_done, capsys, tries):
    codes = []
    for rng in tries(300):
        words = typed(rng)
        try:
            code = main(words)
        except BaseException as error:
            raise AssertionError(f"terrazzo {words!r} raised {type(error).__name__}: {error}") from error
        said = capsys.readouterr()
        assert code in (0, 1, 2), words
        assert "Traceback" not in said.out + said.err, words
        if code == 2:
            assert said.err.startswith("terrazzo: ") and said.err.count("\n") == 1, (words, said.err)
            assert "Target.parse" not in said.err and "kernel_requests" not in said.err, (words, said.err)
        codes.append(code)
    assert codes.count(2) > len(codes) // 4 and codes.count(0) > 0
