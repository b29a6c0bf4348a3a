"""W8A8 on the GPU: exact products, the error bound at every element, the quantizers bit for bit, torch."""

from __future__ import annotations

import pytest
import torch
from oracles import TARGET, run_all
from terrazzo.ops import w8a8
from terrazzo.ops.w4a8.w8a8 import activations
from w8a8_oracles import DEVICE, Case, Grouped, Spec, check, check_grouped, packed
from w8a8_oracles import FORMS as ALL_FORMS

pytestmark = pytest.mark.usefixtures("nothing_compiles")
INTEGERS = TARGET in ("sm_80", "sm_86")  # which have no e4m3
FORMS = tuple(form for form in ALL_FORMS if not INTEGERS or form.startswith("int8"))
EVERY = (
    *(Spec(256, 512, form) for form in FORMS),
    *(Spec(257, 203, form, bias=True, smooth=True) for form in ("int8", "int8 asymmetric", "e4m3", "e4m3 blocks")),
    *(Spec(4096, 4096, form) for form in ("int8", "e4m3", "e4m3 blocks")),
    *(Spec(576, 7168, form, bias=True) for form in ("int8 static zero", "e4m3 static", "e4m3 blocks")),
    Spec(14336, 2048, "e4m3 blocks"),
    Spec(257, 203, "e4m3 blocks ue8m0", bias=True, smooth=True),
    Spec(64, 128, "e4m3 blocks ue8m0"),
    Spec(1, 16, "int8", bias=True),
)
SPECS = tuple(spec for spec in EVERY if spec.form in FORMS)
MS = (
    (0, 1, 7, 16, 17, 33, 64, 65, 100, 128, 150, 200, 256, 300, 430, 1000)
    if TARGET is None
    else (0, 5, 16, 33, 100, 300)
)
FAST = () if INTEGERS else (Spec(4096, 4096, "e4m3"), Spec(257, 203, "e4m3", bias=True, smooth=True))


def name_of(spec: Spec) -> str:
    return f"n{spec.n}-k{spec.k}-{spec.form.replace(' ', '_')}"


@pytest.mark.parametrize("kind", ["identity", "integer", "random"])
@pytest.mark.parametrize("cases", [pytest.param(tuple(Case(spec, m) for m in MS), id=name_of(spec)) for spec in SPECS])
def test_oracle(cases, kind):
    run_all(check, [Case(case.spec, case.m, kind, seed=i) for i, case in enumerate(cases)])


@pytest.mark.parametrize(
    "cases", [pytest.param(tuple(Case(spec, m, accumulate="fast") for m in MS), id=name_of(spec)) for spec in FAST]
)
def test_sums_of_the_tensor_core_alone(cases):
    run_all(check, list(cases))


COUNTS = ((5, 0, 1, 7), (130, 3, 0, 300), (1, 1, 2, 0, 0, 33, 64, 17), (1000, 0, 1, 257))
EXPERTS = tuple(form for form in ("int8", "int8 asymmetric", "e4m3", "e4m3 blocks") if form in FORMS)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            tuple(Grouped(Spec(n, k, form, bias=n == 257), c) for n, k in ((257, 203), (2048, 1024)) for c in COUNTS),
            id=form.replace(" ", "_"),
        )
        for form in EXPERTS
    ],
)
def test_experts(cases):
    run_all(check_grouped, list(cases))


@pytest.mark.parametrize(
    "cases", [tuple(Case(spec, 200) for spec in SPECS if (spec.n, spec.k) == (4096, 4096))], ids=["n4096"]
)
def test_two_hundred_launches_give_the_same_bits(cases):
    """A stage given back too early shows as bits that change now and then."""
    for case in cases:
        w, dtype = packed(case.spec, "random"), getattr(torch, case.out)
        x = w8a8.quantize_activations(torch.randn(case.m, 4096, device=DEVICE).to(dtype), w)
        first = w8a8.gemm(x, w, out_dtype=dtype)
        for _ in range(200):
            assert torch.equal(w8a8.gemm(x, w, out_dtype=dtype), first), case


@pytest.mark.parametrize("cases", [tuple(Case(spec, m) for spec in SPECS for m in (1, 600))], ids=["rows"])
def test_activations_are_the_references(cases):
    for case in cases:
        w, rng = packed(case.spec, "random"), torch.Generator().manual_seed(case.m + case.spec.k)
        x = torch.randn(case.m, case.spec.k, generator=rng)
        x[:, :: max(2, case.spec.k // 5)] *= 30
        x[case.m // 2] = 0
        x = x.to(getattr(torch, case.out)).to(DEVICE)
        made, expected = w8a8.quantize_activations(x, w), activations.on_cpu(x, w)
        k, m = case.spec.k, case.m
        assert torch.equal(made.q[:, :k].float(), expected.q[:, :k].float()), case
        scales, wanted = made.scales, expected.scales
        assert torch.equal(scales[..., :m], wanted[..., :m]), case
        if getattr(expected, "zeros", None) is not None:
            assert torch.equal(made.zeros, expected.zeros), case


@pytest.mark.parametrize("cases", [tuple(Case(Spec(256, 512, form), 16) for form in FORMS)], ids=["forms"])
def test_torch_compile_and_graphs(cases):
    for case in cases:
        w, x = packed(case.spec, "random"), torch.randn(2, 8, 512, device=DEVICE).to(getattr(torch, case.out))
        call = lambda x, w=w: w8a8.gemm(x, w)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, fullgraph=True)(x), call(x)), case
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = call(x)
        for seed in range(2):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            y.fill_(-77)
            graph.replay()
            assert torch.equal(y, call(x)), case
