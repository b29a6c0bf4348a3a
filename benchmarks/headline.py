"""README's one table of figures: how many times as fast as the fastest other kernel that ran in the same run.

Each shape is compared with the peer that is fastest at that shape and size. A cell has the geometric mean over shapes,
and in brackets the worst shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report

SIZES = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)
"""Columns: tokens of a product, sequences of attention, requests of an engine."""
NAMES = {
    "cublas_f16": "cuBLAS f16", "cublas_bf16": "cuBLAS bf16", "torch_fp8": "torch fp8", "torch_int8": "torch int8",
    "torch_fp8_rows": "torch fp8 by rows", "torch_fp8_blocks": "torch fp8 in blocks",
    "vllm_cutlass_blocks": "CUTLASS fp8 in blocks", "vllm_triton_blocks": "Triton fp8 in blocks",
    "sdpa_cudnn_f16": "cuDNN f16", "sdpa_flash_f16": "flash f16", "transformers_f16": "transformers f16",
    "transformers_compiled": "compiled transformers", "machete": "Machete", "marlin": "Marlin", "humming": "humming",
    "vllm_marlin": "Marlin", "vllm_machete": "Machete", "humming_w4a16": "humming", "vllm_cutlass": "CUTLASS W4A8",
    "vllm_marlin_int8": "Marlin int8", "humming_w4a8_int8": "humming int8",
    "humming_w4a8_int8_integers": "humming int8", "humming_w4a8_e4m3": "humming e4m3",
    "flash_attn3_f16": "FlashAttention-3 f16", "flash_attn3_f16_page128": "FlashAttention-3 f16",
    "torch_bf16": "torch bf16", "vllm_triton": "vLLM's Triton experts", "humming_grouped": "humming",
    "flash_attn3_fp8": "FlashAttention-3 fp8", "flash_attn3_fp8_page128": "FlashAttention-3 fp8",
}  # fmt: skip
OWN = ("w4a16_symmetric_g32", "generic", "separate", "copy", "empty")
"""What stands among peers of a file and is ours, or no kernel of the same work."""
EXPERTS = ("torch_bf16", "vllm_triton", "vllm_marlin", "humming", "humming_grouped")
SIXTEEN = ("cublas_f16", "cublas_bf16", "vllm_marlin", "vllm_machete", "humming_w4a16")
"""Peers whose activations have 16 bits: they are what a product with its quantizer is compared with."""
TITLES = {
    **report.TITLES, "mxfp4": "MXFP4 weights", "nvfp4": "NVFP4 weights", "fp8": "FP8 weights", "w8a16": "INT8 weights",
    "mxfp4_fp8": "MXFP4 on e4m3", "w8a8": "W8A8",
}  # fmt: skip
FORMS = {
    ("fp8", "fp8_block"): " in blocks", ("fp8", "fp8_block_folded"): " in blocks, folded",
    ("w8a16", "w8a16_g128"): " in groups", ("w8a8", "int8"): ", int8", ("w8a8", "fp8"): ", e4m3",
    ("w8a8", "fp8_fast"): ", e4m3, fast sums", ("w8a8", "fp8_block"): ", e4m3 in blocks",
}  # fmt: skip
"""(operator, format) -> what its title adds: forms of scales are rows of their own."""


@dataclass(frozen=True)
class Case:
    """One shape at one size: our time and the peers', in one unit, of one run."""

    title: str
    size: int
    ours: float
    peers: Mapping[str, float]


def products(result: Mapping[str, Any]) -> Iterator[Case]:
    """Products of one weight. Where a file has them, those whose activations are quantized inside of the clock, too."""
    shapes: dict[str, set[tuple[int, int]]] = {}
    found: list[Case] = []
    for row in (row for row in result["rows"] if row["us"]):
        brain = row["dtype"] == "bfloat16" and row["op"] == "w4a16"
        title = TITLES.get(row["op"], row["op"]) + FORMS.get((row["op"], row["format"]), "") + ", bfloat16" * brain
        named = {"cublas_f16": "cublas_bf16"} if brain else {}  # torch.mm in the row's dtype, whatever its name
        peers = {named.get(peer, peer): us for peer, us in row["peers"].items() if peer not in OWN}
        found.append(Case(title, row["m"], row["us"], peers))
        whole = f"{title}, with its quantizer"
        if row.get("variants", {}).get("with_quantizer"):
            wide = {peer: us for peer, us in peers.items() if peer in SIXTEEN}
            found.append(Case(whole, row["m"], row["variants"]["with_quantizer"], wide))
        for name in (title, whole):
            shapes.setdefault(name, set()).add((row["n"], row["k"]))
    few = {1: ", one shape", 2: ", two shapes"}
    for case in found:
        yield Case(case.title + few.get(len(shapes[case.title]), ""), case.size, case.ours, case.peers)


def attention(result: Mapping[str, Any]) -> Iterator[Case]:
    """Decode with one new token, by format of the cache; prefill by format and by what is read. Sizes are sequences."""
    page = min(row["page"] for row in result["rows"])
    for row in (row for row in result["rows"] if row["us"] and row["page"] == page):
        kind = row["k_format"] if row["k_format"] == row["v_format"] else f"{row['k_format']}, {row['v_format']}"
        if row["op"] == "attention_decode" and row["q_len"] == 1:
            yield Case(f"decode, {kind} cache", row["batch"], row["us"], row["peers"])
        elif row["op"] == "attention_prefill":
            read = "new tokens read as they are" if row["mode"] == "fresh" else "new tokens read from the cache"
            yield Case(f"prefill, {kind} cache, {read}", row["batch"], row["us"], row["peers"])


def experts(result: Mapping[str, Any]) -> Iterator[Case]:
    """Grouped products of layers with a router, where another package's experts ran too; sizes are tokens."""
    for row in (row for row in result["rows"] if row["us"] and row["m"] != row["tokens"] * row["experts"]):
        peers = {peer: row[peer] for peer in EXPERTS if row.get(peer)}
        if len(peers) > 1:
            yield Case(f"{TITLES.get(row['op'], row['op'])}, experts", row["tokens"], row["us"], peers)


def decode_step(result: Mapping[str, Any]) -> Iterator[Case]:
    """A decode step of a whole model; sizes are sequences. Peers of another run than ours are left out."""
    for row in result["rows"]:
        if row["ms"] and row["new"] == 1 and row.get("head", "f16") == "f16" and row["k_format"] == "int4":
            peers = row["peers"] if row.get("commit") == row.get("peers_commit") else {}
            yield Case(f"8B decode step, {row['weights']}, int4 cache", row["batch"], row["ms"], peers)


def engine(result: Mapping[str, Any]) -> Iterator[Case]:
    """An output token inside vLLM on our kernels, and on vLLM's own in the same run; sizes are requests."""
    place = lambda row: (row["shape"], row["weights"], row["kv"], row["batch"], row.get("commit"))
    for ours in (row for row in result["rows"] if row["kernel"] == "terrazzo"):
        same = [row for row in result["rows"] if row["kernel"] != "terrazzo" and place(row) == place(ours)]
        cache = "" if ours["kv"] == "auto" else f", {ours['kv']} cache"
        title = f"vLLM {result['vllm']}, {ours['shape']}, {ours['weights']}{cache}"
        yield Case(title, ours["batch"], ours["step_ms"], {row["kernel"]: row["step_ms"] for row in same})


KINDS: dict[str, Callable[[Mapping[str, Any]], Iterator[Case]]] = {
    **{f"{op}_*.json": products for op in ("w4a16", "w4a8", "w4afp8", "w4ax", "w8a8", "weight_only", "mxfp4_fp8")},
    "grouped_h*.json": experts,
    "grouped_mxfp4_h*.json": experts,
    "attention_h*.json": attention,
    "attention_prefill_h*.json": attention,
    "decode_step_*.json": decode_step,
    "engine_*.json": engine,
}
"""Files in benchmarks/results, in the table's order -> what reads their cases."""
SKIPPED = ("w8a8_experts_h100.json", "w8a8_tiles_h100.json")
"""Files of single schedules, which are no choice of the library."""


def lines(files: Iterable[tuple[Path, Callable[[Mapping[str, Any]], Iterator[Case]]]]) -> list[tuple[str, ...]]:
    """Rows of the table: what, GPU, peers, and for each size the geometric mean and the worst shape.

    A case is compared with the fastest of its own peers, so that a row's peer may be another one at each shape.
    """
    found = []
    for path, read in files:
        result = json.loads(path.read_text(encoding="utf-8"))
        gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]
        outside = ", layers outside the tuned list" * ("_held_out_" in path.name) + " †" * (path.stem in report.LOST)
        by_title: dict[str, list[Case]] = {}
        for case in read(result):
            by_title.setdefault(case.title + outside, []).append(case)
        for title, cases in by_title.items():
            timed = [case for case in cases if case.peers]
            ratios = [[min(case.peers.values()) / case.ours for case in timed if case.size == size] for size in SIZES]
            if any(ratios):
                cells = (f"{report.geomean(of_size):.2f} ({min(of_size):.2f})" if of_size else "" for of_size in ratios)
                names = ", ".join(dict.fromkeys(NAMES.get(peer, peer) for case in cases for peer in case.peers))
                found.append((f"[{title}]({path.relative_to(path.parents[2]).as_posix()})", gpu, names, *cells))
    return found


def table(gpu: str = "") -> str:
    """The table of every file, or of one GPU's ("H100"), as README has it."""
    every = [(path, read) for name, read in KINDS.items() for path in sorted(report.RESULTS.glob(name))]
    found = [line for line in lines(file for file in every if file[0].name not in SKIPPED) if gpu in line[1]]
    if not found:
        return "No result file is in benchmarks/results yet; `make bench` writes one on a GPU."
    head = ("", "GPU", "compared with the fastest of", *(str(size) for size in SIZES))
    return report.markdown(head, found, range(3, len(head)))
