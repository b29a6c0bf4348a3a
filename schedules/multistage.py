"""Schedules of the multistage program on mma.sync (sm_80, sm_86, sm_89): a CTA for each tile, k split for few tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import Gemm

BLOCK_TOKENS = (32, 64, 128)
_RESERVED = 1024


@dataclass(frozen=True)
class Multistage:
    """A CTA of `warps` warps with `row_blocks` row tiles of 16 each; `token_warps` of them stand along the tokens."""

    block_tokens: int
    warps: int
    row_blocks: int
    stages: int
    token_warps: int = 1
    kc: int = 1
    raster: int = 8

    @property
    def rows(self) -> int:
        """Output features of a CTA."""
        return 16 * self.row_blocks * self.warps // self.token_warps

    def smem_bytes(self, problem: Gemm) -> int:
        params = -(-problem.groups_per_128 // 2) * problem.record_bytes
        x = max(self.stages * self.block_tokens * 64, self.warps * 16 * (self.row_blocks * 16 + 8)) * 2
        return x + self.stages * self.rows // 64 * (64 * 64 * problem.bits // 8 + params) + _RESERVED

    def tiles(self, problem: Gemm, m: int) -> int:
        return -(-m // self.block_tokens) * -(-problem.row_blocks * 64 // self.rows)

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def choose(problem: Gemm, target: Target, m: int) -> Multistage:
    """Tile by tokens, k split so that the bucket's first tiles fill the SMs twice (once with tiles of 128 tokens).

    Scaled sums take registers for scales and partial sums. The constants of a symmetric weight sit in registers too,
    one too many for wide tiles that split k.
    """
    tokens = next((t for t in BLOCK_TOKENS if m <= t), BLOCK_TOKENS[-1])
    if tokens < 128:
        schedule = Multistage(tokens, 4, 2, 4 if tokens == 32 or target.smem_per_sm > 128 * 1024 else 3)
    elif problem.scales == "post" or (problem.symmetric and m <= 128):
        schedule = Multistage(128, 8, 2, 3, token_warps=2, raster=16)
    elif m <= 128 and problem.row_blocks <= target.sms:
        schedule = Multistage(128, 4, 2, 3)
    else:
        return Multistage(128, 8, 2, 3, raster=16)
    # the kernel serves a bucket: its split depends on the bucket's widest M, not on m
    waves = 2 if tokens < 128 else 1
    kc = waves * target.sms // schedule.tiles(problem, tokens) if m <= 128 else 1
    return replace(schedule, kc=max(1, min(8, kc, problem.units)))


def launch_sizes(schedule: Multistage, problem: Gemm, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the f32 workspace and of the int32 semaphores."""
    if schedule.kc == 1:
        return (1, 1, 1, 1, 4), (1,)
    tiles = schedule.tiles(problem, m)
    held = schedule.row_blocks * schedule.block_tokens // schedule.token_warps // 2
    return (tiles, schedule.kc, held // 4, 32 * schedule.warps, 4), (tiles,)
