"""Runs a tuning job: compiles ahead in processes without a GPU, measures on each GPU one at a time, keeps every trial.

The job's own process touches no GPU. Whatever happens to a compiling or measuring process becomes a trial with a
reason; each trial is committed before the next one is counted, so a killed job loses what was in flight and no more.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from terrazzo.autotune import search as searching
from terrazzo.autotune.database import Database, Machine, Problem, Trial, medians
from terrazzo.autotune.isolation import Measurer, Result
from terrazzo.autotune.jobs import Job
from terrazzo.autotune.operators import get_operator
from terrazzo.autotune.proposed import candidates
from terrazzo.lowering.errors import ArgumentError, CompileError, TargetError
from terrazzo.lowering.parallel import CompilePool
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import TARGET_NAMES, Target
from terrazzo.schedules.roofline import Roofline
from terrazzo.schedules.spaces import Candidate

WINDOW = 3
"""Problems that are open at a time: while one is measured, kernels of the next are compiled. With a budget of time all
problems are open, and get `ROUND` schedules in turn, so that each of them has results whenever the job ends."""
ROUND = 2
STEAL = 8
"""Ready schedules from which a GPU takes work on data that another GPU holds."""
MOST_SPILLED = 256
"""Bytes of spills, stores and loads, with which a kernel is measured: its time says what they cost."""
_TICK_S = 0.5
_CONFIRMING = 0.25  # most of a budget of time that confirmation may take


class Compiler(Protocol):
    """What the runner needs of a `CompilePool`."""

    def submit(self, request: KernelRequest) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Progress:
    """Where a job stands after an event.

    Attributes:
        trial: the one that was just kept, None when a problem was opened or closed.
        done, total: trials of the job, `total` an upper bound.
        best_us, heuristic_us: of the trial's problem so far.
        left_s: seconds of the budget, None without one.
    """

    problem: Problem
    trial: Trial | None
    done: int
    total: int
    best_us: float | None
    heuristic_us: float | None
    left_s: float | None


@dataclass
class Summary:
    """What a job did.

    Attributes:
        trials: measured or failed in this run. reused: found in the database. lost: asked for and not finished.
        restarts: measuring processes that were replaced. seconds: of the run.
        ended: "done", "budget" or "interrupted".
        best: problem -> (best microseconds, the heuristic's), of those with a time.
    """

    job: str
    trials: int = 0
    reused: int = 0
    lost: int = 0
    restarts: int = 0
    seconds: float = 0.0
    ended: str = "done"
    statuses: dict[str, int] = field(default_factory=dict)
    best: dict[Problem, tuple[float, float | None]] = field(default_factory=dict)


@dataclass
class _Item:
    """One schedule on its way through the job."""

    open: _Open
    index: int
    request: KernelRequest
    role: str


@dataclass
class _Open:
    """One problem that is being tuned."""

    problem: Problem
    search: searching.Search
    roof: Roofline
    heuristic_us: float | None = None
    confirming: int = 0
    confirmed: bool = False
    peer: bool = False
    beside: set[KernelRequest] = field(default_factory=set)

    @property
    def candidates(self) -> Sequence[Candidate]:
        return self.search.candidates


def resolve(job: Job, machine: Machine | None) -> Target:
    """The target of a job. Without a machine (a dry run) "auto" is the GPU that is here, else an H200.

    Raises:
        ArgumentError: the job names another GPU than the one that is there.
    """
    if machine is None:
        try:
            return Target.parse(None if job.target == "auto" else job.target)
        except TargetError:
            if job.target != "auto":
                raise
            return Target.parse("sm_90a")
    named = Target.parse(machine.arch if job.target == "auto" else job.target)
    if named.arch != machine.arch:
        constraint = f"cannot be measured here: this GPU is {machine.gpu} ({machine.arch})"
        raise ArgumentError("target", job.target, constraint, "leave it 'auto', or use --dry-run")
    same = [target for target in map(Target.parse, _device_names(machine.arch)) if target.name == machine.gpu]
    base = same[0] if same else named
    scale = machine.sms / base.sms
    rates = tuple((dtype, rate * scale) for dtype, rate in base.tensor_tflops)
    return replace(base, name=machine.gpu, sms=machine.sms, tensor_tflops=rates)


def _device_names(arch: str) -> list[str]:
    return [name for name in TARGET_NAMES if name.startswith("nvidia/") and Target.parse(name).arch == arch]


def preview(job: Job) -> tuple[Target, list[dict[str, Any]]]:
    """What a job would do, without a GPU: for each problem the counts, the predicted times and the bound."""
    target, rows = resolve(job, None), []
    for problem in job.problems():
        found = candidates(problem, target, job)
        roof = get_operator(problem.op).roofline(problem, target)
        fastest = min(found, key=lambda it: it.us)
        programs = {program: sum(it.program == program for it in found) for program in {it.program for it in found}}
        search = _limits(job)
        rows.append(
            {
                "op": problem.op,
                "what": problem.what,
                "m": problem.m,
                "schedules": len(found),
                "trials": min(len(found), search.trials or len(found)),
                "programs": dict(sorted(programs.items())),
                "heuristic_us": round(found[0].us, 2),
                "predicted_best_us": round(fastest.us, 2),
                "bound": roof.bound,
                "bound_us": round(roof.us, 2),
            }
        )
    return target, rows


def _limits(job: Job) -> searching.Limits:
    trials = job.trials or (searching.TOP_K if job.strategy == "top-k" else 0)
    return searching.Limits(trials, 0 if job.strategy == "exhaustive" else job.patience)


class Runner:
    """One run of a job.

    Args:
        database: every trial goes there as soon as it is known.
        measurers: one for each GPU.
        compiler: makes a pool, given the function it reports to; None takes `CompilePool`.
        resume: take trials of the same schedule, problem, GPU and versions from the database instead of repeating them.
        report: called after each event, in this thread.
        workers: compiling processes; None for one for each CPU.
        problems: instead of those that the job names.

    Raises:
        ToolchainError: nothing can be measured here. ArgumentError: the job does not fit this machine.
    """

    def __init__(
        self,
        job: Job,
        database: Database,
        measurers: Sequence[Measurer],
        compiler: Callable[[Callable[[KernelRequest, Path | CompileError], None]], Compiler] | None = None,
        resume: bool = False,
        report: Callable[[Progress], None] | None = None,
        workers: int | None = None,
        problems: Sequence[Problem] | None = None,
    ) -> None:
        self.job, self.database, self.measurers, self.resume = job, database, list(measurers), resume
        self.report = report or (lambda progress: None)
        try:
            self.machine = self._greet()
            self.target = resolve(job, self.machine)
            self.problems = job.problems() if problems is None else list(problems)
            self.plan = searching.Plan(job.strategy, _limits(job), job.seed)
        except BaseException:
            self._let_go()
            raise
        self.window = len(self.problems) if job.budget_s else WINDOW
        self.events: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.compiler = (compiler or (lambda done: CompilePool(done, workers)))(
            lambda request, outcome: self.events.put(("compiled", request, outcome))
        )
        self.ahead = 2 * (workers or len(os.sched_getaffinity(0))) + 2 * len(self.measurers)
        self.summary = Summary(job=f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}")
        self.waiting = list(self.problems)
        self.opened: list[_Open] = []
        self.compiling: dict[KernelRequest, list[_Item]] = {}
        self.outcomes: dict[KernelRequest, Path | CompileError] = {}
        self.ready: list[_Item] = []
        self.busy: dict[int, _Item] = {}
        self.inboxes: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in self.measurers]
        self.last: dict[int, tuple] = {}
        self.holders: dict[tuple, int] = {}  # data -> the GPU that loaded them first
        self.finished_total = 0
        self.measuring_s, self.closing = 0.0, False
        self.start = time.monotonic()

    def _greet(self) -> Machine:
        """Start the measuring processes; the machine that all of them are on."""
        for measurer in self.measurers:
            measurer.begin()  # all at once: importing torch takes a while
        machine, *others = [measurer.hello() for measurer in self.measurers]
        for other in others:
            if (other.gpu, other.sms) != (machine.gpu, machine.sms):
                seen = f"{machine.gpu} and {other.gpu}"
                raise ArgumentError("gpus", seen, "a job measures on GPUs of one kind", "start a job for each kind")
        return machine

    def _let_go(self) -> None:
        """End the measuring processes, which a process that goes on after its job would keep."""
        for measurer in self.measurers:
            measurer.close()

    def run(self) -> Summary:
        """Until all is done or the budget is spent. The first Ctrl-C (or SIGTERM) lets the trials in flight finish, the
        second does not wait for them; either way everything that was measured is in the database."""
        threads = [threading.Thread(target=self._serve, args=(at,), daemon=True) for at in range(len(self.measurers))]
        for thread in threads:
            thread.start()
        try:
            with _interrupts(self._interrupt):
                while self._step():
                    continue
        except KeyboardInterrupt:
            self.summary.ended = "interrupted"
        finally:
            self.compiler.close()
            for measurer, inbox in zip(self.measurers, self.inboxes):
                inbox.put(None)
                measurer.kill()
            for thread in threads:
                thread.join(timeout=5.0)
            if not any(thread.is_alive() for thread in threads):
                self._let_go()
            self.summary.lost = len(self.busy)
            self.summary.restarts = sum(max(0, measurer.started - 1) for measurer in self.measurers)
            self.summary.seconds = time.monotonic() - self.start
        return self.summary

    def _interrupt(self) -> None:
        if self.summary.ended == "interrupted":
            raise KeyboardInterrupt
        self.summary.ended = "interrupted"

    @property
    def left_s(self) -> float | None:
        """Seconds of the budget."""
        return self.start + self.job.budget_s - time.monotonic() if self.job.budget_s else None

    @property
    def spent(self) -> bool:
        """Whether the budget allows nothing new."""
        in_flight = len(self.busy) + len(self.ready) + sum(map(len, self.compiling.values()))
        trials = self.job.budget_trials and self.summary.trials + in_flight >= self.job.budget_trials
        return bool(trials) or (self.left_s is not None and self.left_s <= 0)

    def _step(self) -> bool:
        """Hand out work, wait for one event; False when nothing is left to do."""
        stopped = self.summary.ended == "interrupted"
        if stopped or (self.left_s is not None and self.left_s <= 0):
            self.summary.ended = "interrupted" if stopped else "budget"
            self.ready.clear()
            self.compiling.clear()
        else:
            if not self.closing and self._late():
                self._close()
            self._fill()
            self._feed()
        if not (self.busy or self.ready or self.compiling):
            if (self.waiting or self.opened) and not stopped:
                self.summary.ended = "budget"
            return False
        try:
            kind, *rest = self.events.get(timeout=_TICK_S)
        except queue.Empty:
            return True
        if kind == "compiled":
            self._compiled(*rest)
        else:
            self._measured(*rest)
        return True

    def _late(self) -> bool:
        """Whether what is left of a budget of time is needed to confirm the best schedules."""
        if self.left_s is None or not self.job.confirm:
            return False
        each = self.measuring_s / max(1, self.summary.trials)
        found = sum(it.best is not None for it in (one.search for one in self.opened))
        need = found * (self.job.confirm + 1) * each / len(self.measurers)
        return self.left_s < min(1.2 * need, _CONFIRMING * self.job.budget_s)

    def _close(self) -> None:
        """End all searches; what is neither confirmed nor on a GPU is given up."""
        self.closing = True
        busy = {(id(it.open), it.index) for it in self.busy.values()}
        if self.waiting:
            self.summary.ended = "budget"
        self.waiting.clear()
        self.compiling.clear()
        self.ready = [it for it in self.ready if it.role == "confirm"]
        for one in self.opened:
            if not one.search.exhausted or one.search.out:
                self.summary.ended = "budget"
            one.search.left.clear()
            one.search.out = {index for index in one.search.out if (id(one), index) in busy}

    def _fill(self) -> None:
        """Ask the searches for as much as is to be compiled ahead; open and close problems."""
        while True:
            changed = self._turn_over()
            if self.spent or len(self.ready) + sum(map(len, self.compiling.values())) >= self.ahead:
                return
            turn = self.opened
            if self.job.budget_s:  # the fewest rounds first; sorted() keeps the order of equal ones
                turn = sorted(self.opened, key=lambda one: one.search.spent // ROUND)
            item = next(filter(None, (self._ask(one) for one in turn)), None)
            if item is not None:
                self._submit(item)
            elif not changed:
                return

    def _turn_over(self) -> bool:
        """Close problems that are done, open the next ones; whether there was one."""
        before = len(self.opened), len(self.waiting)
        for one in list(self.opened):
            if self.spent and not one.search.exhausted:
                one.search.left.clear()
                self.summary.ended = "budget"
            self._advance(one)
        while self.waiting and len(self.opened) < self.window and not self.spent:
            if self.job.budget_s and any(one.search.spent < ROUND and not one.search.exhausted for one in self.opened):
                break  # its first round is not handed out yet
            self._open(self.waiting.pop(0))
        return before != (len(self.opened), len(self.waiting))

    def _open(self, problem: Problem) -> None:
        operator = get_operator(problem.op)
        search = self.plan.search(problem, candidates(problem, self.target, self.job))
        one = _Open(problem, search, operator.roofline(problem, self.target))
        if self.resume:
            self._recall(one)
        self.opened.append(one)
        for request in operator.beside(problem, self.target):
            if request not in self.outcomes:
                one.beside.add(request)
                self.compiling.setdefault(request, [])
                self.compiler.submit(request)
        self._tell(one, None)

    def _recall(self, one: _Open) -> None:
        """Take what the database knows of the problem under the same versions."""
        known = self.database.trials(gpu=self.machine.gpu, op=one.problem.op, facts=one.problem.text, m=one.problem.m)
        same = [it for it in known if it.machine == self.machine]
        times = {(it.program, it.params): it.us for it in medians(same)}
        tried = {(it.program, it.params) for it in same}
        confirmed = {(it.program, it.params) for it in same if it.role == "confirm"}
        for index, candidate in enumerate(one.candidates):
            place = candidate.program, tuple(sorted(candidate.params.items()))
            if place in tried:
                one.search.tell(index, times.get(place))
                self.summary.reused += 1
                if index == 0:
                    one.heuristic_us = times.get(place)
        one.confirmed = bool(confirmed) and one.search.done
        one.peer = any(problem == one.problem for problem, _ in self.database.peers(self.machine.gpu))
        if one.search.best is not None:
            self.summary.best[one.problem] = (one.search.best, one.heuristic_us)

    def _ask(self, one: _Open) -> _Item | None:
        index = one.search.ask()
        if index is None:
            return None
        candidate = one.candidates[index]
        request = get_operator(one.problem.op).request(one.problem, candidate.program, candidate.params, self.target)
        return _Item(one, index, request, "search" if index else "heuristic")

    def _submit(self, item: _Item) -> None:
        if item.request in self.outcomes:
            self._compiled_item(item, self.outcomes[item.request])
        elif item.request in self.compiling:
            self.compiling[item.request].append(item)
        else:
            self.compiling[item.request] = [item]
            self.compiler.submit(item.request)

    def _advance(self, one: _Open) -> None:
        """Measure the best schedules once more when a search is over, and close the problem after that."""
        if not one.search.done:
            return
        if not one.confirmed:
            one.confirmed = True
            timed = {index: us for index, us in one.search.results.items() if us is not None}
            best = sorted(timed, key=timed.__getitem__)[: self.job.confirm]
            again = ([0] * (0 in timed and 0 not in best) + best) if self.job.confirm and len(timed) > 1 else []
            for index in again:
                candidate = one.candidates[index]
                operator = get_operator(one.problem.op)
                request = operator.request(one.problem, candidate.program, candidate.params, self.target)
                one.confirming += 1
                self._submit(_Item(one, index, request, "confirm"))
        if not one.confirming:
            self.opened.remove(one)
            self.finished_total += len(one.search.results)
            self._tell(one, None)

    def _compiled(self, request: KernelRequest, outcome: Path | CompileError) -> None:
        self.outcomes[request] = outcome
        for one in self.opened:
            one.beside.discard(request)
        for item in self.compiling.pop(request, ()):
            self._compiled_item(item, outcome)

    def _compiled_item(self, item: _Item, outcome: Path | CompileError) -> None:
        if isinstance(outcome, CompileError):
            self._keep(item, Result("compile", error=" ".join(str(outcome).split())[:500]))
            return
        spills = _spills(outcome)
        if spills > MOST_SPILLED:
            self._keep(item, Result("spills", error=f"{spills} bytes of registers spill"))
        else:
            self.ready.append(item)

    def _feed(self) -> None:
        """Give every idle GPU an item: of the data that it used last, else of data that it holds or nobody does."""
        for at, inbox in enumerate(self.inboxes):
            able = [item for item in self.ready if not item.open.beside]
            if at in self.busy or not able:
                continue
            item = next((it for it in able if _data(it) == self.last.get(at)), None)
            item = item or next((it for it in able if self.holders.get(_data(it), at) == at), None)
            if item is None and len(able) < STEAL:
                continue  # loading the data once more would take longer than waiting
            item = item or able[-1]
            self.ready.remove(item)
            self.busy[at], self.last[at] = item, _data(item)
            self.holders.setdefault(_data(item), at)
            inbox.put(item)

    def _serve(self, at: int) -> None:
        """The thread of one GPU."""
        measurer = self.measurers[at]
        while True:
            item = self.inboxes[at].get()
            if item is None:
                return
            candidate = item.open.candidates[item.index]
            begun = time.monotonic()
            result = measurer.trial(item.open.problem, candidate.program, candidate.params, self.job.measure_ms)
            seconds = time.monotonic() - begun
            peer = None
            if self.job.peers and result.status == "ok" and not item.open.peer:
                item.open.peer = True
                peer = measurer.peer(item.open.problem)
            self.events.put(("measured", at, item, result, peer, seconds))

    def _measured(self, at: int, item: _Item, result: Result, peer: Result | None, seconds: float) -> None:
        del self.busy[at]
        self.measuring_s += seconds
        self._keep(item, result)
        if peer is not None and peer.status == "ok":
            uid = f"{self.summary.job}:peer:{item.open.problem}"
            self.database.add_peer(item.open.problem, self.machine.gpu, peer.name, peer.us, self.summary.job, uid)

    def _keep(self, item: _Item, result: Result) -> None:
        """A trial is over: into the database, to the search, to whoever watches."""
        one, candidate, summary = item.open, item.open.candidates[item.index], self.summary
        summary.trials += 1
        summary.statuses[result.status] = summary.statuses.get(result.status, 0) + 1
        trial = Trial(
            one.problem,
            candidate.program,
            tuple(sorted(candidate.params.items())),
            self.machine,
            result.status,
            result.us,
            result.spread,
            round(candidate.us, 3),
            result.error,
            item.role,
            one.roof.bound,
            round(one.roof.us, 3),
            summary.job,
            f"{summary.job}:{summary.trials}",
        )
        self.database.add([trial])
        if item.role == "confirm":
            one.confirming -= 1
            if result.us is not None:
                before = one.search.results.get(item.index)
                one.search.results[item.index] = result.us if before is None else (before + result.us) / 2
        else:
            one.search.tell(item.index, result.us)
        timed = {index: us for index, us in one.search.results.items() if us is not None}
        one.heuristic_us = timed.get(0)
        if timed:
            summary.best[one.problem] = (min(timed.values()), one.heuristic_us)
        self._tell(one, trial)

    def _tell(self, one: _Open, trial: Trial | None) -> None:
        left = self.left_s
        best = self.summary.best.get(one.problem, (None, None))[0]
        total = self.finished_total + sum(it.search.total for it in self.opened)
        opened = [it.search.total for it in self.opened]
        total += round(len(self.waiting) * (sum(opened) / len(opened) if opened else 0.0))  # those not seen yet
        if self.job.budget_trials:
            total = min(total, self.job.budget_trials)
        done = self.summary.trials
        self.report(Progress(one.problem, trial, done, max(total, done), best, one.heuristic_us, left))


def _data(item: _Item) -> tuple:
    return get_operator(item.open.problem.op).data(item.open.problem)


def _spills(folder: Path) -> int:
    """Bytes that a compiled kernel spills; 0 where there is no report."""
    from terrazzo.lowering.report import KernelReport

    path = folder / "report.json"
    if not path.is_file():
        return 0
    report = KernelReport.read(path)
    return (report.spill_stores or 0) + (report.spill_loads or 0)


@contextmanager
def _interrupts(call: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM call a function; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: call()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
