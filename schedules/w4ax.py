"""Schedules of the W4Ax programs: quantizer, small batches, stream-K on wgmma, the persistent program on mma.sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import small_batch, tile_costs, w4a8, work_items
from terrazzo.schedules.partition import Partition, share_tiles
from terrazzo.schedules.problem import Gemm

BLOCK = 128
UNIT_BYTES = 4224
"""Of 64 rows by 128 channels: codes, and a bfloat16 scale for each row."""
BLOCK_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128)
"""Of the programs on wgmma."""
_PERSISTENT_TOKENS = (16, 32, 64, 128)
TOKENS_PER_TILE = small_batch.TOKENS_PER_TILE
MAX_TOKENS = small_batch.MAX_TOKENS
"""Of the small-batch program; `serves` says where it is also the faster one."""
_LARGE = 68e6  # weights from which two token tiles are faster on wgmma (taken over from W4A8, as it was)
_RESERVED = 2048  # barriers, alignment
# warpgroups -> f32 and s32 sums of a thread that ptxas places without serializing wgmma
_SUMS = {1: 192, 2: 192, 3: 96, 4: 64}
# the same of the integer program, beside two sets of operands; s32 sums alone, where the f32 ones lie in shared memory
_INTEGER_SUMS, _STASHED_SUMS = {1: 128, 2: 128, 3: 64, 4: 64}, {3: 64}
TILE_COSTS = replace(  # of two-level scales: units fitted to 330 measurements on H200 (3 % rms), the rest W4A8's
    w4a8.TILE_COSTS,
    units={
        (16, 2, 1): 0.232, (16, 4, 1): 0.43, (32, 2, 1): 0.232, (32, 4, 1): 0.448,
        (48, 2, 1): 0.24, (48, 3, 1): 0.38, (48, 4, 1): 0.365, (64, 2, 1): 0.279, (64, 3, 1): 0.449,
        (80, 2, 1): 0.317, (80, 3, 1): 0.432, (96, 2, 1): 0.337, (96, 3, 1): 0.458, (112, 2, 1): 0.361,
        (112, 3, 1): 0.511, (128, 2, 1): 0.354, (128, 3, 1): 0.554,
    },
)  # fmt: skip


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


class SmallBatch(w4a8.SmallBatch):
    """The W4Ax form of the small-batch schedule: scales of the tokens lie beside X, sums are scaled for each block."""

    costs: ClassVar[Mapping[int, small_batch.Cost]] = w4a8.COSTS | {
        8: small_batch.Cost(0.685, 0.0, 0.708, 0.172, 0.124, 0.03, 0.3, 0.2, 0.233)
    }
    pairs = False  # not measured

    def scale_bytes(self, problem: Gemm) -> int:
        """Scales of tokens and blocks, and with two levels of rows, that wait in shared memory."""
        rows = self.most_rows(problem) if problem.two_level else 0
        return 4 * rows + -(-problem.units // self.kc) * self.token_tiles * 32


def serves(problem: Gemm, target: Target, m: int) -> bool:
    """Whether small_batch is the program for m tokens: up to 8 always, up to 16 for small weights or without wgmma."""
    if m <= w4a8.TOKENS_PER_TILE or not target.supports("wgmma.s8"):
        return m <= MAX_TOKENS
    return m <= MAX_TOKENS and problem.n * problem.k < _LARGE


def choose_small_batch(problem: Gemm, target: Target, m: int) -> SmallBatch:
    """The cheapest split of k and of the warps, by the costs of W4A8.

    Raises:
        ArgumentError: more than MAX_TOKENS tokens, or a target whose shared memory cannot hold any slice of X.
    """
    return w4a8.choose_small_batch(problem, target, m, SmallBatch)


def small_batch_us(schedule: SmallBatch, problem: Gemm, target: Target) -> float:
    """Predicted microseconds, up to a constant."""
    return small_batch.cost(schedule, problem, target, schedule.costs, x_bytes=1)


@dataclass(frozen=True)
class StreamK:
    """Tiles of 64 * warpgroups rows by block_tokens; a ring stage holds 128 k."""

    block_tokens: int
    warpgroups: int
    stages: int
    raster: int = 8
    turns: int = 0
    """1: a warpgroup issues its wgmmas when the one before it has, not as the tensor core takes them."""

    @property
    def form(self) -> str:
        """How a thread holds s32 sums beside the f32 ones of the tile, by the registers of so many warpgroups.

        "blocks": two sets, which alternate. "kept": one, and a copy that is scaled while wgmmas run. "whole": one.
        "halves": one, of half of the tokens at a time.
        """
        narrow = self.block_tokens <= 64
        if self.warpgroups == 4 and self.block_tokens > 32:
            return "whole"
        if self.warpgroups == 3 and not narrow:
            return "halves"
        return "blocks" if narrow and not self.turns else "kept"

    @property
    def sums(self) -> int:
        """Registers of a thread for sums: f32 of the tile, s32, their copy."""
        return {"blocks": 6, "kept": 6, "whole": 4, "halves": 3}[self.form] * self.block_tokens // 4

    def legal(self) -> bool:
        """Whether the sums fit the registers, and there is another warpgroup to take turns with."""
        alone = self.turns and self.warpgroups < 2
        return self.turns in (0, 1) and not alone and self.sums <= _SUMS.get(self.warpgroups, 0)

    @property
    def stage_bytes(self) -> int:
        return self.block_tokens * (BLOCK + 4) + self.warpgroups * UNIT_BYTES

    def smem_bytes(self, problem: Gemm) -> int:
        pitch = 24 * 2 if problem.out_bytes == 2 else 20 * 4  # bytes of a staged row of 16
        return self.stages * self.stage_bytes + self.warpgroups * 4 * min(self.block_tokens, 32) * pitch + _RESERVED

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


@dataclass(frozen=True)
class Integer:
    """Of two-level scales: tiles of 64 * warpgroups rows by block_tokens, s32 sums over the blocks of a precision; a
    ring stage holds 128 k."""

    block_tokens: int
    warpgroups: int
    stages: int
    raster: int = 8

    @property
    def stash(self) -> bool:
        """Whether the f32 sums of the INT4 blocks wait in shared memory: no registers beside the s32 sums of INT8."""
        return self.block_tokens > _INTEGER_SUMS.get(self.warpgroups, 0)

    @property
    def sums(self) -> int:
        """Registers of a thread for sums while products run."""
        return self.block_tokens // 2 if self.stash else self.block_tokens

    def legal(self) -> bool:
        """Whether the sums fit the registers."""
        most = (_STASHED_SUMS if self.stash else _INTEGER_SUMS).get(self.warpgroups, 0)
        return self.block_tokens % 16 == 0 and 16 <= self.block_tokens and self.sums <= most

    @property
    def stage_bytes(self) -> int:
        return self.block_tokens * BLOCK + self.warpgroups * UNIT_BYTES

    def smem_bytes(self, problem: Gemm) -> int:
        pitch = 24 * 2 if problem.out_bytes == 2 else 20 * 4  # bytes of a staged row of 16
        step = min(self.block_tokens, 16 if self.stash else 32)  # tokens that a warp stages
        own = 4 * step * pitch + max(self.block_tokens, 32) * 4  # and the tokens' scales
        if self.stash and 0 < problem.blocks8 < problem.units:
            own += self.block_tokens * 256
        return self.stages * self.stage_bytes + self.warpgroups * own + _RESERVED

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def fitted(schedule: StreamK | Integer, problem: Gemm, target: Target) -> StreamK | Integer:
    """The same tile with as many stages as fit, up to 12."""
    fixed = schedule.smem_bytes(problem) - schedule.stages * schedule.stage_bytes
    return replace(schedule, stages=min(12, (target.smem_per_block - fixed) // schedule.stage_bytes))


def _width(m: int) -> int:
    """Tokens of the tiles for m: as few as with the widest ones, and as narrow as so many tiles may be."""
    tiles = -(-tile_costs.bucket(m) // BLOCK_TOKENS[-1])
    return next(tokens for tokens in BLOCK_TOKENS if tokens * tiles >= tile_costs.bucket(m))


def choose_integer(problem: Gemm, target: Target, m: int) -> Integer:
    """The tile whose launch is cheapest for the bucket of m (`tile_costs`), with as many stages as fit; up to 32 tokens
    that of `choose`."""
    top = tile_costs.bucket(m)
    if top <= 32:
        return fitted(Integer(top, choose(problem, target, m).warpgroups, stages=2), problem, target)
    widths = tile_costs.widths(m, BLOCK_TOKENS)
    tiles = [tile[:2] for tile in TILE_COSTS.units if tile[0] in widths]
    found = [fitted(Integer(*tile, stages=2), problem, target) for tile in tiles]
    return min(found, key=lambda s: integer_us(s, problem, target, top))


def choose(problem: Gemm, target: Target, m: int) -> StreamK:
    """Tile shape by tokens and size of the weight, with as many stages as fit."""
    tokens = _width(m)
    millions = problem.row_blocks * 64 * problem.units * BLOCK / 1e6
    warpgroups = (4 if millions >= 40 else 2) if tokens <= 32 else (3 if millions >= 80 else 2) if tokens <= 64 else 2
    # wide tiles scale as long as they multiply: one warpgroup after the other
    return fitted(StreamK(tokens, warpgroups, stages=2, turns=int(tokens > 64)), problem, target)


def partition(schedule: StreamK | Integer, problem: Gemm, target: Target, m: int) -> Partition:
    """Tiles of the schedule over the SMs of the target; both kinds of blocks cost the same without native s4."""
    if isinstance(schedule, Integer):
        return _divide(schedule, problem, target, m)[1]
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.warpgroups)
    return share_tiles(tiles, problem.units, target.sms)


def integer_us(schedule: Integer, problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds."""
    return _divide(schedule, problem, target, m)[0]


def _divide(schedule: Integer, problem: Gemm, target: Target, m: int) -> tuple[float, Partition]:
    """Microseconds of the cheapest way to divide the tiles over the SMs, and the partition."""
    return TILE_COSTS.divide(
        (schedule.block_tokens, schedule.warpgroups, 1),
        -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.warpgroups),
        problem.units,
        tile_costs.dram_us(target, problem.launch_bytes(m)),
        target.sms,
        False,
        tile_costs.later_wave(target, m, problem.k, problem.x_bytes),
    )


@dataclass(frozen=True)
class Persistent:
    """Of the program on mma.sync: a CTA of `warps` warps, `token_warps` of them along the tokens; `ctas` on an SM."""

    block_tokens: int
    warps: int
    row_blocks: int
    stages: int
    token_warps: int = 1
    ctas: int = 1

    @property
    def rows(self) -> int:
        """Output features of a CTA."""
        return 16 * self.row_blocks * self.warps // self.token_warps

    @property
    def sums(self) -> int:
        """f32 sums of a thread."""
        return self.row_blocks * self.block_tokens // self.token_warps // 2

    @property
    def stage_bytes(self) -> int:
        return self.block_tokens * BLOCK + max(self.block_tokens, 32) * 4 + self.rows // 64 * UNIT_BYTES

    def smem_bytes(self, problem: Gemm) -> int:
        """Shared memory of one CTA, at most."""
        staged = self.warps * 16 * (self.row_blocks * 16 + 8) * 2 - self.stages * self.block_tokens * BLOCK
        return self.stages * self.stage_bytes + max(staged, 0)

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`: not `ctas`, which only sizes the grid."""
        return {name: value for name, value in asdict(self).items() if name != "ctas"}


def choose_persistent(problem: Gemm, target: Target, m: int) -> Persistent:
    """Tile by tokens, 128 rows; three or four stages, and as many CTAs as an SM has shared memory for, up to two."""
    tokens = next((t for t in _PERSISTENT_TOKENS if m <= t), _PERSISTENT_TOKENS[-1])
    schedule = Persistent(128, 8, 2, 3, token_warps=2) if tokens == 128 else Persistent(tokens, 4, 2, 4)
    if schedule.smem_bytes(problem) > target.smem_per_block:
        schedule = replace(schedule, stages=3)
    fits = target.smem_per_sm // (schedule.smem_bytes(problem) + 1024)
    return replace(schedule, ctas=1 if tokens == 128 else max(1, min(2, fits)))


def work_plan(schedule: Persistent, problem: Gemm, target: Target, m: int, ctas: int) -> work_items.Plan:
    """Tiles of the schedule over `ctas` CTAs, cut along k by cost; tiles of the same rows follow each other.

    Args:
        target: whose costs count: the one that the kernel is compiled for.
    """
    token_blocks = -(-m // schedule.block_tokens)
    tiles = -(-problem.row_blocks * 64 // schedule.rows) * token_blocks
    costs = work_items.block_costs(
        target, rows=schedule.rows, tokens=schedule.block_tokens, unit_k=BLOCK,
        unit_bytes=schedule.rows // 64 * UNIT_BYTES, sharing=token_blocks,
    )  # fmt: skip
    precisions = (4,) * (problem.units - problem.blocks8) + (8,) * problem.blocks8
    ctas = min(ctas, tiles * problem.units)
    return work_items.decompose(work_items.items_of(tiles, precisions), ctas, costs)


def work_list(plan: work_items.Plan, token_blocks: int) -> tuple[list[list[int]], list[int], int]:
    """(ITEMS, FIRST, slots) of a plan as the program reads them, see ops/w4ax/work_list.py."""
    table = work_items.device_table(plan)
    items = [
        [tile % token_blocks, tile // token_blocks, k0, k1, slot, shares, 0, 0]
        for tile, k0, k1, slot, shares in table.rows
    ]
    return items, list(table.first), table.slots
