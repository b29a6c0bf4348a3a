"""Compiles many kernels at once, each in a process that sees no GPU.

Workers import what their parent would, from its sys.path and not from the folder that they start in, and speak JSON
lines, one request and one answer at a time. A compiler that crashes or hangs costs the request it had in hand; the next
request gets a fresh worker. Nothing is forked, so a parent with threads, CUDA or a script without a main guard is safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from terrazzo.lowering.cache import cache_root
from terrazzo.lowering.errors import ArgumentError, CacheError, CompileError, TerrazzoError
from terrazzo.lowering.kernels import compile_request, find_compiled
from terrazzo.lowering.request import KernelRequest, check_requests
from terrazzo.lowering.toolchain import require_compiler

Outcome = Path | CompileError
_START = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import _serve; _serve()"
DEADLINE_S = 900.0


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
    require_compiler(f"{len(todo)} kernels")

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
    """

    def __init__(
        self,
        done: Callable[[KernelRequest, Outcome], None],
        workers: int | None = None,
        deadline: float = DEADLINE_S,
    ) -> None:
        self.todo: queue.SimpleQueue[KernelRequest | None] = queue.SimpleQueue()
        self.done, self.deadline = done, deadline
        self.most = workers or len(os.sched_getaffinity(0))
        self.crew: list[_Worker] = []

    def submit(self, request: KernelRequest) -> None:
        """Compile this one too; a process is started for it unless there are `workers` already."""
        self.todo.put(request)
        if len(self.crew) < self.most:
            self.crew.append(_Worker(self.todo, self.done, self.deadline))
            self.crew[-1].start()

    def close(self) -> None:
        """Stop all processes; what they had in hand is lost."""
        for worker in self.crew:
            worker.stop()
        for _ in self.crew:
            self.todo.put(None)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker(threading.Thread):
    """A thread that feeds one worker process and replaces it when it dies."""

    def __init__(
        self, todo: queue.SimpleQueue, done: Callable[[KernelRequest, Outcome], None], deadline: float
    ) -> None:
        super().__init__(daemon=True)
        self.todo, self.done, self.deadline = todo, done, deadline
        self.process: subprocess.Popen | None = None
        self.stopped = False
        self.noise = tempfile.TemporaryFile()  # the process's stderr; its end is shown if the process dies

    def run(self) -> None:
        while not self.stopped:
            request = self.todo.get()
            if request is None:
                return
            try:
                outcome = self.compile(request)
            except (OSError, ValueError, CacheError) as error:  # it died while we spoke to it, or was stopped
                self.kill()
                outcome = CompileError(f"{request}: the compiling process cannot be used: {error}")
            self.done(request, outcome)

    def compile(self, request: KernelRequest) -> Outcome:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.noise,
                # a relative cache is this process's, which may have changed its folder since
                env={**os.environ, "TERRAZZO_CACHE_DIR": str(cache_root()), "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # so that nvcc and its children can be stopped with it
            )
        process = self.process
        process.stdin.write(json.dumps(request.as_dict()).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self.deadline)
        answer = process.stdout.readline() if ready else b""
        if not answer:
            code = process.wait() if ready else None
            self.kill()
            how = f"took longer than {self.deadline:.0f} s" if code is None else f"died with exit status {code}"
            self.noise.seek(max(0, self.noise.seek(0, os.SEEK_END) - 2000))
            return CompileError(
                f"{request}: the compiling process {how}\n{self.noise.read().decode(errors='replace').strip()}"
            )
        said = json.loads(answer)
        return Path(said["folder"]) if "folder" in said else CompileError(said["error"])

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def stop(self) -> None:
        self.stopped = True
        self.kill()


def _serve() -> None:
    """The worker process: answer requests from stdin until it closes. Whatever a builder prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = KernelRequest.from_dict(json.loads(line))
        try:
            said = {"folder": str(compile_request(request))}
        except TerrazzoError as error:
            said = {"error": str(error)}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
