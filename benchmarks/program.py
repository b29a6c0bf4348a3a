"""What benchmark programs share: arguments of all, kernels compiled ahead, the run over rows, the result file."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import TerrazzoError

from benchmarks import report

FLAGS = {
    "quick": "few cases; no file without --out",
    "no-peers": "only ours",
    "compile-only": "compile the kernels and stop",
}


def parser(name: str, doc: str, budget_ms: float, *flags: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, with what every program takes and some of FLAGS."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    for flag in flags:
        made.add_argument(f"--{flag}", action="store_true", help=FLAGS[flag])
    made.add_argument("--budget-ms", type=float, default=budget_ms, help="GPU time of one measurement")
    made.add_argument("--out", type=Path, help=f"file to write; default benchmarks/results/{name}_<gpu>.json")
    made.add_argument("--commit", help="of the sources, where git cannot tell")
    return made


def numbers(text: str) -> list[int]:
    """ "1,4" -> [1, 4]."""
    return [int(n) for n in text.split(",")]


def formats(text: str | Sequence[str]) -> list[tuple[str, ...]]:
    """ "int4/int4,int8/int4" -> keys and values of each."""
    return [tuple(f.split("/")) for f in (text.split(",") if isinstance(text, str) else text)]


@contextlib.contextmanager
def failing(row: dict[str, Any]) -> Iterator[None]:
    """An error of ours costs the row, not the run: it is the row's `failure`."""
    try:
        yield
    except TerrazzoError as error:
        row["failure"] = " ".join(str(error).split())[:300]


def timed(timing: Any) -> dict[str, Any]:
    """What a row keeps of a `measure.Timing`: `us`, the median; `spread` of its `repeats`, a fraction."""
    return {"us": round(timing.us, 2), "spread": round(timing.spread, 4), "repeats": timing.replays}


def compile_all(requests: Sequence[Any]) -> list[Any]:
    """`compile_many`, with lines that say how many kernels it had, how long it took, and what failed."""
    from terrazzo.lowering import parallel

    start = time.perf_counter()
    outcomes = parallel.compile_many(requests)
    failed = {str(e)[:300] for e in outcomes if isinstance(e, Exception)}
    print(f"{len(set(requests))} kernels in {time.perf_counter() - start:.0f} s", *failed, sep="\n", flush=True)
    return outcomes


def run(
    name: str,
    o: argparse.Namespace,
    target: Any,
    rows: Callable[[argparse.Namespace, dict[str, Any]], Iterable[list[dict[str, Any]]]],
    requests: Sequence[Any] = (),
    peers: Sequence[Any] | None = None,
    copies: bool = True,
) -> int:
    """Compile, measure, write. Returns the exit code: 1 if a row failed.

    Args:
        name: of the program and its file. o: options of `parser`. target: the GPU.
        rows: yields rows as they are measured; it is given the result, which is written behind each yield.
        requests: kernels to compile first. peers: what `peers_missing` is about. copies: whether to measure
            `copy_gb_s`.
    """
    import torch
    from terrazzo.autotune import gemm_bench, measure

    start = time.perf_counter()
    outcomes = compile_all(requests) if requests else []
    if getattr(o, "compile_only", False):
        return int(any(isinstance(it, Exception) for it in outcomes))
    result = gemm_bench.header(target, o.commit)
    if copies:
        result["copy_gb_s"] = round(measure.copy_bandwidth(), 1)
        print(f"copy {result['copy_gb_s']} GB/s", flush=True)
    if peers is not None:
        result["peers_missing"] = {peer.name: peer.missing() for peer in peers if peer.missing()}
    result["rows"] = []
    default = None if getattr(o, "quick", False) else report.RESULTS / report.file_name(name, result["gpu"])
    for found in rows(o, result):
        result["rows"] += found
        torch.cuda.empty_cache()
        report.write(result, o.out or default, start)
    return report.conclude(result)
