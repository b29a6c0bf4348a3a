"""`with terrazzo.autotune.enabled():` tunes a problem the first time an operator meets it, and keeps the result."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from terrazzo.autotune import database as store
from terrazzo.autotune.database import Database, Problem
from terrazzo.autotune.isolation import Measurer
from terrazzo.autotune.jobs import Job, seconds
from terrazzo.autotune.operators import OPERATORS
from terrazzo.autotune.runner import Runner
from terrazzo.lowering.errors import CaptureError, TargetError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import records
from terrazzo.schedules.records import Choice

_tuners: weakref.WeakSet[FirstUse] = weakref.WeakSet()


def _forked() -> None:
    """In a forked process: a lock that another thread of the parent's held would never be given back."""
    for tuner in _tuners:
        tuner.lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


class FirstUse:
    """Answers `records.pick` by a short job for the problem's bucket of M; each bucket of a weight is tuned once a GPU.

    Args:
        database: where trials are kept; what it holds for this GPU and these versions is used before anything is tuned.
        budget: seconds for each problem. trials: schedules for each problem.
        strategy: of the job. runner: makes one, or None where no GPU of the target is here; for tests.
    """

    def __init__(
        self,
        database: Path | str | None,
        budget: float,
        trials: int,
        strategy: str,
        runner: Callable[[Job, Database, Problem, Target], Any] | None = None,
    ) -> None:
        self.path = None if database is None else Path(database).absolute()  # it is opened again after a chdir, too
        self.lock = threading.RLock()
        _tuners.add(self)
        self.known: dict[tuple[Problem, str, int], Choice | None] = {}  # by problem, GPU and its number of SMs
        self.job = Job(ops=("w4a16",), strategy=strategy, trials=trials, budget_s=budget, peers=False)
        self.runner = runner or _runner

    def __call__(self, op: str, facts: Mapping[str, Any], m: int, target: Target) -> Choice | None:
        """The best schedule that is known or found for a GPU; None (the heuristic) where nothing could be measured, or
        the target is none of the GPUs here.

        Raises:
            CaptureError: a CUDA graph is being captured, in which nothing can be measured.
        """
        if op not in OPERATORS:
            return None
        problem = Problem.of(op, facts, records.bucket(m))
        place = problem, target.name, target.sms
        with self.lock:
            if place not in self.known:
                self.known[place] = self._stored(problem, target) or self._tune(problem, target)
            return self.known[place]

    def _stored(self, problem: Problem, target: Target) -> Choice | None:
        """What the database holds, as a table of one GPU would answer."""
        with Database(self.path) as trials:
            same = trials.trials(op=problem.op, facts=problem.text, gpu=target.name, sms=target.sms)
        found = records.Table(store.table(store.best(same), target.name, target.sms), "the trial database")
        return found.find(problem.op, dict(problem.facts), problem.m)[0]

    def _tune(self, problem: Problem, target: Target) -> Choice | None:
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{problem} is not tuned yet, and a CUDA graph is being captured; call the operator once before"
            )
        with Database(self.path) as trials:
            runner = self.runner(self.job, trials, problem, target)
            if runner is not None and runner.run().ended == "interrupted":
                raise KeyboardInterrupt
        return self._stored(problem, target) if runner is not None else None


def _runner(job: Job, database: Database, problem: Problem, target: Target) -> Runner | None:
    index = _device(target)
    if index is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[index] if visible else str(index)
    return Runner(job, database, [Measurer(device)], resume=True, problems=[problem])


def _device(target: Target) -> int | None:
    """Index of the CUDA device that a target describes, the current one if it does; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    current = torch.cuda.current_device()
    for index in sorted(range(torch.cuda.device_count()), key=lambda index: index != current):
        with suppress(TargetError):  # a GPU that is not supported
            here = Target.detect(index)
            if (here.arch, here.name, here.sms) == (target.arch, target.name, target.sms):
                return index
    return None


@contextmanager
def enabled(
    *,
    budget: str | float = "2m",
    trials: int = 24,
    strategy: str = "top-k",
    database: Path | str | None = None,
) -> Iterator[None]:
    """Inside, an operator that meets a weight and a bucket of M without a tuned record measures schedules first.

    The work happens in other processes on the GPU that is asked for, the current one among equal ones. So the first
    call takes up to `budget`; later calls, also those after the block, use what was found. A target that is none of the
    GPUs here is not tuned. Off by default; M is tuned at its bucket's upper end (8, 16, 32, ...).

    Args:
        budget: time for each problem, "90s", "2m"; a number is minutes. trials: schedules for each problem, at most.
        strategy: see autotune/search.py; "learned" needs the extra `tune`.
        database: trial database; None takes the one beside the kernel cache.

    Raises:
        ArgumentError: a budget or strategy that is none. CaptureError: from an operator's first call in graph capture.
        ToolchainError: from an operator's first call, where nothing can be compiled or measured.
    """
    tuner = FirstUse(database, seconds(budget), trials, strategy)
    try:
        with records.tuning(tuner):
            yield
    finally:
        keep(tuner)


def keep(tuner: FirstUse) -> None:
    """Let operators go on using what a tuner found."""
    for gpu, sms in dict.fromkeys((gpu, sms) for (_, gpu, sms), choice in tuner.known.items() if choice):
        with Database(tuner.path) as trials:
            every = store.best(trials.trials(gpu=gpu, sms=sms))
        found = [it for it in every if tuner.known.get((it.trial.problem, gpu, sms))]
        records.use(records.Table(store.table(found, gpu, sms), "tuned on first use"))
