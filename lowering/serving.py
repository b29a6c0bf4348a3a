"""What a compiling process does: it answers requests, one JSON line each, until its parent is gone."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from terrazzo.lowering import compilers
from terrazzo.lowering.errors import TerrazzoError
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.worker import IDLE_S


def _lines() -> Iterator[dict[str, Any]]:
    """Messages from stdin, until it closes or nothing came for IDLE_S."""
    while select.select([0], [], [], IDLE_S)[0]:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        yield json.loads(line)


def _end_with_parent() -> None:
    """When the parent is killed, end this process and the compilers that it has started."""
    watched = select.poll()
    watched.register(0, 0)  # only that the other end is gone
    watched.poll()
    os.killpg(0, signal.SIGKILL)


def serve(headers: str = "") -> None:
    """The worker process: answer requests. Whatever a builder prints goes to stderr.

    Args:
        headers: entry of sys.path with the tvm-ffi whose headers compile, "" for the first one.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if headers:
        compilers.import_tvm_ffi(headers)
    for message in _lines():
        if message["folder"] not in (None, *sys.path):
            sys.path.append(message["folder"])
        try:
            said = {"folder": str(compile_request(KernelRequest.from_dict(message["request"]), message["count"]))}
        except TerrazzoError as error:
            said = {"error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
