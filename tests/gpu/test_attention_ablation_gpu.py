"""The schedules that decode attention is compared with: they must be right before their time counts."""

from __future__ import annotations

import attention_cases
import pytest
import torch
from attention_cases import Case
from terrazzo.ablation import decode_shared
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import entry, launch, op, reference
from terrazzo.schedules.attention import Decode, PlainDecode

LENGTHS = (700, 0, 1, 129, 2048)


class Variant:
    """A case with a schedule of its own, in the form that the fixture `compiled` reads."""

    def __init__(self, case: Case, schedule: Decode) -> None:
        self.case, self.schedule = case, schedule

    def requests(self) -> list:
        made = attention_cases.CacheLayout(self.case.k, self.case.v, self.case.head_dim)
        sizes = (len(self.case.lengths), self.case.kv_heads, self.case.rows, self.case.tokens)
        facts = dict(dtype="float16", page=self.case.page, residual=made.k.group, softcap=False, sinks=False)
        target, device = launch.current_targets(None)
        return [op.plan(made, *sizes, **facts, target=target, device=device, schedule=self.schedule).request]


VARIANTS = {
    "plain int4": Variant(Case(lengths=LENGTHS), PlainDecode(1, 8, 2, 3, 1)),
    "plain int2": Variant(Case("int2", "int2", lengths=LENGTHS), PlainDecode(1, 8, 2, 3, 1)),
    "plain int8": Variant(Case("int8", "int8", lengths=LENGTHS), PlainDecode(1, 8, 1, 3, 1)),
    "plain channel": Variant(Case("int4_channel64", "int4", lengths=LENGTHS), PlainDecode(1, 8, 1, 3, 1)),
    "one warp": Variant(Case(lengths=LENGTHS), Decode(1, 1, 2, 3, 12)),
    "one warp of 16 rows": Variant(Case(q_len=4, lengths=LENGTHS), Decode(2, 1, 2, 3, 8, True)),
    "no pipeline": Variant(Case(lengths=LENGTHS), Decode(1, 8, 2, 1, 1)),
    "no pipeline, pages": Variant(Case("int8", "int4", lengths=LENGTHS, page=64), Decode(1, 8, 2, 1, 1)),
    "two stages of four tiles": Variant(Case("int2_channel64", "int2", lengths=LENGTHS), Decode(1, 8, 4, 2, 1)),
    "shared rows, channel": Variant(
        Case("int4_channel128", "int4", lengths=LENGTHS, q_len=4), Decode(2, 12, 2, 3, 1, True)
    ),
}


@pytest.fixture(autouse=True)
def compiled_first(gpu, compiled) -> None:
    """Kernels of all selected cases are compiled together, up front."""


@pytest.mark.parametrize("cases", [pytest.param((v,), id=name) for name, v in VARIANTS.items()])
def test_variants_stay_inside_the_bound_and_repeat(cases):
    case, schedule = cases[0].case, cases[0].schedule
    made = attention_cases.built(case)
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(len(case.lengths), case.q_len, case.kv_heads * case.group, case.head_dim, generator=rng)
    q = q.half().cuda()
    expected, _, bound = reference.decode(q, made)
    for splits in (None, 1, 3):
        runs = []
        for _ in range(2):
            y = torch.full_like(q, float("nan"))
            runs.append(entry.decode(q, made, out=y, splits=splits, schedule=schedule))
        assert torch.equal(*(y.view(torch.int16) for y in runs))
        assert bool(((y.double() - expected).abs() <= bound).all()), f"splits {splits}"


class Shared:
    """The wgmma kernel of one block size."""

    def __init__(self, block: int) -> None:
        self.block = block

    def requests(self) -> list:
        target = launch.current_targets(None)[0]
        return [decode_shared.request(target, self.block)] if target.arch == "sm_90a" else []


@pytest.mark.parametrize("cases", [pytest.param((Shared(block),), id=str(block)) for block in decode_shared.BLOCKS])
def test_decode_through_shared_memory(cases):
    if not cases[0].requests():
        pytest.skip("wgmma needs sm_90a")
    for q_len, group in ((1, 4), (4, 4), (3, 5), (1, 16), (1, 1)):
        case = Case(lengths=LENGTHS, q_len=q_len, group=group, kv_heads=3)
        made = attention_cases.built(case)
        rng = torch.Generator().manual_seed(2)
        q = torch.randn(len(LENGTHS), q_len, 3 * group, 128, generator=rng).half().cuda()
        expected, sums, bound = reference.decode(q, made)
        for splits in (None, 1, 5):
            runs = []
            for _ in range(2):
                y = torch.full_like(q, float("nan"))
                runs.append(decode_shared.decode_shared(q, made, out=y, block=cases[0].block, splits=splits))
            assert all(torch.equal(a, b) for a, b in zip(*runs))
            y, lse = runs[0]
            # keys and values are rounded to f16 on their way through shared memory
            assert bool(((y.double() - expected).abs() <= 4 * bound).all()), f"q_len {q_len}, splits {splits}"
            off = torch.where(sums.isinf() & (lse == sums), 0.0, (lse.double() - sums).abs())
            assert float(off.max()) < 1e-2


@pytest.mark.parametrize("cases", [(Shared(64),)], ids=["64"])
def test_bad_calls_are_refused(cases):
    made = attention_cases.built(Case(lengths=(64,)))
    good = torch.zeros(1, 1, 8, 128, dtype=torch.float16, device="cuda")
    pages = attention_cases.built(Case(lengths=(64,), page=64))
    int8 = attention_cases.built(Case("int8", "int8", lengths=(64,)))
    for words, call in (
        ("float16", lambda: decode_shared.decode_shared(good.float(), made)),
        ("rows", lambda: decode_shared.decode_shared(good.expand(1, 8, 8, 128), made)),
        ("contiguous", lambda: decode_shared.decode_shared(good, pages)),
        ("int4", lambda: decode_shared.decode_shared(good, int8)),
        ("block", lambda: decode_shared.decode_shared(good, made, block=32)),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
