"""The search space of decode attention: how many warps share a sequence, what they keep in flight, CTAs of an SM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention, attention_cost, spaces

BUCKETS = tuple(1 << i for i in range(4, 23))
"""Numbers of tokens that records are kept for."""
_WARPS = (2, 3, 4, 6, 8, 12, 16)


def bucket(tokens: int) -> int:
    """The one of `BUCKETS` that a number of tokens falls under."""
    return next((most for most in BUCKETS if tokens <= most), BUCKETS[-1])


class Decode(spaces.Space):
    """Schedules of one decode call; m is the number of (sequence, kv head) pairs."""

    programs = {  # noqa: RUF012  (read only)
        "decode": attention.Decode, "warpgroups": attention.WarpgroupDecode,
    }  # fmt: skip
    problem: attention.DecodeProblem

    def at(self, m: int) -> attention.DecodeProblem:
        """The problem with m pairs."""
        return replace(self.problem, pairs=m)

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        chosen = attention.choose(self.at(m), target)
        return ("warpgroups" if isinstance(chosen, attention.WarpgroupDecode) else "decode"), chosen

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        yield from self._warpgroups(target, wide)
        base = attention.Decode(attention.row_tiles(self.problem), 1, 1, 2, 1)
        kinds = (False, True) if attention.is_wide(self.problem) and self.problem.paired else (False,)
        for shared, warps in itertools.product(kinds, _WARPS):
            most = attention.warps_per_sm(self.problem, shared)
            for blocks in range(1, most // warps + 1):
                # fewer than half of the warps that fit hide too little; what does not divide leaves some out
                if warps * blocks * 2 < most and not wide:
                    continue
                for tiles in (1, 2, 4):
                    for stages in (2, 3, 4, 5, 6):
                        sizes = dict(warps=warps, tiles=tiles, stages=stages, min_blocks=blocks)
                        yield "decode", replace(base, **sizes, shared_rows=shared)

    def _warpgroups(self, target: Target, wide: bool) -> Iterator[tuple[str, Any]]:
        """Schedules on wgmma, where rows are enough for one."""
        if self.problem.rows > 8 and target.supports("wgmma.f16"):
            tiles = attention.warpgroup_tiles(self.problem)
            most = attention.warpgroup_warps(self.problem, tiles)
            for warps, blocks, stages in itertools.product((4, 8, 12, 16), (1, 2, 3), (2, 3, 4, 5, 6)):
                if warps * blocks <= most and (warps * blocks * 2 > most or wide):
                    yield "warpgroups", attention.WarpgroupDecode(tiles, warps, 4, stages, blocks)

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        problem = self.problem
        if program == "warpgroups":
            return self._refusal_of_warpgroups(schedule, target)
        if schedule.row_tiles != attention.row_tiles(problem):
            return f"{problem.rows} rows need {attention.row_tiles(problem)} row tiles"
        if min(schedule.warps, schedule.tiles, schedule.min_blocks) < 1 or schedule.stages < 2:
            return "a count below one, or a ring of less than two stages"
        if not 0 <= schedule.ahead <= 32:
            return "a lane fetches a stage ahead, of which there are 32"
        if schedule.shared_rows and not problem.paired:
            return "rows in shared memory are read for two atoms of keys, of which 16-bit keys have one in a load"
        if schedule.shared_rows and not attention.is_wide(problem):
            return "only the fragments of 16 rows of 128 dimensions are kept in shared memory"
        if schedule.warps * schedule.min_blocks > attention.warps_per_sm(problem, schedule.shared_rows):
            return f"{schedule.warps} warps of {schedule.min_blocks} CTAs need more registers than an SM has"
        tokens = 16 * schedule.tiles
        if not problem.divides(tokens):
            return f"stages of {tokens} tokens do not divide the groups, pages and residual blocks"
        return "" if attention.fits(schedule, problem, target) else "its rings do not fit the shared memory"

    def _refusal_of_warpgroups(self, schedule: Any, target: Target) -> str:
        problem = self.problem
        try:
            attention.check(schedule, problem, target)
        except ArgumentError as error:
            return error.constraint
        if not 0 <= schedule.ahead <= 32:
            return "a lane fetches a stage ahead, of which there are 32"
        if schedule.min_blocks * schedule.warps > attention.warpgroup_warps(problem, schedule.row_tiles):
            return f"{schedule.warps} warps of {schedule.min_blocks} CTAs need more registers than an SM has"
        return "" if attention.fits(schedule, problem, target) else "its rings do not fit the shared memory"

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        problem = self.at(m)
        division = attention.divide(problem, schedule, target)
        if program == "warpgroups":
            return attention_cost.warpgroups_us(problem, schedule, target, division)
        return attention_cost.predicted_us(problem, schedule, target, division)
