"""Storing by slot mapping: the oracle, and arguments that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import attention
from terrazzo.ops.attention import CacheLayout, KVCache, pack_cache, torch_op
from terrazzo.ops.attention.writing import slot_writing

HEADS, DIM, PAGE = 2, 64, 32
PAIRS = (("float16", "float16"), ("int8", "int4"), ("int4_hadamard", "int4"), ("int2_hadamard", "int2_hadamard"))


def cache_of(k: str = "int8", v: str = "int4", **changes) -> KVCache:
    sizes = dict(kv_heads=HEADS, head_dim=DIM, pages=12, page_size=PAGE, device="cpu", residual=0, sink_tokens=0)
    return KVCache(k, v, **(sizes | changes))


def slots_of(cache: attention.PackedCache, sequence: int, first: int, last: int) -> torch.Tensor:
    tokens = torch.arange(first, last)
    return cache.block_table[sequence].long()[tokens // PAGE] * PAGE + tokens % PAGE


@pytest.mark.parametrize("pair", PAIRS)
def test_a_mapping_stores_what_the_block_table_stores(pair):
    torch.manual_seed(0)
    by_table, by_slot = cache_of(*pair), cache_of(*pair)
    sequences = [[cache.new() for _ in range(3)] for cache in (by_table, by_slot)]
    told = [0, 0, 0]
    for step in ((40, 3, 0), (1, 1, 1), (2, 33, 17)):
        views = [cache.extend(dict(zip(own, step))) for cache, own in zip((by_table, by_slot), sequences)]
        k, v = torch.randn(2, sum(step), HEADS, DIM).half()
        torch_op.call("store", (k, v, views[0].starts, max(step)), views[0].layer())
        view = views[1].layer()
        where = torch.cat([slots_of(view, b, told[b], told[b] + n) for b, n in enumerate(step)])
        order = torch.randperm(len(where))
        padding = torch.full((1, HEADS, DIM), float("inf"), dtype=torch.float16)
        rows = [torch.cat([x[order], padding]) for x in (k, v)]
        torch_op.call("store_slots", (*rows, torch.cat([where[order], torch.tensor([-1])])), view)
        told = [a + b for a, b in zip(told, step)]
        assert torch.equal(by_table.pages, by_slot.pages)


def test_no_slot_is_no_change():
    cache = cache_of()
    view = cache.extend({cache.new(): 3}).layer()
    before = cache.pages.clone()
    rows = torch.randn(4, HEADS, DIM).half()
    torch_op.call("store_slots", (rows, rows, torch.tensor([-1, -7, len(view.pages) * PAGE, 1 << 40])), view)
    torch_op.call("store_slots", (rows[:0], rows[:0], torch.tensor([], dtype=torch.int64)), view)
    assert torch.equal(cache.pages, before)


ROWS = torch.zeros(4, HEADS, DIM, dtype=torch.float16)
MAP = torch.arange(4)
WRONG = {
    "a slot for each row": (dict(slot_mapping=MAP[:3]), "slot_mapping"),
    "integers": (dict(slot_mapping=MAP.float()), "slot_mapping"),
    "32 or 64 bits": (dict(slot_mapping=MAP.short()), "slot_mapping"),
    "contiguous": (dict(slot_mapping=torch.arange(8)[::2]), "slot_mapping"),
    "no list": (dict(slot_mapping=[0, 1, 2, 3]), "slot_mapping"),
    "rows of the cache's heads": (dict(k=ROWS[:, :1]), "k"),
    "values as keys": (dict(v=ROWS[:2]), "v"),
    "one dtype": (dict(v=ROWS.bfloat16()), "v"),
    "no batch": (dict(k=ROWS[None], v=ROWS[None]), "k"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_named(name):
    changes, argument = WRONG[name]
    cache = cache_of()
    view = cache.extend({cache.new(): 4}).layer()
    with pytest.raises(ArgumentError) as found:
        attention.store_slots(view, **(dict(k=ROWS, v=ROWS, slot_mapping=MAP) | changes))
    assert found.value.argument == argument


def test_caches_without_slots_are_refused():
    k = torch.randn(1, HEADS, 64, DIM)
    contiguous = pack_cache(k, k, "int8", "int4")
    ring = cache_of("int4_hadamard", "int4", residual=128)
    channel = cache_of("int4_channel32", "int4", residual=None)
    for cache in (contiguous, ring.extend({ring.new(): 4}).layer(), channel.extend({channel.new(): 4}).layer()):
        with pytest.raises(ArgumentError) as found:
            attention.store_slots(cache, ROWS, ROWS, MAP)
        assert found.value.argument == "cache"
    with pytest.raises(ArgumentError, match="token-wise"):
        slot_writing.request(CacheLayout("int4_channel32", "int4", 64), "float16", 32, "int64", target="sm_90a")


def test_turned_tokens_are_checked_by_row():
    cache = cache_of()
    view = cache.extend({cache.new(): 4}).layer()
    tables = torch.zeros(9, DIM // 2), torch.zeros(9, DIM // 2)
    qkv = torch.zeros(4, (4 + 2 * HEADS) * DIM, dtype=torch.float16)
    good = dict(heads=4, slot_mapping=MAP, positions=MAP)
    for changes, argument in (
        (dict(positions=MAP[:3]), "positions"),
        (dict(positions=MAP.double()), "positions"),
        (dict(slot_mapping=MAP[:2]), "slot_mapping"),
        (dict(slot_mapping=None), "positions"),
        (dict(heads=3), "heads"),
    ):
        with pytest.raises(ArgumentError) as found:
            attention.rope_append(view, qkv, *tables, **(good | changes))
        assert found.value.argument == argument
    with pytest.raises(ArgumentError) as found:
        attention.rope_append(replace(view, block_table=None, page_size=0), qkv, *tables, **good)
    assert found.value.argument in ("cache", "pages")
    assert (
        slot_writing.request(
            view.layout, "float16", PAGE, "int64", target=Target.parse("sm_80"), rotary_dim=DIM, positions="int64"
        ).name
        == "attention.rope_store_slots"
    )
