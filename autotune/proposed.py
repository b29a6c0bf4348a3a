"""What a job tries of a problem: its search space, and schedules that tables of records name."""

from __future__ import annotations

import random
from functools import cache

from terrazzo.autotune.database import Problem
from terrazzo.autotune.jobs import Job
from terrazzo.autotune.operators import get_operator
from terrazzo.lowering.targets import Target
from terrazzo.schedules.records import Table
from terrazzo.schedules.spaces import Candidate


def candidates(problem: Problem, target: Target, job: Job) -> list[Candidate]:
    """The schedules of a problem: the heuristic's first, then those of the job's tables, then by predicted time.

    Raises:
        ArgumentError: a table that cannot be read.
    """
    space = get_operator(problem.op).space(problem)
    first, *found = space.candidates(target, problem.m, job.most, job.within, job.wide)
    if job.sample and len(found) >= job.sample:
        kept = random.Random(f"{job.seed} {problem}").sample(range(len(found)), job.sample - 1)
        found = [found[at] for at in sorted(kept)]
    known = (of_table(_table(path), problem, target) for path in job.tables)
    each: dict[tuple, Candidate] = {}
    for it in (first, *filter(None, known), *found):
        each.setdefault((it.program, it.schedule), it)
    return list(each.values())


def of_table(table: Table, problem: Problem, target: Target) -> Candidate | None:
    """The schedule that a table has for a problem, whatever GPU it was measured on; None if it fits no longer."""
    choice, _ = table.find(problem.op, dict(problem.facts), problem.m)
    space = get_operator(problem.op).space(problem)
    schedule = choice and space.revive(choice.program, choice.params, target, problem.m)[0]
    if not choice or not schedule:
        return None
    return Candidate(choice.program, schedule, space.cost(choice.program, schedule, target, problem.m))


@cache
def _table(path: str) -> Table:
    return Table.read(path)
