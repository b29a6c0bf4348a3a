"""`KVCache` without a GPU: tokens are stored by the quantizer in the kernels' place, forks and frees lose nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import KVCache, entry
from terrazzo.ops.attention.cache import cache as caches
from terrazzo.ops.attention.cache.paging import CacheFullError

HEADS, DIM = 1, 64


def make(k="int4", v="int4", pages=8, page_size=64, **options) -> KVCache:
    options = {"sequences": 5, "layers": 2, "kv_heads": HEADS, "head_dim": DIM, "device": "cpu", **options}
    return KVCache(k, v, pages=pages, page_size=page_size, **options)


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
    batch = cache.extend({first: 130})
    for layer in range(3):
        batch.layer(layer)  # to store the tokens in
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
    assert batch.mean_length == batch.layer().mean_length == 38
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


STATIC = (
    np.ones((2, HEADS, DIM), np.float32),
    torch.ones(2, HEADS, DIM, device="meta"),
    torch.ones(2, HEADS, DIM).to_sparse(),
    torch.ones(3, 2, HEADS, DIM),
    5,
)


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
        ("sequences = 'int'", lambda: make().batch(5)),
        ("sequences = 'NoneType'", lambda: make().batch(None)),
        ("sequence = .*no sequence", lambda: make().batch([[1]])),
        ("sequence = .*no sequence", lambda: make().length([1])),
        ("sequence = .*no sequence", lambda: make().fork([1])),
        ("sequence = .*no sequence", lambda: make().free([1])),
        ("device = 'gpu': must be a device;", lambda: make(device="gpu")),
        ("device = .*must be a device;", lambda: make(device=torch.float16)),
        ("head_dim = 64.0", lambda: make(head_dim=64.0)),
        ("page_size = .*words", lambda: make(page_size=1 << 40)),
        ("pages = 1000", lambda: make(pages=10**30)),
        ("layers = .*1..2147483647", lambda: make(layers=1 << 50)),
        ("sequences = .*1..2147483647", lambda: make(sequences=1 << 40)),
        ("max_tokens", lambda: make(max_tokens=1 << 31)),
        (
            f"pages = .*takes {4 * 2 * (2**31 - 1) ** 2 * 1152} bytes on cpu",
            lambda: make(pages=2**31 - 1, kv_heads=2**31 - 1),
        ),
        ("sequences = .*bytes on cpu", lambda: make("int4_channel64", sequences=2**31 - 1)),
        *(("k_static = .*float", lambda s=s: make("fp8", k_static=s)) for s in STATIC),
        *(("v_static = .*float", lambda s=s: make(v="fp8", v_static=s)) for s in STATIC),
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


@pytest.fixture
def launched(monkeypatch) -> list:
    """The operators that a batch called, which do nothing."""
    calls = []
    for name in ("append", "store", "prefill", "decode"):
        monkeypatch.setattr(entry, name, lambda *args, name=name, **options: calls.append(name))
    return calls


ROW = torch.zeros(1, 1, HEADS, DIM, dtype=torch.float16)
USES = {
    "append": lambda batch: batch.append(ROW, ROW, 1),
    "store": lambda batch: batch.store(ROW[0], ROW[0], 1),
    "prefill": lambda batch: batch.prefill(ROW[0], 1),
    "decode": lambda batch: batch.decode(ROW, 1),
}


@pytest.mark.parametrize("name", [*USES, "layer"])
def test_a_batch_of_a_freed_sequence_is_refused(launched, name):
    """Its pages may belong to another sequence, which the kernel would overwrite."""
    use = USES.get(name, lambda batch: batch.layer(1))
    cache = make()
    kept, gone = cache.new(), cache.new()
    stale, other = cache.extend({gone: 1}), cache.extend({kept: 1})
    use(stale)
    cache.free(gone)
    taken = cache.new()
    cache.extend({taken: 70})
    assert stale.table[0, 0] in cache.table.get(taken).pages
    del launched[:]
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"sequence = {gone}: was freed or changed .*call extend\(\) or batch"):
            use(stale)
    assert not launched
    use(other)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_batch_made_before_its_page_was_copied_is_refused(launched, use):
    cache = make()
    first = cache.new()
    cache.extend({first: 40})
    before = cache.extend({first: 1})
    for layer in range(2):
        before.append(ROW, ROW, layer)
    second = cache.fork(first)
    use(before)
    shared = cache.batch([second])
    after = cache.extend({first: 1})
    assert after.table[0, 0] != before.table[0, 0]
    with pytest.raises(ArgumentError, match=f"sequence = {first}: was freed or changed"):
        use(before)
    use(after)
    shared.decode(ROW)  # still holds the page


def test_batches_stay_in_use_while_others_come_and_go(launched):
    cache = make()
    first, second = cache.new(), cache.new()
    prompt = cache.extend({first: 1})
    for layer in range(2):
        prompt.prefill(ROW[0], layer)
        prompt.store(ROW[0], ROW[0], layer)
    cache.extend({second: 100})
    for step in range(3):
        batch = cache.extend({first: 1})
        for layer in range(2):
            if step == layer == 1:
                cache.free(second)
            batch.append(ROW, ROW, layer)
            batch.decode(ROW, layer)
    assert launched.count("append") == launched.count("decode") == 6


def test_a_batch_in_the_tensors_of_another_is_that_batch(launched):
    """Its block table is another one, so what the host knows of it must be, too."""
    cache = make()
    first, second = cache.new(), cache.new()
    batch = cache.extend({first: 1})
    batch.append(ROW, ROW)
    assert cache.extend({second: 3}, into=batch) is batch
    assert batch.new == [3] and batch.max_length == batch.mean_length == batch.layer().max_length == 3
    with pytest.raises(ArgumentError, match="k = .*3"):  # starts say 3
        batch.store(ROW[0], ROW[0])
    cache.free(first)
    batch.decode(ROW)
    cache.free(second)
    with pytest.raises(ArgumentError, match=f"sequence = {second}"):
        batch.decode(ROW)


@pytest.mark.parametrize("k", ["int4", "int4_channel64"])
def test_a_fork_between_extend_and_store_is_refused(launched, k):
    """It would count tokens that only the first sequence gets."""
    cache = make(k, sequences=9)
    first, second = cache.new(), cache.new()
    batch = cache.extend({first: 1, second: 0})
    cache.fork(second)
    for layer in (1, 0):
        with pytest.raises(ArgumentError, match=r"sequence = 1: .*not stored in layers \[0"):
            cache.fork(first)
        batch.prefill(ROW[0], layer)
        batch.store(ROW[0], ROW[0], layer)
    cache.fork(cache.fork(first))
    before = cache.usage()
    batch = cache.extend({first: 1})
    batch.append(ROW, ROW, 1)
    with pytest.raises(ArgumentError, match=r"layers \[0\]"):
        cache.fork(first)
    assert cache.usage().sequences == before.sequences
    batch.layer(0)  # by other means
    cache.free(cache.fork(first))
    cache.free(second)
    cache.extend({first: 1}, into=batch)  # as replays of a graph would store it
    cache.fork(first)


def test_a_fork_after_a_traced_append_is_not_refused():
    cache = make(layers=1)
    first = cache.new()
    batch = cache.extend({first: 1})
    with pytest.raises(ArgumentError, match="not stored"):
        cache.fork(first)

    def step(k):
        batch.append(k, k)
        return k + 1

    torch.compile(step, backend=lambda graph, examples: lambda *args: (ROW,), fullgraph=True)(ROW)
    cache.fork(first)


def test_a_table_is_as_wide_as_there_are_pages():
    cache = make(pages=3, max_tokens=2**31 - 1, sequences=2**31 - 1)
    batch = cache.extend({cache.new(): 5})
    assert batch.table.shape == (1, 3) and cache.table.free_slots == 2**31 - 2


def test_reserved_tokens_have_their_pages_and_are_counted_one_after_another():
    cache = make(pages=8)
    first, second = cache.new(), cache.new()
    cache.extend({first: 60, second: 3})
    batch = cache.extend({first: 1, second: 1}, reserve=70)
    assert cache.usage().free_pages == 8 - 3 - 2 and batch.max_length == 131 and batch.lengths.tolist() == [61, 4]
    for step in range(70):
        batch.advance(lengths=step % 2 == 0)
        if step % 2:
            batch.lengths.add_(1)  # as a graph's replay does
    assert batch.lengths.tolist() == [131, 74] == [cache.length(first), cache.length(second)]
    assert cache.usage().free_pages == 8 - 3 - 2
    with pytest.raises(ArgumentError, match="reserve.*0"):
        batch.advance()
    with pytest.raises(ArgumentError, match="reserve"):
        cache.extend({first: 1}, reserve=-1)


def test_a_reserve_that_does_not_fit_takes_nothing():
    cache = make(pages=3, max_tokens=190)
    sequence = cache.new()
    with pytest.raises(CacheFullError, match="70 new tokens"):
        other = cache.new()
        cache.extend({other: 65, sequence: 0}, reserve=0)
        cache.extend({sequence: 1}, reserve=69)
    with pytest.raises(ArgumentError, match="at most 190"):
        cache.extend({sequence: 1}, reserve=190)
    assert cache.length(sequence) == 0 and cache.usage().free_pages == 1


def test_a_fork_of_a_sequence_with_reserved_pages_writes_to_its_own():
    cache = make(pages=8, layers=1)
    sequence = cache.new()
    batch = cache.extend({sequence: 1}, reserve=100)
    batch._stored(0)
    branch = cache.fork(sequence)
    cache.extend({branch: 1})
    pages = cache.table.rows([sequence, branch])
    assert pages[0][0] != pages[1][0]
    batch.advance()  # the sequence kept its own
    assert batch.lengths.tolist() == [2] and cache.length(branch) == 2
