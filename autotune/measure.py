"""Measuring on a GPU: the one timing function that benchmarks and tuning use.

A kernel of a few microseconds is measured inside a CUDA graph, so that the launch from Python does not count; its
weights are rotated over copies that together exceed the L2 cache, so that they come from memory as in a model; and the
median of several replays is reported with their spread. Implementations that are compared take turns, replay by replay.

A GPU that idled runs tensor-bound kernels at its highest clock until it meets its power limit (docs/benchmarks.md, "Two
states of the chip"). So times are taken in one of the two states, not between them: in bursts after a pause, or
sustained, behind 150 ms of the same work.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
WARM_UP_MS = 150.0
"""GPU time before sustained measurements."""
PAUSE_S, BURST_MS, RAMP_MS = 0.05, 35.0, 2.0
"""Idle time before a burst, its GPU time, and how much of that passes before the clock: an idle GPU runs slowly."""
MIN_REPLAYS, MAX_REPLAYS = 5, 40
_GRAPH_MS = 1.0  # length of one replay aimed at: long against the microseconds between two replays
_MAX_LAUNCHES = 512
_COPIED, _COPY_REPEATS = 1 << 31, 12  # bytes: far beyond any L2 cache


@dataclass(frozen=True)
class Timing:
    """Result of one measurement.

    Attributes:
        us: median time of one call, microseconds.
        spread: (90th - 10th percentile) / median of the replays, a fraction.
        calls: calls in each replay.
        replays: replays measured.
        quartiles: 25th and 75th percentile of the replays, microseconds of one call.
    """

    us: float
    spread: float
    calls: int
    replays: int
    quartiles: tuple[float, ...] = ()


def summarize(times_us: Sequence[float], calls: int = 1) -> Timing:
    """Median and spread of replay times, each replay holding `calls` calls."""
    if not times_us:
        raise ArgumentError("times_us", times_us, "must hold at least one time", "measure at least one replay")
    ordered = sorted(times_us)
    low, first, third, high = (_percentile(ordered, share) for share in (0.1, 0.25, 0.75, 0.9))
    median = statistics.median(ordered)
    return Timing(median / calls, (high - low) / median, calls, len(ordered), (first / calls, third / calls))


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


def time_calls(calls: Sequence[Callable[[], object]], budget_ms: float = BUDGET_MS, sustained: bool = False) -> Timing:
    """Time equivalent calls (one for each copy of the data) by replaying them as one CUDA graph, in turn.

    Args:
        calls: functions without arguments that launch on the current stream and can be captured. Each is called twice
            before the capture, so that nothing is compiled or loaded in it.
        budget_ms: GPU time to spend. sustained: behind WARM_UP_MS of the same, else in bursts.

    Raises:
        ArgumentError: no calls.
        RuntimeError: whatever a call raises, and CUDA's errors.
    """
    if not calls:
        raise ArgumentError(
            "calls", calls, "must hold at least one function", "pass one call for each copy of the data"
        )
    with _on_side_stream() as side:
        return _measure([_prepare(calls, budget_ms, side)], sustained)[0]


def time_in_turn(
    candidates: Mapping[str, Sequence[Callable[[], object]]], budget_ms: float = BUDGET_MS, sustained: bool = False
) -> dict[str, Timing | Exception]:
    """Time several implementations replay by replay, in order and in reverse order by turns: all see the same clock.

    Args:
        candidates: name -> calls as `time_calls` takes them.
        budget_ms: GPU time for each name, at least; all are replayed as often as the one that needs it most.
        sustained: behind WARM_UP_MS of the same, else in bursts.

    Returns:
        name -> its timing, or what the candidate raised.
    """
    runs: dict[str, _Run] = {}
    failed: dict[str, Timing | Exception] = {}
    with _on_side_stream() as side:
        for name, calls in candidates.items():
            try:
                runs[name] = _prepare(calls, budget_ms, side)
            except Exception as error:  # the caller decides which errors of which candidate it can go on with
                failed[name] = error
        return failed | dict(zip(runs, _measure(list(runs.values()), sustained)))


@dataclass(frozen=True)
class _Run:
    """A captured graph of `calls` calls, how long a replay takes, and how many of them spend the budget."""

    graph: torch.cuda.CUDAGraph
    calls: int
    us: float
    replays: int


def _prepare(calls: Sequence[Callable[[], object]], budget_ms: float, stream: torch.cuda.Stream) -> _Run:
    """Capture equivalent calls, at least one."""
    for call in (*calls, *calls):
        call()
    graph = _capture(calls, len(calls), stream)
    us = min(_times([graph.replay], 3)[0])
    number, replays = plan_launches(len(calls), us / len(calls), budget_ms)
    if number != len(calls):
        graph = _capture(calls, number, stream)
        us = _times([graph.replay], 1)[0][0]
    return _Run(graph, number, us, replays)


def _measure(runs: Sequence[_Run], sustained: bool) -> list[Timing]:
    """Timings of runs that take turns."""
    import torch

    replays = [run.graph.replay for run in runs]
    turns, turn_ms = max((run.replays for run in runs), default=0), sum(run.us for run in runs) / 1e3
    times: list[list[float]] = [[] for _ in runs]
    while turns > 0:
        if sustained:
            count, before = turns, math.ceil(WARM_UP_MS / turn_ms) * replays
        else:
            count = min(turns, max(1, int((BURST_MS - RAMP_MS) / turn_ms)))
            before = math.ceil(RAMP_MS * 1e3 / runs[0].us) * replays[:1]
            torch.cuda.current_stream().synchronize()
            time.sleep(PAUSE_S)
        for replay in before:
            replay()
        for all_, more in zip(times, _times(replays, count)):
            all_.extend(more)
        turns -= count
    return [summarize(each, run.calls) for each, run in zip(times, runs)]


@contextlib.contextmanager
def _on_side_stream() -> Iterator[torch.cuda.Stream]:
    """The stream of all measurements, after what the current one was asked to do, and before what it will be."""
    import torch

    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    torch.cuda.current_stream().wait_stream(side)


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


def _times(launches: Sequence[Callable[[], object]], count: int) -> list[list[float]]:
    """Times of `count` turns of each launch, microseconds; every other turn goes through them in reverse."""
    import torch

    marks, order = [torch.cuda.Event(enable_timing=True)], []
    marks[0].record()
    for turn in range(count):
        for index in range(len(launches))[:: -1 if turn % 2 else 1]:
            launches[index]()
            order.append(index)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    marks[-1].synchronize()
    found: list[list[float]] = [[] for _ in launches]
    for index, before, after in zip(order, marks, marks[1:]):
        found[index].append(1e3 * before.elapsed_time(after))
    return found


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy of 2 GiB, bytes read plus bytes written: the ceiling that a run is held to.

    Launched one by one: inside a CUDA graph large copies go to the copy engine, which reaches two thirds of it (H200).
    """
    import torch

    source = torch.randint(0, 255, (_COPIED,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    times = _times([lambda: target.copy_(source)], _COPY_REPEATS)[0]
    return 2 * _COPIED / summarize(times).us / 1e3


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
