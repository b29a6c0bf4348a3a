"""Random caches that attention is measured on."""

from __future__ import annotations

import pytest
from terrazzo.autotune import attention_bench, gemm_bench
from terrazzo.autotune.attention_bench import Shape


@pytest.mark.parametrize("page", [0, 32, 128])
@pytest.mark.parametrize("tokens", [8, 129, 256, 272])
@pytest.mark.parametrize("formats", [("int4", "int4"), ("float16", "int8"), ("int4_channel128", "int4")], ids=str)
def test_a_random_cache_holds_every_token_of_its_lengths(formats, tokens, page, monkeypatch):
    monkeypatch.setattr(gemm_bench, "DEVICE", "cpu")
    if formats[0].endswith("channel128") and page == 32:
        page = 256  # a block of the keys
    cache = attention_bench.random_cache(*formats, Shape(2, 4, 2, tokens), 64, page)
    cache.check_values()
    assert cache.lengths.tolist() == [tokens] * 2 and cache.max_length == tokens
    for b in range(2):
        for stored in cache.dequantize(b, 1):
            assert stored.shape == (tokens, 64) and bool(stored.isfinite().all())
