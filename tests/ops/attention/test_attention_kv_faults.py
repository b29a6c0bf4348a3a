"""`KVCache` where something fails, or was made elsewhere: nothing changes, nothing is lost. No GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.ops.attention import KVCache
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.kv_cache import Batch


def make(k="int4", v="int4", pages=8, page_size=64, **options) -> KVCache:
    options = {"sequences": 5, "layers": 2, "kv_heads": 1, "head_dim": 64, "device": "cpu", **options}
    return KVCache(k, v, pages=pages, page_size=page_size, **options)


def state(cache: KVCache) -> tuple:
    table = cache.table
    held = {s: (f.slot, list(f.pages), f.length, f.generation, f.unstored) for s, f in table.sequences.items()}
    return held, list(table.holders), sorted(table._free), table.generation, table.free_slots, cache.usage()


@pytest.mark.parametrize("fails", ["copy", "describe", "into"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_extend_that_fails_has_changed_nothing(monkeypatch, fails, error):
    """Out of memory in the copy of a shared page, or while the batch is made: a second try finds all as it was."""
    cache = make(residual=0)
    s = cache.new()
    batch = cache.extend({s: 70})
    for layer in range(2):
        batch.layer(layer)
    cache.pages.random_(1, 100)
    f = cache.fork(s)
    into = cache.extend({cache.new(): 3})
    before, tensors = state(cache), [into.lengths.clone(), into.table.clone()]

    def broken(*args, **options):
        raise error("no memory")

    if fails == "copy":
        real = cache.pages

        class Pages:
            shape, __len__, __getitem__, __setitem__ = real.shape, real.__len__, real.__getitem__, broken

            def __getattr__(self, name):
                return getattr(real, name)

        monkeypatch.setattr(cache, "pages", Pages())
    else:
        monkeypatch.setattr(torch, "from_numpy", broken)
    with pytest.raises(error):
        cache.extend({f: 60, s: 1} if fails != "into" else {f: 60}, **({"into": into} if fails == "into" else {}))
    monkeypatch.undo()
    assert state(cache) == before and torch.equal(into.lengths, tensors[0]) and torch.equal(into.table, tensors[1])
    again = cache.extend({f: 1})
    pages = cache.table.get(f).pages
    assert cache.length(f) == 71 and pages != cache.table.get(s).pages and again.lengths.tolist() == [71]
    assert torch.equal(cache.pages[:, pages[1]], cache.pages[:, cache.table.get(s).pages[1]])


def test_a_fork_that_fails_leaves_no_sequence(monkeypatch):
    cache = make("int4_channel64", "int4")
    s = cache.new()
    cache.extend({s: 3}).layer(0), cache.batch([s]).layer(1)
    for layer in range(2):
        cache.table.get(s).unstored.layers.discard(layer)
    before = state(cache)

    def broken(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.Tensor, "copy_", broken)
    with pytest.raises(torch.OutOfMemoryError):
        cache.fork(s)
    monkeypatch.undo()
    assert len(cache.table.sequences) == 1 and state(cache)[1:3] == before[1:3]
    assert cache.fork(s) != s


def test_a_cache_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        cache = make(residual=0)
        s = cache.new()
        batch = cache.extend({s: 70})
        for layer in range(2):
            batch.layer(layer)
    f = cache.fork(s)
    into = cache.extend({f: 1})
    assert cache.extend({f: 1}, into=into) is into and into.lengths.tolist() == [72]
    with torch.inference_mode():
        assert cache.extend({f: 1}, into=into).lengths.tolist() == [73]


@pytest.mark.parametrize("kind", [np.int16, np.uint8, np.uint32, np.int64])
def test_counts_of_numpy_do_not_wrap(kind):
    cache = make(pages=700)
    s = cache.new()
    cache.extend({s: 32000})
    cache.extend({s: kind(100)})
    for _ in range(9):
        cache.extend({s: kind(100)})
    assert cache.length(s) == 33000 and len(cache.table.get(s).pages) == -(-33000 // 64)
    small = make(pages=8, max_tokens=200)
    t = small.new()
    small.extend({t: kind(120)})
    with pytest.raises(ArgumentError, match="at most 200 tokens"):
        small.extend({t: kind(120)})


def test_a_batch_that_is_taken_over_stores_for_its_new_sequences_alone():
    cache = make()
    x, y = cache.new(), cache.new()
    batch = cache.extend({x: 1})
    with pytest.raises(ArgumentError, match="new tokens that are not stored"):
        cache.fork(x)
    cache.extend({y: 1}, into=batch)
    for layer in range(2):
        batch.layer(layer)
    with pytest.raises(ArgumentError, match="new tokens that are not stored"):
        cache.fork(x)
    assert cache.fork(y)


def test_what_is_lost_with_a_freed_sequence_is_said():
    cache = make()
    x, y = cache.new(), cache.new()
    batch = cache.extend({x: 3, y: 3})
    cache.free(x)
    with pytest.raises(ArgumentError, match="tokens of this one that are not stored are lost"):
        batch.layer(0)
    reads = cache.batch([y])
    cache.free(y)
    with pytest.raises(ArgumentError, match=r"call extend\(\) or batch\(\) again$"):
        reads.layer(0)
    assert isinstance(reads, Batch)


def test_static_scales_are_the_caches_own():
    scales = torch.full((2, 1, 64), 0.03)
    cache = make("int8_static", "int8_static", k_static=scales, v_static=scales)
    scales.fill_(7)
    assert all(float(it.max()) < 1 for it in cache.static)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_stand_ins_have_the_dtypes_of_arguments(dtype):
    """Model loaders set another default dtype."""
    launch.stand_ins.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        found = launch.stand_ins(torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
        launch.stand_ins.cache_clear()
    assert {name: t.dtype for name, t in found.items()} == {
        "table": torch.int32, "residual": torch.int32, "static": torch.float32, "sinks": torch.float32,
    }  # fmt: skip


def test_a_capture_on_a_stream_of_its_own_finds_semaphores(monkeypatch):
    """torch.cuda.graph captures on a stream that nothing ran on before."""
    device, stream = torch.device("cpu"), [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(launch, "_spares", {})
    with pytest.raises(CaptureError, match="decode with 10 tiles .* on cpu, .*call it once .* before the capture"):
        launch.semaphores(device, 10, True)
    eager = launch.semaphores(device, 10, False)
    stream[0] = 2
    captured = launch.semaphores(device, 10, True)
    assert captured.data_ptr() != eager.data_ptr() and not captured.any()
    assert launch.semaphores(device, 10, True).data_ptr() == captured.data_ptr()
    stream[0] = 3
    with pytest.raises(CaptureError):
        launch.semaphores(device, 10, True)  # no eager call since has made another
    stream[0] = 1
    assert launch.semaphores(device, 10, False).data_ptr() == eager.data_ptr()
    stream[0] = 3
    spare = launch.semaphores(device, 4096, True)  # as many as one has that an eager call of 10 made
    assert spare.shape == (4096,) and spare.data_ptr() not in (eager.data_ptr(), captured.data_ptr())
