"""The record of tests on GPUs as a table. tests/gpu/record.py writes it."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import report

RECORD = report.RESULTS / "gpu_tests.json"
HEADER = ("tests", "card", "date", "commit", "passed", "failed", "skipped", "driver", "torch")


def table(record: dict[str, Any]) -> str:
    """A row for each file of tests and each kind of card."""
    rows = [
        (
            f"`{name}`",
            run["card"],
            run["date"],
            f"`{run['commit'].partition('+')[0]}`" + " and changes" * run["commit"].endswith("+changes"),
            *(str(run[word]) for word in ("passed", "failed", "skipped")),
            run["driver"],
            run["torch"],
        )
        for name, runs in record.get("files", {}).items()
        for run in runs
    ]
    return report.markdown(HEADER, rows) if rows else "No run is recorded yet."


def recorded() -> str:
    """The table of the record in benchmarks/results, for docs/gpu-tests.md."""
    return table(json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {})
