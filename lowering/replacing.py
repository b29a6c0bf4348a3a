"""Kernels that are compiled in a process of their own while others answer in their place."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from terrazzo.lowering import kernels
from terrazzo.lowering.errors import CompileError, TerrazzoError
from terrazzo.lowering.parallel import CompilePool
from terrazzo.lowering.request import KernelRequest

VARIABLE = "TERRAZZO_BACKGROUND"
"""Environment: "0" compiles a kernel where it is first called, before it answers."""


def off() -> bool:
    """Whether nothing is compiled in the background."""
    return os.environ.get(VARIABLE, "") == "0"


class Replacements:
    """What is being compiled, one kernel at a time on one CPU, and who waits for it.

    Args:
        pool: makes a `CompilePool` of what is to be called with each outcome.
    """

    def __init__(self, pool: Callable[..., CompilePool] = CompilePool) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[KernelRequest, list[Callable[[], None]]] = {}
        self._failed: set[KernelRequest] = set()
        self._telling = 0  # outcomes whose callers are being told
        self._make, self._pool = pool, None

    def when_ready(self, request: KernelRequest, notify: Callable[[], None]) -> None:
        """Compile a kernel, and call `notify`, in another thread, once `get_kernel` answers without compiling; at once
        if it does so now. A kernel that cannot be compiled is warned of, once, and its callers are not called."""
        with self._changed:
            if request in self._failed:
                return
            waiting = self._waiting.setdefault(request, [])
            waiting.append(notify)
            if len(waiting) > 1:
                return
        if kernels.is_ready(request):
            self._done(request, None)
            return
        try:
            with self._changed:
                if self._pool is None:
                    self._pool = self._make(self._done, workers=1)
                self._pool.submit(request)
        except (TerrazzoError, OSError) as error:  # there is no compiler, or no process to be had
            self._done(request, error)

    def _done(self, request: KernelRequest, outcome: Path | CompileError | Exception | None) -> None:
        failed = isinstance(outcome, Exception)
        with self._changed:
            callers = self._waiting.pop(request, ())
            self._telling += 1
            if failed:
                self._failed.add(request)
        try:
            if isinstance(outcome, CompileError):
                said = f"a slower kernel goes on in the place of {request}: {str(outcome).partition(chr(10))[0]}"
                warnings.warn(said, RuntimeWarning, stacklevel=2)
            for notify in () if failed else callers:
                notify()
        finally:
            with self._changed:
                self._telling -= 1
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled and all who waited know; False where that takes longer than `timeout`
        seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._telling, timeout)


_replacements = Replacements()


def when_ready(request: KernelRequest, notify: Callable[[], None]) -> None:
    """`Replacements.when_ready` of this process."""
    _replacements.when_ready(request, notify)


def wait(timeout: float | None = None) -> bool:
    """`Replacements.wait` of this process."""
    return _replacements.wait(timeout)


def _after_fork() -> None:
    global _replacements
    _replacements = Replacements()  # the threads of the parent's are not here


os.register_at_fork(after_in_child=_after_fork)
