"""Schedules of the stream-K program on wgmma, and the partition of its tiles over the SMs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import WeightOnlyGemm

BLOCK_TOKENS = (16, 32, 64, 128, 256)
_OUT_PITCH = 24 * 2  # bytes of a staged output row
_RESERVED = 2048  # barriers, alignment


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups (* cluster) rows by block_tokens; a ring stage holds 64 k of both operands."""

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    cluster: int = 1
    raster: int = 8

    @property
    def tile_blocks(self) -> int:
        """Row blocks of 64 in one tile."""
        return self.warpgroups * self.row_blocks * self.cluster

    def stage_bytes(self, problem: WeightOnlyGemm) -> int:
        params = -(-problem.groups_per_128 // 2) * problem.record_bytes
        return self.block_tokens * 128 + self.warpgroups * self.row_blocks * (2048 + params)

    def smem_bytes(self, problem: WeightOnlyGemm) -> int:
        out = self.warpgroups * 4 * min(self.block_tokens, 32) * _OUT_PITCH
        return self.stages * self.stage_bytes(problem) + out + _RESERVED

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def choose(problem: WeightOnlyGemm, target: Target, m: int) -> StreamK:
    """Tile shape by tokens and rows (measured on H200), with as many stages as fit."""
    tokens = next((t for t in BLOCK_TOKENS if m <= t), BLOCK_TOKENS[-1])
    if tokens <= 64:
        # four warpgroups hide the conversion best, when enough tiles are left to split
        shape = (4, 1) if problem.row_blocks >= 128 else (2, 1)
    elif tokens == 128:
        shape = (2, 2) if problem.row_blocks >= 400 else (2, 1)
    else:
        shape = (2, 1)
    cluster = 2 if m > 2048 and problem.n * problem.k >= 1 << 25 else 1
    schedule = StreamK(tokens, *shape, stages=2, cluster=cluster)
    budget = target.smem_per_block - (schedule.smem_bytes(problem) - 2 * schedule.stage_bytes(problem))
    return StreamK(tokens, *shape, stages=min(16, budget // schedule.stage_bytes(problem)), cluster=cluster)


@dataclass(frozen=True)
class Partition:
    """`grid` CTAs; the first `shared` tiles are cut along k into equal shares, the others are whole tiles."""

    grid: int
    shared: int


def partition(schedule: StreamK, problem: WeightOnlyGemm, target: Target, m: int) -> Partition:
    """Shares only where whole waves would leave more than a few percent of the SMs idle."""
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.tile_blocks)
    slots = target.sms // schedule.cluster
    if tiles <= slots:
        if tiles >= 0.8 * slots:
            return Partition(tiles * schedule.cluster, 0)
        share = -(-tiles * problem.units // slots)  # k units of the busiest CTA: no more CTAs than that needs
        return Partition(-(-tiles * problem.units // share) * schedule.cluster, tiles)
    rest = tiles % slots
    idle = -(-tiles // slots) * slots / tiles - 1
    return Partition(slots * schedule.cluster, rest if idle > 0.06 else 0)
