"""Schedules of the stream-K program on wgmma, and the partition of its tiles over the SMs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import WeightOnlyGemm

BLOCK_TOKENS = (16, 32, 64, 128, 256)
_OUT_PITCH = 24 * 2  # bytes of a staged output row
_RESERVED = 2048  # barriers, alignment


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups (* cluster) rows by block_tokens; a ring stage holds 64 k."""

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    cluster: int = 1
    raster: int = 8

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one CTA."""
        return self.warpgroups * self.row_blocks

    @property
    def tile_blocks(self) -> int:
        """Row blocks of 64 in one tile."""
        return self.cta_blocks * self.cluster

    def stage_bytes(self, problem: WeightOnlyGemm) -> int:
        params = -(-problem.groups_per_128 // 2) * problem.record_bytes
        return self.block_tokens * 128 + self.cta_blocks * (2048 + params)

    def smem_bytes(self, problem: WeightOnlyGemm) -> int:
        out = self.warpgroups * 4 * min(self.block_tokens, 32) * _OUT_PITCH
        return self.stages * self.stage_bytes(problem) + out + _RESERVED

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def choose(problem: WeightOnlyGemm, target: Target, m: int, scaled_sums: bool) -> StreamK:
    """Tile shape by tokens and size of the weight (measured on H200), with as many stages as fit.

    Args:
        scaled_sums: the scales are applied to the sums of each group: registers for a second accumulator.
    """
    blocks = BLOCK_TOKENS[:-1] if scaled_sums else BLOCK_TOKENS
    tokens = next((t for t in blocks if m <= t), blocks[-1])
    millions = problem.row_blocks * 64 * problem.units * 128 / 1e6
    if 128 < m <= 256 and millions < 30:
        tokens = 128  # too few tiles of 256
    if tokens == 256 and m > 256 and -(-m // 128) * 128 * 1.12 < -(-m // 256) * 256:
        tokens = 128  # a tile of 128 costs a little more than half of 256, less than what padding would
    # (warpgroups, row blocks of each): four warpgroups hide the conversion best where enough tiles are left to share
    if tokens <= 32:
        shape = (4, 2) if millions >= 100 else (4, 1) if millions >= 50 else (2, 1)
    elif tokens == 64:
        shape = (4, 1) if millions >= 80 else (2, 1)
    elif tokens == 128:
        shape = (3, 1) if millions >= 100 and not scaled_sums else (2, 1)
    else:
        shape = (2, 1)
    return fitted(StreamK(tokens, *shape, stages=2), problem, target)


def fitted(schedule: StreamK, problem: WeightOnlyGemm, target: Target) -> StreamK:
    """The same tile with as many stages as fit, up to 16."""
    fixed = schedule.smem_bytes(problem) - schedule.stages * schedule.stage_bytes(problem)
    return replace(schedule, stages=min(16, (target.smem_per_block - fixed) // schedule.stage_bytes(problem)))


@dataclass(frozen=True)
class Partition:
    """`grid` CTAs; the first `shared` tiles are cut along k into equal shares, the others are whole tiles."""

    grid: int
    shared: int


def partition(schedule: StreamK, problem: WeightOnlyGemm, target: Target, m: int) -> Partition:
    """Shares only where whole waves would leave more than a few percent of the SMs idle."""
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.tile_blocks)
    slots = target.sms // schedule.cluster
    rest = tiles % slots
    if rest == 0 or -(-tiles // slots) * slots < 1.06 * tiles:
        return Partition(min(tiles, slots) * schedule.cluster, 0)
    if tiles < slots:
        share = -(-tiles * problem.units // slots)  # k units of the busiest CTA: no more CTAs than that needs
        return Partition(-(-tiles * problem.units // share) * schedule.cluster, tiles)
    # a few tiles over many CTAs would be cut too thin: share one full wave with them
    shared = rest if rest > slots // 2 else rest + slots
    return Partition(slots * schedule.cluster, shared)
