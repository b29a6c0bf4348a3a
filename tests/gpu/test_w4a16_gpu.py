"""W4A16 on the GPU: three oracles over formats, groups, dtypes and sizes; a seeded fuzz; torch integration."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from oracles import DEVICE, KINDS, SIZES, TARGET, Case, Spec, bucket, canonical, check, packed, run_all
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.ops import w4a16
from terrazzo.ops.w4a16 import reference

pytestmark = pytest.mark.usefixtures("nothing_compiles")
FUZZ_CASES = 320
M_ALL = (0, 1, 2, 4, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 200, 256, 300, 1024)
M_IDENTITY = (1, 7, 16, 24, 32, 64, 128, 256, 512)
F16, BF16, F32 = "float16", "bfloat16", "float32"

# All numerics: every group, dtype, zero mode and scale dtype on small sizes with more than one tile and k block.
EVERY_NUMERICS = (
    Spec(256, 512, 128),
    Spec(192, 512, 64, symmetric=True, dtype=BF16),
    Spec(320, 768, 32, dtype=BF16),
    Spec(192, 1024, -1),
    Spec(192, 1024, -1, symmetric=True, dtype=BF16),
    Spec(256, 512, 128, scale=F32),
    Spec(256, 512, 64, dtype=BF16, scale=F16),
    Spec(256, 512, 32, scale=BF16, symmetric=True),
)
LARGE = Spec(14336, 7168, 128, symmetric=True)
"""More than 100 M weights: where tiles get taller."""
# "auto" only: the sizes that users trip over, bias, act-order, and sizes with many tiles and long k.
AUTO = (
    Spec(256, 512, 128, symmetric=True),
    Spec(256, 512, 64, bias=True),
    Spec(128, 640, -1, dtype=BF16, scale=F32, bias=True),
    Spec(2880, 2880, 128, bias=True),
    Spec(7392, 512, 64, symmetric=True, dtype=BF16),
    Spec(128, 10944, 128),
    Spec(101, 7392, 32, dtype=BF16, bias=True),
    Spec(257, 203, 64, act_order=True),
    Spec(1, 32, 32),
    Spec(67, 129, -1, dtype=BF16),
    Spec(512, 1024, 128, dtype=BF16, bias=True, act_order=True),
    Spec(4096, 4096, 128),
    Spec(6144, 4096, 128, symmetric=True, dtype=BF16),
    Spec(1024, 8192, 32),
    Spec(640, 14336, 128, dtype=BF16),
)
if TARGET:  # GPU time: every kernel is for one weight
    AUTO = tuple(AUTO[i] for i in (6, 7, 8, 10))
WIDTHS = (Spec(2880, 2880, 128, bias=True), Spec(101, 7392, 32, dtype=BF16), Spec(4096, 4096, 128), LARGE)
M_WIDTHS = (41, 48, 77, 90, 96, 100, 112, 145, 160, 181, 210, 224, 290, 330, 350, 420, 640)
"""Tiles of all widths, full and not."""
_MIXED = "mixed"
WEIGHTS = [
    *((spec, numerics) for spec in EVERY_NUMERICS for numerics in ((_MIXED,) if TARGET else spec.numerics)),
    *((spec, "auto") for spec in AUTO),
]
_COLD = Case(Spec(72, 160, 32), 5)  # used by nothing but the capture test
_COMPILE = Case(Spec(256, 512, 64, bias=True), 16)
_GRAPH = Case(Spec(2880, 2880, 128, bias=True), 32)


def case(spec: Spec, m: int, numerics: str, **facts) -> Case:
    """One of the weight's numerics, or "mixed": a range of M has one of them, and a row of weights meets all."""
    if numerics == _MIXED:
        numerics = spec.numerics[(EVERY_NUMERICS.index(spec) + bucket(m)) % len(spec.numerics)]
    return Case(spec, m, numerics, **facts)


def sweep(spec: Spec, numerics: str, kind: str) -> tuple[Case, ...]:
    sizes = M_IDENTITY if kind == "identity" else M_ALL
    return tuple(case(spec, m, numerics, kind=kind) for m in sizes)


def ragged(count: int) -> list[tuple[Spec, tuple[int, int]]]:
    """Random weights, each with one range of M."""
    rng = random.Random(7)
    found = []
    for i in range(count):
        spec = Spec(
            rng.choice((rng.randint(1, 500), 64 * rng.randint(1, 30))),
            rng.choice((rng.randint(1, 700), 64 * rng.randint(1, 40), 128 * rng.randint(1, 30))),
            (32, 64, 128, -1)[i % 4],
            symmetric=rng.random() < 0.4,
            dtype=rng.choice((F16, BF16)),
            scale=rng.choice(("", "", F16, BF16, F32)),
            bias=rng.random() < 0.3,
            act_order=rng.random() < 0.25,
        )
        found.append((spec, SIZES[i % len(SIZES)]))
    return found


RAGGED = ragged(2 if TARGET else 15)


def fuzz(count: int) -> list[Case]:
    """Seeded cases on the kernels of the other tests and of RAGGED: M and values are free."""
    rng = random.Random(2026)
    cases = []
    for _ in range(count):
        facts = dict(kind=rng.choices(KINDS, (1, 3, 6))[0], seed=rng.randint(1, 3))
        if rng.random() < 0.25:
            spec, (least, most) = rng.choice(RAGGED)
            cases.append(Case(spec, rng.randint(least, min(most, 128)), **facts))
        else:
            spec, numerics = rng.choice(WEIGHTS)
            cases.append(case(spec, rng.randint(*rng.choice(SIZES)), numerics, **facts))
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The fuzz runs in 16 parts, so that a report shows progress and one failure hides few cases."""
    if metafunc.function is test_fuzz:
        given = metafunc.config.getoption(
            "fuzz_cases", None
        )  # unknown to pytest when started from the repository's root
        cases = fuzz(int(os.environ.get("TERRAZZO_FUZZ_CASES", FUZZ_CASES)) if given is None else given)
        metafunc.parametrize(
            "cases", [tuple(cases[part::16]) for part in range(16)], ids=[f"part{part}" for part in range(16)]
        )


def run(cases) -> None:
    run_all(check, cases)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(sweep(spec, numerics, kind), id=f"{kind}-{numerics}-{spec}")
        for kind in KINDS
        for spec, numerics in WEIGHTS
    ],
)
def test_oracle(cases):
    run(cases)


@pytest.mark.skipif(bool(TARGET), reason="those of wgmma")
@pytest.mark.parametrize(
    "cases",
    [pytest.param(tuple(Case(spec, m, "auto", kind=kind) for m in M_WIDTHS), id=f"{kind}-{spec}")
     for kind in KINDS[1:] for spec in WIDTHS],
)  # fmt: skip
def test_every_width_of_a_tile(cases):
    run(cases)


def test_fuzz(cases):
    run(cases)


@pytest.mark.parametrize("cases", [tuple(Case(Spec(256, 512, 128), m) for m in (1, 4, 8))], ids=["spec"])
@pytest.mark.parametrize("shape", ["3d", "rows-apart", "batch-apart", "time-major", "empty", "vector"])
def test_leading_dimensions(cases, shape):
    weight = packed(cases[0].spec, False, 0)
    base = torch.randn(4, 2, 512, device="cuda").half()
    x = {
        "3d": base,
        "rows-apart": base[:, ::2],
        "batch-apart": base[::3],
        "time-major": base.transpose(0, 1),
        "empty": base[:0],
        "vector": base[0, 0],
    }[shape]
    y = w4a16.gemm(x, weight)
    assert y.shape == (*x.shape[:-1], 256) and y.dtype == x.dtype
    assert torch.equal(y, w4a16.gemm(x.contiguous().view(-1, 512), weight).view(y.shape))


@pytest.mark.parametrize("cases", [(Case(Spec(256, 512, 64, bias=True), 9),)], ids=["spec"])
def test_a_bias_argument_takes_the_place_of_the_weights_own(cases):
    weight = packed(cases[0].spec, False, 0)
    x, bias = torch.randn(9, 512, device="cuda").half(), torch.randn(256, device="cuda").half()
    y = w4a16.gemm(x, weight, bias=bias)
    numerics = cases[0].resolved()
    bound = reference.forward_error_bound(x, weight, numerics, bias)
    assert ((y.double() - reference.gemm(x, weight, numerics, bias)).abs() <= bound).all()


_DATA = Path(__file__).parents[1] / "data"


class _File:
    """Lets the compile fixture see what a golden layer needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> w4a16.PackedWeight:
        version = "gptq_v2" if self.name.startswith("gptq_v2") else "gptq" if self.name.startswith("gptq") else None
        path = _DATA / f"{self.name}.safetensors"
        return w4a16.load_layer(path, "layer", format=version, device=DEVICE, target=TARGET)

    def requests(self) -> list:
        weight = self.load()
        return list(w4a16.weight_requests(weight, weight.k, getattr(torch, weight.scale_dtype), "exact"))


@pytest.mark.parametrize(
    "cases", [pytest.param((_File(p.stem),), id=p.stem) for p in sorted(_DATA.glob("*.safetensors"))]
)
def test_golden_layers_decode_exactly(cases):
    """Checkpoint file to product on the GPU: the unit matrix gives the weight that the file states."""
    weight = cases[0].load()
    x = torch.eye(weight.k, device="cuda", dtype=getattr(torch, weight.scale_dtype))
    expected = weight.unpack().to("cpu").dequantize("exact")
    assert torch.equal(w4a16.gemm(x, weight, numerics="exact").T.cpu(), expected)
    assert torch.equal(weight.dequantize("exact").cpu(), expected)


def test_packing_is_the_same_on_both_devices():
    for spec in (*EVERY_NUMERICS, *(spec for spec, _ in RAGGED[:4])):
        weight = canonical(spec, False, 0)
        host, device = weight.to("cpu").pack(), weight.pack()
        assert torch.equal(host.words, device.words.cpu()) and torch.equal(host.params, device.params.cpu())


def test_quantizing_is_the_same_on_both_devices():
    w = torch.randn(96, 1000, generator=torch.Generator().manual_seed(0)).half()
    host, device = w4a16.quantize_weight(w, group_size=64), w4a16.quantize_weight(w.cuda(), group_size=64)
    worst = (host.dequantize("post") - w).square().sum(), (device.dequantize("post").cpu() - w).square().sum()
    assert abs(worst[0] - worst[1]) <= 1e-5 * worst[0]


@pytest.mark.parametrize("cases", [(_COMPILE,)], ids=["spec"])
def test_torch_compile_takes_the_whole_graph(cases):
    weight, bias = packed(_COMPILE.spec, False, 0), torch.randn(256, device="cuda").half()

    def block(x):
        return torch.nn.functional.silu(w4a16.gemm(x * 2, weight)) + w4a16.gemm(x, weight, bias=bias)

    x = torch.randn(2, 8, 512, device="cuda").half()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x), rtol=2e-3, atol=2e-3)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: w4a16.gemm(x, weight), fullgraph=True)(x), w4a16.gemm(x, weight))


@pytest.mark.parametrize("cases", [(_COMPILE,)], ids=["spec"])
def test_the_fake_kernel_matches(cases):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        y = w4a16.gemm(mode.from_tensor(torch.randn(3, 5, 512, device="cuda").half()), packed(_COMPILE.spec, False, 0))
    assert y.shape == (3, 5, 256) and y.dtype == torch.float16 and y.device.type == "cuda"


@pytest.mark.parametrize("cases", [(_GRAPH,)], ids=["spec"])
def test_cuda_graphs_replay(cases):
    weight = packed(_GRAPH.spec, False, 0)
    x = torch.randn(32, 2880, device="cuda").half()
    w4a16.gemm(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = w4a16.gemm(x, weight)
    for seed in range(3):
        x.copy_(torch.randn(32, 2880, generator=torch.Generator().manual_seed(seed)))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, w4a16.gemm(x, weight))


@pytest.mark.parametrize("cases", [(_COLD,)], ids=["spec"])
def test_a_cold_kernel_in_a_capture_is_an_error(cases):
    weight, x = packed(_COLD.spec, False, 0), torch.randn(5, 160, device="cuda").half()
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        w4a16.gemm(x, weight)
    torch.cuda.synchronize()
    check(_COLD)


@pytest.mark.parametrize("cases", [(Case(Spec(256, 512, 128), 4), Case(AUTO[-1], 64))], ids=["specs"])
def test_the_current_stream_is_used(cases):
    """Work queued on a side stream before and after the product keeps its order."""
    for case in cases:
        weight, k = packed(case.spec, False, 0), case.spec.k
        x = torch.randn(case.m, k, device="cuda").to(getattr(torch, case.spec.dtype))
        expected, stream = w4a16.gemm(x, weight), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            y = w4a16.gemm(late, weight)
        stream.synchronize()
        assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "cases", [(Case(Spec(256, 512, 128), 4), Case(Spec(256, 512, 128, scale=F32), 4, "post"))], ids=["specs"]
)
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("512", lambda x, w: {"x": x[:, :500]}),
        ("dtype|float32", lambda x, w: {"x": x.float()}),
        ("cuda|device", lambda x, w: {"x": x.cpu()}),
        ("numerics", lambda x, w: {"numerics": "precise"}),
        ("post", lambda x, w: {"w": packed(Spec(256, 512, 128, scale=F32), False, 0), "numerics": "exact"}),
        ("bias", lambda x, w: {"bias": x.new_zeros(255)}),
        ("out", lambda x, w: {"out": x.new_zeros(4, 255)}),
        ("out", lambda x, w: {"out": torch.zeros(4, 256, device="cuda")}),
        ("PackedWeight|pack", lambda x, w: {"w": w.unpack()}),
    ],
)
def test_bad_calls_are_refused_by_name(cases, words, change):
    x, w = torch.randn(4, 512, device="cuda").half(), packed(cases[0].spec, False, 0)
    arguments = {"x": x, "w": w} | change(x, w)
    with pytest.raises(ArgumentError, match=words):
        w4a16.gemm(arguments.pop("x"), arguments.pop("w"), **arguments)
