"""A model inside vLLM, every configuration that a server would choose among, in one run on one card.

    python -m benchmarks.engine_table qwen2.5-7b --compile-only --bundle kernels     our kernels, on any machine
    python -m benchmarks.engine_table qwen2.5-7b --bundle kernels --out engine.json  nine minutes of an H100

Configurations are timed one after another, each by `benchmarks.engine` in a process of its own, and the file is written
after each. A run that is begun again leaves out what the file has of the same commit and card. All are started alike:
torch.compile as vLLM has it, CUDA graphs of the two batches alone. To keep starts short, all configurations but the
first fill vLLM's compile cache at once before they are timed, and each one's imports go on while the one before it
starts. Nothing else runs while one is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from terrazzo.lowering.errors import ArgumentError

from benchmarks import engine, engine_model, report, tables

CONFIGURATIONS = {
    "bf16": ("none", "auto", "auto"),
    "fp8": ("fp8", "auto", "fp8"),
    "awq": ("awq", "auto", "auto"),
    "w4a16-int4": ("awq", "terrazzo", "int4_per_token_head"),
    "w4a8-int4": ("w4a8", "terrazzo", "int4_per_token_head"),
    "w4a8-int8": ("w4a8", "terrazzo", "int8_per_token_head"),
    "w4a16-int8": ("awq", "terrazzo", "int8_per_token_head"),
}
"""Name -> weights, kernel, cache; attention is ours where the kernel is. The order is that in which they are timed."""
PROGRAM = (sys.executable, "-m", "benchmarks.engine")
CASES, OUTPUT = ("24x3000", "80x2500"), 128
EXPLAINED = ("w4a16-int4", "w4a8-int4")
ROW = re.compile(r" *\d+ x \d+: ")
"""What `benchmarks.engine` says of a row."""
WEIGHT_BITS = {"none": 16, "fp8": 8}
"""Of a weight; others have four, and their groups' scales."""
AT_ONCE_GB, EACH_GB = 68.0, 4.0
"""Of a GPU, for what starts at once; of each beside its weights."""
LIMIT_S = 180.0
"""Of a start, and of a timing: what takes longer hangs."""
MODELS = ("qwen2.5-7b", "qwen2.5-14b", "llama-3-8b", "qwen3-30b-a3b", "small-llama", "tiny-llama")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_table", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="NxP", help="requests x tokens of a prompt")
    parser.add_argument("--output", type=int, default=OUTPUT, help="new tokens of a request")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which everything ends")
    parser.add_argument("--bundle", help="folder of our kernels")
    parser.add_argument("--compile-only", action="store_true", help="write the bundle and stop")
    parser.add_argument("--cold", action="store_true", help="do not fill vLLM's compile cache beforehand")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def words(o: argparse.Namespace, name: str, *more: str) -> list[str]:
    """Arguments of `benchmarks.engine` for a configuration."""
    weights, kernel, cache = CONFIGURATIONS[name]
    ours = ("--attention", "terrazzo") if kernel == "terrazzo" else ()
    bundle = ("--bundle", str(Path(o.bundle).absolute())) if o.bundle and ours else ()
    commit = ("--commit", o.commit) if o.commit else ()
    sizes = ("--cases", *o.cases, "--output", str(o.output), "--repeat", str(o.repeat), "--memory", "0.9")
    explained = ("--profile", o.cases[-1]) if name in EXPLAINED and "--warm" not in more else ()
    whole = ("--shape", o.model, "--weights", weights, "--kernel", kernel, "--kv-cache-dtype", cache)
    return [*whole, "--dtype", "bfloat16", *ours, *sizes, *bundle, *commit, *explained, *more]


def gigabytes(model: str, name: str) -> float:
    """Of the GPU, that a configuration takes to start: weights, and what stands beside them."""
    c, bits = engine_model.SHAPES[model], WEIGHT_BITS.get(CONFIGURATIONS[name][0], 4.25)
    rows = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
    inner = c.get("num_experts", 1) * c.get("moe_intermediate_size", c["intermediate_size"])
    layers = c["num_hidden_layers"] * c["hidden_size"] * (rows + 3 * inner)
    return (layers * bits / 8 + 2 * c["vocab_size"] * c["hidden_size"] * 2) / 1e9 + EACH_GB


class Child:
    """One process of `benchmarks.engine`; `reached` are the gates that it stands at, and "end"."""

    def __init__(self, name: str, argv: list[str], log: TextIO) -> None:
        self.name, self.log, self.reached = name, log, set()
        self.changed = threading.Condition()
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        text = dict(encoding="utf-8", errors="replace", start_new_session=True)
        self.process = subprocess.Popen([*PROGRAM, *argv], **pipes, **text)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.log.write(f"{self.name}: {line}")
            if line.startswith(engine.GATE):
                self._reach(line.removeprefix(engine.GATE).strip())
            elif ROW.match(line):
                print(f"  {self.name} {line.rstrip()[:400]}", flush=True)

    def _watch(self) -> None:
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # compilers that it has started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.reader.join(2.0)
        self._reach("end")

    def _reach(self, gate: str) -> None:
        with self.changed:
            self.reached.add(gate)
            self.changed.notify_all()

    def wait(self, gate: str, until: float) -> bool:
        """Whether it stands at a gate; False where it ended or time is up first."""
        with self.changed:
            self.changed.wait_for(lambda: {gate, "end"} & self.reached, max(0.0, until - time.monotonic()))
            return gate in self.reached

    def go(self) -> None:
        """Let it pass the gate at which it stands."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def end(self, until: float = 0.0) -> int | None:
        """Its exit code, None if it had to be killed."""
        self.wait("end", min(until, time.monotonic() + LIMIT_S))
        if "end" in self.reached:
            return self.process.returncode
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return None


def card() -> str | None:
    """Name of the GPU that is here; this process never opens it."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return subprocess.run(asked, capture_output=True, encoding="utf-8", check=False).stdout.split("\n")[0].strip()


def have(o: argparse.Namespace) -> set[str]:
    """Configurations that the file has.

    Raises:
        ArgumentError: it is of another commit or card.
    """
    if o.out is None or not o.out.exists():
        return set()
    old = json.loads(o.out.read_text(encoding="utf-8"))
    here = {"gpu": card(), "commit": o.commit}
    for name, value in here.items():
        if value and old[name] != value:
            raise ArgumentError("out", str(o.out), f"has rows of {name} {old[name]}, this is {value}", "name another")
    found = set()
    for name in o.only:
        asked = engine.arguments(words(o, name))
        rows, each = {engine.key(row) for row in old["rows"]}, engine.configured(asked)
        wanted = {engine.key(each | dict(batch=batch, prompt=prompt)) for batch, prompt in engine.cases(asked)}
        found |= {name} if wanted <= rows else set()
    return found


def fill_caches(o: argparse.Namespace, names: list[str], log: TextIO, until: float) -> None:
    """Start engines, as many at once as the GPU holds, only for what vLLM keeps of a start."""
    waiting, running, start = list(names), [], time.monotonic()
    while waiting or running:
        for child in [child for child in running if "end" in child.reached]:
            running.remove(child)
            print(f"  {child.name}: cache after {time.monotonic() - start:.0f} s, {child.end()}", flush=True)
        used = sum(gigabytes(o.model, child.name) for child in running)
        if waiting and (not running or used + gigabytes(o.model, waiting[0]) <= AT_ONCE_GB):
            name = waiting.pop(0)
            running.append(Child(name, words(o, name, "--warm"), log))
        elif time.monotonic() > until:
            for child in running:
                child.end()
            return
        else:
            time.sleep(0.2)


def soon(until: float) -> float:
    return min(until, time.monotonic() + LIMIT_S)


def run(o: argparse.Namespace) -> int:
    """Time every configuration that the file lacks; 1 if one failed or found no time."""
    if o.compile_only:
        ours = [engine.arguments(words(o, name)) for name in o.only if CONFIGURATIONS[name][1] == "terrazzo"]
        found = [r for at in engine.compiled_for() for each in ours for r in engine.requests(each, at)]
        return min(1, engine.compile_kernels(found, o.bundle))
    start = time.monotonic()
    until = start + o.budget
    left = [name for name in o.only if name not in have(o)]
    log = (o.out or Path("engine.json")).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    more = ("--gates", "--budget", str(o.budget), *(("--out", str(o.out)) if o.out else ()))
    failed = []
    with log.open("a", encoding="utf-8", buffering=1) as said:
        following, started = None, lambda at: Child(left[at], words(o, left[at], *more), said)
        for at, name in enumerate(left):
            if at == 1 and not o.cold:
                fill_caches(o, left[1:], said, soon(until))
            child, following = following or started(at), None
            if child.wait("engine", soon(until)):
                child.go()
                if at + 1 < len(left) and (at or o.cold):  # its imports, while this one starts
                    following = started(at + 1)
            if child.wait("timing", soon(until)):
                print(f"{name}: ready after {time.monotonic() - start:.0f} s", flush=True)
                if following is not None:
                    following.wait("engine", soon(until))
                child.go()
                code = child.end(until)
            else:
                code = child.end()
            if code != 0:
                failed.append(name)
                print(f"{name}: {'no time left' if code is None else f'exit code {code}'}; see {log}", flush=True)
        if following is not None:
            following.end()
    if o.out is not None and o.out.exists():
        print(tables.served_table(json.loads(o.out.read_text(encoding="utf-8"))))
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    o = arguments(argv)
    return report.guarded("benchmarks.engine_table", lambda: run(o))


if __name__ == "__main__":
    sys.exit(main())
