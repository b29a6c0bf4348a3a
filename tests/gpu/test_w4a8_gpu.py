"""W4A8 on the GPU: oracles over groups, dtypes, dequantizations and sizes; a seeded fuzz; the quantizer; torch."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from oracles import SIZES, TARGET, bucket, run_all
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.ops import launching, w4a8
from terrazzo.ops.w4a8 import activations as rows
from terrazzo.ops.w4a8 import reference
from w4a8_oracles import DEVICE, KINDS, Case, Spec, canonical, check, packed

pytestmark = pytest.mark.usefixtures("nothing_compiles")
FUZZ_CASES = 320
PARTS = 16
M_ALL = (0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 200, 256, 300, 1024)
M_RANDOM = M_ALL[:-2]  # the quantizer has another kernel for many rows: LARGE, and the quantizer's own tests, meet it
M_IDENTITY = (1, 7, 16, 24, 64, 128, 256)
M_WIDTHS = (41, 48, 77, 90, 96, 100, 112, 145, 160, 181, 210, 224, 256)
"""Tiles of all widths, full and not."""
OUT = ("float16", "bfloat16", "int32")
FORMS = tuple(product(OUT, ("xor", "unsigned")))
WEIGHTS = (
    Spec(256, 512, 64),
    Spec(320, 768, 128, smooth=True),
    Spec(257, 203, 64, bias=True, smooth=True),
    Spec(1, 16, 32),
    Spec(101, 7392, 32, bias=True),
    Spec(128, 10944, 64),
    Spec(192, 512, 32, bias=True),
    Spec(67, 129, 128),
    Spec(2880, 2880, 128, bias=True),
    Spec(4096, 4096, 64),
    Spec(640, 14336, 128),
)
SPECS = WEIGHTS[:6] if TARGET else WEIGHTS  # GPU time: every kernel is for one weight
LARGE = Spec(14336, 7168, 64)
"""More than 100 M weights: where tiles get taller."""
_COLD = Case(Spec(72, 160, 32), 5, "int32")  # used by nothing but the capture test
_COMPILE = Case(Spec(256, 512, 64, bias=True, smooth=True), 16)


def case(spec: Spec, m: int, **facts) -> Case:
    """Kernels are few: a weight and a bucket of M fix output and dequantization; a row of weights meets all pairs."""
    index = (*SPECS, LARGE).index(spec)
    out, dequantization = FORMS[(index + bucket(m) + index // 6) % 6]
    return Case(spec, m, out, dequantization, dtype=OUT[index % 2], **facts)


def ragged(count: int) -> list[tuple[Spec, tuple[int, int], str, str]]:
    """Random weights, each with one bucket of M, output and dequantization."""
    rng = random.Random(7)
    found = []
    for i in range(count):
        n = rng.choice((rng.randint(1, 500), 64 * rng.randint(1, 30)))
        k = rng.choice((rng.randint(1, 700), 64 * rng.randint(1, 40), 128 * rng.randint(1, 30)))
        spec = Spec(n, k, (32, 64, 128)[i % 3], bias=rng.random() < 0.3)
        found.append((spec, SIZES[i % len(SIZES)], *FORMS[(i + i // 6) % 6]))
    return found


RAGGED = ragged(4 if TARGET else 10)


def fuzz(count: int) -> list[Case]:
    """Seeded cases on the kernels of the other tests and of RAGGED: M, values, smooth, bias and strides are free."""
    rng = random.Random(2026)
    cases = []
    for _ in range(count):
        kind = rng.choices(KINDS, (1, 4, 5))[0]
        facts = dict(kind=kind, seed=rng.randint(1, 3), strided=kind == "random" and rng.random() < 0.3)
        if rng.random() < 0.25:
            spec, (least, most), out, dequantization = rng.choice(RAGGED)
            made = Case(
                spec, rng.randint(least, min(most, 128)), out, dequantization, kind="integer", seed=facts["seed"]
            )
        else:
            least, most = rng.choice(SIZES)
            most = min(most, M_RANDOM[-1]) if kind == "random" else most
            made = case(rng.choice(SPECS), rng.randint(least, most), **facts)
        if made.spec.bias and made.out != "int32" and rng.random() < 0.5:
            made = replace(made, bias=rng.choice(("float16", "float32")))
        cases.append(made)
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The fuzz runs in parts, so that a report shows progress and one failure hides few cases."""
    if metafunc.function is test_fuzz:
        given = metafunc.config.getoption("fuzz_cases", None)  # unknown when started from the repository's root
        cases = fuzz(int(os.environ.get("TERRAZZO_FUZZ_CASES", FUZZ_CASES)) if given is None else given)
        parts = [tuple(cases[part::PARTS]) for part in range(PARTS)]
        metafunc.parametrize("cases", parts, ids=[f"part{part}" for part in range(PARTS)])


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(tuple(case(spec, m, kind=kind) for m in sizes), id=f"{kind}-{spec}")
        for kind, sizes in zip(KINDS, (M_IDENTITY, M_ALL, M_RANDOM))
        for spec in SPECS
    ],
)
def test_oracle(cases):
    run_all(check, cases)


@pytest.mark.skipif(bool(TARGET), reason="tall tiles are for wgmma")
@pytest.mark.parametrize("cases", [tuple(case(LARGE, m) for m in (8, 24, 64, 128, 300))], ids=["large"])
def test_a_large_weight(cases):
    run_all(check, cases)


@pytest.mark.skipif(bool(TARGET), reason="those of wgmma")
@pytest.mark.parametrize(
    "cases",
    [pytest.param(tuple(case(spec, m, kind=kind) for m in (*M_WIDTHS, *more)), id=f"{kind}-{spec}")
     for kind, more in (("integer", (290, 330, 350, 420, 640)), ("random", ())) for spec in (*SPECS[8:10], LARGE)],
)  # fmt: skip
def test_every_width_of_a_tile(cases):
    run_all(check, cases)


def programs() -> tuple[Case, ...]:
    """Programs where "auto" would take another one; rotating outputs and dequantizations."""
    asked = [("small_batch", 40, 1), ("multistage", 5, 2), ("multistage", 70, 0), ("multistage", 200, 3)]
    asked = asked[:2] if TARGET else [*asked, ("imfp", 5, 3), ("imfp", 14, 1), ("imfp", 27, 1)]
    return tuple(
        Case(SPECS[spec], m, *FORMS[(i + spec) % 6], pipeline, kind)
        for i, (pipeline, m, spec) in enumerate(asked)
        for kind in ("integer", "random")
    )


@pytest.mark.parametrize("cases", [programs()], ids=["all"])
def test_every_program_that_serves(cases):
    run_all(check, cases)


def test_fuzz(cases):
    run_all(check, cases)


def sums(m: int) -> tuple[Case, ...]:
    """One product by every dequantization and program that serves it."""
    served = ("auto",) if TARGET else ("imfp", "small_batch" if m <= 8 else "multistage")
    ways = [*product(("xor",), served), ("unsigned", served[0])]
    return tuple(Case(SPECS[2], m, "int32", dequantization, pipeline) for dequantization, pipeline in ways)


@pytest.mark.parametrize("cases", [sums(m) for m in (3, 40)], ids=["m3", "m40"])
def test_the_sums_do_not_depend_on_the_way(cases):
    x = torch.randn(cases[0].m, cases[0].spec.k, device="cuda").half()
    made = [w4a8.gemm(x, packed(case.spec, 0), **case.options) for case in cases]
    assert all(torch.equal(made[0], other) for other in made[1:])


# -- activations -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rows:
    """Activations [m, k] to quantize."""

    m: int
    k: int
    dtype: str = "float16"
    smooth: bool = False
    norm: bool = False

    def requests(self) -> list:
        target, device = launching.targets(TARGET, torch.device("cuda"))
        facts = dict(gain=self.smooth or self.norm, norm=self.norm, target=target, device=device)
        return [rows.plan(self.m, self.k, dtype=self.dtype, **facts)]


KS = (8, 16, 100, 203, 512, 1023, 2880, 4096, 8192, 11008, 14336, 28672, 65536)
KS = KS[::2] if TARGET else KS


def row_cases(k: int) -> tuple[Rows, ...]:
    """Two of the four forms, one for few rows and one for many, in one dtype; the next k takes the others."""
    index = KS.index(k)
    forms = (((False, False), (True, True)), ((True, False), (False, False)), ((False, True), (True, False)))
    few, many = forms[index % 3]
    dtype = OUT[index // 3 % 2]
    sizes = ((1, few), (3, few), (130, few), (600, many))
    if TARGET:  # half of the kernels
        sizes = sizes[3:] if index % 2 else sizes[:3]
    return tuple(Rows(m, k, dtype, *form) for m, form in sizes)


@pytest.mark.parametrize("cases", [row_cases(k) for k in KS], ids=[f"k{k}" for k in KS])
def test_activations_are_the_references(cases):
    for case in cases:
        rng = torch.Generator().manual_seed(case.m + case.k)
        x = torch.randn(case.m, case.k, generator=rng)
        x[:, :: max(2, case.k // 5)] *= 30
        x[case.m // 2] = 0
        x = x.to(getattr(torch, case.dtype)).cuda()
        smooth = (torch.rand(case.k, generator=rng) + 0.2).cuda() if case.smooth else None
        norm = torch.randn(case.k, generator=rng).to(x.dtype).cuda() if case.norm else None
        made = []
        for _ in range(2):
            guarded = torch.full((case.m + 2, rows.padded(case.k)), 99, dtype=torch.int8, device="cuda")
            scales = torch.full((case.m,), float("nan"), device="cuda")
            out = w4a8.QuantizedActivations(
                guarded[1:-1], scales, torch.full((case.m,), 99, dtype=torch.int32, device="cuda"), tuple(x.shape)
            )
            found = w4a8.quantize_activations(x, smooth=smooth, rms_weight=norm, eps=1e-5, out=out, target=TARGET)
            assert found is out and (guarded[0] == 99).all() and (guarded[-1] == 99).all(), case
            made.append(found)
        q, scales, sums = reference.quantize_activations(x, smooth, norm, 1e-5)
        first, second = made
        assert torch.equal(first.q[:, : case.k], q) and not first.q[:, case.k :].any(), case
        assert torch.equal(first.row_sums, sums), case
        if case.norm:
            torch.testing.assert_close(first.scales, scales, rtol=2e-6, atol=0)
        else:
            assert torch.equal(first.scales, scales), case
        assert torch.equal(first.q, second.q) and torch.equal(first.scales, second.scales), case


@pytest.mark.parametrize("cases", [(Rows(600, 4096), Rows(600, 2880, smooth=True, norm=True))], ids=["chain"])
def test_what_the_kernel_ahead_wrote_is_quantized(cases):
    """Rows are fetched into L2, and gains into registers, while the kernel that wrote them may be under way."""
    for case in cases:
        new = [torch.randn(case.m, case.k, device="cuda").half() * (i + 1) for i in range(12)]
        x, start = torch.empty_like(new[0]), torch.rand(case.k, device="cuda") + 0.5
        smooth, norm = (start.clone() if flag else None for flag in (case.smooth, case.norm))
        rows.run(x.copy_(new[0]), smooth, norm, 1e-5, None, TARGET)
        made = []
        for values in new:  # the host runs ahead: kernels follow one another at once
            if smooth is not None:
                smooth.mul_(1.25)
            made.append(w4a8.quantize_activations(x.copy_(values), smooth=smooth, rms_weight=norm, target=TARGET))
        if smooth is not None:
            smooth.copy_(start)
        for values, found in zip(new, made):
            if smooth is not None:
                smooth.mul_(1.25)
            q, _, sums = reference.quantize_activations(values, smooth, norm)
            assert torch.equal(found.q, q) and torch.equal(found.row_sums, sums), case


@pytest.mark.parametrize("cases", [(Rows(4, 512), Rows(400, 512))], ids=["rows"])
def test_broken_rows_show_in_their_scale_alone(cases):
    for m in (4, 400):
        x = torch.randn(m, 512, device="cuda").half()
        x[0, 5], x[2, 511] = float("nan"), float("-inf")
        made = w4a8.quantize_activations(x, target=TARGET)
        assert made.scales[0].isnan() and made.scales[2].isinf()
        keep = torch.tensor([i not in (0, 2) for i in range(m)], device="cuda")
        q, scales, sums = reference.quantize_activations(x[keep])
        assert torch.equal(made.q[keep], q) and torch.equal(made.scales[keep], scales)
        assert torch.equal(made.row_sums[keep], sums)


def test_packing_and_quantizing_are_the_same_on_both_devices():
    for spec in SPECS[:6]:
        weight = canonical(spec, 0)
        host, device = weight.to("cpu").pack(), weight.pack()
        assert torch.equal(host.words, device.words.cpu())
        assert torch.equal(host.dequantize(), device.dequantize().cpu())
    w = torch.randn(96, 1000, generator=torch.Generator().manual_seed(0)).half()
    for rule in ("best2", "nearest", "ceil"):
        host, device = (w4a8.quantize_weight(t, rule=rule) for t in (w, w.cuda()))
        assert torch.equal(host.channel_scales, device.channel_scales.cpu())
        assert torch.equal(host.codes, device.codes.cpu()) and torch.equal(host.scales, device.scales.cpu())


_DATA = Path(__file__).parents[1] / "data" / "w4a8"


class _File:
    """A golden layer; lets the compile fixture see what it needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> tuple[w4a8.PackedWeight, torch.Tensor]:
        from safetensors.torch import load_file

        tensors = load_file(_DATA / f"{self.name}.safetensors", device=DEVICE)
        layer = {name.removeprefix("layer."): t for name, t in tensors.items() if name.startswith("layer.")}
        if self.name.startswith("qserve"):
            weight = w4a8.from_qserve(**layer, target=TARGET)
        else:
            weight = w4a8.from_compressed_tensors(**layer, requantize=True, target=TARGET)
        return weight, tensors["expected.weight"]

    def requests(self) -> list:
        weight = self.load()[0]
        return w4a8.weight_requests(weight, weight.k, out_dtype=torch.int32)


@pytest.mark.parametrize(
    "cases", [pytest.param((_File(p.stem),), id=p.stem) for p in sorted(_DATA.glob("*.safetensors"))]
)
def test_golden_layers_decode_exactly(cases):
    """Checkpoint file to product on the GPU: the unit matrix gives the weight that the file states."""
    weight, expected = cases[0].load()
    q = torch.eye(weight.k, device="cuda", dtype=torch.int8)
    q = torch.nn.functional.pad(q, (0, -weight.k % 16))
    ones = torch.ones(weight.k, device="cuda")
    x = w4a8.QuantizedActivations(q.contiguous(), ones, ones.int(), (weight.k, weight.k))
    values = w4a8.gemm(x, weight, out_dtype=torch.int32).T.double() * weight.channel_scales[: weight.n, None].double()
    if cases[0].name == "ct_group":  # free scales: fitted
        assert (values - expected).square().sum() < 1.5e-3 * expected.square().sum()
    else:
        assert torch.equal(values, expected)


# -- torch -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cases", [tuple(Case(SPECS[0], m) for m in (1, 4, 8))], ids=["spec"])
@pytest.mark.parametrize("shape", ["3d", "rows-apart", "batch-apart", "time-major", "empty", "vector"])
def test_leading_dimensions(cases, shape):
    weight = packed(SPECS[0], 0)
    base = torch.randn(4, 2, 512, device="cuda").half()
    x = {
        "3d": base,
        "rows-apart": base[:, ::2],
        "batch-apart": base[::3],
        "time-major": base.transpose(0, 1),
        "empty": base[:0],
        "vector": base[0, 0],
    }[shape]
    y = w4a8.gemm(x, weight)
    assert y.shape == (*x.shape[:-1], 256) and y.dtype == x.dtype
    assert torch.equal(y, w4a8.gemm(x.contiguous().view(-1, 512), weight).view(y.shape))
    assert torch.equal(y, w4a8.gemm(w4a8.quantize_activations(x, target=TARGET), weight))


@pytest.mark.parametrize("cases", [(_COMPILE, Case(_COMPILE.spec, 9))], ids=["spec"])
def test_a_bias_argument_takes_the_place_of_the_weights_own(cases):
    weight = packed(_COMPILE.spec, 0)
    x, bias = torch.randn(9, 512, device="cuda").half(), torch.randn(256, device="cuda").half()
    q, scales, _ = reference.quantize_activations(x, weight.smooth)
    ref = reference.gemm(q, scales, weight, bias)
    y = w4a8.gemm(x, weight, bias=bias)
    assert ((y.double() - ref).abs() <= reference.forward_error_bound(ref, y.dtype, bias)).all()


@pytest.mark.parametrize("cases", [(_COMPILE, Case(_COMPILE.spec, 16, "bfloat16"))], ids=["spec"])
def test_torch_compile_takes_the_whole_graph(cases):
    weight, bias = packed(_COMPILE.spec, 0), torch.randn(256, device="cuda")
    calls = (
        lambda x: w4a8.gemm(x, weight),
        lambda x: w4a8.gemm(x, weight, bias=bias, out_dtype=torch.bfloat16),
        lambda x: w4a8.gemm(w4a8.quantize_activations(x, smooth=weight.smooth, target=TARGET), weight),
    )
    x = torch.randn(2, 8, 512, device="cuda").half()
    for call in calls:
        torch._dynamo.reset()
        y = torch.compile(call, fullgraph=True)(x)
        assert torch.equal(y, call(x)) and y.shape == (2, 8, 256)


@pytest.mark.parametrize("cases", [(_COMPILE,)], ids=["spec"])
def test_the_fake_kernel_matches(cases):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        y = w4a8.gemm(mode.from_tensor(torch.randn(3, 5, 512, device="cuda").half()), packed(_COMPILE.spec, 0))
    assert y.shape == (3, 5, 256) and y.dtype == torch.float16 and y.device.type == "cuda"


@pytest.mark.parametrize("cases", [(case(SPECS[4], 32), case(SPECS[4], 300))], ids=["spec"])
def test_cuda_graphs_replay(cases):
    for case in cases:
        weight, shape = packed(case.spec, 0), (case.m, case.spec.k)
        x = torch.randn(shape, device="cuda", dtype=getattr(torch, case.dtype))
        w4a8.gemm(x, weight, **case.options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = w4a8.gemm(x, weight, **case.options)
        for seed in range(3):
            x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
            y.fill_(-77)
            graph.replay()
            assert torch.equal(y, w4a8.gemm(x, weight, **case.options))


@pytest.mark.parametrize("cases", [(_COLD,)], ids=["spec"])
def test_a_cold_kernel_in_a_capture_is_an_error(cases):
    weight, x = packed(_COLD.spec, 0), torch.randn(5, 160, device="cuda").half()
    quantized = w4a8.quantize_activations(x, target=TARGET)
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        w4a8.gemm(quantized, weight, out_dtype=torch.int32)
    torch.cuda.synchronize()
    check(_COLD)


@pytest.mark.parametrize("cases", [(case(SPECS[0], 16), case(SPECS[-1], 64))], ids=["specs"])
def test_the_current_stream_is_used(cases):
    """Work queued on a side stream before and after the product keeps its order."""
    for case in cases:
        weight, dtype = packed(case.spec, 0), getattr(torch, case.dtype)
        x = torch.randn(case.m, case.spec.k, device="cuda", dtype=dtype)
        expected, stream = w4a8.gemm(x, weight, **case.options), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            y = w4a8.gemm(late, weight, **case.options)
        stream.synchronize()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("cases", [(Case(SPECS[0], 4),)], ids=["spec"])
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("512", lambda x, w: {"x": x[:, :500]}),
        ("float32", lambda x, w: {"x": x.float()}),
        ("cuda|device", lambda x, w: {"x": x.cpu()}),
        ("dequantization", lambda x, w: {"dequantization": "vadd4"}),
        ("pipeline", lambda x, w: {"pipeline": "split"}),
        ("bias", lambda x, w: {"bias": x.new_zeros(255)}),
        ("out", lambda x, w: {"out": x.new_zeros(4, 255)}),
        ("out", lambda x, w: {"out": torch.zeros(4, 256, device="cuda")}),
        ("PackedWeight|pack", lambda x, w: {"w": w.unpack()}),
    ],
)
def test_bad_calls_are_refused_by_name(cases, words, change):
    x, w = torch.randn(4, 512, device="cuda").half(), packed(SPECS[0], 0)
    arguments = {"x": x, "w": w} | change(x, w)
    with pytest.raises(ArgumentError, match=words):
        w4a8.gemm(arguments.pop("x"), arguments.pop("w"), **arguments)
