"""The cost model of tiles and their division over SMs: what it may choose, and how its choices did on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.schedules import grouped, linear_spaces, stream_k, tile_costs
from terrazzo.schedules.problem import Gemm

DATA = Path(__file__).parents[1] / "data/tuning"
TILES, PARTITIONS, PAIRS, BUCKETS, WIDTHS = (
    json.loads((DATA / f"{name}_h200.json").read_text())
    for name in ("tiles", "partitions", "pairs", "buckets", "widths")
)
TARGET, H200 = Target.parse("sm_90a"), Target.parse("nvidia/nvidia-h200")
POWERS = (16, 32, 64, 128, 256)
"""Tokens of the tiles that there were before those of WIDTHS."""
TILE_FIELDS = ("block_tokens", "warpgroups", "row_blocks", "cluster")


@settings(max_examples=200, deadline=None)
@given(tiles=st.integers(1, 3000), units=st.integers(1, 300), slots=st.integers(1, 200))
def test_partitions_leave_no_share_without_work(tiles, units, slots):
    every = list(tile_costs.partitions(tiles, units, slots))
    assert every and every[0].shared == 0
    for part in every:
        assert 1 <= part.grid <= slots and 0 <= part.shared <= tiles
        assert part.grid <= tiles or part.shared, "a CTA without a tile"
        assert part.grid <= part.shared * units or not part.shared
        if tile_costs.parts_alike(tiles, units, part):
            assert part.grid // tiles <= min(units, tile_costs.MOST_SLICES)


def chosen(op: str, n: int, k: int, m: int, target: Target = TARGET, widths: tuple[int, ...] = stream_k.BLOCK_TOKENS):
    problem = problem_of(op, n, k)
    schedule = stream_k.choose(problem, target, m, None if op == "w4ax" else widths)
    return schedule, stream_k.partition(schedule, problem, target, m)


def problem_of(op: str, n: int, k: int) -> Gemm:
    return {
        "w4a16": Gemm(n, k, 1, 192),
        "w4a8": Gemm.of_bytes(n, k, 64),
        "w4a8_fp8": Gemm.of_bytes(n, k, 128, activations="e4m3"),
        "w4ax": Gemm.of_blocks(n, k, -(-k // 128) // 4, two_level=True),
    }[op]


def regret(times: dict[str, float], key: str) -> float:
    return times[key] / min(times.values())


@pytest.mark.parametrize("m", [64, 128, 256])
def test_ctas_of_an_sm_share_its_tensor_cores(m):
    """Two tiles of 64 rows on an SM are not predicted faster than one of 128, whose products are as many."""
    problem, target = Gemm(6144, 4096, 1, 64), Target.parse("nvidia/nvidia-h200")
    two, one = (
        stream_k.us(stream_k.StreamK(64, 2 // per_sm, 1, 5, 128, per_sm=per_sm), problem, target, m)
        for per_sm in (2, 1)
    )
    assert 0.9 * one <= two <= 1.5 * one


@pytest.mark.parametrize("op", ["w4a16", "w4a8"])
def test_tiles_beside_the_fastest_that_was_measured(op):
    """Tiles that the model chooses take 1 % more than the best of all that were timed, and none 10. W4A16 of more than
    128 tokens is left out: what is best in a short sweep is not once the clock follows the power."""
    found = []
    for row in TILES[op]:
        if op == "w4a16" and row["m"] > 128:
            continue
        s, _ = chosen(op, row["n"], row["k"], row["m"], widths=POWERS)
        if getattr(s, "cluster", 1) > 1:  # pairs of CTAs were not timed then: the next test
            continue
        found.append(regret(row["us"], f"{s.block_tokens} {s.warpgroups} {s.row_blocks}"))
    assert exp(sum(map(log, found)) / len(found)) <= 1.015 and max(found) <= 1.1


@pytest.mark.parametrize("op", ["w4a16", "w4a8"])
def test_pairs_of_ctas_beside_the_fastest_that_was_measured(op):
    """Where the model takes pairs, and where it leaves them though they fit."""
    found = []
    for row in PAIRS[op]:
        s, _ = chosen(op, row["n"], row["k"], row["m"], H200, POWERS)
        key = f"{s.block_tokens} {s.warpgroups} {s.row_blocks} {s.cluster}"
        found += [regret(row["us"], key)] if key in row["us"] else []
    assert len(found) >= 30 and exp(sum(map(log, found)) / len(found)) <= 1.01 and max(found) <= 1.08


@pytest.mark.parametrize("op", ["w4a16", "w4a8"])
def test_tiles_between_powers_of_two(op):
    """The tile for a step of M, among those of a power of two, against that for the power of two above: at least a
    tenth less time in these problems, and at most 7 % more in one."""
    gained = []
    for row in BUCKETS[op]:
        s, _ = chosen(op, row["n"], row["k"], row["m"], H200, POWERS)
        if tile_of(s) in row["us"]:
            gained.append(row["us"][tile_of(s)] / max(row["us"].values()))
            assert regret(row["us"], tile_of(s)) <= 1.07
    assert len(gained) >= 18 and exp(sum(map(log, gained)) / len(gained)) <= 0.9


def tile_of(s) -> str:
    """The key of a schedule in WIDTHS."""
    return " ".join(str(getattr(s, name)) for name in TILE_FIELDS if name in s.recorded)


@pytest.mark.parametrize(
    ("op", "least", "most"), [("w4a16", 250, 1.005), ("w4a8", 270, 1.006), ("w4a8_fp8", 100, 1.006)]
)
def test_widths_beside_the_fastest_that_was_measured(op, least, most):
    """Tiles of every width, in problems of 40 to 4096 tokens; choices that were not timed are left out, and few."""
    found = []
    for row in WIDTHS[op]:
        s, _ = chosen(op, row["n"], row["k"], row["m"], H200)
        found += [regret(row["us"], tile_of(s))] if tile_of(s) in row["us"] else []
    assert len(found) >= least and exp(sum(map(log, found)) / len(found)) <= most and max(found) <= 1.1


@pytest.mark.parametrize("op", ["w4a16", "w4a8", "w4a8_fp8", "w4ax"])
def test_tiles_as_wide_as_m_is_between_powers_of_two(op):
    """Beside the fastest tile of a power of two that was timed, 160 tokens take an eighth less time at least, and 72 to
    96 a twentieth."""
    for ms, most in (((160,), 0.875), ((72, 80, 96), 0.95)):
        gained = []
        for row in (row for row in WIDTHS[op] if row["m"] in ms):
            s, _ = chosen(op, row["n"], row["k"], row["m"], H200)
            old = [us for key, us in row["us"].items() if int(key.split()[0]) in POWERS]
            gained += [row["us"][tile_of(s)] / min(old)] if tile_of(s) in row["us"] and old else []
        assert len(gained) >= 6 and exp(sum(map(log, gained)) / len(gained)) <= most


@pytest.mark.parametrize("op", ["w4a16", "w4a8"])
@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 30000), k=st.integers(16, 30000), m=st.integers(1, 3000))
def test_pairs_run_at_once(op, n, k, m):
    """All CTAs of a launch whose tiles are shared by pairs find an SM; other launches of such kernels fill clusters."""
    s, part = chosen(op, n, k, m, H200)
    tiles = -(-m // s.block_tokens) * -(-((n + 63) // 64) // s.cta_blocks)
    assert part.grid % s.cluster == 0 and part.grid <= H200.sms
    assert s.cluster == 1 or part.shared in (0, tiles)


@pytest.mark.parametrize("op", ["w4a16", "w4a8"])
def test_partitions_beside_the_fastest_that_was_measured(op):
    """Divisions of a tile over the SMs, of programs whose loop was a tenth slower: 2 % more than the best of a tile."""
    found = []
    for row in PARTITIONS[op]:
        tiles: dict[tuple[int, ...], dict[str, float]] = {}
        for key, us in row["us"].items():
            *tile, grid, shared = map(int, key.split())
            tiles.setdefault(tuple(tile), {})[f"{grid} {shared}"] = us
        for tile, times in tiles.items():
            if len(times) > 1:
                part = divided(op, row["n"], row["k"], row["m"], tile)
                key = f"{part.grid} {part.shared}"
                found += [regret(times, key)] if key in times else []
    assert len(found) >= 300 and exp(sum(map(log, found)) / len(found)) <= 1.02


def divided(op: str, n: int, k: int, m: int, tile: tuple[int, int, int]):
    """The model's division of a tile over the SMs."""
    problem = problem_of(op, n, k)
    return stream_k.partition(stream_k.of_tile(problem, tile), problem, TARGET, m)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 60000), k=st.integers(16, 30000), m=st.integers(1, 9000))
def test_a_new_number_of_tokens_never_needs_a_new_tile(n, k, m):
    """Every M takes the tile of one of the M that are compiled up front."""
    for op in ("w4a16", "w4a8", "w4a8_fp8", "w4ax"):
        known = {chosen(op, n, k, of)[0] for of in launching.ALL_TOKENS}
        assert chosen(op, n, k, m)[0] in known


@given(m=st.integers(1, 9000))
def test_tiles_pad_a_bucket_little(m):
    """A bucket's widths are those of all its M; one of them at least is nearly exact."""
    top, widths = tile_costs.bucket(m), tile_costs.widths(m, stream_k.BLOCK_TOKENS)
    assert top >= min(m, 4096) and tile_costs.bucket(top) == top
    assert widths == tile_costs.widths(min(top, m), stream_k.BLOCK_TOKENS) and set(widths) <= set(stream_k.BLOCK_TOKENS)
    assert min(-(-top // t) * t for t in widths) <= 1.1 * top
    assert m <= 32 or top - m < max(16, m / 4)


def test_predicted_times_of_scaled_blocks():
    """W4Ax with a scale for each block, beside what the benchmark's runs took on an H200."""
    rows = json.loads((DATA.parents[2] / "benchmarks/results/w4ax_h200.json").read_text())["rows"]
    logs = []
    for row in (row for row in rows if row["m"] > 16):
        blocks8 = int(row["format"].split(", ")[1].split()[0])
        problem = Gemm.of_blocks(row["n"], -(-row["k"] // 128) * 128, blocks8)
        schedule = stream_k.choose(problem, H200, row["m"])
        logs.append(log(stream_k.us(schedule, problem, H200, row["m"]) / row["variants"]["block"]))
    assert len(logs) >= 60 and (sum(it**2 for it in logs) / len(logs)) ** 0.5 <= 0.07


@pytest.mark.parametrize("op", ["w4a16", "w4a8", "w4a8_fp8"])
def test_predicted_times_of_experts(op):
    """Up to a factor of each problem: what the tuner tries first is what was fast."""
    data, errors = json.loads((DATA / "grouped_h200.json").read_text())[f"{op}_grouped"], []
    for row in data:
        problem = replace(problem_of(op, row["n"], row["k"]), experts=row["experts"])
        logs = []
        for key, us in row["us"].items():
            s = grouped.fitted(stream_k.of_tile(problem, tuple(map(int, key.split()))), problem, H200)
            logs.append(log(grouped.predicted_us(s, problem, H200, row["m"]) / us))
        errors += [(it - sum(logs) / len(logs)) ** 2 for it in logs]
    assert len(errors) >= 100 and (sum(errors) / len(errors)) ** 0.5 <= 0.07


def test_withdrawals_leave_the_word_positive():
    """Each CTA of a tile has a bit from 16 on; the last one reads them with a signed shift."""
    assert sum(65536 << share for share in range(tile_costs.MOST_SLICES)) < 2**31


def test_narrow_weights_walk_over_their_rows_one_token_block_after_the_other():
    target = Target.parse("nvidia/nvidia-h200")
    for n, rasters in ((8192, [8, 8, 1, 1]), (10240, [8, 8, 8, 8])):
        found = [stream_k.choose(Gemm(n, 4096, 1, 512), target, m) for m in (64, 256, 1024, 4096)]
        assert [s.raster for s in found] == rasters
        found = [stream_k.choose(Gemm.of_bytes(n, 4096, 64), target, m) for m in (64, 256, 1024, 4096)]
        assert [s.raster for s in found] == rasters


def test_rasters_are_tried_after_the_other_tiles_that_cost_the_same():
    """No cost model tells them apart, so a search that ends early has seen several tiles."""
    target = Target.parse("nvidia/nvidia-h200")
    space = linear_spaces.of(Gemm(10240, 4096, 1, 512))
    found = [it.schedule for it in space.candidates(target, 1024)]
    tile = [s for s in found if (s.block_tokens, s.warpgroups, s.row_blocks, s.stage_k) == (128, 4, 1, 64)]
    assert [s.raster for s in tile if s.per_sm == 1] == [8, 4, 2, 1]  # 8 token blocks: no more than all of them
    assert len({(s.block_tokens, s.warpgroups, s.row_blocks) for s in found[:4]}) > 1
    assert {s.raster for s in (it.schedule for it in space.candidates(target, 128))} == {8}
