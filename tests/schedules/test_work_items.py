"""SM scheduling: the paper's figure 8, coverage and bounds of random plans, and the table that kernels read."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import work_items as wi

COSTS = {8: 2.0, 4: 1.0}


def plans(items, sms, costs):
    return [
        wi.naive(items, sms),
        wi.barrier_minimal(items, sms),
        wi.remap(items, sms, costs),
        wi.decompose(items, sms, costs),
    ]


def figure8(tiles: int) -> list[wi.WorkItem]:
    """Tiles of alternating precision, each of eight k units of an eighth of its cost."""
    return [wi.WorkItem(tile, 0, 8, (8, 4)[tile % 2]) for tile in range(tiles)]


@pytest.mark.parametrize(("tiles", "expected"), [(18, [10, 10, 7, 6.75]), (12, [6, 6, 5, 4.5])])
def test_figure_8(tiles, expected):
    """18 tiles as the paper draws them; 256 x 256 x 384 has 12 (specs.md H.17)."""
    costs = {precision: cost / 8 for precision, cost in COSTS.items()}
    assert [wi.simulate(plan, costs).makespan for plan in plans(figure8(tiles), 4, costs)] == expected


problems = st.tuples(
    st.integers(1, 12),  # tiles
    st.lists(st.sampled_from([4, 8]), min_size=1, max_size=12),  # precisions along k
    st.sampled_from([None, 1, 2, 3]),  # longest item
    st.integers(1, 9),  # SMs
    st.sampled_from([COSTS, {4: 1.0, 8: 1.0}, {4: 0.3, 8: 0.7}]),
)


@given(problems)
@settings(max_examples=150, deadline=None)
def test_every_plan_covers_and_keeps_its_bound(problem):
    tiles, precisions, longest, sms, costs = problem
    items = wi.items_of(tiles, precisions, longest)
    total = sum(item.cost(costs) for item in items)
    spans = {}
    for plan in plans(items, sms, costs):
        plan.check(items)
        times = wi.simulate(plan, costs)
        spans[plan.name] = times.makespan
        assert sum(times.busy) == pytest.approx(total)
        assert times.makespan >= total / sms - 1e-9
        for pieces in plan.shares().values():
            assert [k0 for k0, _, _ in pieces] == [0, *(k1 for _, k1, _ in pieces[:-1])]
    assert spans["barrier_minimal"] <= spans["naive"] + 1e-9
    longest = max((item.cost(costs) for item in items), default=0.0)
    most = (
        total / sms + (1 - 1 / sms) * longest
    )  # all others are as busy when the last one takes its last item (Graham)
    assert max(total / sms, longest) - 1e-9 <= spans["remap"] <= most + 1e-9
    assert spans["decompose"] <= total / sms + max(costs.values()) + 1e-9


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=40, deadline=None)
def test_remapping_is_close_to_the_best_assignment(each, sms):
    items, costs = [wi.WorkItem(tile, 0, 1, cost) for tile, cost in enumerate(each)], {c: c for c in each}
    best = min(
        max(sum(c for c, at in zip(each, where) if at == sm) for sm in range(sms))
        for where in product(range(sms), repeat=len(each))
    )
    assert wi.simulate(wi.remap(items, sms, costs), costs).makespan <= (4 / 3 - 1 / (3 * sms)) * best + 1e-9


@given(problems)
@settings(max_examples=150, deadline=None)
def test_a_kernel_that_follows_the_table_ends_and_adds_in_order(problem):
    """CTAs in order of their index, each to its end: nobody waits for a sum that is not there yet."""
    tiles, precisions, longest, sms, costs = problem
    plan = wi.decompose(wi.items_of(tiles, precisions, longest), sms, costs)
    table = wi.device_table(plan)
    left, result = {}, {}
    assert len(table.first) == sms + 1 and table.first[-1] == len(table.rows)
    for cta in range(sms):
        for tile, k0, k1, slot, shares in table.rows[table.first[cta] : table.first[cta + 1]]:
            units = list(range(k0, k1))
            if k0:
                assert slot not in left and slot < table.slots
                left[slot] = (tile, units)
                continue
            for other in range(slot, slot + shares):
                owner, more = left.pop(other)
                assert owner == tile
                units += more
            result[tile] = units
    assert not left
    assert result == {tile: list(range(len(precisions))) for tile in range(tiles)}


def test_plans_that_no_kernel_can_follow_are_refused():
    item = wi.WorkItem
    for work in (
        ((item(0, 2, 4, 8),), (item(0, 0, 2, 4),)),  # the head would wait for a CTA that starts later
        ((item(0, 0, 2, 4),), (item(1, 0, 2, 4), item(0, 2, 4, 8)), (item(1, 2, 4, 8),)),  # leaves after waiting
    ):
        with pytest.raises(ArgumentError):
            wi.device_table(wi.Plan("made up", work))
    with pytest.raises(ArgumentError):
        wi.naive(wi.items_of(2, (4, 8)), 2).check(wi.items_of(2, (4, 4)))


def test_shares_and_barriers_cost():
    items = wi.items_of(1, (4, 4, 8, 8))
    cut = wi.decompose(items, 2, COSTS)
    assert cut.shares() == {0: [(0, 3, 0), (3, 4, 1)]} or cut.shares() == {0: [(0, 2, 0), (2, 4, 1)]}
    assert wi.simulate(cut, COSTS, share=0.5).makespan == wi.simulate(cut, COSTS).makespan + 0.5
    waves = wi.naive(wi.items_of(3, (4,)), 2)
    assert wi.simulate(waves, COSTS, barrier=0.25).makespan == 2 * 1.25


def test_costs_follow_the_target():
    shape = dict(rows=128, tokens=128, unit_k=128, unit_bytes=8448)
    a100, h200 = (wi.block_costs(Target.parse(arch), **shape, sharing=2) for arch in ("sm_80", "sm_90a"))
    assert a100[8] == pytest.approx(2 * a100[4]) and h200[8] == h200[4]
    few = wi.block_costs(Target.parse("sm_80"), **(shape | {"tokens": 16}))
    assert few[8] == few[4] == pytest.approx(8448 / (2039e3 / 108))
