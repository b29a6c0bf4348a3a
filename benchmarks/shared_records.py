"""What another GPU's records are worth: their times beside the heuristic's and the best, from a tuning job's trials.

    terrazzo tune --job docs/jobs/h100.toml --budget 3m --database h100.db
    python -m benchmarks.shared_records --database h100.db --table schedules/tuned/h200.json

It writes benchmarks/results/shared_records_<gpu>.json. The job must try the table's schedules (`tables` of a job file).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_records", description=__doc__.splitlines()[0])
    parser.add_argument("--database", type=Path, required=True, help="trials of the job")
    parser.add_argument("--table", type=Path, required=True, help="records of the other GPU")
    parser.add_argument("--out", type=Path, help="file to write; default benchmarks/results/shared_records_<gpu>.json")
    parser.add_argument("--commit", help="of the sources that were measured, where git cannot tell")
    return parser.parse_args(argv)


def rows(trials: list[Any], table: Any, target: Any) -> list[dict[str, Any]]:
    """A row of each problem whose heuristic, best and recorded schedule have times; microseconds, medians."""
    from terrazzo.autotune.database import best, medians
    from terrazzo.autotune.proposed import of_table

    times: dict[tuple, float] = {(it.problem, it.program, it.params): it.us for it in medians(trials)}
    found = []
    for one in best(trials):
        problem = one.trial.problem
        other = of_table(table, problem, target)
        us = other and times.get((problem, other.program, tuple(sorted(other.params.items()))))
        if us is None or one.heuristic_us is None:
            continue
        own = (one.trial.program, dict(one.trial.params))
        found.append(
            {
                "op": problem.op, "n": problem.n, "k": problem.k, "m": problem.m,
                "heuristic_us": round(one.heuristic_us, 3), "other_us": round(us, 3),
                "us": round(min(one.trial.us, us, one.heuristic_us), 3), "same": own == (other.program, other.params),
                "tried": one.tried,
            }
        )  # fmt: skip
    return found


def summary(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For each operator and all sizes of M below and from 64: problems, and both over the best, mean and worst."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in found):
        for name, keep in (("M < 64", lambda m: m < 64), ("M >= 64", lambda m: m >= 64)):
            here = [row for row in found if row["op"] == op and keep(row["m"])]
            if not here:
                continue
            cells = []
            for which in ("heuristic_us", "other_us"):
                ratios = [row[which] / row["us"] for row in here]
                cells += [f"{report.geomean(ratios):.3f}", f"{max(ratios):.2f}"]
            lines.append((op, name, str(len(here)), *cells))
    return lines


def run(options: argparse.Namespace) -> int:
    from terrazzo.autotune.database import Database
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.runner import resolve
    from terrazzo.schedules.records import Table

    start, table = time.perf_counter(), Table.read(options.table)
    with Database(options.database, create=False) as database:
        trials = [it for it in database.trials() if it.machine.gpu != table.gpu]
    if not trials:
        print(f"{options.database} has no trials of another GPU than {table.gpu}", file=sys.stderr)
        return 2
    machine = trials[-1].machine
    found = rows(trials, table, resolve(Job(), machine))
    result = {**asdict(machine), "other": table.gpu, "commit": options.commit, "rows": found}
    for line in summary(found):
        print("  ".join(line))
    out = options.out or report.RESULTS / report.file_name("shared_records", machine.gpu)
    report.write(result, out, start)
    print(f"{out}: {len(found)} rows")
    return 0


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    return report.guarded("benchmarks.shared_records", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
