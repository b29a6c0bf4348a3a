"""Storing keys and values: packing a prefill beside its copy time, and what an append adds to a decode step.

    python -m benchmarks.attention_write               every format; writes results/attention_write_<gpu>.json
    python -m benchmarks.attention_write --formats int4/int4,int4_channel128/int4 --shapes 64x32/8x4k --no-store

Steps of a cache, each in pages: "plain" appends a token that completes nothing, "full" one that fills the channel
group of every sequence at once, "mean" is over as many steps as a group has tokens, each at its own length; token-wise
keys have tiles of 16 tokens in their place, of which a full ring packs the oldest. What is stored is compared with
quantizer.py in every bit, and a step's output with float64 over the cache that it wrote, on a few heads, before a time
counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.autotune import attention_bench, gemm_bench
from terrazzo.autotune.attention_bench import Shape

from benchmarks import program, report
from benchmarks.attention import FORMATS, facts_of

SHAPES = ("8x32/8x32k", "64x32/8x4k")
STORED = Shape(1, 32, 8, 131072)
DIM, PAGE, TILE = 128, 128, 16
CHECKED_TOKENS = 2048
KINDS = ("plain", "full", "mean")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("attention_write", __doc__, 15.0)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated caches of the steps")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, keys/values")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated kinds of steps")
    parser.add_argument("--no-store", action="store_true", help="only steps")
    o = parser.parse_args(argv)
    o.shapes = [Shape.parse(s) for s in o.shapes.split(",")]
    o.formats = program.formats(o.formats)
    o.kinds = o.kinds.split(",")
    for what in o.formats:
        if len(what) != 2:
            parser.error(f"--formats {'/'.join(what)}: write keys/values, as int4/int4")
    if not set(o.kinds) <= set(KINDS):
        parser.error(f"--kinds {','.join(o.kinds)}: known are {', '.join(KINDS)}")
    return o


def store(formats: tuple[str, str], shape: Shape, copy_gb_s: float, budget_ms: float) -> dict[str, Any]:
    """Time of `store` for one long prompt, or failure."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention import entry, pack_cache

    device = gemm_bench.DEVICE
    cache = attention_bench.random_cache(*formats, shape, DIM, PAGE)
    cache.block_table.copy_(torch.arange(cache.block_table.numel()).reshape_as(cache.block_table))
    k, v = torch.randn(2, shape.tokens, shape.kv_heads, DIM, device=device).half()
    starts = torch.tensor([0, shape.tokens], dtype=torch.int32, device=device)
    call = partial(entry.store, cache, k, v, starts, shape.tokens)
    call()
    checked = min(CHECKED_TOKENS, shape.tokens)
    part = (x[None, :checked].transpose(1, 2) for x in (k, v))
    kept = dict(residual=cache.layout.k.group, sink_tokens=0)  # the long prompt's ring lies further behind
    wanted = pack_cache(*part, *formats, page_size=PAGE, k_static=cache.k_static, v_static=cache.v_static, **kept)
    wrong = int((cache.pages[: checked // PAGE] != wanted.pages).sum())
    if wrong:
        return {"failure": f"{wrong} words differ"}
    moved = 2 * k.numel() * 2 + 4 * cache.pages.numel()
    timing = measure.time_calls([call], budget_ms)
    return program.timed(timing) | {"bytes": moved, "of_copy_time": round(timing.us * copy_gb_s * 1e3 / moved, 3)}


def missing(kind: str, block: int) -> list[int]:
    """Tokens that the sequences of each step lack to the end of their block, the new ones included."""
    return {"plain": [1], "full": [0], "mean": [*range(block - 1, -1, -1)]}[kind]


def step(formats: tuple[str, str], shape: Shape, kind: str, budget_ms: float) -> dict[str, Any]:
    """Times of a decode step with ("us") and without ("decode_us") the append in front, or failure."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention import entry

    device = gemm_bench.DEVICE
    cache = attention_bench.random_cache(*formats, shape, DIM, PAGE)
    caches = [replace(cache, lengths=cache.lengths - short) for short in missing(kind, cache.layout.k.group or TILE)]
    q = torch.randn(shape.batch, 1, shape.heads, DIM, device=device).half()
    k, v = torch.randn(2, shape.batch, 1, shape.kv_heads, DIM, device=device).half()
    y = measure.poisoned(q.shape, q.dtype, device)

    def both(at: Any) -> None:
        entry.append(at, k, v)
        entry.decode(q, at, out=y)

    both(caches[-1])
    wrong = attention_bench.wrong(y, attention_bench.expected(q, caches[-1]))
    if wrong:
        return {"failure": wrong}
    calls = {
        "decode": [partial(entry.decode, q, at, out=y) for at in caches],
        "both": [partial(both, at) for at in caches],
    }
    found = measure.time_in_turn(calls, budget_ms)
    for timing in found.values():
        if isinstance(timing, Exception):
            raise timing
    us = {name: round(timing.us, 2) for name, timing in found.items()}
    return {
        "us": us["both"], "decode_us": us["decode"], "added": round(us["both"] / us["decode"] - 1, 4),
        "spread": round(max(timing.spread for timing in found.values()), 4), "steps": len(caches),
    }  # fmt: skip


def planned(o: argparse.Namespace, copy_gb_s: float) -> list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """What each row is about, and what measures it."""
    made = []
    for formats in o.formats:
        if not o.no_store:
            row = facts_of("attention_store", formats, STORED, DIM, PAGE)
            made.append((row, partial(store, formats, STORED, copy_gb_s, o.budget_ms)))
        for shape in o.shapes:
            for kind in o.kinds:
                row = facts_of("attention_append", formats, shape, DIM, PAGE, kind=kind)
                made.append((row, partial(step, formats, shape, kind, o.budget_ms)))
    return made


def show(row: dict[str, Any]) -> None:
    shape = Shape(row["batch"], row["q_heads"], row["kv_heads"], row["kv_len"])
    where = f"{row['op']} {shape!s:12} {row.get('kind', ''):6} {row['k_format']}/{row['v_format']:8}"
    if "failure" in row:
        said = f"FAILED: {row['failure']}"
    elif "added" in row:
        said = f"decode {row['decode_us']:8.2f} us, with append {row['us']:8.2f} us: {row['added']:+.1%}"
    else:
        said = f"{row['us']:9.1f} us, {row['of_copy_time']:5.2f} of the copy time of the same bytes"
    print(f"{where} {said}", flush=True)


def rows_of(o: argparse.Namespace, result: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Each row as it is measured."""
    for row, call in planned(o, result["copy_gb_s"]):
        with program.failing(row):
            row |= call()
        show(row)
        yield [row]


def run(o: argparse.Namespace) -> int:
    from terrazzo.ops.attention.cache import launch

    return program.run("attention_write", o, launch.detect(), rows_of)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.attention_write", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
