"""Schedules of the W4A8 programs on e4m3 activations: those on int8, with a second accumulator beside the sums.

The tensor core's sums of a group of k are scaled and added to float32 sums (ops/w4a8/fp8_reference.py says why), so a
tile of as many tokens takes more registers than on int8; more than 128 are multiplied in two pieces, one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import tile_costs, w4a8
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.w4a8 import Multistage, fitted

BLOCK_TOKENS = w4a8.BLOCK_TOKENS
AT_ONCE = 128
"""Most tokens of a product; a wider tile has two, which take turns in one set of sums of a group."""
TILE_COSTS = replace(  # fitted to 180 measurements of group 128 on H200; tiles up to 32 tokens, and sharing, are int8's
    w4a8.TILE_COSTS,
    units={
        **{tile: cost for tile, cost in w4a8.TILE_COSTS.units.items() if tile[0] <= 32},
        (32, 1, 1): 0.17, (48, 2, 1): 0.215, (48, 4, 1): 0.375, (64, 1, 1): 0.178, (64, 2, 1): 0.25, (64, 4, 1): 0.5,
        (80, 2, 1): 0.31, (96, 1, 1): 0.22, (96, 2, 1): 0.356, (112, 2, 1): 0.394, (128, 1, 1): 0.264,
        (128, 2, 1): 0.422, (160, 2, 1): 0.604, (192, 2, 1): 0.694, (224, 2, 1): 0.767, (256, 2, 1): 0.817,
    },
)  # fmt: skip
EXPERT_COSTS = replace(
    TILE_COSTS,
    units={tile: cost for tile, cost in TILE_COSTS.units.items() if tile[0] > 16 or tile == (16, 2, 1)}
    | {(256, 2, 1): 0.78},
)
"""Of experts: with one token each two warpgroups were up to a fifth faster than four; in launches of 8192 tokens and
more, at the power limit, 256 tokens 4 to 5 % faster than 128 (one run each on an H200, not kept)."""
_LARGE = 100  # millions of weights from which four warpgroups have enough tiles to share, as on int8


class StreamK(w4a8.StreamK):
    """The e4m3 form of the stream-K schedule."""

    @property
    def pieces(self) -> int:
        """Products that a tile's tokens are parted into."""
        return 1 if self.block_tokens <= AT_ONCE else 2

    @property
    def sums(self) -> int:
        """Accumulator registers of a thread: the sums of all row blocks, and those of one group of k."""
        return (self.row_blocks * self.block_tokens + self.block_tokens // self.pieces) // 2

    @property
    def costs(self) -> tile_costs.TileCosts:
        return TILE_COSTS

    def legal(self) -> bool:
        """As on int8; and more than 128 tokens, whose ring is not unrolled, in two warpgroups of one row block each."""
        wide = self.pieces > 1 and self.block_tokens <= 2 * AT_ONCE and self.row_blocks == 1
        return self.warpgroups == 2 if wide else super().legal()


def choose(problem: Gemm, target: Target, m: int, widths: Sequence[int] = BLOCK_TOKENS) -> StreamK:
    """The tile whose launch is cheapest for the bucket of m: of four warpgroups where the accumulators and the number
    of tiles allow it, else of two, or of pairs of CTAs, of one warpgroup or two.

    A warpgroup has one group of wgmma in flight and converts 64 k meanwhile, so more of them fill the tensor core.

    Args:
        widths: tokens of the tiles to choose from.
    """
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    top = tile_costs.bucket(m)
    found = []
    for tokens in tile_costs.widths(m, widths):
        warpgroups = 4 if tokens <= 64 and millions >= _LARGE else 2
        raster = tile_costs.raster(-(-top // tokens), problem.row_blocks, target) if tokens > AT_ONCE else 8
        tiles = [StreamK.of_tile((tokens, number, 1), raster) for number in dict.fromkeys((warpgroups, 2, 1))]
        tiles = [fitted(s, problem, target, w4a8.UNROLLED_STAGES) for s in tiles if s.legal()]
        paired = (w4a8.pairs(s, problem, target, top) for s in tiles if tokens <= AT_ONCE)
        found += [tiles[0], *filter(None, paired)]
    return min(found, key=lambda s: w4a8.stream_k_us(s, problem, target, top))


def choose_multistage(problem: Gemm, target: Target, m: int) -> Multistage:
    """As on int8, with one row tile for each warp from 64 tokens on: products wait in registers to be scaled."""
    schedule = w4a8.choose_multistage(problem, target, m)
    if schedule.block_tokens < 64:
        return schedule
    wide = schedule.block_tokens == 128
    schedule = replace(
        schedule, warps=8 if wide else 4, row_blocks=1, token_warps=2 if wide else 1, stages=3, raster=8, kc=1
    )
    if m > 128:
        return schedule
    kc = 2 * target.sms // schedule.tiles(problem, schedule.block_tokens)
    return replace(schedule, kc=max(1, min(8, kc, problem.units)))


def choose_program(problem: Gemm, target: Target, m: int) -> tuple[str, Any]:
    """(program, schedule) for m tokens: stream_k where e4m3 wgmma is, else small_batch up to 16 tokens, multistage.

    sm_90a has no mma.sync of e4m3 (it emulates it through f16), so small batches run on wgmma there.
    """
    if target.supports("wgmma.e4m3"):
        return "stream_k", choose(problem, target, m)
    if m <= 2 * w4a8.TOKENS_PER_TILE:
        tokens = next(t for t in (w4a8.TOKENS_PER_TILE, 2 * w4a8.TOKENS_PER_TILE) if m <= t)
        return "small_batch", w4a8.choose_small_batch(problem, target, tokens)
    return "multistage", choose_multistage(problem, target, m)
