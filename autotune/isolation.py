"""The job's side of a measuring process: asks, waits with a deadline, replaces a process that died or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from terrazzo.autotune.database import Machine, Problem
from terrazzo.lowering.cache import cache_root
from terrazzo.lowering.data_files import parse_json
from terrazzo.lowering.errors import ToolchainError, shown
from terrazzo.lowering.worker import search_path

DEADLINE_S = 90.0
"""For one trial, loading the weight included; a process that needs longer is stopped."""
QUEUE_S = 3600.0
"""For other jobs on the same GPU to finish their trial."""
START_S = 180.0
_START = "import sys; sys.path[:] = sys.argv[1:]; from terrazzo.autotune.measurer import serve; serve()"
COMMAND = (sys.executable, "-c", _START)
"""The process; `Measurer` gives it the folders that it may import from, which the working directory is none of."""
_LONGEST = 1 << 20  # bytes of an answer


@dataclass(frozen=True)
class Result:
    """What a measuring process said, or what became of it: a status of the database, a time or a reason."""

    status: str
    us: float | None = None
    spread: float | None = None
    error: str = ""
    name: str = ""


def _memory() -> BinaryIO:
    """A file in memory, which a full TMPDIR does not matter to."""
    return os.fdopen(os.memfd_create("terrazzo-measurer"), "w+b")


class Measurer:
    """One GPU's measuring process, started when first needed and again after it died.

    Args:
        device: value of CUDA_VISIBLE_DEVICES for it, or None to leave that alone.
        command: the process; it speaks as autotune/measurer.py does.
        deadline: seconds for one trial.
    """

    def __init__(
        self, device: str | None = None, command: Sequence[str] = COMMAND, deadline: float = DEADLINE_S
    ) -> None:
        self.device, self.command, self.deadline = device, tuple(command), deadline
        self.process: subprocess.Popen | None = None
        self.noise, self.words_from = _memory(), 0  # what it prints, and where the present one began
        self.buffer = b""
        self.started, self.greeted = 0, False

    def begin(self) -> None:
        """Start the process and ask for its machine; `hello` waits. It ends with the thread that calls this."""
        with contextlib.suppress(BrokenPipeError):  # a process that has ended is asked for its last words
            self._send({"do": "hello"})
        self.greeted = True

    def hello(self) -> Machine:
        """The machine.

        Raises:
            ToolchainError: the process cannot measure; the message carries its reason.
        """
        if not self.greeted:
            self.begin()
        self.greeted, said = False, self._answer(START_S)
        try:
            return Machine(**said["machine"])
        except (KeyError, TypeError):  # it died, or says why there is none
            reason = said.get("error", shown(said)) if said else self._last_words("the measuring process")
            self.close()
            raise ToolchainError(f"nothing can be measured here: {reason}") from None

    def trial(self, problem: Problem, program: str, params: Mapping[str, int], budget_ms: float) -> Result:
        """One schedule, checked and timed; never raises for what happens in the process."""
        asked = {"do": "trial", "program": program, "schedule": dict(params), "budget_ms": budget_ms}
        return self._ask(problem, asked)

    def peer(self, problem: Problem) -> Result:
        """Another implementation of the same problem."""
        return self._ask(problem, {"do": "peer"})

    def _ask(self, problem: Problem, message: dict[str, Any]) -> Result:
        message |= {"op": problem.op, "facts": dict(problem.facts), "m": problem.m}
        try:
            self._send(message)
        except OSError as error:
            self.close()
            return Result("crash", error=f"the measuring process cannot be reached: {error}")
        said = self._answer(START_S + QUEUE_S)
        if said == {"started": True}:
            said = self._answer(self.deadline)
        if said is None:
            hung = self.process is not None and self.process.poll() is None
            what = f"no answer in {self.deadline:g} s" if hung else self._last_words("the process")
            self.close()
            return Result("hang" if hung else "crash", error=what)
        try:
            found = Result(**said)
        except TypeError:
            found = Result("crash", error=f"the measuring process answered {shown(said)}")
        if found.status in ("crash", "wrong"):
            self.close()
        return found

    def _send(self, message: dict[str, Any]) -> None:
        if self.process is None:
            visible = {} if self.device is None else {"CUDA_VISIBLE_DEVICES": self.device}
            self.process = subprocess.Popen(
                (*self.command, *search_path()) if self.command == COMMAND else self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.noise,
                env={**os.environ, "TERRAZZO_CACHE_DIR": str(cache_root()), **visible},
                start_new_session=True,  # Ctrl-C in a terminal is the job's alone
            )
            self.buffer, self.started = b"", self.started + 1
            self.words_from = self.noise.seek(0, os.SEEK_END)
        self._write(message)

    def _write(self, message: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """One line of the process, an object of what it says; None if it dies or the time is over."""
        end = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or self.process is None:
                return None
            if select.select([self.process.stdout], [], [], left)[0]:
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    self.process.wait()
                    return None
                self.buffer += read
                if len(self.buffer) > _LONGEST:
                    return {"answer": self.buffer[:80]}
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            said = parse_json(line)
        except ValueError:
            said = None
        return said if isinstance(said, dict) else {"answer": line[:80]}

    def _last_words(self, who: str) -> str:
        code = self.process.wait() if self.process is not None else None
        self.noise.seek(max(self.words_from, self.noise.seek(0, os.SEEK_END) - 1000))
        words = " ".join(self.noise.read().decode(errors="replace").split())[-400:]
        return f"{who} died with exit status {code}" + (f": {words}" if words else "")

    def kill(self) -> None:
        """Stop the process, whatever it does; may be called from another thread than the one that asks it."""
        process = self.process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the process and let go of it."""
        self.kill()
        process, self.process = self.process, None
        if process is not None:
            process.wait()
            process.stdout.close()
            with contextlib.suppress(OSError):
                process.stdin.close()
