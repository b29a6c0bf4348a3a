"""Schedules of the W4Ax programs: the activation quantizer, stream-K on wgmma, the persistent program on mma.sync."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import work_items
from terrazzo.schedules.partition import Partition, share_tiles

BLOCK = 128
UNIT_BYTES = 4224
"""Of 64 rows by 128 channels: codes, and a bfloat16 scale for each row."""
BLOCK_TOKENS = (16, 32, 64, 128)
_RESERVED = 2048  # barriers, alignment
# warpgroups -> f32 and s32 sums of a thread that ptxas places without serializing wgmma
_SUMS = {1: 144, 2: 144, 3: 72, 4: 64}


@dataclass(frozen=True)
class MixedGemm:
    """y[M, n] = x[M, k] w[n, k]^T with s4 weights; the last `blocks8` blocks of 128 channels of x have 8 bits."""

    n: int
    k: int
    blocks8: int
    out_bytes: int = 2

    @property
    def row_blocks(self) -> int:
        """Row blocks of 64, the packing's unit."""
        return -(-self.n // 64)

    @property
    def units(self) -> int:
        """Blocks of 128 channels."""
        return -(-self.k // BLOCK)

    @property
    def weight_bytes(self) -> int:
        return self.row_blocks * self.units * UNIT_BYTES


def quantizer_warps(k: int, target: Target, m: int) -> int:
    """Warps of the CTA that quantizes a row: as many as blocks where rows are few, so that one is done soon.

    Raises:
        ArgumentError: a row that does not fit in shared memory.
    """
    blocks = -(-k // BLOCK)
    if blocks * (BLOCK * 2 + 4) + _RESERVED > target.smem_per_block:
        most = (target.smem_per_block - _RESERVED) // (BLOCK * 2 + 4) * BLOCK
        raise ArgumentError("K", k, f"must be at most {most}: a row is held in shared memory", "split K")
    return min(blocks, 32 if m <= 2 * target.sms else 8)


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * row_blocks * warpgroups rows by block_tokens; a ring stage holds 128 k."""

    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    raster: int = 8

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one CTA."""
        return self.warpgroups * self.row_blocks

    @property
    def held(self) -> bool:
        """Whether the sums of a block are kept in registers of their own while the next wgmmas run."""
        return self.block_tokens <= 64

    @property
    def sums(self) -> int:
        """Registers of a thread for sums: f32 of every row block, s32 of one (and a copy)."""
        return (self.row_blocks + 1 + self.held) * self.block_tokens // 2

    def legal(self) -> bool:
        return self.sums <= _SUMS.get(self.warpgroups, 0)

    @property
    def stage_bytes(self) -> int:
        return self.block_tokens * (BLOCK + 4) + self.cta_blocks * UNIT_BYTES

    def smem_bytes(self, problem: MixedGemm) -> int:
        pitch = 24 * 2 if problem.out_bytes == 2 else 20 * 4  # bytes of a staged row of 16
        return self.stages * self.stage_bytes + self.warpgroups * 4 * min(self.block_tokens, 32) * pitch + _RESERVED

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def fitted(schedule: StreamK, problem: MixedGemm, target: Target) -> StreamK:
    """The same tile with as many stages as fit, up to 12."""
    fixed = schedule.smem_bytes(problem) - schedule.stages * schedule.stage_bytes
    return replace(schedule, stages=min(12, (target.smem_per_block - fixed) // schedule.stage_bytes))


def choose(problem: MixedGemm, target: Target, m: int) -> StreamK:
    """Tile shape by tokens and size of the weight, with as many stages as fit."""
    tokens = next((t for t in BLOCK_TOKENS if m <= t), BLOCK_TOKENS[-1])
    millions = problem.row_blocks * 64 * problem.units * BLOCK / 1e6
    if tokens <= 32:
        shape = (4, 1) if millions >= 40 else (2, 1)
    elif tokens == 64:
        shape = (3, 1) if millions >= 80 else (2, 1)
    else:
        shape = (2, 1)
    if tokens == 64 and shape[0] == 3 and not StreamK(64, 3, 1, 2).legal():
        shape = (2, 1)
    return fitted(StreamK(tokens, *shape, stages=2), problem, target)


def candidates(problem: MixedGemm, target: Target, m: int) -> Iterator[StreamK]:
    """Every legal stream-K schedule worth measuring for m tokens."""
    widest = next((t for t in BLOCK_TOKENS if m <= t), BLOCK_TOKENS[-1])
    for tokens in BLOCK_TOKENS:
        for warpgroups in (1, 2, 3, 4):
            for row_blocks in (1, 2):
                schedule = StreamK(tokens, warpgroups, row_blocks, stages=2)
                if tokens <= widest and schedule.legal() and schedule.cta_blocks <= 2 * problem.row_blocks:
                    schedule = fitted(schedule, problem, target)
                    if schedule.stages >= 2:
                        yield schedule


def partition(schedule: StreamK, problem: MixedGemm, target: Target, m: int) -> Partition:
    """Tiles of the schedule over the SMs of the target; both kinds of blocks cost the same without native s4."""
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.cta_blocks)
    return share_tiles(tiles, problem.units, target.sms)
