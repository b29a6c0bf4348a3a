"""The search space of grouped GEMMs: stream-K tiles over the tiles of all experts that have tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import grouped, spaces, stream_k, w4a8, w4a8_fp8, w4a8_fp8_space
from terrazzo.schedules.partition import share_tiles
from terrazzo.schedules.problem import WeightOnlyGemm


class Grouped(spaces.Space):
    """Schedules of a grouped GEMM for m tokens of all experts together.

    Args:
        form: schedules.stream_k, schedules.w4a8 or schedules.w4a8_fp8, whose tiles the experts share.
        problem: of one expert. experts: their number.
        unit_bytes: of 64 rows by 128 k, parameters included. x_bytes: of an element of x.
        dtype: of the tensor cores' operands.
        scaled_sums: W4A16 only: the kernel scales f32 sums of each group; None for W4A8.
    """

    def __init__(
        self,
        form: ModuleType,
        problem: Any,
        experts: int,
        unit_bytes: int,
        x_bytes: int,
        dtype: str,
        scaled_sums: bool | None = None,
    ) -> None:
        super().__init__(problem)
        self.form, self.experts, self.unit_bytes, self.x_bytes = form, experts, unit_bytes, x_bytes
        self.numerics = () if scaled_sums is None else (scaled_sums,)
        self.dtype = dtype
        self.programs = {"grouped": form.StreamK}

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        return "grouped", grouped.choose(self.form, self.problem, target, m, self.experts, *self.numerics)

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        average = -(-m // self.experts)
        room = grouped.room(target, self.experts)
        rings = ({"stage_k": 64}, {"stage_k": 128}) if self.numerics else ({},)
        for shape in spaces.tiles_of(self.form.BLOCK_TOKENS, 2 * average, self.problem, wide):
            for own in rings:
                s = self.form.StreamK(*shape[:3], stages=2, raster=shape[3], **own)
                yield from (("grouped", it) for it in spaces.rings(self.form.fitted(s, self.problem, room), wide))

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        if not target.supports(f"wgmma.{self.dtype}"):
            return f"{target.arch} has no warpgroup instructions"
        if schedule.block_tokens not in self.form.BLOCK_TOKENS[: -1 if self.numerics == (True,) else None]:
            return f"no tile of {schedule.block_tokens} tokens"
        if getattr(schedule, "per_sm", 1) != 1:
            return "one CTA on an SM"
        of_cluster = schedule.cluster_refusal(self.problem, grouped.room(target, self.experts))
        if of_cluster:
            return of_cluster
        if not grouped.legal(schedule):
            return f"{schedule.warpgroups} warpgroups of {schedule.row_blocks} row blocks do not fit the registers"
        if self.numerics:
            reason = spaces.sums_refusal(schedule, self.numerics[0])
            if reason:
                return reason
        return spaces.ring_refusal(
            schedule, self.problem, grouped.room(target, self.experts), 3 if self.numerics else 2
        )

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        active, average = min(self.experts, m), -(-m // min(self.experts, m))
        each = -(-average // schedule.block_tokens)
        tiles = active * each * -(-self.problem.row_blocks // schedule.cta_blocks)
        part = share_tiles(tiles, self.problem.units, target.sms)
        blocks = active * each, each
        return spaces.stream_k_us(
            schedule, self.problem, target, blocks, part, self.unit_bytes, self.x_bytes, self.dtype
        )


class GroupedFp8(Grouped):
    """As grouped W4A8 on int8; sums of a group of k are scaled and added."""

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        return super().cost(program, schedule, target, m) + w4a8_fp8_space.settle_us(self.problem, target, m)


def of_w4a16(n: int, k: int, groups_per_128: int, record_bytes: int, experts: int, scaled_sums: bool) -> Grouped:
    """The space of grouped W4A16; arguments as `WeightOnlyGemm` and `Grouped`."""
    problem = WeightOnlyGemm(n, k, groups_per_128, record_bytes)
    return Grouped(stream_k, problem, experts, problem.unit_bytes, 2, "f16", scaled_sums)


def of_w4a8(problem: Any, experts: int) -> Grouped:
    """The space of grouped W4A8 for an `IntegerGemm` of one expert."""
    return Grouped(w4a8, problem, experts, problem.unit_bytes, 1, "s8")


def of_w4a8_fp8(problem: Any, experts: int) -> Grouped:
    """The space of grouped W4A8 on e4m3 activations for an `IntegerGemm` of one expert."""
    return GroupedFp8(w4a8_fp8, problem, experts, problem.unit_bytes, 1, "e4m3")
