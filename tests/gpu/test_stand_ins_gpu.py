"""A kernel of every shape answers, is captured, and gives way to the one made for the shape, with the same bits."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering import Target, kernels, replacing
from terrazzo.ops import w4a16
from terrazzo.ops.weight_only import op

pytestmark = pytest.mark.gpu
M, N, K = 16, 8204, 4160


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """Nothing is compiled, in this process and its cache."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(replacing.VARIABLE)
    monkeypatch.setattr(kernels, "_kernels", {})
    op._launches.clear()
    yield
    replacing.wait(120)
    op._launches.clear()


def test_the_stand_in_gives_way_without_a_change_of_bits(cold):
    if Target.detect().arch != "sm_90a":
        pytest.skip("stand-ins are kernels of sm_90a")
    torch.manual_seed(0)
    weight = w4a16.quantize(torch.randn(N, K, device="cuda").half(), group_size=64)
    x, y = torch.randn(M, K, device="cuda").half(), torch.full((M, N), float("nan"), device="cuda").half()
    at = Target.detect()
    facts = dict(group_size=64, symmetric=False, scale_dtype="float16", dtype="float16", bias=False, numerics="auto")
    plan = op.plan(M, N, K, **facts, target=at, device=at)
    assert plan.stand_in is not None
    first = w4a16.gemm(x, weight)
    assert kernels.loaded(plan.stand_in) is not None and kernels.loaded(plan.request) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w4a16.gemm(x, weight, out=y)
    assert replacing.wait(120)
    assert torch.equal(w4a16.gemm(x, weight), first) and kernels.loaded(plan.request) is not None
    graph.replay()
    assert torch.equal(y, first)
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        w4a16.gemm(x, weight, out=y.fill_(float("nan")))
    again.replay()
    assert torch.equal(y, first) and torch.equal(w4a16.gemm(x, weight), first)
    exact = x.double() @ weight.dequantize().double().T
    assert float((first.double() - exact).abs().max()) < 2e-3 * float(exact.abs().max())
