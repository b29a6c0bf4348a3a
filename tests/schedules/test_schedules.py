"""Schedules: legal by construction on every target, and a partition that covers every (tile, k) exactly once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.tiles.resident import resident_rows
from terrazzo.schedules import linear_spaces, multistage, rows, small_batch, stream_k, w4ax
from terrazzo.schedules.models import MEASURED, MODELS
from terrazzo.schedules.problem import TOKENS_PER_TILE, Gemm

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a")
SHAPES = sorted({(layer.n, layer.k) for model in MEASURED for layer in MODELS[model]})
problems = st.builds(
    Gemm,
    n=st.integers(1, 60000),
    k=st.integers(1, 30000),
    groups_per_128=st.sampled_from((1, 2, 4)),
    record_bytes=st.sampled_from((128, 192, 320)),
)


@settings(max_examples=60, deadline=None)
@given(problem=problems, m=st.integers(1, small_batch.MAX_TOKENS), arch=st.sampled_from(TARGETS))
def test_small_batch_schedules_are_legal(problem, m, arch):
    target = Target.parse(arch)
    s = small_batch.choose(problem, target, m)
    assert s.launch_bytes(problem, target) <= target.smem_per_block
    assert s.registers(problem) * s.warps * 32 <= target.registers_per_sm
    assert s.kc * s.nc <= target.sms and s.nc % s.cluster == 0
    assert s.token_tiles * TOKENS_PER_TILE >= m
    assert s.x_rows == next(rows for rows in (1, 2, 4, 8, 16) if rows >= m)
    assert 1 <= s.warps <= problem.units // s.kc  # no warp without work: the program's loops run at least once


@pytest.mark.parametrize(
    ("tiles", "tokens", "m", "said"),
    [
        (1, 4, 4, ""),
        (1, 4, 5, "does not hold 5"),
        (1, 0, 8, ""),
        (1, 9, 4, "are not those"),
        (2, 8, 8, "are not those"),
    ],
)
def test_small_batches_hold_the_tokens_that_they_say(tiles, tokens, m, said):
    target, problem = Target.parse("sm_90a"), Gemm(4096, 4096, 1, 192)
    s = small_batch.SmallBatch(tiles, 1, 128, 8, 1, 2, tokens=tokens)
    found = linear_spaces.small_batch_refusal(s, problem, target, m)
    assert said in found and bool(said) == bool(found)
    if "those" in said:
        with pytest.raises(ArgumentError, match="tokens"):
            resident_rows(tiles, tokens)


def test_fewer_rows_of_x_leave_room():
    """kc = 2 for 4 tokens of 28672 channels, which eight rows of x would not leave room for."""
    target, problem = Target.parse("sm_90a"), Gemm(8192, 28672, 1, 192)
    sizes = [small_batch.SmallBatch(1, 2, 66, 14, 2, 2, tokens=rows).smem_bytes(problem) for rows in (1, 4, 0)]
    assert sizes[0] < sizes[1] <= target.smem_per_block < sizes[2]


def test_an_sm_for_each_cta_must_fit_beside_the_sums_of_pairs():
    """A long inbox beside little x: what fits by itself does not with what keeps a second CTA from the SM."""
    target, problem = Target.parse("sm_90a"), Gemm(400_000, 512, 1, 192)
    s = small_batch.SmallBatch(1, 2, 66, 2, 4, 2, joined=True)
    assert s.smem_bytes(problem) <= target.smem_per_block < s.launch_bytes(problem, target)
    assert "shared memory" in linear_spaces.small_batch_refusal(s, problem, target, 8)
    ampere = Target.parse("sm_80")  # launches do not overlap there
    assert small_batch.SmallBatch(1, 1, 108, 2, 4, 2).launch_bytes(problem, ampere) < ampere.smem_per_sm // 2


def test_small_batch_refuses_wide_batches():
    with pytest.raises(ArgumentError, match="1..16"):
        small_batch.choose(Gemm(64, 128, 1, 192), Target.parse("sm_90a"), 17)


def shares(s, problem, part, m):
    """(tile, first unit, last unit) of every segment, as the program's `plan` and `segment` compute them."""
    units, slots = problem.units, part.grid
    tiles = -(-m // s.block_tokens) * -(-problem.row_blocks // s.cta_blocks)
    for cid in range(slots):
        r = slots - 1 - cid
        first, last = r * part.shared * units // slots, (r + 1) * part.shared * units // slots
        shared = (last - 1) // units - first // units + 1 if last > first else 0
        for seg in range(shared):
            tile = first // units + seg
            yield cid, tile, max(first - tile * units, 0), min(last - tile * units, units)
        for tile in range(part.shared + r, tiles, slots):
            yield cid, tile, 0, units


@settings(max_examples=80, deadline=None)
@given(problem=problems, m=st.integers(9, 3000))
def test_stream_k_covers_every_unit_once(problem, m):
    target = Target.parse("sm_90a")
    s = stream_k.choose(problem, target, m)
    part = stream_k.partition(s, problem, target, m)
    assert 1 <= part.grid <= target.sms
    tiles = -(-m // s.block_tokens) * -(-problem.row_blocks // s.cta_blocks)
    assert 0 <= part.shared <= tiles
    held: dict[int, list[tuple[int, int, int]]] = {}
    for cid, tile, k0, k1 in shares(s, problem, part, m):
        assert k0 < k1
        held.setdefault(tile, []).append((k0, k1, cid))
    assert sorted(held) == list(range(tiles))
    slots = part.grid
    for tile, parts in held.items():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == problem.units
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        head = parts[0][2]
        # the head awaits the next lower CTAs, as many as the program counts
        assert [cid for _, _, cid in parts[1:]] == [head - 1 - i for i in range(len(parts) - 1)]
        if len(parts) > 1:
            count = ((tile + 1) * problem.units * slots - 1) // (part.shared * problem.units) - (slots - 1 - head)
            assert count == len(parts) - 1


@pytest.mark.parametrize("m", [17, 32, 64, 100, 128, 200, 256, 1000, 4096])
def test_stream_k_schedules_fit(m):
    target = Target.parse("sm_90a")
    for n, k in SHAPES:
        for groups, record in ((1, 192), (4, 320)):
            problem = Gemm(n, k, groups, record, scales="post" if groups == 4 else "fold")
            s = stream_k.choose(problem, target, m)
            assert s.smem_bytes(problem) <= target.smem_per_block and s.stages >= 3


def test_the_driver_keeps_a_kibibyte_of_each_cta():
    """228 KiB of an SM are 227 KiB for one CTA, and 113 KiB for each of two."""
    hopper, schedule = Target.parse("sm_90a"), stream_k.of_tile(Gemm(4096, 4096, 1, 192), (64, 1, 1))
    rooms = [stream_k.room(replace(schedule, per_sm=ctas), hopper) for ctas in (1, 2, 3, 4)]
    assert rooms == [227 << 10, 113 << 10, 75 << 10, 56 << 10]

    gemm, ampere = Gemm.of_blocks(4096, 4096, 0), Target.parse("sm_80")
    two = replace(w4ax.choose_persistent(gemm, ampere, 16), ctas=2)
    fits = replace(ampere, smem_per_sm=2 * (two.smem_bytes(gemm) + 1024))
    for target, ctas in ((fits, 2), (replace(fits, smem_per_sm=fits.smem_per_sm - 1), 1)):
        refused = linear_spaces.of(gemm).refusal("persistent", two, target, 16)
        assert refused == ("" if ctas == 2 else "2 CTAs do not fit an SM's shared memory")
        assert w4ax.choose_persistent(gemm, target, 16).ctas == ctas


@pytest.mark.parametrize("arch", TARGETS[:-1])
@pytest.mark.parametrize("m", [17, 33, 64, 65, 128, 129, 5000])
def test_multistage_schedules_fit(arch, m):
    target = Target.parse(arch)
    for n, k in SHAPES:
        for scales, symmetric in (("fold", False), ("fold", True), ("post", False)):
            problem = Gemm(n, k, 4, 320, scales=scales, symmetric=symmetric)
            s = multistage.choose(problem, target, m)
            assert s.smem_bytes(problem) <= target.smem_per_block and s.rows % 64 == 0
            workspace, semaphores = multistage.launch_sizes(s, problem, m)
            assert len(workspace) == 5 and semaphores[0] <= 4096


@pytest.mark.parametrize("k", [16400, 20000, 24576, 32768])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_ctas_that_share_a_row_have_a_thread_for_each_vector(k, parts):
    s, vectors = rows.choose(k, Target.parse("sm_90a"), 1, parts=parts), -(-k // 16) * 2
    assert s.parts == parts and s.vectors == s.rows == 1 and s.resident == 32 * s.warps
    assert (s.warps - 1) * 32 * parts < vectors <= s.warps * 32 * parts


PAIRS = {  # W4A16 weight -> us of 16 tokens on an H200, the fastest recorded of small_batch and of stream_k
    (4096, 4096): (7.00, 6.21), (6144, 4096): (8.63, 8.34), (5120, 5120): (11.34, 8.70), (6656, 6656): (16.02, 12.12),
    (4096, 11008): (13.19, 11.86), (12288, 4096): (13.09, 11.86), (7168, 7168): (16.15, 12.84),
    (4096, 14336): (14.30, 13.73), (9216, 7168): (18.62, 15.89), (8192, 8192): (15.40, 14.92),
    (5120, 13824): (18.69, 15.88), (15360, 5120): (20.09, 16.38), (10240, 8192): (18.29, 17.76),
}  # fmt: skip


def test_sixteen_tokens_get_the_program_that_was_faster():
    target = Target.parse("nvidia/nvidia-h200")
    for (n, k), (small, tiles) in PAIRS.items():
        assert small_batch.serves(Gemm(n, k, 1, 192), target, 16) == (small < tiles), (n, k)
