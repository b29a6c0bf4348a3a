"""Recorded search spaces: what every schedule of some problems took on a GPU, to replay searches without one."""

from __future__ import annotations

import json
import math
from pathlib import Path

from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import get_operator
from terrazzo.autotune.search import Limits, Plan, Search
from terrazzo.lowering.targets import TARGET_NAMES, Target
from terrazzo.schedules import linear_spaces
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.spaces import Candidate

DATA = Path(__file__).parents[1] / "data" / "tuning"
FACTS = {"group": 128, "symmetric": False, "scale_dtype": "float16", "dtype": "float16"}
H200 = Target.parse("nvidia/nvidia-h200")


def load(*names: str) -> dict[Problem, list[tuple[Candidate, float]]]:
    """Problem -> its candidates, by predicted time, and their measured microseconds. Several files are one space."""
    found: dict[Problem, dict[Candidate, float]] = {}
    for name in names:
        data = json.loads((DATA / f"{name}.json").read_text())
        assert data["gpu"] == H200.name
        for row in data["rows"]:
            fields = dict(zip(data["columns"], row))
            n, k, m, us = (fields.pop(name) for name in ("n", "k", "m", "us"))
            space = linear_spaces.of(Gemm(n, k, 1, 192))
            schedule = space.programs[data["program"]](**fields)
            cost = space.cost(data["program"], schedule, H200, m)
            known = found.setdefault(Problem.of("w4a16", {"n": n, "k": k, **FACTS}, m), {})
            known[Candidate(data["program"], schedule, cost)] = us
    return {problem: sorted(known.items(), key=lambda pair: pair[0].us) for problem, known in found.items()}


def load_spaces(path: Path) -> dict[Problem, list[tuple[Candidate, float]]]:
    """Whole spaces as `terrazzo tune space` writes them: the heuristic's schedule first, then by predicted time."""
    data, found = json.loads(path.read_text(encoding="utf-8")), {}
    target = next(it for it in map(Target.parse, TARGET_NAMES) if it.name == data["gpu"])
    for one in data["problems"]:
        problem = Problem.of(one["op"], one["facts"], one["m"])
        space, m, known = get_operator(problem.op).space(problem), problem.m, []
        for program, own in one["programs"].items():
            for *values, us in own["rows"]:
                schedule, why = space.revive(program, dict(zip(own["columns"], values)), target, m)
                if us is not None and not why:
                    known.append((Candidate(program, schedule, space.cost(program, schedule, target, m)), us))
        first = space.heuristic(target, m)
        known.sort(key=lambda pair: ((pair[0].program, pair[0].schedule) != first, pair[0].us))
        found[problem] = known
    return found


def replay(search: Search, times: list[float], limit: int | None = None) -> None:
    """Answer a search from the record until it ends or `limit` results are in."""
    while not search.done and (limit is None or len(search.results) < limit):
        index = search.ask()
        search.tell(index, times[index])


def regret(spaces: dict[Problem, list[tuple[Candidate, float]]], strategy: str, share: float, seed: int = 0) -> float:
    """Geometric mean over problems of best found / best, with `share` of each problem's schedules tried, at least one.

    Problems follow each other as in a job; the first schedule of each is the cost model's.
    """
    plan, logs = Plan(strategy, Limits(), seed), []
    for problem, known in spaces.items():
        search = plan.search(problem, [candidate for candidate, _ in known])
        replay(search, [us for _, us in known], max(1, math.floor(share * len(known))))
        logs.append(math.log(search.best / min(us for _, us in known)))
    return math.exp(sum(logs) / len(logs))
