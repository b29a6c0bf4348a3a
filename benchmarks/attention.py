"""Decode attention over a packed KV cache beside f16 attention in torch and in installed packages.

    python -m benchmarks.attention                     every shape and format; writes results/attention_<gpu>.json
    python -m benchmarks.attention --quick             three shapes, four formats, not written unless --out
    python -m benchmarks.attention --held-out          caches of other models; results/attention_held_out_<gpu>.json
    python -m benchmarks.attention --formats int4_hadamard/int4 --residual 64
    python -m benchmarks.attention --formats int4/int4 --shapes 8x32/8x32k --schedules 16,2,3,1;4,2,3,4

Outputs are compared with float64 over the dequantized cache, on a few kv heads, before their time counts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.autotune import attention_bench
from terrazzo.autotune.attention_bench import Shape, random_cache

from benchmarks import program, report
from benchmarks.peers.attention import PEERS, times

DEVICE = "cuda"
SHAPES = ("1x32/8x4k", "1x32/8x32k", "1x32/8x128k", "8x32/8x32k", "64x32/8x4k", "1x32/32x32k", "8x32/32x4k")
HELD_OUT = ("24x28/4x3k", "80x28/4x2560", "3x40/8x48k", "1x28/4x20k", "16x64/8x6k", "12x12/2x10k", "48x24/8x1536")
"""Of models and lengths that no schedule was chosen on: Qwen2.5 7B, 14B, 72B and 1.5B, Llama 3.2 3B."""
FORMATS = (
    "float16/float16", "int8/int8", "int4/int4", "int4_channel128/int4", "int2_channel128/int2", "fp8/fp8", "int8/int4",
)  # fmt: skip
SCHEDULE = ("row_tiles", "warps", "tiles", "stages", "min_blocks", "shared_rows", "ahead")
QUICK_SHAPES = ("8x32/8x32k", "64x32/8x4k", "1x32/8x128k")
QUICK_FORMATS = FORMATS[:4]
WITHOUT = ("float16", "bfloat16")
"""Keys that have nothing to keep in f16, whatever --residual says."""


def facts_of(op: str, formats: tuple[str, str], shape: Shape, head_dim: int, page: int, **more: Any) -> dict[str, Any]:
    """What every row of attention says of its case, before it is timed."""
    return {
        "op": op, "k_format": formats[0], "v_format": formats[1], "batch": shape.batch, "q_heads": shape.heads,
        "kv_heads": shape.kv_heads, "head_dim": head_dim, "kv_len": shape.tokens, "page": page, "us": None, **more,
    }  # fmt: skip


def copies_of(cache: Any, nbytes: int) -> list[Any]:
    """The cache, and as many more as keep what a call reads out of L2."""
    from terrazzo.autotune import measure
    from terrazzo.ops.attention.cache import launch

    more = measure.copies_beyond_l2(nbytes, launch.detect().l2_bytes) - 1
    return [cache, *(replace(cache, pages=cache.pages.clone()) for _ in range(more))]


def described(made: dict[str, Any]) -> str:
    """The schedule of a kernel, in the order of --schedules, behind its rows; of warpgroups what they have of it."""
    found = ",".join(str(int(made[name])) for name in SCHEDULE if name in made)
    return found if "tiles" in made else f"warpgroups {found}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("attention", __doc__, 15.0, "quick", "no-peers", "compile-only")
    parser.add_argument("--shapes", help="comma-separated, as 8x32/8x32k")
    parser.add_argument("--held-out", action="store_true", help="caches that no schedule was chosen on")
    parser.add_argument("--formats", help="comma-separated, keys/values")
    parser.add_argument("--q-len", default="1,4", help="comma-separated numbers of new tokens")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--pages", default="0,128", help="page sizes; 0 is contiguous")
    parser.add_argument("--pages-in-order", action="store_true", help="pages of a sequence side by side, not scattered")
    parser.add_argument(
        "--schedules",
        help="in place of what a user gets; warps,tiles,stages,min_blocks[,shared rows[,ahead]] separated by ;",
    )
    parser.add_argument("--residual", type=int, help="newest tokens in f16. Default: what a KVCache of the keys has")
    parser.add_argument("--splits", help="comma-separated numbers of splits to try")
    o = parser.parse_args(argv)
    usual = HELD_OUT if o.held_out else QUICK_SHAPES if o.quick else SHAPES
    o.shapes = [Shape.parse(s) for s in (o.shapes.split(",") if o.shapes else usual)]
    o.formats = program.formats(o.formats or (QUICK_FORMATS if o.quick else FORMATS))
    o.q_len, o.pages = program.numbers(o.q_len), program.numbers(o.pages)
    o.schedules = [tuple(map(int, s.split(","))) for s in o.schedules.split(";")] if o.schedules else [None]
    o.splits = program.numbers(o.splits) if o.splits else [None]
    return o


def ours(
    o: argparse.Namespace, shape: Shape, formats: tuple[str, str], page: int, copy_gb_s: float
) -> list[dict[str, Any]]:
    """Rows of one cache: every q_len, schedule and number of splits asked for."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention import entry
    from terrazzo.ops.attention.cache import launch
    from terrazzo.ops.attention.decoding import op
    from terrazzo.schedules import attention as schedules

    cache = random_cache(*formats, shape, o.head_dim, page, residual=None if formats[0] in WITHOUT else o.residual)
    if page and o.pages_in_order:
        cache.block_table.copy_(torch.arange(cache.block_table.numel()).view_as(cache.block_table))
    nbytes = read_bytes(cache)
    target = launch.detect()
    copies = copies_of(cache, nbytes)
    rows = []
    for q_len in o.q_len:
        q = torch.randn(shape.batch, q_len, shape.heads, o.head_dim, device=DEVICE).half()
        exact = None
        for wanted in o.schedules:
            rows_of = q_len * shape.heads // shape.kv_heads
            sizes = (cache.layout, shape.batch, shape.kv_heads, rows_of, cache.max_length)
            given = schedules.Decode(schedules.row_tiles(op.problem_of(*sizes, page)), *wanted) if wanted else None
            for splits in o.splits:
                plan = op.plan(
                    *sizes, dtype="float16", page=page, residual=cache.residual_tokens, softcap=False, sinks=False,
                    target=target, schedule=given, splits=splits or 0,
                )  # fmt: skip
                made = dict(plan.request.params)
                row = facts_of(
                    "attention_decode", formats, shape, o.head_dim, page, q_len=q_len, residual=cache.residual_tokens,
                    sink_tokens=cache.layout.sink_tokens, in_order=o.pages_in_order, spread=None, bytes=nbytes,
                    schedule=f"{described(made)} splits {plan.splits} parts {made['parts']} cluster {plan.cluster}",
                )  # fmt: skip
                rows.append(row)
                exact = attention_bench.expected(q, cache) if exact is None else exact
                y = measure.poisoned(q.shape, q.dtype, DEVICE)
                options = dict(splits=splits, schedule=given)
                with program.failing(row):
                    entry.decode(q, cache, out=y, **options)
                    row |= {"failure": why} if (why := attention_bench.wrong(y, exact)) else {}
                    if not why:
                        calls = [partial(entry.decode, q, c, out=y, **options) for c in copies]
                        row |= program.timed(timing := measure.time_calls(calls, o.budget_ms))
                        row["copy_share"] = round(nbytes / timing.us / 1e3 / copy_gb_s, 4)
                show(row)
    return rows


def read_bytes(cache: Any) -> int:
    """Bytes that a decode call reads of a full cache: packed tokens, and those in f16."""
    layout, length = cache.layout, cache.max_length
    packed = layout.packed(length, cache.residual_tokens)
    pairs = len(cache.lengths) * cache.kv_heads
    f16 = 4 * layout.head_dim * (length - packed + layout.sink_tokens)
    return pairs * (4 * layout.words(packed // layout.block_tokens * layout.block_tokens) + f16)


def peers(o: argparse.Namespace, shape: Shape) -> dict[str, float]:
    """name -> us of other attention with q_len 1 (key "name") and others ("name q4"), checked against float64."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention.cache import launch

    found: dict[str, float] = {}
    size = (shape.batch, shape.kv_heads, shape.tokens, o.head_dim)
    k, v = (torch.randn(size, device=DEVICE, dtype=torch.float16) for _ in "kv")
    number = measure.copies_beyond_l2(2 * k.numel(), launch.detect().l2_bytes)  # bytes of keys and values in 8 bits
    copies = [(k, v), *((k.clone(), v.clone()) for _ in range(number - 1))]
    for q_len in o.q_len:
        q = torch.randn(shape.batch, q_len, shape.heads, o.head_dim, device=DEVICE, dtype=torch.float16)
        found |= times(q, copies, expected(q, k, v), o.budget_ms, f" q{q_len}" if q_len > 1 else "")
    print(f"{shape!s:14} " + "  ".join(f"{n} {us}" for n, us in found.items()), flush=True)
    return found


def expected(q: Any, k: Any, v: Any) -> Any:
    """float64 output of the first query head of the first sequence, [q_len, D]."""
    from terrazzo.ops.attention.decoding import reference

    return reference.attend(q[0, :, :1], k[0, 0], v[0, 0], reference.Options())[0][:, 0]


def show(row: dict[str, Any]) -> None:
    place = (
        f"{row['batch']}x{row['q_heads']}/{row['kv_heads']}x{row['kv_len'] // 1024}k q{row['q_len']} page {row['page']}"
    )
    formats = f"{row['k_format']}/{row['v_format']}"
    if row["us"] is None:
        print(f"{place:28} {formats:24} FAILED {row['failure'][:200]}  [{row['schedule']}]", flush=True)
        return
    speed = f"{row['us']:9.2f} us +-{50 * row['spread']:4.1f}% {row['copy_share']:6.1%} of copy"
    print(f"{place:28} {formats:24} {speed}  [{row['schedule']}]", flush=True)


def requests_of(o: argparse.Namespace) -> list[Any]:
    """All kernels that a run of these options launches."""
    from terrazzo.ops.attention.cache import launch
    from terrazzo.ops.attention.cache.format import kept_in_f16
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.decoding import op
    from terrazzo.schedules import attention as schedules

    target, wanted = launch.detect(), []
    for shape in o.shapes:
        for formats in o.formats:
            layout = CacheLayout(*formats, o.head_dim)
            for page in o.pages:
                for q_len in o.q_len:
                    rows = q_len * shape.heads // shape.kv_heads
                    sizes = (layout, shape.batch, shape.kv_heads, rows, shape.tokens)
                    for given in o.schedules:
                        rows_of = schedules.row_tiles(op.problem_of(*sizes, page))
                        schedule = schedules.Decode(rows_of, *given) if given else None
                        residual, sink = kept_in_f16(formats[0], None if formats[0] in WITHOUT else o.residual)
                        sizes = (replace(layout, sink_tokens=sink), *sizes[1:])
                        facts = dict(page=page, residual=residual, softcap=False, sinks=False)
                        facts |= dict(dtype="float16", target=target, schedule=schedule)
                        wanted += [op.plan(*sizes, splits=n or 0, **facts).request for n in o.splits]
    return wanted


def rows_of(o: argparse.Namespace, result: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Rows of each cache, with the peers of its shape."""
    import torch

    for shape in o.shapes:
        rivals = {} if o.no_peers else peers(o, shape)
        torch.cuda.empty_cache()
        for formats, page in itertools.product(o.formats, o.pages):
            made = ours(o, shape, formats, page, result["copy_gb_s"])
            for row in made:
                suffix = f" q{row['q_len']}" if row["q_len"] > 1 else ""
                row["peers"] = {
                    name.removesuffix(suffix): us for name, us in rivals.items()
                    if name.endswith(suffix) and (suffix or " q" not in name)
                }  # fmt: skip
            yield made


def run(o: argparse.Namespace) -> int:
    from terrazzo.ops.attention.cache import launch

    return program.run(
        "attention_held_out" if o.held_out else "attention", o, launch.detect(), rows_of, requests_of(o), PEERS
    )


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.attention", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
