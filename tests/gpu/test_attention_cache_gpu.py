"""Storing tokens on the GPU, bit for bit: every format by append and by store, and a KVCache over 10,000 steps."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import attention_cases
import attention_write_cases
import pytest
import torch
from attention_write_cases import Case, check
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import CacheFullError, KVCache, entry, pack_cache
from terrazzo.ops.attention.cache.format import kept_in_f16
from terrazzo.ops.attention.decoding import reference

STEPS = int(os.environ.get("TERRAZZO_CACHE_STEPS", 10_000))
HEADS, GROUP, DIM = 2, 4, 128


@pytest.fixture(autouse=True)
def compiled_first(gpu, compiled) -> None:
    """Kernels of all selected cases are compiled together, up front."""


def appends(case: Case) -> tuple[Case, ...]:
    """The case by `store`, and appends of 1, 3 and 8 tokens at every place in a tile or block."""
    block = max(16, case.residual, int(case.k.partition("channel")[2] or 0))  # or a ring that becomes full
    olds = (0, 1, 7, block - 8, block - 3, block - 1, block, 2 * block + 5)
    return (case, *(replace(case, old=olds, new=(n,) * len(olds), heads=3) for n in (1, 3, 8)))


CASES = {name: appends(case) for name, case in attention_write_cases.CASES.items()}
CASES["cp.async"] = tuple(replace(case, target="sm_80") for name in ("int4", "channel") for case in CASES[name])
CASES["long prefill"] = (Case(old=(0, 100), new=(9000, 4000), heads=4, page=128),)


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in CASES.items()])
def test_tokens_are_stored_as_the_quantizer_stores_them(cases):
    for case in cases:
        check(case)


class Spec:
    """A KVCache and the kernels that fill and read it, in the form that the fixture `compiled` reads."""

    def __init__(self, k: str, v: str, q_len: int) -> None:
        self.q_len, self.sink = q_len, kept_in_f16(k)[1]
        self.decode = attention_cases.Case(
            k, v, DIM, HEADS, GROUP, q_len, page=128, target=None, sink_tokens=self.sink
        )  # fmt: skip

    def cache(self) -> KVCache:
        sizes = dict(pages=200, page_size=128, sequences=8, layers=2, max_tokens=4096)
        return KVCache(self.decode.k, self.decode.v, kv_heads=HEADS, head_dim=DIM, **sizes)

    def requests(self) -> list:
        store = Case(self.decode.k, self.decode.v, DIM, page=128, target=None, sink_tokens=self.sink)
        return [*self.decode.requests(), *store.requests()]


RUNS = {
    "int4": (Spec("int4", "int4", 2),),
    "channel": (Spec("int4_channel64", "int2", 1),),
    "float16": (Spec("float16", "int8", 1),),
    "ring": (Spec("int4_hadamard", "int4", 2),),
    "ring, first tokens": (Spec("int2_hadamard", "int2_hadamard", 1),),
}


@pytest.mark.parametrize("cases", [pytest.param(spec, id=name) for name, spec in RUNS.items()])
def test_ten_thousand_steps_leave_the_reference(cases):
    """Appends, stores, forks and frees in any order; then every token of every sequence has the reference's bits."""
    spec = cases[0]
    rng, torch_rng = random.Random(7), torch.Generator("cuda").manual_seed(7)
    cache, schedule = spec.cache(), spec.decode.schedule()
    history: dict[int, torch.Tensor] = {}  # [layers, 2, tokens, Hkv, D]
    full = 0
    for step in range(STEPS):
        ids = list(history)
        action = rng.random()
        try:
            if not ids or action < 0.01:
                history[cache.new()] = torch.zeros(2, 2, 4096, HEADS, DIM, dtype=torch.float16, device="cuda")
            elif action < 0.02:
                source = rng.choice(ids)
                history[cache.fork(source)] = history[source].clone()
            elif action < 0.03 or max(cache.length(s) for s in ids) > 3500:
                gone = max(ids, key=cache.length)
                check_sequences(cache, {gone: history.pop(gone)})
                cache.free(gone)
            elif action < 0.9:
                chosen = rng.sample(ids, rng.randint(1, len(ids)))
                extend(cache, history, {s: spec.q_len for s in chosen}, torch_rng, True)
                if step % 50 == 0:
                    attend(cache, chosen, spec.q_len, torch_rng, schedule)
            else:
                chosen = rng.sample(ids, rng.randint(1, len(ids)))
                extend(cache, history, {s: rng.choice((0, 1, 9, 33, 90)) for s in chosen}, torch_rng, False)
        except CacheFullError:
            full += 1
            gone = rng.choice(ids)
            check_sequences(cache, {gone: history.pop(gone)})
            cache.free(gone)
    check_sequences(cache, history)
    assert cache.usage().tokens == sum(cache.length(s) for s in history)
    for sequence in list(history):
        cache.free(sequence)
    assert cache.usage().free_pages == cache.usage().pages
    assert STEPS < 5000 or full, "the cache never ran full"


def extend(cache: KVCache, history, new: dict[int, int], rng: torch.Generator, even: bool) -> None:
    starts = {s: cache.length(s) for s in new}
    batch = cache.extend(new)
    total = sum(new.values())
    if not total:
        return
    x = torch.randn(2, 2, total, HEADS, DIM, generator=rng, device="cuda").half()
    for layer in range(2):
        k, v = x[layer]
        if even:
            count = next(iter(new.values()))
            batch.append(k.unflatten(0, (-1, count)), v.unflatten(0, (-1, count)), layer)
        else:
            batch.store(k, v, layer)
    at = 0
    for s, count in new.items():
        history[s][:, :, starts[s] : starts[s] + count] = x[:, :, at : at + count]
        at += count


def check_sequences(cache: KVCache, history: dict[int, torch.Tensor]) -> None:
    for sequence, x in history.items():
        length = cache.length(sequence)
        if not length:
            continue
        batch = cache.batch([sequence])
        for layer in range(2):
            view = batch.layer(layer)
            k, v = (part[:length].transpose(0, 1).unsqueeze(0) for part in x[layer])
            layout = cache.layout
            alone = pack_cache(k, v, layout.k_format, layout.v_format, residual=view.residual_tokens)
            for h in range(HEADS):
                for mine, theirs in zip(view.dequantize(0, h), alone.dequantize(0, h)):
                    assert torch.equal(mine, theirs), f"sequence {sequence} of {length} tokens, layer {layer}, head {h}"


def attend(cache: KVCache, sequences: list[int], q_len: int, rng: torch.Generator, schedule) -> None:
    """Decode of the newest tokens, inside the error bound."""
    batch = cache.batch(sequences)
    q = torch.randn(len(sequences), q_len, HEADS * GROUP, DIM, generator=rng, device="cuda").half()
    for layer in range(2):
        y = batch.decode(q, layer, schedule=schedule)
        expected, _, bound = reference.decode(q, batch.layer(layer))
        assert bool(((y.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("cases", [pytest.param(RUNS["channel"], id="channel")])
def test_a_captured_step_appends_where_the_lengths_say(cases):
    """A graph of append and decode, replayed over the end of a residual block."""
    spec = cases[0]
    rng = torch.Generator("cuda").manual_seed(3)
    cache, twin, schedule = spec.cache(), spec.cache(), spec.decode.schedule()
    prompt = torch.randn(2, 2, 100, HEADS, DIM, generator=rng, device="cuda").half()
    ids = [(c.new(), c.new()) for c in (cache, twin)]
    for c, (a, b) in zip((cache, twin), ids):
        for sequence, count in ((a, 100), (b, 61)):
            c.extend({sequence: count}).store(*prompt[0, :, :count])
    k, v = torch.zeros(2, 2, 1, HEADS, DIM, dtype=torch.float16, device="cuda")
    q = torch.randn(2, 1, HEADS * GROUP, DIM, generator=rng, device="cuda").half()
    y = torch.empty_like(q)
    batch = cache.extend(dict.fromkeys(ids[0], 1))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        batch.append(k, v)
        batch.decode(q, out=y, schedule=schedule)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            batch.append(k, v)
            batch.decode(q, out=y, schedule=schedule)
    plain = twin.extend(dict.fromkeys(ids[1], 1))
    plain.append(k, v)
    for _ in range(70):
        new = torch.randn(2, 2, 1, HEADS, DIM, generator=rng, device="cuda").half()
        k.copy_(new[0])
        v.copy_(new[1])
        cache.extend(dict.fromkeys(ids[0], 1), into=batch)
        graph.replay()
        plain = twin.extend(dict.fromkeys(ids[1], 1))
        plain.append(*new)
        torch.cuda.synchronize()
        expected, _, bound = reference.decode(q, plain.layer())
        assert bool(((y.double() - expected).abs() <= bound).all())
    for mine, theirs in zip(ids[0], ids[1]):
        one, two = cache.batch([mine]).layer(), twin.batch([theirs]).layer()
        for h in range(HEADS):
            for a, b in zip(one.dequantize(0, h), two.dequantize(0, h)):
                assert torch.equal(a, b)


@pytest.mark.parametrize("cases", [pytest.param(RUNS["channel"], id="channel")])
def test_a_compiled_step_is_one_graph(cases):
    """torch.compile sees append, decode and their order."""
    spec = cases[0]
    rng = torch.Generator("cuda").manual_seed(5)
    k, v = torch.randn(2, 2, 1, HEADS, DIM, generator=rng, device="cuda").half()
    q = torch.randn(2, 1, HEADS * GROUP, DIM, generator=rng, device="cuda").half()
    results = []
    for compiled in (False, True):
        cache = spec.cache()
        view = cache.extend({cache.new(): 1, cache.new(): 1}).layer()

        def step(q, k, v, view=view):
            entry.append(view, k * 2, v)
            return entry.decode(q, view) + 1

        results.append((torch.compile(step, fullgraph=True) if compiled else step)(q, k, v))
        results.append(cache.residual)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@pytest.mark.parametrize("cases", [(Case(old=(3,), new=(2,)),)], ids=["case"])
def test_bad_calls_are_refused(cases):
    made = attention_write_cases.prepare(cases[0])[0].to("cuda")
    good = torch.zeros(1, 2, 2, 128, dtype=torch.float16, device="cuda")
    starts = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    flat = good[0]
    for words, call in (
        ("k", lambda: entry.append(made, good.expand(2, 2, 2, 128), good)),
        ("k", lambda: entry.append(made, good.float(), good.float())),
        ("v", lambda: entry.append(made, good, good.bfloat16())),
        ("v", lambda: entry.append(made, good, good[:, :1])),
        ("k", lambda: entry.append(made, good[..., :64], good[..., :64])),
        ("k", lambda: entry.append(made, good.cpu(), good.cpu())),
        ("cu_seqlens", lambda: entry.store(made, flat, flat, starts.long(), 2)),
        ("cu_seqlens", lambda: entry.store(made, flat, flat, starts[:1], 2)),
        ("most_new", lambda: entry.store(made, flat, flat, starts, -1)),
        ("k", lambda: entry.store(made, good, good, starts, 2)),
    ):
        before = made.pages.clone()
        with pytest.raises(ArgumentError, match=words):
            call()
        assert torch.equal(before, made.pages)
