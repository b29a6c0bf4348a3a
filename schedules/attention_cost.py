"""Predicted time of a decode call, which orders the tuner's candidates: fitted to 1325 timings of one H200
(tests/data/tuning/decode_h200.json; 10 % rms). A constant is named after what it mostly stands for."""

from __future__ import annotations

import math
from typing import NamedTuple

from terrazzo.lowering.targets import Target
from terrazzo.schedules.attention import Decode, DecodeProblem, Division, WarpgroupDecode, clusters_at_once, tail_us

_LAUNCH_US = 1.85  # start, rows, end
_FIRST_US = 0.60  # the first stage, and any that is waited for
_PAGED_US = 0.17
_STEP_US, _TILE_US = 0.38, 0.166  # what one warp needs for a stage, and for each tile of it at head dimension 128
_BUSY_US = 0.179  # of a scheduler's four warps for a tile each
_SECOND_ROWS = 0.37  # what a second group of 8 rows adds to a tile
_GROUP_US = 0.18  # scaling rows for a group of channel-wise keys
_WARP_US, _ROW_US = 0.039, 0.052  # of the merge of a CTA
_LONGEST = 0.76  # weight of the busiest warp's stages; the rest is the average's
_SM_SHARE = 1.2  # bandwidth of an SM as a multiple of its share
_DRAM = 0.97  # of the datasheet's bandwidth
_CONVERT_US, _ROWS_US, _WAIT_US = 0.076, 0.054, 0.56  # a warpgroup's step: conversions, every 8 rows, its products
_SCALED = 1.7  # factor of channel-wise keys, for which it scales all rows


class Work(NamedTuple):
    """Of a launch: waves, CTAs on the busiest SM, stages of the busiest warp and on average, groups that it scales."""

    waves: int
    on_sm: int
    stages: int
    average: float
    groups: int


def work_of(problem: DecodeProblem, schedule: Decode, target: Target, division: Division) -> Work:
    """How a launch falls on the GPU. Clusters of 8 and 16 reach fewer SMs: of 8 clusters of 16 CTAs 7 find an SM for
    each CTA, so some SMs get two, and all take as long."""
    clusters = problem.pairs * schedule.row_groups(problem) * division.splits // division.cluster
    once = clusters_at_once(target, division.cluster)
    waves = math.ceil(clusters / (once * schedule.min_blocks))
    on_sm = min(schedule.min_blocks, math.ceil(clusters / once))
    stage = 16 * schedule.tiles
    chunk = max(problem.group // division.parts, stage)
    rounds = math.ceil(math.ceil(problem.tokens / (schedule.warps * chunk)) / division.splits)
    average = problem.tokens / (division.splits * schedule.warps * stage)
    return Work(waves, on_sm, rounds * (chunk // stage), max(average, 1.0), rounds if problem.group else 0)


def predicted_us(problem: DecodeProblem, schedule: Decode, target: Target, division: Division) -> float:
    """us of a launch in a graph: what surrounds the tokens, and the slower of their way through the busiest SM and of
    all bytes through memory."""
    work = work_of(problem, schedule, target, division)
    rows, width = 1 + _SECOND_ROWS * (schedule.row_tiles > 1), problem.head_dim / 128
    warps = schedule.warps * work.on_sm
    channel_words = problem.channel_words * max(1, work.groups) / max(1, work.stages)  # of a stage
    stage_bytes = 4 * (schedule.tiles * problem.tile_words + min(channel_words, problem.channel_words))
    step = _norm(
        4,
        _STEP_US + _TILE_US * schedule.tiles * width * rows,
        _BUSY_US * schedule.tiles * width * rows * max(1.0, warps / 4),
        stage_bytes * warps / (_SM_SHARE * target.dram_gb_s / target.sms * 1e3),
        _FIRST_US / max(schedule.stages - 1, 0.5),
    )
    stages = _LONGEST * work.stages + (1 - _LONGEST) * work.average
    busy = work.waves * (stages * step + _GROUP_US * work.groups * schedule.row_tiles)
    words = problem.tokens / 16 * problem.tile_words
    words += problem.tokens / max(1, problem.group) * problem.channel_words * division.parts
    memory = 4e-3 * problem.pairs * schedule.row_groups(problem) * words / (_DRAM * target.dram_gb_s)
    merged = min(problem.rows / schedule.row_groups(problem), 16)
    merge = _WARP_US * schedule.warps * work.waves + _ROW_US * merged * width
    around = _LAUNCH_US + _FIRST_US + (_PAGED_US if problem.page else 0.0)
    return around + _norm(6, busy, memory) + merge + tail_us(problem, schedule, division)


def warpgroups_us(problem: DecodeProblem, schedule: WarpgroupDecode, target: Target, division: Division) -> float:
    """us of a launch of warpgroups: the slower of an SM's steps of 64 tokens, each of which waits for its own products,
    and of all bytes through memory."""
    groups, width = schedule.row_groups(problem), problem.head_dim / 128
    ctas = problem.pairs * groups * division.splits
    on_sm = min(schedule.min_blocks, math.ceil(ctas / target.sms))
    waves = math.ceil(ctas / (target.sms * schedule.min_blocks))
    steps = math.ceil(math.ceil(problem.tokens / 64) / (division.splits * schedule.rings))
    busy = (_CONVERT_US + _ROWS_US * schedule.row_tiles) * width * schedule.rings * on_sm
    if problem.group:
        busy *= _SCALED
    work = waves * steps * (busy + _WAIT_US)
    nbytes = 4 * problem.pairs * (problem.tokens / 16 * problem.tile_words)
    memory = 1e-3 * nbytes / (_DRAM * target.dram_gb_s)
    around = _LAUNCH_US + _FIRST_US + 0.5 * schedule.row_tiles
    return around + _norm(6, work, memory) + tail_us(problem, schedule, division)


def _norm(p: int, *times: float) -> float:
    """A smooth maximum."""
    return sum(time**p for time in times) ** (1 / p)
