"""The two teaching programs of examples/, beside the library's own kernels, cuBLAS and torch's attention.

    python -m benchmarks.tile_examples               a minute; writes results/tile_examples_<gpu>.json
    python -m benchmarks.tile_examples --compile-only

A product of integers must be exact; every other output is compared with float64 before its time counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import program, report, tables

SHAPES = ((4096, 4096), (28672, 4096))
MS = (16, 64, 256, 1024, 4096)
BATCHES, KV_HEADS, CACHED = (8, 32), 8, 8192
"""Sequences of the decode rows, kv heads of each, and tokens of the cache."""
CUBLAS, SDPA = "cublas_f16", "sdpa_f16"
ROWS = 48  # of y that are compared
PAIRS = 4  # of a sequence and a kv head


def examples() -> tuple[Any, Any]:
    """The modules examples/tile_w4a16.py and tile_kv_decode.py."""
    from terrazzo.lowering.toolchain import import_tilelang

    import_tilelang()
    folder = str(Path(__file__).parents[1] / "examples")
    sys.path.append(folder)
    try:
        import tile_kv_decode
        import tile_w4a16
    finally:
        sys.path.remove(folder)
    return tile_w4a16, tile_kv_decode


def programs(arch: str) -> dict[tuple[str, int], Any]:
    """(name, n or sequences) -> compiled kernel; nvcc runs side by side."""
    w4a16, decode = examples()
    made = {("w4a16", n): w4a16.tile_w4a16(n, k) for n, k in SHAPES}
    made |= {("kv_decode", b): decode.tile_kv_decode(b * KV_HEADS, CACHED // decode.TOKENS) for b in BATCHES}
    with ThreadPoolExecutor(len(made)) as pool:
        return dict(zip(made, pool.map(lambda it: w4a16.compiled(it, arch), made.values())))


def products(o: argparse.Namespace, target: Any, kernels: Mapping[tuple[str, int], Any]) -> Iterator[dict[str, Any]]:
    """Rows of the product, float16 and symmetric groups of 128."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops import w4a16
    from terrazzo.ops.w4a16 import reference

    example, _ = examples()
    random = torch.Generator("cuda").manual_seed(1)
    on = dict(generator=random, device="cuda")
    for n, k in SHAPES:
        kernel = kernels["w4a16", n]
        codes = torch.randint(0, 16, (n, k), **on, dtype=torch.uint8)
        words = example.BLOCK.pack(codes).view(torch.uint32)
        exact = _integers(example, kernel, codes, words, random)
        scales = torch.exp(0.3 * torch.randn(n, k // example.GROUP, **on) - 4.5).half()
        weight = w4a16.QuantizedWeight.canonical(codes, scales, None, group_size=example.GROUP)
        packed, by_group = weight.pack(), scales.T.contiguous()
        copies = measure.copies_beyond_l2(packed.nbytes, target.l2_bytes)
        packs = [packed, *(replace(packed, words=packed.words.clone()) for _ in range(copies - 1))]
        many = [words, *(words.clone() for _ in range(copies - 1))]
        dense = [
            torch.randn(n, k, **on, dtype=torch.float16)
            for _ in range(measure.copies_beyond_l2(2 * n * k, target.l2_bytes))
        ]
        for m in MS:
            x = torch.randn(m, k, **on, dtype=torch.float16)
            y, ours, third = (measure.poisoned((m, n), torch.float16) for _ in range(3))
            kernel(x, words, by_group, y)
            rows = torch.arange(m, device="cuda")[:: max(1, m // ROWS)]
            right = reference.gemm(x[rows], weight, "exact")
            failure = exact or measure.check_outputs(
                y[rows], right, reference.forward_error_bound(x[rows], weight, "exact")
            )
            times = measure.time_in_turn(
                {
                    "example": [partial(kernel, x, w, by_group, y) for w in many],
                    "terrazzo": [partial(w4a16.gemm, x, w, out=ours) for w in packs],
                    CUBLAS: [partial(torch.mm, x, w.T, out=third) for w in dense],
                },
                o.budget_ms,
            )
            yield _row("w4a16", times, failure, m=m, n=n, k=k, group=example.GROUP, bytes=packed.nbytes)


def _integers(example: Any, kernel: Any, codes: Any, words: Any, random: Any) -> str:
    """Why y of whole numbers is not exact, or ""; the last tile of tokens is not full."""
    import torch
    from terrazzo.autotune import measure

    (n, k), m = codes.shape, 41
    x = torch.randint(-4, 5, (m, k), generator=random, device="cuda").half()
    scales = 2.0 ** -torch.randint(6, 9, (k // example.GROUP, n), generator=random, device="cuda").half()
    y = measure.poisoned((m, n), torch.float16)
    kernel(x, words, scales, y)
    weight = (codes.double() - example.ZERO) * scales.double().T.repeat_interleave(example.GROUP, 1)
    return "" if torch.equal(y, (x.double() @ weight.T).half()) else "a product of integers is not exact"


def decodes(o: argparse.Namespace, target: Any, kernels: Mapping[tuple[str, int], Any]) -> Iterator[dict[str, Any]]:
    """Rows of decode, int4 keys and values, 16 query heads to a kv head; torch's attention has f16 ones."""
    import torch
    from terrazzo.autotune import attention_bench, measure
    from terrazzo.ops.attention import entry

    _, example = examples()
    random = torch.Generator("cuda").manual_seed(1)
    on = dict(generator=random, device="cuda")
    for batch in BATCHES:
        kernel, pairs, heads = kernels["kv_decode", batch], batch * KV_HEADS, KV_HEADS * example.HEADS
        codes = torch.randint(0, 16, (2, PAIRS, CACHED, example.DIM), **on, dtype=torch.uint8)
        scales = 0.02 + 0.1 * torch.rand(2, PAIRS, CACHED, **on)
        blocks = codes.view(2, PAIRS, -1, example.TOKENS, example.DIM)
        words = [
            torch.stack(
                [torch.stack([example.BLOCK.pack(it.T.contiguous() if i else it) for it in pair]) for pair in part]
            )
            for i, part in enumerate(blocks)
        ]
        q = torch.randn(pairs, example.HEADS, example.DIM, **on, dtype=torch.float16)
        given = [t.repeat(pairs // PAIRS, *[1] * (t.dim() - 1)) for t in (*words, *scales)]  # all pairs read memory
        k, v, ks, vs = (t.view(torch.uint32) if t.dtype == torch.int32 else t for t in given)
        y = measure.poisoned(q.shape, q.dtype)
        call = partial(kernel, q, k, ks, v, vs, y)
        call()
        right = example.reference(q.view(-1, PAIRS, *q.shape[1:])[-1], blocks, scales)
        bound = torch.full_like(right, 2e-3 * float(right.abs().max()))
        failure = measure.check_outputs(y.view(-1, PAIRS, *y.shape[1:])[-1], right, bound)
        shape = attention_bench.Shape(batch, heads, KV_HEADS, CACHED)
        cache = attention_bench.random_cache("int4", "int4", shape, example.DIM, 0, residual=0)
        queries = q.view(batch, 1, heads, example.DIM)
        ours = measure.poisoned(queries.shape, q.dtype)
        dense = [torch.randn(batch, KV_HEADS, CACHED, example.DIM, **on, dtype=torch.float16) for _ in "kv"]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        times = measure.time_in_turn(
            {
                "example": [call],
                "terrazzo": [partial(entry.decode, queries, cache, out=ours)],
                SDPA: [partial(sdpa, queries.transpose(1, 2), *dense, enable_gqa=True)],
            },
            o.budget_ms,
        )
        nbytes = sum(t.numel() * t.element_size() for t in given)
        yield _row("kv_decode", times, failure, m=batch, n=heads, k=CACHED, group=1, bytes=nbytes)


def _row(name: str, times: Mapping[str, Any], failure: str, **facts: int) -> dict[str, Any]:
    """A row of a result file, printed."""
    us = {who: getattr(it, "us", None) and round(it.us, 2) for who, it in times.items()}
    for who, it in times.items():
        failure = failure or (f"{who}: {' '.join(str(it).split())[:200]}" if isinstance(it, Exception) else "")
    row = {
        "op": name, "format": "int4", "dtype": "float16", "model": "", **facts, "us": us.pop("example"),
        "spread": round(getattr(times["example"], "spread", 0.0), 4), "peers": us, "schedule": "as in the file",
    }  # fmt: skip
    row |= {"us": None, "failure": failure} if failure else {}
    print(name, *facts.values(), row["us"], us, failure, flush=True)
    return row


def table(result: Mapping[str, Any], source: str) -> str:
    """Times of both programs, for docs/tile-programs.md."""
    lines = []
    for row in result["rows"]:
        peers, decode = row["peers"], row["op"] == "kv_decode"
        what = f"{row['m']} x {row['n']}/{KV_HEADS} x {row['k']}" if decode else f"{row['m']} x {row['n']} x {row['k']}"
        times = (row["us"], peers["terrazzo"], peers[SDPA if decode else CUBLAS])
        shown = tuple("failed" if us is None else f"{us:.1f}" for us in times)
        lines.append((f"`tile_{row['op']}`", what, *shown))
    heads = (
        "program",
        "M x N x K, or sequences x heads x tokens",
        "example",
        "terrazzo's kernel",
        "cuBLAS f16, SDPA f16",
    )
    return f"Microseconds, {tables.setting(result, source)}\n\n{report.markdown(heads, lines, range(2, 5))}"


def shown() -> str:
    """The tables of all result files."""
    files = report.files("tile_examples")
    made = [table(json.loads(it.read_text(encoding="utf-8")), f"benchmarks/results/{it.name}") for it in files]
    return "\n\n".join(made) or "Not measured yet."


def requests(target: Any) -> list[Any]:
    """The library's own kernels of the same shapes."""
    from terrazzo.ops import w4a16
    from terrazzo.ops.attention import requests as attention

    made = []
    for n, k in SHAPES:
        facts = dict(group_size=128, symmetric=True, scale_dtype="float16", dtype="float16")
        made += w4a16.kernel_requests(n, k, m=MS, target=target, **facts)
    heads = 16 * KV_HEADS
    return made + attention.kernel_requests(
        "int4", "int4", heads=heads, kv_heads=KV_HEADS, target=target, page=0, residual=0
    )


def run(o: argparse.Namespace) -> int:
    from terrazzo.lowering.targets import Target

    target = Target.detect()
    kernels = programs("sm_90a" if target.arch == "sm_90a" else "sm_80")

    def rows(_: argparse.Namespace, result: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
        for row in itertools.chain(products(o, target, kernels), decodes(o, target, kernels)):
            yield [row]

    return program.run("tile_examples", o, target, rows, requests(target), copies=False)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    return program.parser("tile_examples", __doc__, 10.0, "compile-only").parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    o = arguments(argv)
    return report.guarded("benchmarks.tile_examples", lambda: run(o))


if __name__ == "__main__":
    sys.exit(main())
