"""The search space of W4A8 on e4m3 activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import spaces, w4a8, w4a8_fp8
from terrazzo.schedules.problem import Gemm

_SETTLE = 0.15  # of a unit's tensor-core time: sums of a group are scaled and added (an estimate)


class W4A8Fp8(spaces.W4A8):
    """As W4A8 on int8, with less room for accumulators; small batches run on mma.sync where e4m3 has it."""

    programs = {  # noqa: RUF012  (read only)
        "small_batch": w4a8.SmallBatch,
        "stream_k": w4a8_fp8.StreamK,
        "multistage": w4a8.Multistage,
    }

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        return w4a8_fp8.choose_program(self.problem, target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        if not target.supports("wgmma.e4m3"):
            yield from (pair for pair in super().every(target, m, wide) if pair[0] != "small_batch" or m <= 16)
            return
        for shape in spaces.tiles_of(w4a8_fp8.BLOCK_TOKENS, m, self.problem, wide):
            s = w4a8_fp8.StreamK(*shape[:3], stages=2, raster=shape[3])
            s = w4a8.fitted(s, self.problem, target, w4a8.UNROLLED_STAGES)
            yield from (("stream_k", it) for it in spaces.rings(s, wide))
            yield from self._pairs(s, shape, target, m)

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if program == "stream_k" and not target.supports("wgmma.e4m3"):
            return f"{target.arch} has no wgmma of e4m3"
        if program != "stream_k" and not target.supports("mma.e4m3"):
            return f"{target.arch} emulates mma.sync of e4m3"
        if program == "multistage" and schedule.block_tokens >= 64 and schedule.row_blocks > 1:
            return "products wait in registers to be scaled: one row tile for each warp from 64 tokens on"
        return super().refusal(program, schedule, target, m)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        return super().cost(program, schedule, target, m) + settle_us(self.problem, target, m)


def settle_us(problem: Gemm, target: Target, m: int) -> float:
    """Predicted microseconds of scaling and adding the sums of m tokens."""
    return _SETTLE * 2 * m * problem.n * problem.k / target.tflops("e4m3") / 1e6
