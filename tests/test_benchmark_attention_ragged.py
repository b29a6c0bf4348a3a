"""The benchmark of ragged batches without a GPU: decode is its reference, a timing answers 10 us a call."""

from __future__ import annotations

import json

import pytest
import torch
from terrazzo.autotune import gemm_bench, measure
from terrazzo.lowering import parallel
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.decoding import reference

from benchmarks import attention_ragged, report


@pytest.fixture
def calls(monkeypatch) -> list[tuple[list[int], int]]:
    """(lengths, mean length) of every decode; that of int8 is wrong."""
    seen: list[tuple[list[int], int]] = []
    target = Target.parse("nvidia/nvidia-h200")

    def decode(q, cache, *, out):
        seen.append((cache.lengths.tolist(), cache.mean_length))
        out.copy_(reference.decode(q, cache, bounded=False)[0])
        return out.zero_() if cache.layout.k_format == "int8" else out

    def time_calls(candidates, budget_ms):
        candidates[0]()
        return measure.Timing(10.0, 0.01, len(candidates), 5)

    for holder, name, value in (
        (gemm_bench, "DEVICE", "cpu"), (attention_ragged, "DEVICE", "cpu"), (launch, "detect", lambda *args: target),
        (entry, "decode", decode), (parallel, "compile_many", lambda wanted: [None] * len(wanted)),
        (measure, "copy_bandwidth", lambda: 4000.0), (measure, "time_calls", time_calls),
        (torch.cuda, "empty_cache", lambda: None),
    ):  # fmt: skip
        monkeypatch.setattr(holder, name, value)
    return seen


def test_rows(calls, tmp_path, capsys):
    out = tmp_path / "made" / "ragged.json"
    given = ["--batches", "2x40+1x200,3:9-300", "--formats", "int4/int4,int8/int8", "--heads", "4/2", "--q-len", "1,2"]
    assert attention_ragged.main([*given, "--out", str(out), "--commit", "c0"]) == 1
    result = json.loads(out.read_text())
    assert result["commit"] == "c0" and not set(report.FIELDS) - set(result)
    rows = result["rows"]
    assert [(row["batch"], row["k_format"], row["q_len"]) for row in rows] == [
        (b, k, q) for b in ("2x40+1x200", "3:9-300") for k in ("int4", "int8") for q in (1, 2)
    ]
    first = rows[0]
    assert first["us"] == first["even"] == 10.0 and first["mean"] == 93 and first["longest"] == 200
    assert first["bytes"] == 2 * 4 * 128 * (128 + 8) and first["balanced"] is False  # pages of 128 tokens, 2 heads
    assert first["copy_share"] == pytest.approx(first["bytes"] / 10.0 / 4e6, abs=1e-4)
    assert {row["k_format"] for row in rows if row.get("failure")} == {"int8"}
    assert sorted(calls[0][0]) == [40, 40, 200] and {mean for _, mean in calls} >= {0, 94}
    said = capsys.readouterr().out
    assert said.count("FAILED") == 4 and said.count("10.00 us") == 4 and "peer torch_varlen_f16" in said


def test_batches():
    for batch in attention_ragged.BATCHES:
        lengths = attention_ragged.lengths_of(batch)
        assert lengths == attention_ragged.lengths_of(batch) and len(lengths) > 1
    even = attention_ragged.lengths_of("64:256-8192")
    assert len(even) == 64 and min(even) >= 256 and max(even) <= 8192 and len(set(even)) > 50
    assert sorted(attention_ragged.lengths_of("3x5+1x7")) == [5, 5, 5, 7]
    assert max(attention_ragged.lengths_of("500~10")) <= 100
    for bad in ("", "64", "64:9-2", "0x5", "3x0", "3x5+", "8~0", "x"):
        with pytest.raises(ArgumentError, match="batch = "):
            attention_ragged.lengths_of(bad)
