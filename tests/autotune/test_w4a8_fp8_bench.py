"""The comparison run of W4A8 on e4m3, on the CPU with a stand-in for the clock."""

from __future__ import annotations

import pytest
import torch
from terrazzo.autotune import gemm_bench, linear_bench
from terrazzo.ops.w4a8 import QuantizedActivations, fp8, fp8_reference
from test_gemm_bench import Rival
from test_gemm_bench import on_the_cpu as clockless

from benchmarks.report import FIELDS, ROW_FIELDS

SHAPES = {(128, 256): ("model.qkv",), (64, 384): ("model.o", "other.o")}
on_the_cpu = clockless


@pytest.fixture
def operator(on_the_cpu):
    """gemm and the quantizer are the reference."""

    def quantize(x, out=None):
        return QuantizedActivations(*fp8_reference.quantize_activations(x), None, tuple(x.shape))

    def gemm(x, w, *, out=None, out_dtype=None):
        out_dtype = out_dtype or x.dtype
        x = x if isinstance(x, QuantizedActivations) else quantize(x)
        y = fp8_reference.gemm(x.q, x.scales, w).to(out_dtype)
        return y if out is None else out.copy_(y)

    on_the_cpu.setitem(vars(fp8), "gemm", gemm)
    on_the_cpu.setattr(fp8, "quantize_activations", quantize)
    return on_the_cpu


def bench(ms=(1, 40), peers=()):
    made = linear_bench.LinearSettings(record="w4a8_fp8", peers=peers)
    compiled = lambda requests: [None] * len(requests)
    return gemm_bench.bench(linear_bench.E4M3Shape, SHAPES, ms, made, compiled, commit="abc")


def test_a_run_has_every_field(operator):
    result = bench(peers=(Rival("rival"),))
    assert set(FIELDS) <= set(result) and all(set(ROW_FIELDS) <= set(row) for row in result["rows"])
    row = result["rows"][-1]
    assert (row["op"], row["m"], row["n"], row["k"], row["group"]) == ("w4a8_fp8", 40, 64, 384, 128)
    assert row["us"] == 10.0 and row["peers"] == {"cublas_f16": 10.0, "rival": 10.0} and "failure" not in row
    assert row["variants"] == {"with_quantizer": 10.0}
    assert row["bytes"] == 64 * 384 // 2 + 64 * 3 * 2 + 64 * 4  # codes, a factor for each group, channel scales
    assert row["schedule"].startswith("w4a8.stream_k ") and row["bound"] in ("load", "dequant", "mma")


def test_a_wrong_product_is_not_timed(operator):
    right = vars(fp8)["gemm"]

    def wrong(x, w, *, out=None, **options):
        y = right(x, w, out=out, **options)
        y[-1, 5] += y.abs().max()
        return y

    operator.setitem(vars(fp8), "gemm", wrong)
    assert all(row["us"] is None and "1 of" in row["failure"] for row in bench(ms=(3,))["rows"])


def test_the_dense_weight_is_the_weight():
    settings = linear_bench.LinearSettings(record="w4a8_fp8", group=64)
    weight = linear_bench.random_weight(70, 200, settings, torch.Generator().manual_seed(0))
    dense = linear_bench.dense_of(weight, torch.float16)
    assert (dense.double() - weight.dequantize()).abs().max() < 1e-3 * dense.abs().max()
