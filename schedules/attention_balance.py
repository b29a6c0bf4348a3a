"""Ragged batches of decode attention: splits for each sequence by its length, which the device knows and the host may not.

The usual kernel gives all sequences of a batch as many splits, so that the longest one is what the others wait for. A
balanced one gives each a split for every so many tokens, the same number for all. It pays with its sums, which go
through memory, with the search for its work (`tz_place`), and with CTAs that find none.
"""

from __future__ import annotations

from dataclasses import replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention
from terrazzo.schedules.attention import Decode, DecodeProblem

RAGGED = 1.25  # times the mean length that the longest sequence has at least
_WAVES = 2.0  # CTAs that are as many as find room at once, times this
MOST_PLACES = 1 << 20


def is_ragged(problem: DecodeProblem, batch: int, mean: int) -> bool:
    """Whether a batch is one whose lengths differ enough; a mean of 0 is not known."""
    return batch > 1 and 0 < mean and problem.tokens >= RAGGED * mean


def balance(problem: DecodeProblem, batch: int, mean: int, target: Target) -> tuple[Decode, int]:
    """The schedule of a balanced kernel, and how many splits all tokens would be cut into if they were one sequence."""
    many = replace(problem, pairs=8 * target.sms * problem.pairs, tokens=max(1, mean))
    schedule = attention.choose(many, target)
    if isinstance(schedule, attention.WarpgroupDecode):
        many = replace(many, parted=False)
        schedule = attention.choose(many, target)
    return schedule, shares(problem, schedule, batch, target)


def shares(problem: DecodeProblem, schedule: Decode, batch: int, target: Target, waves: float = _WAVES) -> int:
    along_y = problem.pairs // batch * schedule.row_groups(problem)
    return max(1, round(waves * target.sms * schedule.min_blocks / along_y))
