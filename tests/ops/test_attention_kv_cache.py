"""`KVCache` without a GPU: tokens are stored by the quantizer in the kernels' place, forks and frees lose nothing."""

from __future__ import annotations

import random

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import KVCache
from terrazzo.ops.attention import cache as caches
from terrazzo.ops.attention.paging import CacheFullError

HEADS, DIM = 1, 64


def make(k="int4", v="int4", pages=8, page_size=64, **options) -> KVCache:
    options = {"sequences": 5, "layers": 2, **options}
    return KVCache(k, v, kv_heads=HEADS, head_dim=DIM, pages=pages, page_size=page_size, device="cpu", **options)


def write(batch, tokens: dict[int, torch.Tensor]) -> None:
    """What the kernels do: pages from the first page that new tokens touch on, and the residual block, hold `tokens`
    [layers, 2, Hkv, T, D]."""
    cache = batch.cache
    for layer in range(2):
        view = batch.layer(layer)
        for sequence, new in zip(batch.sequences, batch.new):
            if not new:
                continue
            x = tokens[sequence][layer]
            size, found = cache.table.page_size, cache.table.get(sequence)
            whole = caches.pack_cache(x[0][None], x[1][None], cache.layout.k_format, cache.layout.v_format,
                                      page_size=size, residual=view.residual_tokens)  # fmt: skip
            first = cache.table.stored(found.length - new) // size
            for at, page in enumerate(found.pages):
                if at >= first:
                    view.pages[page].copy_(whole.pages[at])
            if view.residual is not None:
                view.residual[found.slot].copy_(whole.residual[0])


@pytest.mark.parametrize("residual", [0, 64])
def test_forks_and_frees_leave_every_sequence_as_if_it_were_alone(residual):
    rng, torch_rng = random.Random(residual), torch.Generator().manual_seed(residual)
    cache = make(residual=residual)
    tokens: dict[int, torch.Tensor] = {}
    full = 0
    for step in range(90):
        ids = list(tokens)
        action = rng.choice(("new", "fork", "free", *("extend",) * 5))
        try:
            if action == "new":
                tokens[cache.new()] = torch.zeros(2, 2, HEADS, 0, DIM, dtype=torch.float16)
            elif action == "fork" and ids:
                source = rng.choice(ids)
                tokens[cache.fork(source)] = tokens[source]
            elif action == "free" and ids and rng.random() < 0.6:
                gone = rng.choice(ids)
                cache.free(gone)
                del tokens[gone]
            elif ids:
                new = {s: rng.choice((0, 1, 5, 40)) for s in rng.sample(ids, rng.randint(1, len(ids)))}
                batch = cache.extend(new)
                for s, count in new.items():
                    more = torch.randn(2, 2, HEADS, count, DIM, generator=torch_rng).half()
                    tokens[s] = torch.cat([tokens[s], more], 3)
                write(batch, tokens)
        except CacheFullError:
            full += 1
            if ids and rng.random() < 0.5:
                cache.free(ids[0])
                del tokens[ids[0]]
        if step % 30 == 29:
            agree(cache, tokens)
    assert full
    agree(cache, tokens)


def agree(cache: KVCache, tokens: dict[int, torch.Tensor]) -> None:
    batch = cache.batch(list(tokens))
    for layer in range(2):
        view = batch.layer(layer)
        for b, x in enumerate(tokens.values()):
            if not x.shape[3]:
                assert not view.lengths[b]
                continue
            alone = caches.pack_cache(x[layer, 0][None], x[layer, 1][None], cache.layout.k_format,
                                      cache.layout.v_format, residual=view.residual_tokens)  # fmt: skip
            for h in range(HEADS):
                for mine, theirs in zip(view.dequantize(b, h), alone.dequantize(0, h)):
                    assert torch.equal(mine, theirs)


def test_usage_counts_bytes():
    cache = make("int4_channel64", "int4", layers=3)
    used = cache.usage()
    words = cache.layout.words(64)
    assert used.allocated == 4 * (cache.pages.numel() + cache.residual.numel())
    assert used.used == used.tokens == used.sequences == 0 and used.free_pages == used.pages == 8
    first = cache.new()
    cache.extend({first: 130})
    second = cache.fork(first)
    used = cache.usage()
    assert used.tokens == 260 and used.sequences == 2 and used.shared_pages == 2 and used.free_pages == 6
    assert used.used == 3 * HEADS * 4 * (2 * words + 2 * cache.residual.shape[3])
    assert used.f16 == 260 * 2 * 2 * DIM * HEADS * 3
    cache.free(first), cache.free(second)
    assert cache.usage().free_pages == 8


def test_a_batch_is_what_kernels_read():
    cache = make()
    a, b = cache.new(), cache.new()
    cache.extend({a: 70, b: 3})
    batch = cache.extend({b: 2, a: 1})
    assert batch.lengths.tolist() == [5, 71] and batch.starts.tolist() == [0, 2, 3] and batch.max_length == 71
    assert batch.table.shape == (2, 8) and batch.table[1, :2].tolist() == cache.table.get(a).pages
    assert batch.slots.tolist() == [cache.table.get(s).slot for s in (b, a)]
    storage = {name: getattr(batch, name).data_ptr() for name in ("lengths", "table", "slots", "starts")}
    again = cache.extend({a: 1, b: 1}, into=batch)
    assert {name: getattr(again, name).data_ptr() for name in storage} == storage
    assert again.lengths.tolist() == [72, 6] and again.starts.tolist() == [0, 1, 2]
    view = again.layer(1)
    assert view.pages.data_ptr() == cache.pages[1].data_ptr() and view.page_size == 64


def test_a_full_cache_loses_nothing():
    cache = make(pages=2)
    a, b = cache.new(), cache.new()
    cache.extend({a: 64, b: 60})
    cache.pages.random_(0, 100)
    before = cache.pages.clone(), cache.usage(), cache.length(a), cache.length(b)
    with pytest.raises(CacheFullError, match="free sequences first"):
        cache.extend({b: 4, a: 1})
    assert torch.equal(cache.pages, before[0]) and (cache.usage(), cache.length(a), cache.length(b)) == before[1:]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("pages", lambda: make(pages=0)),
        ("page_size", lambda: make("int4_channel128", "int4", page_size=64)),
        ("residual", lambda: make(residual=24)),
        ("k_static", lambda: make("fp8", "int4")),
        ("v_static", lambda: make(v_static=torch.ones(2, HEADS, DIM))),
        ("k_static", lambda: make("fp8", "int4", k_static=torch.ones(HEADS, DIM))),
        ("v_format", lambda: make("int4", "fp8", residual=64, v_static=torch.ones(2, HEADS, DIM))),
        ("sequence", lambda: make().length(3)),
        ("new", lambda: (c := make(max_tokens=10)).extend({c.new(): 11})),
        ("into", lambda: (c := make()).extend({c.new(): 1}, into=c.batch([]))),
        ("into", lambda: (c := make()).extend({c.new(): 1}, into=(d := make()).extend({d.new(): 1}))),
        ("kv_heads|pages", lambda: make(pages=2.0)),
        ("page_size", lambda: make(page_size=0)),
        ("max_tokens", lambda: make(max_tokens=-5)),
        ("device", lambda: KVCache("int4", "int4", kv_heads=1, head_dim=64, pages=1, device="gpu")),
        ("k_static", lambda: make("fp8", "int4", k_static=torch.zeros(2, HEADS, DIM))),
        ("new", lambda: (c := make()).extend({c.new(): 1.5})),
        ("new", lambda: (c := make()).extend([c.new()])),
        ("layer", lambda: (c := make()).batch([c.new()]).layer(2)),
        ("layer", lambda: (c := make()).batch([c.new()]).layer(-1)),
        ("sequences", lambda: (c := make()).batch([s := c.new(), s])),
    ],
)
def test_bad_arguments_are_named(argument, call):
    with pytest.raises(ArgumentError, match=argument):
        call()


def test_a_batch_takes_the_tokens_that_extend_made_room_for():
    cache = make()
    a, b = cache.new(), cache.new()
    even, ragged = cache.extend({a: 2, b: 2}), cache.extend({a: 3, b: 1})
    rows = lambda *shape: torch.zeros(*shape, HEADS, DIM, dtype=torch.float16)
    for words, call in (
        ("k = .*as many tokens as extend was asked for", lambda: even.append(rows(2, 1), rows(2, 1))),
        ("k = .*store takes ragged batches", lambda: ragged.append(rows(2, 2), rows(2, 2))),
        ("v = .*the 4 tokens", lambda: ragged.store(rows(4), rows(3))),
        ("q = .*the 4 tokens", lambda: ragged.prefill(rows(5))),
        ("k = .*requires_grad", lambda: ragged.store(rows(4).requires_grad_(), rows(4))),
        ("k = .*torch tensor", lambda: even.append(None, None)),
        ("CUDA", lambda: even.append(rows(2, 2), rows(2, 2))),
        ("CUDA", lambda: ragged.store(rows(4), rows(4))),
        ("CUDA", lambda: ragged.prefill(rows(4))),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_static_scales_reach_their_layer():
    scales = torch.rand(2, HEADS, DIM) + 0.1
    cache = make("fp8", "int8_static", k_static=scales, v_static=scales)
    view = cache.batch([cache.new()]).layer(1)
    assert torch.equal(view.k_static, scales[1]) and torch.equal(view.v_static, scales[1])
