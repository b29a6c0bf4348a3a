"""Tuning on many machines: Ray runs compile tasks on CPU workers and one measuring actor for each GPU.

The driver runs the same job as on one machine and is the only one that writes to the database. A lost worker costs
nothing but time: compile tasks are retried by Ray, and a trial whose worker is lost is asked for again. Kernels travel
to the measuring workers through Ray's object store, into their kernel caches.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from terrazzo.autotune import isolation
from terrazzo.autotune.database import Machine, Problem
from terrazzo.autotune.isolation import Result
from terrazzo.lowering import cache
from terrazzo.lowering.errors import CompileError, TerrazzoError, ToolchainError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.worker import search_path

if TYPE_CHECKING:
    import ray

EXTRA = "pip install 'terrazzo[cluster]'"
_REMEDY = "give --address as `ray status` names it, ray://host:10001 from elsewhere"
RETRIES = 3
"""Of a compile task or a trial whose worker is lost."""
COMPILE_S = 900.0
START_S = 300.0
"""For a lost worker's place to be taken by another one."""
Done = Callable[[KernelRequest, "Path | CompileError"], None]


def _ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ToolchainError(f"the executor ray needs Ray: {EXTRA}") from error


ANSWER_S = 8.0
"""For an address to be connected to, and again to answer: Ray itself tries one that does neither for minutes."""
CONNECT_S = 30.0
"""For Ray to connect, once it is imported."""
_CONNECT = """import sys; sys.path[:] = sys.argv[2:]
import ray
print(flush=True)
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
print("connected", flush=True)
ray.shutdown()
"""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a gRPC client begins: HTTP/2's preface and an empty SETTINGS frame, with which a server begins, too."""
_SETTINGS = 4


def _named(address: str | None) -> str | None:
    """host:port that Ray will connect to, or None where it starts a cluster or finds one by itself."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address == "auto":
        with contextlib.suppress(Exception):  # a function of Ray's own, which may go
            address = importlib.import_module("ray._private.utils").read_ray_address()
    scheme, mark, rest = (address or "").rpartition("://")
    return rest if ":" in rest and (not mark or scheme == "ray") else None


def check_answers(address: str | None) -> None:
    """Find out in seconds whether a server of Ray's protocol listens at an address.

    Raises:
        ToolchainError: nothing does; the message says what was seen.
    """
    named = _named(address)
    if named is None:
        return
    try:
        place = urlsplit(f"//{named}")
        with socket.create_connection((place.hostname or "127.0.0.1", place.port or 0), ANSWER_S) as link:
            link.settimeout(ANSWER_S)
            if os.environ.get("RAY_USE_TLS", "0") in ("0", ""):
                link.sendall(_PREFACE)
                head = link.recv(9, socket.MSG_WAITALL)
                if len(head) < 9 or head[3] != _SETTINGS:
                    raise ConnectionError("what answers there is no Ray")
    except TimeoutError as error:
        raise ToolchainError(f"no Ray cluster at {named}: no answer in {ANSWER_S:.0f} s; {_REMEDY}") from error
    except (OSError, ValueError) as error:
        raise ToolchainError(f"no Ray cluster at {named}: {error}; {_REMEDY}") from error


def check_connects(address: str | None) -> None:
    """Let a process of its own connect first, where an address names a host: a connection that hangs cannot be stopped
    otherwise, and Ray ends a process whose peer is silent for long.

    Raises:
        ToolchainError: it does not connect within CONNECT_S; the message has what Ray said.
    """
    named = _named(address)
    if named is None:
        return
    command = [sys.executable, "-c", _CONNECT, address or os.environ["RAY_ADDRESS"], *search_path()]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    with subprocess.Popen(command, bufsize=0, **pipes) as process:  # a buffer would keep what communicate is to read
        try:
            process.stdout.readline()  # Ray is imported
            out, said = process.communicate(timeout=CONNECT_S)
        except subprocess.TimeoutExpired:
            reason = f"it answers, and lets nobody in within {CONNECT_S:.0f} s"
            raise ToolchainError(f"no Ray cluster at {named}: {reason}; {_REMEDY}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if b"connected" not in out:
        words = said.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
        raise ToolchainError(f"no Ray cluster at {named}: {words[-1][:500]}; {_REMEDY}")


def compile_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """A compile task: the kernel's entry of the cache as bytes, or the compiler's error."""
    from terrazzo.lowering.kernels import compile_request

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a compiler touches no GPU
    try:
        folder = compile_request(KernelRequest.from_dict(dict(request)))
    except TerrazzoError as error:
        return {"error": str(error)}
    return entry_of(folder)


def entry_of(folder: Path) -> dict[str, Any]:
    """An entry of the kernel cache as it travels."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {"key": folder.name, "files": files}


def adopt(entry: Mapping[str, Any]) -> Path:
    """The folder of a travelled entry in this machine's cache, written now if it is not there.

    Raises:
        CacheError: the cache folder cannot be used.
    """
    import json

    known = cache.lookup(entry["key"])
    if known is not None:
        return known
    files = dict(entry["files"])
    meta = json.loads(files.pop(cache.MANIFEST))
    meta.pop("files", None)

    def build(folder: Path) -> None:
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return cache.get_or_build(entry["key"], meta, build)


class Seat:
    """What runs on a GPU worker: the measuring process of the GPU that Ray gave it (CUDA_VISIBLE_DEVICES)."""

    def __init__(self, command: Sequence[str], deadline: float) -> None:
        self.measurer = isolation.Measurer(None, command, deadline)

    def hello(self) -> dict[str, Any]:
        try:
            return {"machine": asdict(self.measurer.hello())}
        except ToolchainError as error:
            return {"error": str(error)}

    def adopt(self, *entries: Mapping[str, Any]) -> None:
        for entry in entries:
            adopt(entry)

    def trial(self, problem: Problem, program: str, params: Mapping[str, int], budget_ms: float) -> Result:
        return self.measurer.trial(problem, program, params, budget_ms)

    def peer(self, problem: Problem) -> Result:
        return self.measurer.peer(problem)


class Cluster:
    """A connection to a Ray cluster; closed by `close`, or at the end of a with block.

    Args:
        address: of a running cluster, "auto" or "ray://host:10001"; None starts one on this machine, with its GPUs.
        gpus: measuring workers, None for one on each GPU of the cluster.
        command, deadline: of the measuring processes, see `isolation.Measurer`.
        compile: the compile task.
        options: further arguments of `ray.init`.

    Raises:
        ToolchainError: Ray is not installed, a named address does not answer within 16 s or does not let a process in
            within another 30 s, or the cluster knows no GPU.
    """

    def __init__(
        self,
        address: str | None = None,
        gpus: int | None = None,
        command: Sequence[str] = isolation.COMMAND,
        deadline: float = isolation.DEADLINE_S,
        compile: Callable[[Mapping[str, Any]], dict[str, Any]] = compile_here,
        **options: object,
    ) -> None:
        self.ray = _ray()
        check_answers(address)
        check_connects(address)
        quiet = dict(log_to_driver=False, configure_logging=False) | ({} if address else {"include_dashboard": False})
        try:
            self.ray.init(address=address, **quiet, **options)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ToolchainError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
        resources = self.ray.cluster_resources()
        self.cpus = max(1, int(resources.get("CPU", 1)))
        count = int(resources.get("GPU", 0)) if gpus is None else gpus
        if count < 1:
            self.close()
            raise ToolchainError("the Ray cluster has no GPU; `ray status` lists its resources")
        self.compile = compile
        self.entries: list[Any] = []  # object references of compiled kernels, as they came
        self.measurers = [RayMeasurer(self, command, deadline) for _ in range(count)]

    def compiler(self, done: Done) -> RayCompiler:
        """The runner's compiler."""
        return RayCompiler(self, done)

    def close(self) -> None:
        self.ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayCompiler:
    """Compile tasks, watched by one thread that tells the runner of each."""

    def __init__(self, cluster: Cluster, done: Done) -> None:
        self.cluster, self.done = cluster, done
        self.task = cluster.ray.remote(num_cpus=1, max_retries=RETRIES)(cluster.compile)
        self.pending: dict[Any, tuple[KernelRequest, float]] = {}
        self.lock, self.closed = threading.Lock(), False
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def submit(self, request: KernelRequest) -> None:
        found = self.task.remote(request.as_dict())
        with self.lock:
            self.pending[found] = request, time.monotonic() + COMPILE_S

    def _watch(self) -> None:
        ray = self.cluster.ray
        while not self.closed:
            with self.lock:
                waiting = list(self.pending)
            if not waiting:
                time.sleep(0.02)
                continue
            ready, _ = ray.wait(waiting, timeout=0.2)
            late = [it for it in waiting if it not in ready and self.pending[it][1] < time.monotonic()]
            for it in late:
                ray.cancel(it, force=True)
            for it in (*ready, *late):
                with self.lock:
                    request, _ = self.pending.pop(it)
                self.done(request, self._outcome(it, request, it in late))

    def _outcome(self, it: ray.ObjectRef, request: KernelRequest, late: bool) -> Path | CompileError:
        if late:
            return CompileError(f"{request}: the compile task took longer than {COMPILE_S:.0f} s")
        try:
            said = self.cluster.ray.get(it)
            if "error" in said:
                return CompileError(said["error"])
            folder = adopt(said)
        except Exception as error:  # the task's own exception, or Ray's when its workers kept dying
            first = str(error).strip().splitlines() or [""]
            return CompileError(f"{request}: the compile task failed: {type(error).__name__}: {first[-1]}")
        self.cluster.entries.append(it)
        return folder

    def close(self) -> None:
        self.closed = True
        self.thread.join(timeout=5.0)
        with self.lock, contextlib.suppress(Exception):  # the cluster may be gone
            for it in self.pending:
                self.cluster.ray.cancel(it, force=True)


class RayMeasurer:
    """`isolation.Measurer` on a worker of the cluster; takes another worker when the one that it had is lost."""

    def __init__(self, cluster: Cluster, command: Sequence[str], deadline: float) -> None:
        self.cluster, self.command, self.deadline = cluster, tuple(command), deadline
        self.seat: ray.actor.ActorHandle | None = None
        self.sent, self.started, self.closed = 0, 0, False
        self.greeting: ray.ObjectRef | None = None

    def begin(self) -> None:
        """Take a worker and ask for its machine; `hello` waits."""
        self._sit()
        self.greeting = self.seat.hello.remote()

    def hello(self) -> Machine:
        """The machine.

        Raises:
            ToolchainError: nothing can be measured there.
        """
        try:
            said = self.cluster.ray.get(self.greeting)
        except (self.cluster.ray.exceptions.RayActorError, ValueError):  # lost, or never asked
            self.seat = None
            said = self._ask("hello")
        if isinstance(said, Result) or "machine" not in said:
            reason = said.error if isinstance(said, Result) else said["error"]
            raise ToolchainError(reason)
        return Machine(**said["machine"])

    def trial(self, problem: Problem, program: str, params: Mapping[str, int], budget_ms: float) -> Result:
        """One schedule, checked and timed; asked for again when the worker is lost."""
        return self._ask("trial", problem, program, dict(params), budget_ms)

    def peer(self, problem: Problem) -> Result:
        """Another implementation of the same problem."""
        return self._ask("peer", problem)

    def _ask(self, what: str, *arguments: object) -> Result:
        ray, reason = self.cluster.ray, ""
        for _ in range(1 + RETRIES):
            if self.closed:
                return Result("crash", error="the job ended")
            try:
                if self.seat is None:
                    self._sit()
                self._ship()
                return ray.get(getattr(self.seat, what).remote(*arguments))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                self.seat = None
        return Result("crash", error=f"its worker was lost {1 + RETRIES} times: {reason}"[:500])

    def _sit(self) -> None:
        make = self.cluster.ray.remote(num_gpus=1, num_cpus=0)(Seat)
        self.seat, self.sent, self.started = make.remote(self.command, self.deadline), 0, self.started + 1

    def _ship(self) -> None:
        """Send the kernels that the worker has not got yet; it adopts them before it goes on."""
        new = self.cluster.entries[self.sent :]
        if new:
            self.seat.adopt.remote(*new)
            self.sent += len(new)

    def kill(self) -> None:
        """Stop the worker, whatever it does; may be called from another thread than the one that asks it."""
        self.closed = True
        seat = self.seat
        if seat is not None:
            with contextlib.suppress(Exception):  # it may be dead already, or the cluster gone
                self.cluster.ray.kill(seat)

    close = kill
