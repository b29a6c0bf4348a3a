"""A cost model that learns from the trials of a job: gradient-boosted trees (XGBoost) on schedule and problem features.

It predicts log(time / the problem's fastest known time) as the cost model's log ratio plus what the trees have learned
of its error. Problems share one model, so that what a small weight taught helps with a large one.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from terrazzo.lowering.errors import ToolchainError

if TYPE_CHECKING:
    import xgboost
    from terrazzo.autotune.database import Problem
    from terrazzo.schedules.spaces import Candidate

EXTRA = "pip install 'terrazzo[tune]'"
LEAST = 6
"""Results before trees are trained; fewer say too little."""
_TREES = {"max_depth": 3, "eta": 0.2, "subsample": 0.8, "colsample_bytree": 0.8, "min_child_weight": 3, "lambda": 5.0}
_ROUNDS = 25


def _xgboost() -> ModuleType:
    try:
        return importlib.import_module("xgboost")
    except ImportError as error:
        raise ToolchainError(f"the learned strategy needs xgboost: {EXTRA}, or use --strategy top-k") from error


class Model:
    """Ranks candidates by what was measured so far.

    Raises:
        ToolchainError: xgboost is not installed; the message names the extra.
    """

    def __init__(self, seed: int = 0) -> None:
        self.xgboost, self.seed = _xgboost(), seed
        self.seen: dict[Problem, list[tuple[Candidate, float]]] = {}
        self.count = 0
        self.trained_at = 0
        self.trees: xgboost.Booster | None = None
        self.columns: list[str] = []

    def learn(self, problem: Problem, candidate: Candidate, us: float) -> None:
        """Keep a result; the trees are trained when they are next asked."""
        self.seen.setdefault(problem, []).append((candidate, us))
        self.count += 1

    def rank(self, problem: Problem, candidates: Sequence[Candidate]) -> list[int]:
        """Places in `candidates`, the fastest expected first."""
        self._train()
        if self.trees is None:
            return list(range(len(candidates)))
        rows = [features(problem, it) for it in candidates]
        base = np.array([self._prior(problem, it) for it in candidates])
        data = self.xgboost.DMatrix(self._matrix(rows), base_margin=base)
        return list(np.argsort(self.trees.predict(data), kind="stable"))

    def _prior(self, problem: Problem, candidate: Candidate) -> float:
        """Log of the predicted time against the first result's, whose measured time is the unit of the problem."""
        known = self.seen.get(problem)
        return math.log(candidate.us / (known[0][0].us if known else candidate.us))

    def _matrix(self, rows: Sequence[dict[str, float]]) -> np.ndarray:
        return np.array([[row.get(name, math.nan) for name in self.columns] for row in rows], dtype=np.float32)

    def _train(self) -> None:
        if self.count < LEAST or self.count == self.trained_at:
            return
        pairs = [(problem, it, us) for problem, known in self.seen.items() for it, us in known]
        rows = [features(problem, it) for problem, it, _ in pairs]
        self.columns = sorted({name for row in rows for name in row})
        label = np.array([math.log(us / self.seen[problem][0][1]) for problem, _, us in pairs])
        base = np.array([self._prior(problem, it) for problem, it, _ in pairs])
        # what is near a problem's best must be ranked right; the slow end need not
        fastest = {problem: min(us for _, us in known) for problem, known in self.seen.items()}
        weight = np.array([(fastest[problem] / us) ** 2 for problem, _, us in pairs])
        data = self.xgboost.DMatrix(self._matrix(rows), label=label, base_margin=base, weight=weight)
        parameters = {**_TREES, "objective": "reg:squarederror", "tree_method": "exact", "verbosity": 0}
        parameters |= {"seed": self.seed, "nthread": 1}  # the same ranks in every run
        self.trees = self.xgboost.train(parameters, data, _ROUNDS)
        self.trained_at = self.count


def features(problem: Problem, candidate: Candidate) -> dict[str, float]:
    """Numbers that describe a schedule of a problem; logarithms where ratios matter. Fields of other programs are
    missing values."""
    facts = dict(problem.facts)
    row = {f"{problem.op}.{candidate.program}": 1.0, "predicted": math.log(candidate.us)}
    row |= {name: math.log2(facts[name]) for name in ("n", "k", "tokens", "rows", "experts") if name in facts}
    row["m"] = math.log2(problem.m)
    p = candidate.params
    for name, value in p.items():
        row[name] = math.log2(value) if value > 0 else -1.0
    if "block_tokens" in p:
        m = -(-problem.m // facts.get("experts", 1))
        blocks = p.get("warpgroups", 0) * p.get("row_blocks", 1) or p.get("warps", 4) * p.get("row_blocks", 1) / 4
        tiles = min(problem.m, facts.get("experts", 1)) * -(-m // p["block_tokens"]) * -(-facts["n"] // (64 * blocks))
        row |= {"tiles": math.log2(tiles), "last wave": tiles / 132 % 1.0}
        row["padding"] = -(-m // p["block_tokens"]) * p["block_tokens"] / m
        row["rows of a tile"] = math.log2(64 * blocks)
        row["ring"] = math.log2(p["stages"] * p.get("stage_k", 128))
    if "kc" in p and "nc" in p:
        rows, items = -(-facts["n"] // 16) / p["nc"], -(-facts["k"] // 128) / p["kc"]
        row |= {"ctas": p["kc"] * p["nc"], "steps": math.ceil(rows / p["chunk"]) * math.ceil(items / p["warps"])}
        row["waste"] = math.ceil(items / p["warps"]) * p["warps"] / items
        row["in flight"] = p["warps"] * p["stages"] * p["chunk"]
    if "min_blocks" in p:
        row["on sm"] = p["warps"] * p["min_blocks"]
        row["in flight"] = p["warps"] * p["min_blocks"] * (p["stages"] - 1) * p["tiles"]
    return row
