"""The search space of W4Ax GEMM: small batches and stream-K on sm_90a, tiles of the persistent program elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import spaces, w4a8, w4ax
from terrazzo.schedules.problem import Gemm

_PERSISTENT = ((16, 4, 1), (32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 2))  # tokens, warps, warps along the tokens
_TURNS = 0.1  # of a stream-K kernel's time that warpgroups in turn save (an estimate, so that both are measured)
_SUMS = 128  # f32 sums of a thread of the persistent program, beside the s32 sums of a block
_REGISTERS = 1.5  # of such a thread, for each f32 and s32 sum


class W4Ax(spaces.Space):
    """Schedules of W4Ax on quantized activations: where a target has native s4, the persistent program multiplies INT4
    blocks as such; elsewhere all blocks are int8, and the form of the scales picks the tile program."""

    programs = {  # noqa: RUF012  (read only)
        "small_batch": w4ax.SmallBatch,
        "stream_k": w4ax.StreamK,
        "integer": w4ax.Integer,
        "persistent": w4ax.Persistent,
    }
    problem: Gemm

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        if _native(target):
            return "persistent", w4ax.choose_persistent(self.problem, target, m)
        if w4ax.serves(self.problem, target, m):
            return "small_batch", w4ax.choose_small_batch(self.problem, target, m)
        if self.problem.two_level:
            return "integer", w4ax.choose_integer(self.problem, target, m)
        return "stream_k", w4ax.choose(self.problem, target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        if not _native(target):
            if m <= w4ax.MAX_TOKENS:
                made = w4a8.small_batches(self.problem, target, m, w4ax.SmallBatch)
                yield from (("small_batch", s) for s in made)
            for tokens, warpgroups, row_blocks, raster in spaces.tiles_of(w4ax.BLOCK_TOKENS, m, self.problem, True):
                other = wide or raster == 8 or -(-m // tokens) > min(raster, 8)  # the same order of tiles otherwise
                tile = dict(block_tokens=tokens, warpgroups=warpgroups, stages=2, raster=raster)
                name, tiles = "stream_k", [w4ax.StreamK(**tile, turns=turns) for turns in (0, 1)]
                if self.problem.two_level:
                    name, tiles = "integer", [w4ax.Integer(**tile)]
                elif not wide and tokens < 64:
                    tiles = tiles[:1]
                for s in tiles if row_blocks == 1 and other else ():
                    yield from ((name, it) for it in spaces.rings(w4ax.fitted(s, self.problem, target), wide))
            return
        widest = next((tokens for tokens, *_ in _PERSISTENT if m <= tokens), _PERSISTENT[-1][0])
        for tokens, warps, token_warps in (it for it in _PERSISTENT if it[0] <= widest):
            for row_blocks in (1, 2):
                for stages in (2, 3, 4):
                    for ctas in (1, 2):
                        yield "persistent", w4ax.Persistent(tokens, warps, row_blocks, stages, token_warps, ctas)

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if (program == "persistent") != _native(target):
            return f"{program} is not the program of {target.arch}"
        if program == "small_batch":
            return spaces.small_batch_refusal(schedule, self.problem, target, m, w4ax.MAX_TOKENS)
        if not _native(target):
            if (program == "integer") != self.problem.two_level:
                return f"{program} is not the program of {'two-level' if self.problem.two_level else 'block'} scales"
            if schedule.block_tokens not in w4ax.BLOCK_TOKENS or not schedule.legal():
                return (
                    f"{schedule.warpgroups} warpgroups with {schedule.sums} sums of a thread do not fit the registers, "
                    "or have no turns"
                )
            return spaces.ring_refusal(schedule, self.problem, target, 2)
        tile = (schedule.block_tokens, schedule.warps, schedule.token_warps)
        if tile not in _PERSISTENT or schedule.row_blocks not in (1, 2) or schedule.rows % 64:
            return "warps do not divide the tile"
        size = schedule.smem_bytes(self.problem)
        if schedule.stages < 2 or schedule.ctas < 1:
            return "needs two stages and a CTA"
        if schedule.ctas > 1 and schedule.ctas * (size + 1024) > target.smem_per_sm:
            return f"{schedule.ctas} CTAs do not fit an SM's shared memory"
        registers = min(255, _REGISTERS * 2 * schedule.sums + 48) * schedule.warps * 32
        if schedule.sums > _SUMS or schedule.ctas * registers > target.registers_per_sm:
            return f"{schedule.ctas} CTAs with {schedule.sums} sums of a thread do not fit the registers"
        return spaces.memory_refusal(size, target)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        if program == "small_batch":
            return w4ax.small_batch_us(schedule, self.problem, target)
        blocks = -(-m // schedule.block_tokens)
        if not _native(target):
            if program == "integer":
                return w4ax.integer_us(schedule, self.problem, target, m)
            part = w4ax.partition(schedule, self.problem, target, m)
            tile = _Tile(schedule.block_tokens, schedule.warpgroups, schedule.warpgroups, schedule.stages)
            us = spaces.stream_k_us(tile, self.problem, target, (blocks, blocks), part)
            return us * (1 - _TURNS * getattr(schedule, "turns", 0))
        tiles = -(-self.problem.row_blocks * 64 // schedule.rows) * blocks
        ctas = schedule.ctas * target.sms
        part = -(-tiles * self.problem.units // ctas)  # units of the busiest CTA, which splits along k at will
        rows = schedule.rows // 64
        load = (rows * w4ax.UNIT_BYTES + 0.3 * schedule.block_tokens * w4ax.BLOCK) * ctas / (target.dram_gb_s * 1e3)
        mma = rows * 64 * 128 * 2 * schedule.block_tokens * ctas / (0.6 * target.tflops("s8") * 1e6)
        return 2.0 + part * max(load, mma, 1.2 / (schedule.stages * schedule.ctas)) + 0.5 * schedule.ctas


def _native(target: Target) -> bool:
    return target.supports("mma.s4")


class _Tile:
    """A W4Ax tile as the stream-K cost asks for it."""

    def __init__(self, block_tokens: int, warpgroups: int, cta_blocks: int, stages: int) -> None:
        self.block_tokens, self.warpgroups, self.cta_blocks, self.stages = block_tokens, warpgroups, cta_blocks, stages
