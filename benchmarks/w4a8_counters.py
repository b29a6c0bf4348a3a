"""Nsight Compute's counters of the pipelines of W4A8 on one shape; `python -m benchmarks.w4a8_ablation --ncu` runs it.

The program starts itself under `ncu`, which times nothing here: clocks and caches are its own, and each kernel is
replayed for every group of counters. Metrics that this version or GPU lacks are left out and their cells stay empty.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from glob import glob
from typing import Any

from benchmarks import report

PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
"""Their metrics differ between versions; those named below are asked for besides."""
COLUMNS = {
    "tensor": (
        r"sm__pipe_tensor\w*cycles_active\.avg\.pct_of_peak_sustained_(active|elapsed)",
        r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    ),
    "issue": (
        r"sm__inst_issued\.avg\.pct_of_peak_sustained_active",
        r"smsp__(issue_active|inst_issued)\.avg\.pct_of_peak_sustained_active",
    ),
    "sm": (r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",),
    "dram": (r"(gpu__)?dram__?throughput\.avg\.pct_of_peak_sustained_elapsed",),
    "us": (r"gpu__time_duration\.sum",),
}
"""Column -> patterns of its metric, the first that something fits counts; of several fits the largest value."""
METRICS = (
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
)
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
TITLES = {
    "us": "us under ncu", "tensor": "tensor pipe %", "issue": "issue slots %", "sm": "SM %", "dram": "DRAM %",
    "stalls": "stalls (warps for each issue)",
}  # fmt: skip


class CountersError(RuntimeError):
    """Nsight Compute is missing, or said no; the message is one line."""


def find_ncu() -> str:
    """Path of ncu.

    Raises:
        CountersError: there is none.
    """
    found = shutil.which("ncu") or next((p for place in PLACES for p in sorted(glob(place), reverse=True)), None)
    if found is None:
        raise CountersError(f"ncu was not found on PATH or in {', '.join(PLACES)}: no counters")
    return found


def known(ncu: str) -> list[str]:
    """Those of METRICS that this ncu knows for this GPU; all, if it does not say."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    names = {line.split()[0] for line in done.stdout.splitlines() if "__" in line.split(" ")[0]}
    return [metric for metric in METRICS if metric.partition(".")[0] in names] if names else list(METRICS)


def parse(text: str) -> list[dict[str, float]]:
    """Metric -> value of each kernel of ncu's `--csv --page raw`, in launch order.

    Raises:
        CountersError: no kernel is in it; the message is what ncu said instead.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line for line in lines if "ERROR" in line or "ERR_" in line] or lines[-1:] or ["nothing"]
        raise CountersError(f"ncu measured nothing: {said[0].strip()}")
    header, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    found = []
    for row in rows:
        if len(row) != len(header):
            continue
        values = {}
        for name, cell in zip(header, row):
            if "__" in name:
                try:
                    values[name] = float(cell.replace(",", ""))
                except ValueError:  # "n/a"
                    continue
        found.append(values)
    time = next((name for name in header if name == "gpu__time_duration.sum"), None)
    scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    for values in found:
        if time in values:
            values[time] *= scale.get(units[header.index(time)], 1e-3)
    return found


def summary(values: dict[str, float]) -> dict[str, Any]:
    """Column -> value, None where no metric fits; `stalls`: the three most frequent reasons and their ratios."""
    row: dict[str, Any] = {}
    for column, patterns in COLUMNS.items():
        fits = ([v for name, v in values.items() if re.fullmatch(pattern, name)] for pattern in patterns)
        row[column] = next((round(max(found), 2) for found in fits if found), None)
    reasons = {match[1]: value for name, value in values.items() if (match := STALL.fullmatch(name))}
    reasons.pop("selected", None)  # a warp that was issued
    row["stalls"] = {name: round(reasons[name], 2) for name in sorted(reasons, key=reasons.get, reverse=True)[:3]}
    return row


def collect(n: int, k: int, m: int, group: int, dtype: str, ways: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of `summary` with `way`, for (pipeline, dequantization) after (pipeline, dequantization).

    Raises:
        CountersError: no ncu, no permission, or another number of kernels than was launched.
    """
    ncu = find_ncu()
    child = [sys.executable, "-m", "benchmarks.w4a8_counters", "--shape", f"{n}x{k}", "--m", str(m)]
    child += ["--group", str(group), "--dtype", dtype, "--ways", ",".join("/".join(way) for way in ways)]
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--target-processes", "all", "--kernel-name", "regex:main_kernel"]
    command += [part for section in SECTIONS for part in ("--section", section)]
    command += ["--metrics", ",".join(known(ncu))]
    done = subprocess.run([*command, *child], capture_output=True, text=True, check=False, env=os.environ.copy())
    try:
        kernels = parse(done.stdout)
    except CountersError as error:
        last = done.stderr.strip().splitlines()[-1:]
        raise CountersError(" ".join([str(error), *last])) from error
    if len(kernels) != len(ways):
        raise CountersError(f"ncu saw {len(kernels)} kernels for {len(ways)} pipelines")
    return [{"way": "_".join(way)} | summary(values) for way, values in zip(ways, kernels)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of `collect`'s rows."""
    lines = []
    for row in rows:
        stalls = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["stalls"].items())
        cells = ("" if row[name] is None else f"{row[name]:.1f}" for name in TITLES if name != "stalls")
        lines.append((row["way"], *cells, stalls))
    return report.markdown(("pipeline", *TITLES.values()), lines, range(1, len(TITLES)))


def main(argv: list[str] | None = None) -> int:
    """The program that ncu watches: each pipeline once between the marks, after launches that warm it up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.w4a8_counters", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", required=True, help="as 22016x4096")
    parser.add_argument("--m", type=int, required=True)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--ways", required=True, help="pipeline/dequantization, comma-separated")
    options = parser.parse_args(argv)
    import torch
    from terrazzo.ablation.w4a8.bench import multiply
    from terrazzo.autotune.w4a8_bench import random_weight
    from terrazzo.ops import w4a8

    n, k = map(int, options.shape.split("x"))
    random = torch.Generator(device="cuda").manual_seed(0)
    w = w4a8.pack(random_weight(n, k, options.group, random))
    x = w4a8.quantize_activations(torch.randn(options.m, k, device="cuda", dtype=getattr(torch, options.dtype)))
    out = torch.empty(options.m, n, device="cuda", dtype=getattr(torch, options.dtype))
    ways = [tuple(way.split("/")) for way in options.ways.split(",")]
    runs = [lambda way=way: multiply(x, w, way, out=out, out_dtype=out.dtype) for way in ways]
    for run in runs:
        run(), run()
    torch.cuda.synchronize()
    for run in runs:
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
