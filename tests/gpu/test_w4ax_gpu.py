"""W4Ax on the GPU: block sums exact in int32, scaled outputs inside their bound, activations quantized to the bit.

Both forms of scales; ratios of INT8 blocks 0, 25, 75 and 100 %; ragged N, K and M. sm_80 runs from its PTX (native s4,
which a newer GPU emulates). Outputs start as NaN between guard rows that must survive, and a second run must give the
same bits.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.lowering.targets import Target
from terrazzo.ops import activation, w4ax
from terrazzo.ops.w4ax import activations, reference
from terrazzo.schedules import records
from terrazzo.schedules.stream_k import StreamK
from w4ax_cases import DEVICE, Case, Spec, codes, compare, launch, needs, product, quantized

RATIOS = tuple(Spec(448, 1024, ratio, bias=ratio == 0.25) for ratio in (0.0, 0.25, 0.75, 1.0))
RAGGED = (Spec(450, 1000, 0.25), Spec(67, 333, 0.34, bias=True), Spec(130, 100, 0.0))
LAYER = Spec(6144, 4096, 0.25)
TWO = tuple(replace(spec, scales="two_level") for spec in RATIOS)
TWO_RAGGED = tuple(replace(spec, scales="two_level") for spec in RAGGED)
TWO_LAYER = replace(LAYER, scales="two_level")
EVERY = [
    *(Case(spec, (1, 15, 20, 40, 130, 300)) for spec in RATIOS),
    *(Case(spec, (3, 33, 200), out) for spec, out in zip(RAGGED, ("float16", "bfloat16", "float32"))),
    Case(LAYER, (2, 16, 64, 256, 1000), "float16"),
    *(Case(spec, (1, 40, 130), arch="sm_80") for spec in RATIOS),
    *(Case(spec, (3, 33, 200), out, "sm_80") for spec, out in zip(RAGGED, ("float16", "bfloat16", "float32"))),
    Case(LAYER, (256,), "float16", "sm_80"),
    *(Case(spec, (1, 15, 20, 40, 130, 300)) for spec in TWO),
    *(Case(spec, (3, 33, 200), out) for spec, out in zip(TWO_RAGGED, ("float16", "bfloat16", "float32"))),
    Case(TWO_LAYER, (2, 16, 64, 256, 1000), "float16"),
    Case(TWO[1], (1, 40, 130), arch="sm_80"),
    Case(TWO_RAGGED[1], (33, 200), "bfloat16", "sm_80"),
]


@pytest.mark.parametrize("cases", [pytest.param((c,), id=f"{c.arch}-{c.spec}-{c.out}") for c in EVERY])
def test_product(compiled, cases):
    (case,) = cases
    needs(case.arch)
    product(case)


@pytest.mark.parametrize(
    "cases",
    [pytest.param((Case(spec, ms, arch=arch),), id=f"{arch}-{spec.ratio}")
     for arch, ms in (("sm_90a", (5, 12, 20, 50, 130)), ("sm_80", (20, 130))) for spec in (*RATIOS[:3], RAGGED[0])],
)  # fmt: skip
def test_block_sums_are_exact(compiled, cases):
    """All scales 1, those of the other blocks 0: what is left is one block's int32 sum, in float32."""
    (case,) = cases
    needs(case.arch)
    given = case.spec.build()
    weight = w4ax.QuantizedWeight.canonical(
        given.codes, torch.ones_like(given.scales), k=given.k, blocks8=given.blocks8, permutation=given.permutation
    )
    w = weight.pack(target=case.arch)
    for m in case.ms:
        q, _ = codes(weight, m, m)
        sums = reference.block_sums(q, weight)
        for block in range(weight.blocks):
            scales = torch.zeros(m, weight.blocks, device=DEVICE)
            scales[:, block] = 1
            y = launch(case, activations.from_codes(q, scales, w), w)
            compare(y, sums[block].double(), torch.zeros_like(y).double(), f"{case}, M = {m}, block {block}")


@pytest.mark.parametrize(
    "cases",
    [pytest.param((Case(spec, (5, 12, 20, 50, 130)),), id=f"{spec.ratio}") for spec in TWO],
)
def test_integer_sums_are_exact(compiled, cases):
    """All scales 1: y is the integer product of bytes, below 2^24 and so exact in float32 however it was added up."""
    (case,) = cases
    needs(case.arch)
    given = case.spec.build()
    ones = torch.ones(given.n, device=given.codes.device)
    weight = replace(given, scales=given.multipliers(), channel_scales=ones, bias=ones * 0 if case.spec.bias else None)
    w = weight.pack(target=case.arch).to(DEVICE)
    for m in case.ms:
        q, _ = codes(weight, m, m)
        y = launch(case, quantized(q, torch.ones(m, weight.blocks), w), w)
        compare(y, q.double() @ weight.values().T, torch.zeros_like(y).double(), f"{case}, M = {m}")


def test_forms_of_scales_that_do_not_go_together():
    """A block weight takes two-level activations; a two-level weight without native s4 refuses those of blocks."""
    needs("sm_90a")
    for spec, granularity in ((RATIOS[1], "two_level"), (TWO[1], "token")):
        weight, w = spec.build(), spec.packed("sm_90a")
        x = torch.randn(40, w.k, dtype=torch.float16, device=DEVICE)
        made = w4ax.quantize_activations(x, w, granularity=granularity)
        y = w4ax.gemm(made, w, out_dtype=torch.float32)
        held = made.codes(), made.token_scales()
        bound = reference.forward_error_bound(*held, weight, y.dtype)
        compare(y, reference.gemm(*held, weight), bound, f"{spec}, {granularity}")
    with pytest.raises(ArgumentError, match="two-level"):
        w4ax.gemm(w4ax.quantize_activations(x, w, granularity="block"), w)


@dataclass(frozen=True)
class Rows:
    """One call of the activation quantizer."""

    spec: Spec
    m: int
    dtype: str
    norm: bool
    granularity: str
    arch: str

    def requests(self) -> list:
        w = self.spec.packed(self.arch)
        return w4ax.weight_requests(w, self.m, getattr(torch, self.dtype), norm=self.norm, granularity=self.granularity)


ROWS = [
    Rows(RATIOS[1], 40, "float16", False, "block", "sm_90a"),
    Rows(RAGGED[0], 600, "bfloat16", True, "block", "sm_90a"),
    Rows(RAGGED[1], 3, "float16", False, "token", "sm_90a"),
    Rows(RATIOS[2], 5, "bfloat16", False, "static", "sm_90a"),
    Rows(LAYER, 256, "float16", True, "block", "sm_90a"),
    Rows(RATIOS[2], 40, "bfloat16", True, "block", "sm_80"),
    Rows(RAGGED[0], 7, "float16", False, "token", "sm_80"),
    Rows(RATIOS[0], 600, "float16", False, "block", "sm_80"),
    Rows(TWO[1], 40, "float16", False, "two_level", "sm_90a"),
    Rows(TWO_RAGGED[0], 600, "bfloat16", True, "two_level", "sm_90a"),
    Rows(TWO_LAYER, 256, "float16", True, "two_level", "sm_90a"),
    Rows(TWO[2], 7, "float16", False, "two_level", "sm_80"),
]


@pytest.mark.parametrize("cases", [pytest.param((c,), id=f"{c.arch}-{c.spec}-{c.granularity}") for c in ROWS])
def test_activations(compiled, cases):
    (case,) = cases
    needs(case.arch)
    weight, w = case.spec.build(), case.spec.packed(case.arch)
    rng = torch.Generator().manual_seed(case.m)
    x = torch.randn(case.m, weight.k, generator=rng) * torch.exp(torch.randn(case.m, 1, generator=rng))
    x = x.to(getattr(torch, case.dtype)).to(DEVICE)
    x[0] = 0
    gain = torch.randn(weight.k, generator=rng).to(DEVICE) if case.norm else None
    static = torch.rand(weight.blocks, generator=rng).to(DEVICE) * 0.1 + 0.02 if case.granularity == "static" else None
    options = dict(rms_weight=gain, eps=1e-5, granularity=case.granularity, static_scales=static)
    made, again = (w4ax.quantize_activations(x, w, **options) for _ in range(2))
    facts = dict(blocks8=weight.blocks8, permutation=weight.permutation, wide=not w.native)
    q, scales = reference.quantize_activations(x, **facts, **options)
    assert torch.equal(made.codes(), q) and torch.equal(made.codes(), again.codes())
    if case.norm:
        torch.testing.assert_close(made.token_scales(), scales, rtol=2e-6, atol=0)
    else:
        assert torch.equal(made.token_scales(), scales)
    y = w4ax.gemm(made, w, out_dtype=x.dtype)
    held = made.token_scales()
    bound = reference.forward_error_bound(q, held, weight, x.dtype)
    compare(y, reference.gemm(q, held, weight), bound, str(case))
    if case.granularity == activations.default_granularity(w) and not case.norm:
        assert torch.equal(w4ax.gemm(x, w), y)


@dataclass(frozen=True)
class Front:
    """Rows that the quantizer makes of two, of `quantize_blocks.FRONTS`, and the two kernels beside it."""

    spec: Spec
    m: int
    dtype: str
    front: str
    norm: bool = False
    arch: str = "sm_90a"

    def requests(self) -> list:
        w, dtype = self.spec.packed(self.arch), getattr(torch, self.dtype)
        facts = dict(dtype=dtype, norm=self.norm)
        found = [it for one in ("none", self.front) for it in w4ax.weight_requests(w, self.m, **facts, front=one)]
        gate = dict(m=self.m, dtype=self.dtype, activation=self.front, target=Target.detect())
        return found if self.front == "residual" else [*found, *activation.kernel_requests(w.k, **gate)]


FRONTS = [
    *(Front(TWO_LAYER, m, "bfloat16", "residual", True) for m in (1, 17, 300)),
    Front(Spec(448, 1000, 0.25, scales="two_level"), 40, "float16", "residual", True),
    Front(RATIOS[1], 3, "float16", "residual"),
    Front(RATIOS[2], 40, "bfloat16", "residual", True, "sm_80"),
    *(Front(Spec(256, 14336, 0.25, scales="two_level"), m, "bfloat16", "silu") for m in (1, 300)),
    Front(Spec(448, 1000, 0.25, scales="two_level"), 40, "float16", "gelu_tanh"),
    Front(TWO[2], 7, "bfloat16", "gelu"),
]


@pytest.mark.parametrize("cases", [pytest.param((c,), id=f"{c.arch}-{c.front}-{c.spec.k}-M{c.m}") for c in FRONTS])
def test_what_stands_in_front_gives_the_bits_of_two_kernels(compiled, cases):
    (case,) = cases
    needs(case.arch)
    w, rng, dtype = case.spec.packed(case.arch), torch.Generator().manual_seed(case.m), getattr(torch, case.dtype)
    x, other = (torch.randn(2, case.m, w.k, generator=rng) * 3).to(dtype).to(DEVICE)
    gain = torch.randn(w.k, generator=rng).to(DEVICE) if case.norm else None
    options = dict(rms_weight=gain, eps=1e-5)
    if case.front == "residual":
        wanted, guarded = other + x, torch.cat([other[:1], other, other[-1:]])
        residual = guarded[1:-1] if guarded[1:-1].data_ptr() % 16 == 0 else other.clone()
        made = w4ax.quantize_activations(x, w, residual=residual, **options)
        assert torch.equal(residual, wanted)
        assert torch.equal(guarded[0], other[0]) and torch.equal(guarded[-1], other[-1])
    else:
        wanted = activation.act_and_mul(torch.cat([x, other], dim=1), activation=case.front)
        made = w4ax.quantize_activations(torch.cat([x, other], dim=1), w, activation=case.front)
    apart = w4ax.quantize_activations(wanted, w, **options)
    assert torch.equal(made.codes(), apart.codes()) and torch.equal(made.token_scales(), apart.token_scales())
    assert made.shape == apart.shape


@pytest.mark.parametrize("cases", [(FRONTS[1], FRONTS[8])], ids=["traced"])
def test_fronts_under_torch_compile(compiled, cases):
    """A residual is written inside of a graph, too."""
    needs("sm_90a")
    for case in cases:
        w, gate = case.spec.packed(case.arch), case.front != "residual"
        dtype = getattr(torch, case.dtype)
        x = torch.randn(case.m, w.k * (2 if gate else 1), device=DEVICE).to(dtype)
        residual = torch.randn(case.m, w.k, device=DEVICE).to(dtype)
        options = dict(activation=case.front) if gate else dict(rms_weight=torch.ones(w.k, device=DEVICE))

        def call(x, residual, w=w, gate=gate, options=options):
            more = {} if gate else {"residual": residual}
            made = w4ax.quantize_activations(x, w, **more, **options)
            return made.q8, made.scales

        eager, first = call(x, one := residual.clone()), one
        traced, second = torch.compile(call, fullgraph=True)(x, other := residual.clone()), other
        assert torch.equal(first, second)
        assert torch.equal(eager[0], traced[0]) and torch.equal(eager[1][:, : case.m], traced[1][:, : case.m])


STRESS = [
    Case(Spec(6144, 4096, 0.25), (8,), "float16", launches=200),
    Case(Spec(6144, 4096, 0.25), (16,), "float16", launches=200),
    Case(Spec(6144, 4096, 0.25), (30,), "float16", launches=200),
    Case(Spec(6144, 4096, 0.25), (64,), "float16", launches=200),
    Case(Spec(6144, 4096, 0.25), (1030,), "float16", launches=100),
    *(Case(TWO_LAYER, (m,), "float16", launches=200) for m in (8, 30, 64, 250)),
]


@pytest.mark.parametrize("cases", [pytest.param((c,), id=f"{c.spec.scales}-M{c.ms[0]}") for c in STRESS])
def test_many_launches_give_the_same_bits(compiled, cases):
    """A stage that is given back too early shows as a changed bit."""
    (case,) = cases
    needs(case.arch)
    weight, w = case.spec.build(), case.spec.packed(case.arch)
    q, scales = codes(weight, case.ms[0], 1)
    y = launch(case, quantized(q, scales, w), w)
    compare(y, reference.gemm(q, scales, weight), reference.forward_error_bound(q, scales, weight, y.dtype), str(case))


@dataclass(frozen=True)
class Forced(Case):
    """A schedule of stream_k or integer that the heuristic does not take."""

    schedule: StreamK | None = None

    @contextmanager
    def forced(self):
        program = self.schedule.rules.program
        with records.forced("w4ax", program, self.schedule.params()):
            records.changed()  # operators keep their plans
            yield
        records.changed()

    def requests(self) -> list:
        with self.forced():
            return super().requests()


def block_tile(block_tokens: int, warpgroups: int, stages: int, turns: int = 0) -> StreamK:
    """Of scales of each block."""
    return StreamK(block_tokens, warpgroups, 1, stages, turns=turns, form="s4_s8 block")


def integer_tile(block_tokens: int, warpgroups: int, stages: int) -> StreamK:
    """Of two-level scales."""
    return StreamK(block_tokens, warpgroups, 1, stages, form="s4_s8 integer")


SCHEDULES = (
    *(block_tile(64, 3, 10, turns=1), block_tile(64, 4, 8), block_tile(64, 4, 8, turns=1)),
    *(block_tile(128, 2, 8), block_tile(128, 3, 7), block_tile(128, 3, 7, turns=1)),
    *(block_tile(48, 3, 10), block_tile(80, 2, 9, turns=1), block_tile(112, 2, 8, turns=1)),
)
OTHERS = [Forced(LAYER, (s.block_tokens - 4, 250), "float16", launches=50, schedule=s) for s in SCHEDULES]
INTEGER = (
    *(
        integer_tile(64, 2, 12),
        integer_tile(64, 3, 10),
        integer_tile(64, 4, 6),
        integer_tile(32, 4, 9),
        integer_tile(16, 1, 12),
    ),
    *(integer_tile(128, 1, 6), integer_tile(128, 2, 8), integer_tile(128, 3, 4), integer_tile(128, 3, 2)),
    *(
        integer_tile(48, 2, 12),
        integer_tile(48, 4, 8),
        integer_tile(80, 2, 9),
        integer_tile(80, 3, 6),
        integer_tile(96, 3, 5),
        integer_tile(112, 2, 7),
    ),
)
OTHERS += [Forced(TWO_LAYER, (s.block_tokens - 4, 250), "float16", launches=50, schedule=s) for s in INTEGER]
ODD = (TWO_RAGGED[0], TWO[0], TWO[3])
OTHERS += [Forced(spec, (200,), "float32", launches=50, schedule=integer_tile(128, 3, 3)) for spec in ODD]
OTHERS.append(Forced(RAGGED[0], (200,), "float32", launches=50, schedule=block_tile(128, 3, 6, turns=1)))


@pytest.mark.parametrize("cases", [pytest.param((c,), id=f"{c.spec}-{c.schedule}") for c in OTHERS])
def test_other_schedules(compiled, cases):
    (case,) = cases
    needs(case.arch)
    with case.forced():
        product(case)


@pytest.mark.parametrize(
    "cases",
    [pytest.param((Rows(spec, 40, "float16", False, form, "sm_90a"),), id=form)
     for spec, form in ((RATIOS[1], "block"), (TWO[1], "two_level"))],
)  # fmt: skip
def test_graphs_and_torch_compile(compiled, cases):
    (case,) = cases
    needs(case.arch)
    w = case.spec.packed(case.arch)
    x = torch.randn(case.m, w.k, dtype=torch.float16, device=DEVICE)
    y = w4ax.gemm(x, w)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        w4ax.gemm(x, w)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = w4ax.gemm(x, w)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, y)
    assert torch.equal(torch.compile(lambda t: w4ax.gemm(t, w), fullgraph=True)(x), y)
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        w4ax.gemm(torch.empty(39, w.k, dtype=torch.bfloat16, device=DEVICE), w)
