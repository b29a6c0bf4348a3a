"""What the benchmark programs of linear layers share: arguments, progress, the result file, the summary."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report


@dataclass(frozen=True)
class Program:
    """One benchmark program.

    Attributes:
        op: operator, the result file's name. doc: the module's docstring.
        models, ms, quick_models, quick_ms: what runs by default, and with --quick.
        group: default input channels for each scale.
        extend: adds the program's own arguments.
        file: what the result file's name begins with, if not the operator's.
    """

    op: str
    doc: str
    models: tuple[str, ...]
    ms: tuple[int, ...]
    quick_models: tuple[str, ...]
    quick_ms: tuple[int, ...]
    group: int
    extend: Callable[[argparse.ArgumentParser], None]
    file: str = ""

    @property
    def results(self) -> str:
        return self.file or self.op

    @property
    def name(self) -> str:
        return f"benchmarks.{self.op}"


def arguments(program: Program, argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {program.name}", description=program.doc.splitlines()[0])
    parser.add_argument("--models", help="comma-separated names of schedules/models.py")
    parser.add_argument("--m", help="comma-separated numbers of tokens")
    parser.add_argument("--quick", action="store_true", help="one model, a few sizes of M")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--group", type=int, default=program.group)
    parser.add_argument("--no-peers", action="store_true", help="only cuBLAS")
    parser.add_argument("--budget-ms", type=float, default=15.0, help="GPU time of one measurement")
    parser.add_argument(
        "--out", type=Path, help=f"file to write; default benchmarks/results/{program.results}_<gpu>.json"
    )
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels for this GPU and stop")
    program.extend(parser)
    options = parser.parse_args(argv)
    models, ms = (program.quick_models, program.quick_ms) if options.quick else (program.models, program.ms)
    options.models = tuple(options.models.split(",")) if options.models else models
    try:
        given = [int(m) for m in options.m.split(",")] if options.m else ms
    except ValueError:
        parser.error(f"--m {options.m}: write numbers of tokens as 1,16,256")
    options.m = tuple(dict.fromkeys(given))
    if min(options.m) < 1:
        parser.error(f"--m {options.m}: every M must be at least 1")
    return options


def main(program: Program, measure: Callable[..., dict[str, Any]], options: argparse.Namespace) -> int:
    """Run, with one line on stderr and exit code 2 for bad input."""
    return report.guarded(program.name, lambda: run(program, measure, options))


def run(program: Program, measure: Callable[..., dict[str, Any]], options: argparse.Namespace) -> int:
    """Measure, print, write.

    Args:
        measure: called with problems, numbers of tokens, on_row and on_shape; returns the result.
    """
    from terrazzo.schedules.models import shapes

    start = time.perf_counter()

    def target_file(result: dict[str, Any]) -> Path | None:
        default = None if options.quick else report.RESULTS / report.file_name(program.results, result["gpu"])
        return options.out or default

    write = lambda result: report.write(result, target_file(result), start)
    result = measure(shapes(options.models), options.m, on_row=show, on_shape=write)
    for name, reason in result["peers_missing"].items():
        print(f"peer {name}: not measured, {reason}")
    for line in report.failures(result):
        print(f"FAILED {line}")
    print()
    for what, goal, reached, verdict in report.goals_table(result):
        print(f"{what:68} {goal:>8} {reached:>8}  {verdict}")
    if target_file(result) is not None:
        print(f"\n{target_file(result)}: {len(result['rows'])} rows in {result['seconds']:.0f} s")
    return 1 if report.failures(result) else 0


def compile_all(requests: Sequence[Any]) -> Sequence[Any]:
    """`compile_many` with lines that say how many kernels it compiles, and how long it took."""
    from terrazzo.lowering.kernels import is_ready
    from terrazzo.lowering.parallel import compile_many

    start, distinct = time.perf_counter(), list(dict.fromkeys(requests))
    print(f"{len(distinct)} kernels, {sum(not is_ready(r) for r in distinct)} of them to compile", flush=True)
    outcomes = compile_many(requests)
    print(f"ready in {time.perf_counter() - start:.1f} s", flush=True)
    return outcomes


def compiling(options: argparse.Namespace) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """`compile_all`; with --compile-only the run ends behind it, with exit code 1 if a kernel does not compile."""

    def only(requests: Sequence[Any]) -> Sequence[Any]:
        raise SystemExit(int(any(isinstance(outcome, Exception) for outcome in compile_all(requests))))

    return only if options.compile_only else compile_all


def show(row: dict[str, Any]) -> None:
    """One line for a row, as it is measured."""
    base = row["peers"].get(report.BASELINE)
    ratio = f"{base / row['us']:5.2f}x" if row["us"] and base else "     -"
    ours = f"{row['us']:9.2f} us +-{50 * row['spread']:4.1f}%" if row["us"] else f"FAILED: {row['failure'][:60]}"
    others = "  ".join(f"{name} {us:.2f}" for name, us in (row["peers"] | row.get("variants", {})).items())
    broken = "  ".join(f"{name}: {why[:60]}" for name, why in row.get("peers_failed", {}).items())
    place = f"({row['n']}, {row['k']})"
    print(
        f"{place:16} M {row['m']:5} {ours} {ratio}  {others}  [{row['bound']} {row['predicted_us']}] {broken}",
        flush=True,
    )
