"""docs/papers.md: what four papers claim, and our number on the same kind of work. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import report

HEAD = ("paper, figure", "its claim", "ours, on the same kind of work", "what differs")


def rows_of(name: str, ours: Callable[[dict[str, Any]], bool] = lambda row: True) -> list[dict[str, Any]]:
    """Timed rows of a result file that pass."""
    result = json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return [row for row in result["rows"] if row.get("us") and ours(row)]


def spread(ratios: Iterable[float], name: str) -> str:
    """Geometric mean, least and most of ratios, and the file that they are of."""
    found = list(ratios)
    said = f"{report.geomean(found):.2f} ({min(found):.2f} to {max(found):.2f})"
    mark = report.lost(json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8")))
    return f"{said}{mark}, [file](benchmarks/results/{name}.json)"


def over(name: str, peer: str, ms: Iterable[int], variant: str = "") -> str:
    """A peer's time over ours, for products of some numbers of tokens."""
    timed = rows_of(name, lambda row: row["m"] in ms and peer in row["peers"])
    return spread((row["peers"][peer] / (row["variants"][variant] if variant else row["us"]) for row in timed), name)


def measured(name: str, peer: str, ms: Iterable[int]) -> str:
    """`over`, or that it was not measured, where no row has the peer."""
    ms = tuple(ms)
    has = any(row["m"] in ms and peer in row["peers"] for row in rows_of(name))
    return over(name, peer, ms) if has else NOT


def decode(peer: str, form: str) -> str:
    timed = rows_of("attention_h100", lambda row: row["q_len"] == 1 and row["page"] == 128 and row["k_format"] == form)
    return spread((row["peers"][peer] / row["us"] for row in timed), "attention_h100")


NOT = "not measured"


def claims() -> list[tuple[str, str, str, str]]:
    """A row for each headline figure."""
    layers = "H100 here, Llama-3-8B's four layers"
    return [
        ("TurboMind, fig. 13", "W4A16 over cuBLAS f16, 1 to 16 tokens: 2.34, at most 3.20",
         over("w4a16_h100", "cublas_f16", (1, 16)), f"A100 there; {layers}"),
        ("TurboMind, GEMM", "W4A16 over Marlin: 1.19, at most 1.26", over("w4a16_h100", "vllm_marlin", (1, 16, 64)),
         f"its GPU is not named; {layers}; 1, 16 and 64 tokens"),
        ("TurboMind, tab. 2", "16384^3: 0.976 of cuBLAS f16", NOT, "4096 tokens of Llama's layers are in README"),
        ("TurboMind, fig. 15, 28", "up to 61 % lower latency end to end", NOT, "vLLM's steps: results-models.md"),
        ("BitDecoding, fig. 12", "4-bit decode over FlashDecoding-v2 in f16: at most 8.9 on an H100",
         decode("sdpa_flash_f16", "int4"), "one query token (its 8.9 has four); torch's flash attention"),
        ("BitDecoding", "the same", decode("flash_attn3_f16", "int4"), "FlashAttention-3 as the peer"),
        ("BitDecoding, fig. 13", "end to end at 128K: 3.3", NOT, ""),
        ("LiquidGEMM, fig. 12", "W4A8 over QServe at 256 tokens: 2.75 to 2.90",
         measured("w4a8_h200", "qserve_group", (256,)), "QServe's own kernel of sglang-kernel 0.4.5; H200 here"),
        ("LiquidGEMM, fig. 12", "the same", measured("w4a8_h200", "qserve_channel", (256,)),
         "QServe's kernel of one scale for each channel, as the peer"),
        ("LiquidGEMM, fig. 12", "W4A8 over TRT-LLM's kernels: 1.12 to 1.63", over("w4a8_h100", "torch_fp8", (64, 256)),
         f"torch's fp8 product as the peer; {layers}; 64 and 256 tokens"),
        ("LiquidGEMM, tab. 1", "16,694 tokens/s, Llama-3-8B, H800", NOT, ""),
        ("COMET, fig. 9", "W4Ax over cuBLAS f16, 16 to 256 tokens: 2.88",
         over("w4ax_h200", "cublas_f16", (16, 64, 256)),
         "A100 there, with int4 tensor cores; H200 here, which has none"),
        ("COMET, fig. 9", "the same, quantizer included: not stated",
         over("w4ax_h200", "cublas_f16", (16, 64, 256), "with_quantizer"), "H200"),
        ("COMET, fig. 10", "2.02 over TRT-LLM's W4A16 end to end", NOT, "W4Ax is not served in an engine yet"),
    ]  # fmt: skip


def table() -> str:
    """The table of docs/papers.md."""
    return report.markdown(HEAD, claims())
