"""Tuning jobs on fake parts: faults cost one process, kills one trial, and jobs share a database."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tuning
from terrazzo.autotune import runner
from terrazzo.autotune.database import Database, best
from terrazzo.autotune.isolation import Measurer
from terrazzo.autotune.jobs import Job
from terrazzo.lowering.errors import ArgumentError, ToolchainError


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "trials.db", tmp_path / "log"


def trials(path: Path):
    with Database(path) as database:
        return database.trials()


def logged(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def test_faults_are_trials_with_a_reason(place):
    """Every schedule of the space ends as one trial, whatever it does to its process; the rest is measured."""
    events = []
    summary = tuning.run(tuning.SMALL, *place, faults=True, report=events.append)
    kept = trials(place[0])
    searched = [it for it in kept if it.role != "confirm"]
    spaces = {p: runner.candidates(p, runner.Target.parse("sm_90a"), tuning.SMALL) for p in tuning.SMALL.problems()}
    tried = {(it.problem, it.program, it.params) for it in searched}
    assert tried == {(p, c.program, tuple(sorted(c.params.items()))) for p, found in spaces.items() for c in found}
    assert len(searched) == len(tried) and summary.trials == len(kept) and summary.ended == "done"
    statuses = Counter(it.status for it in kept)
    assert statuses == summary.statuses and {"ok", "crash", "hang", "wrong", "compile"} <= set(statuses)
    for it in kept:
        assert (it.us is None) == (it.status != "ok") and bool(it.error) == (it.status != "ok")
    assert any("illegal memory access" in it.error for it in kept if it.status == "crash")
    assert summary.restarts >= statuses["crash"] + statuses["hang"] + statuses["wrong"] - 1
    seen = Counter(found for found, *_ in logged(place[1]))
    assert seen["ok"] == statuses["ok"] and seen["hang"] == statuses["hang"] and seen["wrong"] == statuses["wrong"]
    assert [event.trial.uid for event in events if event.trial] == [it.uid for it in kept]
    assert all(event.done <= event.total for event in events)


def test_the_best_schedules_are_confirmed_beside_the_heuristic(place):
    tuning.run(tuning.SMALL, *place)
    for found in best(trials(place[0])):
        same = [it for it in trials(place[0]) if it.problem == found.trial.problem and it.us is not None]
        assert same[0].role == "heuristic" and found.heuristic_us == same[0].us
        again = [(it.program, it.params) for it in same if it.role == "confirm"]
        assert (found.trial.program, found.trial.params) in again and (same[0].program, same[0].params) in again
        assert found.trial.us == min(it.us for it in same)


def test_resume_repeats_nothing(place):
    first = tuning.run(dataclasses.replace(tuning.SMALL, budget_trials=9), *place, faults=True)
    assert first.ended == "budget" and first.trials >= 9
    before = {(it.problem, it.program, it.params) for it in trials(place[0]) if it.role != "confirm"}
    second = tuning.run(tuning.SMALL, *place, faults=True, resume=True)
    assert second.reused == len(before)
    searched = Counter((it.problem, it.program, it.params) for it in trials(place[0]) if it.role != "confirm")
    assert set(searched.values()) == {1}
    third = tuning.run(tuning.SMALL, *place, faults=True, resume=True)
    assert third.trials == 0 and third.ended == "done" and third.best == second.best
    again = tuning.run(tuning.SMALL, *place, faults=True)
    assert again.trials >= len(searched)  # without --resume everything is measured anew


def start(place, kind: str = "clean", *more: str, seconds: str = "0.02") -> subprocess.Popen:
    command = [sys.executable, str(Path(tuning.__file__)), str(place[0]), str(place[1]), seconds, kind, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and not errors, errors
    return out


def test_ten_kills_lose_at_most_the_trial_in_flight(place):
    """kill -9 at random moments, then --resume: the log of the measuring processes says what was measured."""
    draw = random.Random(4)
    for at in range(10):
        process, more = start(place, "clean", "--resume"), len(logged(place[1])) + draw.randrange(4)
        if at % 3 == 0:
            time.sleep(draw.random())  # wherever it is then
        while at % 3 and len(logged(place[1])) < more and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        process.communicate()
    kills = 10
    assert finish(start(place, "clean", "--resume")).startswith("done")
    measured = Counter(json.dumps(row[1:], sort_keys=True) for row in logged(place[1]))
    kept = Counter(
        json.dumps([it.problem.m, it.program, dict(it.params)], sort_keys=True)
        for it in trials(place[0])
        if it.status != "compile"
    )
    assert not kept - measured and (measured - kept).total() <= kills
    searched = Counter((it.problem, it.program, it.params) for it in trials(place[0]) if it.role != "confirm")
    assert set(searched.values()) == {1} and len(searched) == 26, [key for key, n in searched.items() if n > 1]


def test_a_measuring_process_ends_with_its_job(place):
    """The real one asks the kernel to end it with its parent; the fake one sees its input close."""
    process = start(place, seconds="0.3")
    while not logged(place[1]):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    end = time.monotonic() + 120
    while measuring(place[1]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not measuring(place[1])


def measuring(log: Path) -> list[str]:
    """Processes that have the log's name on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found += [path.parent.name] * (os.fsencode(log) in path.read_bytes())
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_everything(place, number):
    process = start(place, seconds="0.05")
    while len(logged(place[1])) < 3:
        time.sleep(0.01)
    process.send_signal(number)
    out, errors = process.communicate(timeout=300)
    assert out.startswith("interrupted") and not errors
    measured = [row for row in logged(place[1]) if row[0] == "ok"]
    assert len([it for it in trials(place[0]) if it.status == "ok"]) == len(measured)
    assert len(measured) < 26


def test_two_jobs_at_once_on_one_database(place):
    first, second = start(place, seconds="0.005"), start(place, "faults", seconds="0.005")
    assert all(finish(process).startswith("done") for process in (first, second))
    kept = trials(place[0])
    assert len({it.job for it in kept}) == 2 and len({it.uid for it in kept}) == len(kept)
    per_job = Counter(it.job for it in kept if it.role != "confirm")
    assert set(per_job.values()) == {26}


def test_writers_of_one_database_wait_for_each_other(place):
    tuning.run(dataclasses.replace(tuning.SMALL, m=(8,)), *place)
    sample = trials(place[0])[0]

    def write(job: int) -> int:
        with Database(place[0]) as database:
            return sum(database.add([dataclasses.replace(sample, uid=f"{job}:{n}")]) for n in range(40))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(8))) == 320
    assert len(trials(place[0])) >= 320


def test_two_gpus_share_one_job(place):
    summary = tuning.run(tuning.SMALL, *place, seconds=0.01, gpus=2)
    searched = Counter((it.problem, it.program, it.params) for it in trials(place[0]) if it.role != "confirm")
    assert summary.ended == "done" and set(searched.values()) == {1} and len(searched) == 26


def test_gpus_of_two_kinds_are_refused(place, monkeypatch):
    one, two = (tuning.measurer(place[1]) for _ in range(2))
    monkeypatch.setattr(two, "hello", lambda: dataclasses.replace(tuning.measurer(place[1]).hello(), gpu="NVIDIA L4"))
    with Database(place[0]) as database, pytest.raises(ArgumentError, match="NVIDIA H200 and NVIDIA L4"):
        runner.Runner(tuning.SMALL, database, [one, two], tuning.InstantCompiler)
    assert one.process is None and two.process is None  # nothing measures on for a job that was refused


def test_a_job_leaves_no_process_behind(place):
    with Database(place[0]) as database:
        measurers = [tuning.measurer(place[1]) for _ in range(2)]
        job = runner.Runner(tuning.SMALL, database, measurers, tuning.InstantCompiler, workers=2)
        started = [measurer.process for measurer in measurers]
        job.run()
    assert all(process.returncode is not None for process in started)  # ended, and waited for


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("no JSON", r"answered .*no JSON"),
        ("[1, 2]", r"answered"),
        ('{"status": "ok", "what": 1}', "answered"),
        ("[" * 100_000, "answered"),
        ('{"us": ' + "9" * 5000 + "}", "answered"),
        ("x" * (2 << 20), "answered"),
    ],
)
def test_an_answer_that_is_none_is_a_crash_of_the_trial(place, answer, said):
    """Of a library that writes where it should not, for example."""
    program = f"import sys; sys.stdin.readline(); sys.stdout.write({answer[:9]!r} * {max(1, len(answer) // 9)})"
    program = program if len(answer) > 5000 else f"import sys; sys.stdin.readline(); sys.stdout.write({answer!r})"
    measurer = Measurer(command=(sys.executable, "-c", f"{program}; print(flush=True); sys.stdin.readline()"))
    found = measurer.trial(tuning.SMALL.problems()[0], "small_batch", {}, 1.0)
    assert found.status == "crash" and re.search(said, found.error) and len(found.error) < 1000
    assert measurer.process is None
    with pytest.raises(ToolchainError, match="nothing can be measured here"):
        measurer.hello()


def test_a_budget_of_time_ends_the_job(place):
    job = dataclasses.replace(tuning.SMALL, budget_s=3.0)
    summary = tuning.run(job, *place, seconds=0.2)
    assert summary.ended == "budget" and summary.seconds < 60.0  # the trial in flight, on a busy machine
    assert 2 <= len(trials(place[0])) < 20
    # each problem gets its share of the time
    assert {it.problem.m for it in trials(place[0])} == {8, 64}


def test_a_short_budget_says_something_of_every_problem(place):
    """Rounds over all problems, the heuristic's schedule first, and time kept to confirm the best."""
    job = dataclasses.replace(tuning.SMALL, m=(8, 16, 32, 64), budget_s=8.0, confirm=1)
    summary = tuning.run(job, *place, seconds=0.4, gpus=2)
    kept = trials(place[0])
    searched = Counter(it.problem.m for it in kept if it.role != "confirm")
    assert summary.ended == "budget" and set(searched) == {8, 16, 32, 64}
    assert (
        min(searched.values()) >= runner.ROUND and max(searched.values()) - min(searched.values()) <= 3 * runner.ROUND
    )
    assert {it.problem.m for it in kept if it.role == "heuristic"} == {8, 16, 32, 64}
    confirmed = [it.role for it in kept].index("confirm")  # after the searches, but for those in flight
    assert sum(it.role != "confirm" for it in kept[confirmed:]) <= 2


def test_each_weight_stays_on_one_gpu(place, monkeypatch):
    """Data are loaded once: two GPUs take schedules of different weights as long as there are several."""
    job = dataclasses.replace(tuning.SMALL, shapes=((512, 1024), (1024, 512)), m=(8,), most=6, budget_s=60.0)
    with Database(place[0]) as database:
        measurers, asked = [tuning.measurer(place[1], 0.02) for _ in range(2)], []
        for at, measurer in enumerate(measurers):
            real = measurer.trial
            measurer.trial = lambda problem, *rest, at=at, real=real: (
                asked.append((at, problem)) or real(problem, *rest)
            )
        runner.Runner(job, database, measurers, tuning.InstantCompiler, workers=2).run()
    seats = {problem: {at for at, other in asked if other == problem} for _, problem in asked}
    assert len(seats) == 2 and all(len(used) == 1 for used in seats.values()), seats


def test_patience_ends_a_problem(place):
    job = dataclasses.replace(tuning.SMALL, strategy="top-k", patience=3, m=(8,), confirm=0)
    tuning.run(job, *place)
    times = [it.us or 1e9 for it in trials(place[0])]
    assert len(times) < 14
    settled = min(range(len(times)), key=times.__getitem__)
    assert len(times) - 1 - settled <= 3 + 2 * 2 + 2  # and what was compiled ahead


def test_another_target_is_refused(place):
    with pytest.raises(ArgumentError, match="cannot be measured here: this GPU is NVIDIA H200"):
        tuning.run(dataclasses.replace(tuning.SMALL, target="sm_80"), *place)


def test_a_machine_without_a_gpu_says_so(place, tmp_path):
    broken = Measurer(command=(sys.executable, "-c", "raise SystemExit('no GPU in sight')"))
    with Database(place[0]) as database, pytest.raises(ToolchainError, match="no GPU in sight"):
        runner.Runner(tuning.SMALL, database, [broken], tuning.InstantCompiler)
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the real measuring process would start")
    with Database(place[0]) as database, pytest.raises(ToolchainError, match="needs a CUDA GPU"):
        runner.Runner(tuning.SMALL, database, [Measurer()], tuning.InstantCompiler)


def test_kernels_that_spill_a_lot_are_not_run(place, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_spills", lambda folder: runner.MOST_SPILLED)
    assert "ok" in tuning.run(tuning.SMALL, *place).statuses
    place = (tmp_path / "more.db", tmp_path / "more.log")
    monkeypatch.setattr(runner, "_spills", lambda folder: runner.MOST_SPILLED + 1)
    summary = tuning.run(dataclasses.replace(tuning.SMALL, m=(8,)), *place)
    assert {"spills"} <= set(summary.statuses) <= {"spills", "compile"} and not logged(place[1])


def test_preview_needs_no_gpu():
    job = Job(ops=("w4a16", "w4a8"), models=("llama-3-8b",), m=(8, 4096), target="sm_90a")
    target, rows = runner.preview(job)
    assert target.arch == "sm_90a" and len(rows) == 2 * 4 * 2
    assert all(row["trials"] <= row["schedules"] == sum(row["programs"].values()) for row in rows)
    assert all(0 < row["predicted_best_us"] <= row["heuristic_us"] for row in rows)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""  # nothing was changed for it
