"""Decode attention on the GPU against float64 over the dequantized cache: formats, layouts, shapes, options, races."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from attention_cases import TARGET, Case, built, check, fuzz, run
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import op

FUZZ_CASES = 320
RAGGED = (300, 0, 1, 129, 512, 15)
FIRST = ("float16", "int8", "int4", "int4_channel128")
PAIRS = (
    *((k, "float16" if k == "float16" else "int8" if k == "int8" else "int4") for k in FIRST),
    ("bfloat16", "bfloat16"),
    ("int2", "int2"),
    ("int4_channel64", "int2"),
    ("int4_channel32", "int4"),
    ("int2_channel128", "int2"),
    ("int2_channel32", "int4"),
    ("int8_static", "int8_static"),
    ("fp8", "fp8"),
    ("int8", "int4"),
    ("float16", "int2"),
)


def variants(base: Case) -> tuple[Case, ...]:
    """One kernel, many calls: lengths, splits, sharp logits, groups of rows."""
    return (
        base,
        replace(base, splits=1),
        replace(base, splits=3, sharp=4.0),
        replace(base, group=1, lengths=(700, 33)),
        replace(base, group=7, window=40),
        replace(base, group=2, q_len=4),
        replace(base, lengths=(2100,), sharp=6.0, seed=1),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_fuzz:
        given = metafunc.config.getoption("fuzz_cases", None)
        cases = fuzz(int(os.environ.get("TERRAZZO_FUZZ_CASES", FUZZ_CASES)) if given is None else given)
        metafunc.parametrize("cases", [tuple(cases[i::16]) for i in range(16)], ids=[f"part{i}" for i in range(16)])


@pytest.fixture(autouse=True)
def compiled_first(gpu, compiled) -> None:
    """Kernels of all selected cases are compiled together, up front."""


def run_all(cases) -> None:
    failures = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n" + "\n".join(failures)


def _formats(pair: tuple[str, str], page: int) -> tuple[Case, ...]:
    dtype = "bfloat16" if pair[0] == "bfloat16" else "float16"
    return variants(Case(*pair, lengths=RAGGED, page=page, dtype=dtype))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_formats(pair, page), id=f"{pair[0]}-{pair[1]}-{'paged' if page else 'contiguous'}")
        for pair in PAIRS
        for page in (0, 128)
    ],
)
def test_formats(cases):
    run_all(cases)


SHAPES = {
    "q_len": tuple(Case(q_len=n, group=g, lengths=(300, 8, 3, 77)) for n in (2, 3, 5, 8) for g in (1, 2, 4)),
    "many rows": (Case(q_len=8, group=8, lengths=(500, 90)), Case(q_len=5, group=7, lengths=(333, 4))),
    "head_dim 64": tuple(Case(k, v, head_dim=64, lengths=RAGGED) for k, v in PAIRS[:4]),
    "head_dim 256": tuple(Case(k, v, head_dim=256, lengths=RAGGED, group=g) for k, v in PAIRS[:4] for g in (4, 12)),
    "bfloat16 queries": tuple(Case(k, v, dtype="bfloat16", lengths=RAGGED) for k, v in PAIRS[:4]),
    "small pages": tuple(Case(page=page, lengths=RAGGED) for page in (16, 32, 64, 256)),
    "residual": tuple(
        Case(k, k, residual=r, lengths=RAGGED, page=p) for k in ("int4", "int8") for r in (64, 128) for p in (0, 128)
    ),
    "many sequences": (Case(kv_heads=8, lengths=tuple(range(1, 400, 9))),),
    "options": tuple(
        Case(k, "int4", softcap=cap, window=window, sinks=sinks, lengths=(300, 0, 7), q_len=2)
        for k in ("int4", "int4_channel64")
        for cap, window, sinks in ((5.0, 0, False), (0.0, 33, True), (5.0, 100, True))
    ),
}


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in SHAPES.items()])
def test_shapes_and_options(cases):
    run_all(cases)


def test_fuzz(cases):
    run_all(cases)


RACE = (
    Case(kv_heads=8, lengths=(4096,) * 4, splits=16),
    Case("int4_channel128", "int4", kv_heads=8, lengths=(4000,) * 4, splits=9),
    Case("float16", "float16", kv_heads=8, lengths=(2048,) * 4, splits=16),
)


@pytest.mark.parametrize("cases", [pytest.param((case,), id=case.k) for case in RACE])
def test_partial_sums_repeat_over_200_launches_of_several_waves(cases):
    """A stage refilled before it was read shows up as a partial sum that differs now and then."""
    case = cases[0]
    q, first, lse, _ = run(case)
    noise = torch.empty(1 << 24, device="cuda")
    for launch in range(200):
        if launch % 3 == 0:
            noise.normal_()  # another load on the memory system
        again = torch.full_like(lse, float("nan"))
        y = op.decode(q, built(case), lse=again, splits=case.splits, target=TARGET)
        assert torch.equal(y, first) and torch.equal(again, lse), f"launch {launch} differs; {case.repro}"
    check(case)


@pytest.mark.parametrize("cases", [(Case(lengths=(300, 77)),)], ids=["case"])
def test_a_captured_graph_reads_lengths_from_the_device(cases):
    case = cases[0]
    q, _, lse, _ = run(case)
    made = built(case)
    before = made.lengths.clone()
    graph, y = torch.cuda.CUDAGraph(), torch.empty_like(q)
    op.decode(q, made, out=y, lse=lse)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        op.decode(q, made, out=y, lse=lse)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            op.decode(q, made, out=y, lse=lse)
    try:
        made.lengths.copy_(torch.tensor([200, 77], dtype=torch.int32))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, op.decode(q, made))
    finally:
        made.lengths.copy_(before)


@pytest.mark.parametrize("cases", [(Case(lengths=(64,)),)], ids=["case"])
def test_bad_calls_are_refused(cases):
    made = built(cases[0])
    good = torch.zeros(1, 1, 8, 128, dtype=torch.float16, device="cuda")
    for words, q, options in (
        ("q_len", good.expand(1, 9, 8, 128), {}),
        ("Hq", good[:, :, :7], {}),
        ("sequences", good.expand(2, 1, 8, 128), {}),
        ("float16", good.float(), {}),
        ("splits", good, {"splits": 0}),
        ("window", good, {"window": -1}),
        ("out", good, {"out": good.float()}),
        ("sinks", good, {"sinks": torch.zeros(7, device="cuda")}),
        ("CUDA", good.cpu(), {}),
    ):
        with pytest.raises(ArgumentError, match=words):
            op.decode(q, made, **options)
