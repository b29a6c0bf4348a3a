"""What each part of decode attention is worth: the same step without masks, warps along tokens, or a pipeline, and
through shared memory and wgmma; beside torch's f16 attention.

    python -m benchmarks.attention_ablation                 all rows -> benchmarks/results/attention_ablation_<gpu>.json
    python -m benchmarks.attention_ablation --formats int2/int2 --shapes 8x32/8x32k --q-len 1

Variants: "ours"; "plain conversion" (integer-to-float instructions, one code at a time); "one warp" (as many CTAs, one
warp in each); "one-warp CTAs" (as many warps, each a CTA and a split of its own); "no pipeline" (a ring of one stage);
"shared memory, wgmma" (f16 operands written to shared memory and read by wgmma, with blocks of 64 and of 128 tokens).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from terrazzo.autotune import attention_bench
from terrazzo.autotune.attention_bench import Shape, random_cache
from terrazzo.autotune.gemm_bench import DEVICE
from terrazzo.lowering.errors import TerrazzoError
from terrazzo.schedules import attention as schedules

from benchmarks import report
from benchmarks.attention import peers

SHAPES = ("8x32/8x32k", "64x32/8x4k", "1x32/8x128k", "8x32/32x4k")
FORMATS = ("int4/int4", "int2/int2", "int8/int8")
HEAD_DIM = 128


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_ablation", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, as 8x32/8x32k")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, keys/values")
    parser.add_argument("--q-len", default="1,4", help="comma-separated numbers of new tokens")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--budget-ms", type=float, default=15.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    o = parser.parse_args(argv)
    o.shapes = [Shape.parse(s) for s in o.shapes.split(",")]
    o.formats = [tuple(f.split("/")) for f in o.formats.split(",")]
    o.q_len = [int(n) for n in o.q_len.split(",")]
    o.head_dim = HEAD_DIM
    return o


def variants(chosen: schedules.Decode, problem: schedules.DecodeProblem, target: Any) -> dict[str, schedules.Decode]:
    """Name -> schedule: the one that is chosen, then each without one of its parts."""
    one = replace(chosen, warps=1, tiles=min(chosen.tiles, 2))
    most = chosen.warps * chosen.min_blocks
    many = (replace(one, min_blocks=blocks) for blocks in range(most, 0, -1))
    return {
        "ours": chosen,
        "plain conversion": schedules.PlainDecode(**asdict(chosen)),
        "one warp": one,
        "one-warp CTAs": next(schedule for schedule in many if schedules.fits(schedule, problem, target)),
        "no pipeline": replace(chosen, stages=1),
    }


def facts(formats: tuple[str, str], shape: Shape, q_len: int) -> tuple[Any, ...]:
    """(layout, sequences, kv heads, rows of a kv head, tokens)."""
    from terrazzo.ops.attention.layout import CacheLayout

    layout = CacheLayout(*formats, HEAD_DIM)
    return layout, shape.batch, shape.kv_heads, q_len * shape.heads // shape.kv_heads, shape.tokens


def schedules_of(formats: tuple[str, str], shape: Shape, q_len: int, target: Any) -> dict[str, schedules.Decode]:
    """`variants` of the schedule that the operator chooses."""
    from terrazzo.ops.attention import op

    problem = op.problem_of(*facts(formats, shape, q_len), 0)
    return variants(schedules.choose(problem, target), problem, target)


def compile_all(o: argparse.Namespace, target: Any) -> None:
    from terrazzo.ablation import decode_shared
    from terrazzo.lowering.parallel import compile_many
    from terrazzo.ops.attention import op

    wanted = [decode_shared.request(target, block) for block in decode_shared.BLOCKS if target.arch == "sm_90a"]
    for shape in o.shapes:
        for formats in o.formats:
            for q_len in o.q_len:
                sizes = facts(formats, shape, q_len)
                options = dict(dtype="float16", page=0, residual=sizes[0].k.group, softcap=False, sinks=False)
                for schedule in schedules_of(formats, shape, q_len, target).values():
                    wanted.append(op.plan(*sizes, **options, target=target, schedule=schedule).request)
    start = time.perf_counter()
    failed = {str(e)[:300] for e in compile_many(wanted) if isinstance(e, Exception)}
    print(f"{len(set(wanted))} kernels in {time.perf_counter() - start:.0f} s", *failed, sep="\n", flush=True)


def through_shared_memory(q: Any, cache: Any, out: Any, block: int) -> None:
    from terrazzo.ablation import decode_shared

    decode_shared.decode_shared(q, cache, out=out, block=block)


def calls_of(formats: tuple[str, str], shape: Shape, q_len: int, target: Any) -> dict[str, partial]:
    """Variant -> call(q, cache, out=...)."""
    from terrazzo.ablation import decode_shared, decode_shared_program
    from terrazzo.ops.attention import entry

    found: dict[str, partial] = {}
    for name, schedule in schedules_of(formats, shape, q_len, target).items():
        found[name] = partial(entry.decode, schedule=schedule)
    fits = q_len * shape.heads // shape.kv_heads <= decode_shared_program.ROWS
    if formats == ("int4", "int4") and fits and target.arch == "sm_90a":
        for block in decode_shared.BLOCKS:
            found[f"shared memory, wgmma, {block} tokens"] = partial(through_shared_memory, block=block)
    return found


def rows_of(
    o: argparse.Namespace, shape: Shape, formats: tuple[str, str], copy_gb_s: float, target: Any
) -> list[dict[str, Any]]:
    """Rows of one cache: every q_len and variant, each checked against float64 before it is timed."""
    import torch
    from terrazzo.autotune import measure

    cache = random_cache(*formats, shape, HEAD_DIM, 0)
    nbytes = 4 * cache.pages.numel()
    copies = [cache] + [
        replace(cache, pages=cache.pages.clone()) for _ in range(measure.copies_beyond_l2(nbytes, target.l2_bytes) - 1)
    ]
    rows = []
    for q_len in o.q_len:
        q = torch.randn(shape.batch, q_len, shape.heads, HEAD_DIM, device=DEVICE).half()
        exact = attention_bench.expected(q, cache)
        ours = None
        for name, call in calls_of(formats, shape, q_len, target).items():
            row = {
                "op": "attention_ablation", "variant": name, "k_format": formats[0], "v_format": formats[1],
                "batch": shape.batch, "q_heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": HEAD_DIM,
                "q_len": q_len, "kv_len": shape.tokens, "us": None, "bytes": nbytes,
                "schedule": str(call.keywords.get("schedule", "")),
            }  # fmt: skip
            rows.append(row)
            y = measure.poisoned(q.shape, q.dtype, DEVICE)
            try:
                call(q, cache, out=y)
                # dequantized to f16 in memory: one rounding more of every key and value
                bounds = [(*part, (4 if "shared" in name else 1) * bound) for *part, bound in exact]
                why = attention_bench.wrong(y, bounds)
                if why:
                    row["failure"] = why
                else:
                    timing = measure.time_calls([partial(call, q, c, out=y) for c in copies], o.budget_ms)
                    ours = ours or timing.us
                    row |= {"us": round(timing.us, 2), "spread": round(timing.spread, 4)}
                    row |= {"copy_share": round(nbytes / timing.us / 1e3 / copy_gb_s, 4)}
                    row["of_ours"] = round(timing.us / ours, 3)
            except TerrazzoError as error:
                row["failure"] = " ".join(str(error).split())[:300]
            show(shape, row)
    return rows


def show(shape: Shape, row: dict[str, Any]) -> None:
    place = f"{shape!s:12} q{row['q_len']} {row['k_format']}/{row['v_format']:6} {row['variant']:34}"
    if row["us"] is None:
        print(f"{place} FAILED {row['failure'][:200]}", flush=True)
    else:
        print(f"{place} {row['us']:9.2f} us {row['copy_share']:6.1%} of copy {row['of_ours']:6.2f}x ours", flush=True)


def run(o: argparse.Namespace) -> int:
    import torch
    from terrazzo.autotune import gemm_bench, measure
    from terrazzo.ops.attention import launch

    start, target = time.perf_counter(), launch.detect()
    compile_all(o, target)
    result = gemm_bench.header(target, o.commit)
    result["copy_gb_s"] = round(measure.copy_bandwidth(), 1)
    result["rows"], result["sdpa"] = [], {}
    for shape in o.shapes:
        result["sdpa"][str(shape)] = {} if o.no_peers else peers(o, shape)
        torch.cuda.empty_cache()
        for formats in o.formats:
            result["rows"] += rows_of(o, shape, formats, result["copy_gb_s"], target)
            torch.cuda.empty_cache()
        out = o.out or report.RESULTS / report.file_name("attention_ablation", result["gpu"])
        report.write(result, out, start)
    return report.conclude(result)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.attention_ablation", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
