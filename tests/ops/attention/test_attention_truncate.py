"""KVCache.truncate: rejected tokens are forgotten, and what comes after is as if they had never been there."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention import KVCache, pack_cache, torch_op

HEADS, DIM = 1, 64


def cache_of(k: str, v: str, **options: int) -> KVCache:
    return KVCache(k, v, kv_heads=HEADS, head_dim=DIM, pages=16, page_size=64, device="cpu", **options)


def store(cache: KVCache, sequence: int, x: torch.Tensor) -> None:
    """Tokens x [2, n, Hkv, D] behind those that the sequence has."""
    batch = cache.extend({sequence: x.shape[1]})
    torch_op.call("store", (*x, batch.starts, x.shape[1]), batch.layer())


def check(cache: KVCache, sequence: int, x: torch.Tensor) -> None:
    """The sequence holds tokens x [2, n, Hkv, D] as if they had come at once."""
    view = cache.batch([sequence]).layer()
    sizes = dict(residual=cache.residual_tokens, sink_tokens=cache.layout.sink_tokens)
    alone = pack_cache(*x[:, None].transpose(2, 3), cache.layout.k_format, cache.layout.v_format, **sizes)
    for held, wanted in zip(view.dequantize(0, 0), alone.dequantize(0, 0)):
        assert torch.equal(held, wanted)


CACHES = {
    "no ring": ("int4", "int8", {}),
    "ring": ("int4_hadamard", "int4", {"residual": 64}),
    "ring, first tokens": ("int2_hadamard", "int2_hadamard", {"residual": 32}),
    "channel": ("int4_channel32", "int4", {}),
}


@pytest.mark.parametrize("name", CACHES)
def test_tokens_behind_a_truncation_are_as_if_the_others_had_never_come(name):
    k, v, options = CACHES[name]
    cache, rng = cache_of(k, v, **options), torch.Generator().manual_seed(0)
    sequence, held = cache.new(), torch.zeros(2, 0, HEADS, DIM).half()
    for count, rejected in ((90, 3), (16, 16), (8, 5), (1, 1), (40, 7), (5, 0), (16, 12)):
        new = torch.randn(2, count, HEADS, DIM, generator=rng).half()
        store(cache, sequence, new)
        kept = cache.length(sequence) - rejected
        if cache.layout.k.group:  # to the last full group
            kept = max(kept, cache.layout.packed(cache.length(sequence), cache.residual_tokens))
        cache.truncate(sequence, kept)
        held = torch.cat([held, new], 1)[:, :kept]
        check(cache, sequence, held)
    cache.truncate(sequence, 0)
    assert cache.usage().free_pages == cache.usage().pages
    store(cache, sequence, held)
    check(cache, sequence, held)


def test_a_ring_says_how_far_it_goes_back():
    cache = cache_of("int4_hadamard", "int4", residual=64)
    sequence = cache.new()
    store(cache, sequence, torch.randn(2, 200, HEADS, DIM).half())
    cache.truncate(sequence, 190)
    with pytest.raises(ArgumentError, match=r"at least 176.*ring of 64"):  # of 200 tokens, not of 190
        cache.truncate(sequence, 175)
    cache.truncate(sequence, 176)


def test_pages_of_a_fork_stay_with_it():
    cache = cache_of("int4", "int4")
    sequence = cache.new()
    x = torch.randn(2, 150, HEADS, DIM).half()
    store(cache, sequence, x)
    other = cache.fork(sequence)
    cache.truncate(sequence, 10)
    check(cache, other, x)
    store(cache, sequence, x[:, 10:20] * 2)
    check(cache, other, x)
    check(cache, sequence, torch.cat([x[:, :10], x[:, 10:20] * 2], 1))


def test_lengths_that_a_sequence_never_had_are_refused():
    cache = cache_of("int4", "int4")
    sequence = cache.new()
    store(cache, sequence, torch.randn(2, 20, HEADS, DIM).half())
    for length in (-1, 21, 3.0, True):
        with pytest.raises(ArgumentError, match=r"0\.\.20"):
            cache.truncate(sequence, length)
    batch = cache.batch([sequence])
    cache.truncate(sequence, 20)
    with pytest.raises(ArgumentError, match="was freed or changed"):
        batch.layer()
