"""Schedules of the compared pipelines: the tile of stream_k in other hands, and what each would choose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules.partition import Partition, share_tiles
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.stream_k import StreamK, choose, fitted

TOKENS = (16, 32, 64, 128, 256)
"""Of a tile."""
RING_K = 1536
"""k of a ring at most."""
PIPELINES = ("pingpong", "excp", "basic", "basic_overlapped")


@dataclass(frozen=True)
class Compared(StreamK):
    """A tile of stream_k; its program has no clusters."""

    form: str = field(default="s8 integer", kw_only=True)

    @property
    def tiles_at_once(self) -> int:
        """Tiles that a CTA computes side by side."""
        return 1

    @property
    def threads(self) -> int:
        """Of a CTA: the warpgroups, and one for the copies."""
        return self.warpgroups * 128 + 128

    def cluster_refusal(self, problem: Gemm, target: Target) -> str:
        return f"{type(self).__name__} has no clusters" if self.cluster > 1 else ""

    def params(self) -> dict[str, int]:
        own = {"operands": self.operands} if hasattr(self, "operands") else {}
        return {name: value for name, value in super().params().items() if name != "cluster"} | own


@dataclass(frozen=True)
class Basic(Compared):
    """The same tile without roles: all warpgroups copy, convert and multiply.

    operands: sets of operand registers; with 1 a warpgroup waits for its product before it converts again.
    """

    operands: int = 1

    @property
    def flags(self) -> int:
        return self.warpgroups

    def legal(self) -> bool:
        """With two sets of operands, ptxas serializes wgmma of two row blocks, and spills in four warpgroups."""
        two = self.row_blocks == 1 and (self.warpgroups < 4 or self.sums < 64)
        return (self.operands == 1 or (self.operands == 2 and two)) and super().legal()

    @property
    def threads(self) -> int:
        return self.warpgroups * 128


@dataclass(frozen=True)
class Excp(Compared):
    """The same tile with a warpgroup that converts for all the others, through shared memory.

    operands: stages of converted weights, 128 k each.
    """

    operands: int = 2

    @property
    def flags(self) -> int:
        return self.warpgroups

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 256

    def legal(self) -> bool:
        """Whether the accumulators fit; ptxas refuses wgmma of 256 tokens in a CTA of 512 threads."""
        fits = self.warpgroups == 1 or (self.warpgroups == 2 and self.block_tokens <= 128)
        return fits and self.sums <= 128 and self.operands >= 1

    def smem_bytes(self, problem: Gemm) -> int:
        return super().smem_bytes(problem) + self.operands * self.cta_blocks * 64 * 128


@dataclass(frozen=True)
class PingPong(Compared):
    """A tile of 64 * row_blocks rows for each warpgroup, with a ring of its own; they run side by side."""

    @property
    def cta_blocks(self) -> int:
        """Row blocks of 64 of one tile."""
        return self.row_blocks

    @property
    def tiles_at_once(self) -> int:
        return self.warpgroups

    def legal(self) -> bool:
        return self.warpgroups in (2, 3) and super().legal()  # a fourth leaves its producer too few registers

    def stage_bytes(self, problem: Gemm) -> int:
        """Of one stage of every ring."""
        return self.warpgroups * super().stage_bytes(problem)

    def workspace(self, grid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        parts = grid * self.warpgroups
        return (parts, self.row_blocks, self.block_tokens // 8, 128, 4), (parts, 1)


def choose_pipeline(name: str, problem: Gemm, target: Target, m: int) -> tuple[str, Compared]:
    """(program, schedule) of a wgmma pipeline: "pingpong", "excp", "basic" or "basic_overlapped".

    basic takes imfp's tile, as far as it compiles with its second set of operands; the others share 256 rows where the
    weight has enough of them.
    """
    split = choose(problem, target, m, TOKENS, may_pair=False)
    large = problem.row_blocks * 64 * problem.units * 128 >= 100e6
    if name in ("basic", "basic_overlapped"):
        operands = 1 + (name == "basic_overlapped")
        s = Basic(split.block_tokens, split.warpgroups, split.row_blocks, 2, raster=split.raster, operands=operands)
        if not s.legal():
            s = replace(s, warpgroups=4 if s.block_tokens <= 64 else 3, row_blocks=1)
        return "basic", fitted(s, problem, target, RING_K)
    tile = (min(split.block_tokens, 128), 2, 2 if large else 1)
    return name, fitted((PingPong if name == "pingpong" else Excp)(*tile, stages=2), problem, target, RING_K)


def partition(schedule: Compared, problem: Gemm, target: Target, m: int) -> Partition:
    """Tiles of the schedule over the SMs of the target."""
    tiles = -(-m // schedule.block_tokens) * -(-problem.row_blocks // schedule.cta_blocks)
    at_once = schedule.tiles_at_once
    part = share_tiles(tiles, problem.units, target.sms * at_once)
    if part.shared == 0:
        return Partition(-(-part.grid // at_once), 0)
    grid = max(1, part.grid // at_once)
    # a share without a unit would be awaited for ever
    return Partition(grid, part.shared if grid * at_once <= part.shared * problem.units else 0)
