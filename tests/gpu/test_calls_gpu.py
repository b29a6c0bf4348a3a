"""What calls remember of each other on the GPU: memory between two launches; schedules that the heuristic leaves."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest
import torch
from oracles import TARGET
from terrazzo.lowering.kernels import get_kernel
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a8, w4a16
from terrazzo.ops.w4a8 import activations, reference
from terrazzo.schedules.quantize_rows import QuantizeRows, candidates
from w4a8_oracles import Case, Spec, packed

pytestmark = [
    pytest.mark.usefixtures("nothing_compiles"),
    pytest.mark.skipif(bool(TARGET), reason="the host side is the same for every target"),
]
SPEC = Spec(4096, 4096, 64)
CALLS = 200


@pytest.mark.parametrize("cases", [(Case(SPEC, 4), Case(SPEC, 16))], ids=["spec"])
@pytest.mark.parametrize("shared_stream", [False, True])
def test_threads_and_streams_do_not_share_activations(cases, shared_stream):
    """Each thread quantizes and multiplies its own values, kernels of all between one another."""
    weight, wrong = packed(SPEC, 0), []
    w4a8.gemm(torch.randn(4, SPEC.k, device="cuda").half(), weight)
    torch.cuda.synchronize()
    one = torch.cuda.Stream()

    def work(seed: int) -> None:
        m = (4, 16)[seed % 2]
        x = torch.randn(m, SPEC.k, generator=torch.Generator().manual_seed(seed)).half().cuda()
        expected = w4a8.gemm(w4a8.quantize_activations(x), weight, out_dtype=torch.float16)
        torch.cuda.synchronize()
        with torch.cuda.stream(one if shared_stream else torch.cuda.Stream()):
            made = [w4a8.gemm(x, weight) for _ in range(CALLS)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(seed for y in made if not torch.equal(y, expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("cases", [(Case(SPEC, 4),)], ids=["spec"])
def test_a_graph_keeps_its_activations(cases):
    """Calls after the capture, of other sizes too, do not write where the graph's kernels read."""
    weight, x = packed(SPEC, 0), torch.randn(4, SPEC.k, device="cuda").half()
    expected = w4a8.gemm(x, weight)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        y = w4a8.gemm(x, weight)
    for _ in range(20):
        y.fill_(-77)
        graph.replay()
        other = w4a8.gemm(torch.randn_like(x), weight)
        assert torch.equal(y, expected) and not torch.equal(other, expected)


@dataclass(frozen=True)
class W4A16:
    """A W4A16 weight and its kernel for 4 tokens."""

    n: int = 512
    k: int = 1024

    def weight(self) -> w4a16.PackedWeight:
        random = torch.Generator().manual_seed(5)
        codes = torch.randint(0, 16, (self.n, self.k), generator=random, dtype=torch.uint8)
        return w4a16.pack(codes, torch.rand(self.n, self.k // 128, generator=random).half(), group_size=128).to("cuda")

    def requests(self) -> list:
        return w4a16.weight_requests(self.weight(), 4, torch.float16)


@pytest.mark.parametrize("cases", [(W4A16(),)], ids=["w4a16"])
def test_a_weight_that_changes_between_equal_calls(cases):
    """Written in place, and given other memory: the next equal call reads what is there."""
    w, x = cases[0].weight(), torch.randn(4, 1024, device="cuda").half()
    first = w4a16.gemm(x, w)
    out = torch.empty_like(first)
    assert torch.equal(w4a16.gemm(x, w, out=out), first)
    for change in (lambda: w.words.bitwise_not_(), lambda: setattr(w.words, "data", w.words.roll(1, 0))):
        change()
        made, fresh = w4a16.gemm(x, w), replace(w, words=w.words.clone())
        assert torch.equal(made, w4a16.gemm(x, fresh)) and not torch.equal(made, first)


@dataclass(frozen=True)
class Scheduled:
    """The quantizer with an explicit schedule."""

    m: int
    k: int
    norm: bool
    schedule: QuantizeRows

    def requests(self) -> list:
        facts = dict(gain=True, norm=self.norm, target=Target.detect(), schedule=self.schedule)
        return [activations.plan(self.m, self.k, dtype="float16", **facts)]


def scheduled() -> tuple[Scheduled, ...]:
    """The forms that `choose` does not take: other shares of rows fetched early, CTAs that stay."""
    sizes = ((1000, 28672, False), (1000, 28672, True), (2000, 8192, True))
    found = [(m, k, norm, candidates(k, Target.parse("sm_90a"), m, True)[1:]) for m, k, norm in sizes]
    return tuple(Scheduled(m, k, norm, s) for m, k, norm, schedules in found for s in schedules)


@pytest.mark.parametrize("cases", [scheduled()], ids=["all"])
def test_other_schedules_of_the_quantizer(cases):
    if Target.detect().arch != "sm_90a":
        pytest.skip("rows are fetched ahead on sm_90a")
    for case in cases:
        random = torch.Generator(device="cuda").manual_seed(case.k)
        x = torch.randn(case.m, case.k, generator=random, device="cuda").half()
        vector = torch.rand(case.k, generator=random, device="cuda") + 0.5
        smooth, weight = (None, vector) if case.norm else (vector, None)
        q, scales, sums = reference.quantize_activations(x, smooth, weight, 1e-6)
        kernel, gain = get_kernel(case.requests()[0]), reference.activation_gain(smooth, weight)
        for _ in range(3):  # launches that overlap
            made = activations.empty((case.m, case.k), x.device, "int8")
            made.q.fill_(99), made.scales.fill_(float("nan")), made.row_sums.fill_(99)
            kernel(x, gain, made.q, made.scales, made.row_sums, 1e-6, float(case.k))
            assert torch.equal(made.q, q) and torch.equal(made.row_sums, sums), case
            tolerance = dict(rtol=2e-6, atol=0) if case.norm else dict(rtol=0, atol=0)
            torch.testing.assert_close(made.scales, scales, **tolerance)
