"""Prefill attention on the GPU against float64: formats, chunks over a past, new tokens as they are, options, races."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from prefill_cases import Case, check, fuzz, inputs, run
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import decode, prefill, store
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.writing import writing

FUZZ_CASES = 150
RAGGED = dict(past=(300, 0, 1, 129, 512), new=(150, 33, 0, 1, 64))
MMA, SHARED = ("mma", 2, 8, 3), ("shared", 8, 8, 2)


def variants(base: Case) -> tuple[Case, ...]:
    """One kernel, many calls."""
    return (
        base,
        replace(base, past=(0,), new=(700,), sharp=4.0),
        replace(base, past=(2000, 10), new=(130, 200), group=1),
        replace(base, past=(500, 3), new=(70, 40), group=7, window=90),
        replace(base, past=(1000,), new=(1,), kv_heads=1, group=8, seed=1),
    )


FORMATS = {
    f"{k}-{v}-{page}-{'fresh' if fresh else 'stored'}": variants(
        Case(k, v, page=page, fresh=fresh, dtype="bfloat16" if k == "bfloat16" else "float16", **RAGGED)
    )
    for k, v, page, fresh in (
        ("float16", "float16", 0, False), ("int8", "int8", 128, False), ("int4", "int4", 0, False),
        ("int4", "int4", 64, True), ("int8", "int4", 0, True), ("int4_channel128", "int4", 128, True),
        ("int4_channel32", "int2", 32, False), ("int2_channel64", "int2", 0, False), ("bfloat16", "bfloat16", 0, True),
        ("int8_static", "int8_static", 0, False), ("fp8", "fp8", 128, True), ("int2", "int8", 48, False),
    )
}  # fmt: skip
SHAPES = {
    "head_dim 64": variants(Case("int4", "int2", head_dim=64, **RAGGED)),
    "head_dim 256": variants(Case("int8", "int4", head_dim=256, page=128, **RAGGED)),
    "bfloat16 queries": variants(Case("int4", "int8", dtype="bfloat16", fresh=True, **RAGGED)),
    "residual": variants(Case("int4", "int4", residual=64, page=64, fresh=True, **RAGGED)),
    "options": tuple(
        replace(case, window=window)
        for case in variants(Case("int4", "int4", softcap=5.0, sinks=True, **RAGGED))
        for window in (0, 33)
    ),
    "mma int4": variants(Case("int4", "int4", schedule=MMA, **RAGGED)),
    "mma fresh": variants(Case("int4_channel128", "int8", schedule=MMA, fresh=True, page=128, **RAGGED)),
    "shared int4": variants(Case("int4", "int4", schedule=SHARED, **RAGGED)),
    "shared float16": variants(Case("float16", "float16", schedule=SHARED, page=128, **RAGGED)),
    "shared fresh": variants(Case("int4_channel128", "int8", schedule=SHARED, fresh=True, page=128, **RAGGED)),
    "shared static": variants(Case("int8_static", "fp8", schedule=SHARED, **RAGGED)),
    "shared bfloat16": variants(Case("bfloat16", "bfloat16", dtype="bfloat16", schedule=SHARED, **RAGGED)),
    "shared head_dim 64": variants(Case("int2", "int4", head_dim=64, schedule=("shared", 8, 12, 4), **RAGGED)),
    "shared head_dim 256": variants(Case("int8", "int4", head_dim=256, schedule=("shared", 8, 4, 2), **RAGGED)),
    "shared options": tuple(
        replace(case, window=window)
        for case in variants(Case("int4", "int2", softcap=5.0, sinks=True, schedule=SHARED, **RAGGED))
        for window in (0, 33)
    ),
    "rotated": variants(Case("int4_hadamard", "int4", page=128, fresh=True, residual=128, **RAGGED)),
    "rotated, stored": variants(
        Case("int2_hadamard", "int2_hadamard", residual=0, schedule=MMA, dtype="bfloat16", **RAGGED)
    ),
    "rotated, mma": variants(Case("int4_hadamard", "int2_hadamard", residual=0, schedule=MMA, fresh=True, **RAGGED)),
    "rotated, shared": variants(
        Case("int4_hadamard", "int2_hadamard", residual=0, schedule=SHARED, fresh=True, dtype="bfloat16", **RAGGED)
    ),
    "ring, mma": variants(Case("int4", "int4", residual=128, sink_tokens=16, schedule=MMA, **RAGGED)),
    "ring, shared": variants(
        Case(
            "int2_hadamard",
            "int2_hadamard",
            residual=128,
            sink_tokens=16,
            schedule=SHARED,
            fresh=True,
            page=128,
            **RAGGED,
        )
    ),
    "sm_80 as PTX": variants(Case("int8", "int4", target="sm_80", **RAGGED)),
}


@pytest.fixture(autouse=True)
def small(nothing_compiles) -> None:
    """No kernel is compiled while a test runs."""


@pytest.mark.parametrize("cases", FORMATS.values(), ids=FORMATS)
def test_formats(cases):
    for case in cases:
        check(case)


@pytest.mark.parametrize("cases", SHAPES.values(), ids=SHAPES)
def test_shapes(cases):
    for case in cases:
        check(case)


POOL = [cases[0] for cases in (*FORMATS.values(), *SHAPES.values())]
FUZZ = fuzz(int(os.environ.get("TERRAZZO_FUZZ_CASES", FUZZ_CASES)), POOL)


@pytest.mark.parametrize("cases", [FUZZ[i::10] for i in range(10)], ids=lambda cases: f"{len(cases)} cases")
def test_fuzz(cases):
    failed = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, f"{len(failed)} of {len(cases)} cases:\n" + "\n".join(failed)


@pytest.mark.parametrize("cases", [(Case("int4", "int4", past=(3000,) * 4, new=(600,) * 4, kv_heads=8),)])
def test_several_waves_give_the_same_bits(cases):
    for case in cases:
        given, first, _ = run(case)
        for _ in range(100):
            again = prefill(given.q, given.cache, given.cu_seqlens, given.most_new, target=case.target)
            assert torch.equal(again.view(torch.int16), first.view(torch.int16)), case.repro


@dataclass(frozen=True)
class Chain:
    """A chunk with k and v, stored, and read again by prefill and by decode."""

    case: Case

    def requests(self) -> list:
        cache = inputs(self.case).cache
        write = writing.write_request(cache, "float16", *launch.current_targets(self.case.target))
        again = replace(self.case, fresh=False).requests()
        last = op.decode_requests((1, 4, 8, 128), cache, target=self.case.target)
        return [*self.case.requests(), *again, write, *last]


@pytest.mark.parametrize("cases", [(Chain(Case("int4", "int4", page=64, fresh=True, past=(300,), new=(64,))),)])
def test_a_chunk_is_stored_and_read_again(cases):
    """Decode and prefill of the same tokens over the same cache agree; the cache rounds what the chunk saw exactly."""
    given, target = inputs(cases[0].case), cases[0].case.target
    before = prefill(given.q, given.cache, given.cu_seqlens, given.most_new, k=given.k, v=given.v, target=target)
    store(given.cache, given.k, given.v, given.cu_seqlens, given.most_new, target=target)
    whole = prefill(given.q, given.cache, given.cu_seqlens, given.most_new, target=target)
    last = decode(given.q[-4:].unsqueeze(0), given.cache, target=target)
    assert (whole[-4:].float() - last[0].float()).abs().max() < 5e-3
    assert 0 < (whole.float() - before.float()).abs().max() < 0.5


@pytest.mark.parametrize("cases", [(Case("int4", "int4", past=(300,), new=(64,)),)])
def test_refusals(cases):
    given = inputs(cases[0])
    good = dict(q=given.q, cache=given.cache, cu_seqlens=given.cu_seqlens, most_new=given.most_new)
    for wrong in (
        dict(q=given.q[None]), dict(q=given.q.float()), dict(cu_seqlens=given.cu_seqlens.long()), dict(most_new=-1),
        dict(k=given.q[:, :2]), dict(window=-1), dict(sinks=torch.zeros(3, device="cuda")),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            prefill(**good | wrong)
