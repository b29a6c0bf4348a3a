"""Attention whose work is cut in other ways, on the GPU: prefill by parts of the past, decode of ragged new tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import attention_cases
import prefill_cases
import pytest
import torch
from terrazzo.ops.attention import decode
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op, reference

MMA, SHARED = ("mma", 2, 8, 3), ("shared", 8, 8, 2)


@pytest.fixture(autouse=True)
def small(nothing_compiles) -> None:
    """No kernel is compiled while a test runs."""


def parts_of(base: prefill_cases.Case) -> tuple[prefill_cases.Case, ...]:
    """One kernel: short chunks over long pasts, parts that some rows do not have, one token, a window."""
    return (
        replace(base, past=(3000, 0, 130), new=(16, 3, 70), splits=7),
        replace(base, past=(9000,), new=(64,), splits=16, sharp=4.0),
        replace(base, past=(700, 1, 64), new=(1, 5, 0), splits=32, group=7),
        replace(base, past=(2000,), new=(130,), splits=3, window=500),
    )


PARTS = {
    "int4": parts_of(prefill_cases.Case("int4", "int4", page=128)),
    "int4, fresh": parts_of(prefill_cases.Case("int4", "int8", page=128, fresh=True, dtype="bfloat16")),
    "ring and first tokens": parts_of(
        prefill_cases.Case("int4_hadamard", "int4", residual=128, sink_tokens=16, page=128, fresh=True)
    ),
    "channels, sinks, soft cap": parts_of(
        prefill_cases.Case("int4_channel64", "int2", sinks=True, softcap=5.0, schedule=SHARED)
    ),
    "mma, ring and first tokens": parts_of(
        prefill_cases.Case("int4", "int4", residual=64, sink_tokens=16, schedule=MMA, sinks=True)
    ),
    "mma as PTX of sm_80": parts_of(prefill_cases.Case("int8", "int4", fresh=True, target="sm_80")),
}


@pytest.mark.parametrize("cases", PARTS.values(), ids=PARTS)
def test_parts_of_the_past_add_up_to_the_whole(cases):
    for case in cases:
        prefill_cases.check(case)


@dataclass(frozen=True)
class Ragged:
    """A decode case whose sequences have `own` new tokens each, up to its q_len."""

    case: attention_cases.Case
    own: tuple[int, ...]

    def requests(self) -> list:
        case = self.case
        plan = case.plan()
        facts = dict(plan.request.params)
        layout = CacheLayout(case.k, case.v, case.head_dim, case.sink_tokens)
        seen = min(case.tokens, case.window + case.q_len - 1) if case.window else case.tokens
        made = op.plan(
            layout, len(case.lengths), case.kv_heads, case.rows, seen, dtype=case.dtype, page=case.page,
            residual=facts["residual"], softcap=case.softcap > 0, sinks=case.sinks, target=plan.request.target,
            device=attention_cases.launch.current_targets(case.target)[1], schedule=case.schedule(),
            splits=case.splits, balanced=case.balanced, ragged=True,
        )  # fmt: skip
        return [made.request]


def ragged(case: attention_cases.Case) -> tuple[Ragged, ...]:
    return (
        Ragged(replace(case, lengths=(300, 2, 65, 0, 129)), (1, case.q_len, 2, 1, 0)),
        Ragged(replace(case, lengths=(4000, 900, 8), window=700, seed=1), (case.q_len, 1, 3)),
        Ragged(replace(case, lengths=(500,) * 6, group=7 if case.rows <= 8 else case.group), (0, 0, 1, 2, 3, 0)),
    )


RAGGED = {
    "int4": ragged(attention_cases.Case("int4", "int4", q_len=4, page=128)),
    "eight tokens": ragged(attention_cases.Case("int4", "int8", q_len=8, page=64, splits=4)),
    "ring": ragged(attention_cases.Case("int4_hadamard", "int4", q_len=4, page=128, residual=128, sink_tokens=16)),
    "channels": ragged(attention_cases.Case("int4_channel64", "int2", q_len=3, group=8, page=64)),
    "balanced": ragged(attention_cases.Case("int4", "int4", q_len=4, page=128, balanced=True)),
    "warpgroups": ragged(attention_cases.Case("int4", "int4", q_len=8, page=128, style="warpgroups", splits=8)),
    "warpgroups, rotated": ragged(
        attention_cases.Case("int2_hadamard", "int2_hadamard", q_len=4, page=128, residual=128, style="warpgroups")
    ),
}


@pytest.mark.parametrize("cases", RAGGED.values(), ids=RAGGED)
def test_each_sequence_has_new_tokens_of_its_own(cases):
    for at in cases:
        case, cache = at.case, attention_cases.built(at.case)
        rng, device = torch.Generator().manual_seed(case.seed), attention_cases.DEVICE
        heads = case.kv_heads * case.group
        dense = torch.randn(len(at.own), case.q_len, heads, case.head_dim, generator=rng).half().to(device)
        has = (torch.arange(case.q_len) >= case.q_len - torch.tensor(at.own)[:, None]).to(device)
        q = torch.cat([dense[has], torch.full_like(dense[0, :2], float("nan"))])  # the last rows are nobody's
        starts = torch.tensor([0, *at.own]).cumsum(0).int().to(device)
        runs = []
        for _ in range(2):
            y, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"), device=device)
            more = dict(cu_seqlens=starts, most_new=case.q_len, window=case.window, **case.options())
            decode(q, cache, out=y, lse=lse, **more)
            assert y[-2:].isnan().all() and lse[-2:].isnan().all(), at
            runs.append((y[:-2], lse[:-2]))
        for a, b in zip(*runs):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), at
        expected, sums, bound = (x[has] for x in reference.decode(dense, cache, reference.Options(window=case.window)))
        y, lse = runs[0]
        assert bool(((y.double() - expected).abs() <= bound).all()), at
        off = torch.where(sums.isinf() & (lse == sums), 0.0, (lse.double() - sums).abs())
        slack = reference.lse_error_bound(dense, cache, reference.Options(window=case.window))[has]
        assert bool((off <= slack).all()), at
