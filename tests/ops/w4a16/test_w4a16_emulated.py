"""The W4A16 kernels, run on the CPU from their CUDA text: y inside its bound, sums of integers exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import RESIDENT
from emulated_cases import cases
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear import multistage, small_batch, stream_k
from terrazzo.ops.tiles.calls import tile_boxes
from terrazzo.ops.w4a16 import QuantizedWeight, reference
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK
from w4a16_on_cpu import Program

from tests.gpu import oracles, test_parted_tiles_gpu
from tests.gpu.oracles import Spec

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
"""Every case; the default is one of each kind, on kernels that other tests compile too where there are such."""
F16, BF16, F32 = "float16", "bfloat16", "float32"
KINDS = ("integer", "random")


@pytest.fixture(autouse=True)
def weights_on_the_cpu(monkeypatch):
    monkeypatch.setattr(oracles, "DEVICE", "cpu")


def data(spec: Spec, m: int, kind: str, seed: int = 0) -> tuple[QuantizedWeight, torch.Tensor]:
    """The weight and x [m, k] of an oracle of tests/gpu/oracles.py."""
    rng = torch.Generator().manual_seed(seed + 1)
    x = torch.randint(-3, 4, (m, spec.k), generator=rng) if kind == "integer" else torch.randn(m, spec.k, generator=rng)
    return oracles.canonical.__wrapped__(spec, kind == "integer", seed), x.to(getattr(torch, spec.dtype))


def judge(y: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, numerics: str, kind: str, what: object) -> None:
    """No float32 sum of the integer data rounds, so that y has one right value."""
    ref = reference.gemm(x, weight, numerics)
    if kind == "integer":
        assert torch.equal(y, ref.to(y.dtype)), what
    bad = ~((y.double() - ref).abs() <= reference.forward_error_bound(x, weight, numerics))
    assert not bad.any(), f"{int(bad.sum())} of {y.numel()} wrong: {what}"


STREAM_K = {  # weight, m, numerics, schedule, (CTAs, shared tiles) of each launch
    "two row blocks": (
        Spec(448, 640, dtype=BF16), 61, "exact", StreamK(64, 2, 2, 4, 128), ((2, 0), (3, 2), (8, 2), (6, 2), (4, 2)),
    ),
    "ragged": (
        Spec(203, 651, 64, bias=True), 70, "exact", StreamK(64, 2, 1, 2, 128),
        ((4, 0), (3, 0), (3, 4), (3, 2), (7, 4), (8, 4), (12, 4), (16, 4), (20, 4)),
    ),
    "half sets": (
        Spec(450, 400, symmetric=True, dtype=BF16, bias=True), 200, "fused", StreamK(128, 4, 1, 3, 64),
        ((4, 0), (3, 4), (5, 4), (8, 4), (3, 1)),
    ),
    "half sets, 128 k": (
        Spec(300, 528, 32), 130, "exact", StreamK(128, 4, 1, 2, 128), ((2, 0), (3, 4), (4, 4), (8, 4), (3, 1)),
    ),
    "half sets of bf16": (
        Spec(256, 384, 64, dtype=BF16), 100, "exact", StreamK(128, 4, 1, 4, 64), ((1, 0), (3, 1), (2, 1)),
    ),
    "post, f32 scales": (
        Spec(200, 640, 64, scale=F32, bias=True), 33, "post", StreamK(32, 2, 1, 3, 128),
        ((4, 0), (3, 4), (8, 4), (12, 4), (16, 4), (3, 2)),
    ),
    "post, 80 tokens": (
        Spec(200, 640, 64, scale=F32, bias=True), 70, "post", StreamK(80, 2, 1, 3, 128), ((2, 0), (4, 2), (3, 2)),
    ),
    "post of bf16": (
        Spec(130, 512, 32, symmetric=True, dtype=BF16, scale=F16), 100, "post", StreamK(64, 1, 1, 3, 64),
        ((6, 0), (4, 6), (12, 6), (18, 6), (24, 6), (4, 2)),
    ),
    "post, a scale for each row": (
        Spec(67, 333, -1, dtype=BF16, scale=F32, bias=True), 20, "post", StreamK(16, 2, 1, 2, 128),
        ((2, 0), (3, 2), (4, 2), (6, 2)),
    ),
    "post, two row blocks": (
        Spec(260, 512), 16, "post", StreamK(16, 2, 2, 2, 128), ((2, 0), (3, 2), (4, 2), (6, 2), (8, 2)),
    ),
    "fused": (
        Spec(390, 512, 32), 16, "fused", StreamK(16, 3, 2, 2, 128), ((2, 0), (3, 2), (4, 2), (6, 2), (8, 2)),
    ),
    "fused, bf16": (
        Spec(130, 384, 64, dtype=BF16, bias=True), 40, "fused", StreamK(32, 1, 1, 2, 64),
        ((5, 0), (4, 6), (12, 6), (18, 6), (5, 3)),
    ),
    "a scale for each row": (
        Spec(192, 1024, -1, symmetric=True, dtype=BF16), 50, "exact", StreamK(64, 3, 1, 3, 128),
        ((1, 0), (2, 1), (3, 1), (4, 1), (7, 1), (8, 1)),
    ),
    "widest": (
        Spec(448, 640, 32), 300, "exact", StreamK(256, 2, 1, 4, 64), ((5, 0), (7, 8), (16, 8), (24, 8), (5, 3)),
    ),
    "slices of unlike size": (
        Spec(203, 651, 64, bias=True), 108, "exact", StreamK(112, 2, 1, 3, 128), ((2, 0), (6, 2), (8, 2), (5, 2)),
    ),
    "three units of 16 tokens": (
        Spec(300, 528, 32, dtype=BF16), 90, "exact", StreamK(48, 3, 1, 3, 128), ((4, 0), (8, 4), (12, 4), (7, 4)),
    ),
    "one wide tile": (
        Spec(130, 384, 64, symmetric=True), 150, "fused", StreamK(160, 2, 1, 3, 128), ((2, 0), (4, 2), (6, 2), (3, 2)),
    ),
    "clusters of a wide tile": (
        Spec(203, 651, 64, dtype=BF16), 190, "exact", StreamK(192, 2, 1, 3, 128, cluster=2), ((4, 2), (2, 0)),
    ),
    "half sets of 224 tokens": (
        Spec(130, 640, 128, bias=True), 220, "exact", StreamK(224, 2, 1, 4, 64), ((2, 0), (4, 2), (3, 2)),
    ),
    "two CTAs on an SM": (
        Spec(200, 640, 64, bias=True), 40, "exact", StreamK(32, 2, 1, 2, 64, per_sm=2), ((4, 0), (3, 4), (8, 4)),
    ),
    "raster": (
        Spec(200, 256, 128, symmetric=True), 100, "fused", StreamK(16, 1, 1, 2, 64, raster=2),
        ((5, 0), (5, 3), (9, 10), (28, 28), (56, 28)),
    ),
    "four warpgroups": (
        Spec(500, 640, 128), 16, "exact", StreamK(16, 4, 1, 3, 128), ((2, 0), (3, 2), (4, 2), (6, 2), (8, 2), (10, 2)),
    ),
    "clusters": (
        Spec(203, 651, 64, bias=True), 70, "exact", StreamK(64, 2, 1, 2, 128, cluster=2),
        ((8, 4), (4, 0), (6, 4), (4, 2)),
    ),
    "clusters of four": (
        Spec(300, 640, 32, dtype=BF16), 100, "exact", StreamK(128, 3, 1, 3, 128, cluster=4), ((8, 2), (4, 0), (4, 2)),
    ),
    "one row": (Spec(1, 32, 32), 3, "exact", StreamK(16, 1, 1, 2, 64), ((1, 0), (1, 1))),
}  # fmt: skip


def launches(program: Program, spec: Spec, m: int, numerics: str, partitions: tuple[tuple[int, int], ...]) -> None:
    """Each partition with some CTAs at once, with all, or one by one: then none meets those of its tile."""
    for seed, (ctas, shared) in enumerate(partitions):
        for kind, at_once in (("integer", (RESIDENT,)), ("random", (ctas, 1))):
            weight, x = data(spec, m, kind, seed)
            y, *others = (program.stream_k(x, weight.pack(), ctas, shared, resident) for resident in at_once)
            judge(y, x, weight, numerics, kind, (kind, ctas, shared))
            assert all(torch.equal(y, other) for other in others), f"bits depend on who adds: {ctas, shared}"


SHAPED = [name for name, case in STREAM_K.items() if case[3].block_tokens == 16]
"""Those of which W4A16 launches a kernel for each shape; of others one without a shape (test_generic_emulated.py)."""


@pytest.mark.parametrize("name", cases([*SHAPED, "clusters"], ("fused",)))
def test_stream_k(name, tmp_path):
    spec, m, numerics, schedule, partitions = STREAM_K[name]
    launches(Program(stream_k, schedule, spec, numerics, tmp_path), spec, m, numerics, partitions)


@pytest.mark.slow
def test_the_last_tile_fetches_the_lowest_box_that_holds_it(tmp_path):
    """A box that is too low leaves rows out, or its barrier waits for bytes that do not come."""
    spec, _, numerics, schedule, _ = STREAM_K["clusters"]
    program = Program(stream_k, schedule, spec, numerics, tmp_path, generic=True)
    assert tile_boxes(schedule.block_tokens) == [16, 32, 48, 64]
    for left in (1, 16, 17, 32, 33, 48, 49):
        weight, x = data(spec, 64 + left, "integer")
        judge(program.stream_k(x, weight.pack(), 4, 0), x, weight, numerics, "integer", left)


def smaller(case: test_parted_tiles_gpu.Case) -> test_parted_tiles_gpu.Case:
    """Two tiles of rows, two of tokens, six or seven units of k at most, as the emulator takes a second for each 150
    million products. Remainders stay, and CTAs with unequal shares of a tile."""
    two = lambda size, step: min(size, step + (size - 1) % step + 1)
    n, m = two(case.n, case.schedule.cta_blocks * 64), two(case.m, case.schedule.block_tokens)
    k = min(case.k, (5 + case.problem.units % 2) * 128 + (case.k - 1) % 128 + 1)
    among = tuple(sorted({min(each, 5) for each in case.among}))
    made, shared = replace(case, n=n, m=m, k=k, among=among, partitions=()), set()
    for grid, tiles in case.partitions:
        tiles = made.tiles if tiles < 0 else min(tiles, made.tiles)
        shared.add((min(grid, tiles * made.problem.units - 1 if tiles else made.tiles), tiles))
    return replace(made, partitions=tuple(sorted(shared - set(made.every()))))


@pytest.mark.slow
@pytest.mark.parametrize("case", test_parted_tiles_gpu.CASES, ids=lambda case: f"{case.n}-{case.k}-{case.m}")
def test_parted_tiles(case, tmp_path):
    few = smaller(case)
    assert few.schedule == case.schedule
    spec = Spec(few.n, few.k, few.group, dtype=few.dtype)
    generic = few.schedule.block_tokens > 16
    program = Program(stream_k, few.schedule, spec, few.numerics, tmp_path, generic=generic)
    launches(program, spec, few.m, few.numerics, few.every())


GROUPED = {  # weight, tokens of each expert, rows of nobody before and after, numerics, schedule, CTAs
    "rows of nobody": (Spec(200, 384, 64, bias=True), (7, 0, 33), (3, 6), "exact", StreamK(32, 2, 1, 2, 128), 7),
    "empty experts": (
        Spec(130, 272, 32, dtype=BF16), (0, 5, 0, 0, 40, 1, 0), (0, 0), "post", StreamK(16, 1, 2, 3, 64, raster=2), 4,
    ),
    "waves and shares": (
        Spec(320, 256, 128, symmetric=True, bias=True), (20, 30, 1, 16), (0, 0), "fused", StreamK(16, 1, 1, 2, 128), 9,
    ),
    "all shared": (Spec(64, 1280, 64, dtype=BF16), (9,), (0, 0), "exact", StreamK(16, 1, 1, 2, 128), 6),
    "no tokens": (Spec(64, 128, 64), (0, 0), (2, 3), "exact", StreamK(16, 1, 1, 2, 64), 3),
    "forty experts": (
        Spec(100, 256, 64), (0,) * 31 + (3, 17, 0, 0, 2, 0, 0, 0, 40), (0, 1), "exact", StreamK(64, 2, 1, 2, 64), 5,
    ),
    "half sets": (Spec(256, 384, 32), (130, 0, 20), (0, 0), "exact", StreamK(128, 4, 1, 2, 64), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(GROUPED, list(GROUPED)[:1]))
def test_grouped(name, tmp_path):
    spec, counts, (before, after), numerics, schedule, ctas = GROUPED[name]
    program = Program(stream_k, schedule, spec, numerics, tmp_path, experts=len(counts))
    offsets = torch.tensor([0, *counts]).cumsum(0).int() + before
    m = sum(counts) + before + after
    for kind in KINDS:
        _, x = data(spec, m, kind)
        experts = [data(spec, 0, kind, seed)[0] for seed in range(len(counts))]
        y = program.stream_k(x, GroupedWeight.stack([w.pack() for w in experts]).stacked, ctas, offsets)
        assert y[:before].isnan().all() and y[m - after :].isnan().all()
        for e, weight in enumerate(experts):
            rows = slice(int(offsets[e]), int(offsets[e + 1]))
            judge(y[rows], x[rows], weight, numerics, kind, (kind, f"expert {e}"))


MULTISTAGE_EXPERTS = {  # weight, tokens of each expert, rows of nobody before and after, numerics, schedule, target
    "rows of nobody": (
        Spec(200, 384, 64, bias=True), (7, 0, 33), (3, 6), "exact", Multistage(16, 4, 2, 3, kc=2), "sm_80",
    ),
    "blocks of one expert": (
        Spec(203, 395, 32, dtype=BF16, scale=F32, bias=True), (0, 70, 0, 33, 1), (0, 2), "post",
        Multistage(32, 4, 2, 2, raster=2), "sm_89",
    ),
    "forty experts": (
        Spec(100, 256, 64), (0,) * 31 + (3, 17, 0, 0, 2, 0, 0, 0, 40), (0, 1), "fused", Multistage(32, 4, 1, 2),
        "sm_80",
    ),
    "wide": (
        Spec(320, 256, 128, symmetric=True), (130, 0, 20), (0, 0), "exact", Multistage(128, 8, 2, 2, token_warps=2),
        "sm_80",
    ),
    "no tokens": (Spec(64, 128, 64), (0, 0), (2, 3), "exact", Multistage(16, 4, 1, 2), "sm_80"),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(MULTISTAGE_EXPERTS, list(MULTISTAGE_EXPERTS)[:1]))
def test_grouped_on_mma_sync(name, tmp_path):
    spec, counts, (before, after), numerics, schedule, target = MULTISTAGE_EXPERTS[name]
    program = Program(multistage, schedule, spec, numerics, tmp_path, target=target, experts=len(counts))
    offsets = torch.tensor([0, *counts]).cumsum(0).int() + before
    m = sum(counts) + before + after
    for kind in KINDS:
        _, x = data(spec, m, kind)
        experts = [data(spec, 0, kind, seed)[0] for seed in range(len(counts))]
        stacked = GroupedWeight.stack([w.pack() for w in experts]).stacked
        y = program.multistage(x, stacked, offsets)
        assert y[:before].isnan().all() and y[m - after :].isnan().all()
        assert torch.equal(program.multistage(x, stacked, offsets).view(torch.int16), y.view(torch.int16))
        for e, weight in enumerate(experts):
            rows = slice(int(offsets[e]), int(offsets[e + 1]))
            judge(y[rows], x[rows], weight, numerics, kind, (kind, f"expert {e}"))


SMALL_BATCH = {  # weight, m, numerics, schedule, target
    "one tile": (Spec(448, 640), 4, "post", SmallBatch(1, 1, 28, 5, 1, 3), "sm_90a"),
    "split k": (Spec(130, 651, 64, bias=True), 11, "post", SmallBatch(2, 2, 3, 2, 2, 2), "sm_90a"),
    "groups of 32": (Spec(203, 640, 32, dtype=BF16, bias=True), 16, "exact", SmallBatch(2, 1, 4, 2, 2, 2), "sm_90a"),
    "fused": (Spec(70, 912, symmetric=True, bias=True), 5, "fused", SmallBatch(1, 3, 2, 2, 1, 2), "sm_80"),
    "f32 scales": (
        Spec(67, 333, -1, dtype=BF16, scale=F32, bias=True), 1, "post", SmallBatch(1, 1, 1, 2, 8, 3), "sm_90a",
    ),
    "bf16 on sm_80": (
        Spec(96, 645, 32, dtype=BF16, scale=F16), 13, "post", SmallBatch(2, 2, 2, 2, 4, 2), "sm_80",
    ),
    "fused, bf16": (Spec(130, 400, 64, dtype=BF16), 8, "fused", SmallBatch(1, 2, 4, 2, 3, 3), "sm_90a"),
    "a scale for each row": (Spec(192, 1024, -1), 9, "exact", SmallBatch(2, 2, 5, 4, 1, 4), "sm_90a"),
    "joined": (Spec(203, 651, 64, bias=True), 5, "post", SmallBatch(1, 2, 3, 2, 2, 2, joined=True), "sm_90a"),
    "joined, two tiles": (
        Spec(130, 1040, 32, dtype=BF16), 13, "exact", SmallBatch(2, 8, 1, 1, 3, 2, joined=True), "sm_90a",
    ),
    "joined, few rows": (Spec(17, 640), 8, "fused", SmallBatch(1, 4, 2, 1, 1, 2, joined=True), "sm_90a"),
    "one row of x": (Spec(130, 1035, 64, bias=True), 1, "post", SmallBatch(1, 1, 3, 4, 2, 2, tokens=1), "sm_90a"),
    "three of four rows": (
        Spec(203, 1100, 32, dtype=BF16), 3, "post", SmallBatch(1, 2, 2, 3, 1, 2, joined=True, tokens=4), "sm_90a",
    ),
    "eleven of twelve rows": (Spec(67, 640, 64), 11, "exact", SmallBatch(2, 2, 2, 2, 2, 2, tokens=12), "sm_90a"),
    "two rows": (Spec(130, 400, bias=True), 2, "fused", SmallBatch(1, 2, 2, 2, 1, 2, tokens=2), "sm_80"),
    "symmetric": (Spec(64, 768, 64, symmetric=True), 7, "post", SmallBatch(1, 1, 2, 6, 2, 2), "sm_80"),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(SMALL_BATCH, ("three of four rows",)))
def test_small_batch(name, tmp_path):
    spec, m, numerics, schedule, target = SMALL_BATCH[name]
    program = Program(small_batch, schedule, spec, numerics, tmp_path, target=target)
    for kind in KINDS:
        weight, x = data(spec, m, kind)
        judge(program.small_batch(x, weight.pack()), x, weight, numerics, kind, kind)


MULTISTAGE = {  # weight, m, numerics, schedule
    "split k": (Spec(200, 640, 64, bias=True), 37, "exact", Multistage(32, 4, 2, 3, kc=2)),
    "ragged": (
        Spec(131, 333, 32, dtype=BF16, scale=F32, bias=True), 70, "post", Multistage(64, 4, 2, 4, kc=3),
    ),
    "token warps": (
        Spec(320, 512, symmetric=True), 150, "fused", Multistage(128, 8, 2, 3, token_warps=2, raster=16),
    ),
    "a scale for each row": (Spec(192, 400, -1, dtype=BF16), 130, "exact", Multistage(128, 4, 2, 3)),
    "f16 scales of bf16": (
        Spec(256, 384, 64, symmetric=True, dtype=BF16, scale=F16), 33, "post", Multistage(64, 8, 1, 2, token_warps=2),
    ),
    "tall": (Spec(300, 256, 32, dtype=BF16), 140, "exact", Multistage(128, 8, 2, 3, raster=1)),
    "post, split k": (Spec(128, 640, bias=True), 32, "post", Multistage(32, 4, 2, 4, kc=5)),
    "post, a scale for each row": (Spec(70, 136, -1, scale=BF16), 50, "post", Multistage(32, 4, 1, 2)),
    "fused, bf16": (Spec(128, 384, dtype=BF16, bias=True), 64, "fused", Multistage(64, 4, 2, 3, kc=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(MULTISTAGE, list(MULTISTAGE)[:1]))
def test_multistage(name, tmp_path):
    spec, m, numerics, schedule = MULTISTAGE[name]
    program = Program(multistage, schedule, spec, numerics, tmp_path, target="sm_80")
    for kind in KINDS:
        weight, x = data(spec, m, kind)
        judge(program.multistage(x, weight.pack()), x, weight, numerics, kind, kind)
