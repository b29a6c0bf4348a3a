"""W4A8 on e4m3 on the GPU: exact products, the error bound at every element, the quantizer bit for bit, torch.

exact     one-hot or small integer activations, factors that are powers of two: every sum is a float32
random    16-bit activations through the whole operator, inside the bound; together within 1 % of the float64 product
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracles import TARGET, run_all
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import activations, fp8, fp8_reference
from w4a8_fp8_oracles import DEVICE, Case, Spec, check, packed

pytestmark = [
    pytest.mark.usefixtures("nothing_compiles"),
    pytest.mark.skipif(bool(TARGET), reason="sm_80 has no e4m3"),
]
SPECS = (
    Spec(256, 512),
    Spec(257, 203, 64, bias=True, smooth=True),
    Spec(101, 7392, 32),
    Spec(4096, 4096),
    Spec(14336, 7168, 64),
    Spec(1, 16, 32, bias=True),
)
MXFP4 = (
    Spec(256, 512, 32, mxfp4=True),
    Spec(257, 208, 32, bias=True, mxfp4=True),
    Spec(4096, 4096, 32, mxfp4=True),
)
MS = (0, 1, 7, 16, 17, 32, 33, 41, 64, 65, 90, 100, 128, 150, 181, 200, 256, 300, 330, 430, 1000)


@pytest.mark.parametrize("kind", ["one-hot", "integer", "random"])
@pytest.mark.parametrize(
    "cases", [pytest.param(tuple(Case(spec, m) for m in MS), id=f"n{spec.n}-k{spec.k}-g{spec.group}") for spec in SPECS]
)
def test_oracle(cases, kind):
    run_all(check, [Case(case.spec, case.m, kind, seed=i) for i, case in enumerate(cases)])


@pytest.mark.parametrize("kind", ["one-hot", "integer", "random"])
@pytest.mark.parametrize(
    "cases",
    [pytest.param(tuple(Case(s, m) for m in (1, 16, 33, 64, 200, 300, 1000)), id=f"n{s.n}-k{s.k}") for s in MXFP4],
)
def test_mxfp4(cases, kind):
    run_all(check, [Case(case.spec, case.m, kind, seed=i) for i, case in enumerate(cases)])


@pytest.mark.parametrize(
    "cases",
    [(Case(SPECS[3], 16), Case(SPECS[3], 200)), (Case(MXFP4[2], 16), Case(MXFP4[2], 200))],
    ids=["n4096", "mxfp4"],
)
def test_two_hundred_launches_give_the_same_bits(cases):
    """A stage given back too early shows as bits that change now and then."""
    for case in cases:
        x = fp8.quantize_activations(torch.randn(case.m, 4096, device=DEVICE).to(getattr(torch, case.out)))
        weight, dtype = packed(case.spec, True), getattr(torch, case.out)
        first = w4a8.gemm(x, weight, out_dtype=dtype)
        for _ in range(200):
            assert torch.equal(w4a8.gemm(x, weight, out_dtype=dtype), first), case


@dataclass(frozen=True)
class Rows:
    """One call of the quantizer."""

    m: int
    k: int
    dtype: str
    smooth: bool = False
    norm: bool = False

    def requests(self) -> list:
        facts = dict(dtype=self.dtype, gain=self.smooth or self.norm, norm=self.norm)
        return [activations.plan(self.m, self.k, **facts, target=_target(), codes="e4m3")]


def _target():
    from terrazzo.lowering.targets import Target

    return Target.detect()


ROWS = (
    Rows(1, 203, "float16"),
    Rows(130, 4096, "bfloat16", smooth=True),
    Rows(600, 4096, "bfloat16", smooth=True, norm=True),
    Rows(600, 14336, "float16"),
)


@pytest.mark.parametrize("cases", [ROWS], ids=["rows"])
def test_activations_are_the_references(cases):
    for case in cases:
        rng = torch.Generator().manual_seed(case.m + case.k)
        x = torch.randn(case.m, case.k, generator=rng)
        x[:, :: max(2, case.k // 5)] *= 30
        x[case.m // 2] = 0
        x = x.to(getattr(torch, case.dtype)).to(DEVICE)
        smooth = (torch.rand(case.k, generator=rng) + 0.2).to(DEVICE) if case.smooth else None
        norm = torch.randn(case.k, generator=rng).to(x.dtype).to(DEVICE) if case.norm else None
        q, scales = fp8_reference.quantize_activations(x, smooth, norm, 1e-5)
        for _ in range(2):
            out = activations.empty(tuple(x.shape), x.device, "e4m3")
            out.q.view(torch.int8).fill_(99)
            out.scales.fill_(float("nan"))
            made = fp8.quantize_activations(x, smooth=smooth, rms_weight=norm, eps=1e-5, out=out)
            assert made is out and torch.equal(made.q[:, : case.k].view(torch.int8), q.view(torch.int8)), case
            assert not made.q[:, case.k :].float().any(), case
            torch.testing.assert_close(made.scales, scales, rtol=2e-6 if case.norm else 0, atol=0)


@pytest.mark.parametrize("cases", [(Case(SPECS[1], 16),)], ids=["spec"])
def test_torch_compile_and_graphs(cases):
    weight = packed(SPECS[1], True)
    x = torch.randn(2, 8, 203, device=DEVICE).bfloat16()
    calls = (
        lambda x: w4a8.gemm(x, weight),
        lambda x: w4a8.gemm(fp8.quantize_activations(x, smooth=weight.smooth), weight, out_dtype=torch.bfloat16),
    )
    for call in calls:
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, fullgraph=True)(x), call(x))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = w4a8.gemm(x, weight)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        y.fill_(-77)
        graph.replay()
        assert torch.equal(y, w4a8.gemm(x, weight))
