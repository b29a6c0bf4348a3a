"""Compiles many kernels at once, each in a process that sees no GPU (`worker.py`).

A compiler that crashes or hangs costs the request it had in hand; the next request gets a fresh process.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from terrazzo.lowering.compilers import compiler
from terrazzo.lowering.errors import ArgumentError, CacheError, CompileError
from terrazzo.lowering.kernels import find_compiled
from terrazzo.lowering.request import KernelRequest, check_requests
from terrazzo.lowering.worker import DEADLINE_S, give_back, take

Outcome = Path | CompileError


def compile_many(
    requests: Sequence[KernelRequest],
    workers: int | None = None,
    progress: Callable[[int, int, KernelRequest, Outcome], None] | None = None,
    deadline: float = DEADLINE_S,
) -> list[Outcome]:
    """Compile requests in parallel processes and publish them to the cache. Needs no GPU.

    Args:
        requests: what to compile; equal ones are compiled once.
        workers: number of processes, by default one for each CPU that this process may use.
        progress: called in this thread as `progress(done, total, request, outcome)` after each distinct request.
        deadline: seconds after which the compilation of one request is given up.

    Returns:
        For each request the folder of its kernel, or the CompileError that stopped it.

    Raises:
        ArgumentError: something among the requests is none, or no number of processes.
        ToolchainError: something has to be compiled and a compiler is missing.
        CacheError: the cache folder cannot be found or made.
    """
    requests = check_requests(requests)
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ArgumentError("workers", workers, "must be a number of processes", "leave it out for one on each CPU")
    outcomes: dict[KernelRequest, Outcome] = {}
    todo: list[KernelRequest] = []
    distinct = list(dict.fromkeys(requests))

    def finish(request: KernelRequest, outcome: Outcome) -> None:
        outcomes[request] = outcome
        if progress is not None:
            progress(len(outcomes), len(distinct), request, outcome)

    for request in distinct:
        folder = find_compiled(request)
        if folder is not None:
            finish(request, folder)
        else:
            todo.append(request)
    if not todo:
        return [outcomes[request] for request in requests]
    compiler().require(f"{len(todo)} kernels")

    done: queue.SimpleQueue[tuple[KernelRequest, Outcome]] = queue.SimpleQueue()
    with CompilePool(lambda *result: done.put(result), workers, deadline) as pool:
        for request in todo:
            pool.submit(request)
        while len(outcomes) < len(distinct):
            finish(*done.get())
    return [outcomes[request] for request in requests]


class CompilePool:
    """Worker processes that stay until the pool is closed, for requests that come one by one.

    Args:
        done: called as `done(request, outcome)` in a thread of the pool, once for each request.
        workers, deadline: as `compile_many`.

    Raises:
        ToolchainError: see `compiler`.
    """

    def __init__(
        self,
        done: Callable[[KernelRequest, Outcome], None],
        workers: int | None = None,
        deadline: float = DEADLINE_S,
    ) -> None:
        self.todo: queue.SimpleQueue[KernelRequest | None] = queue.SimpleQueue()
        self.done, self.deadline, self.python = done, deadline, compiler().python
        self.most = workers or len(os.sched_getaffinity(0))
        self.crew: list[_Worker] = []

    def submit(self, request: KernelRequest) -> None:
        """Compile this one too; a process is started for it unless there are `workers` already."""
        self.todo.put(request)
        if len(self.crew) < self.most:
            self.crew.append(_Worker(self.todo, self.done, self.deadline, self.python))
            self.crew[-1].start()

    def close(self) -> None:
        """Stop all processes, but for those of another environment that wait; what they had in hand is lost."""
        for worker in self.crew:
            worker.stop()
        for _ in self.crew:
            self.todo.put(None)
        if self.python is not None:
            for worker in self.crew:  # until the processes are there for whoever compiles next
                worker.join(1.0)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker(threading.Thread):
    """A thread that feeds one process."""

    def __init__(
        self,
        todo: queue.SimpleQueue,
        done: Callable[[KernelRequest, Outcome], None],
        deadline: float,
        python: str | None,
    ) -> None:
        super().__init__(daemon=True)
        self.todo, self.done, self.deadline = todo, done, deadline
        self.process = take(python)
        self.stopped = False

    def run(self) -> None:
        while True:
            request = self.todo.get()
            if request is None or self.stopped:
                break
            try:
                outcome = self.process.compile(request, self.deadline)
                if not isinstance(outcome, Path | CompileError):
                    outcome = CompileError(str(outcome))
            except (OSError, ValueError, CacheError) as error:  # it died while we spoke to it, or was stopped
                self.process.kill()
                outcome = CompileError(f"{request}: the compiling process cannot be used: {error}")
            self.done(request, outcome)
        give_back(self.process)

    def stop(self) -> None:
        """End the process, unless it waits and belongs to another environment: then the thread gives it back."""
        self.stopped = True
        if self.process.busy or self.process.python is None:
            self.process.kill()
