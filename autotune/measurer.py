"""The process that measures: started as `python -m terrazzo.autotune.measurer`, it speaks JSON lines and owns a GPU.

It holds the weights of one problem, checks each candidate's output against the oracle (and that two runs give the same
bits), and only then times it. It ends after anything that may have harmed the device or its memory: a CUDA error, or a
wrong result. A lock for each GPU lets one process measure at a time, also those of other jobs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from terrazzo.autotune import measure
from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import get_operator
from terrazzo.lowering.cache import cache_root
from terrazzo.lowering.errors import TerrazzoError
from terrazzo.schedules import records

if TYPE_CHECKING:
    from terrazzo.autotune.gemm_bench import Shape
    from terrazzo.lowering.targets import Target

PEER_MS = 15.0


class Bench:
    """The weights of one problem at a time, and what they are checked against."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.weight: Any = None
        self.shape: Shape | None = None
        self.inputs: dict[int, Any] = {}
        self.expected: dict[tuple[int, str], tuple] = {}

    def load(self, problem: Problem) -> Shape:
        if self.weight != (problem.op, problem.facts):
            if self.shape is not None:
                self.shape.drop()
            self.inputs, self.expected = {}, {}
            self.shape = get_operator(problem.op).shape(problem, self.target)
            self.weight = (problem.op, problem.facts)
        return self.shape

    def tokens(self, problem: Problem) -> Any:
        if problem.m not in self.inputs:
            self.inputs, self.expected = {problem.m: self.shape.tokens(problem.m)}, {}
        return self.inputs[problem.m]

    def trial(self, problem: Problem, program: str, params: dict[str, int], budget_ms: float) -> dict[str, Any]:
        """Status, time and spread of one schedule. CUDA errors are raised."""
        shape = self.load(problem)
        x = self.tokens(problem)
        with records.forced(problem.op, program, params):
            records.changed()
            try:
                return self._trial(shape, problem, x, budget_ms)
            except TerrazzoError as error:
                return {"status": "error", "error": _line(error)}
            finally:
                records.changed()

    def _trial(self, shape: Shape, problem: Problem, x: Any, budget_ms: float) -> dict[str, Any]:
        import torch
        from terrazzo.autotune import gemm_bench

        requests = shape.requests(shape.n, shape.k, problem.m, shape.settings, self.target)
        kind = next((str(value) for key, value in requests[0].params if key == "numerics"), "")
        if (problem.m, kind) not in self.expected:
            self.expected[problem.m, kind] = shape.expected(x, requests)
        rows, reference, bound, _ = self.expected[problem.m, kind]
        call = shape.calls(x)[gemm_bench.OURS]
        first, second = (measure.poisoned((problem.m, shape.n), shape.dtype, gemm_bench.DEVICE) for _ in range(2))
        for y in (first, second):
            call(shape.packed[0], y)
        problems = gemm_bench.wrong(first, rows, reference, bound)
        if not problems and not torch.equal(first, second):
            problems = "two launches gave different bits"
        if problems:
            return {"status": "wrong", "error": problems}
        timing = measure.time_calls([gemm_bench.bound_call(call, packed, second) for packed in shape.packed], budget_ms)
        torch.cuda.synchronize()
        if len(shape.packed) == 1 and not torch.equal(first, second):
            return {"status": "wrong", "error": "the timed launches gave other bits than the first one"}
        return {"status": "ok", "us": timing.us, "spread": timing.spread}

    def peer(self, problem: Problem) -> dict[str, Any]:
        """cuBLAS on the same problem."""
        from terrazzo.autotune import gemm_bench

        shape = self.load(problem)
        x = self.tokens(problem)
        peer, loaded = shape.peers[gemm_bench.Cublas.name]
        timing = measure.time_calls([gemm_bench.peer_call(peer, x, copy) for copy in loaded], PEER_MS)
        return {"status": "ok", "name": peer.name, "us": timing.us}


def describe(target: Target) -> dict[str, Any]:
    """The machine as trials name it."""
    from terrazzo.autotune.gemm_bench import header
    from terrazzo.lowering.request import package_digest

    found = header(target)
    machine = {name: found[name] for name in ("gpu", "sms", "driver", "cuda", "torch", "tilelang", "terrazzo")}
    return machine | {"arch": target.arch, "sources": package_digest()[:16]}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def serve() -> None:
    """Answer requests from stdin until it closes; whatever libraries print goes to stderr."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed job leaves no process on the GPU
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ[records.VARIABLE] = "off"  # the heuristic's schedule is tried as such

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    bench: Bench | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if "path" in message:
            sys.path.extend(entry for entry in message["path"] if entry not in sys.path)
            continue
        try:
            if bench is None:
                bench = _start()
            if message["do"] == "hello":
                say(machine=describe(bench.target))
                continue
            problem = Problem.of(message["op"], message["facts"], message["m"])
            with _gpu_lock():
                say(started=True)
                if message["do"] == "peer":
                    found = bench.peer(problem)
                else:
                    found = bench.trial(problem, message["program"], message["schedule"], message["budget_ms"])
        except TerrazzoError as error:
            found = {"status": "error", "error": _line(error)}
        except Exception as error:  # CUDA errors of any kind: this process has no usable device any more
            say(status="crash", error=_line(error))
            os._exit(1)
        say(**found)
        if found["status"] == "wrong":
            os._exit(0)


def _start() -> Bench:
    from terrazzo.autotune.gemm_bench import require_gpu
    from terrazzo.lowering.targets import Target

    require_gpu()
    return Bench(Target.detect())


def _gpu_lock() -> Any:
    """Held while something is measured: one process of all jobs at a time."""
    import filelock

    folder = cache_root() / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(folder / f"gpu-{_gpu_id()}.lock")


def _gpu_id() -> str:
    import torch

    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(seen, "uuid", None) or os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


if __name__ == "__main__":
    serve()
