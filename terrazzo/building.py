"""Compile many kernels with a progress bar, and say what came out: used by `terrazzo compile`, `demo` and `bench`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from terrazzo.console import console, print_table
from terrazzo.lowering.errors import CompileError

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest


def compile_with_progress(
    requests: Sequence[KernelRequest], workers: int | None = None, quiet: bool = False
) -> list[Path | CompileError]:
    """`compile_many` with a bar on stderr (one line in the end where stderr is no terminal)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from terrazzo.lowering.parallel import compile_many

    start, total, terminal = time.perf_counter(), len(set(requests)), sys.stderr.isatty()
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last = TextColumn("{task.description}")
    with Progress(*columns, last, console=console(stderr=True), disable=quiet or not terminal, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(done: int, total: int, request: KernelRequest, outcome: Path | CompileError) -> None:
            failed = " failed" if isinstance(outcome, CompileError) else ""
            bar.update(task, completed=done, total=total, description=f"{request.name}{failed}")

        outcomes = compile_many(requests, workers=workers, progress=show)
    if not quiet:
        click.echo(f"{total} kernels in {time.perf_counter() - start:.1f} s", err=True)
    return outcomes


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


def _shared(params: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parameters that have one value in all kernels (none if there is only one kernel)."""
    if len(params) < 2:
        return {}
    first = params[0]
    return {key: value for key, value in first.items() if all(other.get(key, key) == value for other in params)}
