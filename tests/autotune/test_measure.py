"""The parts of measuring that need no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from terrazzo.autotune import measure
from terrazzo.lowering.errors import ArgumentError, ToolchainError

MIB = 2**20


def test_summary_is_median_and_percentiles_per_call():
    timing = measure.summarize([100.0, 110.0, 90.0, 400.0, 100.0], calls=10)
    assert timing.us == 10.0 and timing.calls == 10 and timing.replays == 5
    assert timing.spread == pytest.approx((284.0 - 94.0) / 100.0)
    assert measure.summarize([7.0]).spread == 0
    with pytest.raises(ArgumentError, match="at least one time"):
        measure.summarize([])


@given(st.integers(1, 10**10), st.sampled_from([6 * MIB, 40 * MIB, 60 * MIB]))
def test_copies_exceed_the_cache(nbytes, l2):
    copies = measure.copies_beyond_l2(nbytes, l2)
    assert 1 <= copies <= 64
    assert copies == 64 or copies * nbytes > measure.L2_FACTOR * l2
    assert copies == 1 or (copies - 1) * nbytes <= measure.L2_FACTOR * l2


def test_copies_of_nothing_are_refused():
    with pytest.raises(ArgumentError, match="nbytes"):
        measure.copies_beyond_l2(0, MIB)


@given(st.integers(1, 64), st.floats(1.0, 50_000.0), st.floats(1.0, 100.0))
def test_launch_plan(copies, call_us, budget_ms):
    calls, replays = measure.plan_launches(copies, call_us, budget_ms)
    assert calls % copies == 0 and copies <= calls <= max(copies, 512)
    assert measure.MIN_REPLAYS <= replays <= measure.MAX_REPLAYS
    spent = calls * replays * call_us / 1e3
    assert replays == measure.MIN_REPLAYS or spent <= budget_ms * (1 + 1e-9)


def test_outputs_are_checked_element_by_element():
    reference = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    bound = torch.full_like(reference, 0.25)
    assert measure.check_outputs(reference.float() + 0.25, reference, bound) == ""
    wrong = reference.float().clone()
    wrong[1, 2] += 0.5
    assert (
        measure.check_outputs(wrong, reference, bound)
        == "1 of 6 elements are wrong; the first is y[1, 2] = 5.5 for 5 +- 0.25"
    )
    poison = measure.poisoned((2, 3), torch.float16, "cpu")
    assert measure.check_outputs(poison, reference, bound).startswith("6 of 6 elements are wrong")


def test_nothing_to_time_is_refused():
    with pytest.raises(ArgumentError, match="calls"):
        measure.time_calls([])


def test_benchmarks_ask_for_a_gpu():
    from terrazzo.autotune.gemm_bench import bench_w4a16

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ToolchainError, match="needs a CUDA GPU"):
        bench_w4a16({(64, 64): ()}, [1])


def test_implementations_are_timed_in_both_orders(monkeypatch):
    order, times = [], {"a": iter([99.0, 10.0, 12.0]), "b": iter([20.0, 20.0])}

    def time_calls(calls, budget_ms):
        name = calls[0]()
        order.append((name, budget_ms))
        if name == "broken":
            raise RuntimeError("no")
        return measure.Timing(next(times[name]), 0.01, 4, 5)

    monkeypatch.setattr(measure, "time_calls", time_calls)
    found = measure.time_in_turn({name: [lambda name=name: name] for name in ("a", "broken", "b")}, 8.0)
    assert order == [("a", measure.WARM_UP_MS), ("a", 4.0), ("broken", 4.0), ("b", 4.0), ("b", 4.0), ("a", 4.0)]
    assert found["a"] == measure.Timing(11.0, 2 / 11, 4, 10) and found["b"].spread == 0.01
    assert isinstance(found["broken"], RuntimeError)
