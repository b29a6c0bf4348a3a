"""torch.compile(mode="reduce-overhead"): torch captures graphs by itself, and has to own all memory in its pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import TARGET
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a8, w4a16, w4ax
from terrazzo.ops.attention import append, decode, pack_cache
from terrazzo.ops.attention.cache import launch

pytestmark = pytest.mark.skipif(bool(TARGET), reason="the host side is the same for every target")
K, N, TOKENS, EXPERTS = 1024, 512, 11, 3


def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)) / 32


def operator(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """An operator on x [11, 1024], whose vectors are kept beside their owners in another dtype."""
    gain, bias = torch.rand(K, device="cuda").half(), torch.randn(N, device="cuda")
    offsets = torch.tensor([0, 4, 4, TOKENS], dtype=torch.int32, device="cuda")
    if name == "w4a16":
        own = w4a16.quantize(weight().cuda(), group_size=128, bias=bias)
        return lambda x: w4a16.gemm(x, own)
    if name == "w4a8":
        own = w4a8.quantize(weight().cuda())
        return lambda x: w4a8.gemm(w4a8.quantize_activations(x, rms_weight=gain), own) + w4a8.gemm(x, own)
    if name == "w4ax":
        seen = torch.randn(99, K, generator=torch.Generator().manual_seed(2))
        seen[:, ::40] *= 20
        plan = w4ax.plan_blocks(w4ax.ActivationStatistics.empty(K).observe(seen))
        mixed = w4ax.quantize(weight(), plan, target=Target.detect()).to("cuda")
        return lambda x: w4ax.gemm(w4ax.quantize_activations(x, mixed, rms_weight=gain), mixed)
    if name == "grouped w4a16":
        experts = w4a16.GroupedWeight.stack([w4a16.quantize(weight().cuda(), group_size=128)] * EXPERTS)
        return lambda x: w4a16.grouped_gemm(x, experts, offsets)
    if name == "grouped w4a8":
        experts = w4a8.GroupedWeight.stack([w4a8.quantize(weight().cuda())] * EXPERTS)
        return lambda x: w4a8.grouped_gemm(x, experts, offsets)
    keys, values = torch.randn(2, TOKENS, 2, 192, 128, device="cuda").half()
    cache = pack_cache(keys, values, "int4", "int4")
    return lambda x: decode(x.view(TOKENS, 1, 8, 128), cache).flatten(1)


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w4ax", "grouped w4a16", "grouped w4a8", "decode"])
def test_torch_captures_a_first_call(name):
    """The first call is torch's own, in its pool: what it keeps lies elsewhere, and graphs and calls do not disturb
    each other. Torch refuses memory of its pool that outlives the call."""
    launch.stand_ins.cache_clear()
    call = operator(name)
    xs = [torch.randn(TOKENS, K, device="cuda").half() for _ in range(4)]
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: call(x * 0.5) * 2, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for x in [xs[0]] * 3 + xs * 3:
            made = compiled(x).clone()
            assert torch.equal(made, call(x * 0.5) * 2)
        counters = torch._dynamo.utils.counters["inductor"]
    assert not counters["cudagraph_skips"], dict(counters)


def test_torch_compiles_a_step_that_writes_to_the_cache():
    """An append before decode: torch captures no graph of what writes to memory that it did not allocate."""
    heads, lengths = (TOKENS, 1, 2, 128), torch.full((TOKENS,), 70)
    caches = [pack_cache(*torch.zeros(2, TOKENS, 2, 192, 128, device="cuda").half(), "int8", "int8", lengths=lengths)]
    caches.append(caches[0].to("cpu").to("cuda"))
    assert caches[0].pages.data_ptr() != caches[1].pages.data_ptr()

    def step(cache, q, k, v):
        append(cache, k * 2, v)
        return decode(q, cache) + 1

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: step(caches[0], q, k, v), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            q, k, v = torch.randn(TOKENS, 1, 8, 128), torch.randn(heads), torch.randn(heads)
            new = [x.half().cuda() for x in (q, k, v)]
            made = compiled(*new).clone()
            assert torch.equal(made, step(caches[1], *new)) and torch.equal(caches[0].pages, caches[1].pages)
