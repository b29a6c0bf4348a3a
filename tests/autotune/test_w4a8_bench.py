"""The W4A8 comparison run, on the CPU with a stand-in for the clock: what is checked, timed and recorded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from terrazzo.autotune import gemm_bench, linear_bench
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import QuantizedActivations, reference
from test_gemm_bench import Rival
from test_gemm_bench import on_the_cpu as clockless

from benchmarks.peers import bytes as byte_peers
from benchmarks.report import FIELDS, ROW_FIELDS

SHAPES = {(128, 256): ("model.qkv",), (64, 384): ("model.o", "other.o")}
on_the_cpu = clockless
SETTINGS = partial(linear_bench.LinearSettings, record="w4a8", group=64)


@pytest.fixture
def operator(on_the_cpu):
    """gemm and the quantizer are the reference."""

    def quantize(x, smooth=None, rms_weight=None, out=None):
        q, scales, sums = reference.quantize_activations(x, smooth, rms_weight, 1e-6)
        return QuantizedActivations(q, scales, sums, tuple(x.shape))

    def gemm(x, w, *, out=None, out_dtype=None, dequantization="auto", pipeline="auto"):
        out_dtype = out_dtype or x.dtype
        x = x if isinstance(x, QuantizedActivations) else quantize(x)
        y = reference.gemm(x.q, x.scales, w).to(out_dtype)
        return y if out is None else out.copy_(y)

    on_the_cpu.setitem(vars(w4a8), "gemm", gemm)
    on_the_cpu.setitem(vars(w4a8), "quantize_activations", quantize)
    return on_the_cpu


def bench(ms=(1, 40), peers=(), **settings):
    made = SETTINGS(peers=peers, **settings)
    compiled = lambda requests: [None] * len(requests)
    return gemm_bench.bench(linear_bench.ByteShape, SHAPES, ms, made, compiled, commit="abc")


def test_a_run_has_every_field(operator):
    result = bench()
    assert set(FIELDS) <= set(result) and all(set(ROW_FIELDS) <= set(row) for row in result["rows"])
    row = result["rows"][-1]
    assert (row["op"], row["m"], row["n"], row["k"], row["group"]) == ("w4a8", 40, 64, 384, 64)
    assert row["us"] == 10.0 and row["peers"] == {"cublas_f16": 10.0} and "failure" not in row
    assert row["variants"] == {"with_quantizer": 10.0}
    assert row["bytes"] == 64 * 384 // 2 + 64 * 6 * 2 + 64 * 4  # codes, (scale, offset) for each group, channel scales
    assert row["schedule"].startswith("w4a8.stream_k ") and row["bound"] in ("load", "dequant", "mma")
    assert result["rows"][0]["schedule"].startswith("w4a8.small_batch ")
    assert set(result["call_overhead_us"]) == {"terrazzo", "torch_mm", "terrazzo_allocating"}


def test_wrong_outputs_have_no_time(operator):
    right = vars(w4a8)["gemm"]

    def wrong(x, w, *, out=None, **options):
        y = right(x, w, out=out, **options)
        y[-1, 5] += y.abs().max()
        return y

    def wrong_from_16_bits(x, w, **options):
        return (right if isinstance(x, QuantizedActivations) else wrong)(x, w, **options)

    operator.setitem(vars(w4a8), "gemm", wrong_from_16_bits)
    for row in bench(ms=(3,))["rows"]:
        assert row["us"] == 10.0 and "variants" not in row
        assert "1 of" in row["peers_failed"]["with_quantizer"]
    operator.setitem(vars(w4a8), "gemm", wrong)
    assert all(row["us"] is None and "1 of" in row["failure"] for row in bench(ms=(3,))["rows"])


class Prepared(Rival):
    """A peer that quantizes for itself and judges itself."""

    def prepare(self, x, loaded):
        return x * 2

    def wrong(self, y, x, loaded):
        return "" if torch.allclose(y.float(), 2 * (x.float() @ loaded.float().T), rtol=1e-2, atol=1e-2) else "wrong"


def test_peers_prepare_and_judge_their_own_product(operator):
    for row in bench(ms=(3,), peers=(Prepared("rival_own"), Prepared("rival_off", factor=1.2)))["rows"]:
        assert row["peers"] == {"cublas_f16": 10.0, "rival_own": 10.0} and row["peers_failed"] == {"rival_off": "wrong"}


def test_the_8_bit_peers_judge_themselves():
    rng = torch.Generator().manual_seed(0)
    weight = linear_bench.random_weight(64, 128, SETTINGS(), rng)
    x, dense = torch.randn(5, 128, generator=rng).half(), linear_bench.dense_of(weight, torch.float16)
    int8 = byte_peers.TorchInt8()
    (loaded,) = int8.load(weight, dense, lambda nbytes: 1)
    sums = (int8.prepare(x, loaded).double() @ loaded.double().T).int()
    assert int8.wrong(sums, x, loaded) == "" and int8.wrong(sums + 1, x, loaded)
    for fp8 in (byte_peers.TorchFp8(), byte_peers.TorchFp8(rows=True)):
        (loaded,) = fp8.load(weight, dense, lambda nbytes: 1)
        codes, scales = fp8.prepare(x, loaded)
        assert scales.shape == ((5, 1) if fp8.rows else (1, 1))
        y = (codes.double() @ loaded.rows(torch.arange(64)).T * scales).half()
        assert fp8.wrong(y, x, loaded) == "" and fp8.wrong(y * 1.05, x, loaded)
        assert (loaded.rows(torch.arange(64)) - dense.double()).norm() < 0.04 * dense.double().norm()
    assert (dense.double() - weight.dequantize()).abs().max() < 2e-3 * dense.abs().max()
    assert all(peer.missing() for peer in (*byte_peers.FP8, int8)) or torch.cuda.is_available()
    assert gemm_bench.DEVICE == "cuda"
