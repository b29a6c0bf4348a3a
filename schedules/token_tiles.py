"""Schedules of the program whose A operand is tokens (W8A8 in blocks, wide batches)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules import stream_k, tile_costs
from terrazzo.schedules.costs import COSTS
from terrazzo.schedules.partition import memory_refusal
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.stream_k import StreamK

FORM = "e4m3 block"
FIELDS = ("block_tokens", "warpgroups", "row_blocks", "stages", "raster")
TILES = ((128, 2, 2), (256, 2, 2), (128, 2, 3), (128, 2, 4))
"""Tokens, warpgroups, row blocks: those whose sums fit the registers."""
_AT_ONCE = 3  # row blocks of one product at most
_OUT = 4 * 16 * 72 * 2  # bytes in which a warpgroup stages rows of y


@dataclass(frozen=True)
class TokenTiles(StreamK):
    """Tiles of `block_tokens`, 64 for each block of a warpgroup, by 64 * row_blocks rows, which all of them share."""

    form: str = FORM

    @property
    def recorded(self) -> tuple[str, ...]:
        return FIELDS

    @property
    def cta_blocks(self) -> int:
        return self.row_blocks

    @property
    def token_blocks(self) -> int:
        """Of 64 tokens, of a warpgroup."""
        return self.block_tokens // (64 * self.warpgroups)

    @property
    def pieces(self) -> int:
        """Products that a tile's rows are parted into."""
        return 1 if self.row_blocks <= _AT_ONCE else 2

    @property
    def sums(self) -> int:
        return 32 * (self.token_blocks * self.row_blocks + self.row_blocks // self.pieces)

    @property
    def parts(self) -> bool:
        return False

    def crowded(self) -> str:
        return "" if self.tile in TILES else f"no tile of {self.tile} among {TILES}"

    def smem_bytes(self, problem: Gemm) -> int:
        return self.stages * self.stage_bytes(problem) + self.warpgroups * _OUT + stream_k._RESERVED

    def workspace(self, grid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = self.warpgroups * self.token_blocks
        return (grid, blocks, self.row_blocks * 8, 128, 4), (grid, self.flags)

    @property
    def costs(self) -> tile_costs.TileCosts:
        return replace(COSTS[FORM].tiles, units=_UNITS)

    def params(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in FIELDS}


_UNITS = {(128, 2, 2): 0.41, (256, 2, 2): 0.73, (128, 2, 3): 0.57, (128, 2, 4): 0.79}
"""Microseconds of a tile's 128 k: 60 measurements of six layers at 256 to 4096 tokens (H100; 11 % rms, but 1.5 times
where a long k is shared)."""


def refusal(s: TokenTiles, problem: Gemm, target: Target) -> str:
    """Why a tile cannot be a CTA on the target, or ""."""
    if not target.supports("wgmma.e4m3"):
        return f"{target.arch} has no wgmma of e4m3"
    if s.crowded():
        return s.crowded()
    if s.stages < 2 or s.raster < 1:
        return f"a ring of {s.stages} stages; at least 2 must fit"
    return memory_refusal(s.smem_bytes(problem), target)


def choose(problem: Gemm, target: Target, m: int) -> TokenTiles:
    """The tile whose launch is cheapest."""
    tiles = (stream_k.fitted(TokenTiles(*tile, stages=2), problem, target) for tile in TILES)
    return min(tiles, key=lambda s: stream_k.us(s, problem, target, tile_costs.bucket(m)))


def every(problem: Gemm, target: Target, m: int) -> Iterator[TokenTiles]:
    """The tiles with as many stages as fit."""
    for tile in TILES:
        for raster in (8, 4, 16, 1):
            if raster == 8 or raster * tile[0] < m:
                yield stream_k.fitted(TokenTiles(*tile, stages=2, raster=raster), problem, target)
