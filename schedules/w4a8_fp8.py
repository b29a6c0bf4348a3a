"""Schedules of the W4A8 programs on e4m3 activations: those on int8, with a second accumulator beside the sums.

The tensor core's sums of a group of k are scaled and added to float32 sums (ops/w4a8/fp8_reference.py says why), so a
tile of as many tokens takes more registers than on int8; 256 tokens are multiplied in two pieces of 128, one after the
other. A problem is an `IntegerGemm` here too: its bytes are as many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import tile_costs, w4a8
from terrazzo.schedules.w4a8 import IntegerGemm, Multistage, fitted

BLOCK_TOKENS = (16, 32, 64, 128, 256)
AT_ONCE = 128
"""Most tokens of a product; a wider tile has several, which take turns in one set of sums of a group."""
OF_EXPERTS = {16: (2, 1), 32: (4, 1), 64: (4, 1)}
"""Tokens of a tile of grouped GEMM -> warpgroups and row blocks of each, of 13 problems tuned on H200."""
_WIDE = 1.04  # time of 256 tokens over what int8's model makes of it, beside 128: 12 problems on an H200
_LARGE = 100  # millions of weights from which four warpgroups have enough tiles to share, as on int8


class StreamK(w4a8.StreamK):
    """The e4m3 form of the stream-K schedule."""

    @property
    def sums(self) -> int:
        """Accumulator registers of a thread: the sums of all row blocks, and those of one group of k."""
        return (self.row_blocks * self.block_tokens + min(self.block_tokens, AT_ONCE)) // 2

    def legal(self) -> bool:
        """As on int8; and 256 tokens, whose ring is not unrolled, in two warpgroups of one row block each."""
        wide = self.block_tokens == 2 * AT_ONCE and self.row_blocks == 1
        return self.warpgroups == 2 if wide else super().legal()


def choose(problem: IntegerGemm, target: Target, m: int) -> StreamK:
    """Tile by tokens; four warpgroups where the accumulators and the number of tiles allow it, or pairs of CTAs for
    each tile, of one warpgroup or two, where the cost model of int8 says so: of 33 problems on an H200, 1.1 % from the
    fastest that was timed (docs/jobs/pairs.toml). From 193 tokens on it weighs tiles of 256 against those of 128.

    A warpgroup has one group of wgmma in flight and converts 64 k meanwhile, so more of them fill the tensor core.
    """
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    top = tile_costs.bucket(m)
    found = []
    wide = m > AT_ONCE
    enough = [t for t in (tile_costs.widths(m) if wide else BLOCK_TOKENS) if t >= min(m, AT_ONCE)]
    for tokens in enough if wide else enough[:1]:
        warpgroups = 4 if tokens <= 64 and millions >= _LARGE else 2
        raster = tile_costs.raster(-(-top // tokens), problem.row_blocks, target) if tokens > AT_ONCE else 8
        tiles = [StreamK(tokens, number, 1, 2, raster) for number in dict.fromkeys((warpgroups, 2, 1))]
        tiles = [fitted(s, problem, target, w4a8.UNROLLED_STAGES) for s in tiles]
        paired = (w4a8.pairs(s, problem, target, top) for s in tiles if tokens <= AT_ONCE)
        found += [tiles[0], *filter(None, paired)]

    def cost(s: StreamK) -> float:
        return w4a8.stream_k_us(s, problem, target, top) * (_WIDE if s.block_tokens > AT_ONCE else 1)

    return min(found, key=cost)


def choose_multistage(problem: IntegerGemm, target: Target, m: int) -> Multistage:
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


def choose_program(problem: IntegerGemm, target: Target, m: int) -> tuple[str, Any]:
    """(program, schedule) for m tokens: stream_k where e4m3 wgmma is, else small_batch up to 16 tokens, multistage.

    sm_90a has no mma.sync of e4m3 (it emulates it through f16), so small batches run on wgmma there.
    """
    if target.supports("wgmma.e4m3"):
        return "stream_k", choose(problem, target, m)
    if m <= 2 * w4a8.TOKENS_PER_TILE:
        tokens = next(t for t in (w4a8.TOKENS_PER_TILE, 2 * w4a8.TOKENS_PER_TILE) if m <= t)
        return "small_batch", w4a8.choose_small_batch(problem, target, tokens)
    return "multistage", choose_multistage(problem, target, m)
