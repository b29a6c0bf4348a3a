"""W4A16 over the layers of real models beside cuBLAS f16 and every installed peer.

    python -m benchmarks.w4a16                       the whole grid; writes benchmarks/results/w4a16_<gpu>.json
    python -m benchmarks.w4a16 --quick               LLaMA-3-8B, four sizes of M, result not written unless --out
    python -m benchmarks.w4a16 --models yi-34b --m 1,64 --out result.json

Every output is compared with a float64 product of the same dequantized weight before its time counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import TerrazzoError

from benchmarks import report
from benchmarks.peers import PEERS

MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-32b")
MS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096, 8192)
QUICK_MODELS, QUICK_MS = ("llama-3-8b",), (1, 16, 64, 256)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.w4a16", description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="comma-separated names of schedules/models.py")
    parser.add_argument("--m", help="comma-separated numbers of tokens")
    parser.add_argument("--quick", action="store_true", help="one model, four sizes of M")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--symmetric", action="store_true", help="without zero points")
    parser.add_argument("--no-peers", action="store_true", help="only cuBLAS")
    parser.add_argument("--budget-ms", type=float, default=15.0, help="GPU time of one measurement")
    parser.add_argument("--out", type=Path, help="file to write; default benchmarks/results/w4a16_<gpu>.json")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    options = parser.parse_args(argv)
    options.models = tuple(options.models.split(",")) if options.models else QUICK_MODELS if options.quick else MODELS
    try:
        given = [int(m) for m in options.m.split(",")] if options.m else QUICK_MS if options.quick else MS
    except ValueError:
        parser.error(f"--m {options.m}: write numbers of tokens as 1,16,256")
    options.m = tuple(dict.fromkeys(given))
    if min(options.m) < 1:
        parser.error(f"--m {options.m}: every M must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    try:
        return run(options)
    except TerrazzoError as error:
        print(f"benchmarks.w4a16: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    from terrazzo.autotune.gemm_bench import Settings, bench_w4a16
    from terrazzo.schedules.models import shapes

    start = time.perf_counter()
    settings = Settings(
        dtype=options.dtype,
        group=options.group,
        symmetric=options.symmetric,
        budget_ms=options.budget_ms,
        peers=() if options.no_peers else PEERS,
    )
    problems = shapes(options.models)

    def target_file(result: dict[str, Any]) -> Path | None:
        return options.out or (None if options.quick else report.RESULTS / report.file_name("w4a16", result["gpu"]))

    def write(result: dict[str, Any]) -> None:
        result["seconds"] = round(time.perf_counter() - start, 1)
        out = target_file(result)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n")

    result = bench_w4a16(
        problems, options.m, settings, compile_all=_compile, on_row=show, on_shape=write, commit=options.commit
    )
    for name, reason in result["peers_missing"].items():
        print(f"peer {name}: not measured, {reason}")
    for line in report.failures(result):
        print(f"FAILED {line}")
    print()
    for what, goal, reached, verdict in report.goals_table(result):
        print(f"{what:68} {goal:>8} {reached:>8}  {verdict}")
    if target_file(result) is not None:
        print(f"\n{target_file(result)}: {len(result['rows'])} rows in {result['seconds']:.0f} s")
    return 1 if report.failures(result) else 0


def _compile(requests: Any) -> Any:
    from terrazzo.lowering.parallel import compile_many

    start = time.perf_counter()
    outcomes = compile_many(requests)
    print(f"{len(set(requests))} kernels compiled or found in {time.perf_counter() - start:.1f} s", flush=True)
    return outcomes


def show(row: dict[str, Any]) -> None:
    """One line for a row, as it is measured."""
    base = row["peers"].get(report.BASELINE)
    ratio = f"{base / row['us']:5.2f}x" if row["us"] and base else "     -"
    ours = f"{row['us']:9.2f} us +-{50 * row['spread']:4.1f}%" if row["us"] else f"FAILED: {row['failure'][:60]}"
    peers = "  ".join(f"{name} {us:.2f}" for name, us in row["peers"].items())
    broken = "  ".join(f"{name}: {why[:60]}" for name, why in row.get("peers_failed", {}).items())
    place = f"({row['n']}, {row['k']})"
    print(
        f"{place:16} M {row['m']:5} {ours} {ratio}  {peers}  [{row['bound']} {row['predicted_us']}] {broken}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
