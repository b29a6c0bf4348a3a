"""The steps of `python -m benchmarks.host`, and which GPU takes which. Nothing here starts a process or needs a GPU."""

from __future__ import annotations

import heapq
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from terrazzo.lowering.toolchain import find_nvcc

GRACE_S = 5.0
"""Between the interrupt of a step and its end by force."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: what --only and --skip match. The exit code tells of those that begin with "test.".
        command: arguments of this Python; {out}, {results}, {gpu} and {commit} are filled in.
        seconds: estimate on an H200 with 16 cores and no kernel in the cache.
        priority: 1 is taken first; of equals, the first in the table.
        kind: "test"; "timed", which nothing may disturb; "compile", which runs beside the others and launches nothing.
        needs: keys of `NEEDS`.
        compile: arguments that only compile the step's kernels and use no GPU, where there are such.
        ahead_of: of a "compile": the step whose kernels it compiles.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    priority: int = 1
    kind: str = "test"
    needs: tuple[str, ...] = ("nvcc",)
    compile: tuple[str, ...] = ()
    ahead_of: str = ""


NEEDS: dict[str, Callable[[], object]] = {
    "nvcc": find_nvcc,
    "compute-sanitizer": lambda: shutil.which("compute-sanitizer"),
}
"""Tool or package -> something true where it is installed."""


def missing(step: Step) -> str:
    """Why the step cannot run on this machine, or ""."""
    absent = [name for name in step.needs if not NEEDS[name]()]
    return f"no {' and no '.join(absent)} here" if absent else ""


PYTEST = ("-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider")


def suite(
    file: str, seconds: float, priority: int = 1, parts: dict | None = None, ahead: bool = False, **facts: object
) -> list[Step]:
    """A file of tests: a step for each part (word of -k -> seconds, priority), and one for what no part selects.

    With `ahead` its kernels are compiled ahead: for files whose cases say what they launch without a tensor on the GPU.
    """
    name = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py").removesuffix("_gpu")
    rest = " and ".join(f"not {word}" for word in parts or {})
    picks = [("", rest, seconds, priority), *((f".{word}", word, *cost) for word, cost in (parts or {}).items())]
    made = []
    for end, words, s, p in picks:
        command = (*PYTEST, f"tests/{file}", *(("-k", words) if words else ()))
        compiles = (*command, "--compile-only") if ahead else ()
        made.append(Step(f"test.{name}{end}", command, s, p, compile=compiles, **facts))
    return made


def bench(
    module: str, seconds: float, priority: int, *flags: str, out: str = "", ahead: bool = True, needs: str = "nvcc"
) -> Step:
    """A benchmark program; its result is `out` (default: the program's name) and the GPU's."""
    given = (*flags, "--out", f"{{results}}/{out or module}_{{gpu}}.json", "--commit={commit}")
    name = ".".join(["bench", module, *(flag.strip("-") for flag in flags)])
    compiles = ("-m", "benchmarks.compile_ahead", module, *given) if ahead else ()
    return Step(
        name, ("-m", f"benchmarks.{module}", *given), seconds, priority, "timed", tuple(needs.split()), compiles
    )


def linear(formats: str, seconds: int, priority: int) -> Step:
    """Linear layers of some formats, which compiles while it measures; a file for each that the budget allows."""
    given = ("-m", "benchmarks.linear", "--formats", formats, "--budget-s", str(seconds))
    made = (*given, "--out", "{results}", "--commit={commit}")
    name = f"bench.linear.{formats.partition(',')[0]}"
    return Step(name, made, seconds + 60, priority, "timed", ("nvcc",), (*given, "--compile-only"))


def tune(op: str, seconds: int) -> Step:
    """An operator of the tuning job, with a database of its own; it compiles while it measures."""
    where = ("--database", f"{{out}}/tune/{op}.db", "--export", f"{{results}}/tuned_{op}_{{gpu}}.json")
    job = ("-m", "terrazzo", "tune", "run", "--job", "docs/jobs/h200.toml", "--op", op, "--budget", f"{seconds}s")
    return Step(f"tune.{op}", (*job, *where), seconds + 30, 4, "timed")


# What compares times on the CPU is "timed", so that no other GPU's compilers slow it down.
STEPS: tuple[Step, ...] = (
    *suite("gpu/test_lowering_gpu.py", 75, kind="timed"),
    *suite("gpu/test_measure_gpu.py", 45, kind="timed"),
    *suite("gpu/test_converters_gpu.py", 60),
    *suite("gpu/test_calls_gpu.py", 60),
    *suite("gpu/test_dlpack_gpu.py", 60),
    *suite("gpu/test_generation_gpu.py", 100),
    *suite("gpu/test_threads_gpu.py", 210),
    *suite("gpu/test_gpt_oss_gpu.py", 100),
    *suite("gpu/test_reduce_overhead_gpu.py", 100),
    *suite("gpu/test_w4a16_gpu.py", 150, parts={"fuzz": (110, 3)}),
    *suite("gpu/test_w4a8_gpu.py", 120, parts={"fuzz": (90, 3)}),
    *suite("gpu/test_w4ax_gpu.py", 150, parts={"sm_80": (90, 2)}),
    *suite("gpu/test_w4ax_grouped_gpu.py", 90),
    *suite("gpu/test_attention_gpu.py", 150, parts={"fuzz": (110, 3)}, ahead=True),
    *suite("gpu/test_attention_prefill_gpu.py", 150),
    *suite("gpu/test_grouped_gpu.py", 150),
    *suite("gpu/test_w4a8_fp8_gpu.py", 90),
    *suite("gpu/test_parted_tiles_gpu.py", 70, ahead=True),
    linear("w4a16,w4a8,w4afp8", 300, 1),
    *suite("gpu/test_attention_cache_gpu.py", 190, 2, {"ten_thousand": (190, 2)}, ahead=True),
    *suite(
        "gpu/test_w4a8_programs_gpu.py",
        80,
        2,
        {"stream_k": (110, 2), "small_batch": (70, 2), "multistage": (70, 2)},
        True,
    ),
    *suite("test_demo.py", 60, 2),
    *suite("test_examples.py", 90, 2),
    bench("attention", 300, 2),
    linear("fp8_block,mxfp4,nvfp4,w8a16_g128,w8a8_blocks", 240, 2),
    linear("w8a8,w8a8_fp8,mxfp4_fp8,w4ax,w4a16_bf16", 240, 2),
    bench("attention_prefill", 170, 2),
    bench("grouped", 170, 2),
    bench("attention_ragged", 120, 2),
    bench("attention_codes", 90, 2),
    bench("tile_examples", 60, 2, ahead=False),
    bench("attention_write", 80, 2, ahead=False),
    bench("decode_step", 300, 2, "--peers=transformers_f16"),
    *suite("gpu/test_nn_gpu.py", 150),
    *suite("gpu/test_small_floats_gpu.py", 120),
    *suite("gpu/test_mxfp8_gpu.py", 120),
    *suite("gpu/test_byte_integers_gpu.py", 120),
    *suite("gpu/test_w8a8_gpu.py", 120),
    *suite("gpu/test_vllm_kv_gpu.py", 300, 3),
    *suite("gpu/test_attention_parts_gpu.py", 90),
    *suite("gpu/test_attention_codes_gpu.py", 90),
    *suite("gpu/test_slots_gpu.py", 90),
    *suite("gpu/test_stand_ins_gpu.py", 60, 3),
    *suite("gpu/test_documents_gpu.py", 120, 3),
    *suite("gpu/test_tensor_parallel_gpu.py", 240, 3),
    *suite("gpu/test_shapes_gpu.py", 120),
    *suite("gpu/test_layer_kernels_gpu.py", 100),
    *suite("gpu/test_vllm_gpu.py", 60, 3),
    linear("nf4,mxfp4_mxfp8,fp8,w8a16,fp8_block_folded,w8a8_fp8_fast", 220, 3),
    bench("generic_price", 150, 3, ahead=False),
    bench("layer_kernels", 100, 3, ahead=False),
    bench("load_time", 120, 3, ahead=False),
    *suite("gpu/test_sanitizer.py", 300, 3, needs=("nvcc", "compute-sanitizer")),
    *(tune(op, 90) for op in ("w4a16", "w4a8", "w4ax", "w4a8_fp8", "w4a8_grouped", "w4a16_grouped")),
    tune("w4a8_fp8_grouped", 60),
    *(tune(op, 60) for op in ("attention", "attention_prefill")),
)


def chosen(steps: Sequence[Step], only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Step]:
    """The steps that fit one of `only` (none: all) and none of `skip`, then what compiles for them."""
    fits = lambda name, patterns: any(fnmatchcase(name, pattern) for pattern in patterns)
    kept = [step for step in steps if (not only or fits(step.name, only)) and not fits(step.name, skip)]
    ahead = [
        Step(f"compile.{s.name}", s.compile, s.seconds / 2, s.priority, "compile", s.needs, ahead_of=s.name)
        for s in kept
        if s.compile
    ]
    return kept + [step for step in ahead if not fits(step.name, skip)]


@dataclass
class Worker:
    """A GPU, or the place on the CPU where kernels are compiled ahead.

    Attributes:
        gpu: as CUDA_VISIBLE_DEVICES names it.
        turns: kinds of steps that it takes; those of a later group only when nothing of an earlier one fits.
        cpus: where its steps run unless they are timed; empty: on all, because nothing runs beside them.
    """

    gpu: str
    turns: tuple[tuple[str, ...], ...]
    cpus: frozenset[int] = frozenset()


def workers(gpus: Sequence[str], timed: int, cpus: Sequence[int]) -> list[Worker]:
    """The GPUs, the first `timed` of them for timed steps, and what compiles ahead; a quarter of the CPUs is left."""
    first, then = ("timed",), ("test",)
    made = [Worker(gpu, (first, then) if at < timed else (then, first)) for at, gpu in enumerate(gpus)]
    if timed >= len(gpus):  # one order for both kinds
        made = [Worker(gpu, ((*first, *then),)) for gpu in gpus]
    made.append(Worker(gpus[0], (("compile",),)))
    rest = list(cpus)[len(cpus) // 4 :]
    behind = max(1, len(made) - timed)
    size = max(1, len(rest) // behind)
    for at, worker in enumerate(made):
        start = at % behind * size % len(rest)
        if len(gpus) > 1 or worker is made[-1]:
            worker.cpus = frozenset(rest[start : start + size])
    return made


def take(pending: list[Step], worker: Worker, left: float) -> Step | None:
    """The next step of a worker that has `left` seconds, removed from `pending`; None: nothing fits any more."""
    waiting = {step.name for step in pending if step.seconds <= left}
    for kinds in worker.turns:
        fitting = [
            step
            for step in pending
            if step.kind in kinds and step.seconds <= left and (not step.ahead_of or step.ahead_of in waiting)
        ]
        if fitting:
            step = min(fitting, key=lambda step: step.priority)
            pending.remove(step)
            return step
    return None


def plan(steps: Sequence[Step], crew: Sequence[Worker], budget: float) -> list[tuple[float, Worker, Step]]:
    """(second, worker, step) of each start, if every step took its estimate."""
    pending, found, free = list(steps), [], [(0.0, at) for at in range(len(crew))]
    while free:
        now, at = heapq.heappop(free)
        step = take(pending, crew[at], budget - GRACE_S - now)
        if step is not None:
            found.append((now, crew[at], step))
            heapq.heappush(free, (now + step.seconds, at))
    return found
