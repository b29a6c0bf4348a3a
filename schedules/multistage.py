"""Schedules of the multistage program on mma.sync (sm_80, sm_86, sm_89): a CTA for each tile, k split for few tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import Gemm

BLOCK_TOKENS = (32, 64, 128)
FEW_TOKENS = (16, *BLOCK_TOKENS)
"""Of experts and of W8A8, which have no program for small batches; products of 16 tokens cost as much as reading the
weights."""


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

    def stage_bytes(self, problem: Gemm) -> int:
        """Of one stage: x, words and parameters."""
        k = problem.form.multistage_k
        params = -(-problem.groups_per_128 * k // 128) * problem.record_bytes
        weights = 64 * k * problem.bits // 8 + params
        return self.block_tokens * k * problem.x_bytes + self.rows // 64 * weights

    def smem_bytes(self, problem: Gemm) -> int:
        """Shared memory of one CTA, at most: the rows of y are staged where x was."""
        x = self.stages * self.block_tokens * problem.form.multistage_k * problem.x_bytes
        staged = self.warps * 16 * (self.row_blocks * 16 + 8) * 2
        fixed = problem.form.multistage_fixed[self.kc > 1]
        return self.stages * self.stage_bytes(problem) + max(0, staged - x) + fixed

    def tiles(self, problem: Gemm, m: int) -> int:
        """CTAs that do not share k; with experts, as many as m tokens may take."""
        blocks = -(-m // self.block_tokens)
        if problem.experts:
            blocks = min(m, (m + problem.experts * (self.block_tokens - 1)) // self.block_tokens)
        return blocks * -(-problem.row_blocks * 64 // self.rows)

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def choose(problem: Gemm, target: Target, m: int, tiles: tuple[int, ...] = BLOCK_TOKENS) -> Multistage:
    """Tile by tokens, one of `tiles`, k split so that the bucket's first tiles fill the SMs twice (once with tiles of
    128 tokens)."""
    tokens = next((t for t in tiles if m <= t), tiles[-1])
    schedule, waves = _made(problem)(problem, target, m, max(tokens, BLOCK_TOKENS[0]))
    schedule = replace(schedule, block_tokens=tokens)
    # the kernel serves a bucket: its split depends on the bucket's widest M, not on m
    kc = waves * target.sms // schedule.tiles(problem, tokens) if m <= 128 else 1
    return replace(schedule, kc=max(1, min(8, kc, problem.units)))


def _made(problem: Gemm) -> Callable[[Gemm, Target, int, int], tuple[Multistage, int]]:
    """How a tile of m tokens is made, by its tokens, and how often such tiles fill the SMs."""
    of = _of_16_bit if problem.form.x_16_bit else _of_e4m3 if problem.activations == "e4m3" else _of_bytes

    def made(problem: Gemm, target: Target, m: int, tokens: int) -> tuple[Multistage, int]:
        schedule, waves = of(problem, target, m, tokens)
        while schedule.stages > 2 and schedule.smem_bytes(problem) > target.smem_per_block:
            schedule = replace(schedule, stages=schedule.stages - 1)
        return schedule, waves

    return made


def choose_for_experts(problem: Gemm, target: Target, tokens: int, reached: int) -> Multistage:
    """Tile of so many tokens, one of FEW_TOKENS; k split so that the tiles of `reached` experts fill the SMs
    twice."""
    made = _made(problem)
    if tokens == 128:
        return made(problem, target, 129, tokens)[0]
    schedule, waves = made(problem, target, tokens, max(tokens, BLOCK_TOKENS[0]))
    schedule = replace(schedule, block_tokens=tokens)
    kc = waves * target.sms // (reached * -(-problem.row_blocks * 64 // schedule.rows))
    return replace(schedule, kc=max(1, min(8, kc, problem.units)))


def _of_16_bit(problem: Gemm, target: Target, m: int, tokens: int) -> tuple[Multistage, int]:
    """Scaled sums take registers for scales and partial sums. The constants of a symmetric weight sit in registers too,
    one too many for wide tiles that split k."""
    if tokens < 128:
        return Multistage(tokens, 4, 2, 4 if tokens == 32 or target.smem_per_sm > 128 * 1024 else 3), 2
    if problem.scales == "post" or (problem.symmetric and m <= 128):
        return Multistage(128, 8, 2, 3, token_warps=2, raster=16), 1
    if m <= 128 and problem.row_blocks <= target.sms:
        return Multistage(128, 4, 2, 3), 1
    return Multistage(128, 8, 2, 3, raster=16), 0


def _of_bytes(problem: Gemm, target: Target, m: int, tokens: int) -> tuple[Multistage, int]:
    tall = tokens == 128 and (m > 128 or problem.row_blocks > target.sms)
    schedule = Multistage(tokens, 8 if tall else 4, 2, 2, raster=16 if tall else 8)
    room = min(target.smem_per_sm // (1 if tall else 2) - 1024, target.smem_per_block) - 1024
    stages = max(2, min(4, room // schedule.stage_bytes(problem)))
    return replace(schedule, stages=stages), 1 if tokens == 128 else 2


def _of_e4m3(problem: Gemm, target: Target, m: int, tokens: int) -> tuple[Multistage, int]:
    """One row tile for each warp from 64 tokens on: products wait in registers to be scaled."""
    if tokens < 64:
        return _of_bytes(problem, target, m, tokens)
    wide = tokens == 128
    return Multistage(tokens, 8 if wide else 4, 1, 3, token_warps=2 if wide else 1), 2


def launch_sizes(schedule: Multistage, problem: Gemm, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the f32 workspace and of the int32 semaphores."""
    if schedule.kc == 1:
        return (1, 1, 1, 1, 4), (1,)
    tiles = schedule.tiles(problem, m)
    held = schedule.row_blocks * schedule.block_tokens // schedule.token_warps // 2
    return (tiles, schedule.kc, held // 4, 32 * schedule.warps, 4), (tiles,)
