"""Progress while kernels are compiled, and what Ctrl-C leaves: nothing."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terrazzo.building import Build, _clock, _Progress
from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.request import KernelRequest


def requests(count: int) -> list[KernelRequest]:
    names = ("w4a16.small_batch", "w4a16.stream_k")
    return [KernelRequest(names[at % 2], "builder:build", (("at", at),), "sm_90a") for at in range(count)]


@pytest.fixture
def slow(monkeypatch):
    """compile_many takes half a second for each request and notes their order."""
    order = []

    def compile_many(wanted, workers, progress):
        for done, request in enumerate(wanted, 1):
            time.sleep(0.5)
            order.append(request)
            progress(done, len(wanted), request, CompileError("no") if done == 2 else Path("x"))
        return [Path(str(dict(it.params)["at"])) for it in wanted]

    monkeypatch.setattr("terrazzo.lowering.parallel.compile_many", compile_many)
    monkeypatch.setattr("terrazzo.lowering.kernels.find_compiled", lambda request: None)
    return order


def test_kernels_of_the_cache_are_not_compiled_again(slow, capsys, monkeypatch):
    wanted = requests(3)
    monkeypatch.setattr(
        "terrazzo.lowering.kernels.find_compiled", lambda it: Path("there") if it == wanted[1] else None
    )
    build = Build(wanted, workers=2)
    assert [str(it) for it in build.run()] == ["0", "there", "2"] and slow == [wanted[0], wanted[2]]
    assert "3 kernels (2 compiled, 1 from the cache) in " in capsys.readouterr().err
    assert build.expected()["cached"] == 1


def test_the_longest_come_first_and_outcomes_keep_their_order(slow, capsys):
    wanted = requests(4)
    build = Build([*wanted, wanted[0]], workers=2)
    assert [str(it) for it in build.run()] == ["0", "1", "2", "3", "0"]
    assert [it.name for it in slow] == ["w4a16.stream_k"] * 2 + ["w4a16.small_batch"] * 2
    assert "4 kernels (compiled) in 2." in capsys.readouterr().err
    assert build.facts()["total"] == 4 and build.facts()["workers"] == 2


def test_a_line_comes_again_and_again_where_there_is_no_terminal(slow, capsys, monkeypatch):
    monkeypatch.setattr("terrazzo.building.LINE_S", 0.6)
    Build(requests(4)).run()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 4 and all(line.startswith("[") and "/4] 0:0" in line for line in lines[:-1])
    assert "left" in lines[1] and "1 failed" in lines[-2] and "\r" not in "".join(lines)


@pytest.mark.parametrize(("elapsed", "text"), [(4, "about 0:06 left"), (11, "")])
def test_before_the_first_kernel_the_time_left_runs_out(elapsed, text):
    shown = _Progress(dict.fromkeys(requests(2), 10.0), workers=4, quiet=True)
    shown.start -= elapsed
    assert shown._time_left() == text


def test_nothing_is_printed_quietly(slow, capsys):
    Build(requests(1), quiet=True).run()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75, "1:15"), (3599.6, "1:00:00"), (-3, "0:00")])
def test_time_as_a_clock_shows_it(seconds, text):
    assert _clock(seconds) == text


def test_a_terminal_has_a_bar_with_the_time_left(tmp_path):
    script = tmp_path / "it.py"
    script.write_text(
        "import sys, time, pathlib\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from terrazzo.lowering import kernels, parallel\n"
        "kernels.find_compiled = lambda it: None\n"
        "def compile_many(wanted, workers, progress):\n"
        "    for done, it in enumerate(wanted, 1):\n"
        "        time.sleep(0.4); progress(done, len(wanted), it, pathlib.Path('x'))\n"
        "    return [pathlib.Path('x')] * len(wanted)\n"
        "parallel.compile_many = compile_many\n"
        "from test_progress import requests\n"
        "from terrazzo.building import Build\n"
        "Build(requests(5)).run()\n"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": "120", "TERM": "xterm", "TERRAZZO_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, str(script)], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(60) == 0, said
    assert b"compiling" in said and b"/5" in said and b"left" in said and b"5 kernels (compiled)" in said


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_compilation_leaves_nothing(tmp_path, how):
    cache, scratch = tmp_path / "cache", tmp_path / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "terrazzo", "compile", "--shape", "256x256", "--m", "1,64", "--target", "sm_80"]
    command += ["--workers", "2", "-o", str(tmp_path / "bundle")]
    env = os.environ | {"TERRAZZO_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not any(cache.glob("v*/building/*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (130, 143), said
    assert "Traceback" not in said and "stopped" in said
    assert list(cache.glob("v*/building/*")) == [] and list(scratch.iterdir()) == []
    assert not (tmp_path / "bundle").exists() and not list(tmp_path.glob(".bundle*"))


def test_quantize_says_how_far_it_is_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from terrazzo.cli import main

    from tests.nn.tiny_text import write_folder

    command = ["quantize", str(write_folder(tmp_path / "float")), "-o", str(tmp_path / "out"), "--format", "w4a16-g64"]
    monkeypatch.setattr("terrazzo.console.LINE_S", 1e9)  # the last layer is said however fast it comes
    assert main([*command, "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "layer 1 of 1, " in said.err and "layer 1" not in said.out
