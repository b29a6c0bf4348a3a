"""What a result file says: geometric means against goals, and tables for README.md. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BASELINE = "cublas_f16"
GOALS = {1: 3.0, 4: 2.7, 16: 2.3, 32: 1.9, 64: 1.8, 128: 1.4, 256: 1.05, 1024: 1.0, 4096: 1.0, 8192: 1.0}
"""M -> geometric mean over shapes against cuBLAS f16 that W4A16 aims at on an H200."""
COPY_GOAL = 0.85
COPY_SHAPES = ((57344, 8192), (8192, 28672))
COPY_LARGEST_M = 4
OVERHEAD_GOAL_US = 15.0
FIELDS = ("gpu", "sms", "driver", "cuda", "torch", "tilelang", "terrazzo", "commit", "date", "copy_gb_s", "rows")
ROW_FIELDS = ("op", "format", "dtype", "group", "m", "n", "k", "model", "us", "spread", "bytes", "peers", "schedule")


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: it lacks a field; the message names file and field.
    """
    result = json.loads(path.read_text())
    for name in FIELDS:
        if name not in result:
            raise ValueError(f"{path}: no {name!r}; measure again")
    for row in result["rows"]:
        for name in ROW_FIELDS:
            if name not in row:
                raise ValueError(f"{path}: a row has no {name!r}; measure again")
    return result


def files(op: str) -> list[Path]:
    """The result files of an operator, by name."""
    return sorted(RESULTS.glob(f"{op}_*.json"))


def file_name(op: str, gpu: str) -> str:
    """ "w4a16", "NVIDIA H200" -> "w4a16_h200.json"."""
    words = [word for word in gpu.lower().replace("-", " ").split() if word not in ("nvidia", "geforce", "rtx")]
    return f"{op}_{'_'.join(words) or 'gpu'}.json"


def geomean(ratios: Iterable[float]) -> float | None:
    """Geometric mean, or None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def timed(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows with a time of ours and of the baseline."""
    return [row for row in result["rows"] if row["us"] and row["peers"].get(BASELINE)]


def speedups(result: Mapping[str, Any], name: str | None = None) -> dict[int, float]:
    """M -> geometric mean over shapes of cuBLAS time / time of ours (or of a peer, where it was measured)."""
    by_m: dict[int, list[float]] = {}
    for row in timed(result):
        us = row["us"] if name is None else row["peers"].get(name)
        if us:
            by_m.setdefault(row["m"], []).append(row["peers"][BASELINE] / us)
    return {m: geomean(ratios) for m, ratios in sorted(by_m.items())}


def peer_names(result: Mapping[str, Any]) -> list[str]:
    """Peers other than the baseline that were measured, in order of appearance."""
    return list(dict.fromkeys(name for row in result["rows"] for name in row["peers"] if name != BASELINE))


def copy_share(row: Mapping[str, Any], copy_gb_s: float) -> float:
    """Packed weight bytes per time, as a share of the copy bandwidth of the same run."""
    return row["bytes"] / row["us"] / 1e3 / copy_gb_s


def goals_table(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows (what, goal, reached, verdict) for everything that has a goal and was measured."""
    rows = []
    best = {name: speedups(result, name) for name in peer_names(result)}
    for m, ratio in speedups(result).items():
        if m in GOALS:
            verdict = _verdict(ratio >= GOALS[m])
            rows.append((f"M = {m}, geometric mean against cuBLAS f16", f"{GOALS[m]:.2f}x", f"{ratio:.2f}x", verdict))
        rivals = {name: table[m] for name, table in best.items() if m in table}
        if rivals:
            rival = max(rivals, key=rivals.__getitem__)
            verdict = _verdict(ratio >= rivals[rival])
            rows.append((f"M = {m}, best peer here: {rival}", f"{rivals[rival]:.2f}x", f"{ratio:.2f}x", verdict))
    for row in timed(result):
        if result["copy_gb_s"] and (row["n"], row["k"]) in COPY_SHAPES and row["m"] <= COPY_LARGEST_M:
            share = copy_share(row, result["copy_gb_s"])
            what = f"({row['n']}, {row['k']}) at M = {row['m']}, share of the copy bandwidth"
            rows.append((what, f"{COPY_GOAL:.0%}", f"{share:.0%}", _verdict(share >= COPY_GOAL)))
    overhead = result.get("call_overhead_us", {}).get("terrazzo")
    if overhead is not None:
        verdict = _verdict(overhead < OVERHEAD_GOAL_US)
        rows.append(("CPU time of a call from Python", f"< {OVERHEAD_GOAL_US:.0f} us", f"{overhead:.1f} us", verdict))
    return rows


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def failures(result: Mapping[str, Any]) -> list[str]:
    """One line for each row that was not timed."""
    return [
        f"({row['n']}, {row['k']}) M = {row['m']}: {row['failure']}" for row in result["rows"] if row.get("failure")
    ]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Iterable[int] = ()) -> str:
    """A Markdown table; columns of `numeric` are flush right."""
    right = set(numeric)
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---:" if index in right else "---" for index in range(len(columns))) + "|",
    ]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def summary_markdown(result: Mapping[str, Any], source: str) -> str:
    """README's table of one result file: geometric mean for each M, ours and the peers'."""
    ours, rivals = speedups(result), {name: speedups(result, name) for name in peer_names(result)}
    shapes = len({(row["n"], row["k"]) for row in timed(result)})
    rows = [
        (
            m,
            f"{ratio:.2f}x",
            f"{GOALS[m]:.2f}x" if m in GOALS else "",
            *(f"{table[m]:.2f}x" if m in table else "" for table in rivals.values()),
        )
        for m, ratio in ours.items()
    ]
    table = markdown(("M", "terrazzo", "goal", *rivals), rows, range(3 + len(rivals)))
    setting = timed(result)[0]
    copies = f"copies reach {result['copy_gb_s']:.0f} GB/s, " if result["copy_gb_s"] else ""
    notes = "".join(f"\n- {note}" for note in result.get("notes", ()))
    return (
        f"W4A16 on one {result['gpu']}, {setting['dtype']}, group {setting['group']}"
        f"{', zero points' if setting['format'].endswith('zeros') else ''}: speed-up over cuBLAS f16 in the same run,"
        f" geometric mean over {shapes} layer shapes; {copies}torch"
        f" {result['torch']}, driver {result['driver']}, {result['date']}, commit {result['commit']}."
        f" Source: [{source}]({source}).\n\n{table}{chr(10) if notes else ''}{notes}"
    )
