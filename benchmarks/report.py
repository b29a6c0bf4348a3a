"""Result files, written and read: geometric means against goals, and tables for README.md. No torch here."""

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
BASELINE = "cublas_f16"
LOST = (
    "attention_codes_h100", "cold_calls_h100", "engine_h100", "generic_price_h100", "generic_price_w4a8_fp8_h100",
    "kv_engine_h100", "kv_formats_accuracy_d128_h100", "kv_formats_accuracy_h100", "mxfp4_fp8_h100",
    "tensor_parallel_h100", "w8a8_tiles_h100", "weight_only_h100",
)  # fmt: skip
"""Result files whose commit is in no history, to be measured again. No other may join them."""
GOALS = {1: 3.0, 4: 2.7, 16: 2.3, 32: 1.9, 64: 1.8, 128: 1.4, 256: 1.05, 1024: 1.0, 4096: 1.0, 8192: 1.0}
"""M -> geometric mean over shapes against cuBLAS f16 that W4A16 aims at on an H200."""
W4A8_GOALS = {4: 2.5, 8: 2.5, 16: 2.5, 32: 2.5, 64: 2.2, 256: 1.7}
"""The same for W4A8, activations quantized beforehand."""
W4AX_GOALS = {2: 2.4, 4: 2.4, 8: 2.4, 16: 2.4, 64: 2.0, 256: 1.6}
"""The same for W4Ax on the shapes of COMET's figure 9."""
W4A8_RIVAL = "torch_fp8"
W4A8_RIVAL_GOALS = {4: 1.35, 8: 1.35, 16: 1.35, 32: 1.35, 256: 1.0, 1024: 0.95, 4096: 0.95}
"""M -> geometric mean over shapes against torch's fp8 product."""
W4A8_COPY_GOAL, W4A8_COPY_WEIGHTS, W4A8_COPY_LARGEST_M = 0.8, 200e6, 32
W4A8_WITH_QUANTIZER = {256: 1.4}
QUANTIZER_GOAL, QUANTIZER_LEAST_M = 0.8, 1024
"""Share of the copy bandwidth that the activation quantizer aims at, from how many tokens on."""
COPY_GOAL = 0.85
COPY_SHAPES = ((57344, 8192), (8192, 28672))
COPY_LARGEST_M = 4
OVERHEAD_GOAL_US = 15.0
TITLES = {"w4a16": "W4A16", "w4a8": "W4A8", "w4a8_fp8": "W4A8 on e4m3", "w4ax": "W4Ax"}
"""Operator -> what the summary calls it."""
LINEAR = {"w4a16": "W4A16", "w4a8": "W4A8", "w4afp8": "W4A8 on e4m3", "w4ax": "W4Ax"}
"""Result files of linear layers -> heading, in the order of docs/results.md."""
FIELDS = ("gpu", "sms", "driver", "cuda", "torch", "tilelang", "terrazzo", "commit", "date", "copy_gb_s", "rows")
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


def files(op: str) -> list[Path]:
    """The result files of an operator, by name."""
    return sorted(RESULTS.glob(f"{op}_*.json"))


def file_name(op: str, gpu: str) -> str:
    """ "w4a16", "NVIDIA H100 80GB HBM3" -> "w4a16_h100.json"."""
    return f"{op}_{slug(gpu)}.json"


def geomean(ratios: Iterable[float]) -> float | None:
    """Geometric mean, or None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def timed(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows with a time of ours and of the baseline."""
    return [row for row in result["rows"] if row["us"] and row["peers"].get(BASELINE)]


def means(ratios: Iterable[tuple[int, float]]) -> dict[int, float]:
    """M -> geometric mean of its ratios."""
    by_m: dict[int, list[float]] = {}
    for m, ratio in ratios:
        by_m.setdefault(m, []).append(ratio)
    return {m: geomean(found) for m, found in sorted(by_m.items())}


def speedups(result: Mapping[str, Any], name: str | None = None) -> dict[int, float]:
    """M -> geometric mean over shapes of cuBLAS time / time of ours (or of a peer, where it was measured)."""
    times = ((row, row["us"] if name is None else row["peers"].get(name)) for row in timed(result))
    return means((row["m"], row["peers"][BASELINE] / us) for row, us in times if us)


def sustained(result: Mapping[str, Any]) -> dict[int, float]:
    """`speedups` at the power limit, over the rows that were timed there."""
    times = ((row["m"], row.get("sustained", {})) for row in timed(result))
    return means((m, us[BASELINE] / us[OURS]) for m, us in times if OURS in us and BASELINE in us)


def operator(result: Mapping[str, Any]) -> str:
    """The operator that a result measured."""
    return next((row["op"] for row in result["rows"]), "w4a16")


def goals_of(result: Mapping[str, Any]) -> dict[int, float]:
    """M -> goal against the baseline, of the operator that was measured; all goals are for an H200."""
    if "H200" not in result["gpu"]:
        return {}
    return {"w4a8": W4A8_GOALS, "w4a8_fp8": {}, "w4ax": W4AX_GOALS}.get(operator(result), GOALS)


def ratios(result: Mapping[str, Any], over: str, under: str | None = None) -> dict[int, float]:
    """M -> geometric mean of peer `over`'s time / ours, or variant `under`'s, over the rows that have both."""
    times = ((row, row["us"] if under is None else row.get("variants", {}).get(under)) for row in timed(result))
    return means((row["m"], row["peers"][over] / us) for row, us in times if us and row["peers"].get(over))


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
    goals, w4a8 = goals_of(result), operator(result) == "w4a8"
    for m, ratio in speedups(result).items():
        if m in goals:
            verdict = _verdict(ratio >= goals[m])
            rows.append((f"M = {m}, geometric mean against cuBLAS f16", f"{goals[m]:.2f}x", f"{ratio:.2f}x", verdict))
        rivals = {name: table[m] for name, table in best.items() if m in table}
        if rivals:
            rival = max(rivals, key=rivals.__getitem__)
            verdict = _verdict(ratio >= rivals[rival])
            rows.append((f"M = {m}, best peer here: {rival}", f"{rivals[rival]:.2f}x", f"{ratio:.2f}x", verdict))
    if w4a8:
        against = ((W4A8_RIVAL, None, W4A8_RIVAL_GOALS), (BASELINE, "with_quantizer", W4A8_WITH_QUANTIZER))
        for peer, variant, wanted in against:
            for m, ratio in ratios(result, peer, variant).items():
                if m in wanted:
                    what = f"M = {m}, geometric mean against {peer}" + (f", {variant}" if variant else "")
                    rows.append((what, f"{wanted[m]:.2f}x", f"{ratio:.2f}x", _verdict(ratio >= wanted[m])))
    copy_goal = W4A8_COPY_GOAL if w4a8 else COPY_GOAL
    for row in timed(result):
        if result["copy_gb_s"] and _streams(row, w4a8):
            share = copy_share(row, result["copy_gb_s"])
            what = f"({row['n']}, {row['k']}) at M = {row['m']}, share of the copy bandwidth"
            rows.append((what, f"{copy_goal:.0%}", f"{share:.0%}", _verdict(share >= copy_goal)))
    rows += quantizer_goals(result.get("quantizer", ()))
    overhead = result.get("call_overhead_us", {}).get("terrazzo")
    if overhead is not None:
        verdict = _verdict(overhead < OVERHEAD_GOAL_US)
        rows.append(("CPU time of a call from Python", f"< {OVERHEAD_GOAL_US:.0f} us", f"{overhead:.1f} us", verdict))
    return rows


def quantizer_goals(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """As `goals_table`, of rows of the activation quantizer."""
    return [
        (
            f"quantizer ({row['form']}), K = {row['k']} at M = {row['m']}, share of the copy bandwidth",
            f"{QUANTIZER_GOAL:.0%}",
            f"{row['share']:.0%}",
            _verdict(row["share"] >= QUANTIZER_GOAL),
        )
        for row in rows
        if row["us"] and row["m"] >= QUANTIZER_LEAST_M
    ]


def _streams(row: Mapping[str, Any], w4a8: bool) -> bool:
    """Whether a row is one of those that the goal of the copy bandwidth names."""
    if w4a8:
        return row["n"] * row["k"] > W4A8_COPY_WEIGHTS and row["m"] <= W4A8_COPY_LARGEST_M
    return (row["n"], row["k"]) in COPY_SHAPES and row["m"] <= COPY_LARGEST_M


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def failures(result: Mapping[str, Any]) -> list[str]:
    """One line for each row that was not timed."""
    lines = [
        f"({row['n']}, {row['k']}) M = {row['m']}: {row['failure']}" for row in result["rows"] if row.get("failure")
    ]
    quantizer = (row for row in result.get("quantizer", ()) if row.get("failure"))
    return lines + [f"quantizer K = {row['k']} M = {row['m']}: {row['failure']}" for row in quantizer]


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
    if slow := sustained(result):
        rivals = {"at the power limit": slow} | rivals
    shapes, goals = len({(row["n"], row["k"]) for row in timed(result)}), goals_of(result)
    columns: dict[str, Mapping[int, float]] = {"terrazzo": ours} | ({"goal": goals} if goals else {}) | rivals
    rows = [(m, *(f"{table[m]:.2f}x" if m in table else "" for table in columns.values())) for m in ours]
    table = markdown(("M", *columns), rows, range(1 + len(columns)))
    setting = timed(result)[0]
    copies = f"copies reach {result['copy_gb_s']:.0f} GB/s, " if result["copy_gb_s"] else ""
    notes = "".join(f"\n- {note}" for note in result.get("notes", ()))
    return (
        f"{TITLES[operator(result)]} on one {result['gpu']}, {setting['dtype']}, group {setting['group']}"
        f"{', zero points' if setting['format'].endswith('zeros') else ''}: speed-up over cuBLAS f16 in the same run,"
        f" geometric mean over {shapes} layer shapes; {copies}torch"
        f" {result['torch']}, driver {result['driver']}, {result['date']}, commit {result['commit'][:7]}."
        f" Source: [{source}]({source}).\n\n{table}{chr(10) if notes else ''}{notes}"
    )
