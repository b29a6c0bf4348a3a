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


def test_the_page_sets_kernels_beside_simulations_of_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = dict(error=0.001, v_format="int4", weights="f16")
    rows = [
        row | dict(k_format="int4_hadamard", path="simulated", ratio=1.2),
        row | dict(k_format="int4_hadamard", path="kernels", ratio=1.1),
        row | dict(k_format="int4_channel64", path="simulated", ratio=1.4),
        row | dict(k_format="int4_channel64", path="kernels", ratio=1.3),
        row | dict(k_format="int8", path="simulated", ratio=1.01),
        row | dict(k_format="int4", path="kernels", failure="no memory"),
    ]
    (tmp_path / "kv_formats_accuracy_h100.json").write_text(json.dumps(dict(model="small", rows=rows)))
    lines = kv_choice.agreement().splitlines()
    assert lines[0] == "| keys / values | small: kernels | small: simulated |"
    assert lines[2:] == [
        "| `int4_channel64 / int4`, block 64 | 1.3000 ± 0.0010 | 1.4000 ± 0.0010 |",
        "| `int4_hadamard / int4`, ring 128 | 1.1000 ± 0.0010 | 1.2000 ± 0.0010 |",
    ]


def test_the_page_says_what_appends_add_by_step_and_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = dict(op="attention_append", k_format="int4", v_format="int4", kv_heads=8, kind="plain")
    rows = [
        row | dict(batch=8, kv_len=32768, us=101.0, decode_us=100.0, added=0.01),
        row | dict(batch=64, kv_len=4096, us=110.0, decode_us=100.0, added=0.1),
        row | dict(batch=64, kv_len=4096, kind="full", failure="words differ"),
        dict(op="attention_store", us=1.0),
    ]
    result = dict(gpu="NVIDIA H100", commit="0123456789", copy_gb_s=3020.6, rows=rows)
    (tmp_path / "kv_formats_write_h100.json").write_text(json.dumps(result))
    lines = kv_choice.appends().splitlines()
    assert lines[0] == "One NVIDIA H100, commit 0123456, copies 3021 GB/s."
    assert lines[2] == "| keys / values | step | 8 x 8 x 32K | 64 x 8 x 4K |"
    assert lines[4:] == ["| `int4 / int4` | nothing is packed | 1.0 us, 1.0 % | 10.0 us, 10.0 % |"]
