"""What tests of tuning jobs share: a job on fake parts, as functions and as a program that can be killed.

python tuning.py DATABASE LOG SECONDS faults|clean [--resume]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from terrazzo.autotune.database import Database
from terrazzo.autotune.isolation import Measurer
from terrazzo.autotune.jobs import Job
from terrazzo.autotune.runner import Progress, Runner, Summary
from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.request import KernelRequest

HERE = Path(__file__).parent
SMALL = Job(shapes=((512, 1024),), m=(8, 64), strategy="exhaustive", most=13, confirm=2)


class InstantCompiler:
    """Compiles nothing, at once; every ninth kernel does not compile."""

    def __init__(self, done: Callable[[KernelRequest, object], None]) -> None:
        self.done, self.asked = done, []

    def submit(self, request: KernelRequest) -> None:
        self.asked.append(request)
        self.done(request, CompileError("nvcc said no") if len(self.asked) % 9 == 0 else HERE)

    def close(self) -> None:
        return


def measurer(log: Path, seconds: float = 0.0, faults: bool = False) -> Measurer:
    """With a deadline only where a trial hangs on purpose, and one that others keep on a busy machine."""
    deadline = 3.0 if faults else 60.0
    command = (sys.executable, str(HERE / "fake_measurer.py"), str(log), str(seconds), "faults" if faults else "clean")
    return Measurer(command=command, deadline=deadline)


def run(
    job: Job,
    database: Path,
    log: Path,
    *,
    seconds: float = 0.0,
    faults: bool = False,
    resume: bool = False,
    gpus: int = 1,
    report: Callable[[Progress], None] | None = None,
) -> Summary:
    with Database(database) as trials:
        measurers = [measurer(log, seconds, faults) for _ in range(gpus)]
        return Runner(job, trials, measurers, InstantCompiler, resume, report, workers=2).run()


if __name__ == "__main__":
    database, log, seconds, kind, *rest = sys.argv[1:]
    done = run(SMALL, Path(database), Path(log), seconds=float(seconds), faults=kind == "faults", resume=bool(rest))
    print(done.ended, done.trials, done.reused)
