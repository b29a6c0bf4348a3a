"""Compile many kernels with a progress bar, and say what came out: used by `terrazzo compile`, `demo` and `bench`."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from terrazzo.console import console, print_table
from terrazzo.lowering.errors import CompileError

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest

LINE_S = 10.0
"""Between two lines that say how far it is, where there is no terminal."""


def compile_with_progress(
    requests: Sequence[KernelRequest], workers: int | None = None, quiet: bool = False
) -> list[Path | CompileError]:
    """`compile_many` with a bar on stderr, or lines where stderr is no terminal."""
    return Build(requests, workers, quiet).run()


class Build:
    """Many kernels, compiled at once.

    Args:
        requests: equal ones are compiled once. workers: processes, by default one for each CPU. quiet: print nothing.

    Attributes:
        workers: processes. cached: kernels that were there before. seconds, cpu_seconds: of the last `run`, the latter
            of all processes.
    """

    def __init__(self, requests: Sequence[KernelRequest], workers: int | None = None, quiet: bool = False) -> None:
        self.requests, self.quiet = list(requests), quiet
        self.workers = workers or len(os.sched_getaffinity(0))
        self.cached, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.total = len(set(self.requests))

    def run(self) -> list[Path | CompileError]:
        """Compile, those that take longest first, so that no process is left with a long one in the end.

        On Ctrl-C, or whatever else ends it, nothing is left of kernels that were not finished.
        """
        from terrazzo.lowering.cache import sweep
        from terrazzo.lowering.parallel import compile_many

        start, before = time.perf_counter(), _children_seconds()
        found, costs = self._sort_out()
        cold = sorted(costs, key=lambda it: -costs[it])
        self.cached = len(found)
        try:
            with _Progress(costs, self.workers, self.quiet) as progress:
                found |= dict(zip(cold, compile_many(cold, self.workers, progress=progress)))
        except BaseException:
            sweep()
            raise
        self.seconds, self.cpu_seconds = time.perf_counter() - start, _children_seconds() - before
        if not self.quiet:
            made = f"{len(cold)} compiled, {self.cached} from the cache" if self.cached else "compiled"
            with_ = f"with {self.workers} processes, {self.cpu_seconds:.0f} s of CPU"
            click.echo(f"{self.total} kernels ({made}) in {self.seconds:.1f} s {with_}", err=True)
        return [found[request] for request in self.requests]

    def _sort_out(self) -> tuple[dict[KernelRequest, Path | CompileError], dict[KernelRequest, float]]:
        """Folders of kernels that are in the cache, and seconds that each other one will take about."""
        from terrazzo.lowering.kernels import find_compiled
        from terrazzo.ops.model_requests import seconds

        looked = {request: find_compiled(request) for request in dict.fromkeys(self.requests)}
        found = {request: folder for request, folder in looked.items() if folder is not None}
        return found, {request: seconds(request) for request in looked if request not in found}

    def facts(self) -> dict[str, Any]:
        """How it went, as plain data."""
        return {
            "total": self.total,
            "cached": self.cached,
            "workers": self.workers,
            "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 1),
        }

    def expected(self) -> dict[str, Any]:
        """How long `run` would take about, on idle cores, as plain data."""
        from terrazzo.ops.model_requests import STARTING_S

        found, costs = self._sort_out()
        wall = max(sum(costs.values()) / self.workers, max(costs.values(), default=0.0)) + STARTING_S * bool(costs)
        return {"total": self.total, "cached": len(found), "workers": self.workers, "minutes": round(wall / 60, 2)}


class _Progress:
    """Called after each kernel: a bar with the time left on a terminal, else a line every LINE_S."""

    def __init__(self, costs: dict[KernelRequest, float], workers: int, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.costs, self.workers, self.live = costs, workers, sys.stderr.isatty() and not quiet
        self.quiet, self.total = quiet, len(costs)
        columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        last = TextColumn("{task.fields[left]}  {task.description}")
        self.bar = Progress(*columns, last, console=console(stderr=True), disable=not self.live, transient=True)
        self.task = self.bar.add_task("", total=self.total, left="")
        self.start, self.done, self.failed, self.name = time.perf_counter(), 0, 0, ""
        self.all = self.left = sum(costs.values())
        self.ended = threading.Event()
        self.lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> _Progress:
        self.bar.start()
        if not (self.live or self.quiet):
            self.lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.bar.stop()

    def __call__(self, done: int, total: int, request: KernelRequest, outcome: Path | CompileError) -> None:
        self.done, self.name = done, request.name
        self.left -= self.costs[request]
        failed = isinstance(outcome, CompileError)
        self.failed += failed
        name = f"{request.name}{' failed' if failed else ''}"
        self.bar.update(self.task, completed=done, description=name, left=self._time_left())

    def _time_left(self) -> str:
        """By the speed so far, "about 2:30 left"; before the first kernel by what kernels take, until that is over."""
        worked, elapsed = self.all - self.left, time.perf_counter() - self.start
        left = self.left * elapsed / worked if worked and elapsed else self.left * 2 / self.workers - elapsed
        return f"about {_clock(left)} left" if self.done < self.total and left > 0 else ""

    def _print_lines(self) -> None:
        while not self.ended.wait(LINE_S):
            failed = f", {self.failed} failed" if self.failed else ""
            passed = _clock(time.perf_counter() - self.start)
            name = f": {self.name}" if self.name else ""
            left = f", {left}" if (left := self._time_left()) else ""
            click.echo(f"[{self.done}/{self.total}] {passed}{left}{failed}{name}", err=True)


def _clock(seconds: float) -> str:
    """75 -> "1:15"."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _children_seconds() -> float:
    """CPU time of processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def describe(request: KernelRequest, outcome: Path | CompileError) -> dict[str, Any]:
    """One compiled kernel as plain data: its request, resources and tensor-core instructions, or the error."""
    from terrazzo.lowering.report import KernelReport

    row = {
        "kernel": request.name,
        "target": request.target.arch,
        "params": dict(request.params),
        "identity": request.identity(),
    }
    if isinstance(outcome, CompileError):
        return row | {"error": str(outcome)}
    report = KernelReport.read(outcome / "report.json")
    return row | {
        "registers": report.registers,
        "smem_static": report.smem_static,
        "smem_dynamic": report.smem_dynamic,
        "spill_stores": report.spill_stores,
        "spill_loads": report.spill_loads,
        "tensor_instructions": {op: report.instructions[op] for op in report.tensor_instructions},
        "note": report.note,
    }


def print_kernels(rows: Sequence[dict[str, Any]]) -> None:
    """The table of compiled kernels; parameters that all kernels share stand once, above it."""
    if not rows:
        return
    shared = _shared([row["params"] for row in rows])
    targets = list(dict.fromkeys(row["target"] for row in rows))
    common = [f"target={targets[0]}"] * (len(targets) == 1) + [f"{key}={value}" for key, value in shared.items()]
    console().print("all: " + " ".join(common), markup=False)
    columns = ("kernel", "registers", "shared B", "spill B", "tensor instructions")
    cells, below = [], []
    for row in rows:
        name = " ".join([row["kernel"], *([row["target"]] if len(targets) > 1 else [])])
        below.append(" ".join(f"{key}={value}" for key, value in row["params"].items() if key not in shared))
        if "error" in row:
            why = row["error"].split(f" for {row['target']}: ", 1)[-1].splitlines()[0]
            cells.append((name, None, None, None, "FAILED"))
            below[-1] = f"{below[-1]}\n{why}".strip()
            continue
        found = [f"{op} x{count}" for op, count in row["tensor_instructions"].items()] or [row["note"] or "none"]
        smem = row["smem_static"] + row["smem_dynamic"] if row["smem_dynamic"] is not None else None
        cells.append((name, row["registers"], smem, row["spill_stores"] + row["spill_loads"], ", ".join(found)))
    print_table(columns, cells, below)


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """The table of many kernels: a row for each name; those that failed or spill registers by themselves below."""
    names: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        names.setdefault(row["kernel"], []).append(row)
    cells = []
    for name, same in names.items():
        made = [row for row in same if "error" not in row]
        most = lambda field, made=made: max((row[field] or 0 for row in made), default=None)
        spilled = sum(row["spill_stores"] + row["spill_loads"] > 0 for row in made)
        shared = max(((row["smem_static"] + (row["smem_dynamic"] or 0)) for row in made), default=None)
        found = sorted({op for row in made for op in row["tensor_instructions"]})
        cells.append((name, len(same), len(same) - len(made), most("registers"), shared, spilled, ", ".join(found[:2])))
    columns = ("kernels", "count", "failed", "registers", "shared B", "spilling", "tensor instructions")
    print_table(columns, cells)
    odd = [row for row in rows if "error" in row or row["spill_stores"] + row["spill_loads"] > 0]
    if odd:
        click.echo()
        print_kernels(odd)


def _shared(params: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parameters that have one value in all kernels (none if there is only one kernel)."""
    if len(params) < 2:
        return {}
    first = params[0]
    return {key: value for key, value in first.items() if all(other.get(key, key) == value for other in params)}
