"""The oracle of the benchmark of prefill attention, on the CPU."""

from __future__ import annotations

import pytest
import torch
from terrazzo.autotune import attention_bench, gemm_bench
from terrazzo.ops.attention.decoding import reference
from terrazzo.ops.attention.prefilling import prefill_reference

from benchmarks import attention_prefill
from benchmarks.attention_prefill import Prompt


@pytest.mark.parametrize("prompt", ["2x4/2x64+64", "1x4/2x16+129", "1x4/2x130"])
@pytest.mark.parametrize("mode", ["stored", "fresh"])
def test_rows_that_are_judged_are_those_of_the_reference(prompt, mode, monkeypatch):
    monkeypatch.setattr(gemm_bench, "DEVICE", "cpu")
    prompt, rng = Prompt.parse(prompt), torch.Generator().manual_seed(3)
    cache = attention_bench.random_cache("int4", "int8", prompt.shape, 64, 64)
    count = prompt.shape.batch * prompt.new
    cu = torch.arange(0, count + 1, prompt.new, dtype=torch.int32)
    q = torch.randn(count, 4, 64, generator=rng).half()
    kv = tuple(torch.randn(count, 2, 64, generator=rng).half() for _ in "kv") if mode == "fresh" else None
    y = prefill_reference.prefill(q, cache, cu, reference.Options(), *(kv or (None, None)), bounded=False)[0].half()
    exact = attention_prefill.exact_rows(q, cache, kv, prompt)
    assert attention_prefill.wrong(y, exact) == ""
    y[-1, -1, 5] += 0.25
    assert "1 of" in attention_prefill.wrong(y, exact)


def test_schedules_are_given_by_their_sizes_or_left_to_the_library():
    asked = attention_prefill.arguments(["--schedules", "auto;shared,8,4,4,3;mma,2,8,4", "--splits", "1,auto,16"])
    assert asked.schedules == [None, ("shared", 8, 4, 4, 3), ("mma", 2, 8, 4)] and asked.splits == [1, None, 16]
    assert attention_prefill.schedule_of(asked.schedules[1]).rows == 64
    assert Prompt.parse("1x32/8x16+8k") == Prompt(attention_bench.Shape(1, 32, 8, 8208), 16)
