"""Strategies: which schedule of a problem to try next, asked one by one and told each result.

    exhaustive   every schedule, by predicted time
    top-k        the K schedules of the shortest predicted time
    learned      batches that a model trained on all results so far ranks first (autotune/learned.py)
    random       any order: what the others are held against

The first schedule of every search is the heuristic's, which is the baseline of its problem.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    from terrazzo.autotune.database import Problem
    from terrazzo.autotune.learned import Model
    from terrazzo.schedules.spaces import Candidate

STRATEGIES = ("learned", "top-k", "exhaustive", "random")
TOP_K = 16
GAIN = 0.99
"""A new best must be below this multiple of the old one to count as progress for early stopping."""
BATCH = 4
EXPLORE = 0.15


def usual() -> str:
    """The strategy of a job that names none: "top-k" where xgboost, which "learned" needs, is not installed."""
    return "learned" if find_spec("xgboost") else "top-k"


@dataclass(frozen=True)
class Limits:
    """When the search of one problem ends.

    Attributes:
        trials: at most so many schedules; 0 for no limit. patience: stop after so many in a row that bring no progress;
            0 for never.
    """

    trials: int = 0
    patience: int = 0


class Search(ABC):
    """The search of one problem. `ask` hands out each candidate once; None means wait for results, or done."""

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], limits: Limits) -> None:
        if not candidates:
            raise ArgumentError("candidates", str(problem), "has no legal schedule", "leave this problem out")
        self.problem, self.candidates, self.limits = problem, list(candidates), limits
        self.left = list(range(len(candidates)))
        self.out: set[int] = set()
        self.results: dict[int, float | None] = {}
        self.best: float | None = None
        self.since_best = 0

    @property
    def total(self) -> int:
        """Trials that this search takes at most."""
        return min(len(self.candidates), self.limits.trials or len(self.candidates))

    @property
    def spent(self) -> int:
        return len(self.out) + len(self.results)

    @property
    def exhausted(self) -> bool:
        """Whether nothing more will be handed out."""
        stalled = bool(self.limits.patience) and self.since_best >= self.limits.patience
        return not self.left or self.spent >= self.total or stalled

    @property
    def done(self) -> bool:
        return self.exhausted and not self.out

    def ask(self) -> int | None:
        """The next candidate's index, or None."""
        if self.exhausted:
            return None
        index = self.left[0] if len(self.left) == len(self.candidates) else self.pick()
        if index is not None:
            self.left.remove(index)
            self.out.add(index)
        return index

    def tell(self, index: int, us: float | None) -> None:
        """The median time of a candidate, microseconds, or None if it failed; also of one that was never asked for."""
        self.out.discard(index)
        if index in self.left:
            self.left.remove(index)
        self.results[index] = us
        if us is not None and (self.best is None or us < GAIN * self.best):
            self.since_best = 0
        else:
            self.since_best += 1
        if us is not None:
            self.best = us if self.best is None else min(us, self.best)

    @abstractmethod
    def pick(self) -> int | None:
        """One of `left` (never empty), or None to wait for results."""


class InOrder(Search):
    """By predicted time: exhaustive, or the first K with a limit of trials."""

    def pick(self) -> int | None:
        return self.left[0]


class Random(Search):
    """In a random order."""

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], limits: Limits, seed: int = 0) -> None:
        super().__init__(problem, candidates, limits)
        self.random = random.Random(f"{seed} {problem}")

    def pick(self) -> int | None:
        return self.random.choice(self.left)


class Learned(Search):
    """Batches by a model that all searches of a job share; some of each batch by predicted time or at random.

    The model corrects the predicted times, so that before it has seen anything it ranks as they do.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        limits: Limits,
        model: Model,
        seed: int = 0,
        batch: int = BATCH,
    ) -> None:
        super().__init__(problem, candidates, limits)
        self.model, self.random, self.batch = model, random.Random(f"{seed} {problem}"), batch
        self.queue: list[int] = []

    def tell(self, index: int, us: float | None) -> None:
        super().tell(index, us)
        if index in self.queue:
            self.queue.remove(index)
        if us is not None:
            self.model.learn(self.problem, self.candidates[index], us)

    def pick(self) -> int | None:
        if not self.queue:
            if len(self.out) >= self.batch:
                return None
            ranked = self.model.rank(self.problem, [self.candidates[index] for index in self.left])
            order = [self.left[place] for place in ranked]
            while order and len(self.queue) < self.batch:
                # exploration: a schedule from the better half of what is left
                half = max(1, math.ceil(len(order) / 2))
                place = self.random.randrange(half) if self.random.random() < EXPLORE else 0
                self.queue.append(order.pop(place))
        return self.queue.pop(0)


@dataclass
class Plan:
    """Makes the searches of a job, which share a model where the strategy learns."""

    strategy: str = "learned"
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    batch: int = BATCH

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ArgumentError("strategy", self.strategy, f"must be one of {', '.join(STRATEGIES)}", "use learned")
        self.model = None
        if self.strategy == "learned":
            from terrazzo.autotune.learned import Model

            self.model = Model(self.seed)

    def search(self, problem: Problem, candidates: Sequence[Candidate]) -> Search:
        if self.strategy == "learned":
            return Learned(problem, candidates, self.limits, self.model, self.seed, self.batch)
        if self.strategy == "random":
            return Random(problem, candidates, self.limits, self.seed)
        if self.strategy == "top-k" and not self.limits.trials:
            return InOrder(problem, candidates, Limits(TOP_K, self.limits.patience))
        return InOrder(problem, candidates, self.limits)
