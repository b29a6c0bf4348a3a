"""Cases that only the sanitizer runs: experts on mma.sync, and decode that leaves codes. Operands come from the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import attention_cases
import test_grouped_gpu as grouped_cases
import torch
import w4a8_oracles
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a8, w4a16
from terrazzo.ops.attention import decode
from terrazzo.ops.attention.decoding import codes
from terrazzo.ops.call import plans
from terrazzo.ops.w4a8 import op as w4a8_op
from terrazzo.ops.weight_only import op as weight_only_op
from test_attention_codes_gpu import Coded

DEVICE = "cuda"


@dataclass(frozen=True)
class Experts:
    """Experts packed for sm_80, which a newer GPU runs through PTX; a row before theirs and two behind are nobody's."""

    case: grouped_cases.Case
    counts: tuple[int, ...]

    @property
    def m(self) -> int:
        return sum(self.counts) + 3

    def build(self) -> tuple[list, Any]:
        """Canonical weights on the CPU, and their stack on the GPU."""
        spec, rng, home = self.case.spec, torch.Generator().manual_seed(self.m), grouped_cases.DEVICE
        make, family = {"w4a8": (grouped_cases._w4a8, w4a8), "w4a16": (grouped_cases._w4a16, w4a16)}[spec.op]
        grouped_cases.DEVICE = "cpu"
        try:
            made = [make(spec, rng) for _ in self.counts]
        finally:
            grouped_cases.DEVICE = home
        return made, family.GroupedWeight.stack([w.pack(target="sm_80") for w in made]).to(DEVICE)

    def requests(self) -> list:
        s, case = self.case.spec, self.case
        if s.op == "w4a16":
            return weight_only_op.experts_requests(self.build()[1], (self.m,), case.out, case.option)
        facts = dict(group_size=s.group, bias=s.bias and case.out != "int32", out_dtype=case.out)
        product = w4a8_op.Facts(s.n, s.k, **facts, dequantization=case.option, experts=len(self.counts))
        return [plans.plan(self.m, product, Target.parse("sm_80"), Target.detect()).request]


def run_experts(case: Experts) -> None:
    """Rows of each expert inside their bound, those of nobody as they were."""
    (made, stacked), rng, k = case.build(), torch.Generator().manual_seed(1), case.case.spec.k
    edges, dtype = torch.tensor([1, *case.counts]).cumsum(0), getattr(torch, case.case.out)
    if case.case.spec.op == "w4a16":
        x = torch.randn(case.m, k, generator=rng).to(dtype)
        given = x.to(DEVICE)
    else:
        q = torch.randint(-127, 128, (case.m, k), generator=rng, dtype=torch.int8)
        x = w4a8_oracles.activations(q, torch.rand(case.m, generator=rng) * 1e-3 + 1e-4)
        given = w4a8.QuantizedActivations(*(t.to(DEVICE) for t in (x.q, x.scales, x.row_sums)), x.shape)
    blank = -77 if dtype == torch.int32 else float("nan")
    y = torch.full((case.m, stacked.n), blank, dtype=dtype).to(DEVICE)
    y = case.case.call(given, stacked, edges.int().to(DEVICE), y).cpu()
    nobody = torch.cat([y[:1], y[-2:]])
    assert bool((nobody == blank).all() if dtype == torch.int32 else nobody.isnan().all()), f"beside experts; {case}"
    for e, weight in enumerate(made):
        rows = slice(int(edges[e]), int(edges[e + 1]))
        if rows.start < rows.stop:
            ref, bound = case.case.expected(x, rows, weight)
            assert bool(((y[rows].double() - ref).abs() <= bound).all()), f"expert {e}; {case}"


def run_coded(at: Coded) -> None:
    """Codes are those of the outputs beside them."""
    case, rng = at.case, torch.Generator().manual_seed(at.case.seed)
    cache, heads = attention_cases.built(case), case.kv_heads * case.group
    q = torch.randn(len(case.lengths), case.q_len, heads, case.head_dim, generator=rng).to(getattr(torch, case.dtype))
    factors = torch.rand(heads * case.head_dim, generator=rng) + 0.5 if at.smooth else None
    y = torch.full_like(q, float("nan")).to(DEVICE)
    made = decode(
        q.to(DEVICE), cache, out=y, quant=at.quant, smooth=None if factors is None else factors.to(DEVICE),
        column_scales=at.columns, window=case.window, **case.options(),
    )  # fmt: skip
    rows = y.cpu().reshape(-1, heads, case.head_dim)
    wanted = codes.encoded(rows, at.quant, factors, at.columns)
    assert bool(rows.isfinite().all()) and torch.equal(made.q.cpu().view(torch.int8), wanted.q.view(torch.int8)), at
    found, exact = (t.scales.cpu().T[: len(rows)] if at.columns else t.scales.cpu() for t in (made, wanted))
    assert torch.equal(found, exact), at
    assert at.quant != "int8" or torch.equal(made.row_sums.cpu(), wanted.row_sums), at
