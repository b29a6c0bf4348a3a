"""A kernel of every shape answers, is captured, and gives way to the one made for the shape, with the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from terrazzo.lowering import Target, kernels, replacing
from terrazzo.nn.formats import Format, module_of
from terrazzo.ops import launching, w4a16
from terrazzo.ops.call import plans
from terrazzo.ops.launching import Plan
from terrazzo.ops.weight_only import op
from terrazzo.ops.weight_only.entry import CALLS

M, N, K = 16, 8204, 4160
FORMS = ("w4a16-g128", "w4a16-g64", "w8a16-g128", "mxfp4-g32", "nvfp4-g16", "fp8-gK", "fp8-g128")
SIZES = ((1032, 1024), (1030, 2048))  # rows of whole 16 bytes, and others
TOKENS = (1, 3, 12, 64)


@dataclass(frozen=True)
class Case:
    """m tokens by a weight [n, k]."""

    form: str
    n: int
    k: int
    m: int

    def plan(self, target: Target) -> Plan:
        """What its call launches."""
        form = Format.parse(self.form)
        weight = form.product.codes
        scale = "float16" if weight.symmetric else weight.scales[0]
        facts = dict(group_size=form.group_size or self.k, symmetric=scale != "float16", scale_dtype=scale)
        product = op.Facts(self.n, self.k, **facts, dtype="float16", weight=weight.name)
        return plans.plan(self.m, product, target, target)

    def requests(self) -> list:
        plan = self.plan(Target.detect())
        return [plan.request, *filter(None, [plan.stand_in])]


CASES = {form: [Case(form, n, k, m) for n, k in SIZES for m in TOKENS] for form in FORMS}


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """Nothing is compiled, in this process and its cache."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(replacing.VARIABLE)
    monkeypatch.setattr(kernels, "_kernels", {})
    CALLS.launches.clear()
    yield
    replacing.wait(120)
    CALLS.launches.clear()


def test_the_stand_in_gives_way_without_a_change_of_bits(cold):
    if Target.detect().arch != "sm_90a":
        pytest.skip("stand-ins are kernels of sm_90a")
    torch.manual_seed(0)
    weight = w4a16.quantize(torch.randn(N, K, device="cuda").half(), group_size=64)
    x, y = torch.randn(M, K, device="cuda").half(), torch.full((M, N), float("nan"), device="cuda").half()
    at = Target.detect()
    facts = dict(group_size=64, symmetric=False, scale_dtype="float16", dtype="float16")
    plan = plans.plan(M, op.Facts(N, K, **facts), at, at)
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


@pytest.mark.parametrize("cases", CASES.values(), ids=FORMS)
def test_a_stand_in_has_the_bits_of_the_kernel_that_is_made_for_the_shape(cases, compiled, monkeypatch):
    at, compared = Target.detect(), 0
    if at.arch != "sm_90a":
        pytest.skip("stand-ins are kernels of sm_90a")
    for case in cases:
        plan = case.plan(at)
        if plan.stand_in is None:
            continue
        torch.manual_seed(0)
        form = Format.parse(case.form)
        weight = form.quantize(torch.randn(case.n, case.k, device="cuda"))
        gemm = module_of(form.product).gemm
        x = torch.randn(case.m, case.k, device="cuda").half()
        ys = []
        for answer in (plan.request, plan.stand_in):
            monkeypatch.setattr(launching, "answering", lambda plan, device, answer=answer: answer)
            CALLS.launches.clear()
            whole = torch.full((case.m + 16, case.n), float("nan"), dtype=torch.float16, device="cuda")
            gemm(x, weight, out=whole[8:-8])
            assert kernels.loaded(answer) is not None, f"{case}: {answer} was not launched"
            assert bool(whole[:8].isnan().all()) and bool(whole[-8:].isnan().all()), case
            ys.append(whole[8:-8])
        assert torch.equal(*ys) and bool(ys[0].isfinite().all()), case
        compared += 1
    CALLS.launches.clear()
    assert compared > len(cases) // 2
