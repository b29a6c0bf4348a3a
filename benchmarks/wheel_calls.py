"""First calls with a wheel of ready kernels: each layer in a fresh process, with an empty cache and no compiler.

    python -m benchmarks.wheel_calls --make FOLDER [--gpu NAME]          compiles the layers' kernels into a wheel there
    python -m benchmarks.wheel_calls --wheel FOLDER --commit SHA         times first calls, on a GPU
    python -m benchmarks.wheel_calls --published --wheel FOLDER ...      of the published wheel: layers that it serves

FOLDER holds one wheel, or is where pip installed one (`pip install --target`). A row is a layer, whose first call reads
the wheel's manifest. Seconds count from a call until its result is there. Importing torch and terrazzo, the CUDA
context and packing come before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cold_calls import name_version

TOKENS = (16, 1, 512)
LINEAR = ("w4a16-g128", "w4a16-g64", "w4a8-g128", "w4a8-e4m3-g128", "w8a16", "mxfp4", "nvfp4", "fp8",
          "w8a8", "w8a8-e4m3", "w8a8-e4m3-g128", "w4ax")  # fmt: skip
EXPERTS = ("w4a16-g128", "w4a8-g128", "mxfp4")
CACHES = ("int8", "int4")
PUBLISHED = (
    "linear w4a16-g128", "linear w4a16-g64", "linear w4a16-gK-sym", "linear w4a8-g128",
    "linear w4a8-g64", "linear w4a8-e4m3-g128", "linear fp8", "linear fp8-g128", "linear w4a16-g128-sym",
    "other w4a16-g128", "experts w4a16-g128", "attention int4", "attention int8", "attention fp8", "rows",
)  # fmt: skip
"""Of Llama 3.1 8B and, experts, Qwen3 30B A3B; `other`: of an N that no model has, by kernels that serve every N."""
HEADS, KV_HEADS, HEAD_DIM, PROMPT = 32, 8, 128, 256
LIMIT_S = 0.5
"""The longest that a first call may take."""
Calls = Sequence[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Sizes:
    """Of the layers: `n`, `k` of linear ones, `other` features of weights of the kind "other"; experts, how many, their
    hidden and intermediate features; `gate`: features of a gate."""

    n: int
    k: int
    gate: int
    experts: tuple[int, int, int]
    other: int = 0


SMALL, SERVED = Sizes(2048, 2048, 2048, (4, 512, 512)), Sizes(4096, 4096, 14336, (128, 2048, 768), other=5120)


def cases(published: bool = False) -> list[str]:
    """Every layer, by name."""
    if published:
        return list(PUBLISHED)
    made = [f"linear {form}" for form in LINEAR] + [f"experts {form}" for form in EXPERTS]
    return [*made, *(f"attention {kv}" for kv in CACHES), "rows"]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wheel_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--make", type=Path, help="folder for a wheel of the layers' kernels")
    parser.add_argument("--gpu", default="", help="a target's name, for --make where there is no GPU")
    parser.add_argument("--wheel", type=Path, help="folder of the wheel, or where it was installed")
    parser.add_argument("--published", action="store_true", help="layers of the published wheel")
    parser.add_argument("--cases", help="comma-separated layers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    return parser.parse_args(argv)


def layer_of(form: str, device: str, n: int, k: int) -> Any:
    import torch
    from terrazzo import nn

    options = {"target": "sm_90a"} if form == "w4ax" and device == "cpu" else {}
    return nn.Linear.from_float(torch.randn(n, k, device=device), form, **options)


def experts_of(form: str, device: str, sizes: Sizes) -> Any:
    import torch
    from terrazzo import nn

    count, hidden, inner = sizes.experts
    # what float16 holds behind two products and a gate
    gate_up = torch.randn(count, 2 * inner, hidden, device=device) * hidden**-0.5
    down = torch.randn(count, hidden, inner, device=device) * inner**-0.5
    return nn.Experts.from_float(gate_up, down, form)


def requests(name: str, target: Any, sizes: Sizes = SMALL) -> list[Any]:
    """The kernels that a case's calls need."""
    from terrazzo.nn.preparing import kernel_requests
    from terrazzo.ops import activation, attention, norm, rope

    kind, _, form = name.partition(" ")
    if kind in ("linear", "other"):
        layer = layer_of(form, "cpu", sizes.n if kind == "linear" else sizes.other, sizes.k)
        return kernel_requests(layer, list(_tokens(kind)), dtype=_dtype(), target=target)
    if kind == "experts":
        found = kernel_requests(experts_of(form, "cpu", sizes), list(TOKENS), dtype=_dtype(), target=target)
        quant = {"w4a8-g128": "int8"}.get(form)  # of what stands between the two products
        facts = dict(m=list(TOKENS), dtype="float16", target=target, quant=quant)
        return found + activation.kernel_requests(sizes.experts[2], **facts)
    if kind == "attention":
        facts = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float16")
        return attention.kernel_requests(form, form, **facts, target=target, prefill=True)
    facts = dict(m=list(TOKENS), dtype="float16", target=target)
    found = norm.kernel_requests(sizes.k, residual=False, **facts) + activation.kernel_requests(sizes.gate, **facts)
    return found + rope.kernel_requests(HEAD_DIM, dtype="float16", target=target)


def calls(name: str, sizes: Sizes) -> Calls:
    """What a case calls, and what each call is of; everything that comes before a first call is done."""
    import torch
    from terrazzo.ops import activation, norm, rope

    kind, _, form = name.partition(" ")
    rows = lambda m, k: torch.randn(m, k, device="cuda").half()
    if kind in ("linear", "other"):
        layer = layer_of(form, "cuda", sizes.n if kind == "linear" else sizes.other, sizes.k)
        return [(f"{m} tokens", partial(layer, rows(m, sizes.k))) for m in _tokens(kind)]
    if kind == "experts":
        experts, made = experts_of(form, "cuda", sizes), []
        for m in TOKENS:
            ids = torch.randint(0, sizes.experts[0], (m, 1), device="cuda")
            gates = torch.rand(m, 1, device="cuda")
            made.append((f"{m} tokens", partial(experts, rows(m, sizes.experts[1]), ids, gates)))
        return made
    if kind == "attention":
        return _attention(form)
    weight, cos = rows(1, sizes.k)[0], torch.rand(TOKENS[0], HEAD_DIM, device="cuda")
    heads = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    turned = rows(TOKENS[0], (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    return [
        ("rms_norm", partial(norm.rms_norm, rows(TOKENS[0], sizes.k), weight)),
        ("act_and_mul", partial(activation.act_and_mul, rows(TOKENS[0], 2 * sizes.gate))),
        ("apply_rope", partial(rope.apply_rope, turned, cos, cos, **heads)),
    ]


def _attention(form: str) -> Calls:
    """A prompt is prefilled and stored, one more token appended and decoded."""
    import torch
    from terrazzo.ops import attention

    scales = torch.ones(KV_HEADS, HEAD_DIM, device="cuda") * 0.1
    static = dict(k_static=scales, v_static=scales) if form == "fp8" else {}
    facts = dict(kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=8, page_size=128, device="cuda")
    cache = attention.KVCache(form, form, **facts, **static)
    sequence = cache.new()
    heads = lambda tokens, count: torch.randn(*tokens, count, HEAD_DIM, device="cuda").half()
    q, k, v = (heads((PROMPT,), count) for count in (HEADS, KV_HEADS, KV_HEADS))
    q1, k1, v1 = (heads((1, 1), count) for count in (HEADS, KV_HEADS, KV_HEADS))
    prompt = cache.extend({sequence: PROMPT})
    steps: list[Any] = []

    def decode() -> Any:
        return steps[0].decode(q1, 0)

    def append() -> None:
        steps.append(cache.extend({sequence: 1}))
        steps[0].append(k1, v1, 0)

    return [("prefill", lambda: prompt.prefill(q, 0, k=k, v=v)), ("store", lambda: prompt.store(k, v, 0)),
            ("append", append), ("decode", decode)]  # fmt: skip


def _tokens(kind: str) -> tuple[int, ...]:
    """Of a layer; one token of a size that no model has may need a kernel whose CTAs add their sums in pairs."""
    return tuple(m for m in TOKENS if m > 1) if kind == "other" else TOKENS


def _dtype() -> Any:
    import torch

    return torch.float16


def measure(name: str, site: str, sizes: Sizes) -> dict[str, Any]:
    """A row. Runs in a process of its own, which has imported torch and has no context yet."""
    import torch

    sys.path.insert(0, site)
    with tempfile.TemporaryDirectory() as empty:
        os.environ |= {"TERRAZZO_CACHE_DIR": empty, "PATH": "/nowhere", "CUDA_HOME": "/nowhere", "CXX": "/nowhere"}
        stands_in = name.startswith("other")  # else a layer has the kernels made for it
        os.environ |= {"TERRAZZO_COMPILER": "", "TERRAZZO_BACKGROUND": str(int(stands_in))}
        torch.manual_seed(0)
        made: dict[str, float] = {}
        try:
            for what, call in calls(name, sizes):
                torch.cuda.synchronize()
                start = time.perf_counter()
                out = call()
                torch.cuda.synchronize()
                made[what] = round(time.perf_counter() - start, 3)
                if isinstance(out, torch.Tensor) and not bool(out.float().isfinite().all()):
                    return {"case": name, "seconds": made, "failure": f"{what}: not finite"}
        except Exception as error:
            return {"case": name, "seconds": made, "failure": f"{type(error).__name__}: {error}"[:1500]}
        left = [path.name for path in Path(empty).rglob("kernel.so")]
    slow = [what for what, seconds in made.items() if seconds >= LIMIT_S]
    said = [f"{what} took {LIMIT_S} s or more" for what in slow] + ["a kernel was compiled"] * bool(left)
    return {"case": name, "first": next(iter(made.values())), "seconds": made,
            **({"failure": "; ".join(said)} if said else {})}  # fmt: skip


def make(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Compile the kernels of all cases, and write the wheel."""
    from terrazzo.lowering import compile_many
    from terrazzo.lowering.targets import Target
    from terrazzo.lowering.wheel_file import write_wheel

    target = Target.parse(options.gpu) if options.gpu else Target.detect()
    sizes = SERVED if options.published else SMALL
    found = list(dict.fromkeys(request for name in names for request in requests(name, target, sizes)))
    print(f"{len(found)} kernels of {len(names)} layers", flush=True)
    failed = [outcome for outcome in compile_many(found) if isinstance(outcome, Exception)]
    for failure in failed:
        print(failure, file=sys.stderr)
    if failed:
        return 1
    file = write_wheel(options.make, found)
    print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


def installed(folder: Path, scratch: Path) -> tuple[Path, dict[str, int]]:
    """Where a wheel's files are, and how many kernels it has: those of `folder`, or of the wheel in it."""
    site, held = folder, {}
    if files := list(folder.glob("*.whl")):
        (file,) = files
        site, held = scratch / "site", {"wheel_bytes": file.stat().st_size}
        with zipfile.ZipFile(file) as archive:
            archive.extractall(site)
    return site, {"kernels": sum(1 for _ in site.rglob("kernel.so")), **held}


def run(options: argparse.Namespace) -> int:
    start, sizes = time.perf_counter(), SERVED if options.published else SMALL
    names = options.cases.split(",") if options.cases else cases(options.published)
    with tempfile.TemporaryDirectory() as scratch:
        name_version(Path(scratch))
        if options.make:
            return make(options, names)
        site, held = installed(options.wheel, Path(scratch))
        import torch  # noqa: F401  once; each case has a context and a Terrazzo of its own

        fork, rows = multiprocessing.get_context("fork"), []
        for name in names:
            with fork.Pool(1) as pool:
                rows.append(pool.apply(measure, (name, str(site), sizes)))
            print(json.dumps(rows[-1]), flush=True)
    from terrazzo.autotune.gemm_bench import header
    from terrazzo.lowering.targets import Target

    result = header(Target.detect(), options.commit or None)
    result |= {**held, "published": options.published, "tokens": TOKENS, "sizes": asdict(sizes), "rows": rows}
    report.write(result, options.out, start)
    worst = max((seconds for row in rows for seconds in row["seconds"].values()), default=0.0)
    print(f"the longest first call took {worst:.2f} s")
    return report.conclude(result)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if (options.make is None) == (options.wheel is None):
        print("benchmarks.wheel_calls: pass --make or --wheel", file=sys.stderr)
        return 2
    return report.guarded("benchmarks.wheel_calls", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
