"""Under another default device (model loaders set one), what is made of a tensor stays on the tensor's device."""

from __future__ import annotations

import pytest
import torch
from terrazzo.ops import moe, w4a8, w4a16, w4ax
from terrazzo.ops.attention import KVCache, pack_cache
from terrazzo.ops.w4a8 import fp8

X, WEIGHT, TOKENS = torch.randn(300, 256), torch.randn(64, 256), torch.randn(2, 3, 2, 64, 128)
PLAN = w4ax.plan_blocks(w4ax.ActivationStatistics.empty(256).observe(X))
PACKED = {
    "w4a16": w4a16.quantize(WEIGHT, group_size=128),
    "w4a8": w4a8.quantize(WEIGHT),
    "fp8": fp8.quantize(WEIGHT),
    "w4ax": w4ax.quantize(WEIGHT, PLAN, target="sm_90a"),
}


def cache_steps():
    cache = KVCache(
        "int4_channel64", "int4", kv_heads=1, head_dim=64, pages=8, page_size=64, layers=2, device="cpu"
    )  # fmt: skip
    sequence = cache.new()
    batch = cache.extend({sequence: 70})
    for layer in range(2):
        batch.layer(layer).check_values()
    cache.fork(sequence)
    return cache.extend({sequence: 1}, into=batch).lengths


CALLS = {
    "w4a16": lambda: w4a16.quantize(WEIGHT, group_size=64, symmetric=True).words,
    "w4a8": lambda: w4a8.quantize(WEIGHT).words,
    "smooth": lambda: w4a8.search_smooth(X, WEIGHT, steps=2).smooth,
    "fp8": lambda: fp8.quantize(WEIGHT).words,
    "statistics": lambda: w4ax.ActivationStatistics.empty(256, device="cpu", percentile=0.99).observe(X).maximum,
    "two levels": lambda: w4ax.quantize(WEIGHT, PLAN, target="sm_90a").words,
    "blocks": lambda: w4ax.quantize(WEIGHT, PLAN, target="sm_80", scales="block").words,
    "report": lambda: w4ax.report(w4ax.ActivationStatistics.empty(256, device="cpu").observe(X), PLAN, WEIGHT, X),
    "experts": lambda: w4a16.GroupedWeight.stack([PACKED["w4a16"]] * 3).stacked.words,
    "sort": lambda: moe.sort_by_expert(torch.zeros(20, 2, dtype=torch.int64, device="cpu"), 8).offsets,
    "pages": lambda: pack_cache(*TOKENS, "int4_channel64", "int8", page_size=64).pages,
    "lengths": lambda: pack_cache(*TOKENS, "int4", "int4").lengths,
    "cache": cache_steps,
} | {f"unpack {name}": w.unpack for name, w in PACKED.items()}


@pytest.mark.parametrize("call", CALLS)
def test_the_default_device_is_nobodys(call):
    with torch.device("meta"):
        made = CALLS[call]()
    assert not isinstance(made, torch.Tensor) or made.device.type == "cpu"


@pytest.mark.parametrize("name", PACKED)
def test_files_are_read_where_they_are_asked_for(name, tmp_path):
    with torch.device("meta"):
        PACKED[name].save(tmp_path / "w.safetensors")
        back = type(PACKED[name]).load(tmp_path / "w.safetensors")
    assert torch.equal(back.words, PACKED[name].words)
