"""terrazzo.nn on a GPU: logits beside the reference path, CUDA graphs, torch.compile, states and moves."""

from __future__ import annotations

import copy

import pytest
import torch
from terrazzo import nn
from terrazzo.lowering import compile_many, kernels
from terrazzo.lowering.targets import Target
from terrazzo.nn import positions_of
from terrazzo.nn.preparing import kernel_requests
from terrazzo.ops import w4a8, w4a16
from terrazzo.ops.attention import KVCache
from terrazzo.ops.w4a8 import entry as w4a8_entry
from terrazzo.ops.w4ax import entry as w4ax_entry
from terrazzo.ops.weight_only import entry as weight_only_entry

HIDDEN, FEATURES, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WORDS = 256, 512, 8, 2, 64, 2, 300
FORMATS = ("w4a16-g64", "w4a16-g128-sym", "w4a8-g64", "w4a8-e4m3-g128", "w4ax")


def weight(n: int, k: int, seed: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5


def options(form: str) -> dict:
    return {"target": Target.detect().arch} if form == "w4ax" else {}


def linear(form: str, n: int = 384, k: int = HIDDEN, bias: bool = True) -> nn.Linear:
    return nn.Linear.from_float(
        weight(n, k, 1), form, bias=weight(1, n, 2)[0].half() if bias else None, **options(form)
    )


def decoder(form: str, experts: int = 0) -> nn.Decoder:
    """On the CPU, so that both devices have the same bytes."""
    layers = []
    given = options(form)
    for i in range(LAYERS):
        at = 20 * i
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        qkv = nn.QKVLinear.from_float([weight(n, HIDDEN, at + j) for j, n in enumerate(sizes)], form, **given)
        out = nn.Linear.from_float(weight(HIDDEN, sizes[0], at + 3), form, **given)
        norms = torch.rand(2, HEAD_DIM, generator=torch.Generator().manual_seed(at)) + 0.5 if i else None
        attention = nn.Attention(
            qkv, out, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layer=i, norms=norms, window=24 * i
        )
        if experts:
            both = torch.stack([weight(2 * FEATURES, HIDDEN, at + 4 + e) for e in range(experts)])
            down = torch.stack([weight(HIDDEN, FEATURES, at + 9 + e) for e in range(experts)])
            made = nn.Experts.from_float(both, down, form, **given)
            mlp = nn.SparseMLP(weight(experts, HIDDEN, at + 17).half() * 8, made, 2, True)
        else:
            both = [weight(FEATURES, HIDDEN, at + 4), weight(FEATURES, HIDDEN, at + 5)]
            down = nn.Linear.from_float(weight(HIDDEN, FEATURES, at + 6), form, **given)
            mlp = nn.MLP(nn.GateUpLinear.from_float(both, form, **given), down)
        norm = lambda seed: nn.RMSNorm(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(seed)) + 0.5)
        layers.append(nn.DecoderLayer(attention, mlp, norm(at + 7), norm(at + 8)))
    embedding = weight(WORDS, HIDDEN, 99).half() * 16
    return nn.Decoder(embedding, layers, nn.RMSNorm(HIDDEN), [nn.Rotary.of_base(HEAD_DIM)])


def cache_of(kv: str, device: str) -> KVCache:
    values = "int4" if "channel" in kv else kv
    return KVCache(
        kv, values, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=16, page_size=128, layers=LAYERS, device=device
    )


@torch.no_grad()
def hidden(model: nn.Decoder, kv: str, device: str) -> list[torch.Tensor]:
    """Hidden states of prompts of 37 and 5 tokens, and of three decode steps."""
    cache, found = cache_of(kv, device), []
    sequences = [cache.new(), cache.new()]
    tokens = torch.randint(0, WORDS, (60,), generator=torch.Generator().manual_seed(5)).to(device)
    batch = cache.extend(dict(zip(sequences, (37, 5))))
    found.append(model(tokens[:42], positions_of(batch), batch))
    for step in range(3):
        batch = cache.extend(dict.fromkeys(sequences, 1))
        found.append(model(tokens[42 + 2 * step : 44 + 2 * step], positions_of(batch), batch))
    return found


def close(y: torch.Tensor, ref: torch.Tensor, share: float) -> None:
    """Rows are off by less than `share` of their norm."""
    off = (y.float().cpu() - ref.float()).norm(dim=-1) / ref.float().norm(dim=-1)
    assert float(off.max()) < share, f"{float(off.max()):.2%}"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("m", [1, 16, 70])
def test_a_layer_is_its_reference(form, m):
    own = linear(form)
    x = weight(m, HIDDEN, 7).half()
    with torch.no_grad():
        y, ref = copy.deepcopy(own).cuda()(x.cuda()), own(x)
    close(y, ref, 6e-3 if "e4m3" in form else 2e-3)  # e4m3 tensor cores keep 14 bits of their sums


@pytest.mark.parametrize("form", FORMATS)
def test_a_compiled_layer_and_a_graph_of_it_give_its_bits(form):
    own, x = linear(form).cuda(), weight(8, HIDDEN, 7).half().cuda()
    torch._dynamo.reset()
    with torch.no_grad():
        y = own(x)
        assert torch.equal(torch.compile(own, fullgraph=True)(x), y)
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            own(x)
            with torch.cuda.graph(graph, stream=side):
                made = own(x)
        made.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, y)


@pytest.mark.parametrize("form", FORMATS)
def test_a_state_comes_back_on_the_gpu(form):
    own, x = linear(form).cuda(), weight(4, HIDDEN, 7).half().cuda()
    state = {name: t.cpu() for name, t in own.state_dict().items()}
    with torch.no_grad():
        y = own(x)
        empty = nn.Linear.from_state(state).to("meta")
        empty.load_state_dict({name: t.cuda() for name, t in state.items()}, assign=True)
        assert torch.equal(empty(x), y)
        own.words.zero_()  # PyTorch counts it
        assert not torch.equal(own(x), y)
        own.load_state_dict(state)
        assert torch.equal(own(x), y) and torch.equal(own.half().cpu().cuda()(x), y)


@pytest.mark.parametrize(
    ("form", "kv", "share"),
    [
        ("w4a16-g64", "float16", 0.01), ("w4a16-g64", "int8", 0.02), ("w4a16-g64", "int4", 0.05),
        ("w4a16-g64", "int4_channel32", 0.05), ("w4a8-g64", "int8", 0.05), ("w4a8-e4m3-g128", "float16", 0.08),
        ("w4ax", "float16", 0.3),
    ],
)  # fmt: skip
def test_a_decoder_is_its_reference_path(form, kv, share):
    """Both devices have the same weights and formats. What rounds otherwise moves codes of activations and of the
    cache by one step here and there, which the shares allow for; a wrong kernel is off by all of it."""
    model = decoder(form)
    for got, ref in zip(hidden(copy.deepcopy(model).cuda(), kv, "cuda"), hidden(model, kv, "cpu")):
        close(got, ref, share)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="sm_90a only")
@pytest.mark.parametrize(("form", "share"), [("w4a16-g64", 0.01), ("w4a8-g64", 0.05), ("w4ax", 0.3)])
def test_experts_are_their_reference_path(form, share):
    model = decoder(form, experts=4)
    for got, ref in zip(hidden(copy.deepcopy(model).cuda(), "float16", "cuda"), hidden(model, "float16", "cpu")):
        off = (got.float().cpu() - ref.float()).norm(dim=-1) / ref.float().norm(dim=-1)
        assert float(off.median()) < share  # a token near the router's edge may take another expert


@pytest.mark.parametrize(("form", "kv"), [("w4a16-g64", "int4"), ("w4a8-g64", "float16")])
@torch.no_grad()
def test_a_captured_step_is_replayed_for_later_tokens(form, kv):
    model, tokens = decoder(form).cuda(), torch.randint(0, WORDS, (8, 2), device="cuda")

    def steps(captured: bool) -> list[torch.Tensor]:
        cache, found, graph, made, batch = cache_of(kv, "cuda"), [], None, None, None
        sequences = [cache.new(), cache.new()]
        given = torch.zeros(2, dtype=torch.int64, device="cuda")
        for step in range(8):
            batch = cache.extend(dict.fromkeys(sequences, 1), into=batch if captured else None)
            given.copy_(tokens[step])
            if graph is not None:
                graph.replay()
            elif captured and step == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made = model(given, positions_of(batch), batch)
                graph.replay()
            else:
                made = model(given, positions_of(batch), batch)
            found.append(made.clone())
        return found

    for got, ref in zip(steps(True), steps(False)):
        close(got, ref.cpu(), 0.02)  # splits of attention are planned for the captured length


@torch.no_grad()
def test_glue_is_one_kernel_each_and_the_same_numbers():
    from terrazzo.nn import glue

    h, delta, gain = torch.randn(2, 5, HIDDEN, device="cuda").half(), None, torch.rand(HIDDEN, device="cuda")
    h, delta = h[0], h[1]
    both = torch.randn(5, 2 * FEATURES, device="cuda").half()
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda").half()
    cos, sin = nn.Rotary.of_base(HEAD_DIM).cuda()(torch.arange(5, device="cuda"))
    norms = torch.rand(2, HEAD_DIM, device="cuda")
    calls = {
        "rms_norm": (lambda: glue.rms_norm(h, gain, 1e-5), 1),
        "add_norm": (lambda: glue.add_norm(delta, h, gain, 1e-5), 1),
        "silu_mul": (lambda: glue.silu_mul(both), 1),
        "rotate": (lambda: glue.rotate(qkv, cos, sin, HEADS, KV_HEADS, None, 0.0), 1),
        "rotate, norms": (lambda: glue.rotate(qkv, cos, sin, HEADS, KV_HEADS, norms, 1e-6), 2),
    }
    for name, (call, most) in calls.items():
        fused = call()
        nn.fuse(False)
        plain = call()
        nn.fuse(True)
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (fused, plain))):
            torch.testing.assert_close(a, b, rtol=2**-9, atol=2**-9)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        kernels = [e.name for e in seen.events() if "mem" not in e.name.lower() and e.device_type.name == "CUDA"]
        assert len(kernels) <= most, (name, kernels)


def test_a_warm_call_costs_little_more_than_the_operator():
    from terrazzo.autotune.measure import call_overhead_us

    own, x = linear("w4a16-g64", bias=False).cuda(), torch.randn(1, HIDDEN, device="cuda").half()
    packed = own.packed
    with torch.no_grad():
        module, operator = call_overhead_us(lambda: own(x)), call_overhead_us(lambda: w4a16.gemm(x, packed))
    print(f"module {module:.1f} us, operator {operator:.1f} us")
    assert module < operator + 15


def test_joined_layers_are_the_layers():
    parts = [w4a8.quantize(weight(n, HIDDEN, n).cuda()) for n in (256, 64, 64)]
    joined, x = nn.QKVLinear.join(*parts), torch.randn(9, HIDDEN, device="cuda").half()
    with torch.no_grad():
        for y, part in zip(joined(x), parts):
            assert torch.equal(y, w4a8.gemm(x, part))


@pytest.mark.parametrize(
    ("form", "experts"), [*((form, 0) for form in FORMATS), ("w4a16-g64", 4), ("w4a8-g64", 4), ("w4ax", 4)]
)
def test_prepare_names_every_kernel_that_steps_launch(form, experts, monkeypatch):
    model, kv = decoder(form, experts).cuda(), ("int4", "int4")
    named = kernel_requests(model, [2, 7, 40], kv=kv, page=64, dtype=torch.float16)
    assert not [made for made in compile_many(named) if isinstance(made, Exception)]

    def compiled(request, count=True):
        found = kernels.find_compiled(request)
        assert found is not None and request in named, f"{request} was not named"
        return found

    monkeypatch.setattr(kernels, "compile_request", compiled)
    monkeypatch.setattr(kernels, "_kernels", {})
    for entry in (weight_only_entry, w4a8_entry, w4ax_entry):
        entry.CALLS.launches.clear()
    facts = dict(kv_heads=KV_HEADS, head_dim=HEAD_DIM, layers=LAYERS, page_size=64, pages=8)
    cache = KVCache(*kv, **facts, device="cuda")
    first, second = cache.new(), cache.new()
    for new in ({first: 40}, {second: 7}, {first: 1, second: 1}):
        batch = cache.extend(new)
        tokens = torch.randint(0, WORDS, (sum(new.values()),), device="cuda")
        with torch.no_grad():
            assert bool(model(tokens, positions_of(batch), batch).isfinite().all())
