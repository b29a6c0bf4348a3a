"""The table of KV formats: kernels before simulations, times of one run, nothing where nothing was measured."""

from __future__ import annotations

import json

from benchmarks import kv_choice, report


def test_pairs_come_from_result_files_by_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = dict(weights="f16", error=0.001, v_format="int4")
    rows = [
        row | dict(k_format="int4", path="kernels", ratio=1.1),
        row | dict(k_format="int4", path="simulated", ratio=1.2),
        row | dict(k_format="int8", path="simulated", ratio=1.01),
        row | dict(k_format="int8", path="kernels", failure="no memory"),
        row | dict(k_format="int8", path="kernels", ratio=9.0, weights="w4a8-g64"),
    ]
    (tmp_path / "accuracy_small_h100.json").write_text(json.dumps(dict(model="small", rows=rows)))
    only = [row | dict(k_format="float16", v_format="float16", path="kernels", ratio=1.0)]
    (tmp_path / "accuracy_weights_h100.json").write_text(json.dumps(dict(model="of weights alone", rows=only)))
    cache = dict(batch=1, q_heads=8, kv_heads=1, q_len=1, page=128, v_format="int4")
    times = [
        cache | dict(kv_len=n, k_format=k, us=us)
        for n, k, us in ((1, "int4", 10.0), (1, "int8", 20.0), (2, "int4", 10.0), (2, "int8", 80.0), (3, "int8", 1.0))
    ]
    times += [cache | dict(kv_len=1, k_format="int8", us=1.0, page=0)]
    (tmp_path / "attention_h200.json").write_text(json.dumps(dict(gpu="NVIDIA H200", rows=times)))
    found = kv_choice.pairs()
    assert list(found) == [("int8", "int4"), ("int4", "int4")]
    assert found["int8", "int4"].accuracy == {"small": (1.01, 0.001, "simulated")}
    assert found["int4", "int4"].accuracy == {"small": (1.1, 0.001, "kernels")}
    assert abs(found["int8", "int4"].time["H200"] - 4.0) < 1e-9
    lines = kv_choice.table().splitlines()
    assert lines[2].split("|")[1:5] == [" `int8 / int4` ", " 6.25 ", " 1.0100 ± 0.0010 (simulated) ", " 4.00 "]
    assert kv_choice.bits("int4", "int4") == 4.25 and kv_choice.bits("int4_hadamard", "int4", 64) == 4.5
