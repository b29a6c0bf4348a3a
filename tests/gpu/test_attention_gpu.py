"""Decode attention on the GPU against float64 over the dequantized cache: formats, layouts, shapes, options, races."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, built, check, fuzz, run
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import entry

FUZZ_CASES = 320
RAGGED = (300, 0, 1, 129, 512, 15)
# every format in both page kinds or in one of them, in turn; every pair of formats is a kernel of its own
PAIRS = {
    ("float16", "float16"): (0, 128),
    ("int8", "int8"): (0, 128),
    ("int4", "int4"): (0, 128),
    ("int4_channel128", "int4"): (0, 128),
    ("bfloat16", "bfloat16"): (128,),
    ("int2", "int2"): (0,),
    ("int4_channel64", "int2"): (64,),
    ("int4_channel32", "int4"): (0,),
    ("int2_channel128", "int2"): (128,),
    ("int2_channel64", "int8"): (0,),
    ("int2_channel32", "int4"): (64,),
    ("int8_static", "int8_static"): (0,),
    ("fp8", "fp8"): (128,),
    ("int8", "int4"): (0,),
    ("float16", "int2"): (128,),
}


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


FORMATS = {
    f"{pair[0]}-{pair[1]}-{page}": variants(
        Case(*pair, lengths=RAGGED, page=page, dtype="bfloat16" if pair[0] == "bfloat16" else "float16",
             style=("few", "many")[i % 2])
    )
    for i, (pair, page) in enumerate((pair, page) for pair, pages in PAIRS.items() for page in pages)
}  # fmt: skip
WIDE = tuple(  # 16 rows share each conversion
    Case(k, v, group=g, q_len=q, lengths=(300, 8, 3, 77), style=style, page=page)
    for k, v, style, page in (
        ("int4", "int4", "few", 0), ("float16", "float16", "many", 0), ("int8", "int8", "few", 128),
        ("int4_channel128", "int4", "many", 128), ("int2_channel64", "int2", "few", 64), ("fp8", "fp8", "few", 0),
    )
    for q, g in ((4, 4), (8, 8), (5, 7), (1, 12))
)  # fmt: skip
ON_WGMMA = (  # 16 to 64 rows of a warpgroup
    *(
        Case(k, v, group=g, q_len=q, lengths=lengths, page=page, style="warpgroups", splits=splits, sharp=sharp)
        for k, v, page in (
            ("int4", "int4", 128), ("int2", "int2", 0), ("int8", "int8", 64), ("float16", "float16", 128),
            ("int8", "int4", 0), ("fp8", "fp8", 64), ("int8_static", "int8_static", 0), ("int4_channel128", "int4", 0),
            ("int4_channel64", "int2", 64), ("int2_channel128", "int2", 128),
        )
        for q, g, lengths, splits, sharp in (
            (4, 4, RAGGED, 0, 1.0), (1, 12, RAGGED, 0, 1.0), (2, 3, RAGGED, 0, 1.0), (8, 7, RAGGED, 0, 1.0),
            (4, 4, (2100, 700), 3, 5.0), (4, 4, (9000,), 16, 1.0),
        )
    ),
    *(Case(group=g, q_len=8, lengths=RAGGED, page=64, style="warpgroups") for g in (4, 6, 12)),
    *(
        Case(k, v, group=g, head_dim=d, lengths=RAGGED, page=page, style="warpgroups")
        for k, v, g, d, page in (
            ("int4", "int4", 40, 64, 0), ("int8", "int4", 16, 256, 0), ("int2", "int2", 12, 256, 64),
        )
    ),
    *(
        Case(k, v, group=12, lengths=RAGGED, page=page, residual=r, dtype=dtype, style="warpgroups")
        for k, v, page, r, dtype in (
            ("int4", "int4", 0, 64, "bfloat16"), ("bfloat16", "bfloat16", 128, -1, "bfloat16"),
            ("int4", "int4", 128, 128, "float16"),
        )
    ),
    *(
        Case(k, "int4", softcap=cap, window=window, sinks=sinks, lengths=(300, 0, 7, 900), q_len=4, page=page, group=g,
             style="warpgroups")
        for k, cap, window, sinks, page, g in (
            ("int4", 5.0, 0, False, 0, 4), ("int8", 0.0, 33, True, 128, 8), ("int4_channel64", 5.0, 100, True, 64, 4),
            ("int4", 0.0, 200, False, 128, 4),
        )
    ),
)  # fmt: skip
SHAPES = {
    "q_len": tuple(Case(q_len=n, group=g, lengths=(300, 8, 3, 77)) for n in (2, 3, 5, 8) for g in (1, 2, 4)),
    "16 rows": WIDE,
    "rows on wgmma": ON_WGMMA,
    "head_dim 64": tuple(
        Case(k, v, head_dim=64, lengths=RAGGED, page=page, style=style, dtype=dtype)
        for k, v, page, style, dtype in (
            ("float16", "int8", 32, "few", "float16"), ("int8", "float16", 0, "many", "bfloat16"),
            ("int4", "int2", 64, "many", "float16"), ("int4_channel64", "int4", 0, "few", "float16"),
        )
    ),
    "head_dim 256": tuple(
        Case(k, v, head_dim=256, lengths=RAGGED, group=g, page=page, style=style, dtype=dtype)
        for k, v, page, style, dtype in (
            ("float16", "float16", 0, "few", "float16"), ("int8", "int4", 128, "many", "float16"),
            ("int4", "int4", 0, "few", "bfloat16"), ("int4_channel128", "int4", 0, "many", "float16"),
        )
        for g in (4, 12)
    ),
    "bfloat16 queries": tuple(
        Case(k, v, dtype="bfloat16", lengths=RAGGED, page=page, style=style)
        for k, v, page, style in (
            ("float16", "float16", 32, "few"), ("int8", "int8", 0, "many"), ("int4_channel32", "int4", 64, "few"),
        )
    ),
    "page sizes": tuple(Case(page=page, lengths=RAGGED, style="many") for page in (16, 256)),
    "residual": tuple(
        Case(k, v, residual=r, lengths=RAGGED, page=p, style=style, group=g)
        for k, v, r, p, style, g in (
            ("int4", "int4", 64, 0, "few", 4), ("int8", "int4", 128, 128, "many", 4),
            ("int4", "int8", 32, 16, "few", 12), ("int4", "int4", 48, 0, "few", 4),
        )
    ),
    "rotated": tuple(
        case
        for k, v, page, style, residual, dtype in (
            ("int4_hadamard", "int4", 128, "few", 0, "float16"),
            ("int4_hadamard", "int4", 0, "many", 128, "bfloat16"),
            ("int2_hadamard", "int2_hadamard", 128, "few", 128, "float16"),
        )
        for case in variants(
            Case(k, v, lengths=RAGGED, page=page, style=style, residual=residual, dtype=dtype)
        )
    ),
    "rotated rows on wgmma": tuple(
        Case(k, v, group=g, q_len=q, lengths=RAGGED, page=128, style="warpgroups", residual=residual)
        for k, v, residual in (("int4_hadamard", "int4", 128), ("int2_hadamard", "int2_hadamard", 0))
        for q, g in ((4, 4), (1, 12), (8, 7))
    ),
    "ring": tuple(
        replace(case, lengths=lengths)
        for k, v, page, style, residual, sink, dtype in (
            ("int4_hadamard", "int4", 128, "few", 128, 0, "float16"),
            ("int2_hadamard", "int2_hadamard", 128, "many", 128, 16, "bfloat16"),
            ("int4", "int4", 0, "few", 64, 16, "float16"), ("int8", "int4", 64, "many", 16, 16, "float16"),
        )
        for case in variants(
            Case(k, v, page=page, style=style, residual=residual, sink_tokens=sink, dtype=dtype)
        )
        for lengths in (RAGGED, (16, 127, 128, 143, 144, 1000))
    ),
    "ring, rows on wgmma": tuple(
        Case(k, v, group=g, q_len=q, lengths=lengths, page=128, style="warpgroups", residual=128, sink_tokens=sink)
        for k, v, sink in (("int4_hadamard", "int4", 0), ("int2_hadamard", "int2_hadamard", 16))
        for q, g in ((4, 4), (1, 12), (8, 7))
        for lengths in (RAGGED, (16, 127, 128, 143, 144, 1000))
    ),
    "ring, balanced": tuple(
        Case("int4_hadamard", "int4", residual=128, sink_tokens=16, balanced=True, page=128, style="chosen", q_len=q,
             group=g, window=window, lengths=lengths)
        for q, g, window, lengths in (
            (1, 4, 0, (40, 9000, 0, 700, 1)), (2, 7, 500, (20, 2100, 5000)), (1, 1, 0, (*range(0, 138), 900)),
        )
    ),
    "rotated, options and sizes": (
        Case(
            "int4_hadamard", "int2_hadamard", residual=0, softcap=5.0, window=100, sinks=True, lengths=(300, 0, 7),
            q_len=4,
        ),
        *variants(
            Case("int4_hadamard", "int2_hadamard", residual=0, head_dim=64, lengths=RAGGED, page=64, dtype="bfloat16")
        ),
        Case("int2_hadamard", "int4_hadamard", residual=0, head_dim=256, lengths=RAGGED, group=12),
        Case(
            "int4_hadamard", "int4", residual=0, balanced=True, page=128, style="chosen", lengths=(40, 9000, 0, 700, 1)
        ),
    ),
    "storage that ends inside a stage": (Case("int2", "int2", lengths=(257, 1)), Case(lengths=(17, 33, 49))),
    "options": tuple(
        Case(k, "int4", softcap=cap, window=window, sinks=sinks, lengths=(300, 0, 7), q_len=2, page=page, group=g)
        for k, cap, window, sinks, page, g in (
            ("int4", 5.0, 0, False, 0, 4), ("int8", 0.0, 33, True, 128, 4), ("int4_channel64", 5.0, 100, True, 0, 4),
            ("int4", 5.0, 33, True, 128, 8),
        )
    ),
    "cp.async": tuple(  # the copies of sm_80, as PTX
        case
        for k, v, page, style, residual in (
            ("int4", "int4", 0, "few", -1), ("int4_channel64", "int2", 64, "many", -1),
            ("float16", "float16", 128, "few", -1), ("int8", "int8", 0, "many", 64),
        )
        for case in variants(Case(k, v, page=page, lengths=RAGGED, style=style, residual=residual, target="sm_80"))
    ),
    "balanced": tuple(
        replace(case, q_len=q, group=g, window=window, lengths=lengths)
        for case in (
            Case(balanced=True, style="chosen"), Case("float16", "float16", balanced=True, page=128, style="chosen"),
            Case("int4_channel128", "int4", balanced=True, page=128, sinks=True, style="chosen"),
            Case("int2_channel64", "int2", balanced=True, softcap=5.0, style="chosen", dtype="bfloat16"),
            Case("int8", "int4", balanced=True, residual=64, page=64, style="few"),
            Case("int2", "int2", balanced=True, head_dim=64, style="many"),
            Case("fp8", "fp8", balanced=True, head_dim=256, style="chosen"),
            Case(balanced=True, page=64, style="chosen", target="sm_80"),
        )
        for q, g, window, lengths in (
            (1, 4, 0, (40, 9000, 0, 700, 1)), (4, 4, 0, (3000, 4, 129)), (2, 7, 500, (20, 2100, 5000)),
            (1, 1, 0, (*range(0, 138), 900)), (1, 12, 0, (700, 3)),
        )
    ),
    "chosen schedules": (
        Case(kv_heads=8, lengths=tuple(range(1, 400, 9)), style="chosen"),
        Case(kv_heads=8, group=4, lengths=(9000, 77), q_len=4, style="chosen"),
        Case("float16", "float16", kv_heads=8, group=8, lengths=(9000, 20000), q_len=4, style="chosen"),
        Case("int4_channel128", "int4", kv_heads=4, lengths=(5000, 130, 0), style="chosen"),
    ),
}  # fmt: skip
POOL = [case for cases in (*FORMATS.values(), *SHAPES.values()) for case in cases]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_fuzz:
        given = metafunc.config.getoption("fuzz_cases", None)
        cases = fuzz(int(os.environ.get("TERRAZZO_FUZZ_CASES", FUZZ_CASES)) if given is None else given, POOL)
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


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in FORMATS.items()])
def test_formats(cases):
    run_all(cases)


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in SHAPES.items()])
def test_shapes_and_options(cases):
    run_all(cases)


def test_fuzz(cases):
    run_all(cases)


RACE = (  # without clusters, in clusters of eight and sixteen that hold all splits, and of two
    Case(kv_heads=8, lengths=(4096,) * 4, splits=17),
    Case("int4_channel128", "int4", kv_heads=8, lengths=(4000,) * 4, splits=9),
    Case("float16", "float16", kv_heads=8, lengths=(2048,) * 4, splits=8),
    Case("int2", "int2", kv_heads=8, lengths=(4096,) * 4, splits=16, style="many"),
    Case("int4", "int4", kv_heads=8, lengths=(4096,) * 4, splits=22, q_len=4),
    Case("int4_channel128", "int4", kv_heads=8, lengths=(4000,) * 4, splits=9, q_len=4, page=128, style="many"),
    Case("int2", "int2", kv_heads=8, lengths=(4096,) * 4, splits=8, q_len=8, style="warpgroups"),
    Case("int8", "int8", kv_heads=8, lengths=(4096,) * 4, splits=5, q_len=8, page=64, style="warpgroups"),
    Case("int4", "int4", kv_heads=8, lengths=(300, 9000, 4096, 4096, 40), balanced=True, style="chosen"),
    Case("float16", "float16", kv_heads=8, lengths=(6000, 1, 4096), q_len=4, balanced=True, style="chosen"),
)


@contextmanager
def partial_results(monkeypatch):
    """Buffers of partial results, f32 [B, Y, P, rows, D] and [B, Y, P, cluster * rows], of every decode inside; NaN."""
    original, found = torch.empty, []

    def empty(*size, **options):
        made = original(*size, **options)
        if len(size) in (4, 5) and made.dtype == torch.float32 and made.is_cuda:
            found.append(made.fill_(float("nan")))
        return made

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        yield found


@pytest.mark.parametrize(
    "cases", [pytest.param((case,), id=f"{case.k} q{case.q_len} {case.splits or len(case.lengths)}") for case in RACE]
)
def test_partial_sums_repeat_over_200_launches_of_several_waves(cases, monkeypatch):
    """A stage refilled before it was read shows up as a partial sum that differs now and then."""
    case = cases[0]
    q, first, lse, _ = run(case)
    with partial_results(monkeypatch) as wanted:
        entry.decode(q, built(case), **case.options())
    unwritten = wanted[1][:, :, :, : min(case.rows, 8)].isnan()
    assert len(wanted) == 2
    if case.balanced:  # sequences of one split have no partial results, and nobody takes the last places
        assert unwritten.any() and not unwritten.all()
    else:
        assert unwritten.all() if case.plan().partials == 1 else not unwritten.any()
    noise = torch.empty(1 << 24, device="cuda")
    for launch in range(200):
        if launch % 3 == 0:
            noise.normal_()  # another load on the memory system
        again = torch.full_like(lse, float("nan"))
        with partial_results(monkeypatch) as found:
            y = entry.decode(q, built(case), lse=again, **case.options())
        for mine, theirs in zip(found, wanted):
            off = int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())
            assert not off, f"launch {launch}: {off} partial results differ; {case.repro}"
        assert torch.equal(y, first) and torch.equal(again, lse), f"launch {launch} differs; {case.repro}"
    check(case)


@pytest.mark.parametrize(
    "cases",
    [(Case(lengths=(300, 77)),), (Case(lengths=(5000, 77, 300, 4000), balanced=True, style="chosen", page=64),)],
    ids=["even", "balanced"],
)
def test_a_captured_graph_reads_lengths_from_the_device(cases):
    case = cases[0]
    q, _, lse, _ = run(case)
    made = built(case)
    before = made.lengths.clone()
    graph, y = torch.cuda.CUDAGraph(), torch.empty_like(q)
    options = case.options()
    entry.decode(q, made, out=y, lse=lse, **options)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        entry.decode(q, made, out=y, lse=lse, **options)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            entry.decode(q, made, out=y, lse=lse, **options)
    try:
        for _ in range(3):
            made.lengths.copy_(made.lengths.roll(1).clamp(max=before) - 1)
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, entry.decode(q, made, **options))
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
        ("splits", good, {"splits": 2, "balanced": True}),
        ("balanced", good, {"balanced": 1}),
        ("window", good, {"window": -1}),
        ("out", good, {"out": good.float()}),
        ("sinks", good, {"sinks": torch.zeros(7, device="cuda")}),
        ("CUDA", good.cpu(), {}),
    ):
        with pytest.raises(ArgumentError, match=words):
            entry.decode(q, made, **options)
