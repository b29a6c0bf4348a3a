"""A process that compiles for this one: of this environment, or of another that has a compiler (`compilers.py`).

It speaks JSON lines, one request and one answer at a time, sees no GPU, and is no fork: a parent with threads, CUDA or
a script without a main guard is safe. It imports what its parent would, but for what lies in the working directory:
that answers only for a builder that is found there and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

from terrazzo.lowering import compilers
from terrazzo.lowering.cache import cache_root
from terrazzo.lowering.errors import CacheError, CompileError, TerrazzoError, ToolchainError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.settings import clean_environment

DEADLINE_S = 900.0
IDLE_S = 600.0
"""A process that waits for its next request so long ends by itself."""
_SERVE = f"from {__package__}.serving import serve; serve"
_KINDS = {kind.__name__: kind for kind in (CacheError, CompileError, ToolchainError)}
_idle: list[WorkerProcess] = []
_idle_lock = threading.Lock()


def search_path() -> list[str]:
    """sys.path of this process for another one: absolute, without the working directory unless PYTHONPATH names it.

    Where this process's terrazzo comes from is the first entry that holds one. Thus a worker of one checkout does not
    build kernels of another one, whose editable install may be a line of sys.path.
    """
    named = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    paths = [entry for entry in paths if entry != here or here in named]
    own = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["terrazzo"].__file__)))
    holding = [entry for entry in paths if os.path.isdir(os.path.join(entry, "terrazzo"))]
    if holding[:1] == [own]:
        return paths
    at = paths.index(holding[0]) if holding else len(paths)
    return [*paths[:at], own, *paths[at:]]


class WorkerProcess:
    """A process that compiles, started at its first request and again after it died.

    Args:
        python: interpreter of another environment, None for one like this process.
    """

    def __init__(self, python: str | None = None) -> None:
        self.python = python
        self.process: subprocess.Popen | None = None
        self.busy = False
        self.noise = tempfile.TemporaryFile()  # the process's stderr; its end is shown if the process dies
        self.scratch: tempfile.TemporaryDirectory | None = None  # of it, nvcc and g++: killed, they leave files

    def compile(self, request: KernelRequest, deadline: float = DEADLINE_S, count: bool = True) -> Path | TerrazzoError:
        """Folder of the kernel in the cache, or what went wrong. OSError or ValueError: the process cannot be asked."""
        self.busy = True
        if self.process is not None and self.process.poll() is not None:
            self.kill()
        if self.process is None:
            self._start()
        process = self.process
        message = {"request": request.as_dict(), "folder": _folder_of(request, self.python is not None)}
        message["count"] = count
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], deadline)
        answer = process.stdout.readline() if ready else b""
        if not answer:
            code = process.wait() if ready else None
            self.kill()
            how = f"took longer than {deadline:.0f} s" if code is None else f"died with exit status {code}"
            return CompileError(f"{request}: the compiling process {how}\n{self._last_words()}")
        said = json.loads(answer)
        self.busy = False
        return Path(said["folder"]) if "folder" in said else _KINDS.get(said["kind"], CompileError)(said["error"])

    def _start(self) -> None:
        if self.python is None:
            # the path replaces what `-c` and the environment made of it, before anything else is imported
            code = f"import sys; sys.path[:] = sys.argv[2:]; {_SERVE}(sys.argv[1])"
            entry = compilers.header_entry()
            arguments = [os.path.abspath(entry) if entry else "", *search_path()]
            command, environment = [sys.executable, "-c", code, *arguments], {**os.environ, compilers.VARIABLE: ""}
        else:
            command, environment = (
                [self.python, "-c", f"{compilers.START}{_SERVE}()"],
                {**clean_environment(), compilers.VARIABLE: ""},
            )
        # a relative cache is this process's, which may have changed its folder since
        environment |= {"TERRAZZO_CACHE_DIR": str(cache_root()), "CUDA_VISIBLE_DEVICES": ""}
        with contextlib.suppress(OSError):  # the process says better what is wrong with the usual folder
            self.scratch = tempfile.TemporaryDirectory(prefix="terrazzo-", ignore_cleanup_errors=True)
            environment["TMPDIR"] = self.scratch.name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.noise,
            env=environment,
            start_new_session=True,  # so that nvcc and its children can be stopped with it
        )

    def _last_words(self) -> str:
        self.noise.seek(max(0, self.noise.seek(0, os.SEEK_END) - 2000))
        return self.noise.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Stop the process, whatever it does."""
        process, self.process = self.process, None
        self.busy = False
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if self.scratch is not None:
                self.scratch.cleanup()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _folder_of(request: KernelRequest, foreign: bool) -> str | None:
    """Folder that holds the builder's package or module, where that is none of terrazzo's and not installed."""
    top = request.entry.partition(":")[0].partition(".")[0]
    if top == "terrazzo":
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None  # the process says so
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    folder = os.path.dirname(os.path.abspath(places[0])) if places and places[0] else None
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return None if foreign and folder in installed else folder


def take(python: str | None) -> WorkerProcess:
    """A process that waits for work in that environment, or a new one; `give_back` it."""
    with _idle_lock:
        for worker in _idle:
            if worker.python == python:
                _idle.remove(worker)
                return worker
    return WorkerProcess(python)


def give_back(worker: WorkerProcess) -> None:
    """Keep a process that waits for the next request to its environment; end one of this environment."""
    if worker.python is None or worker.busy or worker.process is None:
        return worker.kill()
    with _idle_lock:
        _idle.append(worker)


def compile_elsewhere(request: KernelRequest, python: str | None, count: bool = True) -> Path:
    """Compile in a process of the environment that `python` names; it stays for the next request.

    Raises:
        ToolchainError, CompileError, CacheError: what it says; CompileError too if it dies.
    """
    worker = take(python)
    try:
        outcome = worker.compile(request, count=count)
    except (OSError, ValueError) as error:
        worker.kill()
        raise CompileError(f"{request}: the compiling process cannot be used: {error}") from error
    finally:
        give_back(worker)
    if isinstance(outcome, TerrazzoError):
        raise outcome
    return outcome


def _forget() -> None:
    """After a fork: the processes are the parent's."""
    global _idle_lock
    _idle_lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
