"""Schedules of the stream-K program on wgmma, and the partition of its tiles over the SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules import clusters, tile_costs
from terrazzo.schedules.partition import Partition
from terrazzo.schedules.problem import Gemm

BLOCK_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_OUT_PITCH = 24 * 2  # bytes of a staged output row
_RESERVED = 2048  # barriers, alignment
TILE_COSTS = tile_costs.TileCosts(  # sharing fitted to 1091 measurements of group 128 on H200, units to 400 (3 % rms),
    # tiles of up to 32 tokens to 340 before
    start=1.45, store=0.615, share=1.786, add=0.743, uneven=1.175, uneven_area=0.628,
    part=1.599, part_area=1.04, part_each=0.342, pair=0.7, pair_area=0.8, traffic=0.881, busy=0.222,
    units={
        (16, 2, 1): 0.427, (16, 2, 2): 0.695, (16, 3, 1): 0.522, (16, 4, 1): 0.66, (16, 4, 2): 1.289,
        (32, 2, 1): 0.392, (32, 2, 2): 0.701, (32, 3, 1): 0.524, (32, 3, 2): 1.052, (32, 4, 1): 0.702,
        (48, 2, 1): 0.431, (48, 2, 2): 0.806, (48, 3, 1): 0.58, (48, 4, 1): 0.79,
        (64, 2, 1): 0.455, (64, 2, 2): 0.88, (64, 3, 1): 0.7, (64, 3, 2): 1.38, (64, 4, 1): 0.89,
        (80, 2, 1): 0.569, (80, 2, 2): 1.0, (80, 4, 1): 0.98, (96, 2, 1): 0.645, (96, 2, 2): 1.16, (96, 4, 1): 1.13,
        (112, 2, 1): 0.687, (112, 2, 2): 1.32, (112, 4, 1): 1.21,
        (128, 2, 1): 0.755, (128, 2, 2): 1.39, (128, 3, 1): 1.03, (128, 4, 1): 1.36,
        (160, 2, 1): 0.86, (192, 2, 1): 1.055, (224, 2, 1): 1.24, (256, 2, 1): 1.36,
    },
)  # fmt: skip

_OF_PAIRS = replace(
    TILE_COSTS, units={**TILE_COSTS.units, (128, 1, 1): 0.5, (96, 1, 1): 0.46, (64, 1, 1): 0.34, (32, 1, 1): 0.306}
)
"""Where the CTAs of a tile are pairs, tiles of one warpgroup are worth it too; 70 measurements on H200 (4 % rms)."""
_FINE_RING = ((80, 4, 1), (96, 4, 1), (112, 2, 2), (112, 4, 1), (128, 2, 2), (128, 4, 1), (224, 2, 1), (256, 2, 1))
"""Tiles whose ring stages hold 64 k: more of them fit, or registers for the words of one."""
_COOL = ((96, 2, 2), (112, 2, 2), (128, 2, 2))
"""The fastest of short sweeps from 129 tokens on; of long benchmarks, where the clock follows the power, they lose."""


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups rows by block_tokens; a ring stage holds `stage_k`, an SM `per_sm` CTAs.
    `cluster` CTAs may share a tile alike, and add it up without a trip to memory."""

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    stage_k: int = 64
    raster: int = 8
    per_sm: int = 1
    cluster: int = 1

    @classmethod
    def of_tile(cls, tile: tile_costs.Tile, raster: int = 8) -> StreamK:
        """That of a tile, with two stages."""
        return cls(*tile, stages=2, stage_k=64 if tile in _FINE_RING else 128, raster=raster)

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one CTA."""
        return self.warpgroups * self.row_blocks

    @property
    def flags(self) -> int:
        """Semaphores of a CTA: one for each warp."""
        return self.warpgroups * 4

    def stage_bytes(self, problem: Gemm) -> int:
        shared = problem.groups_per_128 == 1  # one set of parameters for both halves of 128 k
        params = (1 if shared else problem.groups_per_128 * self.stage_k // 128) * problem.record_bytes
        return self.stage_k * self.block_tokens * 2 + self.cta_blocks * (self.stage_k * 8 * problem.bits + params)

    def smem_bytes(self, problem: Gemm) -> int:
        out = self.warpgroups * 4 * min(self.block_tokens, 32) * _OUT_PITCH
        return self.stages * self.stage_bytes(problem) + out + _RESERVED

    def cluster_refusal(self, problem: Gemm, target: Target) -> str:
        """Why the CTAs of a tile cannot be a cluster, or ""."""
        ring = self.stages * self.stage_k * self.block_tokens * 2
        of_tile = self.cluster, self.warpgroups, self.row_blocks, self.block_tokens
        if self.cluster > 1 and self.per_sm > 1:
            return f"clusters with {self.per_sm} CTAs on an SM"
        return clusters.refusal(*of_tile, ring, problem.units, target)

    @property
    def costs(self) -> tile_costs.TileCosts:
        """What its launches cost; CTAs that share an SM share its tensor cores (46 tuned launches on H200, 9 % rms)."""
        costs = TILE_COSTS if self.cluster == 1 else _OF_PAIRS
        tile = self.block_tokens, self.warpgroups, self.row_blocks
        return replace(costs, units={tile: 1.2 * self.per_sm * costs.unit(tile)}) if self.per_sm > 1 else costs

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def choose(problem: Gemm, target: Target, m: int, widths: Sequence[int] = BLOCK_TOKENS) -> StreamK:
    """The tile whose launch is cheapest for the bucket of m (`tile_costs`), with as many stages as fit.

    Args:
        widths: tokens of the tiles to choose from.
    """
    if problem.scales == "post":  # registers for a second accumulator
        return fitted(_of_scaled_sums(problem, m), problem, target)
    top, tokens = tile_costs.bucket(m), tile_costs.widths(m, widths)
    found = []
    for tile in _OF_PAIRS.units:
        spills = tile == (64, 3, 2) and problem.groups_per_128 > 1
        if tile[0] in tokens and not spills and (tile not in _COOL or m <= 128):
            raster = tile_costs.raster(-(-top // tile[0]), problem.row_blocks, target)
            s = StreamK.of_tile(tile, raster)
            both = [s] if tile in TILE_COSTS.units else []
            both += [it for it in [pairs(fitted(s, problem, target), problem, target, top)] if it]
            found += [(_divide(it, problem, target, top)[0], it) for it in both]
    return fitted(min(found, key=lambda it: it[0])[1], problem, target)


def pairs(schedule: StreamK, problem: Gemm, target: Target, m: int) -> StreamK | None:
    """The schedule with two CTAs for each tile, which are a cluster, where all of them run at once; else None, also for
    tall tiles: those of 384 and 512 rows took 4 to 12 % more time than others without pairs (16 and 64 tokens, H200).
    """
    s = replace(schedule, cluster=clusters.PAIR)
    tiles = -(-m // s.block_tokens) * -(-problem.row_blocks // s.cta_blocks)
    fits = clusters.PAIR * tiles <= target.sms and s.cta_blocks <= clusters.TALLEST_PAIR
    return s if fits and not s.cluster_refusal(problem, target) else None


def _of_scaled_sums(problem: Gemm, m: int) -> StreamK:
    """By tokens and size of the weight; these programs were not measured tile by tile."""
    tokens = next((t for t in BLOCK_TOKENS if m <= t), 128) if m <= 128 else 128
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    shape = (2, 1)
    if tokens <= 64:
        shape = (4, 2) if tokens == 16 and millions >= 300 else (2, 2) if millions >= 100 else (2, 1)
    return StreamK(tokens, *shape, stages=2, stage_k=128 if tokens <= 64 or m <= 256 else 64)


def room(schedule: StreamK, target: Target) -> int:
    """Bytes of shared memory for one of the CTAs of an SM; the driver keeps 1 KiB of each."""
    return min(target.smem_per_block, target.smem_per_sm // schedule.per_sm - 1024)


def fitted(schedule: StreamK, problem: Gemm, target: Target) -> StreamK:
    """The same tile with as many stages as fit, up to 1024 k."""
    fixed = schedule.smem_bytes(problem) - schedule.stages * schedule.stage_bytes(problem)
    stages = (room(schedule, target) - fixed) // schedule.stage_bytes(problem)
    return replace(schedule, stages=min(1024 // schedule.stage_k, stages))


def partition(schedule: StreamK, problem: Gemm, target: Target, m: int) -> Partition:
    """The cheapest way to divide the tiles of the schedule over the SMs of the target."""
    return _divide(schedule, problem, target, m)[1]


def us(schedule: StreamK, problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds."""
    short = 1 + 0.02 * max(0, 4 - schedule.stages * schedule.stage_k // 64)  # a ring that hides less of the latency
    return _divide(schedule, problem, target, m)[0] * short


def _divide(schedule: StreamK, problem: Gemm, target: Target, m: int) -> tuple[float, Partition]:
    """Microseconds, and the partition."""
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.cta_blocks)
    sums = schedule.row_blocks * schedule.block_tokens // 2
    tile = schedule.block_tokens, schedule.warpgroups, schedule.row_blocks
    return schedule.costs.divide(
        tile,
        tiles,
        problem.units,
        tile_costs.dram_us(target, problem.launch_bytes(m)),
        target.sms * schedule.per_sm,
        schedule.per_sm == 1 and tile_costs.parts_sums(schedule.warpgroups, sums),
        tile_costs.later_wave(target, m, problem.k, problem.x_bytes),
        schedule.cluster,
    )
