"""Times of others that benchmark results hold, beside tuned problems of the same size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terrazzo.autotune.benchmark_peers import is_result, peers_of
from terrazzo.autotune.database import Database, Problem
from terrazzo.cli import main
from terrazzo.lowering.errors import ArgumentError

ROOT = Path(__file__).parents[2]
LINEAR = Problem.of("w4a16", {"n": 4096, "k": 14336, "group": 128}, 64)
GROUPED = Problem.of("w4a8_grouped", {"n": 2048, "k": 768, "experts": 128, "group": 64}, 2048)
DECODE = Problem.of("attention", {"head_dim": 128, "rows": 4, "tokens": 4096, "k_format": "int4"}, 512)
OTHER = Problem.of("attention_prefill", {"head_dim": 128}, 1)
ROWS = [
    {"op": "w4a8", "n": 4096, "k": 14336, "m": 64, "peers": {"cublas_f16": 31.0, "torch_fp8": 20.0}},
    {"op": "w4a8", "n": 4096, "k": 14336, "m": 64, "peers": {"cublas_f16": 30.0}},
    {"op": "w4a8", "n": 4096, "k": 4096, "m": 64, "peers": {"cublas_f16": 10.0}},
    {"op": "w4a8", "n": 4096, "k": 14336, "m": 16, "peers": {}},
    {"op": "w4a8", "n": 2048, "k": 768, "m": 2048, "experts": 128, "torch_bf16": 171.5},
    {
        "op": "attention_decode", "batch": 64, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "q_len": 1,
        "kv_len": 4096, "peers": {"flash": 388.0, "cudnn": 238.5},
    },
]  # fmt: skip


def test_sizes_meet():
    found = list(peers_of({"gpu": "NVIDIA H200", "rows": ROWS}, [LINEAR, GROUPED, DECODE, OTHER], "x.json"))
    assert found == [(LINEAR, "cublas_f16", 30.0), (GROUPED, "torch_bf16", 171.5), (DECODE, "cudnn", 238.5)]


@pytest.mark.parametrize(
    "data",
    [
        {"rows": []},
        {"gpu": "x", "rows": [1]},
        {"gpu": "x", "rows": None},
        {"gpu": "x", "rows": [{"n": 1, "peers": {"cublas_f16": 1.0}}]},
        {"gpu": "x", "rows": [ROWS[0] | {"peers": {"cublas_f16": None}}]},
        {"gpu": "x", "rows": [ROWS[5] | {"kv_heads": 0}]},
    ],
)
def test_what_is_no_result_is_refused(data):
    with pytest.raises(ArgumentError, match="no benchmark's result"):
        list(peers_of(data, [LINEAR], "x.json"))


def test_import_of_a_result_adds_peers_once(tmp_path, capsys):
    database, table = tmp_path / "t.db", ROOT / "schedules/tuned/h200.json"
    results = [ROOT / f"benchmarks/results/{name}_h200.json" for name in ("w4a16", "grouped", "attention")]
    assert not is_result(json.loads(table.read_text()))
    for _ in range(2):
        assert main(["tune", "import", str(table), *map(str, results), "--database", str(database)]) == 0
    assert "attention_h200.json: times of others for 32 of" in capsys.readouterr().out
    with Database(database) as trials:
        peers = trials.peers("NVIDIA H200")
        rows = trials.link.execute("SELECT count(*) FROM peers").fetchone()[0]
    assert len(peers) == rows > 100
    assert {name for _, name in peers} >= {"cublas_f16", "torch_bf16"}
