"""What the heuristic of decode attention chooses, held against timings of an H200 (data/tuning/decode_h200.json):
`divisions`, the splits and clusters of one schedule each; `rings`, schedules over pages of 128 tokens; `brief`,
schedules of few tokens, all head dimensions; `many_rows`, warpgroups beside the warps that serve row groups of 16;
`spread`, (sequence, kv head) pairs that fill no whole wave of large CTAs, of another day (2026-11-25)."""

from __future__ import annotations

import json
from collections import defaultdict
from math import exp, log
from pathlib import Path

from terrazzo.autotune.attention_bench import Shape
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op
from terrazzo.schedules import attention, attention_balance, attention_cost, attention_space

DATA = json.loads((Path(__file__).parents[1] / "data/tuning/decode_h200.json").read_text())
TARGET = Target.parse("sm_90a")


def timed(kind: str) -> dict[tuple, list[tuple[attention.Decode, list, float]]]:
    """Problem -> what was timed for it: schedule, [splits, parts, cluster], us."""
    found = defaultdict(list)
    for cache, keys, q_len, page, sizes, division, us in DATA[kind]:
        shape, values = Shape.parse(cache), keys.replace("int2_channel128", "int2").replace("int4_channel128", "int4")
        layout = CacheLayout(keys, values, 128)
        rows = q_len * shape.heads // shape.kv_heads
        sizes_of = (shape.batch, shape.kv_heads, rows, shape.tokens, page, layout.k.group)
        problem = op.problem_of(layout, *sizes_of)
        schedule = attention.Decode(attention.row_tiles(problem), *sizes[:4], bool(sizes[4]))
        found[problem].append((schedule, division, us))
    return found


def mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


def test_divisions_are_close_to_the_fastest_that_was_timed():
    ratios = []
    for problem, runs in timed("divisions").items():
        chosen = attention.divide(problem, runs[0][0], TARGET)
        us = [us for _, division, us in runs if division == [chosen.splits, chosen.parts, chosen.cluster]]
        if len(runs) > 1 and us:
            ratios.append(us[0] / min(us for *_, us in runs))
    print(len(ratios), mean(ratios), max(ratios))
    assert len(ratios) >= 80 and mean(ratios) < 1.02 and max(ratios) < 1.2


def test_schedules_are_close_to_the_fastest_that_was_timed():
    ratios = []
    for problem, runs in timed("rings").items():
        chosen = attention.choose(problem, TARGET)
        us = [us for schedule, _, us in runs if schedule == chosen]
        if us:
            ratios.append(us[0] / min(us for *_, us in runs))
    print(len(ratios), mean(ratios), max(ratios))
    assert len(ratios) >= 30 and mean(ratios) < 1.02 and max(ratios) < 1.12


def test_pairs_are_spread_over_the_sms_as_well_as_any_way_that_was_timed():
    """Beside one large CTA on each SM, which leaves many of them idle, in one wave or in the last one."""
    gains, ratios = defaultdict(list), []
    for problem, runs in timed("spread").items():
        chosen = attention.choose(problem, TARGET)
        made = attention.divide(problem, chosen, TARGET)
        of = [made.splits, made.parts, made.cluster]
        us = [us for schedule, division, us in runs if (schedule, division) == (chosen, of)]
        fewest = [us for schedule, division, us in runs if schedule.min_blocks == 1 and division[0] == 1]
        if us:
            ratios.append(us[0] / min(us for *_, us in runs))
            gains[problem.rows, problem.pairs > TARGET.sms] += [fewest[0] / us[0]] if fewest else []
    print(len(ratios), mean(ratios), max(ratios), {of: (mean(g), min(g)) for of, g in gains.items()})
    assert len(ratios) >= 180 and mean(ratios) < 1.02 and max(ratios) < 1.15
    assert mean(gains[4, False]) > 1.15 and mean(gains[4, True]) > 1.15 and mean(gains[16, True]) > 1.08
    assert min(min(g) for g in gains.values()) > 0.93


def brief() -> dict[tuple, dict[tuple, float]]:
    """Problem -> (warps, tiles, stages, min_blocks, splits, parts, cluster) -> us."""
    found = defaultdict(dict)
    for head_dim, cache, formats, q_len, page, sizes, division, us in DATA["brief"]:
        shape, layout = Shape.parse(cache), CacheLayout(*formats.split("/"), head_dim)
        rows = q_len * shape.heads // shape.kv_heads
        problem = op.problem_of(layout, shape.batch, shape.kv_heads, rows, shape.tokens, page, layout.k.group)
        found[problem][(*sizes, *division)] = us
    return found


def test_schedules_of_few_tokens_are_close_to_the_fastest_that_was_timed():
    ratios = []
    for problem, runs in brief().items():
        chosen = attention.choose(problem, TARGET)
        made = attention.divide(problem, chosen, TARGET)
        sizes = (chosen.warps, chosen.tiles, chosen.stages, chosen.min_blocks)
        if us := runs.get((*sizes, made.splits, made.parts, made.cluster)):
            ratios.append(us / min(runs.values()))
    print(len(ratios), mean(ratios), max(ratios))
    assert len(ratios) >= 140 and mean(ratios) < 1.02 and max(ratios) < 1.12


def many_rows() -> dict[attention.DecodeProblem, list[tuple]]:
    """Problem -> what was timed: schedule of warpgroups, or None for warps, division, us."""
    found = defaultdict(list)
    for head_dim, cache, formats, q_len, page, sizes, division, us in DATA["many_rows"]:
        shape, layout = Shape.parse(cache), CacheLayout(*formats.split("/"), head_dim)
        rows = q_len * shape.heads // shape.kv_heads
        problem = op.problem_of(layout, shape.batch, shape.kv_heads, rows, shape.tokens, page, layout.k.group)
        row_tiles, warps, stages, blocks = sizes or (0, 0, 0, 0)
        schedule = attention.WarpgroupDecode(row_tiles, warps, 4, stages, blocks) if sizes else None
        found[problem].append((schedule, attention.Division(*division), us))
    return found


def test_many_rows_get_warpgroups_where_they_are_faster():
    ratios, gains = [], []
    for problem, runs in many_rows().items():
        warps = [us for schedule, _, us in runs if schedule is None]
        groups = [us for schedule, _, us in runs if schedule is not None]
        if warps and groups:
            chosen = isinstance(attention.choose(problem, TARGET), attention.WarpgroupDecode)
            ratios.append(min(groups if chosen else warps) / min(*warps, *groups))
            gains += [min(warps) / min(groups)] if chosen else []
    print(len(ratios), mean(ratios), max(ratios), len(gains), mean(gains), min(gains))
    assert len(ratios) >= 60 and mean(ratios) < 1.01 and max(ratios) < 1.2
    assert len(gains) >= 20 and mean(gains) > 1.12


def test_predicted_times_of_warpgroups():
    errors = []
    for problem, runs in many_rows().items():
        for schedule, division, us in runs:
            if schedule is not None:
                errors.append(log(attention_cost.warpgroups_us(problem, schedule, TARGET, division) / us))
    rms = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    print(len(errors), rms)
    assert rms < 0.18


def test_the_tuner_tries_good_schedules_first():
    found = {problem: [(schedule, us) for schedule, _, us in runs] for problem, runs in timed("rings").items()}
    for problem, runs in brief().items():
        made = {}
        for sizes, us in runs.items():
            schedule = attention.Decode(attention.row_tiles(problem), *sizes[:4])
            made[schedule] = min(us, made.get(schedule, us))
        found[problem] = found.get(problem, []) + list(made.items())
    first, third, errors, right = [], [], [], []
    for problem, runs in found.items():
        space = attention_space.Decode(problem)
        tried = sorted((space.cost("decode", schedule, TARGET, problem.pairs), us) for schedule, us in runs)
        best = min(us for _, us in tried)
        first.append(tried[0][1] / best)
        third.append(min(us for _, us in tried[:3]) / best)
        errors += [log(cost / us) for cost, us in tried]
        right += [a < b for i, (_, b) in enumerate(tried) for _, a in tried[:i] if abs(a / b - 1) > 0.03]
    rms = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    print(len(found), mean(first), mean(third), rms, sum(right) / len(right))
    assert mean(first) < 1.04 and mean(third) < 1.01 and rms < 0.12 and sum(right) > 0.75 * len(right)


def test_ragged_batches_are_balanced_where_it_was_faster():
    ratios, gains = [], []
    data = json.loads((Path(__file__).parents[1] / "data/tuning/ragged_h200.json").read_text())
    for head_dim, heads, formats, q_len, batch, longest, total, even, balanced in data["rows"]:
        query_heads, kv_heads = map(int, heads.split("/"))
        layout = CacheLayout(*formats.split("/"), head_dim)
        rows = q_len * query_heads // kv_heads
        problem = op.problem_of(layout, batch, kv_heads, rows, longest, 128, layout.k.group)
        chosen = attention_balance.shares(problem, batch, total // batch, Target.parse("nvidia/nvidia-h200"))
        us = balanced if chosen else even
        ratios.append(us / min(even, balanced))
        gains.append(even / us)
    print(len(ratios), mean(ratios), max(ratios), mean(gains))
    assert len(ratios) >= 170 and mean(ratios) < 1.01 and max(ratios) < 1.12 and mean(gains) > 1.25
