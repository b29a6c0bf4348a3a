"""The benchmark of stored tokens without a GPU: kernels are their references, a timing answers 10 us a call."""

from __future__ import annotations

import json

import pytest
import torch
from terrazzo.autotune import gemm_bench, measure
from terrazzo.autotune.attention_bench import Shape
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import entry, pack_cache
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.decoding import reference

from benchmarks import attention_write, report

FACTS = {"batch", "q_heads", "kv_heads", "kv_len", "k_format", "v_format", "head_dim", "page", "us", "spread"}


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, list[int]]]:
    """(what ran, lengths) of every call of an operator; a store of int8 is wrong in one word."""
    seen: list[tuple[str, list[int]]] = []

    def store(cache, k, v, starts, most):
        assert starts.tolist() == [0, len(k)] and most == len(k)
        parts = (x[None].transpose(1, 2) for x in (k, v))
        cache.pages.copy_(pack_cache(*parts, cache.layout.k_format, cache.layout.v_format, page_size=128).pages)
        cache.pages[0, 0, 0] += cache.layout.k_format == "int8"

    def append(cache, k, v):
        assert k.shape == v.shape == (len(cache.lengths), 1, cache.kv_heads, 128)
        seen.append(("append", cache.lengths.tolist()))

    def decode(q, cache, *, out):
        seen.append(("decode", cache.lengths.tolist()))
        return out.copy_(reference.decode(q, cache, bounded=False)[0])

    def time_calls(calls, budget_ms):
        for call in calls[:2]:
            call()
        return measure.Timing(10.0, 0.01, len(calls), 5)

    def time_in_turn(candidates, budget_ms):
        return {
            name: measure.Timing(10.0 + 2 * i, time_calls(calls, 0).spread, len(calls), 5)
            for i, (name, calls) in enumerate(candidates.items())
        }

    for holder, name, value in (
        (gemm_bench, "DEVICE", "cpu"), (launch, "detect", lambda *args: Target.parse("nvidia/nvidia-h200")),
        (measure, "copy_bandwidth", lambda: 4000.0), (measure, "time_calls", time_calls),
        (measure, "time_in_turn", time_in_turn), (entry, "store", store), (entry, "append", append),
        (entry, "decode", decode), (torch.cuda, "empty_cache", lambda: None),
        (attention_write, "STORED", Shape(1, 2, 1, 256)),
    ):  # fmt: skip
        monkeypatch.setattr(holder, name, value)
    return seen


def test_rows_of_stores_and_steps(steps, tmp_path, capsys):
    out = tmp_path / "made" / "write.json"
    given = ["--formats", "int4/int4,int4_channel32/int4", "--shapes", "2x2/1x256", "--out", str(out), "--commit", "c0"]
    assert attention_write.main(given) == 0
    result = json.loads(out.read_text())
    assert result["commit"] == "c0" and result["copy_gb_s"] == 4000.0 and not set(report.FIELDS) - set(result)
    rows = result["rows"]
    assert [row.get("kind", row["op"]) for row in rows] == 2 * ["attention_store", "plain", "full", "mean"]
    assert all(FACTS <= set(row) for row in rows)
    moved = 2 * 256 * 128 * 2 + 256 * (128 + 8)
    assert rows[0]["bytes"] == moved and rows[0]["of_copy_time"] == pytest.approx(1e-5 * 4e12 / moved, rel=1e-3)
    assert rows[1] | {"us": 12.0, "decode_us": 10.0, "added": 0.2, "steps": 1} == rows[1]
    assert [row["steps"] for row in rows if "steps" in row] == [1, 1, 16, 1, 1, 32]
    assert {lengths[0] for _, lengths in steps} == {
        225,
        226,
        241,
        242,
        255,
        256,
    }  # the first two of each mean, and ends
    assert [what for what, _ in steps[:2]] == ["append", "decode"]
    assert capsys.readouterr().out.count("+20.0%") == 6


def test_a_wrong_store_and_a_wrong_step_are_failures(steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(entry, "decode", lambda q, cache, out: out.fill_(1.0))
    given = ["--formats", "int8/int8", "--shapes", "1x2/1x256", "--kinds", "plain", "--out", str(tmp_path / "x.json")]
    assert attention_write.main(given) == 1
    store, step = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert store["failure"] == "1 words differ" and store["us"] is None
    assert step["failure"] and step["us"] is None
    assert capsys.readouterr().out.count("FAILED") == 2


def test_arguments():
    o = attention_write.arguments([])
    assert o.formats == [tuple(f.split("/")) for f in attention_write.FORMATS] and all(len(f) == 2 for f in o.formats)
    assert [str(shape) for shape in o.shapes] == list(attention_write.SHAPES)
    assert len(attention_write.planned(o, 4000.0)) == len(o.formats) * (1 + len(o.shapes) * len(o.kinds))
    for bad in (["--formats", "int4"], ["--kinds", "fast"]):
        with pytest.raises(SystemExit):
            attention_write.arguments(bad)
