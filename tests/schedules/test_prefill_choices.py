"""Into how many parts prefill cuts the past, held against timings of an H100 (data/tuning/prefill_parts_h100.json):
[prompt, rows of a CTA, parts, us] of int4 keys and values, head_dim 128, new tokens as they are."""

from __future__ import annotations

import json
from collections import defaultdict
from math import exp, log
from pathlib import Path

import pytest
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.prefilling import prefill_op
from terrazzo.schedules import attention_prefill

from benchmarks.attention_prefill import Prompt

DATA = json.loads((Path(__file__).parents[1] / "data/tuning/prefill_parts_h100.json").read_text())
TARGET = Target.parse("sm_90a")
PROBLEM = prefill_op.problem_of(CacheLayout("int4", "int4", 128), 128, 0, True)


def chosen(prompt: Prompt, sms: int = DATA["sms"]) -> tuple[int, int]:
    """(rows of a CTA, parts)."""
    shape = prompt.shape
    rows, groups = prompt.new * shape.heads // shape.kv_heads, shape.batch * shape.kv_heads
    width, parts = attention_prefill.divide(PROBLEM, TARGET, sms, rows, groups, shape.tokens)
    return width or attention_prefill.choose(PROBLEM, TARGET).rows, parts


def test_parts_are_the_fastest_that_were_timed():
    timed: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for prompt, width, parts, us in DATA["rows"]:
        timed[prompt][width, parts] = us
    ratios, gains = [], []
    for prompt, us in timed.items():
        mine = us[chosen(Prompt.parse(prompt))]
        ratios.append(mine / min(us.values()))
        gains.append(min(t for (_, parts), t in us.items() if parts == 1) / mine)
    mean = lambda found: exp(sum(map(log, found)) / len(found))
    print(len(ratios), mean(ratios), max(ratios), mean(gains))
    assert len(ratios) >= 28 and mean(ratios) < 1.01 and max(ratios) < 1.05 and mean(gains) > 2.5


@pytest.mark.parametrize("prompt", ["1x32/8x4k", "1x32/8x2k+32k", "8x32/8x512+8k", "64x32/8x16+8k", "1x32/8x16+100"])
def test_prompts_that_fill_the_gpu_or_are_short_are_not_cut(prompt):
    assert chosen(Prompt.parse(prompt))[1] == 1


def test_parts_are_worth_their_stages_and_within_the_most():
    for tokens in (1, 64, 500, 2000, 10**6):
        for new in (1, 16, 512):
            parts = chosen(Prompt.parse(f"1x32/8x{new}+{tokens}"))[1]
            assert 1 <= parts <= attention_prefill.MOST_PARTS and (parts == 1 or 4 * parts <= -(-(tokens + new) // 64))
