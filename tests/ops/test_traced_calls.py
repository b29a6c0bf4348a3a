"""Every operator is one graph for torch.compile(fullgraph=True): no check breaks it. No GPU: the graph is not run."""

from __future__ import annotations

import pytest
import torch
from terrazzo.ops import w4a8, w4a16, w4ax
from terrazzo.ops.attention import append, decode, pack_cache, prefill, store

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
