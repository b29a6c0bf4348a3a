"""SM scheduling of work whose pieces cost differently: plans, and a simulator of them (COMET; specs.md E.3).

A GEMM is a list of work items: a run of k units of one output tile, all of one precision. A plan gives every SM a list
of items; where several SMs share a tile, its partial sums are added in order of k. Four plans, each better balanced
than the one before:

    naive            items in waves, all SMs wait for each other after each
    barrier_minimal  the same assignment; SMs wait only for the partial sums of their tiles
    remap            the costliest items first, each to the SM that has least to do (LPT)
    decompose        the k units of all tiles cut into ranges of equal cost, one for each SM (stream-K with weights)

Nothing here knows a number format: a precision is any key of the costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

Costs = Mapping[Hashable, float]
"""Precision -> cost of one k unit of a tile, in any unit of time."""


@dataclass(frozen=True, order=True)
class WorkItem:
    """k units [k0, k1) of output tile `tile`, all of `precision`."""

    tile: int
    k0: int
    k1: int
    precision: Hashable

    def cost(self, costs: Costs) -> float:
        return (self.k1 - self.k0) * costs[self.precision]


@dataclass(frozen=True)
class Plan:
    """Which SM does what, in which order.

    Attributes:
        name: of the strategy.
        work: the items of each SM.
        barriers: whether all SMs wait for each other after every item.
    """

    name: str
    work: tuple[tuple[WorkItem, ...], ...]
    barriers: bool = False

    @property
    def sms(self) -> int:
        return len(self.work)

    def shares(self) -> dict[int, list[tuple[int, int, int]]]:
        """Tile -> its pieces (k0, k1, sm) in order of k: the order in which partial sums are added."""
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for sm, held in enumerate(self.work):
            for tile, k0, k1 in segments(held):
                pieces.setdefault(tile, []).append((k0, k1, sm))
        return {tile: sorted(found) for tile, found in sorted(pieces.items())}

    def check(self, items: Iterable[WorkItem]) -> None:
        """Raise ArgumentError unless the plan does every k unit of these items exactly once, at its precision."""
        wanted = sorted((i.tile, k, str(i.precision)) for i in items for k in range(i.k0, i.k1))
        done = sorted((i.tile, k, str(i.precision)) for held in self.work for i in held for k in range(i.k0, i.k1))
        if wanted != done:
            seen = f"{len(done)} k units, {len(set(done))} different, of {len(wanted)}"
            raise ArgumentError("plan", seen, "must do every k unit exactly once", "make it from the same items")


@dataclass(frozen=True)
class Timeline:
    """What `simulate` finds: when the last SM is done, and how long each one worked."""

    makespan: float
    busy: tuple[float, ...]


def items_of(tiles: int, precisions: Sequence[Hashable], longest: int | None = None) -> list[WorkItem]:
    """The items of `tiles` output tiles whose k unit i has precision precisions[i]; tile by tile, k ascending.

    Args:
        longest: most k units of an item, None for whole runs of a precision.
    """
    runs, at = [], 0
    for precision, group in groupby(precisions):
        end = at + len(list(group))
        step = longest or end - at
        runs += [(k0, min(k0 + step, end), precision) for k0 in range(at, end, step)]
        at = end
    return [WorkItem(tile, *run) for tile in range(tiles) for run in runs]


def naive(items: Sequence[WorkItem], sms: int) -> Plan:
    """Wave i is items i * sms and on; a barrier of all SMs after each wave."""
    return Plan("naive", _round_robin(items, sms), barriers=True)


def barrier_minimal(items: Sequence[WorkItem], sms: int) -> Plan:
    """The waves of `naive` without their barriers."""
    return Plan("barrier_minimal", _round_robin(items, sms))


def remap(items: Sequence[WorkItem], sms: int, costs: Costs) -> Plan:
    """Longest processing time first: at most 4/3 - 1/(3 sms) times the best assignment of whole items (Graham)."""
    held: list[list[WorkItem]] = [[] for _ in range(sms)]
    loads = [(0.0, sm) for sm in range(sms)]
    for item in sorted(items, key=lambda item: -item.cost(costs)):
        load, sm = heapq.heappop(loads)
        held[sm].append(item)
        heapq.heappush(loads, (load + item.cost(costs), sm))
    return Plan("remap", tuple(map(tuple, held)))


def decompose(items: Sequence[WorkItem], sms: int, costs: Costs) -> Plan:
    """The k units of all items, in order, cut into `sms` ranges of equal cost, whole units each.

    No SM has more than its equal part and the cost of one k unit.
    """
    total = sum(item.cost(costs) for item in items)
    held: list[list[WorkItem]] = [[] for _ in range(sms)]
    sm, spent = 0, 0.0
    for item in items:
        at, unit = item.k0, costs[item.precision]
        while at < item.k1:
            # units that end at or before the SM's limit, or whose greater part lies before it
            room = (total * (sm + 1) / sms - spent) / unit
            count = item.k1 - at if sm == sms - 1 else min(item.k1 - at, int(room + 0.5))
            if count > 0:
                held[sm].append(WorkItem(item.tile, at, at + count, item.precision))
                at, spent = at + count, spent + count * unit
            if at < item.k1:
                sm += 1
    return Plan("decompose", tuple(map(tuple, held)))


def simulate(plan: Plan, costs: Costs, *, barrier: float = 0.0, share: float = 0.0) -> Timeline:
    """When the last SM is done.

    Args:
        costs: of a k unit. barrier: cost of a barrier of all SMs. share: cost of adding one partial sum of a tile.
    """
    work = [[item.cost(costs) for item in held] for held in plan.work]
    if plan.barriers:
        waves = max(map(len, work), default=0)
        longest = [max((held[wave] for held in work if wave < len(held)), default=0.0) for wave in range(waves)]
        ends = [sum(longest) + barrier * waves] * plan.sms
    else:
        ends = [sum(held) for held in work]
    done, adding = list(ends), [0.0] * plan.sms
    for pieces in plan.shares().values():
        owners = list(dict.fromkeys(sm for _, _, sm in pieces))
        if len(owners) > 1:  # the SM of the first k adds the others' sums, once they are there
            head = owners[0]
            adding[head] += share * (len(pieces) - 1)
            done[head] = max(done[head], *(ends[sm] for sm in owners[1:]))
    return Timeline(max(end + more for end, more in zip(done, adding)), tuple(sum(held) for held in work))


def block_costs(
    target: Target, *, rows: int, tokens: int, unit_k: int, unit_bytes: float, sharing: int = 1
) -> dict[int, float]:
    """Microseconds of a k unit of a rows x tokens tile on one SM, for 4- and 8-bit activations with 4-bit weights.

    The larger of the tensor core's time (datasheet rates; where s4 is not native both run as s8) and of the weights'
    at an equal part of the memory bandwidth.

    Args:
        unit_k: channels of a k unit. unit_bytes: of its weights, for these rows. sharing: tiles of other tokens that
            find the weights in L2.
    """
    load = unit_bytes / sharing / (target.dram_gb_s * 1e3 / target.sms)
    flops = 2.0 * rows * tokens * unit_k
    rate = lambda dtype: target.tflops(dtype) * 1e6 / target.sms
    native = target.supports("mma.s4")
    return {4: max(load, flops / rate("s4" if native else "s8")), 8: max(load, flops / rate("s8"))}


def segments(held: Iterable[WorkItem]) -> list[tuple[int, int, int]]:
    """(tile, k0, k1) of neighbouring items that continue each other, whatever their precisions."""
    merged: list[tuple[int, int, int]] = []
    for item in held:
        if merged and merged[-1][0] == item.tile and merged[-1][2] == item.k0:
            merged[-1] = (item.tile, merged[-1][1], item.k1)
        else:
            merged.append((item.tile, item.k0, item.k1))
    return merged


@dataclass(frozen=True)
class DeviceTable:
    """A plan as a persistent kernel reads it: CTA c does rows first[c] .. first[c + 1] - 1.

    Attributes:
        rows: (tile, k0, k1, slot, shares). A piece with k0 > 0 leaves its sum in workspace `slot`; one with k0 = 0
            adds the `shares` sums from `slot` on, in order of k.
        first: CTAs + 1 entries.
        slots: workspaces in all.
    """

    rows: tuple[tuple[int, int, int, int, int], ...]
    first: tuple[int, ...]
    slots: int


def device_table(plan: Plan) -> DeviceTable:
    """The plan for a grid of as many CTAs as it has SMs.

    CTA c does the work of SM sms - 1 - c: a CTA then only waits for CTAs with lower indices, which the hardware has
    started before it. Pieces that other CTAs wait for come first in every list.

    Raises:
        ArgumentError: a plan in which a CTA would wait for one that starts later, or leave a sum after waiting.
    """
    slot_of: dict[tuple[int, int], tuple[int, int]] = {}
    slots = 0
    for tile, pieces in plan.shares().items():
        for i, (k0, _, _) in enumerate(pieces):
            slot_of[tile, k0] = (slots + max(i - 1, 0), len(pieces) - 1 if i == 0 else 0)
        slots += len(pieces) - 1
        if pieces[0][0] or any(a[2] >= b[2] for a, b in pairwise(pieces)):
            raise ArgumentError("plan", plan.name, "must hand a tile's k to SMs in ascending order", "use decompose")
    rows, first = [], [0]
    for held in reversed(plan.work):
        found = segments(held)
        waits = False
        for tile, k0, k1 in found:
            slot, shares = slot_of[tile, k0]
            if k0 and waits:
                raise ArgumentError("plan", plan.name, "must leave sums before it waits for others", "use decompose")
            waits = waits or shares > 0
            rows.append((tile, k0, k1, slot, shares))
        first.append(len(rows))
    return DeviceTable(tuple(rows), tuple(first), slots)


def _round_robin(items: Sequence[WorkItem], sms: int) -> tuple[tuple[WorkItem, ...], ...]:
    return tuple(tuple(items[sm::sms]) for sm in range(sms))
