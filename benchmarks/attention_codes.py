"""Decode attention whose outputs leave as codes, beside decode with a quantizer behind it.

    python -m benchmarks.attention_codes               writes results/attention_codes_<gpu>.json
    python -m benchmarks.attention_codes --caches 1x32/8x1k,16x32/8x8k --quants int8

"plain" is decode alone, "behind" decode and then the quantizer of the product that follows, "us" decode with `quant`.
All three are replayed in turn, in one CUDA graph each. Codes are compared with those of the outputs beside them, and
outputs with float64 on a few heads, before their time counts.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from terrazzo.autotune import attention_bench
from terrazzo.autotune.attention_bench import Shape
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.decoding import codes, op

from benchmarks import program, report
from benchmarks.attention import copies_of, facts_of

DEVICE = "cuda"
CACHES = (
    *("1x32/8x1k", "1x32/8x8k", "1x64/8x8k", "4x32/8x1k", "16x32/8x1k", "16x32/8x8k", "64x32/8x1k", "64x32/8x4k"),
    *("128x32/8x1k", "256x32/8x1k"),
)
QUANTS = ("int8", "e4m3", "int8_block128", "e4m3_block128")
PAGE = 128


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("attention_codes", __doc__, 60.0)
    parser.add_argument("--caches", help="comma-separated, as 8x32/8x32k")
    parser.add_argument("--formats", default="int4/int4", help="keys/values")
    parser.add_argument("--quants", default=",".join(QUANTS))
    parser.add_argument("--q-len", default="1", help="comma-separated")
    parser.add_argument("--head-dim", type=int, default=128)
    o = parser.parse_args(argv)
    o.caches = [Shape.parse(text) for text in (o.caches.split(",") if o.caches else CACHES)]
    o.formats, o.quants = tuple(o.formats.split("/")), o.quants.split(",")
    o.q_len = program.numbers(o.q_len)
    return o


def quantizer(quant: str) -> Any:
    """The kernel that makes such codes of rows x [M, K], where the library has one."""
    from terrazzo.ops import w4a8

    return partial(w4a8.quantize_activations, codes=quant) if "_" not in quant else None


def rows_of(o: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """Rows of one cache, for each q_len and form of codes."""
    import torch

    cache = attention_bench.random_cache(*o.formats, shape, o.head_dim, PAGE)
    caches = copies_of(cache, 4 * cache.pages.numel())
    made = []
    for q_len in o.q_len:
        q = torch.randn(shape.batch, q_len, shape.heads, o.head_dim, device=DEVICE).half()
        exact = attention_bench.expected(q, cache)
        for quant in o.quants:
            more = dict(q_len=q_len, quant=quant, plain=None, behind=None)
            row = facts_of("attention_codes", o.formats, shape, o.head_dim, PAGE, **more)
            made.append(row)
            with program.failing(row):
                row |= timed(o, q, caches, quant, exact)
            show(shape, row)
    return made


def timed(o: argparse.Namespace, q: Any, caches: list[Any], quant: str, exact: list) -> dict[str, Any]:
    """Times of a row, or its failure."""
    import torch
    from terrazzo.autotune import measure

    y = measure.poisoned(q.shape, q.dtype, DEVICE)
    found = entry.decode(q, caches[0], out=y, quant=quant)
    wanted = codes.encoded(y, quant, None, False)
    if why := attention_bench.wrong(y, exact):
        return {"failure": why}
    off = int((found.q.view(torch.int8) != wanted.q.view(torch.int8)).sum())
    if off or not torch.equal(found.scales, wanted.scales):
        return {"failure": f"{off} of {found.q.numel()} codes, or scales, are not those of the outputs"}
    flat, behind = (len(y) * y.shape[1], -1), quantizer(quant)

    def then(cache: Any) -> None:
        behind(entry.decode(q, cache, out=y).view(flat))

    runs = {
        "us": [partial(entry.decode, q, c, out=y, quant=quant) for c in caches],
        "plain": [partial(entry.decode, q, c, out=y) for c in caches],
    }
    runs |= {"behind": [partial(then, c) for c in caches]} if behind else {}
    times = measure.time_in_turn(runs, o.budget_ms)
    failed = [t for t in times.values() if isinstance(t, Exception)]
    if failed:
        raise failed[0]
    made = {name: round(t.us, 2) for name, t in times.items()}
    return made | program.timed(times["us"])


def show(shape: Shape, row: dict[str, Any]) -> None:
    place = f"{shape!s:14} q{row['q_len']} {row['quant']:14}"
    if row.get("failure"):
        print(place, "FAILED", row["failure"][:200], flush=True)
        return
    behind = f", quantizer behind it {row['behind']:.2f}" if row["behind"] else ""
    print(f"{place} {row['us']:8.2f} us; without codes {row['plain']:.2f}{behind}", flush=True)


def requests_of(o: argparse.Namespace) -> list[Any]:
    """All kernels that a run of these options launches."""
    from terrazzo.ops.attention.cache.cache import residual_of
    from terrazzo.ops.attention.cache.layout import CacheLayout

    target, layout, wanted = launch.detect(), CacheLayout(*o.formats, o.head_dim), []
    for shape in o.caches:
        for q_len in o.q_len:
            sizes = (shape.batch, shape.kv_heads, q_len * shape.heads // shape.kv_heads, shape.tokens)
            facts = dict(dtype="float16", page=PAGE, residual=residual_of(layout, None), target=target)
            facts |= dict(softcap=False, sinks=False)
            forms = [None, *(codes.Coding(quant) for quant in o.quants)]
            wanted += [op.plan(layout, *sizes, **facts, coding=form).request for form in forms]
    return wanted


def run(o: argparse.Namespace) -> int:
    rows = lambda o, result: (rows_of(o, shape) for shape in o.caches)
    return program.run("attention_codes", o, launch.detect(), rows, requests_of(o), copies=False)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.attention_codes", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
