"""Times of other implementations in benchmark results (benchmarks/results/*.json), for tuned problems of the same size:
cuBLAS f16 for linear layers, torch's grouped product for experts, the fastest f16 attention for decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from terrazzo.autotune.database import Problem
from terrazzo.lowering.data_files import is_text
from terrazzo.lowering.errors import ArgumentError, shown
from terrazzo.schedules import records


def is_result(data: object) -> bool:
    """Whether a file's content is a benchmark's result, and not a table of records."""
    return isinstance(data, Mapping) and "rows" in data and "records" not in data


def peers_of(data: Mapping[str, Any], problems: Iterable[Problem], source: str) -> Iterator[tuple[Problem, str, float]]:
    """(problem, name, microseconds) for each problem that a row of the result has the size of.

    Raises:
        ArgumentError: not what a benchmark writes.
    """
    times: dict[tuple, tuple[float, str]] = {}
    try:
        for size, peer in map(_measured, data["rows"]):
            if size is not None:
                times[size] = min(times.get(size, peer), peer)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        why = f"is no benchmark's result: {type(error).__name__} {error}"
        raise ArgumentError("result", source, why, "name a file that a benchmark wrote") from error
    if not is_text(data.get("gpu")):
        raise ArgumentError("result", source, "is no benchmark's result: its GPU is missing", "run the benchmark again")
    for problem in problems:
        if found := times.get(_size(problem)):
            yield problem, found[1], found[0]


def _measured(row: Mapping[str, Any]) -> tuple[tuple | None, tuple[float, str]]:
    """Size of a row's problem, None without a peer, and (microseconds, name) of that."""
    peers = {name: _time(us) for name, us in (row.get("peers") or {}).items()}
    if "experts" in row and "torch_bf16" in row:
        return ("grouped", *_counts(row, "experts", "n", "k", "m")), (_time(row["torch_bf16"]), "torch_bf16")
    if "cublas_f16" in peers and "n" in row:
        return ("linear", *_counts(row, "n", "k", "m")), (peers["cublas_f16"], "cublas_f16")
    if row.get("op") == "attention_decode" and peers:
        batch, kv_heads, q_len, q_heads = _counts(row, "batch", "kv_heads", "q_len", "q_heads")
        best = min((us, name) for name, us in peers.items())
        head_dim, kv_len = _counts(row, "head_dim", "kv_len")
        return ("decode", head_dim, q_len * q_heads // kv_heads, kv_len, batch * kv_heads), best
    return None, (0.0, "")


def _counts(row: Mapping[str, Any], *names: str) -> list[int]:
    """Sizes of a row. A text or a list would be repeated by a product of sizes, and no error."""
    for name in names:
        if type(row[name]) is not int:
            raise ValueError(f"{name} = {shown(row[name])} is no integer")
    return [row[name] for name in names]


def _time(value: object) -> float:
    if not records.is_time(value):
        raise ValueError(f"{shown(value)} is no time in microseconds")
    return float(value)


def _size(problem: Problem) -> tuple:
    """The same of a tuned problem."""
    facts = dict(problem.facts)
    if "experts" in facts:
        return "grouped", facts["experts"], facts["n"], facts["k"], problem.m
    if "n" in facts:
        return "linear", facts["n"], facts["k"], problem.m
    if problem.op == "attention":
        return "decode", facts["head_dim"], facts["rows"], facts["tokens"], problem.m
    return ("other",)
