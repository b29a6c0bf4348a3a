"""Schedules that W4Ax alone has: of its quantizer, and of the persistent program on mma.sync."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import work_items
from terrazzo.schedules.problem import Gemm

BLOCK = 128
UNIT_BYTES = 4224
"""Of 64 rows by 128 channels: codes, and a bfloat16 scale for each row."""
_PERSISTENT_TOKENS = (16, 32, 64, 128)
_RESERVED = 2048  # barriers, alignment


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
    """(ITEMS, FIRST, slots) of a plan as the program reads them, see ops/linear/mixed/work_list.py."""
    table = work_items.device_table(plan)
    items = [
        [tile % token_blocks, tile // token_blocks, k0, k1, slot, shares, 0, 0]
        for tile, k0, k1, slot, shares in table.rows
    ]
    return items, list(table.first), table.slots
