"""Every operator is one graph for torch.compile(fullgraph=True): no check breaks it. No GPU: the graph is not run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a8, w4a16, w4ax, w8a8
from terrazzo.ops.attention import append, decode, pack_cache, prefill, store
from terrazzo.ops.w4ax import activations as w4ax_activations
from terrazzo.ops.w4ax import torch_op as _registered  # noqa: F401

X, WEIGHT, GAIN = torch.randn(4, 256).half(), torch.randn(64, 256), torch.ones(256)
BIAS, OFFSETS = torch.zeros(64), torch.tensor([0, 1, 2, 4], dtype=torch.int32)
OWN, BYTES = w4a16.quantize(WEIGHT, group_size=128), w4a8.quantize(WEIGHT)
PLAN = w4ax.plan_blocks(w4ax.ActivationStatistics.empty(256).observe(torch.randn(9, 256)))
MIXED = w4ax.quantize(WEIGHT, PLAN, target="sm_90a")
EXPERTS, BYTE_EXPERTS = w4a16.GroupedWeight.stack([OWN] * 3), w4a8.GroupedWeight.stack([BYTES] * 3)
CACHE = pack_cache(*torch.randn(2, 3, 2, 64, 128), "int4", "int4", lengths=torch.tensor([3, 64, 9]))
Q, NEW = torch.randn(3, 1, 8, 128).half(), torch.randn(4, 2, 128).half()

CALLS = {
    "w4a16": (lambda x, b: w4a16.gemm(x, OWN, bias=b), X, BIAS.half()),
    "w4a16 parameter": (lambda x: w4a16.gemm(x, OWN), torch.nn.Parameter(X)),
    "w4a8": (lambda x, b: w4a8.gemm(x, BYTES, bias=b, pipeline="imfp"), X, BIAS),
    "w4a8 quantized": (lambda x, s: w4a8.gemm(w4a8.quantize_activations(x, rms_weight=s), BYTES), X, GAIN),
    "w4ax": (lambda x, b: w4ax.gemm(x, MIXED, bias=b), X, BIAS),
    "w4ax quantized": (
        lambda x, s: w4ax.gemm(w4ax.quantize_activations(x, MIXED, rms_weight=s), MIXED), X, GAIN,
    ),
    "grouped w4a16": (lambda x, o: w4a16.grouped_gemm(x, EXPERTS, o), X, OFFSETS),
    "grouped w4a8": (lambda x, o: w4a8.grouped_gemm(x, BYTE_EXPERTS, o), X, OFFSETS),
    "decode": (lambda q, s: decode(q, CACHE, softcap=5.0, window=9, sinks=s), Q, torch.zeros(8)),
    "prefill": (lambda q, k, o: prefill(q, CACHE, o, 2, k=k, v=k), torch.randn(4, 8, 128).half(), NEW, OFFSETS),
    "append": (lambda k: append(CACHE, k, k), NEW[:3, None]),
    "store": (lambda k, o: store(CACHE, k, k, o, 2), NEW, OFFSETS),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_graph(name):
    call, *arguments = CALLS[name]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        (made,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        shapes = [node.meta["example_value"] for node in made if hasattr(node, "meta")]
        return lambda *given: [torch.zeros([int(n) for n in it.shape], dtype=it.dtype) for it in shapes]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(call, backend=backend, fullgraph=True)(*arguments)
    assert len(graphs) == 1 and any("terrazzo" in str(node.target) for node in graphs[0].graph.nodes)


def test_a_quantizer_that_adds_to_a_clone_of_x_reads_another_x(monkeypatch):
    given = []

    def run(x, w, rms_weight, eps, granularity, static, residual, activation):
        given.append((x, residual, x.clone()))
        return SimpleNamespace(q4=x.new_empty(1), q8=x.new_empty(2), scales=x.new_empty(3))

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(w4ax_activations, "run", run)
    h, fields = X.clone(), (MIXED.words, MIXED.channel_scales, MIXED.n, MIXED.k, MIXED.blocks8, MIXED.layout)
    more = (MIXED.target, MIXED.order, MIXED.permutation)
    torch.ops.terrazzo.w4ax_add_quantize(h, h, None, 0.0, "two_level", None, *fields, *more)
    ((x, residual, held),) = given
    assert residual.data_ptr() == h.data_ptr() != x.data_ptr() and torch.equal(held, h)


def of_columns(family, k: int, experts: bool):
    """A weight of K columns, or three."""
    if family is not w4ax:
        made = family.quantize(torch.randn(64, k))
    else:
        plan = w4ax.plan_blocks(torch.rand(k) + 0.1, ratio=0.25)
        made = w4ax.quantize(torch.randn(64, k), plan, target="sm_90a")
    return family.GroupedWeight.stack([made] * 3) if experts else made


SIZED = {
    **{name: (of, False, lambda of, x, w: of.gemm(x, w))
       for name, of in (("w4a16", w4a16), ("w4a8", w4a8), ("w8a8", w8a8), ("w4ax", w4ax))},
    **{f"grouped {name}": (of, True, lambda of, x, w: of.grouped_gemm(x, w, OFFSETS))
       for name, of in (("w4a16", w4a16), ("w4a8", w4a8), ("w8a8", w8a8), ("w4ax", w4ax))},
    "w8a8 quantized": (w8a8, False, lambda of, x, w: w8a8.gemm(w8a8.quantize_activations(x, w), w)),
    "w4ax quantized": (w4ax, False, lambda of, x, w: w4ax.gemm(w4ax.quantize_activations(x, w), w)),
    "w4ax normed": (
        w4ax, False,
        lambda of, x, w: w4ax.gemm(w4ax.quantize_activations(x, w, rms_weight=x[0], residual=x.clone()), w),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_a_compiled_call_takes_weights_of_other_sizes(name):
    """From the second weight on torch.compile holds sizes as symbols, of which it makes no strings."""
    family, experts, call = SIZED[name]
    torch._dynamo.reset()
    made = torch.compile(lambda x, w: call(family, x, w), backend="eager", fullgraph=True)
    with torch.no_grad():
        for k in (256, 384, 640):
            x, w = torch.randn(4, k).half(), of_columns(family, k, experts)
            assert made(x, w).shape == (4, 64)


E4M3_EXPERTS = w8a8.GroupedWeight.stack([w8a8.quantize(WEIGHT, codes="e4m3")] * 3)
S8_EXPERTS = w8a8.GroupedWeight.stack([w8a8.quantize(WEIGHT)] * 3)
FP8_EXPERTS = w4a8.GroupedWeight.stack([w4a8.fp8.quantize(WEIGHT, group_size=128)] * 3)
BIASES = torch.zeros(3, 64)
BAD_EXPERTS = {
    "int32 of e4m3": (w8a8, E4M3_EXPERTS, dict(out_dtype=torch.int32), "out_dtype"),
    "float32": (w8a8, S8_EXPERTS, dict(out_dtype=torch.float32), "out_dtype"),
    "a bias of int32 sums": (w8a8, S8_EXPERTS, dict(out_dtype=torch.int32, bias=BIASES), "int32 sums"),
    "a short bias": (w8a8, S8_EXPERTS, dict(bias=BIASES[:2]), "bias"),
    "offsets int64": (w8a8, S8_EXPERTS, dict(expert_offsets=OFFSETS.long()), "expert_offsets"),
    "short offsets": (w8a8, E4M3_EXPERTS, dict(expert_offsets=OFFSETS[:3]), "expert_offsets"),
    "x float32": (w8a8, S8_EXPERTS, dict(x=X.float()), "float16 or bfloat16"),
    "w4a8 float32": (w4a8, BYTE_EXPERTS, dict(out_dtype=torch.float32), "out_dtype"),
    "w4a8 int32 of e4m3": (w4a8, FP8_EXPERTS, dict(out_dtype=torch.int32), "out_dtype"),
    "w4a8 a bias of int32 sums": (w4a8, BYTE_EXPERTS, dict(out_dtype=torch.int32, bias=BIASES), "int32 sums"),
    "w4a8 short offsets": (w4a8, BYTE_EXPERTS, dict(expert_offsets=OFFSETS[:3]), "expert_offsets"),
    "w4a8 x float32": (w4a8, BYTE_EXPERTS, dict(x=X.float(), out_dtype=torch.float16), "float16 or bfloat16"),
    "w4a16 offsets int64": (w4a16, EXPERTS, dict(expert_offsets=OFFSETS.long()), "expert_offsets"),
    "w4a16 a float32 bias": (w4a16, EXPERTS, dict(bias=BIASES), "bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_a_compiled_call_of_experts_refuses_what_an_eager_one_does(name):
    family, w, options, words = BAD_EXPERTS[name]
    given = dict(x=X, w=w, expert_offsets=OFFSETS) | options
    torch._dynamo.reset()
    with torch.no_grad():
        for call in (family.grouped_gemm, torch.compile(family.grouped_gemm, backend="eager", fullgraph=True)):
            with pytest.raises(ArgumentError, match=words):
                call(**given)


@pytest.mark.parametrize(
    "family, w", [(w8a8, S8_EXPERTS), (w8a8, E4M3_EXPERTS), (w4a8, BYTE_EXPERTS), (w4a16, EXPERTS)]
)
def test_compiled_experts_multiply_on_the_cpu(family, w):
    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(family.grouped_gemm, backend="eager", fullgraph=True)(X, w, OFFSETS)
    assert made.shape == (4, 64) and made.dtype == torch.float16
    assert torch.nn.functional.cosine_similarity(made.float(), X.float() @ WEIGHT.T).min() > 0.9


@pytest.mark.parametrize("family", [w8a8, w4a8, w4a16, w4ax])
def test_compiled_experts_leave_rows_of_nobody_in_the_output(family):
    w, out = of_columns(family, 256, True), torch.full((6, 64), float("nan"), dtype=torch.float16)
    call = lambda x, offsets: family.grouped_gemm(x, w, offsets, out=out)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(call, backend="eager", fullgraph=True)(torch.randn(6, 256).half(), OFFSETS + 1)
    assert out[[0, 5]].isnan().all() and out[1:5].isfinite().all()


@pytest.mark.parametrize("family, w", [(w8a8, S8_EXPERTS), (w4a8, BYTE_EXPERTS), (w4a16, EXPERTS)])
@pytest.mark.parametrize("x", [None, [1, 2], 3.0])
def test_x_of_experts_must_be_a_tensor(family, w, x):
    with pytest.raises(ArgumentError, match="must be a torch tensor"):
        family.grouped_gemm(x, w, OFFSETS)
