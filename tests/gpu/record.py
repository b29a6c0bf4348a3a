"""What `--record FILE` keeps of a run on a GPU: of each file of tests when, at which commit, on which card, how many.

A file counts once all of its tests were selected and have run; what the record says of other files stays. So runs of
one file at a time, on several hosts, add up: each entry has its own commit and date.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "failed", "skipped")


def commit_of(root: Path, record: Path) -> str:
    """The commit of a tree, with "+changes" where files other than the record differ from it; "" without git."""

    def said(*words: str) -> str | None:
        try:
            return subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    commit, own = said("rev-parse", "--short=12", "HEAD"), os.path.relpath(record, root)
    changed = (said("status", "--porcelain", "--untracked-files=no") or "").splitlines()
    return (commit or "") + "+changes" * any(not line.endswith(own) for line in changed)


def machine() -> dict[str, Any]:
    """Card, driver and torch of this process."""
    import torch

    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    card, target = torch.cuda.get_device_name(0), os.environ.get("TERRAZZO_TEST_TARGET")
    return {
        "card": f"{card}, kernels of {target}" if target else card,
        "cards": torch.cuda.device_count(),
        "driver": driver,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def merged(record: dict[str, Any], facts: dict[str, Any], found: dict[str, Counter]) -> dict[str, Any]:
    """The record with the files of a run: the newest run of each file on each kind of card."""
    files = {name: list(runs) for name, runs in record.get("files", {}).items()}
    for name, counts in found.items():
        others = [run for run in files.get(name, ()) if run["card"] != facts["card"]]
        files[name] = sorted([*others, {**facts, **{word: counts[word] for word in OUTCOMES}}], key=lambda r: r["card"])
    return {"files": dict(sorted(files.items()))}


class Recorder:
    """A plug-in of pytest that writes the record when the run ends.

    Args:
        path: the record. facts: of `machine`, and the commit.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.partial: set[str] = set()
        self.wanted: dict[str, set[str]] = {}
        self.outcomes: dict[str, str] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.partial |= {item.path.name for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        named = [Path(word.partition("::")[0]).name for word in session.config.args if "::" in word]
        self.partial |= set(named)
        for item in session.items:
            self.wanted.setdefault(item.path.name, set()).add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of a test's phases counts; a test has run once it is torn down."""
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = before if before != "passed" else report.outcome
        if report.when == "teardown":
            for tests in self.wanted.values():
                tests.discard(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        found: dict[str, Counter] = {}
        for test, outcome in self.outcomes.items():
            found.setdefault(Path(test.partition("::")[0]).name, Counter())[outcome] += 1
        unfinished = {name for name, tests in self.wanted.items() if tests} | self.partial
        whole = {name: counts for name, counts in found.items() if name not in unfinished}
        if whole:
            before = json.loads(self.path.read_text()) if self.path.exists() else {}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(merged(before, self.facts, whole), indent=1) + "\n")
        terminalreporter.write_line(f"{self.path}: {len(whole)} files of tests recorded")
        if left := sorted(unfinished & {*found, *self.wanted}):
            terminalreporter.write_line(f"not recorded, as not all of their tests ran: {', '.join(left)}")
