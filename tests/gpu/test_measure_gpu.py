"""Measuring on the device: graphs, rotation, bandwidth, the comparison run, the demo."""

from __future__ import annotations

import pytest
import torch
from terrazzo.autotune import measure
from terrazzo.lowering.targets import Target
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import of_codes


def test_a_graph_of_calls_takes_as_long_as_the_calls():
    x, copies = torch.randn(4096, 4096, device="cuda", dtype=torch.float16), 4
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.float16) for _ in range(copies)]
    timing = measure.time_calls([lambda w=w: x @ w for w in weights])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for index in range(40):
        x @ weights[index % copies]
    end.record()
    end.synchronize()
    plain = 1e3 * start.elapsed_time(end) / 40
    assert timing.calls % copies == 0 and timing.replays >= measure.MIN_REPLAYS
    assert timing.us == pytest.approx(plain, rel=0.5) and timing.spread < 0.5


def test_every_copy_is_called_in_turn():
    counters = torch.zeros(3, device="cuda")
    timing = measure.time_calls([lambda i=i: counters[i].add_(1) for i in range(3)], budget_ms=1.0)
    counts = counters.tolist()
    assert counts[0] == counts[1] == counts[2] > timing.replays


def test_copy_bandwidth_is_below_the_datasheet():
    share = measure.copy_bandwidth() / Target.detect().dram_gb_s
    assert 0.7 < share < 1.05


def test_call_overhead_leaves_the_kernel_out():
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    torch.mm(x, x)
    assert measure.call_overhead_us(lambda: torch.mm(x, x), calls=20, rounds=2) < 500  # the product takes 1500 us


@pytest.mark.parametrize("weight", WIDE)
def test_the_comparison_runs(weight):
    from terrazzo.autotune.gemm_bench import bench
    from terrazzo.autotune.linear_bench import LinearSettings, LinearShape

    settings = LinearSettings(budget_ms=2.0, record=of_codes(weight).record, group=WIDE[weight].groups[-1])
    result = bench(LinearShape, {(1024, 1024): ("a",)}, (1, 64), settings)
    assert result["gpu"] == torch.cuda.get_device_name() and result["copy_gb_s"] > 0
    for row in result["rows"]:
        assert row["us"] and row["peers"]["cublas_f16"], row
    assert 0 < result["call_overhead_us"]["terrazzo"] < 100
