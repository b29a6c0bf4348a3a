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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import report, tables


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_records", description=__doc__.splitlines()[0])
    parser.add_argument("--database", type=Path, required=True, help="trials of the job")
    parser.add_argument("--table", type=Path, required=True, help="records of the other GPU")
    parser.add_argument("--out", type=Path, help="file to write; default benchmarks/results/shared_records_<gpu>.json")
    parser.add_argument("--commit", help="of the sources that were measured, where git cannot tell")
    return parser.parse_args(argv)


def rows(trials: list[Any], table: Any, target: Any) -> list[dict[str, Any]]:
    """A row of each problem whose heuristic has a time; microseconds, medians. `other_us` is the recorded schedule's,
    None where the table has none or it was not timed."""
    from terrazzo.autotune.database import best, medians
    from terrazzo.autotune.proposed import of_table

    times: dict[tuple, float] = {(it.problem, it.program, it.params): it.us for it in medians(trials)}
    found = []
    for one in best(trials):
        problem = one.trial.problem
        other = of_table(table, problem, target)
        us = other and times.get((problem, other.program, tuple(sorted(other.params.items()))))
        if one.heuristic_us is None:
            continue
        own = (one.trial.program, dict(one.trial.params))
        fastest = min(it for it in (one.trial.us, us, one.heuristic_us) if it is not None)
        found.append(
            {
                "op": problem.op, "problem": problem.what, "m": problem.m, "heuristic_us": round(one.heuristic_us, 3),
                "other_us": None if us is None else round(us, 3), "us": round(fastest, 3),
                "same": us is not None and own == (other.program, other.params), "tried": one.tried,
            }
        )  # fmt: skip
    return found


def summary(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For each operator, and sizes of M below and from 64: problems and the heuristic over the best, mean and worst;
    of those with a record, how many, and the same of the heuristic and of the record."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in found):
        for name, keep in (("below 64", lambda m: m < 64), ("from 64", lambda m: m >= 64)):
            here = [row for row in found if row["op"] == op and keep(row["m"])]
            known = [row for row in here if row["other_us"] is not None]
            if here:
                both = (*over(known, "heuristic_us"), *over(known, "other_us"))
                lines.append((op, name, str(len(here)), *over(here, "heuristic_us"), str(len(known)), *both))
    return lines


def over(found: list[dict[str, Any]], which: str) -> tuple[str, str]:
    """A time over the best: geometric mean, worst; "" without rows."""
    ratios = [row[which] / row["us"] for row in found]
    return (f"{report.geomean(ratios):.3f}", f"{max(ratios):.2f}") if ratios else ("", "")


def table(result: dict[str, Any], source: str) -> str:
    """The summary of a file, as docs/tuning.md has it."""
    other = result["other"].removeprefix("NVIDIA ")
    lines = [(f"`{op}`", *cells) for op, *cells in summary(result["rows"])]
    heads = ("operator", "M", "problems", "heuristic", "worst")
    heads += ("with a record", "heuristic", "worst", f"{other}'s record", "worst")
    said = f"Times over the fastest that was tried, geometric mean and worst, {tables.setting(result, source)}"
    return f"{said}\n\n{report.markdown(heads, lines, range(2, len(heads)))}"


def run(options: argparse.Namespace) -> int:
    from terrazzo.autotune.database import Database
    from terrazzo.autotune.jobs import Job
    from terrazzo.autotune.runner import resolve
    from terrazzo.schedules.records import Table

    start, other = time.perf_counter(), Table.read(options.table)
    with Database(options.database, create=False) as database:
        trials = [it for it in database.trials() if it.machine.gpu != other.gpu]
    if not trials:
        print(f"{options.database} has no trials of another GPU than {other.gpu}", file=sys.stderr)
        return 2
    machine = trials[-1].machine
    found = rows(trials, other, resolve(Job(), machine))
    date = datetime.now(timezone.utc).date().isoformat()
    result = {**asdict(machine), "date": date, "other": other.gpu, "commit": options.commit, "rows": found}
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
