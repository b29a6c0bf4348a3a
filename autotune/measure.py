"""Measuring on a GPU: the one timing function that benchmarks and tuning use.

A kernel of a few microseconds is measured inside a CUDA graph, so that the launch from Python does not count; its
weights are rotated over copies that together exceed the L2 cache, so that they come from memory as in a model; and the
median of several replays is reported with their spread.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    import torch

L2_FACTOR = 2.0
"""Copies of rotated data exceed the L2 cache by this factor."""
BUDGET_MS = 15.0
"""GPU time spent on one measurement, unless the least number of replays takes longer."""
WARM_UP_MS = 30.0
"""GPU time before the first measurement of a group."""
MIN_REPLAYS, MAX_REPLAYS = 5, 40
_GRAPH_MS = 1.0  # length of one replay aimed at: long against the microseconds between two replays
_MAX_LAUNCHES = 512


@dataclass(frozen=True)
class Timing:
    """Result of one measurement.

    Attributes:
        us: median time of one call, microseconds.
        spread: (90th - 10th percentile) / median of the replays, a fraction.
        calls: calls in each replay.
        replays: replays measured.
    """

    us: float
    spread: float
    calls: int
    replays: int


def summarize(times_us: Sequence[float], calls: int = 1) -> Timing:
    """Median and spread of replay times, each replay holding `calls` calls."""
    if not times_us:
        raise ArgumentError("times_us", times_us, "must hold at least one time", "measure at least one replay")
    ordered = sorted(times_us)
    low, high = (_percentile(ordered, share) for share in (0.1, 0.9))
    median = statistics.median(ordered)
    return Timing(median / calls, (high - low) / median, calls, len(ordered))


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def copies_beyond_l2(nbytes: int, l2_bytes: int, most: int = 64) -> int:
    """How many copies of data of `nbytes` exceed L2_FACTOR times the L2 cache together; 1 if one copy does."""
    if nbytes <= 0:
        raise ArgumentError("nbytes", nbytes, "must be positive", "pass the bytes that one call reads")
    return max(1, min(most, int(L2_FACTOR * l2_bytes // nbytes) + 1))


def plan_launches(copies: int, call_us: float, budget_ms: float = BUDGET_MS) -> tuple[int, int]:
    """(calls in a graph, replays): whole rounds over the copies, a graph of about a millisecond, the budget in all."""
    rounds = max(1, round(1e3 * _GRAPH_MS / (copies * call_us)))
    calls = copies * max(1, min(rounds, _MAX_LAUNCHES // copies))
    replays = int(1e3 * budget_ms / (calls * call_us))
    return calls, max(MIN_REPLAYS, min(MAX_REPLAYS, replays))


def time_calls(calls: Sequence[Callable[[], object]], budget_ms: float = BUDGET_MS) -> Timing:
    """Time equivalent calls (one for each copy of the data) by replaying them as one CUDA graph, in turn.

    Args:
        calls: functions without arguments that launch on the current stream and can be captured. Each is called twice
            before the capture, so that nothing is compiled or loaded in it.
        budget_ms: GPU time to spend.

    Raises:
        ArgumentError: no calls.
        RuntimeError: whatever a call raises, and CUDA's errors.
    """
    import torch

    if not calls:
        raise ArgumentError(
            "calls", calls, "must hold at least one function", "pass one call for each copy of the data"
        )
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*calls, *calls):
            call()
        graph = _capture(calls, len(calls), side)
        number, replays = plan_launches(len(calls), min(_times(graph.replay, 3)) / len(calls), budget_ms)
        if number != len(calls):
            graph = _capture(calls, number, side)
            _times(graph.replay, 1)
        times = _times(graph.replay, replays)
    torch.cuda.current_stream().wait_stream(side)
    return summarize(times, number)


def time_in_turn(
    candidates: Mapping[str, Sequence[Callable[[], object]]], budget_ms: float = BUDGET_MS
) -> dict[str, Timing | Exception]:
    """Time several implementations in order and again in reverse order, so that none gains from a cooler chip.

    The first one runs for WARM_UP_MS before the clock: a GPU that idled takes milliseconds to raise its clocks.

    Args:
        candidates: name -> calls as `time_calls` takes them. budget_ms: GPU time for each name.

    Returns:
        name -> mean of both passes, its spread including their difference; or what the candidate raised.
    """
    passes: dict[str, list[Timing]] = {name: [] for name in candidates}
    failed: dict[str, Timing | Exception] = {}
    for name in list(candidates)[:1]:
        with contextlib.suppress(Exception):  # what it raises, it raises again below
            time_calls(candidates[name], WARM_UP_MS)
    for name in (*candidates, *reversed(list(candidates))):
        if name not in failed:
            try:
                passes[name].append(time_calls(candidates[name], budget_ms / 2))
            except Exception as error:  # the caller decides which errors of which candidate it can go on with
                failed[name] = error
    return failed | {name: merge(*timings) for name, timings in passes.items() if name not in failed}


def merge(first: Timing, second: Timing) -> Timing:
    """Two measurements of the same thing as one."""
    us = (first.us + second.us) / 2
    spread = max(first.spread, second.spread, abs(first.us - second.us) / us)
    return Timing(us, spread, first.calls, first.replays + second.replays)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One stream of a device for all measurements: operators keep workspaces for each stream that calls them."""
    import torch

    return torch.cuda.Stream(device)


def _capture(calls: Sequence[Callable[[], object]], number: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of `number` calls, in turn."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(number):
            calls[index % len(calls)]()
    return graph


def _times(launch: Callable[[], object], count: int) -> list[float]:
    """Time of each of `count` launches, microseconds."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    marks[-1].synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def copy_bandwidth(nbytes: int = 1 << 31, device: str = "cuda", repeats: int = 12) -> float:
    """GB/s of a device-to-device copy of `nbytes`, bytes read plus bytes written: the ceiling that a run is held to.

    Launched one by one: inside a CUDA graph large copies go to the copy engine, which reaches two thirds of it (H200).
    """
    import torch

    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = _times(lambda: target.copy_(source), repeats)
    return 2 * nbytes / summarize(times).us / 1e3


def call_overhead_us(call: Callable[[], object], calls: int = 100, rounds: int = 7) -> float:
    """CPU time of one call from Python, microseconds, the kernel excluded: the best round of asynchronous calls.

    The launch queue holds about a thousand kernels, so `calls` of one kernel each never wait for the GPU.
    """
    import torch

    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * best / calls


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """An output filled with NaN: an element that a kernel forgets stays visible."""
    import torch

    return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)


def check_outputs(y: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor) -> str:
    """ "" if every |y - reference| is inside its bound, else what is wrong, in words. NaN is never inside."""
    outside = ~((y.double() - reference).abs() <= bound)
    if not bool(outside.any()):
        return ""
    place = tuple(int(index) for index in outside.nonzero()[0])
    seen, wanted, limit = (float(tensor[place]) for tensor in (y, reference, bound))
    first = f"y[{', '.join(map(str, place))}] = {seen:.6g} for {wanted:.6g} +- {limit:.2g}"
    return f"{int(outside.sum())} of {y.numel()} elements are wrong; the first is {first}"
