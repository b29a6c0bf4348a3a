"""The runner of a GPU host: its table of steps, who takes which, and real processes that stand for steps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from copy import copy
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from terrazzo.autotune import gemm_bench, jobs
from terrazzo.commands_tune import run_command
from terrazzo.lowering import bundle, parallel
from terrazzo.lowering.targets import Target

from benchmarks import compile_ahead, grouped, host, linear
from benchmarks.host_steps import NEEDS, STEPS, Step, chosen, missing, plan, workers

ROOT = Path(__file__).parents[1]
NO_PROGRAMS = {"choice", "compile_ahead", "host", "kv_choice", "plot", "pretended_gpu", "readme", "shared_records"}
NO_PROGRAMS |= {"w4a8_counters"}
"""Modules of benchmarks/ that run and measure nothing by themselves."""
NO_PROGRAMS |= {
    "accuracy",
    "accuracy_data",
    "cold_calls",
    "compile_model",
    "engine",
    "engine_table",
    "outliers",
    "train_small",
}
NO_PROGRAMS |= {"wheel_calls"}
"""Those that need a model's folder or make one, which no GPU machine has by itself."""
NO_PROGRAMS |= {"tensor_parallel"}
"""That wants several GPUs and torchrun."""
FACTS = {"out": "o", "results": "o/results", "gpu": "h200", "commit": "c0ffee"}
SMI = "#!/bin/sh\necho '0, GPU-a, NVIDIA H200, 580.1'\necho '1, GPU-b, NVIDIA H200, 580.1'\n"
SAY = """
import json, os, sys, time
name, *awaited = sys.argv[1:]
start = time.monotonic()
def running(other):  # or not yet started
    if not os.path.exists(other):
        return True
    try:
        return open("/proc/" + open(other).read() + "/stat").read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
with open(name + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + ".new", name)
while any(map(running, awaited)):
    time.sleep(0.01)
facts = dict(gpu=os.environ["CUDA_VISIBLE_DEVICES"], nice=os.nice(0), cpus=sorted(os.sched_getaffinity(0)))
print(json.dumps(facts | dict(start=start, end=time.monotonic())))
"""
"""Says where it runs, once the processes of other steps have ended."""


def step(name: str, code: str = "", seconds: float = 1.0, priority: int = 1, kind: str = "test", **facts) -> Step:
    return Step(name, ("-c", code), seconds, priority, kind, needs=(), **facts)


def crew(gpus: str, timed: int = 1) -> list:
    return workers(gpus.split(","), timed, sorted(os.sched_getaffinity(0)))


def run(folder: Path, steps, gpus: str = "0", budget: float = 60.0, grace: float = 0.5) -> dict:
    """Rows by name."""
    made = host.Host(steps, crew(gpus), budget, folder, FACTS, lambda line: None, grace)
    made.run()
    return made.rows


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_table_has_every_suite_every_benchmark_and_every_tuned_operator():
    names = [step.name for step in STEPS]
    assert len(names) == len(set(names)) and {need for step in STEPS for need in step.needs} <= set(NEEDS)
    given = {word for step in STEPS for word in step.command}
    suites = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert suites and suites == {word for word in given if word.startswith("tests/gpu/")}
    programs = [path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert {f"benchmarks.{path.stem}" for path in programs if path.stem not in NO_PROGRAMS} <= given
    measured = ",".join(step.command[3] for step in STEPS if "benchmarks.linear" in step.command)
    assert sorted(measured.split(",")) == sorted(linear.FORMATS)
    job = jobs.read_job(ROOT / "docs/jobs/h200.toml")
    assert {op for part in job.parts for op in part.ops} == {name[5:] for name in names if name.startswith("tune.")}


def test_parts_of_a_suite_select_something_and_leave_nothing_out():
    parts: dict[str, list[str]] = {}
    for step in STEPS:
        if "-k" in step.command:
            path, _, words = step.command[step.command.index("-k") - 1 :][:3]
            parts.setdefault(path, []).append(words)
    assert len(parts) > 3
    for path, words in parts.items():
        own = [word for word in words if not word.startswith("not ")]
        assert " and ".join(f"not {word}" for word in own) in words and len(words) == len(own) + 1
        assert all(word in (ROOT / path).read_text() for word in own), path


@pytest.mark.parametrize("step", [step for step in STEPS if step.kind == "timed"], ids=lambda step: step.name)
def test_programs_take_the_arguments(step):
    module, *given = (part.format_map(FACTS) for part in step.command[1:])
    if module == "terrazzo":
        with copy(run_command).make_context("run", given[2:]) as context:  # click keeps a parent's --help in a command
            options = context.params
        assert jobs.override(jobs.read_job(ROOT / options["job_file"]), ops=options["ops"]).problems()
    elif module.startswith("benchmarks."):
        out = str(import_module(module).arguments(given).out)
        assert out == "o/results" if module == "benchmarks.linear" else re.fullmatch(r"o/results/\S+_h200.json", out)


def test_plan():
    steps = [step("test.b", seconds=50, priority=2), step("test.a", seconds=50), step("x", seconds=30, kind="timed")]
    steps += [step("y", seconds=30, priority=2, kind="timed"), step("long", seconds=90, kind="timed")]

    def starts(gpus, budget, timed=1, steps=steps):
        return [(at, worker.gpu, step.name) for at, worker, step in plan(steps, crew(gpus, timed), budget)]

    one = [(0, "0", "test.a"), (50, "0", "x"), (80, "0", "long"), (170, "0", "test.b"), (220, "0", "y")]
    assert starts("0", 255) == one
    assert starts("0", 254) == one[:-1], "5 s are kept for what has to be interrupted"
    two = [(0, "0", "x"), (0, "1", "test.a"), (30, "0", "long"), (50, "1", "test.b"), (100, "1", "y")]
    assert starts("0,1", 200) == two, "tests are exhausted after 100 s: their GPU takes a timed step"
    assert starts("0,1", 90) == [(0, "0", "x"), (0, "1", "test.a"), (30, "0", "y")], "what does not fit is passed over"
    assert [name for _, gpu, name in starts("0,1", 200, timed=2) if gpu == "1"] == ["x", "long"]
    picked = chosen([Step("test.a", (), 8, compile=("-c", "")), step("test.b"), step("c")], ["test.*"], ["*.b"])
    assert [it.name for it in picked] == ["test.a", "compile.test.a"] and picked[1].command == ("-c", "")
    assert starts("0", 99, steps=picked) == [(0, "0", "test.a")], "nothing is left to compile ahead of it"


def test_a_quarter_of_the_cpus_is_nobodys():
    *gpus, ahead = workers("0123", 1, range(32))
    assert [len(worker.cpus) for worker in (*gpus[1:], ahead)] == [6, 6, 6, 6]
    assert len(frozenset.union(*(worker.cpus for worker in (*gpus[1:], ahead)))) == 24
    alone, ahead = workers("0", 1, range(16))
    assert not alone.cpus and len(ahead.cpus) == 12
    assert all(worker.cpus for worker in workers("01", 1, [5])[1:])


def test_timed_steps_are_alone_on_their_gpu_and_tests_beside_them_are_nice(tmp_path):
    def say(name: str, kind: str, *awaited: str, **facts) -> Step:
        command = ("-c", SAY, *(str(tmp_path / f"pid of {it}") for it in (name, *awaited)))
        return Step(name, command, 1, kind=kind, needs=(), **facts)

    # the first timed step outlasts the tests, and the last what is compiled ahead of it, on a busy machine too
    timed = [say("t0", "timed", "test.0", "test.1"), say("t1", "timed"), say("t2", "timed", "compile.t2")]
    ahead = say("compile.t2", "compile", ahead_of="t2")
    rows = run(tmp_path, [*timed, say("test.0", "test"), say("test.1", "test"), ahead], "0,1", budget=500.0)
    assert {row["status"] for row in rows.values()} == {"passed"}, rows
    said = {name: json.loads((tmp_path / f"{name}.log").read_text()) for name in rows}
    _, second, last = crew("0,1")
    for gpu in "01":
        here = sorted((it["start"], it["end"]) for name, it in said.items() if it["gpu"] == gpu and name != ahead.name)
        assert here and all(a[1] < b[0] for a, b in pairwise(here))
    own = os.nice(0)
    for name, it in said.items():
        nice = (
            host.NICE_COMPILE
            if name == ahead.name
            else 0
            if name.startswith("t") and len(name) == 2
            else host.NICE_TEST
        )
        assert it["nice"] == min(19, own + nice), name
    assert set(said["compile.t2"]["cpus"]) == last.cpus
    assert all(set(said[f"test.{i}"]["cpus"]) == second.cpus for i in range(2))
    assert set(said["t0"]["cpus"]) == os.sched_getaffinity(0)


def test_a_step_may_overrun_its_estimate_until_the_budget_ends_and_then_dies_with_its_children(tmp_path, monkeypatch):
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('1 failed', child.pid, flush=True); time.sleep(600)"
    )
    steps = [
        step("test.slow", "import time; time.sleep(0.3)", seconds=0.1),
        step("test.stubborn", stubborn, seconds=0.1, priority=2),
        step("test.never", seconds=0.1, priority=3),
    ]
    said, budget = tmp_path / "test.stubborn.log", 1000.0

    def monotonic() -> float:
        """The budget is at its end as soon as the stubborn step has its child."""
        return time.monotonic() + (budget if said.exists() and said.read_text() else 0.0)

    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    rows = run(tmp_path, steps, budget=budget)
    assert [row["status"] for row in rows.values()] == ["passed", "timed out", "not started"]
    slow, killed, _ = rows.values()
    assert slow["seconds"] > slow["estimate_s"] and killed["rc"] == -signal.SIGKILL
    assert not alive(int(killed["last"].split()[-1]))
    assert [host.failed(row) for row in rows.values()] == [False, True, False], "a test had failed before"


def test_what_is_compiled_ahead_stops_with_its_step_and_what_is_skipped_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(NEEDS, "ncu", lambda: None)
    long = ("-c", "import time; time.sleep(60)")
    steps = chosen([step("test.a", "import time; time.sleep(0.3)"), step("test.b", priority=2, compile=long)])
    steps.append(step("test.none", "print('5 skipped, 2 deselected in 1s')"))
    absent = Step("bench.ncu", (), 1, needs=("ncu",), compile=long)
    rows = run(tmp_path, [*steps, *chosen([absent])])
    assert rows["compile.test.b"]["status"] == "not needed" and rows["test.b"]["status"] == "passed"
    assert rows["test.none"]["status"] == "skipped" and rows["test.none"]["rc"] == 0
    assert rows["bench.ncu"]["status"] == "skipped" and rows["bench.ncu"]["last"] == missing(absent) == "no ncu here"
    assert "compile.bench.ncu" not in rows


MAIN = """
import sys
from benchmarks import host
from benchmarks.host_steps import Step
host.STEPS = tuple(Step(name, ("-c", code), 1, needs=()) for name, code in {steps!r})
sys.exit(host.main(sys.argv[1:]))
"""


def start(folder: Path, steps: list[tuple[str, str]], *options: str) -> subprocess.Popen:
    """`python -m benchmarks.host` with these steps, on a machine with two GPUs."""
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(SMI)
    smi.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["PATH"] = f"{smi.parent}:{env['PATH']}"
    command = [sys.executable, "-c", MAIN.format(steps=steps), "--out", str(folder / "out"), *options]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_leaves_a_table_and_a_summary(tmp_path):
    steps = [
        ("test.good", "print('3 passed in 1s')"),
        ("test.bad", "print('== 1 failed =='); exit(1)"),
        ("b", "exit(2)"),
    ]
    out, err = start(tmp_path, steps, "--commit", "c0ffee").communicate(timeout=300)
    assert "start    test.good on GPU" in out and not err
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["test.good", "test.bad", "b"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["commit"] == "c0ffee" and summary["driver"] == "580.1" and summary["torch"] and summary["date"]
    assert summary["gpus"] == {"0": "NVIDIA H200", "1": "NVIDIA H200"}
    found = [(row["name"], row["status"], row["rc"], row["last"]) for row in summary["steps"]]
    assert found[:2] == [("test.good", "passed", 0, "3 passed in 1s"), ("test.bad", "failed", 1, "1 failed")]
    assert found[2][1:3] == ("failed", 2)
    assert (tmp_path / "out" / "test.bad.log").read_text() == "== 1 failed ==\n"


def test_exit_codes_and_json(tmp_path):
    only = start(tmp_path, [("b", "exit(2)"), ("test.bad", "exit(1)")], "--json", "--only", "b")
    assert json.loads(only.communicate(timeout=300)[0])["steps"][0]["rc"] == 2 and only.returncode == 0
    (tmp_path / "again").mkdir()
    tests = start(tmp_path / "again", [("b", ""), ("test.bad", "exit(1)")], "--gpus", "1")
    assert "GPU 1" in tests.communicate(timeout=300)[0] and tests.returncode == 1


def test_a_resumed_run_leaves_out_what_passed_at_the_same_commit(tmp_path):
    steps = [("test.good", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"), ("test.bad", "exit(1)")]
    for commit, ran in (("aaaa", "x"), ("aaaa", "x"), ("bbbb", "xx")):
        start(tmp_path, steps, "--resume", "--commit", commit).communicate(timeout=300)
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert (tmp_path / "ran").read_text() == ran
        assert {row["name"]: row["status"] for row in summary["steps"]} == {"test.good": "passed", "test.bad": "failed"}


def test_an_interrupt_ends_the_children_and_still_writes_the_summary(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    running = start(tmp_path, [("test.long", code), ("test.later", "")], "--gpus", "0")
    log, deadline = tmp_path / "out" / "test.long.log", time.monotonic() + 300
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(log.read_text())
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=300)
    assert running.returncode == 130 and not alive(pid) and "0 test steps failed" in out
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["steps"]
    assert [row["status"] for row in rows] == ["interrupted", "not started"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--gpus", "7"], "--gpus 7: nvidia-smi shows 0,1"),
        (["--only", "nothing"], "no step is left"),
        (["--budget", "3"], "--budget 3.0"),
    ],
)
def test_bad_arguments(given, words, capsys, monkeypatch):
    monkeypatch.setattr(host, "gpus_here", lambda: {"0": ("a", "b"), "1": ("a", "b"), "GPU-a": ("a", "b")})
    with pytest.raises(SystemExit, match="2"):
        host.main(given)
    assert words in capsys.readouterr().err


def test_the_list_needs_no_gpu(capsys):
    assert host.main(["--list", "--gpus", "0,1", "--json", "--only", "test.*"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["on"] for row in rows} >= {"GPU 0", "GPU 1", "CPU"} and len(rows) > 20


def test_a_benchmark_stops_before_its_first_launch(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(gemm_bench, "require_gpu", lambda: None)
    monkeypatch.setattr(Target, "detect", lambda: Target.parse("sm_90a"))
    compiled = lambda requests, **how: asked.extend(requests) or [None] * len(requests)
    monkeypatch.setattr(parallel, "compile_many", compiled)
    some = ["linear", "--compile-only", "--formats", "w4a16", "--shapes", "tuned", "--m", "16"]
    assert compile_ahead.main(some) == 0
    assert asked and f"{len(set(asked))} kernels, 0 failed" in capsys.readouterr().out
    monkeypatch.setattr(parallel, "compile_many", lambda requests, **how: [ValueError("no")])
    assert compile_ahead.main(some) == 1
    monkeypatch.setattr(linear, "run", lambda *given: 0)
    assert compile_ahead.main(some) == 1 and "before it compiled" in capsys.readouterr().err


def test_a_benchmark_runs_on_kernels_that_another_machine_compiled(monkeypatch, capsys):
    asked, compiled, written = [], parallel.compile_many, {}
    monkeypatch.setattr(gemm_bench, "require_gpu", lambda: None)
    monkeypatch.setattr(Target, "detect", lambda: Target.parse("sm_90a"))
    monkeypatch.setattr(parallel, "compile_many", lambda requests: asked.extend(requests) or [None] * len(requests))
    monkeypatch.setattr(bundle, "write_bundle", lambda path, requests, replace: written.update({path: requests}))
    assert compile_ahead.main(["--write", "folder", "grouped", "--op", "mxfp4", "--quick"]) == 0
    assert written == {"folder": list(dict.fromkeys(asked))} and asked
    loaded, ran = [], []
    monkeypatch.setattr(bundle, "load_bundle", lambda path, strict: loaded.append((path, strict)))
    monkeypatch.setattr(grouped, "main", lambda argv: ran.append((argv, parallel.compile_many(asked))) or 3)
    assert compile_ahead.main(["--use", "folder", "grouped", "--op", "mxfp4"]) == 3
    assert loaded == [("folder", True)] and ran == [(["--op", "mxfp4"], [])]
    assert parallel.compile_many is not compiled and len(parallel.compile_many([])) == 0, "as it was before"


def test_compile_ahead_has_help_and_one_line_for_a_name_that_is_none(capsys):
    for flag in ("-h", "--help"):
        assert compile_ahead.main([flag]) == 0 and "python -m benchmarks.compile_ahead" in capsys.readouterr().out
    for name in ("w9a9", "--frob", "no.such", "tables"):
        assert compile_ahead.main([name]) == 2
        said = f"{name}: no benchmark of this name; name a module of benchmarks/, as attention\n"
        assert capsys.readouterr().err == said


def test_pytest_compiles_only(monkeypatch, capsys):
    path = ROOT / "tests/gpu/conftest.py"
    spec = importlib.util.spec_from_file_location("gpu_conftest", path)
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    kernel = SimpleNamespace(identity=lambda: "a")
    case = SimpleNamespace(requests=lambda: [kernel])
    items = [SimpleNamespace(callspec=SimpleNamespace(params={"cases": (case, case)})), SimpleNamespace()]
    session = SimpleNamespace(items=items, config=SimpleNamespace(getoption=lambda *_: True), testsfailed=0)
    monkeypatch.setattr("terrazzo.lowering.is_ready", lambda kernel: False, raising=False)
    monkeypatch.setattr("terrazzo.lowering.compile_many", lambda cold: [ValueError("no")] * len(cold), raising=False)
    assert conftest.pytest_runtestloop(session) is True and session.testsfailed == 1
    assert "compiled 0 of 1 kernels" in capsys.readouterr().out
    session.config.getoption = lambda *_: False
    assert conftest.pytest_runtestloop(session) is None
