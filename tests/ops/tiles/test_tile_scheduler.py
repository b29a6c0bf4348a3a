"""The partition of tiles over CTAs, as the generated code computes it: run on the CPU from its CUDA text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.scheduler import partition_macros, plan_state, segment_state
from terrazzo.schedules.partition import share_tiles
from terrazzo.schedules.tile_costs import MOST_SLICES

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
PASS_CONFIGS = (("tl.disable_thread_storage_sync", True), ("tl.disable_warp_specialized", True))
FIELDS = ("tile", "k0", "k1", "tokens", "rows", "leaves", "adds", "count")
RASTER, SEGMENTS = 4, 136


def build(target, *, units: int, row_tiles: int, head_units: int, exchange: bool):
    """`main(OUT, sk, mt)`: OUT int32 [grid, SEGMENTS + 1, 8], the segments of each CTA behind their number and how many
    CTAs part each tile."""
    import tilelang.language as T

    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=RASTER, head_units=head_units, exchange=exchange)
    G = T.dynamic("grid")

    @T.prim_func
    def main(OUT: T.Tensor((G, SEGMENTS + 1, len(FIELDS)), "int32"), sk: T.int32, mt: T.int32):
        with T.Kernel(G, threads=32, prelude=prelude("quotient")) as cta:
            p = plan_state()
            c = segment_state()
            tiles.plan(p, cta, G, sk, mt)
            if T.get_thread_binding() == 0:
                OUT[cta, 0, 0] = p.all[0]
                OUT[cta, 0, 1] = p.among[0]
                for seg in T.serial(p.all[0]):
                    tiles.segment(p, c, seg, cta, G, sk, mt)
                    OUT[cta, seg + 1, 3] = c.tokens[0]
                    OUT[cta, seg + 1, 4] = c.rows[0]
                    tiles.later_shares(c, cta, G, T.max(sk, 1))
                    OUT[cta, seg + 1, 0] = c.tile[0]
                    OUT[cta, seg + 1, 1] = c.k0[0]
                    OUT[cta, seg + 1, 2] = c.k1[0]
                    OUT[cta, seg + 1, 5] = c.leaves[0]
                    OUT[cta, seg + 1, 6] = c.adds[0]
                    OUT[cta, seg + 1, 7] = c.count[0]

    return main


@pytest.mark.parametrize(("units", "row_tiles", "head_units", "exchange"), [(32, 40, 1, True), (7, 16, 0, False)])
def test_every_unit_once_and_every_head_after_its_shares(units, row_tiles, head_units, exchange, tmp_path):
    params = {"units": units, "row_tiles": row_tiles, "head_units": head_units, "exchange": exchange}
    request = KernelRequest(
        "tests.tiles", f"{__name__}:build", tuple(params.items()), Target.parse("sm_90a"), PASS_CONFIGS
    )
    kernel = CpuKernel(cuda_text(request), [], 32, tmp_path)
    for mt in (1, 3, 7, 16):
        for slots in (132, 24, 5):
            part = share_tiles(mt * row_tiles, units, slots)
            for sk in {part.shared, 0, min(slots, mt * row_tiles), mt * row_tiles}:
                out = torch.full((part.grid, SEGMENTS + 1, len(FIELDS)), -1, dtype=torch.int32)
                kernel((part.grid, 1, 1), OUT=out, sk=sk, mt=mt, grid=part.grid)
                check(out.tolist(), part.grid, sk, mt, row_tiles, units)
        for each in {1: (1, 2, 3, 17), 3: (2, 3)}.get(mt, ()) if exchange else ():
            grid = mt * row_tiles * each
            out = torch.full((grid, SEGMENTS + 1, len(FIELDS)), -1, dtype=torch.int32)
            kernel((grid, 1, 1), OUT=out, sk=mt * row_tiles, mt=mt, grid=grid)
            if 1 < each <= MOST_SLICES:
                check_parted(out.tolist(), each, mt, row_tiles, units)
            else:  # whole tiles, or more CTAs than a tile's word has bits for
                check(out.tolist(), grid, mt * row_tiles, mt, row_tiles, units)


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_quotient(ulps):
    """tz_quotient with a reciprocal that is off by as much as the GPU's may be: exact for quotients below 2^22."""
    i = np.random.default_rng(0).integers
    d = np.concatenate([i(1, 200, 200000), i(1, 1 << 24, 200000), i(1, 2**31 - 1, 200000)])
    q = np.minimum(i(0, 1 << 22, d.size), (2**31 - 1) // d)
    n = np.clip(q * d + i(-2, 3, d.size), 0, np.minimum(2**31 - 1, (d << 22) - 1))
    r = (np.float32(1) / d.astype(np.float32)).view(np.int32) + ulps
    got = (n.astype(np.float32) * r.view(np.float32)).astype(np.int64)
    rest = n - got * d
    assert np.array_equal(got + (rest >= d) - (rest < 0), n // d)


def check_parted(ctas: list, each: int, mt: int, row_tiles: int, units: int) -> None:
    """CTA after CTA, from the last one on, holds the next share of a tile; nobody leaves or adds shares."""
    where = set()
    for index, (first, segment, *_) in enumerate(reversed(ctas)):
        s = dict(zip(FIELDS, segment))
        assert first[:2] == [1, each] and not s["leaves"] and not s["adds"]
        assert s["tile"] == index // each
        assert (s["k0"], s["k1"]) == (index % each * units // each, (index % each + 1) * units // each)
        where.add((s["tokens"], s["rows"]))
    assert where == {(t, r) for t in range(mt) for r in range(row_tiles)}


def check(ctas: list, grid: int, sk: int, mt: int, row_tiles: int, units: int) -> None:
    done: dict[int, list[int]] = {tile: [0] * units for tile in range(mt * row_tiles)}
    left: dict[int, list[int]] = {}  # tile -> CTAs that leave a share of it
    heads: dict[int, tuple[int, int]] = {}
    where = set()
    for cta, (first, *rows) in enumerate(ctas):
        segments = [dict(zip(FIELDS, row)) for row in rows[: first[0]]]
        kinds = [s["tile"] < sk for s in segments]
        assert kinds == sorted(kinds), "whole tiles come before shares"
        for at, s in enumerate(segments):
            assert 0 <= s["k0"] <= s["k1"] <= units and not (s["leaves"] and s["adds"])
            for k in range(s["k0"], s["k1"]):
                done[s["tile"]][k] += 1
            if s["leaves"]:
                assert s["k0"] < s["k1"] or sk < mt * row_tiles, "where all is shared, every share has work"
                assert at == kinds.index(True), "a CTA has one slot of the workspace, and others wait for it"
                left.setdefault(s["tile"], []).append(cta)
            else:
                where.add((s["tokens"], s["rows"]))
            if s["adds"]:
                assert at == len(segments) - 1, "nobody waits with work left to do"
                heads[s["tile"]] = cta, s["count"]
    assert all(count == 1 for tile in done.values() for count in tile)
    assert where == {(t, r) for t in range(mt) for r in range(row_tiles)}, "one CTA writes each tile"
    assert heads.keys() == left.keys()
    for tile, (cta, count) in heads.items():
        assert sorted(left[tile]) == list(range(cta - count, cta)), "the CTAs right below hold the rest, in order of k"
