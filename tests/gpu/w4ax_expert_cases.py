"""Experts of W4Ax: random stacks, launches into poisoned memory, and what each expert's rows must be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import w4ax_cases
from oracles import guarded
from terrazzo.ops import launching, w4ax
from terrazzo.ops.w4ax import activations, reference
from w4ax_cases import DEVICE, Spec, codes, compare


@dataclass(frozen=True)
class Case:
    """Experts of one plan. `counts`: tokens of each; two rows before them and three behind are of nobody.

    Attributes:
        data: "random"; "integer", scales of 1, so that y is a sum of integers below 2^24; "unit", one channel of each
            token, so that y is a column of its expert's weight. With both float32 holds y.
        quantized: activations are made by the quantizer, of x in `out`.
    """

    spec: Spec
    counts: tuple[int, ...]
    out: str = "float32"
    data: str = "random"
    quantized: bool = False
    launches: int = 2

    @property
    def m(self) -> int:
        return sum(self.counts) + 5

    def experts(self) -> list[w4ax.QuantizedWeight]:
        return list(_experts(self.spec, len(self.counts), self.data))

    def stacked(self) -> w4ax.GroupedWeight:
        return _stacked(self.spec, len(self.counts), self.data)

    def requests(self) -> list:
        w = self.stacked().stacked
        facts = dict(blocks8=w.blocks8, out_dtype=self.out, bias=w.bias is not None, permuted=bool(w.order))
        dtype = self.out if self.quantized else None
        return w4ax.grouped_requests(w.n, w.k, len(self.counts), m=self.m, dtype=dtype, **facts)


@lru_cache(maxsize=8)
def _experts(spec: Spec, count: int, data: str) -> tuple[w4ax.QuantizedWeight, ...]:
    first = spec.build()
    rng, made = torch.Generator().manual_seed(spec.n + count), []
    ones = torch.ones(spec.n, device=first.codes.device)
    for e in range(count):
        codes = first.codes.roll(e, 0) if e % 2 else -(first.codes.roll(e, 0).clamp(min=-7))
        w = replace(first, codes=codes)
        if data == "integer":
            w = replace(w, scales=w.multipliers(), channel_scales=ones, bias=None)
        elif data == "unit":
            w = replace(w, bias=None)
        elif spec.bias:
            w = replace(w, bias=torch.randn(spec.n, generator=rng).to(first.codes.device))
        made.append(w)
    return tuple(made)


@lru_cache(maxsize=8)
def _stacked(spec: Spec, count: int, data: str) -> w4ax.GroupedWeight:
    return w4ax.GroupedWeight.stack([w.pack(target="sm_90a").to(DEVICE) for w in _experts(spec, count, data)])


def activations_of(case: Case, w: w4ax.PackedWeight) -> w4ax.QuantizedActivations:
    weight, rng = case.experts()[0], torch.Generator().manual_seed(case.m)
    if case.quantized:
        x = torch.randn(case.m, w.k, generator=rng).to(getattr(torch, case.out)).to(DEVICE)
        return w4ax.quantize_activations(x, w)
    q, scales = codes(weight, case.m, case.m)
    if case.data == "unit":  # places of channels: padding has none
        places = torch.arange(w.k) if weight.permutation is None else (weight.permutation >= 0).nonzero()[:, 0].cpu()
        chosen = places[torch.randint(len(places), (case.m, 1), generator=rng)]
        q = (chosen == torch.arange(q.shape[1])).to(torch.int8).to(q.device)
    if case.data != "random":
        scales = torch.ones_like(scales)
    return activations.from_codes(q.to(DEVICE), scales.to(DEVICE), w, "two_level")


def check(case: Case) -> None:
    """Each expert's rows; those of nobody keep what they held; every launch gives the same bits."""
    made, w, m, dtype = case.experts(), case.stacked(), case.m, getattr(torch, case.out)
    edges = torch.tensor([2, *case.counts]).cumsum(0)
    offsets, x, first = edges.int().to(DEVICE), activations_of(case, w.stacked), None
    for launch in range(case.launches):
        held = guarded(m, w.n, dtype, float("nan"), rows=1, odd=launch == case.launches - 1)
        y = w4ax.grouped_gemm(x, w, offsets, out=held[1:-1], out_dtype=dtype)
        assert held[:3].isnan().all() and held[-4:].isnan().all(), f"rows of nobody were written; {case}"
        first = y.clone() if first is None else first
        assert torch.equal(first[2:-3].view(torch.int16), y[2:-3].view(torch.int16)), f"two runs differ; {case}"
    assert not launching._pools[w.device].semaphores.any(), "semaphores are not zero"
    home = w4ax_cases.HOME
    q, scales, y = x.codes().to(home), x.token_scales().to(home), first.to(home)
    for e, weight in enumerate(made):
        rows = slice(int(edges[e]), int(edges[e + 1]))
        if rows.start == rows.stop:
            continue
        if case.data == "random":
            ref = reference.gemm(q[rows], scales[rows], weight)
            bound = reference.forward_error_bound(q[rows], scales[rows], weight, dtype)
        else:
            ref = q[rows].double() @ weight.values().T
            bound = torch.zeros_like(ref)
        compare(y[rows], ref, bound, f"expert {e}, {case}")
