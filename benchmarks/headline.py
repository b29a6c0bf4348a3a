"""README's one table of figures: how many times as fast as the fastest other kernel that ran in the same run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report

SIZES = (1, 4, 16, 64, 256, 1024, 4096)
"""Columns: tokens of a product, sequences of attention, requests of an engine."""
NAMES = {
    "cublas_f16": "cuBLAS f16", "cublas_bf16": "cuBLAS bf16", "torch_fp8": "torch fp8", "torch_int8": "torch int8",
    "sdpa_cudnn_f16": "cuDNN f16", "sdpa_flash_f16": "flash f16", "transformers_f16": "transformers f16",
    "transformers_compiled": "compiled transformers", "machete": "Machete", "marlin": "Marlin", "humming": "humming",
    "vllm_marlin": "Marlin", "vllm_machete": "Machete", "humming_w4a16": "humming", "vllm_cutlass": "CUTLASS W4A8",
    "vllm_marlin_int8": "Marlin int8", "humming_w4a8_int8": "humming int8",
    "humming_w4a8_int8_integers": "humming int8", "humming_w4a8_e4m3": "humming e4m3",
    "flash_attn3_f16": "FlashAttention-3 f16", "flash_attn3_f16_page128": "FlashAttention-3 f16",
    "torch_bf16": "torch bf16", "vllm_triton": "vLLM's Triton experts",
    "flash_attn3_fp8": "FlashAttention-3 fp8", "flash_attn3_fp8_page128": "FlashAttention-3 fp8",
}  # fmt: skip
OWN = ("w4a16_symmetric_g32", "generic", "separate", "copy", "empty")
"""What stands among peers of a file and is ours, or no kernel of the same work."""
TITLES = {
    **report.TITLES, "mxfp4": "MXFP4 weights", "nvfp4": "NVFP4 weights", "fp8": "FP8 weights", "w8a16": "INT8 weights"
}  # fmt: skip
Ratios = Mapping[tuple[str, int], float]
"""(peer, size) -> how many times as fast ours is."""


def means(found: Iterable[tuple[str, int, float]]) -> Ratios:
    """Geometric means of (peer, size, ratio)."""
    by_place: dict[tuple[str, int], list[float]] = {}
    for peer, size, ratio in found:
        by_place.setdefault((peer, size), []).append(ratio)
    return {place: report.geomean(ratios) for place, ratios in by_place.items()}


def products(result: Mapping[str, Any]) -> dict[str, Ratios]:
    """Title -> ratios of a file whose rows are products of one weight; the title says where shapes are few."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    shapes: dict[str, set[tuple[int, int]]] = {}
    for row in (row for row in result["rows"] if row["us"]):
        brain = row["op"] == "w4a16" and row["dtype"] == "bfloat16"
        title = TITLES.get(row["op"], row["op"]) + ", bfloat16" * brain
        named = {"cublas_f16": "cublas_bf16"} if brain else {}  # torch.mm in the row's dtype, whatever its name
        peers = ((named.get(peer, peer), us) for peer, us in row["peers"].items() if peer not in OWN)
        found.setdefault(title, []).extend((peer, row["m"], us / row["us"]) for peer, us in peers)
        shapes.setdefault(title, set()).add((row["n"], row["k"]))
    few = lambda title: {1: ", one shape", 2: ", two shapes"}.get(len(shapes[title]), "")
    return {title + few(title): means(ratios) for title, ratios in found.items()}


def decode(result: Mapping[str, Any]) -> dict[str, Ratios]:
    """Decode attention with one new token, by format of the cache; sizes are sequences."""
    page = min(row["page"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["us"] and row["page"] == page and row["q_len"] == 1]
    titles = {"int8/int8": "decode, int8 cache", "int4/int4": "decode, int4 cache"}
    found: dict[str, list[tuple[str, int, float]]] = {}
    for row in rows:
        title = titles.get(f"{row['k_format']}/{row['v_format']}")
        if title:
            peers = row["peers"].items()
            found.setdefault(title, []).extend((peer, row["batch"], us / row["us"]) for peer, us in peers)
    return {title: means(ratios) for title, ratios in found.items()}


def experts(result: Mapping[str, Any]) -> dict[str, Ratios]:
    """Grouped products of layers with a router, where another package's experts ran too; sizes are tokens."""
    rivals = ("torch_bf16", "vllm_triton")
    found: dict[str, list[tuple[str, int, float]]] = {}
    for row in (row for row in result["rows"] if row["us"] and row["m"] != row["tokens"] * row["experts"]):
        times = {peer: row[peer] for peer in rivals if row.get(peer)}
        if "vllm_triton" in times:
            ratios = ((peer, row["tokens"], us / row["us"]) for peer, us in times.items())
            found.setdefault(f"{TITLES.get(row['op'], row['op'])}, experts", []).extend(ratios)
    return {title: means(ratios) for title, ratios in found.items()}


def decode_step(result: Mapping[str, Any]) -> dict[str, Ratios]:
    """A decode step of a whole model; sizes are sequences."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for row in result["rows"]:
        if row["ms"] and row["new"] == 1 and row.get("head", "f16") == "f16" and row["k_format"] == "int4":
            title = f"8B decode step, {row['weights']}, int4 cache"
            peers = row["peers"].items()
            found.setdefault(title, []).extend((peer, row["batch"], ms / row["ms"]) for peer, ms in peers)
    return {title: means(ratios) for title, ratios in found.items()}


def engine(result: Mapping[str, Any]) -> dict[str, Ratios]:
    """An output token inside vLLM, beside vLLM on one of its own kernels; sizes are requests."""
    ours = {
        (row["shape"], row["weights"], row["kv"], row["batch"]): row["step_ms"]
        for row in result["rows"]
        if row["kernel"] == "terrazzo"
    }
    found: dict[str, list[tuple[str, int, float]]] = {}
    for row in result["rows"]:
        place = (row["shape"], row["weights"], row["kv"], row["batch"])
        if row["kernel"] != "terrazzo" and place in ours:
            cache = "" if row["kv"] == "auto" else f", {row['kv']} cache"
            title = f"vLLM {result['vllm']}, {row['shape']}, {row['weights']}{cache}"
            found.setdefault(title, []).append((row["kernel"], row["batch"], row["step_ms"] / ours[place]))
    return {title: means(ratios) for title, ratios in found.items()}


KINDS: dict[str, Callable[[Mapping[str, Any]], dict[str, Ratios]]] = {
    **{f"{op}_*.json": products for op in ("w4a16", "w4a8", "w4afp8", "w4ax", "weight_only")},
    "grouped_h*.json": experts,
    "attention_h*.json": decode,
    "decode_step_*.json": decode_step,
    "engine_*.json": engine,
}
"""Files in benchmarks/results, in the table's order -> what reads their ratios."""


def lines(files: Iterable[tuple[Path, Callable[[Mapping[str, Any]], dict[str, Ratios]]]]) -> list[tuple[str, ...]]:
    """Rows of the table: what, GPU, beside what, and a cell for each size with the fastest of these peers."""
    found = []
    for path, read in files:
        result = json.loads(path.read_text(encoding="utf-8"))
        gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]
        for title, ratios in read(result).items():
            peers = list(dict.fromkeys(peer for peer, _ in ratios))
            cells = []
            for size in SIZES:
                here = [ratios[peer, size] for peer in peers if (peer, size) in ratios]
                cells.append(f"{min(here):.2f}x" if here else "")
            if any(cells):
                names = ", ".join(dict.fromkeys(NAMES.get(peer, peer) for peer in peers))
                found.append((f"[{title}]({path.relative_to(path.parents[2]).as_posix()})", gpu, names, *cells))
    return found


def table() -> str:
    """The table, for README and the site's first page."""
    every = [(path, read) for name, read in KINDS.items() for path in sorted(report.RESULTS.glob(name))]
    found = lines(every)
    if not found:
        return "No result file is in benchmarks/results yet; `make bench` writes one on a GPU."
    head = ("", "GPU", "beside, the fastest of", *(str(size) for size in SIZES))
    return report.markdown(head, found, range(3, len(head)))
