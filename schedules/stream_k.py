"""Schedules of the stream-K program on wgmma, and the partition of its tiles over the SMs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules.partition import Partition, share_tiles
from terrazzo.schedules.problem import WeightOnlyGemm

BLOCK_TOKENS = (16, 32, 64, 128, 256)
_OUT_PITCH = 24 * 2  # bytes of a staged output row
_RESERVED = 2048  # barriers, alignment


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups rows by block_tokens; a ring stage holds `stage_k`, an SM `per_sm` CTAs."""

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    stage_k: int = 64
    raster: int = 8
    per_sm: int = 1

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one CTA."""
        return self.warpgroups * self.row_blocks

    @property
    def flags(self) -> int:
        """Semaphores of a CTA: one for each warp."""
        return self.warpgroups * 4

    def stage_bytes(self, problem: WeightOnlyGemm) -> int:
        shared = problem.groups_per_128 == 1  # one set of parameters for both halves of 128 k
        params = (1 if shared else problem.groups_per_128 * self.stage_k // 128) * problem.record_bytes
        return self.stage_k * self.block_tokens * 2 + self.cta_blocks * (self.stage_k * 32 + params)

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
    if 128 < m <= 256 and millions < 100:
        tokens = 128  # too few tiles of 256
    if tokens == 256 and m > 256 and -(-m // 128) * 128 * 1.12 < -(-m // 256) * 256:
        tokens = 128  # a tile of 128 costs a little more than half of 256, less than what padding would
    # (warpgroups, row blocks of each): tall tiles read X less often, but leave fewer of them to share
    shape = (2, 1)
    if tokens <= 64:
        shape = (4, 2) if tokens == 16 and millions >= 300 else (2, 2) if millions >= 100 else (2, 1)
    elif tokens == 128 and not scaled_sums:
        tall = -(-problem.row_blocks // 4) * -(-m // 128)  # tiles of 256 rows
        if m <= 256:
            shape = (3, 1) if millions >= (80 if m <= 128 else 20) else (2, 1)
        elif tall >= 0.8 * target.sms:
            shape = (2, 2)
    stage_k = 128 if tokens <= 64 or (tokens == 128 and m <= 256) else 64
    return fitted(StreamK(tokens, *shape, stages=2, stage_k=stage_k), problem, target)


def room(schedule: StreamK, target: Target) -> int:
    """Bytes of shared memory for one of the CTAs of an SM; the driver keeps 1 KiB of each."""
    return min(target.smem_per_block, target.smem_per_sm // schedule.per_sm - 1024)


def fitted(schedule: StreamK, problem: WeightOnlyGemm, target: Target) -> StreamK:
    """The same tile with as many stages as fit, up to 1024 k."""
    fixed = schedule.smem_bytes(problem) - schedule.stages * schedule.stage_bytes(problem)
    stages = (room(schedule, target) - fixed) // schedule.stage_bytes(problem)
    return replace(schedule, stages=min(1024 // schedule.stage_k, stages))


def partition(schedule: StreamK, problem: WeightOnlyGemm, target: Target, m: int) -> Partition:
    """Tiles of the schedule over the SMs of the target."""
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.cta_blocks)
    return share_tiles(tiles, problem.units, target.sms * schedule.per_sm)
