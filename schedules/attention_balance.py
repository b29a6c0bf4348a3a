"""Ragged batches of decode attention: splits by the length of each sequence, which the device knows.

The usual kernel gives all sequences of a batch as many splits, and the longest one is what the others wait for. A
balanced one cuts every sequence into pieces of the same size, at most. It pays with CTAs that look for their work
(`tz_place`), find none, or leave their sums in memory, and so stays out of batches whose lengths are about the same, or
whose many short sequences fill the GPU for longer than the longest one takes. H200, 8 kv heads, int4, us as before and
balanced: 64 sequences of 256 to 8K tokens 95 and 80, of 1K with one of 32K 191 and 45, 24 of 2K to 12K 60 and 47
(tests/data/tuning/ragged_h200.json).
"""

from __future__ import annotations

import math
from dataclasses import replace

from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention
from terrazzo.schedules.attention import Decode, DecodeProblem

MOST_SPLITS = 32
"""Of a sequence: more of them take longer to add than they save."""
_RAGGED = 1.25  # times the mean that the longest sequence must have
_ALONE = 1.75  # a CTA is three times as fast once it is alone on its SM: times the mean, for each wave of sequences
_ROWS = 1.3  # what warpgroups are faster for many rows, which balanced kernels do not have
_WAITING = 0.6  # of the time in which the tokens are read, for each mean length that the longest sequence is longer
_COSTS_US = (2.0, 0.2, 3.0)  # of a balanced kernel: once, for each split of the longest sequence, for 16 rows
_TOKENS = 4096  # of the sequences that the CTAs are of a size for
_WAVES = 1.5  # of pieces, where sequences alone are more than half of one


def schedule_of(problem: DecodeProblem, target: Target) -> Decode:
    """The schedule of a balanced kernel: CTAs of as few warps as full waves of long sequences have. One for all
    lengths and numbers of sequences."""
    pairs = 64 * target.sms
    return attention.choose(replace(problem, pairs=pairs, tokens=_TOKENS, parted=False), target)


def room(problem: DecodeProblem, schedule: Decode, batch: int, target: Target) -> float:
    """CTAs that run at once, for each kv head and group of rows."""
    return target.sms * schedule.min_blocks * batch / (problem.pairs * schedule.row_groups(problem))


def shares(problem: DecodeProblem, batch: int, mean: int, target: Target) -> int:
    """How many pieces all tokens would be cut into if they were one sequence's; 0 where a balanced kernel would not be
    faster.

    Args:
        problem: pairs of `batch` sequences, tokens of the longest. mean: average length, 0 if it is not known.
    """
    if batch < 2 or not mean:
        return 0
    schedule = schedule_of(problem, target)
    at_once, longest = room(problem, schedule, batch, target), problem.tokens / mean
    least = max(_RAGGED, _ALONE * batch / at_once)
    if isinstance(attention.choose(problem, target), attention.WarpgroupDecode):
        least *= _ROWS
    made = pieces(at_once, batch)
    read_us = 4e-3 * problem.pairs * (mean / 16 * problem.tile_words) / (0.92 * target.dram_gb_s)
    once, split, wide = _COSTS_US
    costs = once + split * min(MOST_SPLITS, longest * made / batch) + wide * (schedule.row_tiles > 1)
    return made if longest >= least and _WAITING * (longest - 1) * read_us > costs else 0


def pieces(at_once: float, batch: int) -> int:
    """As many as fill a wave, where each sequence begins half a piece more than it has, give or take; more than a wave
    where that would leave few for the long sequences."""
    if 2 * batch > at_once:
        return math.ceil(_WAVES * at_once)
    return max(1, int(at_once - batch / 2 - math.sqrt(batch) / 2))
