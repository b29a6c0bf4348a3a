"""How many kernels a second processes compile, over their number: what decides how long a tuning job takes."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import get_operator
from terrazzo.lowering.errors import CompileError
from terrazzo.lowering.parallel import CompilePool
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target

ROUNDS = 4
"""Kernels that each process compiles; the first one, which pays for the imports, is not counted."""


@dataclass(frozen=True)
class Rate:
    """Kernels a second of `workers` processes, once all of them had done their first."""

    workers: int
    kernels: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.kernels / self.seconds


def requests(count: int, target: Target, op: str = "w4a8", m: int = 8) -> list[KernelRequest]:
    """Different kernels of an operator's heuristic: weights of 64 more rows each."""
    operator, found = get_operator(op), []
    for at in range(count):
        facts = operator.facts(1024 + 64 * at, 4096, dtype="float16", group=None, symmetric=False)
        problem = Problem.of(op, facts, m)
        program, schedule = operator.space(problem).heuristic(target, m)
        found.append(operator.request(problem, program, schedule.params(), target))
    return found


def measure(
    workers: int, wanted: Sequence[KernelRequest], pool: Callable[..., Any] = CompilePool, rounds: int = ROUNDS
) -> Rate:
    """Compile kernels in a cache of their own, which is thrown away.

    Args:
        wanted: at least `rounds * workers` different ones. pool: as `CompilePool`.

    Raises:
        CompileError: one does not compile.
    """
    before = os.environ.get("TERRAZZO_CACHE_DIR")
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TERRAZZO_CACHE_DIR"] = folder
        try:
            with pool(lambda _, outcome: done.put((time.monotonic(), outcome)), workers) as running:
                for request in wanted[: rounds * workers]:
                    running.submit(request)
                ends = [_checked(done.get()) for _ in range(rounds * workers)]
        finally:
            if before is None:
                del os.environ["TERRAZZO_CACHE_DIR"]
            else:
                os.environ["TERRAZZO_CACHE_DIR"] = before
    return Rate(workers, len(ends) - workers, ends[-1] - ends[workers - 1])


def _checked(outcome: tuple[float, Any]) -> float:
    when, said = outcome
    if isinstance(said, CompileError):
        raise said
    return when
