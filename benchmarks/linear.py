"""Linear layers of every format, compared with cuBLAS in 16 bits and with other packages' kernels, by one rule.

    python -m benchmarks.linear                       every format on both sets of shapes, a file for each, by value
    python -m benchmarks.linear --formats w4a8,fp8 --shapes held-out --budget-s 300
    python -m benchmarks.linear --formats w4a16 --shapes 4608x3584,3584x3584 --m 1,64 --out folder
    python -m benchmarks.linear --compile-only        the kernels of the same arguments, ours and humming's; no timing

A file is written where a format has been measured on all shapes of a set: benchmarks/results/<format>_<gpu>.json for
layers that records were tuned on, <format>_held_out_<gpu>.json for others. While one format is measured, the kernels
of the next are compiled. A peer that leaves the GPU in an error is left out, and its format is measured again. Peers
that are not installed are named in `peers_missing`, those that raise or are wrong in `peers_failed` of a row.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import program, report
from benchmarks.peers import byte_inputs
from benchmarks.peers import bytes as byte_peers
from benchmarks.peers.weights import Humming, Machete, Marlin

TUNED = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(N, K) of Llama-3-8B: q, k, v; o; gate and up; down. Records of an H100 were tuned on them."""
HELD_OUT = (
    (4608, 3584), (37888, 3584), (3584, 18944), (30720, 3840), (3840, 15360), (7168, 5120), (34816, 5120),
    (5120, 17408),
)  # fmt: skip
"""Layers of Qwen2.5-7B, Gemma-3-12B and Qwen3-14B, which no tuned record names; no side is a power of two."""
SETS = {"tuned": TUNED, "held-out": HELD_OUT}
MS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)
ROW = 1 << 30
"""A group of as many k as there are: one scale for a row."""
CHECKED = 2048
"""Output features that are held against the bound of our kernels; all are compared with cuBLAS's in `errors`."""
SHARE = 0.6
"""Of the processors, for ours and for humming's kernels each, where there are both; what measures goes first."""


@dataclass(frozen=True)
class Format:
    """One row of the tables.

    Attributes:
        title: in tables. record: of the product. group: k of a scale, ROW for one. dtype: of activations and outputs.
        peers: compared with, besides cuBLAS. more: other fields of `LinearSettings`.
        aside: whether README leaves it to docs/results.md, as another form of a row that it has.
    """

    title: str
    record: str
    group: int
    peers: Sequence[Any]
    dtype: str = "float16"
    more: Mapping[str, Any] = field(default_factory=dict)
    aside: bool = False

    def settings(self, options: argparse.Namespace, name: str) -> Any:
        from terrazzo.autotune.linear_bench import LinearSettings

        peers = () if options.no_peers else [p for p in self.peers if f"{name}:{p.name}" not in options.without]
        facts = dict(group=self.group, budget_ms=options.budget_ms, peers=peers, checked=CHECKED, **self.more)
        return LinearSettings(self.dtype, record=self.record, **facts)


BRAIN = "bfloat16"
_WIDE, _INTEGERS = (Marlin(), Humming()), (Marlin(), Machete(), Humming())
FORMATS: dict[str, Format] = {
    "w4a16": Format("W4A16", "w4a16", 128, _INTEGERS, more={"symmetric": True}),
    "w4a8": Format("W4A8", "w4a8", 128, (*byte_inputs.INT8_PEERS, byte_peers.FP8[0])),
    "w4afp8": Format("W4A8 on e4m3", "w4a8_fp8", 128, (*byte_inputs.FP8_PEERS, byte_peers.FP8[0])),
    "fp8_block": Format("FP8 weights in blocks", "fp8", 128, _WIDE, BRAIN),
    "mxfp4": Format("MXFP4 weights", "mxfp4", 32, _WIDE, BRAIN),
    "nvfp4": Format("NVFP4 weights", "nvfp4", 16, _WIDE, BRAIN),
    "w8a16_g128": Format("INT8 weights in groups", "w8a16", 128, _INTEGERS, BRAIN, {"symmetric": True}),
    "w8a8_blocks": Format("W8A8, e4m3 in blocks", "w8a8_fp8", 128, (*byte_peers.BLOCKS, byte_peers.FP8[1]), BRAIN),
    "w8a8": Format("W8A8, int8", "w8a8", ROW, (*byte_peers.INT8, *byte_peers.FP8), BRAIN),
    "w8a8_fp8": Format("W8A8, e4m3", "w8a8_fp8", ROW, byte_peers.FP8, BRAIN),
    "mxfp4_fp8": Format("MXFP4 on e4m3", "mxfp4_fp8", 32, (Marlin(), byte_peers.FP8[0]), BRAIN),
    "mxfp4_mxfp8": Format("MXFP4 on MXFP8", "mxfp4_mxfp8", 32, (byte_peers.FP8[0],), BRAIN),
    "w4ax": Format("W4Ax", "w4ax", 128, (byte_inputs.OurW4A8(), byte_peers.INT8[0], byte_peers.FP8[0])),
    "nf4": Format("NF4 weights", "nf4", 64, (), BRAIN),
    "w4a16_bf16": Format("W4A16, bfloat16", "w4a16", 128, _INTEGERS, BRAIN, {"symmetric": True}, aside=True),
    "fp8": Format("FP8 weights", "fp8", ROW, _WIDE, BRAIN, aside=True),
    "w8a16": Format("INT8 weights", "w8a16", ROW, _INTEGERS, BRAIN, {"symmetric": True}, aside=True),
    "fp8_block_folded": Format(
        "FP8 weights in blocks, folded", "fp8", 128, _WIDE, BRAIN, {"scale_dtype": BRAIN}, aside=True
    ),
    "w8a8_fp8_fast": Format(
        "W8A8, e4m3, fast sums", "w8a8_fp8", ROW, byte_peers.FP8, BRAIN, {"accumulate": "fast"}, aside=True
    ),
}
"""Name of a file -> what it measures, what people look at most first."""
FIRST = ("w4a16", "w4a8", "w4afp8")
Job = tuple[str, str]
"""Name of a format, and of a set of shapes or the shapes in words."""


class SpentError(Exception):
    """The budget is over."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    made = program.parser("linear", __doc__, 6.0, "no-peers", "compile-only")
    made.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, of " + ", ".join(FORMATS))
    made.add_argument("--shapes", help="tuned, held-out, or comma-separated NxK; default: both sets")
    made.add_argument("--m", default=",".join(map(str, MS)), help="comma-separated numbers of tokens")
    made.add_argument("--budget-s", type=float, default=1e9, help="seconds after which no more shapes are begun")
    made.add_argument("--soon", action="store_true", help="with --compile-only: begin before all kernels are listed")
    made.add_argument("--without", action="append", default=[], metavar="FORMAT:PEER", help="leave a peer out")
    o = made.parse_args(argv)
    try:
        o.m = tuple(dict.fromkeys(program.numbers(o.m)))
        sets = [o.shapes] if o.shapes else list(SETS)
        o.shapes = {name: SETS.get(name) or tuple(_shape(each) for each in name.split(",")) for name in sets}
    except ValueError:
        made.error("write tokens as 1,16,256, shapes as tuned, held-out or 4608x3584,3584x3584")
    if min(o.m) < 1:
        made.error(f"--m {o.m}: every M must be at least 1")
    o.formats = tuple(o.formats.split(","))
    if not set(o.formats) <= set(FORMATS):
        made.error(f"--formats {','.join(o.formats)}: must be of {', '.join(FORMATS)}")
    return o


def _shape(text: str) -> tuple[int, int]:
    n, k = map(int, text.split("x"))
    return n, k


def jobs(options: argparse.Namespace) -> list[Job]:
    """What is measured, in order: some formats on all sets, then the others set by set."""
    rest = [name for name in options.formats if name not in FIRST]
    first = [(name, shapes) for name in options.formats if name in FIRST for shapes in options.shapes]
    return first + [(name, shapes) for shapes in options.shapes for name in rest]


def layers(shapes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[str, ...]]:
    """(N, K) -> names of the layers that have this shape."""
    from terrazzo.schedules.models import MODELS

    named = {shape: [] for shape in shapes}
    for model, found in MODELS.items():
        for layer in found:
            named.get((layer.n, layer.k), []).append(f"{model}.{layer.name}")
    return {shape: tuple(names) for shape, names in named.items()}


def requests(options: argparse.Namespace, job: Job, target: Any) -> list[Any]:
    """All kernels of ours that a job launches."""
    from terrazzo.autotune.linear_bench import class_of

    settings = FORMATS[job[0]].settings(options, job[0])
    kind = class_of(settings.product)
    found = [r for n, k in options.shapes[job[1]] for r in kind.requests(n, k, options.m, settings, target)]
    return list(dict.fromkeys(found))


def file_of(options: argparse.Namespace, job: Job, gpu: str) -> Path:
    part = {"tuned": "", "held-out": "_held_out"}.get(job[1], "_shapes")
    return (options.out or report.RESULTS) / report.file_name(job[0] + part, gpu)


def measure(options: argparse.Namespace, job: Job, end: float) -> Path:
    """Measure a job and write its file, which it returns; until all shapes are done, rows lie in FILE.part.

    Raises:
        SpentError: `end` came before the last shape. PoisonedError: see gemm_bench.
    """
    from terrazzo.autotune.gemm_bench import bench
    from terrazzo.autotune.linear_bench import class_of

    start, name, problems = time.perf_counter(), job[0], layers(options.shapes[job[1]])
    settings = FORMATS[name].settings(options, name)

    def on_shape(result: dict[str, Any]) -> None:
        path = file_of(options, job, result["gpu"])
        result |= {"format": name, "shapes": job[1], "tokens": options.m, "command": command(*job)}
        whole = len(result["rows"]) == len(problems) * len(options.m)
        report.write(result, path if whole else path.with_suffix(".part"), start)
        if whole:
            path.with_suffix(".part").unlink(missing_ok=True)
        elif time.perf_counter() > end:
            raise SpentError

    facts = dict(compile_all=program.compile_all, on_row=show, on_shape=on_shape, commit=options.commit)
    result = bench(class_of(settings.product), problems, options.m, settings, **facts)
    for left_out in (it for it in options.without if it.startswith(f"{name}:")):
        result["peers_missing"][left_out.partition(":")[2]] = "it left the GPU in an error"
    on_shape(result)
    for peer, reason in result["peers_missing"].items():
        print(f"peer {peer}: not measured, {reason}")
    for line in report.failures(result):
        print(f"FAILED {line}")
    return file_of(options, job, result["gpu"])


def command(name: str, shapes: str) -> str:
    """What measures a file again."""
    return f"python -m benchmarks.linear --formats {name} --shapes {shapes}"


def show(row: dict[str, Any]) -> None:
    """One line for a row, as it is measured: ours, over the fastest peer, alone and with quantizers."""
    place = f"({row['n']:5}, {row['k']:5}) M {row['m']:4} {row['op']:9}"
    broken = "  ".join(f"{name}: {why[:90]}" for name, why in row.get("peers_failed", {}).items())
    if not row["us"]:
        print(place, f"FAILED: {row['failure'][:90]} {broken}", flush=True)
        return
    peer = min(row["peers"], key=row["peers"].get, default=None)
    said = f"{row['us']:8.2f} us" + (f", {peer} {row['peers'][peer] / row['us']:.2f}x" if peer else "")
    whole = row.get("variants", {}).get("with_quantizer")
    beside = report.beside_quantizer(row)
    if whole and beside:
        said += f"; with quantizer {whole:8.2f} us, {min(beside, key=beside.get)} {min(beside.values()) / whole:.2f}x"
    print(place, said, broken, flush=True)


class Readiness:
    """What is left to compile for each job; says `ready FORMAT SHAPES` where that is nothing."""

    def __init__(self, all_jobs: Sequence[Job]) -> None:
        self.left = dict.fromkeys(all_jobs, 2)  # until ours are listed, and humming's
        self.lock, self.start = threading.Lock(), time.perf_counter()

    def add(self, job: Job, more: int) -> None:
        with self.lock:
            self.left[job] += more
            if not self.left[job]:
                print("ready", *job, f"{time.perf_counter() - self.start:.0f} s", flush=True)


def compile_ahead(options: argparse.Namespace) -> int:
    """Compile what every job needs, in order, ours and humming's at the same time."""
    from terrazzo.lowering import parallel
    from terrazzo.lowering.targets import Target

    target, cpus, failed = Target.detect(), max(2, len(os.sched_getaffinity(0)) - 2), []
    readiness, owners, small = Readiness(jobs(options)), {}, {}
    workers = 0 if options.no_peers or Humming().missing() else max(1, int(cpus * SHARE))

    def ours(some: Sequence[Job]) -> list[Any]:
        found = []
        for job in some:
            own = [request for request in requests(options, job, target) if request not in owners]
            owners.update(dict.fromkeys(own, job))
            readiness.add(job, len(own) - 1)
            found += own
        return found

    def progress(done: int, total: int, request: Any, outcome: Any) -> None:
        if isinstance(outcome, Exception):
            failed.append(f"{owners[request]}: {outcome}"[:300])
            print(failed[-1], flush=True)
        readiness.add(owners[request], -1)

    def rivals(job: Job, pool: ThreadPoolExecutor) -> None:
        wanted = []
        try:
            if workers and job[0] not in small:
                small[job[0]] = _humming(options, job[0])
            for layer in small.get(job[0], ()):
                wanted += Humming.ahead(layer, options.shapes[job[1]], options.m)
        except Exception as error:  # what is measured compiles these by itself
            print(f"humming: no kernels of {job}: {type(error).__name__}: {error}"[:300], flush=True)
        wanted = list(dict.fromkeys(wanted))  # several numbers of tokens take one tile
        readiness.add(job, len(wanted))
        for each in wanted:
            pool.submit(Humming.compile, each).add_done_callback(lambda done: readiness.add(job, -1))
        readiness.add(job, -1)

    first, one = 1 if options.soon else len(jobs(options)), lambda: ThreadPoolExecutor(1)
    with ThreadPoolExecutor(max(1, workers)) as pool, one() as builder, one() as planner:
        now = ours(jobs(options)[:first])
        later = planner.submit(ours, jobs(options)[first:])
        for job in jobs(options):
            builder.submit(rivals, job, pool)
        for batch in (lambda: now, later.result):
            if found := batch():
                parallel.compile_many(found, workers=workers or cpus, progress=progress)
        builder.shutdown()
    return 1 if failed else 0


def _humming(options: argparse.Namespace, name: str) -> list[Any]:
    """Small layers of humming's peers of a format, from which the kernels of larger ones follow."""
    import torch
    from terrazzo.autotune.linear_bench import dense_of, random_weight

    settings, made = FORMATS[name].settings(options, name), []
    for peer in (peer for peer in settings.peers if hasattr(peer, "layers")):
        try:
            weight = random_weight(512, 512, settings, torch.Generator("cuda").manual_seed(0))
            dense = dense_of(weight, getattr(torch, settings.dtype))
            made.append(peer.layers(peer.small(weight, dense), dense.dtype)())
        except Exception as error:  # another package's error of any kind costs its column, not the run
            print(f"humming: no layer of {name}: {type(error).__name__}: {error}"[:300], flush=True)
    return made


class Ahead:
    """A process that compiles what is measured later. `wait` returns when a job's kernels are ready."""

    def __init__(self, argv: Sequence[str]) -> None:
        words = ["nice", "-n", "10", sys.executable, "-m", "benchmarks.linear", *argv, "--compile-only", "--soon"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True)
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.ready: set[Job] = set()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def wait(self, job: Job) -> None:
        """Until the job is ready, or nothing more will be: `measure` compiles what is left by itself."""
        while job not in self.ready:
            line = self.lines.get()
            if line is None:
                self.lines.put(None)
                return
            print(f"[ahead] {line}", flush=True)
            if line.startswith("ready "):
                self.ready.add(tuple(line.split()[1:3]))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)  # its compilers, too
        self.process.wait()


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure every job that the budget allows; 1 if one is left or failed."""
    if options.compile_only:
        return compile_ahead(options)
    from terrazzo.autotune.gemm_bench import PoisonedError, require_gpu

    require_gpu()
    start = time.perf_counter()
    end, ahead, left, code = start + options.budget_s, Ahead(argv), jobs(options), 0
    again = lambda more: _again(argv, [*more, f"--budget-s={max(1.0, end - time.perf_counter()):.0f}"])
    try:
        while left:
            ahead.wait(left[0])
            if time.perf_counter() > end:
                break
            try:
                path = measure(options, left[0], end)
                print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)
            except SpentError:
                break
            except PoisonedError as error:
                print(f"the GPU is in an error after {error}; once more without it", flush=True)
                ahead.close()
                again([f"--without={left[0][0]}:{error.peer}", *_words(left)])
            except (RuntimeError, ValueError) as error:  # one format's fault is no other's
                code = 1
                print(f"NOT MEASURED: {' '.join(left[0])}, {type(error).__name__}: {error}"[:400], flush=True)
                rest = [job for job in left[1:] if job[0] != left[0][0]]
                if rest and _is_broken():
                    ahead.close()
                    again(_words(rest))
            left = left[1:]
    finally:
        ahead.close()
    for job in left:
        code = 1
        print(f"NOT MEASURED: {' '.join(job)}, the budget of {options.budget_s:.0f} s is over; its old file stays")
    return code


def _words(left: Sequence[Job]) -> list[str]:
    """Arguments that ask for these jobs; where they are of several sets, for the formats on all of them."""
    names, sets = (list(dict.fromkeys(part)) for part in zip(*left))
    return ["--formats", ",".join(names), *(["--shapes", sets[0]] if len(sets) == 1 else [])]


def _is_broken() -> bool:
    """Whether the GPU is in an error that lasts to the end of the process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _again(argv: Sequence[str], more: Sequence[str]) -> None:
    """Start this program anew in this process's place, which gives the GPU's context back."""
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.linear", *_without(argv), *more])


def _without(argv: Sequence[str]) -> list[str]:
    """Arguments but for what a second start says anew."""
    kept, words = [], iter(argv)
    for word in words:
        if word in ("--formats", "--budget-s"):
            next(words, None)
        elif not word.startswith(("--formats=", "--budget-s=")):
            kept.append(word)
    return kept


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    options = arguments(words)
    return report.guarded("benchmarks.linear", lambda: run(options, words))


if __name__ == "__main__":
    sys.exit(main())
