"""The parts of measuring that need no GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

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
    from terrazzo.autotune.gemm_bench import bench
    from terrazzo.autotune.linear_bench import LinearSettings, LinearShape

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ToolchainError, match="needs a CUDA GPU"):
        bench(LinearShape, {(64, 64): ()}, [1], LinearSettings())


class Clock:
    """Stands for the GPU: launches take their time, events note it."""

    def __init__(self, monkeypatch):
        self.now, self.order, self.pauses = 0.0, [], []
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def synchronize(self):
                assert self.at <= clock.now

            def elapsed_time(self, after):
                return after.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=list))
        monkeypatch.setattr(measure.time, "sleep", self.pauses.append)
        monkeypatch.setattr(measure, "_on_side_stream", contextlib.nullcontext)

    def run(self, name, ms, replays):
        def replay():
            self.order.append(name)
            self.now += ms

        return measure._Run(SimpleNamespace(replay=replay), 4, 1e3 * ms, replays)


def test_every_other_turn_is_in_reverse(monkeypatch):
    clock = Clock(monkeypatch)
    a, b = clock.run("a", 2.0, 3), clock.run("b", 3.0, 3)
    assert measure._times([a.graph.replay, b.graph.replay], 3) == [[2000.0] * 3, [3000.0] * 3]
    assert "".join(clock.order) == "abbaab"


def test_implementations_take_turns_in_bursts_or_behind_the_same_work(monkeypatch):
    clock = Clock(monkeypatch)
    runs = {"a": clock.run("a", 4.0, 5), "b": clock.run("b", 6.0, 2)}

    def prepare(calls, budget_ms, stream):
        assert budget_ms == 8.0
        return runs[calls[0]()]

    monkeypatch.setattr(measure, "_prepare", prepare)
    calls = {name: [lambda name=name: name] for name in ("a", "broken", "b")}
    found = measure.time_in_turn(calls, 8.0)
    assert found["a"] == measure.Timing(1000.0, 0.0, 4, 5, (1000.0, 1000.0)) and found["b"].us == 1500.0
    assert isinstance(found["broken"], KeyError)
    assert clock.pauses == [measure.PAUSE_S] * 2  # three turns of 10 ms in a burst, two in the next
    assert "".join(clock.order) == "a" + "abbaab" + "a" + "abba"  # one replay before the clock
    clock.order.clear()
    measure.time_in_turn(calls, 8.0, sustained=True)
    assert len(clock.pauses) == 2 and "".join(clock.order) == "ab" * 15 + "abbaabbaab"
