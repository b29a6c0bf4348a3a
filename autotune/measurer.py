"""The process that measures: started by autotune/isolation.py, it speaks JSON lines and owns a GPU.

It holds the data of some problems, checks each candidate's output against the oracle (and that two runs give the same
bits), and only then times it. It ends after anything that may have harmed the device or its memory: a CUDA error, or a
wrong result. A lock for each GPU lets one process measure at a time, also those of other jobs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from terrazzo.autotune import measure
from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import get_operator
from terrazzo.lowering.cache import cache_root
from terrazzo.lowering.errors import TerrazzoError
from terrazzo.lowering.folders import make_folders
from terrazzo.schedules import records

if TYPE_CHECKING:
    import filelock
    from terrazzo.autotune.subjects import Subject
    from terrazzo.lowering.targets import Target

PEER_MS = 15.0
PREFILL_M = 512
"""From so many tokens on, trials are timed at the power limit, where the products of a prefill follow one another."""
_FULL = 0.5


class Bench:
    """The data of some problems, and what their outputs are checked against.

    Data stay until the GPU's memory is `_FULL`, so that a job may go from one weight to another and back.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.subjects: dict[tuple, Subject] = {}  # the one used last stands last
        self.inputs: dict[tuple, Any] = {}
        self.expected: dict[tuple, Any] = {}

    def load(self, problem: Problem) -> Subject:
        operator = get_operator(problem.op)
        key = operator.data(problem)
        if key not in self.subjects:
            while self.subjects and _used() > _FULL:
                self._drop(next(iter(self.subjects)))
            self.subjects[key] = operator.subject(problem, self.target)
        self.subjects[key] = self.subjects.pop(key)
        return self.subjects[key]

    def _drop(self, key: tuple) -> None:
        import torch

        self.subjects.pop(key).drop()
        self.inputs = {place: held for place, held in self.inputs.items() if place[0] != key}
        self.expected = {place: held for place, held in self.expected.items() if place[0] != key}
        torch.cuda.empty_cache()

    def given(self, problem: Problem) -> object:
        """The inputs of a problem."""
        place = get_operator(problem.op).data(problem), problem.m
        if place not in self.inputs:
            self.inputs[place] = self.load(problem).inputs(problem.m)
        return self.inputs[place]

    def trial(self, problem: Problem, program: str, params: dict[str, int], budget_ms: float) -> dict[str, Any]:
        """Status, time and spread of one schedule. CUDA errors are raised."""
        import torch

        with records.forced(problem.op, program, params):
            records.changed()
            try:
                return self._trial(problem, budget_ms)
            except torch.cuda.OutOfMemoryError:  # other problems' data are in the way
                for key in list(self.subjects):
                    self._drop(key)
                return self._trial(problem, budget_ms)
            except TerrazzoError as error:
                return {"status": "error", "error": _line(error)}
            finally:
                records.changed()

    def _trial(self, problem: Problem, budget_ms: float) -> dict[str, Any]:
        import torch

        subject, given, m = self.load(problem), self.given(problem), problem.m
        place = get_operator(problem.op).data(problem), m, subject.kind(m)
        if place not in self.expected:
            self.expected[place] = subject.expected(given, m)
        copies, first, second = subject.copies(m), subject.output(m), subject.output(m)
        for y in (first, second):
            subject.launch(given, copies[0], y)
        problems = subject.wrong(first, self.expected[place])
        if not problems and not torch.equal(first, second):
            problems = "two launches gave different bits"
        if problems:
            return {"status": "wrong", "error": problems}
        calls = [partial(subject.launch, given, copy, second) for copy in copies]
        timing = measure.time_calls(calls, budget_ms, m >= PREFILL_M)
        torch.cuda.synchronize()
        if len(copies) == 1 and not torch.equal(first, second):
            return {"status": "wrong", "error": "the timed launches gave other bits than the first one"}
        return {"status": "ok", "us": timing.us, "spread": timing.spread}

    def peer(self, problem: Problem) -> dict[str, Any]:
        """Another implementation of the same problem, cuBLAS for a weight."""
        found = self.load(problem).peer(self.given(problem))
        if found is None:
            return {"status": "error", "error": f"{problem.op} has no peer"}
        name, calls = found
        return {"status": "ok", "name": name, "us": measure.time_calls(calls, PEER_MS, problem.m >= PREFILL_M).us}


def _used() -> float:
    """Share of the GPU's memory that is taken."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


def describe(target: Target) -> dict[str, Any]:
    """The machine as trials name it."""
    from terrazzo.autotune.gemm_bench import header
    from terrazzo.lowering.sources import package_digest

    found = header(target)
    machine = {name: found[name] for name in ("gpu", "sms", "driver", "cuda", "torch", "tilelang", "terrazzo")}
    return machine | {"arch": target.arch, "sources": package_digest()[:16]}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def serve() -> None:
    """Answer requests from stdin until it closes; whatever libraries print goes to stderr."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed job leaves no process on the GPU
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ[records.VARIABLE] = "off"  # the heuristic's schedule is tried as such

    def say(**message: object) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    bench: Bench | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if bench is None:
                bench = _start()
            if message["do"] == "hello":
                say(machine=describe(bench.target))
                continue
            problem = Problem.of(message["op"], message["facts"], message["m"])
            with _gpu_lock():
                say(started=True)
                if message["do"] == "peer":
                    found = bench.peer(problem)
                else:
                    found = bench.trial(problem, message["program"], message["schedule"], message["budget_ms"])
        except TerrazzoError as error:
            found = {"status": "error", "error": _line(error)}
        except Exception as error:  # CUDA errors of any kind: this process has no usable device any more
            say(status="crash", error=_line(error))
            os._exit(1)
        say(**found)
        if found["status"] == "wrong":
            os._exit(0)


def _start() -> Bench:
    from terrazzo.autotune.gemm_bench import require_gpu
    from terrazzo.lowering.targets import Target

    require_gpu()
    return Bench(Target.detect())


def _gpu_lock() -> filelock.FileLock:
    """Held while something is measured: one process of all jobs at a time."""
    import filelock

    folder = cache_root() / "tuning"
    make_folders(folder)
    return filelock.FileLock(folder / f"gpu-{_gpu_id()}.lock")


def _gpu_id() -> str:
    import torch

    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(seen, "uuid", None) or os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
