"""The search space of grouped GEMMs: stream-K tiles over the tiles of all experts that have tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import grouped, spaces, w4a8_fp8, w4a8_fp8_space
from terrazzo.schedules.partition import share_tiles
from terrazzo.schedules.problem import Gemm


class Grouped(spaces.Space):
    """Schedules of a grouped GEMM for m tokens of all experts together."""

    problem: Gemm

    def __init__(self, problem: Gemm) -> None:
        super().__init__(problem)
        self.form = grouped.FORMS[problem.activations]
        self.programs = {"grouped": self.form.StreamK}
        self.f16 = problem.activations == "f16"

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        return "grouped", grouped.choose(self.problem, target, m)

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        average = -(-m // self.problem.experts)
        room = grouped.room(target, self.problem.experts)
        rings = ({"stage_k": 64}, {"stage_k": 128}) if self.f16 else ({},)
        for shape in spaces.tiles_of(self.form.BLOCK_TOKENS, 2 * average, self.problem, wide):
            for own in rings:
                s = self.form.StreamK(*shape[:3], stages=2, raster=shape[3], **own)
                yield from (("grouped", it) for it in spaces.rings(self.form.fitted(s, self.problem, room), wide))

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        scaled_sums = self.f16 and self.problem.scales == "post"
        room = grouped.room(target, self.problem.experts)
        if not target.supports(f"wgmma.{self.problem.activations}"):
            return f"{target.arch} has no warpgroup instructions"
        if schedule.block_tokens not in self.form.BLOCK_TOKENS[: -1 if scaled_sums else None]:
            return f"no tile of {schedule.block_tokens} tokens"
        if getattr(schedule, "per_sm", 1) != 1:
            return "one CTA on an SM"
        of_cluster = schedule.cluster_refusal(self.problem, room)
        if of_cluster:
            return of_cluster
        if not grouped.legal(schedule):
            return f"{schedule.warpgroups} warpgroups of {schedule.row_blocks} row blocks do not fit the registers"
        reason = spaces.sums_refusal(schedule, scaled_sums) if self.f16 else ""
        return reason or spaces.ring_refusal(schedule, self.problem, room, 3 if self.f16 else 2)

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        active, average = min(self.problem.experts, m), -(-m // min(self.problem.experts, m))
        each = -(-average // schedule.block_tokens)
        tiles = active * each * -(-self.problem.row_blocks // schedule.cta_blocks)
        part = share_tiles(tiles, self.problem.units, target.sms)
        blocks = active * each, each
        us = spaces.stream_k_us(schedule, self.problem, target, blocks, part)
        return us + (w4a8_fp8_space.settle_us(self.problem, target, m) if self.form is w4a8_fp8 else 0)
