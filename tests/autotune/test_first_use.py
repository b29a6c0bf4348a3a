"""Tuning on first use with several GPUs: who is asked, who measures, what stays."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time

import pytest
import torch
import tuning
from terrazzo.autotune import database as store
from terrazzo.autotune import first_use
from terrazzo.autotune.database import Database, Machine, Trial
from terrazzo.lowering.errors import TargetError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import records

H200, A100, L40S = map(Target.parse, ("sm_90a", "sm_80", "sm_89"))
FACTS = {"n": 512, "k": 1024}


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(records.VARIABLE, raising=False)
    records.clear()
    yield
    records.clear()


@pytest.fixture
def two_gpus(monkeypatch):
    """An H200, which is current, an unsupported GPU and an A100."""

    def detect(index):
        if index == 1:
            raise TargetError("target", "old", "is not supported", "use another")
        return (H200, None, A100)[index]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Target, "detect", staticmethod(detect))


class Found:
    """A job that finds one schedule for the GPU that it is asked for: `stages` is its number of SMs."""

    ended = "done"
    asked: list[str]

    def __init__(self, job, database, problem, target):
        self.database, self.problem, self.target = database, problem, target

    def run(self):
        self.asked.append(self.target.name)
        machine = Machine(self.target.arch, self.target.name, self.target.sms, **records.versions())
        found = (("stages", self.target.sms),)
        uid = f"{self.target.name} {self.target.sms}"
        self.database.add([Trial(self.problem, "stream_k", found, machine, "ok", 5.0, uid=uid)])
        return self


def test_each_gpu_has_its_own_schedule(tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(Found, "asked", [], raising=False)
    half = replace(H200, sms=66)
    tuner = first_use.FirstUse(tmp_path / "t.db", 60.0, 4, "top-k", Found)
    for _ in range(2):
        chosen = [tuner("w4a16", FACTS, 5, target).params["stages"] for target in (H200, A100, half)]
        assert chosen == [132, 108, 66]
    assert Found.asked == [H200.name, A100.name, H200.name]
    first_use.keep(tuner)
    kept = [records.pick("w4a16", FACTS, 8, target) for target in (H200, A100, half, L40S)]
    assert [it and it.params["stages"] for it in kept] == [132, 108, 66, None]


def test_the_gpu_that_is_asked_for_measures(two_gpus, monkeypatch):
    monkeypatch.setattr(first_use, "Measurer", lambda device: device)
    monkeypatch.setattr(first_use, "Runner", lambda job, database, measurers, **_: measurers)
    runner = lambda target: first_use._runner(None, None, None, target)
    assert (runner(H200), runner(A100), runner(L40S)) == (["0"], ["2"], None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-c")
    assert (runner(H200), runner(A100)) == (["4"], ["GPU-c"])
    monkeypatch.setattr(Target, "detect", staticmethod(lambda index: H200))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert (runner(H200), runner(A100)) == (["5"], None)


def test_a_target_that_is_no_gpu_of_the_machine_is_not_tuned(two_gpus, tmp_path, monkeypatch):
    tuner = first_use.FirstUse(tmp_path / "t.db", 60.0, 4, "top-k")
    assert tuner("w4a16", FACTS, 5, L40S) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuner("w4a16", FACTS, 64, H200) is None


def test_a_relative_database_does_not_move_with_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(Found, "asked", [], raising=False)
    monkeypatch.chdir(tmp_path)
    tuner = first_use.FirstUse("t.db", 60.0, 4, "top-k", Found)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tuner("w4a16", FACTS, 5, H200).params == {"stages": 132}
    assert not list((tmp_path / "elsewhere").iterdir())
    with Database(tmp_path / "t.db", create=False) as trials:
        assert len(trials.trials()) == 1


def test_a_process_forked_while_a_thread_tunes_waits_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(Found, "asked", [], raising=False)
    tuner = first_use.FirstUse(tmp_path / "t.db", 60.0, 4, "top-k", Found)
    assert tuner("w4a16", FACTS, 5, H200).params == {"stages": 132}
    held, done = threading.Event(), threading.Event()

    def tune() -> None:
        with tuner.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=tune)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # if it waits after all
        os._exit(0 if tuner("w4a16", FACTS, 5, H200).params == {"stages": 132} else 1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()


def test_clocks_that_jump_change_neither_budgets_nor_what_is_best(tmp_path, monkeypatch):
    """The time of day goes back by a day, ahead by a year and stands still; a job counts by the monotonic clock."""
    now, jumps = time.time(), itertools.cycle((0.0, -86400.0, 3e7, 0.0, 0.0))
    monkeypatch.setattr(store.time, "time", lambda: now + next(jumps))
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    summary = tuning.run(dataclasses.replace(tuning.SMALL, budget_s=300.0), tmp_path / "t.db", tmp_path / "log")
    assert summary.ended == "done" and 0 < summary.seconds < 300
    with Database(tmp_path / "t.db") as trials:
        kept = trials.trials()
    assert len({it.created for it in kept}) > 1 and [it.created for it in kept] != sorted(it.created for it in kept)
    assert [it.uid for it in kept] == [f"{summary.job}:{at + 1}" for at in range(summary.trials)]
    assert {it.trial.problem: it.trial.us for it in store.best(kept)} == {
        problem: pytest.approx(us) for problem, (us, _) in summary.best.items()
    }
