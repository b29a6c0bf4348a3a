"""Every schedule that a program could run for a problem, and what a cost model says of it: the search space of tuning.

A space holds schedules that fit by construction (shared memory, registers, divisibility). The predicted microseconds
order them; they are fitted to measurements on H200 for the programs of that GPU, and analytic for the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from math import log2
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import records

MOST = 160
"""Schedules of a problem that are worth a compilation, by default."""
WITHIN = 1.6
"""Predicted times above this multiple of the shortest one are left out."""
RASTER = 8
"""The usual one: blocks of tokens that walk over the rows together."""
_FAR = 0.01  # of its time, by which a schedule is tried later for each halving or doubling of the first raster


@dataclass(frozen=True)
class Candidate:
    """One schedule of a program and its predicted time in microseconds."""

    program: str
    schedule: Any
    us: float

    @property
    def params(self) -> dict[str, int]:
        """The numbers of the schedule, as records hold them."""
        own, values = getattr(self.schedule, "recorded", None), asdict(self.schedule)
        return {name: value for name, value in values.items() if (name in own if own else isinstance(value, int))}


class Space(ABC):
    """The schedules of one operator for one weight or cache.

    Attributes:
        programs: name of a program -> its schedule class, a dataclass of integers.
        problem: what the schedules' own functions ask.
    """

    programs: Mapping[str, type]

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    @abstractmethod
    def heuristic(self, target: Target, m: int) -> tuple[str, Any]:
        """Program and schedule that the operator takes without a record."""

    @abstractmethod
    def every(self, target: Target, m: int, wide: bool = False) -> Iterator[tuple[str, Any]]:
        """Programs and schedules worth considering for m tokens; `refusal` filters them. wide: also those that differ
        only in what rarely matters (fewer stages, another raster), for a record of a whole space."""

    @abstractmethod
    def refusal(self, program: str, schedule: Any, target: Target, m: int) -> str:
        """Why the schedule cannot serve m tokens on the target, or ""."""

    @abstractmethod
    def cost(self, program: str, schedule: Any, target: Target, m: int) -> float:
        """Predicted microseconds."""

    def fixed(self, program: str) -> dict[str, Any]:
        """Fields of a program's schedules that the problem fixes: no record has them."""
        return {}

    def candidates(
        self, target: Target, m: int, most: int = MOST, within: float = WITHIN, wide: bool = False
    ) -> list[Candidate]:
        """Legal schedules, the heuristic's first, then by predicted time as a multiple of their program's shortest: the
        models of two programs are fitted each for itself, so all programs are tried.

        Args:
            most: at most so many. within: none predicted slower than its program's shortest by this factor.
            wide: see `every`.
        """
        chosen, every = self.heuristic(target, m), self.every(target, m, wide)
        legal = dict.fromkeys([chosen, *(pair for pair in every if not self.refusal(*pair, target, m))])
        first, *found = [Candidate(*pair, self.cost(*pair, target, m)) for pair in legal]
        shortest: dict[str, float] = {}
        for it in (first, *found):
            shortest[it.program] = min(it.us, shortest.get(it.program, it.us))
        found = [it for it in found if it.us <= within * shortest[it.program]]
        found.sort(key=lambda it: (it.us / shortest[it.program] * _later(it.schedule), it.us))
        return [first, *found[: most - 1]]

    def revive(self, program: str, params: Mapping[str, Any], target: Target, m: int) -> tuple[Any, str]:
        """(schedule, "") from its recorded parameters, or (None, why it cannot be used)."""
        kind = self.programs.get(program)
        if kind is None:
            return None, f"there is no program {program!r}"
        fixed = self.fixed(program)
        held = [it for it in fields(kind) if it.name not in fixed]
        names, needed = {it.name for it in held}, {it.name for it in held if it.default is MISSING}
        if not needed <= set(params) <= names or not all(isinstance(value, int) for value in params.values()):
            return None, f"a schedule of {program} has the integers {sorted(names)}, the record has {dict(params)}"
        low = [it.name for it in held if params.get(it.name, 1) < bool(it.default)]  # 0 only where it is usual
        if low:
            return None, f"{program} with {low[0]} = {params[low[0]]}, a count below one"
        schedule = kind(**fixed, **params)
        reason = self.refusal(program, schedule, target, m)
        return (None, reason) if reason else (schedule, "")


def choose(
    space: Space, op: str, facts: Mapping[str, Any], target: Target, m: int, device: Target | None = None
) -> tuple[str, Any]:
    """Program and schedule for m tokens: the record's if there is one that fits, else the heuristic's.

    Args:
        facts: what tells problems of the operator apart, see `records.pick`. device: the GPU that runs the kernel
            where that is newer than the target; it has no records for code of another architecture.

    Raises:
        ArgumentError: a schedule of `records.forced` that cannot serve the problem.
    """
    if device is None or device.arch == target.arch:
        found = records.pick(op, facts, m, device or target)
        if found is not None:
            schedule, reason = space.revive(found.program, found.params, target, m)
            if not reason:
                return found.program, schedule
            if found.how == "forced":
                raise ArgumentError("schedule", dict(found.params), reason, "take one of the space")
    return space.heuristic(target, m)


def _later(schedule: Any) -> float:
    """1, or more for rasters that no cost model tells apart: the usual one of every tile is tried before the others."""
    return 1 + _FAR * abs(log2(getattr(schedule, "raster", RASTER) / RASTER))
