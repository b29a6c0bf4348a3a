"""The benchmark of tensor parallelism on a CPU: small layers by two threads, and kernels are named for both sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from terrazzo.autotune import gemm_bench
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention.cache import launch

from benchmarks import decode_step, tables, tensor_parallel
from benchmarks.tensor_parallel import Layers, arguments

sys.path.append(str(Path(__file__).parent / "nn"))
from ranks_in_threads import together

sys.path.pop()


@pytest.fixture
def small(monkeypatch):
    """Tiny layers on the CPU."""
    for name, value in dict(HIDDEN=128, INTERMEDIATE=256, HEADS=4, KV_HEADS=2, HEAD_DIM=64).items():
        monkeypatch.setattr(tensor_parallel, name, value)
    for module in (decode_step, tensor_parallel, gemm_bench):
        monkeypatch.setattr(module, "DEVICE", "cpu")


@torch.no_grad()
def test_shares_of_two_ranks_make_the_step_of_one_gpu(small):
    o = arguments(["--context", "140", "--layers", "2", "--weights", "w4a16-g32"])
    torch.manual_seed(0)
    whole = {name: decode_step._random("w4a16-g32", n, k) for name, (n, k) in tensor_parallel.shapes().items()}
    one = Layers(whole, 2)
    wanted = one.step(3, o)()
    assert len(one.products(3)()) == 8

    def run(ranks):
        mine = Layers(whole, 2, ranks)
        assert len(mine.reduces(3)()) == 4 and mine.kv_heads == 1
        assert tensor_parallel.wrong(whole, mine) == ""
        return mine.products(3)()

    first, second = together(2, run)
    products = [each.shape[-1] for each in first[:4]]
    assert products == [n for n, _ in tensor_parallel.shapes(2).values()]
    assert wanted.shape == (3, 128) and bool(wanted.isfinite().all()) and len(second) == 8


def test_kernels_of_whole_layers_and_of_shares_are_named(monkeypatch):
    target = Target.parse("nvidia/nvidia-h100")
    monkeypatch.setattr(launch, "detect", lambda *_: target)
    named = []
    monkeypatch.setattr("terrazzo.lowering.parallel.compile_many", lambda wanted: named.extend(wanted) or [])
    tensor_parallel.compile_all(arguments([]))
    sizes = {(dict(it.params)["n"], dict(it.params)["k"]) for it in named if it.name == "w4a16.small_batch"}
    assert sizes == {*tensor_parallel.shapes().values(), *tensor_parallel.shapes(2).values()}


def test_the_table_has_the_ratio_of_each_row():
    row = {"weights": "w4a16-g128", "batch": 1, "world": 2, "layers": 8, "products_one_80_ms": 10.0,
           "products_80_ms": 6.0, "all_reduce_80_ms": 2.0, "step_one_80_ms": 13.0, "step_80_ms": 9.1}  # fmt: skip
    facts = {"gpu": "NVIDIA H100", "torch": "2.11", "date": "today", "commit": "abc", "gpus": 2}
    text = tables.tensor_parallel({**facts, "rows": [row, {"failure": "x", "layers": 8}]}, "results.json")
    assert "| `w4a16-g128` | 1 | 2 | 10.00 -> 6.00 (0.60) | 2.00 | 13.00 -> 9.10 (0.70) |" in text
    assert "on 2 of NVIDIA H100" in text
