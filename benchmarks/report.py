"""Result files, written and read: geometric means, and tables for README.md. No torch here."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from terrazzo.autotune.gemm_bench import OURS
from terrazzo.lowering.errors import TerrazzoError
from terrazzo.schedules.records import slug

RESULTS = Path(__file__).parent / "results"
BASELINES = ("cublas_f16", "cublas_bf16")
"""Names of torch.mm in 16 bits, which every speed-up is a ratio to."""
SIXTEEN = (*BASELINES, "vllm_marlin", "vllm_machete", "humming_w4a16")
"""Peers whose activations have 16 bits: they need no quantizer."""
LOST = (
    "1d6621a2a13e", "32e2268e08bb", "37ee7a247832", "90271f9edc38", "f40c02597ef6", "5e218c5d80fe", "a29cc52faac1",
    "774ad0ea99b6", "e94db60d7326",
)  # fmt: skip
"""Commits of result files that are in no history: those files are to be measured again. No other may join them."""
FIELDS = ("gpu", "sms", "driver", "cuda", "torch", "tilelang", "terrazzo", "commit", "date", "rows")
ROW_FIELDS = ("op", "format", "dtype", "group", "m", "n", "k", "model", "us", "spread", "bytes", "peers", "schedule")


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: it lacks a field; the message names file and field.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    for name in FIELDS:
        if name not in result:
            raise ValueError(f"{path}: no {name!r}; measure again")
    for row in result["rows"]:
        for name in ROW_FIELDS:
            if name not in row:
                raise ValueError(f"{path}: a row has no {name!r}; measure again")
    return result


def lost(result: Mapping[str, Any]) -> str:
    """What marks a file whose commit is in no history, or ""."""
    return " †" if (result["commit"] or "")[:12] in LOST and not result.get("commit_on_main") else ""


def write(result: dict[str, Any], out: Path | None, start: float) -> None:
    """Set `seconds` since `start` (of time.perf_counter), and write the result, if there is a file for it."""
    result["seconds"] = round(time.perf_counter() - start, 1)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def conclude(result: Mapping[str, Any]) -> int:
    """Say how many rows were measured, and return the exit code: 1 if one failed."""
    failed = sum(bool(row.get("failure")) for row in result["rows"])
    print(f"{len(result['rows'])} rows, {failed} failed, {result['seconds']:.0f} s")
    return 1 if failed else 0


def guarded(program: str, run: Callable[[], int]) -> int:
    """Exit code of a run; of bad input 2, with one line on stderr."""
    try:
        return run()
    except TerrazzoError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def files(name: str) -> list[Path]:
    """The result files of a format, of every GPU and both sets of shapes, by name."""
    found = {path: json.loads(path.read_text(encoding="utf-8"))["gpu"] for path in RESULTS.glob(f"{name}_*.json")}
    owns = lambda path, gpu: path.name in (file_name(name, gpu), file_name(f"{name}_held_out", gpu))
    return sorted(path for path, gpu in found.items() if owns(path, gpu))


def file_name(op: str, gpu: str) -> str:
    """ "w4a16", "NVIDIA H100 80GB HBM3" -> "w4a16_h100.json"."""
    return f"{op}_{slug(gpu)}.json"


def geomean(ratios: Iterable[float]) -> float | None:
    """Geometric mean, or None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def timed(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows with a time of ours and of the baseline."""
    return [row for row in result["rows"] if row["us"] and baseline(row)]


def baseline(row: Mapping[str, Any]) -> float | None:
    """Time of cuBLAS in 16 bits."""
    return next((row["peers"][name] for name in BASELINES if row["peers"].get(name)), None)


def beside_quantizer(row: Mapping[str, Any]) -> dict[str, float]:
    """Peers of a product that quantizes its activations itself: those that need not, and those that do so, too."""
    wide = {name: us for name, us in row["peers"].items() if name in SIXTEEN}
    return wide | row.get("peers_with_quantizer", {})


def means(ratios: Iterable[tuple[int, float]]) -> dict[int, float]:
    """M -> geometric mean of its ratios."""
    by_m: dict[int, list[float]] = {}
    for m, ratio in ratios:
        by_m.setdefault(m, []).append(ratio)
    return {m: geomean(found) for m, found in sorted(by_m.items())}


def speedups(result: Mapping[str, Any], name: str | None = None) -> dict[int, float]:
    """M -> geometric mean over shapes of cuBLAS time / time of ours (or of a peer, where it was measured)."""
    times = ((row, row["us"] if name is None else row["peers"].get(name)) for row in timed(result))
    return means((row["m"], baseline(row) / us) for row, us in times if us)


def sustained(result: Mapping[str, Any]) -> dict[int, float]:
    """`speedups` at the power limit, over the rows that were timed there."""
    times = ((row["m"], row.get("sustained", {})) for row in timed(result))
    return means((m, us[BASELINES[0]] / us[OURS]) for m, us in times if OURS in us and BASELINES[0] in us)


def peer_names(result: Mapping[str, Any]) -> list[str]:
    """Peers other than the baseline that were measured, in order of appearance."""
    return list(dict.fromkeys(name for row in result["rows"] for name in row["peers"] if name not in BASELINES))


def failures(result: Mapping[str, Any]) -> list[str]:
    """One line for each row that was not timed."""
    rows = (row for row in result["rows"] if row.get("failure"))
    return [f"({row['n']}, {row['k']}) M = {row['m']}: {row['failure']}" for row in rows]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Iterable[int] = ()) -> str:
    """A Markdown table; columns of `numeric` are flush right."""
    right = set(numeric)
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---:" if index in right else "---" for index in range(len(columns))) + "|",
    ]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def summary_markdown(result: Mapping[str, Any], source: str, title: str, again: str) -> str:
    """The table of one result file: geometric mean for each M, ours and the peers'. again: the file's command."""
    rivals = {name: speedups(result, name) for name in peer_names(result)}
    if slow := sustained(result):
        rivals = {"at the power limit": slow} | rivals
    ms = list(speedups(result))
    columns: dict[str, Mapping[int, float]] = {"terrazzo": speedups(result)} | rivals
    lines = [(name, *(f"{of[m]:.2f}x" if m in of else "" for m in ms)) for name, of in columns.items()]
    table = markdown(("M", *map(str, ms)), lines, range(1, 1 + len(ms)))
    setting, shapes = timed(result)[0], list(dict.fromkeys((row["n"], row["k"]) for row in timed(result)))
    copies = f"copies reach {result['copy_gb_s']:.0f} GB/s, " if result.get("copy_gb_s") else ""
    notes = "".join(f"\n- {note}" for note in result.get("notes", ()))
    repeats = {row["repeats"] for row in result["rows"] if "repeats" in row}
    counted = f"{min(repeats)} to {max(repeats)} replays, " if repeats else ""
    return (
        f"{title} on one {result['gpu']}, {setting['dtype']}: speed-up over cuBLAS in 16 bits in the same run,"
        f" geometric mean over {len(shapes)} layers, {', '.join(f'{n} x {k}' for n, k in shapes)}; {counted}{copies}"
        f"torch {result['torch']}, driver {result['driver']}, {result['date']}, commit"
        f" {result['commit'][:7]}{lost(result)}. Source: [{source}]({source}). Again: `{again}`."
        f"\n\n{table}{chr(10) if notes else ''}{notes}"
    )
