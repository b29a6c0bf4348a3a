"""Runs the GPU tests, the benchmarks and the tuning job on all GPUs of this machine, inside a budget of time.

    python -m benchmarks.host                                      everything, 29 minutes, every GPU
    python -m benchmarks.host --budget 600 --only 'test.*'         names are those of --list
    python -m benchmarks.host --gpus 0,1 --skip 'tune.*' --skip 'compile.*'
    python -m benchmarks.host --resume                             what has not passed at this commit yet
    python -m benchmarks.host --list --gpus 0,1                    steps and the plan for two GPUs; needs none

Leaves OUT/<step>.log, OUT/results/*.json and OUT/summary.json. Exit code 1: a test failed; 2: bad arguments; 130:
Ctrl-C. What was interrupted at the end of the budget, or not started, is said in the table. The steps are in
benchmarks/host_steps.py, the rules in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from terrazzo.console import print_json, print_table

from benchmarks import report
from benchmarks.host_steps import GRACE_S, STEPS, Step, Worker, chosen, missing, plan, take, workers

ROOT = Path(__file__).parents[1]
POLL_S = 0.05
NICE_TEST, NICE_COMPILE = 10, 15
"""Of tests while another GPU has timed steps; of what compiles ahead."""
COLUMNS = {"name": "step", "gpu": "GPU", "seconds": "seconds", "rc": "rc", "status": "status", "last": "last line"}


@dataclass
class Running:
    """A step that was started; `ending` says why it was interrupted, if it was, and `since` when."""

    step: Step
    worker: Worker
    process: subprocess.Popen
    start: float
    ending: str = ""
    since: float = 0.0


class Host:
    """Runs steps.

    Args:
        steps: with the compiling ones; crew: who runs them. budget: seconds for all.
        out: folder of logs and results. facts: what commands may name. grace: seconds between SIGINT and SIGKILL.
        changed: called with a line when a step starts or ends.
    """

    def __init__(
        self, steps: Sequence[Step], crew: Sequence[Worker], budget: float, out: Path, facts: Mapping[str, Any],
        changed: Callable[[str], None] = print, grace: float = GRACE_S,
    ) -> None:  # fmt: skip
        self.crew, self.out, self.facts, self.changed, self.grace = list(crew), out, facts, changed, grace
        self.start = time.monotonic()
        self.end = self.start + budget
        self.pending = [step for step in steps if not missing(step)]
        self.running: list[Running] = []
        self.stops = 0
        self.rows = {step.name: _row(step, missing(step)) for step in steps if step.kind != "compile"}

    def stop(self, *_: object) -> None:
        """Interrupt what runs and start nothing more; a second time, kill it. Serves as a signal handler."""
        self.stops += 1

    def run(self) -> None:
        """Returns when nothing runs and nothing more fits; `rows` has the outcome of every step."""
        free = list(self.crew)
        while free or self.running:
            for worker in free:
                left = self.end - self.grace - time.monotonic()
                step = None if self.stops else take(self.pending, worker, left)
                if step is not None:
                    self._begin(step, worker)
            free = self._watch()
            time.sleep(POLL_S if self.running and not free else 0)

    def _begin(self, step: Step, worker: Worker) -> None:
        self.rows[step.name] = _row(step) | {"status": "running", "gpu": worker.gpu}
        command = [part.format_map(self.facts) for part in step.command]
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONUNBUFFERED": "1"}
        env["CUDA_VISIBLE_DEVICES"] = worker.gpu
        nice, cpus = 0, worker.cpus if step.kind != "timed" else ()
        if step.kind == "compile":
            nice = NICE_COMPILE
        elif cpus and any(it.kind == "timed" for it in (*self.pending, *(run.step for run in self.running))):
            nice = NICE_TEST

        def before() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
            os.nice(nice)
            if cpus:  # as many processes compile
                os.sched_setaffinity(0, cpus)

        with self._log(step).open("wb") as to:
            process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT,
                cwd=ROOT, env=env, start_new_session=True, preexec_fn=before,
            )  # fmt: skip
        self.running.append(Running(step, worker, process, time.monotonic()))
        self._say(f"start    {step.name} on {place(step, worker)}, about {step.seconds:.0f} s")

    def _watch(self) -> list[Worker]:
        """Interrupt, kill and note what ended; the workers that are free now."""
        now, free = time.monotonic(), []
        for run in list(self.running):
            code = run.process.poll()
            if code is not None:
                _signal(run.process, signal.SIGKILL)  # what it left behind would disturb the next step
                self.running.remove(run)
                self._finish(run, code, now)
                free.append(run.worker)
            elif not run.ending:
                if why := self._over(run.step, now):
                    run.ending, run.since = why, now
                    _signal(run.process, signal.SIGINT)
            elif now > run.since + self.grace or self.stops > 1:
                _signal(run.process, signal.SIGKILL)
        return free

    def _over(self, step: Step, now: float) -> str:
        """Why a running step must end, or ""."""
        if self.stops:
            return "interrupted"
        if step.ahead_of and self.rows[step.ahead_of]["rc"] is not None:
            return "not needed"
        return "timed out" if now > self.end - self.grace else ""

    def _finish(self, run: Running, code: int, now: float) -> None:
        row, last = self.rows[run.step.name], last_line(self._log(run.step))
        status = "passed" if code == 0 else run.ending or "failed"
        if code == 0 and re.match(r"\d+ skipped\b", last):  # by pytest, every test
            status = "skipped"
        row |= {"status": status, "seconds": round(now - run.start, 1), "rc": code, "last": last}
        self._say(f"{status:8} {run.step.name}, {row['seconds']:.0f} s: {row['last']}")

    def _log(self, step: Step) -> Path:
        return self.out / f"{step.name}.log"

    def _say(self, line: str) -> None:
        self.changed(f"{time.monotonic() - self.start:5.0f} s  {line}")


def _row(step: Step, missing: str = "") -> dict[str, Any]:
    facts = {"name": step.name, "kind": step.kind, "priority": step.priority, "estimate_s": step.seconds}
    ended = {"status": "skipped" if missing else "not started", "gpu": None, "seconds": None, "rc": None}
    return facts | ended | {"last": missing}


def place(step: Step, worker: Worker) -> str:
    return "CPU" if step.kind == "compile" else f"GPU {worker.gpu}"


def _signal(process: subprocess.Popen, number: int) -> None:
    """To the whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def last_line(log: Path) -> str:
    """The last line with words in it, pytest's ruler taken off."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip("= \r\n") for line in file.read().decode(errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "")


def failed(row: Mapping[str, Any]) -> bool:
    """Whether tests of a step failed, also of one that was interrupted before its end."""
    counted = re.search(r"\b\d+ (failed|errors?)\b", row["last"])
    return row["name"].startswith("test.") and (row["status"] == "failed" or counted is not None)


def passed_before(out: Path, commit: str) -> dict[str, dict[str, Any]]:
    """Rows of the steps that passed in an earlier run at this commit; none where its summary cannot be read."""
    try:
        before = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return {row["name"]: row for row in before["steps"] if row["status"] == "passed" and before["commit"] == commit}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def gpus_here() -> dict[str, tuple[str, str]]:
    """Index and UUID of each GPU -> its name and driver, asked without touching it; empty where there is none."""
    said = _said("nvidia-smi", "--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader")
    rows = [line.split(", ") for line in said.splitlines() if line.count(", ") == 3]
    return {key: (name, driver) for index, uuid, name, driver in rows for key in (index, uuid)}


def _said(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=30, check=True, cwd=ROOT
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1740.0, help="seconds for everything (default 1740)")
    parser.add_argument("--gpus", help="CUDA devices, 0,1; default $CUDA_VISIBLE_DEVICES, else all")
    parser.add_argument("--timed", type=int, default=1, help="GPUs that take timed steps first (default 1)")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="steps to run; may be repeated")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="GLOB", help="steps to leave out; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("build/host"), help="folder of logs and results")
    parser.add_argument("--resume", action="store_true", help="leave out what passed under --out at this commit")
    parser.add_argument("--list", action="store_true", help="only show the steps and the plan; needs no GPU")
    parser.add_argument("--json", action="store_true", help="print the summary, or the plan, as JSON")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    options = parser.parse_args(argv)
    options.steps = chosen(STEPS, options.only, options.skip)
    options.found = gpus_here()
    every = ",".join(key for key in options.found if key.isdigit())
    given = os.environ.get("CUDA_VISIBLE_DEVICES", every) if options.gpus is None else options.gpus
    options.gpus = list(dict.fromkeys(gpu.strip() for gpu in given.split(",") if gpu.strip()))
    if not options.steps:
        parser.error(f"--only {options.only} --skip {options.skip}: no step is left; --list shows their names")
    if options.budget <= GRACE_S or options.timed < 1:
        parser.error(f"--budget {options.budget} --timed {options.timed}: above {GRACE_S:.0f} s, at least 1 GPU")
    if options.list:
        options.gpus = options.gpus or ["0"]
    elif not options.gpus or not set(options.gpus) <= set(options.found):
        shown = every or "no GPU"
        parser.error(f"--gpus {given}: nvidia-smi shows {shown}; name some of these, or see the plan with --list")
    return options


def show_plan(options: argparse.Namespace, crew: Sequence[Worker]) -> None:
    able = [step for step in options.steps if not missing(step)]
    begins = {step.name: (at, place(step, worker)) for at, worker, step in plan(able, crew, options.budget)}
    names = ("step", "kind", "priority", "seconds", "start", "on", "why not")
    rows = []
    for step in options.steps:
        at, where = begins.get(step.name, (None, None))
        why = "" if where else missing(step) or ("too late" if step.ahead_of else "does not fit into the budget")
        rows.append((step.name, step.kind, step.priority, step.seconds, at, where, why))
    rows.sort(key=lambda row: (row[4] is None, row[4]))
    if options.json:
        print_json([dict(zip(names, row)) for row in rows])
    else:
        print_table(names, rows)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    crew = workers(options.gpus, options.timed, sorted(os.sched_getaffinity(0)))
    if options.list:
        show_plan(options, crew)
        return 0
    out, (gpu, driver) = options.out.resolve(), options.found[options.gpus[0]]
    for folder in ("results", "tune"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    commit = options.commit or _said("git", "rev-parse", "--short=12", "HEAD")
    short = report.file_name("", gpu).removeprefix("_").removesuffix(".json")
    facts = {"out": out, "results": out / "results", "gpu": short, "commit": commit}
    summary = {
        "commit": commit, "gpus": {at: options.found[at][0] for at in options.gpus}, "driver": driver,
        "torch": importlib.metadata.version("torch"), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "budget_s": options.budget,
    }  # fmt: skip

    def changed(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
        summary["seconds"] = round(time.monotonic() - host.start, 1)
        summary["steps"] = list(host.rows.values())
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    done = passed_before(out, commit) if options.resume and commit else {}
    steps = [step for step in options.steps if step.name not in done and step.ahead_of not in done]
    host = Host(steps, crew, options.budget, out, facts, changed)
    host.rows |= {name: row for name, row in done.items() if row["kind"] != "compile"}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, host.stop)
    host.run()
    rows = [row for row in host.rows.values() if row["kind"] != "compile"]
    bad, left = [row for row in rows if failed(row)], [row["status"] for row in rows]
    counts = (f"{left.count(status)} {status}" for status in ("failed", "timed out", "not started", "skipped"))
    changed(f"{len(bad)} test steps failed; of all steps {', '.join(counts)}; {out}")
    if options.json:
        print_json(summary)
    else:
        print_table(
            list(COLUMNS.values()), [tuple((row | {"last": row["last"][:90]})[c] for c in COLUMNS) for row in rows]
        )
    return 1 if bad else 130 if host.stops else 0


if __name__ == "__main__":
    sys.exit(main())
