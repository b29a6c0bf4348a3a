"""Codes of decode's outputs on the GPU: those of the quantizer's rule on what the same call writes, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import attention_cases
import pytest
import torch
from attention_cases import Case
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import quantized
from terrazzo.ops.attention import decode
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import codes, op, reference

FORMS = (("int8", False), ("e4m3", False), ("int8_block128", False), ("e4m3_block128", True))
"""Codes, and whether scales of blocks lie side by side."""


@pytest.fixture(autouse=True)
def small(nothing_compiles) -> None:
    """No kernel is compiled while a test runs."""


@dataclass(frozen=True)
class Coded:
    """A decode case, its codes, and the new tokens of each sequence of a ragged batch."""

    case: Case
    quant: str
    columns: bool
    smooth: bool
    own: tuple[int, ...] = ()

    def requests(self) -> list:
        case, facts = self.case, dict(self.case.plan().request.params)
        layout = CacheLayout(case.k, case.v, case.head_dim, case.sink_tokens)
        seen = min(case.tokens, case.window + case.q_len - 1) if case.window else case.tokens
        target, device = launch.current_targets(case.target)
        made = op.plan(
            layout, len(case.lengths), case.kv_heads, case.rows, seen, dtype=case.dtype, page=case.page,
            residual=facts["residual"], softcap=case.softcap > 0, sinks=case.sinks, target=target, device=device,
            schedule=case.schedule(), splits=case.splits, balanced=case.balanced, ragged=bool(self.own),
            coding=codes.Coding(self.quant, self.smooth, self.columns),
        )  # fmt: skip
        return [made.request]


def known(target: str | None, quant: str) -> bool:
    """Whether the target has such codes."""
    arch = target or attention_cases.TARGET
    try:
        quantized.check_codes_on(Target.parse(arch) if arch else launch.detect(), quant)
    except ArgumentError:
        return False
    return True


def forms(*cases: Case, smooth: bool = True) -> tuple[Coded, ...]:
    """The cases in each form."""
    kinds = [(q, c) for q, c in FORMS if "e4m3" not in q or cases[0].target is None]
    return tuple(Coded(case, quant, columns, smooth) for quant, columns in kinds for case in cases)


LLAMA = Case("int4", "int4", kv_heads=8, page=128)
CASES = {
    "int4": forms(
        replace(LLAMA, lengths=(300, 0, 4000, 1)),
        replace(LLAMA, lengths=(4000,), splits=16),
        replace(LLAMA, lengths=(700,), splits=1),
        replace(LLAMA, lengths=(200,) * 34, splits=1),
    ),
    "no smooth vector": forms(replace(LLAMA, lengths=(300, 900)), smooth=False),
    "eight tokens, bfloat16": forms(replace(LLAMA, q_len=8, lengths=(3000, 8), dtype="bfloat16")),
    "long rows": forms(replace(LLAMA, kv_heads=16, group=8, lengths=(200, 3000))),
    "heads of 64, an odd number": forms(replace(LLAMA, kv_heads=5, group=3, head_dim=64, lengths=(200, 3000))),
    "heads of 256": forms(Case("int8", "int4", head_dim=256, lengths=(200, 0, 3000))),
    "balanced": forms(replace(LLAMA, lengths=(4000, 64, 130), balanced=True, splits=0)),
    "warpgroups": forms(replace(LLAMA, q_len=8, lengths=(3000, 900), style="warpgroups", splits=8)),
    "rotated, ring": forms(
        Case("int4_hadamard", "int4", kv_heads=4, page=128, residual=128, sink_tokens=16, lengths=(900, 140))
    ),
    "as PTX of sm_80": forms(replace(LLAMA, lengths=(300, 2000), target="sm_80")),
    "ragged": tuple(
        Coded(replace(LLAMA, q_len=4, lengths=(300, 2, 65, 0, 3000), splits=splits), *form, True, (1, 2, 4, 0, 3))
        for form in FORMS for splits in (0, 4)
    ),
}  # fmt: skip


@lru_cache(maxsize=8)
def exact_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of all sequences, the outputs, and their error bound: the same for each form of codes."""
    rng, heads = torch.Generator().manual_seed(case.seed), case.kv_heads * case.group
    q = torch.randn(len(case.lengths), case.q_len, heads, case.head_dim, generator=rng)
    q = q.to(getattr(torch, case.dtype)).to(attention_cases.DEVICE)
    out, _, bound = reference.decode(q, attention_cases.built(case), reference.Options(window=case.window))
    return q, out, bound


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_codes_are_those_of_the_outputs_beside_them(cases):
    for at in cases:
        case, cache, device = at.case, attention_cases.built(at.case), attention_cases.DEVICE
        if not known(case.target, at.quant):
            continue
        rng, heads = torch.Generator().manual_seed(case.seed), case.kv_heads * case.group
        dense, *exact = exact_of(case)
        factors = (torch.rand(heads * case.head_dim, generator=rng) + 0.5).to(device) if at.smooth else None
        has, q, more = torch.ones(dense.shape[:2], dtype=torch.bool, device=device), dense, {}
        if at.own:
            has = (torch.arange(case.q_len) >= case.q_len - torch.tensor(at.own)[:, None]).to(device)
            q = torch.cat([dense[has], torch.full_like(dense[0, :2], float("nan"))])  # the last rows are nobody's
            starts = torch.tensor([0, *at.own]).cumsum(0).int().to(device)
            more = dict(cu_seqlens=starts, most_new=case.q_len)
        runs = []
        for _ in range(2):
            y = torch.full_like(q, float("nan"))
            made = decode(
                q, cache, out=y, quant=at.quant, smooth=factors, column_scales=at.columns, window=case.window, **more,
                **case.options(),
            )  # fmt: skip
            assert made.shape == (*q.shape[:-2], heads * case.head_dim) and made.codes == at.quant.partition("_")[0]
            runs.append((y, made))
        (y, made), rows = runs[0], int(has.sum())
        y = y.reshape(-1, heads, case.head_dim)[:rows]
        expected, bound = (x[has] for x in exact)
        assert bool(((y.double() - expected).abs() <= bound).all()), at
        wanted = codes.encoded(y, at.quant, factors, at.columns)
        for _, made in runs:
            assert torch.equal(made.q.view(torch.int8)[:rows], wanted.q.view(torch.int8)), at
            scales = [t.scales.T if at.columns else t.scales for t in (made, wanted)]
            assert torch.equal(scales[0][:rows], scales[1][:rows]), at
            assert at.quant != "int8" or torch.equal(made.row_sums[:rows], wanted.row_sums), at


@pytest.mark.parametrize("cases", [CASES["int4"]], ids=["int4"])
def test_a_captured_graph_makes_codes_at_the_lengths_of_its_replay(cases):
    at = cases[0]
    cache = attention_cases.built(at.case)
    cache = replace(cache, lengths=cache.lengths.clone())
    rng = torch.Generator(device="cuda").manual_seed(1)
    q = torch.randn(len(cache.lengths), 1, 32, 128, device="cuda", generator=rng).half()
    y = torch.full_like(q, float("nan"))
    factors = torch.rand(4096, device="cuda", generator=rng) + 0.5
    call = lambda: decode(q, cache, out=y, quant=at.quant, smooth=factors, **at.case.options())
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for lengths in ([5, 0, 3990, 0], [300, 0, 16, 1]):  # behind those of the cache lies what recycled pages hold
        cache.lengths.copy_(torch.tensor(lengths))
        y.fill_(float("nan")), made.q.fill_(99), made.scales.fill_(float("nan")), made.row_sums.fill_(-1)
        graph.replay()
        exact = codes.encoded(y, at.quant, factors, False)
        assert bool(y.isfinite().all()) and torch.equal(made.q, exact.q) and torch.equal(made.scales, exact.scales)
        assert torch.equal(made.row_sums, exact.row_sums)


def test_bad_calls_are_refused_before_a_launch():
    cache = attention_cases.built(CASES["int4"][0].case)
    q = torch.zeros(4, 1, 32, 128, dtype=torch.float16, device="cuda")
    for given, named in (
        (dict(quant="int4"), "quant"), (dict(smooth=torch.ones(4096, device="cuda")), "smooth"),
        (dict(quant="int8", column_scales=True), "column_scales"),
        (dict(quant="int8", smooth=torch.ones(4096)), "smooth"),
        (dict(quant="int8", smooth=torch.ones(128, device="cuda")), "smooth"),
        (dict(quant="e4m3", target="sm_80"), "quant"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=named):
            decode(q, cache, **given)
