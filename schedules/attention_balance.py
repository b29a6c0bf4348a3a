"""Ragged batches of decode attention: splits by the length of each sequence, which the device knows.

The usual kernel gives all sequences of a batch as many splits, and the longest one is what the others wait for. A
balanced one cuts every sequence into pieces of the same size, at most. It pays with CTAs that look for their work
(`tz_place`), find none, or leave their sums in memory, and so stays out of batches whose lengths are about the same, or
whose many short sequences fill the GPU for longer than the longest one takes. int4, 8 kv heads, us on an H200 before
and balanced: 64 sequences of 256 to 8K tokens 92 and 84, of 1K with one of 32K 181 and 43, 24 of 2K to 12K 60 and 53,
32 of lognormal lengths 88 and 45 (tests/data/tuning/ragged_h200.json).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from terrazzo.lowering.targets import Target
from terrazzo.schedules import attention
from terrazzo.schedules.attention import Decode, DecodeProblem

MOST_SPLITS = 32
"""Of a sequence: more of them take longer to add than they save."""
_SEQUENCES = 1024  # of a batch at most: every CTA reads all lengths; 256 are the most that were timed
_RAGGED = 1.25  # times the mean that the longest sequence must have
_FAR = 4.0  # the same where the longest would have more splits than there may be, and is waited for all the same
_ALONE = 1.6  # a CTA is three times as fast once it is alone on its SM: times the mean, for each wave of sequences
_ROWS = 1.3  # what warpgroups are faster for many rows, which balanced kernels do not have
_WAITING = 0.5  # of the time in which the tokens are read, for each mean length that the longest sequence is longer
_FEW_BITS = 2.0  # times as long as that is what instructions take with int2
_COSTS_US = (2.0, 0.15)  # of a balanced kernel: once, and for each split of the longest sequence
_TOKENS = 4096  # of the sequences that the CTAs are of a size for
_WAVES = 1.5  # of pieces, where sequences alone are more than half of one


def schedule_of(problem: DecodeProblem, target: Target) -> Decode:
    """The schedule of a balanced kernel: CTAs of as few warps as full waves of long sequences have. One for all
    lengths and numbers of sequences."""
    made = _choose(replace(problem, pairs=64 * target.sms, tokens=_TOKENS, parted=False), target)
    if made.row_tiles > 1 and not attention.is_wide(problem) and made.tiles == 4:
        return replace(made, tiles=2, stages=3)  # with 128 registers, scores of four tiles of 16 rows would spill
    return made


_choose = lru_cache(maxsize=256)(attention.choose)


def room(problem: DecodeProblem, schedule: Decode, batch: int, target: Target) -> float:
    """CTAs that run at once, for each kv head and group of rows."""
    return target.sms * schedule.min_blocks * batch / (problem.pairs * schedule.row_groups(problem))


def shares(problem: DecodeProblem, batch: int, mean: int, target: Target) -> int:
    """How many pieces all tokens would be cut into if they were one sequence's; 0 where a balanced kernel would not be
    faster.

    Args:
        problem: pairs of `batch` sequences, tokens of the longest. mean: average length, 0 if it is not known.
    """
    if not mean or not 2 <= batch <= _SEQUENCES:
        return 0
    schedule = schedule_of(problem, target)
    at_once, longest = room(problem, schedule, batch, target), problem.tokens / mean
    least = max(_RAGGED, _ALONE * batch / at_once)
    if problem.rows > 8 and isinstance(attention.choose(problem, target), attention.WarpgroupDecode):
        least *= _ROWS
    made = pieces(at_once, batch)
    if longest * made / batch > MOST_SPLITS and longest < _FAR:
        return 0
    words = problem.pairs * schedule.row_groups(problem) * (mean / 16 * problem.tile_words)
    read_us = 4e-3 * words / (0.92 * target.dram_gb_s)
    if problem.tile_words < 3 * problem.head_dim:
        read_us *= _FEW_BITS
    costs = _COSTS_US[0] + _COSTS_US[1] * min(MOST_SPLITS, longest * made / batch)
    return made if longest >= least and _WAITING * (longest - 1) * read_us > costs else 0


def pieces(at_once: float, batch: int) -> int:
    """As many as fill a wave, where each sequence begins half a piece more than it has, give or take; more than a wave
    where that would leave few for the long sequences."""
    if 2 * batch > at_once:
        return math.ceil(_WAVES * at_once)
    return max(1, int(at_once - batch / 2 - math.sqrt(batch) / 2))
