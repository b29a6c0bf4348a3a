"""Decode attention of batches whose sequences have different lengths, beside torch's f16 attention of such batches.

    python -m benchmarks.attention_ragged             every batch and format; writes results/attention_ragged_<gpu>.json
    python -m benchmarks.attention_ragged --batches 64:256-8192,32~3000,63x1024+1x32768 --formats int4/int4 --heads 64/8

A batch is n:a-b (n lengths drawn evenly from a to b), n~m (lognormal, median m, sigma 0.8, at most ten times m), or a
sum of n x length; drawn ones are the same in every run. Each is timed as a user gets it, with `mean_length` known, and
with as many splits for every sequence (`even`). With --own rows have `own_us` too: the same call of 1 to q_len new
tokens, in turn, of a sequence's own. A few heads are compared with float64 before a time counts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.autotune import attention_bench
from terrazzo.autotune.attention_bench import Shape
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op

from benchmarks import program, report
from benchmarks.attention import copies_of, facts_of

DEVICE = "cuda"
BATCHES = (
    "64:256-8192", "32~3000", "24:2048-12288", "16:1024-16384", "8:4096-32768", "128~1000", "63x1024+1x32768",
    "7x2048+1x65536", "64:3072-5120", "256:128-2048",
)  # fmt: skip
FORMATS = ("float16/float16", "int8/int8", "int4/int4", "int4_channel128/int4", "int2_channel128/int2")
PAGE = 128
PEER = "torch_varlen_f16"


def torch_varlen(q: Any, lengths: list[int], kv_heads: int) -> tuple[Callable[[], Any], Any, Any]:
    """torch's flash attention of one new token of each sequence: the call, and its keys and values, [tokens, Hkv, D]
    of all sequences in turn."""
    import torch

    k, v = torch.randn(2, sum(lengths), kv_heads, q.shape[-1], device=DEVICE).half()
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    rows = torch.arange(len(lengths) + 1, device=DEVICE).int()
    flash, single = torch.ops.aten._flash_attention_forward, q[:, 0].contiguous()
    return lambda: flash(single, k, v, rows, starts, 1, max(lengths), 0.0, False, False)[0], k, v


def lengths_of(batch: str) -> list[int]:
    """Tokens of each sequence of a batch, in the order in which they lie there.

    Raises:
        ArgumentError: a text that is no batch.
    """
    rng = random.Random(batch)
    even, log = re.fullmatch(r"(\d+):(\d+)-(\d+)", batch), re.fullmatch(r"(\d+)~(\d+)", batch)
    parts = [re.fullmatch(r"(\d+)x(\d+)", part) for part in batch.split("+")]
    if even:
        count, low, high = map(int, even.groups())
        made = [rng.randint(low, high) for _ in range(count)] if low <= high else []
    elif log:
        count, median = map(int, log.groups())
        made = [min(10 * median, max(1, round(median * rng.lognormvariate(0, 0.8)))) for _ in range(count)]
    else:
        made = [int(part[2]) for part in parts if part for _ in range(int(part[1]))] if all(parts) else []
        rng.shuffle(made)
    if not made or min(made) < 1:
        constraint = "is no batch of sequences of at least one token"
        raise ArgumentError("batch", batch, constraint, "write 64:256-8192, 32~3000 or 63x1024+1x32768")
    return made


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser("attention_ragged", __doc__, 15.0)
    parser.add_argument("--batches", default=",".join(BATCHES), help="comma-separated")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, keys/values")
    parser.add_argument("--heads", default="32/8", help="query heads / kv heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--q-len", default="1,4", help="comma-separated numbers of new tokens")
    parser.add_argument("--own", action="store_true", help="new tokens of each sequence's own number, up to q_len, too")
    o = parser.parse_args(argv)
    o.batches = o.batches.split(",")
    o.formats, o.q_len = program.formats(o.formats), program.numbers(o.q_len)
    return o


def shape_of(o: argparse.Namespace, lengths: list[int]) -> Shape:
    """The cache that holds a batch: whole pages for the longest sequence."""
    return Shape.parse(f"{len(lengths)}x{o.heads}x{-(-max(lengths) // PAGE) * PAGE}")


def plan_of(
    o: argparse.Namespace, lengths: list[int], layout: CacheLayout, q_len: int, mean: int, own: bool = False
) -> op.Plan:
    """What decode launches for a batch whose mean length is known (0: is not); own: numbers of new tokens differ."""
    shape = shape_of(o, lengths)
    sizes = (layout, shape.batch, shape.kv_heads, q_len * shape.heads // shape.kv_heads, max(lengths))
    facts = dict(dtype="float16", page=PAGE, residual=layout.k.group, softcap=False, sinks=False)
    return op.plan(*sizes, **facts, target=launch.detect(), mean=mean, ragged=own)


def mean_of(lengths: list[int]) -> int:
    """The average, as a `KVCache` rounds it."""
    return -(-sum(lengths) // len(lengths))


def requests_of(o: argparse.Namespace) -> list[Any]:
    """All kernels that a run of these options launches."""
    batches, layouts = map(lengths_of, o.batches), [CacheLayout(*formats, o.head_dim) for formats in o.formats]
    return [
        plan_of(o, lengths, layout, q_len, mean, own).request
        for lengths, layout, q_len in itertools.product(batches, layouts, o.q_len)
        for mean in (0, mean_of(lengths))
        for own in ((False, True) if o.own else (False,))
    ]


def peer(o: argparse.Namespace, lengths: list[int], shape: Shape) -> dict[str, float]:
    """name -> us of f16 attention, one new token for each sequence, checked against float64 for the first and last."""
    import torch
    from terrazzo.autotune import measure
    from terrazzo.ops.attention.decoding import reference

    q = torch.randn(shape.batch, 1, shape.heads, o.head_dim, device=DEVICE).half()
    try:
        call, k, v = torch_varlen(q, lengths, shape.kv_heads)
        y, ends = call(), [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for b in (0, shape.batch - 1):
            span = slice(ends[b], ends[b + 1])
            exact = reference.attend(q[b, :, :1], k[span, 0], v[span, 0], reference.Options())[0][0, 0]
            off = float((y[b, 0].double() - exact).abs().max())
            if not off < 0.01 * float(exact.abs().max()) + 1e-3:
                raise ValueError(f"its output is off by {off:.3g}")
        return {PEER: round(measure.time_calls([call], o.budget_ms).us, 2)}
    except Exception as error:  # another package's error of any kind costs its column, not the run
        print(f"peer {PEER}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        return {}


def ours(
    o: argparse.Namespace, batch: str, formats: tuple[str, str], rivals: dict[str, float], copy_gb_s: float
) -> list[dict[str, Any]]:
    """Rows of one batch in one pair of formats, for each q_len."""
    import torch
    from terrazzo.autotune import measure

    lengths = lengths_of(batch)
    shape = shape_of(o, lengths)
    cache = attention_bench.random_cache(*formats, shape, o.head_dim, PAGE)
    held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cache = replace(cache, lengths=held, max_length=max(lengths))
    nbytes = 4 * cache.kv_heads * cache.pages.shape[2] * sum(-(-n // PAGE) for n in lengths)
    copies = copies_of(cache, nbytes)
    known = [replace(c, mean_length=mean_of(lengths)) for c in copies]
    rows = []
    for q_len in o.q_len:
        q = torch.randn(shape.batch, q_len, shape.heads, o.head_dim, device=DEVICE).half()
        row = facts_of("attention_ragged", formats, shape, o.head_dim, PAGE, q_len=q_len, spread=None) | {
            "batch": batch, "mean": round(sum(lengths) / len(lengths)), "longest": max(lengths), "even": None,
            "balanced": None, "bytes": nbytes, "peers": rivals if q_len == 1 else {},
        }  # fmt: skip
        rows.append(row)
        with program.failing(row):
            exact = attention_bench.expected(q, cache)
            row["balanced"] = bool(plan_of(o, lengths, cache.layout, q_len, mean_of(lengths)).places)
            for name, caches in (("us", known), ("even", copies)):
                y = measure.poisoned(q.shape, q.dtype, DEVICE)
                entry.decode(q, caches[0], out=y)
                if why := attention_bench.wrong(y, exact):
                    row["failure"] = why
                    break
                timing = measure.time_calls([partial(entry.decode, q, c, out=y) for c in caches], o.budget_ms)
                row |= program.timed(timing) if name == "us" else {name: round(timing.us, 2)}
            if row["us"]:
                row["copy_share"] = round(nbytes / row["us"] / 1e3 / copy_gb_s, 4)
            if o.own and q_len > 1 and not row.get("failure"):
                own_numbers(o, row, q, known)
        show(row)
    return rows


def own_numbers(o: argparse.Namespace, row: dict[str, Any], q: Any, caches: list[Any]) -> None:
    """own_us: of 1 to q_len new tokens of a sequence in turn, compared with those of decode of q_len for all."""
    import torch
    from terrazzo.autotune import measure

    batch, most = q.shape[:2]
    own = torch.arange(batch) % most + 1
    has = (torch.arange(most) >= most - own[:, None]).to(q.device)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)]).int().to(q.device)
    rows, y = q[has].contiguous(), measure.poisoned((int(own.sum()), *q.shape[2:]), q.dtype, q.device)
    facts = dict(cu_seqlens=starts, most_new=most, out=y)
    entry.decode(rows, caches[0], **facts)
    among_all = entry.decode(q, caches[0])[has]
    off = float((y.float() - among_all.float()).abs().max())
    if not off <= 0.01 * float(among_all.abs().max()):  # maxima are raised for all rows of a warp: not the same bits
        row["failure"] = f"new tokens of their own number are off by {off:.3g}"
        return
    timing = measure.time_calls([partial(entry.decode, rows, c, **facts) for c in caches], o.budget_ms)
    row |= {"own_us": round(timing.us, 2), "own_tokens": int(own.sum())}


def show(row: dict[str, Any]) -> None:
    place = f"{row['batch']:18} q{row['q_len']} {row['k_format']}/{row['v_format']:12}"
    if row.get("failure"):
        print(place, "FAILED", row["failure"][:200], flush=True)
        return
    beside = "  ".join(f"{name} {us}" for name, us in row["peers"].items())
    kind = "balanced" if row["balanced"] else "even"
    beside += f"  own {row['own_us']} us" if "own_us" in row else ""
    print(
        f"{place} {row['us']:9.2f} us {row['copy_share']:6.1%} of copy, {kind}; even {row['even']:.2f}  {beside}",
        flush=True,
    )


def rows_of(o: argparse.Namespace, result: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Rows of each batch and format."""
    for batch in o.batches:
        lengths = lengths_of(batch)
        rivals = peer(o, lengths, shape_of(o, lengths)) if 1 in o.q_len else {}
        for formats in o.formats:
            yield ours(o, batch, formats, rivals, result["copy_gb_s"])


def run(o: argparse.Namespace) -> int:
    return program.run("attention_ragged", o, launch.detect(), rows_of, requests_of(o))


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.attention_ragged", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
