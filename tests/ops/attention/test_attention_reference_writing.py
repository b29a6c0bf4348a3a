"""The oracle of storing new tokens: however they come, a cache holds what `pack_cache` makes of all of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from terrazzo.ops.attention import KVCache, pack_cache, torch_op
from terrazzo.ops.attention.writing import reference_writing

HEADS, DIM = 2, 64
FORMATS = ("float16", "bfloat16", "int8", "int4", "int4_channel32", "fp8", "int8_static")


def cache_of(fmt: str, page_size: int = 64) -> KVCache:
    values = "int4" if "channel" in fmt else fmt
    static = {}
    if fmt in ("fp8", "int8_static"):
        scales = torch.linspace(0.01, 0.02, HEADS * DIM).view(HEADS, DIM)
        static = dict(k_static=scales, v_static=scales * 2)
    return KVCache(fmt, values, kv_heads=HEADS, head_dim=DIM, pages=24, page_size=page_size, device="cpu", **static)


@pytest.mark.parametrize("fmt", FORMATS)
def test_tokens_that_come_in_any_portions_are_those_packed_at_once(fmt):
    torch.manual_seed(0)
    cache = cache_of(fmt)
    sequences = [cache.new() for _ in range(3)]
    tokens = torch.randn(2, 3, 100, HEADS, DIM).half()
    told = [0, 0, 0]
    for step in ((3, 0, 40), (1, 1, 1), (30, 17, 1), (1, 1, 1), (33, 0, 50)):
        batch = cache.extend(dict(zip(sequences, step)))
        parts = [torch.cat([x[b, told[b] : told[b] + n] for b, n in enumerate(step)]) for x in tokens]
        if step == (1, 1, 1):
            torch_op.call("append", tuple(p.view(3, 1, HEADS, DIM) for p in parts), batch.layer())
        else:
            torch_op.call("store", (*parts, batch.starts, max(step)), batch.layer())
        told = [a + b for a, b in zip(told, step)]
        at_once = pack_cache(
            *tokens.transpose(2, 3), fmt, cache.layout.v_format, lengths=torch.tensor(told),
            **({} if cache.static[0] is None else dict(k_static=cache.static[0][0], v_static=cache.static[1][0])),
        )  # fmt: skip
        view = cache.batch(sequences).layer()
        for b in range(3):
            for h in range(HEADS):
                for held, wanted in zip(view.dequantize(b, h), at_once.dequantize(b, h)):
                    assert torch.equal(held, wanted)


def test_tokens_of_contiguous_caches_are_written_in_place():
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, HEADS, 40, DIM).half()
    wanted = pack_cache(k, v, "int4", "int8")
    lengths = torch.tensor([39])
    cache = pack_cache(k, v, "int4", "int8", lengths=lengths)
    grown = replace(cache, lengths=torch.tensor([40], dtype=torch.int32))
    reference_writing.append(grown, *(x[:, :, 39:].transpose(1, 2) for x in (k, v)))
    for held, expected in zip(grown.dequantize(0, 1), wanted.dequantize(0, 1)):
        assert torch.equal(held, expected)
