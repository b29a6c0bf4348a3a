"""README's one table of figures: how many times as fast as the fastest other kernel that ran in the same run.

Each shape is compared with the peer that is fastest at that shape and size. A cell has the geometric mean over shapes,
and in brackets the worst shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.linear import FORMATS, command

SIZES = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)
"""Columns: tokens of a product, sequences of attention, requests of an engine."""
NAMES = {
    "cublas_f16": "cuBLAS f16", "cublas_bf16": "cuBLAS bf16", "torch_fp8": "torch fp8", "torch_int8": "torch int8",
    "torch_fp8_rows": "torch fp8 by rows", "torch_fp8_blocks": "torch fp8 in blocks",
    "torch_fp8_blocks_fast": "torch fp8 in blocks", "vllm_scaled_int8": "CUTLASS int8",
    "vllm_scaled_e4m3": "CUTLASS fp8",
    "vllm_cutlass_blocks": "CUTLASS fp8 in blocks", "vllm_triton_blocks": "Triton fp8 in blocks",
    "sdpa_cudnn_f16": "cuDNN f16", "sdpa_flash_f16": "flash f16", "transformers_f16": "transformers f16",
    "transformers_compiled": "compiled transformers", "machete": "Machete", "marlin": "Marlin", "humming": "humming",
    "vllm_marlin": "Marlin", "vllm_machete": "Machete", "humming_w4a16": "humming", "vllm_cutlass": "CUTLASS W4A8",
    "vllm_marlin_int8": "Marlin int8", "humming_w4a8_int8": "humming int8",
    "humming_w4a8_int8_integers": "humming int8", "humming_w4a8_e4m3": "humming e4m3",
    "qserve_group": "QServe", "qserve_channel": "QServe by rows",
    "flash_attn3_f16": "FlashAttention-3 f16", "flash_attn3_f16_page128": "FlashAttention-3 f16",
    "torch_bf16": "torch bf16", "vllm_triton": "vLLM's Triton experts", "humming_grouped": "humming",
    "terrazzo_w4a8": "our W4A8",
    "flash_attn3_fp8": "FlashAttention-3 fp8", "flash_attn3_fp8_page128": "FlashAttention-3 fp8",
}  # fmt: skip
OWN = ("w4a16_symmetric_g32", "generic", "separate", "copy", "empty", "terrazzo_w4a8")
"""What stands among peers of a file and is ours, or no kernel of the same work."""
EXPERTS = ("torch_bf16", "vllm_triton", "vllm_marlin", "humming", "humming_grouped")
TITLES = {"w4a16": "W4A16", "w4a8": "W4A8", "w4a8_fp8": "W4A8 on e4m3", "w4ax": "W4Ax", "mxfp4": "MXFP4 weights",
          "mxfp4_fp8": "MXFP4 on e4m3"}  # fmt: skip
"""Operator -> what experts of it are called."""


@dataclass(frozen=True)
class Case:
    """One shape at one size: our time and the peers', in one unit, of one run."""

    title: str
    size: int
    ours: float
    peers: Mapping[str, float]


def products(result: Mapping[str, Any], title: str) -> Iterator[Case]:
    """Products of one weight, alone and, where a file has them, with quantizers of activations inside of the clock; and
    over our own W4A8, where that ran beside a format of more work."""
    for row in (row for row in result["rows"] if row["us"]):
        whole = row.get("variants", {}).get("with_quantizer")
        both = [(title, row["us"], row["peers"])]
        both += [(f"{title}, with its quantizer", whole, report.beside_quantizer(row))] if whole else []
        for name, us, found in both:
            peers = {_named(peer, row): each for peer, each in found.items() if peer not in OWN}
            yield Case(name, row["m"], us, peers)
            if "terrazzo_w4a8" in found:
                yield Case(f"{name}, over our W4A8", row["m"], us, {"terrazzo_w4a8": found["terrazzo_w4a8"]})


def _named(peer: str, row: Mapping[str, Any]) -> str:
    """torch.mm is in the row's dtype, whatever its name."""
    return "cublas_bf16" if peer == "cublas_f16" and row["dtype"] == "bfloat16" else peer


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
    "grouped_h*.json": experts,
    "grouped_mxfp4_h*.json": experts,
    "attention_h*.json": attention,
    "attention_prefill_h*.json": attention,
    "decode_step_*.json": decode_step,
    "engine_*.json": engine,
}
"""Files in benchmarks/results, after the linear layers' and in the table's order -> what reads their cases."""
Read = tuple[Path, Callable[[Mapping[str, Any]], Iterator[Case]]]


def every(whole: bool = True) -> list[Read]:
    """Every file that the table reads, with what reads it; not whole: without formats that README leaves out."""
    titled = {name: partial(products, title=it.title) for name, it in FORMATS.items() if whole or not it.aside}
    linear = [(path, read) for name, read in titled.items() for path in report.files(name)]
    return linear + [(path, read) for name, read in KINDS.items() for path in sorted(report.RESULTS.glob(name))]


def lines(files: Iterable[Read]) -> list[tuple[str, ...]]:
    """Rows of the table: what, GPU, peers, and for each size the geometric mean and the worst shape.

    A case is compared with the fastest of its own peers, so that a row's peer may be another one at each shape.
    """
    found = []
    for path, read in files:
        result = json.loads(path.read_text(encoding="utf-8"))
        gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]
        shapes = len({(row["n"], row["k"]) for row in result["rows"] if row.get("us") and "n" in row})
        few = {1: ", one shape", 2: ", two shapes"}.get(shapes, "") if isinstance(read, partial) else ""
        kind = "caches" if path.name.startswith("attention") else "layers"
        outside = few + f", {kind} outside the tuned list" * ("_held_out_" in path.name)
        outside += report.lost(result)
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
    """The table of every file, or README's, and the commands that measure its files again.

    README's has a row on one GPU ("H100"), and for products on another if that ran beside more peers.
    """
    files = every(whole=not gpu)
    named = lambda line: line[0].partition("](")[0].removesuffix(" †")
    found = lines(files)
    if gpu:
        best: dict[str, tuple[str, ...]] = {}
        products_of = lines(it for it in files if isinstance(it[1], partial))
        for line in products_of:
            other = best.setdefault(named(line), line)
            rank = lambda it: (it[2].count(","), gpu in it[1])
            best[named(line)] = max(line, other, key=rank)
        found = [*best.values(), *(line for line in found if gpu in line[1] and line not in products_of)]
    if not found:
        return "No result file is in benchmarks/results yet; `make bench` writes one on a GPU."
    head = ("", "GPU", "compared with the fastest of", *(str(size) for size in SIZES))
    others = dict.fromkeys(path.name.partition("_h")[0] for path, read in files if not isinstance(read, partial))
    others = dict.fromkeys(name.replace("grouped_", "grouped --op ") for name in others)
    said = f"Again: `{command('FILE', 'tuned')}` or `held-out`, FILE up to its GPU" + "".join(
        f"; `python -m benchmarks.{name}`" for name in others
    )
    return f"{report.markdown(head, found, range(3, len(head)))}\n\n{said}."
