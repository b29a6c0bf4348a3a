"""Calls that no operator can take: each is refused by name before anything runs, on the CPU as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import activation, attention, moe, norm, w4a8, w4a16, w4ax, w8a8
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a8 import QuantizedActivations, fp8
from torch._subclasses.fake_tensor import FakeTensorMode

N, K = 64, 128
X = torch.zeros(2, K).half()
GEMMS = {"w4a16": w4a16.gemm, "w4a8": w4a8.gemm, "fp8": w4a8.gemm, "w4ax": w4ax.gemm}


@pytest.fixture(scope="module")
def weights():
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    plan = w4ax.plan_blocks(torch.rand(K))
    return {
        "w4a16": w4a16.quantize(w),
        "w4a8": w4a8.quantize(w),
        "fp8": fp8.quantize(w),
        "w4ax": w4ax.quantize(w, plan, target="sm_90a"),
    }


@pytest.mark.parametrize("name", GEMMS)
def test_what_is_no_activation_or_no_weight(name, weights):
    gemm, w = GEMMS[name], weights[name]
    for bad in (None, [[1.0] * K]):
        with pytest.raises(ArgumentError, match="x = .*must be a torch tensor"):
            gemm(bad, w)
    with pytest.raises(ArgumentError, match="x = 'cpu': must be on a CUDA device"):  # an array does for a tensor
        gemm(X.numpy(), w)
    for bad in (None, X, w.unpack(), w4a16.GroupedWeight.stack([weights["w4a16"]] * 2)):
        with pytest.raises(ArgumentError, match="w = .*must be a PackedWeight of"):
            gemm(X, bad)
    for other, taken in weights.items():
        if GEMMS[other] is not gemm:
            with pytest.raises(ArgumentError, match=rf"{other.replace('fp8', 'w4a8')}\.gemm with w"):
                gemm(X, taken)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("form", ("nested", "sparse", "mkldnn"))
def test_tensors_without_rows_in_memory(form, weights):
    """Strided nested tensors, which know no shape, too."""
    made = {
        "nested": lambda: torch.nested.nested_tensor([X, X[:1]]), "sparse": X.to_sparse,
        "mkldnn": X.float().to_mkldnn,
    }  # fmt: skip
    bad = made[form]()
    w8, offsets = w8a8.quantize(torch.randn(N, K)), torch.tensor([0, 2, 3], dtype=torch.int32)
    stacks = {w4a8: weights["w4a8"], w4a16: weights["w4a16"], w8a8: w8}
    calls = [lambda name=name: GEMMS[name](bad, weights[name]) for name in GEMMS]
    calls += [
        lambda op=op, w=w: op.grouped_gemm(bad, GroupedWeight.stack([w] * 2), offsets) for op, w in stacks.items()
    ]
    calls += [lambda: w8a8.gemm(bad, w8), lambda: w8a8.quantize_activations(bad, w8)]
    calls += [lambda op=op: op.quantize_activations(bad) for op in (w4a8, fp8)]
    calls += [lambda: norm.rms_norm(bad, X[0]), lambda: activation.act_and_mul(bad)]
    for call in calls:
        with pytest.raises(ArgumentError, match=rf"^x = '[^']*{form}[^']*': must be a dense tensor"):
            call()


@pytest.mark.parametrize("name", GEMMS)
def test_bias_and_out_are_checked_before_x_is_quantized(name, weights):
    gemm, w = GEMMS[name], weights[name]
    for bad in ([0.0] * N, torch.zeros(N - 1).half(), torch.zeros(N).int(), torch.zeros(2 * N).half()[::2]):
        with pytest.raises(ArgumentError, match="bias"):
            gemm(X, w, bias=bad)
    if name != "w4a16":
        with pytest.raises(ArgumentError, match="out = .*must be contiguous"):
            gemm(X, w, out=torch.zeros(2, N - 1).half())


@pytest.mark.parametrize("name", GEMMS)
def test_traced_calls_are_checked_too(name, weights):
    gemm, w = GEMMS[name], weights[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 2, K, dtype=torch.float16)
        with pytest.raises(ArgumentError, match=f"K = {K}"):
            gemm(x[..., 1:], w)
        with pytest.raises(ArgumentError, match="out"):  # copy_ would repeat y
            gemm(x[0, :1], w, out=torch.empty(5, N, dtype=torch.float16))
        out = torch.empty(3, 2, N, dtype=torch.float16)
        assert gemm(x, w, out=out).shape == out.shape


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w4ax"])
def test_sizes_and_tokens_of_requests(name):
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16") if name == "w4a16" else {}
    requests = {"w4a16": w4a16, "w4a8": w4a8, "w4ax": w4ax}[name].kernel_requests
    given = lambda **changes: requests(**({"n": N, "k": K, "m": 1, "target": "sm_90a"} | facts | changes))
    assert len(given()) == len(given(m=[1, 0])) >= 1 and given(m=0) == []
    for argument, bad in (("n", 0), ("n", -1), ("n", 64.0), ("n", 1 << 31), ("k", 0), ("k", "128")):
        with pytest.raises(ArgumentError, match=f"{argument} = .*must be an integer"):
            given(**{argument: bad})
    for bad in (-1, 2.5, "4", [1, "a"], True):
        with pytest.raises(ArgumentError, match="m = .*number of tokens"):
            given(m=bad)
    for bad in (0, -1, 48, "128", None):
        with pytest.raises(ArgumentError, match="group"):
            given(group_size=bad)


def test_one_graph_holds_a_call():
    """torch.compile(fullgraph=True) traces through the checks; what the graph holds is not run."""
    graphs = []

    def keep(graph, examples):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return lambda *args: (torch.zeros(2, N).half(), torch.zeros(2, 1, 8, 128).half())

    w = w4a16.quantize(torch.zeros(N, K), bias=torch.zeros(N))
    cache = attention.KVCache("int4", "int4", kv_heads=2, head_dim=128, pages=2, device="cpu")
    batch = cache.extend({cache.new(): 1, cache.new(): 1})
    q, kv = torch.zeros(2, 1, 8, 128).half(), torch.zeros(2, 1, 2, 128).half()

    def step(x, q, kv, out):
        y = w4a16.gemm(x, w, out=out)
        batch.append(kv, kv)
        return y, batch.decode(q)

    torch.compile(step, backend=keep, fullgraph=True)(X, q, kv, torch.zeros(2, N).half())
    (found,) = graphs
    named = [name for name in found if name.startswith("terrazzo.")]
    assert named == ["terrazzo.w4a16_gemm", "terrazzo.attention_append", "terrazzo.attention_decode"]


def test_stored_tokens_and_caches():
    cache = attention.KVCache("int4", "int4", kv_heads=2, head_dim=128, pages=2, device="cpu")
    batch = cache.extend({cache.new(): 1, cache.new(): 1})
    view, kv, starts = batch.layer(), torch.zeros(2, 1, 2, 128).half(), torch.tensor([0, 1, 2], dtype=torch.int32)
    assert batch.layer() is view and "_checked" not in view.__dict__
    broken = replace(view, lengths=view.lengths.long())
    with_grad = kv.clone().requires_grad_()
    rows = kv[:, 0]
    for call, said in (
        (lambda: attention.append(cache, kv, kv), "cache = .*must be a PackedCache"),
        (lambda: attention.append(broken, kv, kv), "lengths = .*must be contiguous int32"),
        (lambda: attention.append(view, None, kv), "k = .*must be a torch tensor"),
        (lambda: attention.append(view, kv, [0.0]), "v = .*must be a torch tensor"),
        (lambda: attention.append(view, kv, with_grad), "v = .*no gradient"),
        (lambda: batch.append(None, kv), "k = .*must be a torch tensor"),
        (lambda: batch.append(with_grad, kv), "k = .*no gradient"),
        (lambda: attention.store(broken, rows, rows, starts, 1), "lengths = .*must be contiguous int32"),
        (lambda: attention.store(view, rows, None, starts, 1), "v = .*must be a torch tensor"),
        (lambda: attention.store(view, rows, rows, [0, 1, 2], 1), "cu_seqlens = .*must be a torch tensor"),
        (lambda: attention.store(view, rows, rows, starts, 1.0), "most_new = .*must be an integer"),
        (lambda: attention.store(view, rows, rows, starts, 2**31), "most_new = .*below 2147483648"),
        (lambda: attention.store(view, rows, rows, starts, 1), "k = 'cpu'"),
        (lambda: attention.append(view, kv, kv), "k = 'cpu'"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()
    assert view.__dict__["_checked"]


@pytest.mark.parametrize("name", ["w4a8", "fp8", "w4ax"])
def test_activations_before_they_are_quantized(name, weights):
    quantize = {"w4a8": w4a8, "fp8": fp8, "w4ax": w4ax}[name].quantize_activations
    own = {"w": weights[name]} if name == "w4ax" else {}
    ones = torch.ones(K)
    cases = [
        ("x", "must be a torch tensor", dict(x=None)),
        ("x", "must be a torch tensor", dict(x=[[1.0] * K])),
        ("x", "float16 or bfloat16", dict(x=X.float())),
        ("x", "has no gradient", dict(x=X.clone().requires_grad_())),
        ("rms_weight", "must be a torch tensor", dict(rms_weight=[1.0] * K)),
        ("rms_weight", "float vector", dict(rms_weight=ones[1:])),
        ("eps", "finite number", dict(rms_weight=ones, eps=None)),
        ("eps", "finite number", dict(rms_weight=ones, eps=-1.0)),
        ("x", "must be on a CUDA device", dict(rms_weight=ones)),
    ]
    if name == "w4ax":
        cases += [
            ("w", "must be a PackedWeight of w4ax", dict(w=weights["w4a8"])),
            ("granularity", "must be one of", dict(granularity="row")),
            ("static_scales", "must be a torch tensor", dict(granularity="static", static_scales=[1.0])),
        ]
    else:
        x = torch.zeros(1, K).half()
        inside = QuantizedActivations(x.view(torch.int8)[:, :K], torch.zeros(1), torch.zeros(1).int(), (1, K))
        if name == "fp8":
            inside = replace(inside, q=inside.q.view(torch.float8_e4m3fn), row_sums=None)
        cases += [
            ("smooth", "must be a torch tensor", dict(smooth=[1.0] * K)),
            ("out", "must be QuantizedActivations", dict(out=X)),
            ("out", "shares memory with x", dict(x=x, out=inside)),
        ]
    for argument, said, changes in cases:
        with pytest.raises(ArgumentError, match=f"^{argument} = .*{said}"):
            quantize(**({"x": X} | own | changes))


def test_traced_activations_are_checked_too(weights):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, other = torch.empty(2, K, dtype=torch.float16), torch.empty(3, K, dtype=torch.float16)
        with pytest.raises(ArgumentError, match="smooth = .*must be a torch tensor"):
            w4a8.quantize_activations(x, smooth=[1.0] * K)
        with pytest.raises(ArgumentError, match="codes"):
            w4a8.quantize_activations(x, codes="int4")
        with pytest.raises(ArgumentError, match="out = .*must be int8"):  # copy_ would repeat the rows
            w4a8.quantize_activations(x, out=w4a8.quantize_activations(other))
        with pytest.raises(ArgumentError, match=f"K = {K}"):
            w4ax.quantize_activations(x[:, 1:], weights["w4ax"])


QUANTIZERS = {"w4a16": w4a16, "w4a8": w4a8, "fp8": fp8, "w4ax": w4ax}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_weights_before_they_are_quantized(name):
    w, plan = torch.randn(4, K, generator=torch.Generator().manual_seed(0)), w4ax.plan_blocks(torch.rand(K))
    own = {"plan": plan} if name == "w4ax" else {}
    cases = [
        ("weight", "must be a float tensor", dict(weight=None)),
        ("weight", "must be a float tensor", dict(weight=[[1.0] * K])),
        ("weight", "must be a float tensor", dict(weight=w.int())),
        ("weight", "N, K >= 1", dict(weight=w[:0])),
        ("weight", "must be dense and hold data", dict(weight=w.to("meta"))),
        ("weight", "must be dense and hold data", dict(weight=w.to_sparse())),
        ("weight", "range of float32", dict(weight=w.double() * 1e39)),
        ("bias", "must be dense and hold data", dict(bias=torch.ones(4, device="meta"))),
    ]
    if name != "w4ax":
        cases += [("group_size", "must be one of", dict(group_size=bad)) for bad in (64.0, None, "64", [64])]
    if name in ("w4a16", "w4ax"):
        clip = "clip_min" if name == "w4a16" else "smallest_clip"
        cases += [("clip_steps", "positive integer", dict(clip_steps=bad)) for bad in (0, 2.0, None)]
        cases += [(clip, "must be a number", {clip: bad}) for bad in (0, None, float("nan"))]
    vector = {"w4a8": "smooth", "fp8": "smooth", "w4ax": "importance"}.get(name)
    if vector:
        cases += [(vector, "must be a tensor", {vector: "best"}), (vector, "must be", {vector: [1.0]})]
        cases.append((vector, "hold data", {vector: torch.ones(K, device="meta")}))
    if vector == "smooth":
        cases.append(("smooth", "must fit float32", dict(weight=w * 100, smooth=torch.full((K,), 3e38))))
    for argument, said, changes in cases:
        with pytest.raises(ArgumentError, match=f"^{argument} = .*{said}"):
            QUANTIZERS[name].quantize_weight(**({"weight": w} | own | changes))


def test_calibration_and_reports():
    w, statistics = torch.randn(8, K, generator=torch.Generator().manual_seed(0)), w4ax.ActivationStatistics.empty(K)
    plan = w4ax.plan_blocks(torch.rand(K))
    search, report = w4a8.search_smooth, w4ax.report
    observed = w4ax.ActivationStatistics.empty(K).observe(w)
    for call, said in (
        (lambda: search(None, w), "x = .*must be a float tensor"),
        (lambda: search(w, None), "weight = .*must be a float tensor"),
        (lambda: search(w.to("meta"), w), "x = .*must be dense"),
        (lambda: search(w.double() * 1e39, w), "x = .*range of float32"),
        (lambda: search(w, w, steps=2.0), "steps = .*positive integer"),
        (lambda: search(w, w, max_tokens=None), "max_tokens = .*positive integer"),
        (lambda: w4ax.ActivationStatistics.empty(1.5), "k = .*positive integer"),
        (lambda: w4ax.ActivationStatistics.empty(K, percentile="p99"), "percentile = "),
        (lambda: w4ax.ActivationStatistics.empty(K, device="nowhere"), "device = "),
        (lambda: statistics.observe([1.0]), "x = .*must be a tensor"),
        (lambda: statistics.observe(w.to("meta")), "x = .*must be dense"),
        (lambda: statistics.merge(plan), "other = .*must be ActivationStatistics"),
        (lambda: w4ax.plan_blocks(None), "statistics = .*must be a tensor"),
        (lambda: w4ax.plan_blocks(torch.rand(K).double() * 1e300), "statistics = .*float32"),
        (lambda: w4ax.plan_blocks(torch.rand(K), tau=None), "tau = .*positive number"),
        (lambda: w4ax.plan_blocks(torch.rand(K), floor=0.5), "floor = .*must be integers"),
        (lambda: w4ax.plan_blocks(torch.rand(K), ratio="all"), "ratio = "),
        (lambda: w4ax.fold(None, w.T), "plan = .*must be BlockPlan"),
        (lambda: w4ax.fold(plan, None), "tensors = .*must be a tensor"),
        (lambda: w4ax.fold(plan, w, dim=3), "tensors = .*entries along 3"),
        (lambda: plan.arrange(w[:, 1:]), "t = .*must have 128 entries"),
        (lambda: plan.restore(None), "t = .*must be a tensor"),
        (lambda: report(None, plan, w, w), "statistics = .*must be ActivationStatistics"),
        (lambda: report(observed, plan, w[:, 1:], w), "plan = .*must be of the weight's 127 channels"),
        (lambda: report(observed, plan, w, None), "x = .*must be a float tensor"),
        (lambda: report(observed, plan, w.to_sparse(), w), "weight = .*must be dense"),
        (lambda: report(observed, plan, w, w).plot("/nowhere/at/all.png"), "path = .*(cannot be written|matplotlib)"),
        (lambda: attention.quantize([1.0], "int4"), "x = .*must be a float tensor"),
        (lambda: attention.quantize(w, "int8_static", [1.0, 2.0]), "static = .*must broadcast"),
        (lambda: attention.dequantize(attention.quantize(w, "float16"), "int4"), "fmt = .*scales of the block"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()


@pytest.mark.parametrize("family", [w4a16, w4a8, fp8], ids=["w4a16", "w4a8", "fp8"])
def test_grouped_calls(family, weights):
    one = weights[family.__name__.rpartition(".")[2]]
    w, offsets = family.GroupedWeight.stack([one, one]), torch.tensor([0, 1, 2], dtype=torch.int32)
    bias = torch.zeros(2, N).half()
    cases = [
        ("x", "must be a torch tensor", dict(x=None)),
        ("x", "float16 or bfloat16", dict(x=X.float())),
        ("x", "must be .M, 128", dict(x=X[:, 1:])),
        ("x", "no gradient", dict(x=X.clone().requires_grad_())),
        ("w", "must be a GroupedWeight", dict(w=one)),
        ("params|channel_scales", "must be contiguous", dict(w=GroupedWeight(one))),
        ("experts", "1..1024", dict(w=GroupedWeight(replace(w.stacked, words=w.stacked.words[:0])))),
        ("expert_offsets", "must be a torch tensor", dict(expert_offsets=[0, 1, 2])),
        ("expert_offsets", "must be contiguous int32", dict(expert_offsets=offsets.long())),
        ("bias", "must be a torch tensor", dict(bias=[0.0])),
        ("bias", "must be contiguous .2, 64", dict(bias=torch.zeros(N, 2).half().T)),
        ("bias", "must be contiguous", dict(bias=bias.int())),
        ("out", "must be contiguous", dict(out=torch.zeros(3, N).half())),
        ("x", "must be on a CUDA device", dict(bias=bias, out=torch.zeros(2, N).half())),
    ]
    if family is w4a16:
        memory = torch.zeros(4, K).half()
        inside = dict(x=memory[:2], out=memory[1:2].view(2, N))
        cases += [("out", "shares memory with x", inside), ("numerics", "must be one of", dict(numerics="best"))]
    else:
        made = QuantizedActivations(torch.zeros(2, K).char(), torch.zeros(2), torch.zeros(2).int(), (2, K))
        other = QuantizedActivations(made.q.view(torch.float8_e4m3fn), made.scales, None, (2, K))
        own, dtype = "int8", "int8"
        if family is fp8:
            made, other, own, dtype = other, made, "e4m3", "float8_e4m3fn"
            cases += [
                ("out_dtype", "sums are floats", dict(out_dtype=torch.int32)),
                ("dequantization", "is not that of fp8", dict(dequantization="xor")),
            ]
        else:
            cases.append(("dequantization", "is not that of", dict(dequantization="e4m3")))
        cases += [
            ("x", f"must be {own} codes", dict(x=other)),
            ("q", f"must be contiguous {dtype} .3, 128", dict(x=replace(made, shape=(3, K)))),
            ("scales", "must be contiguous float32", dict(x=replace(made, scales=made.scales[:1]))),
            ("out", "shares memory with x", dict(x=made, out=made.q.view(torch.float16))),
            ("out_dtype", "must be one of", dict(out_dtype=torch.int8)),
        ]
    for argument, said, changes in cases:
        with pytest.raises(ArgumentError, match=f"^({argument}) = .*{said}"):
            family.grouped_gemm(**({"x": X, "w": w, "expert_offsets": offsets} | changes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, K, dtype=torch.float16)
        with pytest.raises(ArgumentError, match="x = .*must be .M, 128"):
            family.grouped_gemm(x[:, 1:], w, offsets)
        if family is not w4a16:
            y = family.grouped_gemm(x, w, offsets, out_dtype=torch.bfloat16)
            assert (y.shape, y.dtype) == ((2, N), torch.bfloat16)
            for bad in (dict(x=other), dict(dequantization="xor" if family is fp8 else "e4m3")):
                with pytest.raises(ArgumentError, match="must be|is not"):
                    family.grouped_gemm(**(dict(x=x, w=w, expert_offsets=offsets) | bad))
        with pytest.raises(ArgumentError, match="out = .*must be contiguous"):  # copy_ would repeat y
            family.grouped_gemm(x[:1], w, offsets, out=torch.empty(2, N, dtype=torch.float16))


@pytest.mark.parametrize("family", [w4a16, w4a8], ids=["w4a16", "w4a8"])
def test_numbers_and_stacks_of_experts(family, weights, tmp_path):
    facts = dict(group_size=128, symmetric=False, scale_dtype="float16") if family is w4a16 else {}
    assert len(family.grouped_requests(N, K, 1024, m=1, **facts)) == 1
    for bad in (0, 1025, None, 2.0):
        for m in (1, None):
            with pytest.raises(ArgumentError, match="experts = .*must be an integer, 1..1024"):
                family.grouped_requests(N, K, bad, m=m, **facts)
    with pytest.raises(ArgumentError, match="^n = "):
        family.grouped_requests(0, K, 4, m=1, **facts)
    one, stack = weights[family.__name__.rpartition(".")[2]], family.GroupedWeight.stack
    for bad, said in (
        (None, "experts = .*must be a list"),
        (one, "experts = .*must be a list"),
        ([None, None], "experts = .*must all be of one kind"),
        ([one, weights["fp8"]], "experts = 'w4a8.fp8.PackedWeight'"),
        ([one, weights["w4ax"]], "experts = 'w4ax.PackedWeight'"),
        ([one] * 1025, "experts = 1025"),
        ([one, one.to("meta")], "words = .*meta"),
        ([one, replace(one, bias=torch.zeros(N))], "bias = 'none and float32"),
        ([one, replace(one, k=K - 1)], "k = '128 and 127'"),
    ):
        with pytest.raises(ArgumentError, match=said):
            stack(bad)
    with pytest.raises(ArgumentError, match="make = "):
        family.GroupedWeight.load(torch.Tensor, tmp_path / "none")


def test_routing():
    ids, x, gates = torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.ones(3, 16), torch.ones(3, 2)
    routing = moe.sort_by_expert(ids, 3)
    e4m3 = QuantizedActivations(x.to(torch.float8_e4m3fn), torch.ones(3), None, (3, 16))
    assert moe.gather(e4m3, routing).q.shape == (6, 16)
    for call, said in (
        (lambda: moe.sort_by_expert([[0]], 3), "expert_ids = .*must be a torch tensor"),
        (lambda: moe.sort_by_expert(ids, 0), "experts = .*positive integer"),
        (lambda: moe.sort_by_expert(ids, 3.0), "experts = .*positive integer"),
        (lambda: moe.gather(x, None), "routing = .*must be a Routing"),
        (lambda: moe.gather([1.0], routing), "x = .*must be a torch tensor"),
        (lambda: moe.gather(x[:2], routing), "x = .*must be .3, K"),
        (lambda: moe.gather(x.to("meta"), routing), "x = .*on cpu"),
        (lambda: moe.gather(replace(e4m3, scales=e4m3.scales[:2]), routing), "scales = "),
        (lambda: moe.combine(None, routing, gates), "y = .*must be a torch tensor"),
        (lambda: moe.combine(torch.ones(6, 4).int(), routing, gates), "y = .*must be float"),
        (lambda: moe.combine(torch.ones(6, 4), routing, gates.int()), "gates = .*must be float"),
        (lambda: moe.combine(torch.ones(6, 4), routing, gates.to("meta")), "gates = .*on cpu"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()
