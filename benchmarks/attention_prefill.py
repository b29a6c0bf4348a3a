"""Prefill attention over a packed KV cache beside f16 attention in torch and in installed packages.

    python -m benchmarks.attention_prefill             prompts and chunks; writes results/attention_prefill_<gpu>.json
    python -m benchmarks.attention_prefill --quick     two prompts, one chunk, not written unless --out
    python -m benchmarks.attention_prefill --shapes 1x32/8x8k,1x32/8x512+32k --formats int4/int4 --schedules mma,2,8,4

A shape is batch x query heads / kv heads x new tokens [+ tokens before them], causal. "stored" reads the new tokens
from the cache too, "fresh" takes them as k and v and counts their packing into tiles. Outputs are compared with float64
over what the kernel read, on a few heads and rows, before their time counts.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.autotune.attention_bench import Shape, random_cache
from terrazzo.lowering.errors import ArgumentError

from benchmarks import program, report
from benchmarks.attention import expected, facts_of
from benchmarks.peers.attention import PEERS, times

DEVICE = "cuda"
SHAPES = (
    *("1x32/8x4k", "1x32/8x8k", "1x32/8x16k", "1x32/8x32k", "8x32/8x4k", "1x32/32x8k"),
    *("1x32/8x512+32k", "8x32/8x512+8k", "1x32/8x2k+32k"),
)
FORMATS = ("float16/float16", "int8/int8", "int4/int4", "int4_channel128/int4", "int8/int4")
QUICK_SHAPES = ("1x32/8x4k", "1x32/8x16k", "1x32/8x512+32k")
QUICK_FORMATS = FORMATS[:3]
ROWS = 48  # new tokens at either end that are checked


@dataclass(frozen=True)
class Prompt:
    """New tokens of `shape.batch` sequences, the newest of `shape.tokens`."""

    shape: Shape
    new: int

    @staticmethod
    def parse(text: str) -> Prompt:
        found = re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)(k?)(?:\+(\d+)(k?))?", text)
        if not found:
            raise ArgumentError("shapes", text, "must be as 1x32/8x512+32k", "batch x heads/kv heads x new + past")
        batch, heads, kv_heads, new = (int(found[i]) for i in (1, 2, 3, 4))
        new *= 1024 if found[5] else 1
        past = int(found[6] or 0) * (1024 if found[7] else 1)
        return Prompt(Shape(batch, heads, kv_heads, new + past), new)

    def __str__(self) -> str:
        past = self.shape.tokens - self.new
        return f"{self.shape.batch}x{self.shape.heads}/{self.shape.kv_heads}x{self.new}" + (f"+{past}" if past else "")

    def flops(self, head_dim: int) -> float:
        """Of both products, over the tokens that each row sees."""
        seen = self.new * (self.shape.tokens - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * head_dim * self.shape.heads * self.shape.batch * seen


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("attention_prefill", __doc__, 60.0, "quick", "no-peers")
    parser.add_argument("--shapes", help="comma-separated, as 1x32/8x512+32k")
    parser.add_argument("--formats", help="comma-separated, keys/values")
    parser.add_argument("--modes", default="stored,fresh")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=128, help="tokens of a page; 0 is contiguous")
    parser.add_argument("--schedules", help="auto, or program,row_tiles,warps,stages[,buffers], separated by ;")
    parser.add_argument("--splits", default="auto", help="comma-separated: auto, or parts of the past, 1 for none")
    o = parser.parse_args(argv)
    o.shapes = [Prompt.parse(s) for s in (o.shapes.split(",") if o.shapes else QUICK_SHAPES if o.quick else SHAPES)]
    o.formats = program.formats(o.formats or (QUICK_FORMATS if o.quick else FORMATS))
    o.modes = o.modes.split(",")
    o.splits = [None if n == "auto" else int(n) for n in o.splits.split(",")]
    given = [s.split(",") for s in o.schedules.split(";")] if o.schedules else []
    o.schedules = [None if it == ["auto"] else (it[0], *map(int, it[1:])) for it in given] or [None]
    return o


def schedule_of(given: tuple | None):
    from terrazzo.schedules.attention_prefill import Prefill

    return Prefill(*given) if given else None


def exact_rows(q: Any, cache: Any, fresh: tuple | None, prompt: Prompt) -> list[tuple[slice, slice, Any, Any]]:
    """(rows, query heads, output, bound) of the first and last rows of a head of the last sequence."""
    import torch
    from terrazzo.ops.attention.decoding import reference
    from terrazzo.ops.attention.prefilling import prefill_reference as oracle

    b, h, group = prompt.shape.batch - 1, prompt.shape.kv_heads - 1, prompt.shape.heads // prompt.shape.kv_heads
    span, options, found = slice(h * group, (h + 1) * group), reference.Options(), []
    tokens = list(cache.dequantize(b, h))
    parts = [[torch.cat(p) for p in zip(*made)] for made in oracle._parts(cache, b, h)]
    first, new = b * prompt.new, prompt.new
    if fresh:
        for role, x in enumerate(fresh):
            mine = x[first:, h].double()
            tokens[role][-new:] = mine
            parts[role][0][-new:], parts[role][1][-new:] = mine.abs(), 0
    for end in dict.fromkeys((min(ROWS, new), new)):
        rows = slice(first + max(0, end - ROWS), first + end)
        seen = prompt.shape.tokens - (new - end)
        out, _, weights = reference.attend(q[rows, span], tokens[0][:seen], tokens[1][:seen], options)
        cut = [[p[:seen] for p in part] for part in parts]
        bound = oracle.bound_of(q[rows, span], cache, tokens[0][:seen], cut, out, weights, options)
        found.append((rows, span, out, bound))
    return found


def wrong(y: Any, exact: list[tuple[slice, slice, Any, Any]]) -> str:
    """What is wrong with the output, judged on the rows of `exact_rows`."""
    from terrazzo.autotune import measure

    for rows, span, out, bound in exact:
        problem = measure.check_outputs(y[rows, span], out, bound)
        if problem:
            return f"rows {rows.start}..{rows.stop}, query heads from {span.start}: {problem}"
    return ""


def ours(o: argparse.Namespace, prompt: Prompt, formats: tuple[str, str]) -> list[dict[str, Any]]:
    """Rows of one cache: every mode and schedule asked for."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention.entry import prefill

    shape, rows = prompt.shape, []
    cache = random_cache(*formats, shape, o.head_dim, o.page)
    count = shape.batch * prompt.new
    cu = torch.arange(0, count + 1, prompt.new, dtype=torch.int32, device=DEVICE)
    q = torch.randn(count, shape.heads, o.head_dim, device=DEVICE, dtype=torch.float16)
    kv = [torch.randn(count, shape.kv_heads, o.head_dim, device=DEVICE, dtype=torch.float16) for _ in "kv"]
    for mode in o.modes:
        static = any(f.scaling == "static" for f in (cache.layout.k, cache.layout.v))
        if mode == "fresh" and static:
            continue
        given = dict(zip("kv", kv)) if mode == "fresh" else {}
        exact = exact_rows(q, cache, tuple(kv) if given else None, prompt)
        for wanted, splits in itertools.product(o.schedules, o.splits):
            more = dict(new=prompt.new, mode=mode, schedule=wanted, splits=splits)
            row = facts_of("attention_prefill", formats, shape, o.head_dim, o.page, **more)
            rows.append(row)
            y = measure.poisoned(q.shape, q.dtype, DEVICE)
            with program.failing(row):
                parts = {} if splits is None else {"splits": splits}
                call = partial(prefill, q, cache, cu, prompt.new, out=y, schedule=schedule_of(wanted), **parts, **given)
                call()
                why = wrong(y, exact)
                row |= {"failure": why} if why else {}
                if not why:
                    row |= program.timed(timing := measure.time_calls([call], o.budget_ms))
                    row["tflops"] = round(prompt.flops(o.head_dim) / timing.us / 1e6, 1)
            show(prompt, row)
    return rows


def show(prompt: Prompt, row: dict[str, Any]) -> None:
    where = f"{prompt!s:18} {row['k_format']}/{row['v_format']:12} {row['mode']:7}"
    if row["us"] is None:
        print(f"{where} FAILED {row.get('failure', '')[:300]}", flush=True)
    else:
        print(
            f"{where} {row['us']:10.1f} us {row['tflops']:7.1f} TFLOP/s  {row['schedule'] or ''} {row['splits'] or ''}",
            flush=True,
        )


def peers(o: argparse.Namespace, prompt: Prompt) -> dict[str, float]:
    """name -> us of other attention over the whole sequences, checked against float64."""
    import torch

    shape = prompt.shape
    k, v = (
        torch.randn(shape.batch, shape.kv_heads, shape.tokens, o.head_dim, device=DEVICE, dtype=torch.float16)
        for _ in "kv"
    )
    q = torch.randn(shape.batch, prompt.new, shape.heads, o.head_dim, device=DEVICE, dtype=torch.float16)
    found = times(q, [(k, v)], expected(q[:, -ROWS:].contiguous(), k, v), o.budget_ms)
    speeds = {name: round(prompt.flops(o.head_dim) / us / 1e6, 1) for name, us in found.items()}
    print(f"{prompt!s:18} " + "  ".join(f"{n} {us} us {speeds[n]} TFLOP/s" for n, us in found.items()), flush=True)
    return found


def requests_of(o: argparse.Namespace) -> list[Any]:
    """All kernels that a run of these options launches."""
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.prefilling import prefill_op

    wanted = []
    for formats in o.formats:
        layout = CacheLayout(*formats, o.head_dim)
        for mode in o.modes:
            for given in o.schedules:
                wanted += prefill_op.prefill_requests(
                    layout, page=o.page, residual=layout.k.group, fresh=mode == "fresh", schedule=schedule_of(given)
                )
    return wanted


def rows_of(o: argparse.Namespace, result: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Rows of each cache, with the peers of its prompt."""
    import torch

    for prompt in o.shapes:
        rivals = {} if o.no_peers else peers(o, prompt)
        torch.cuda.empty_cache()
        for formats in o.formats:
            yield [row | {"peers": rivals} for row in ours(o, prompt, formats)]


def run(o: argparse.Namespace) -> int:
    from terrazzo.ops.attention.cache import launch

    return program.run("attention_prefill", o, launch.detect(), rows_of, requests_of(o), PEERS, copies=False)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.attention_prefill", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
