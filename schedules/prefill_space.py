"""The search space of prefill attention: every program, width of rows and ring that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention_prefill as prefill
from terrazzo.schedules import spaces

_SLOW = {"shared": 1.55, "mma": 4.4}  # times the tensor cores' best, with wide tiles, on H200
_TOKENS, _ROWS = 3584, 8 * 32768  # what predicted times are for: they only order schedules


class Prefill(spaces.Space):
    """Schedules of prefill over one kind of cache; a kernel serves any number of sequences and tokens, so m is 1."""

    programs = {f"prefill_{name}": prefill.Prefill for name in ("mma", "shared")}  # noqa: RUF012  (read only)
    problem: prefill.PrefillProblem

    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        chosen = prefill.choose(self.problem, target)
        return f"prefill_{chosen.program}", chosen

    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        yield from ((f"prefill_{it.program}", it) for it in prefill.every(self.problem, target))

    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        return "" if schedule in prefill.every(self.problem, target) else f"{program} has no such tile on {target.arch}"

    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        """An estimate: the tensor cores' time, longer where every warp or warpgroup converts for its own rows, with
        narrow tiles and with short rings."""
        flop = 4.0 * _TOKENS * _ROWS * self.problem.head_dim
        slow = _SLOW[schedule.program] * (1 + 32 / schedule.rows) * (1 + 0.05 * (4 - schedule.stages))
        return 5.0 + slow * flop / target.tflops("f16") / 1e6

    def revive(self, program: str, params: Mapping[str, Any], target: Target, m: int) -> tuple[Any, str]:
        names = {"row_tiles", "warps", "stages", "buffers"}
        needed = names if program == "prefill_shared" else names - {"buffers"}
        known = program in self.programs and needed <= set(params) <= names
        if not known or not all(type(it) is int for it in params.values()):
            return None, f"a schedule of {program} has the integers {sorted(needed)}, the record has {dict(params)}"
        schedule = prefill.Prefill(program.removeprefix("prefill_"), **params)
        reason = self.refusal(program, schedule, target, m)
        return (None, reason) if reason else (schedule, "")
