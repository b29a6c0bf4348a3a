"""Bookkeeping of a paged KV cache: no page is lost, written while shared, or taken by a call that fails."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.cache.paging import CacheFullError, PageTable

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("new", "fork", "free", "extend", "extend", "extend")), st.integers(0, 7),
              st.lists(st.integers(0, 90), min_size=1, max_size=4)),
    max_size=40,
)  # fmt: skip


def state(table: PageTable):
    return copy.deepcopy((table.sequences, table.holders, sorted(table._free), sorted(table._slots)))


def check(table: PageTable) -> None:
    held = [page for s in table.sequences.values() for page in s.pages]
    assert [held.count(page) for page in range(len(table.holders))] == table.holders
    assert sorted(table._free) == [page for page, count in enumerate(table.holders) if not count]
    slots = [s.slot for s in table.sequences.values()]
    assert len(set(slots)) == len(slots) and not set(slots) & set(table._slots)
    for s in table.sequences.values():
        assert len(set(s.pages)) == len(s.pages) == -(-table.stored(s.length) // table.page_size)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.sampled_from(((16, 0), (64, 0), (64, 64), (64, 32), (128, 64))), st.integers(1, 30))
def test_contents_follow_a_model_without_sharing(operations, sizes, pages):
    """Pages hold lists of tokens; forks and copies must end with what a cache without pages would hold."""
    page_size, ring = sizes
    layout = CacheLayout("int4_channel32" if ring == 32 else "int4", "int4", 64)
    table = PageTable(pages, page_size, 6, lambda tokens: layout.packed(tokens, ring))
    memory = [dict() for _ in range(pages)]  # page -> position in it -> token
    model: dict[int, list[int]] = {}
    clock = 0
    for name, pick, counts in operations:
        ids = list(table.sequences)
        before = state(table)
        try:
            if name == "new":
                model[table.new()] = []
            elif ids and name == "fork":
                source = ids[pick % len(ids)]
                model[table.fork(source)] = list(model[source])
            elif ids and name == "free":
                table.free(ids[pick % len(ids)])
                del model[ids[pick % len(ids)]]
            elif ids:
                new = {ids[(pick + i) % len(ids)]: count for i, count in enumerate(counts)}
                for source, target in table.extend(new):
                    memory[target] = dict(memory[source])
                for sequence, count in new.items():
                    old = len(model[sequence])
                    model[sequence] += range(clock, clock + count)
                    clock += count
                    start = table.stored(old)
                    for at in range(start, table.stored(old + count)):
                        page = table.get(sequence).pages[at // page_size]
                        assert table.holders[page] == 1, "a shared page is written"
                        memory[page][at % page_size] = model[sequence][at]
        except CacheFullError:
            assert state(table) == before
        check(table)
        for sequence, tokens in model.items():
            found = table.get(sequence)
            assert found.length == len(tokens)
            for at in range(table.stored(len(tokens))):
                assert memory[found.pages[at // page_size]][at % page_size] == tokens[at]
    for sequence in list(table.sequences):
        table.free(sequence)
    assert table.free_pages == pages and table.free_slots == 6 and not table.shared_pages


def test_a_full_cache_says_what_is_missing_and_keeps_everything():
    table = PageTable(3, 16, 2)
    first = table.new()
    table.extend({first: 40})
    before = state(table)
    with pytest.raises(CacheFullError, match="need 1 pages of 16 tokens, 0 of 3 are free"):
        table.extend({first: 9})
    assert state(table) == before
    table.extend({first: 8})
    second = table.fork(first)
    with pytest.raises(CacheFullError, match="all 2 sequence slots"):
        table.new()
    with pytest.raises(CacheFullError, match="need 1 pages"):
        table.extend({second: 1})
    table.free(first)
    with pytest.raises(ArgumentError, match="sequence"):
        table.get(first)
    assert table.extend({second: 0}) == [] and table.get(second).length == 48


def test_only_the_page_that_is_written_is_copied():
    table = PageTable(8, 16, 3)
    first = table.new()
    table.extend({first: 40})
    second = table.fork(first)
    assert table.shared_pages == 3
    (copied,) = table.extend({second: 1})
    assert copied[0] == table.get(first).pages[2] and copied[1] == table.get(second).pages[2]
    assert table.shared_pages == 2 and table.extend({first: 1}) == []
    third = table.fork(first)
    assert len(table.extend({first: 1, third: 1})) == 1, "the last holder keeps the page"


def test_negative_numbers_are_refused():
    table = PageTable(2, 16, 1)
    with pytest.raises(ArgumentError, match="new"):
        table.extend({table.new(): -1})
