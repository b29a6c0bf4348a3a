"""Experts of W4Ax on the GPU: sums of integers and columns of weights exact, random data inside their bound, whatever
the offsets hold. Outputs start as NaN; rows of no expert must keep it, and a second run must give the same bits."""

from __future__ import annotations

import pytest
import torch
from oracles import guarded
from terrazzo.ops import moe, w4ax
from terrazzo.ops.w4ax import reference
from w4ax_cases import DEVICE, Spec, compare, needs
from w4ax_expert_cases import Case, check

SMALL = Spec(448, 1024, 0.25, scales="two_level")
RAGGED = Spec(450, 1000, 0.25, bias=True, scales="two_level")
ONE_KIND = tuple(Spec(192, 512, ratio, scales="two_level") for ratio in (0.0, 1.0))
LAYER = Spec(4096, 4096, 0.25, scales="two_level")
SPREADS = ((16,) * 5, (0, 7, 0, 40, 1), (130, 0, 3, 260, 20), (1, 0, 0, 0, 2))
CASES = {
    "integers": tuple(Case(SMALL, counts, data="integer") for counts in SPREADS),
    "unit vectors": tuple(Case(SMALL, counts, data="unit") for counts in SPREADS[:3]),
    "random": tuple(Case(SMALL, counts, out) for counts, out in zip(SPREADS, ("float16", "bfloat16", "float32") * 2)),
    "ragged": tuple(Case(RAGGED, counts, out) for counts, out in zip(SPREADS, ("bfloat16", "float32", "float16") * 2)),
    "one kind of blocks": tuple(Case(spec, SPREADS[1], "float16") for spec in ONE_KIND),
    "quantizer in front": tuple(Case(RAGGED, counts, "bfloat16", quantized=True) for counts in SPREADS[:2]),
    "no tokens": (Case(SMALL, (0, 0, 0)),),
    "one expert": (Case(SMALL, (300,), "float16"),),
    "many": (Case(SMALL, (3, 0, 9, 1) * 32, data="integer"), Case(SMALL, (40, 0) * 64, "bfloat16")),
    "a layer's": tuple(Case(LAYER, counts, "bfloat16") for counts in ((16,) * 8, (100,) * 8)),
    "many launches": (Case(LAYER, (2, 0, 30, 1, 9, 0, 64, 250), "float16", launches=100),),
}


@pytest.mark.parametrize("cases", [pytest.param(given, id=name) for name, given in CASES.items()])
def test_experts(compiled, cases):
    needs("sm_90a")
    for case in cases:
        check(case)


GRAPH = Case(SMALL, (16,) * 5, "float16", quantized=True)


@pytest.mark.parametrize("cases", [(GRAPH,)], ids=["graph"])
def test_a_graph_follows_its_offsets(compiled, cases):
    """The launch does not depend on the values of the offsets: a captured graph serves any routing of its M tokens."""
    needs("sm_90a")
    made, w, m = GRAPH.experts(), GRAPH.stacked(), GRAPH.m
    x = torch.randn(m, w.k, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    offsets, y = (
        torch.zeros(6, dtype=torch.int32, device=DEVICE),
        torch.empty(m, w.n, dtype=torch.float16, device=DEVICE),
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        w4ax.grouped_gemm(x, w, offsets, out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            w4ax.grouped_gemm(x, w, offsets, out=y)
    held = w4ax.quantize_activations(x, w.stacked)
    q, scales = held.codes(), held.token_scales()
    for counts in ((17,) * 5, (0, 85, 0, 0, 0), (1, 2, 3, 4, 60)):
        edges = torch.tensor([0, *counts]).cumsum(0)
        offsets.copy_(edges.int())
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for e, weight in enumerate(made):
            rows = slice(int(edges[e]), int(edges[e + 1]))
            if rows.start < rows.stop:
                ref = reference.gemm(q[rows], scales[rows], weight)
                bound = reference.forward_error_bound(q[rows], scales[rows], weight, y.dtype)
                compare(y[rows], ref, bound, f"expert {e}, {counts}")


@pytest.mark.parametrize("cases", [(GRAPH,)], ids=["bad"])
def test_offsets_that_make_no_sense_touch_nothing_else(compiled, cases):
    """They are not checked (that would wait for the GPU), but reads and writes stay inside x and y."""
    needs("sm_90a")
    w, m = GRAPH.stacked(), GRAPH.m
    x = torch.randn(m, w.k, device=DEVICE).half()
    for values in ([5, 3, m, 1000000, -7, m], [m, 0, m, 0, m, 0], [-5, -4, -3, -2, -1, 99]):
        for odd in (False, True):
            held = guarded(m, w.n, torch.float16, float("nan"), odd=odd)
            w4ax.grouped_gemm(x, w, torch.tensor(values, dtype=torch.int32, device=DEVICE), out=held[8:-8])
            torch.cuda.synchronize()
            assert bool(held[:8].isnan().all()) and bool(held[-8:].isnan().all())


@pytest.mark.parametrize("cases", [(GRAPH,)], ids=["gathered"])
def test_tokens_are_quantized_before_they_are_routed(compiled, cases):
    """Rows that are gathered as codes have the bits of rows that are quantized in experts' order."""
    needs("sm_90a")
    w, rng = GRAPH.stacked(), torch.Generator().manual_seed(3)
    x = torch.randn(GRAPH.m, w.k, generator=rng).half().to(DEVICE)
    ids = torch.randint(5, (GRAPH.m, 1), generator=rng).to(DEVICE)
    routing = moe.sort_by_expert(ids, 5)
    first = w4ax.grouped_gemm(moe.gather(w4ax.quantize_activations(x, w.stacked), routing), w, routing.offsets)
    second = w4ax.grouped_gemm(moe.gather(x, routing), w, routing.offsets)
    assert torch.equal(first, second)


@pytest.mark.parametrize("cases", [(GRAPH,)], ids=["traced"])
def test_torch_compile(compiled, cases):
    needs("sm_90a")
    w = GRAPH.stacked()
    x = torch.randn(GRAPH.m, w.k, device=DEVICE).half()
    offsets = torch.tensor([0, *GRAPH.counts]).cumsum(0).int().to(DEVICE)
    offsets[-1] = GRAPH.m
    eager = w4ax.grouped_gemm(x, w, offsets)
    traced = torch.compile(lambda x, o: w4ax.grouped_gemm(x, w, o) + 0, fullgraph=True)(x, offsets)
    assert torch.equal(eager, traced)
