"""MXFP8 activations on MXFP4 weights on the GPU: exact products, the error bound, the quantizer bit for bit, experts.

exact     one-hot or small integer activations, scales that are powers of two near 1: every sum is a float32
random    16-bit activations through the whole operator, inside the bound; together within 1 % of the float64 product

About 40 kernels, three minutes on eight cores; half a minute once they are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracles import TARGET, run_all
from terrazzo.lowering.targets import Target
from terrazzo.ops import mxfp4_mxfp8, w4a8
from terrazzo.ops.w4a8 import fp8_reference, mxfp8
from w4a8_fp8_oracles import DEVICE, Case, Spec, canonical, check, packed

pytestmark = [
    pytest.mark.usefixtures("nothing_compiles"),
    pytest.mark.skipif(bool(TARGET), reason="sm_80 has no e4m3"),
]
SPECS = tuple(
    Spec(n, k, 32, bias, mxfp4=True, groups=True)
    for n, k, bias in ((256, 512, False), (257, 200, True), (1, 16, True), (4096, 4096, False))
)
MS = (0, 1, 7, 16, 17, 33, 48, 64, 90, 128, 200, 300, 1000)


@pytest.mark.parametrize("kind", ["one-hot", "integer", "random"])
@pytest.mark.parametrize(
    "cases", [tuple(Case(spec, m) for m in MS) for spec in SPECS], ids=lambda it: str(it[0].spec.k)
)
def test_oracle(cases, kind):
    run_all(check, [Case(case.spec, case.m, kind, seed=i) for i, case in enumerate(cases)])


@pytest.mark.parametrize("cases", [(Case(SPECS[3], 16), Case(SPECS[3], 64), Case(SPECS[3], 200))], ids=["n4096"])
def test_two_hundred_launches_give_the_same_bits(cases):
    """A stage given back too early shows as bits that change now and then."""
    for case in cases:
        x = mxfp4_mxfp8.quantize_activations(torch.randn(case.m, 4096, device=DEVICE).to(getattr(torch, case.out)))
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

    def requests(self) -> list:
        facts = dict(dtype=self.dtype, gain=False, norm=False, target=Target.detect(), codes="mxfp8")
        return [mxfp8.quantizer(self.m, self.k, **facts)]


@pytest.mark.parametrize(
    "cases", [(Rows(1, 203, "float16"), Rows(130, 4096, "bfloat16"), Rows(600, 14336, "float16"))], ids=["rows"]
)
def test_activations_are_the_references(cases):
    for case in cases:
        rng = torch.Generator().manual_seed(case.m + case.k)
        x = torch.randn(case.m, case.k, generator=rng)
        x[:, :: max(2, case.k // 5)] *= 30
        x[case.m // 2] = 0
        x[0, 1], x[-1, 40], x[-1, 80] = 511.0, float("nan"), float("inf")
        x = x.to(getattr(torch, case.dtype)).to(DEVICE)
        wanted = mxfp8.reference(x)
        for _ in range(2):
            out = mxfp8.empty(tuple(x.shape), x.device)
            out.q.view(torch.int8).fill_(99)
            out.scales.fill_(-77)
            made = mxfp4_mxfp8.quantize_activations(x, out=out)
            assert made is out and torch.equal(made.exponents(), wanted.exponents()), case
            torch.testing.assert_close(made.q.float(), wanted.q.float(), rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Experts:
    """One grouped call: tokens of each expert, rows of nobody in front and behind."""

    counts: tuple[int, ...]
    n: int = 320
    k: int = 640

    @property
    def m(self) -> int:
        return sum(self.counts) + 5

    def requests(self) -> list:
        return mxfp4_mxfp8.grouped_requests(
            self.n, self.k, len(self.counts), m=self.m, bias=True, target=Target.detect()
        )


@pytest.mark.parametrize(
    "cases", [(Experts((7, 0, 33, 1)), Experts((130, 0, 20)), Experts((300, 210)))], ids=["experts"]
)
def test_experts(cases):
    """Inside of the bound of each; rows of nobody stay as they were; two runs give the same bits."""
    for case in cases:
        rng, e = torch.Generator().manual_seed(case.m), len(case.counts)
        specs = [Spec(case.n, case.k, 32, True, mxfp4=True, groups=True)] * e
        weights = [canonical(spec, True) for spec in specs]
        w = mxfp4_mxfp8.GroupedWeight.stack([one.pack().to(DEVICE) for one in weights])
        x = mxfp8.reference(torch.randn(case.m, case.k, generator=rng).to(DEVICE))
        offsets = (torch.tensor([0, *case.counts]).cumsum(0) + 3).int().to(DEVICE)
        runs = []
        for _ in range(2):
            y = torch.full((case.m, case.n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
            mxfp4_mxfp8.grouped_gemm(x, w, offsets, out=y, out_dtype=torch.bfloat16)
            assert y[:3].isnan().all() and y[-2:].isnan().all(), case
            runs.append(y[3:-2])
        assert torch.equal(*(it.view(torch.int16) for it in runs)), case
        q, scales = x.q[3:-2, : case.k], x.token_scales()[3:-2]
        for one, lo, hi in zip(weights, offsets[:-1].tolist(), offsets[1:].tolist()):
            own = slice(lo - 3, hi - 3)
            ref = fp8_reference.gemm(q[own], scales[own], one)
            bound = fp8_reference.forward_error_bound(q[own], scales[own], one, torch.bfloat16)
            assert bool(((runs[0][own].double() - ref).abs() <= bound).all()), case


@pytest.mark.parametrize("cases", [(Case(SPECS[1], 16),)], ids=["spec"])
def test_torch_compile_and_graphs(cases):
    weight = packed(SPECS[1], True)
    x = torch.randn(2, 8, 200, device=DEVICE).bfloat16()
    calls = (
        lambda x: w4a8.gemm(x, weight),
        lambda x: w4a8.gemm(mxfp4_mxfp8.quantize_activations(x), weight, out_dtype=torch.bfloat16),
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
