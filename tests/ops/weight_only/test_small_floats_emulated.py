"""MXFP4, NVFP4, FP8 and NF4 weights through all programs on the CPU: sums that need no rounding have their bits."""

from __future__ import annotations

import pytest
import torch
import w4a16_on_cpu
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear import multistage, small_batch, stream_k
from terrazzo.ops.products.codes import SMALL_SCALES, get_codes
from terrazzo.ops.products.ways import choose_way
from terrazzo.ops.weight_only import reference
from terrazzo.ops.weight_only.format import QuantizedWeight
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK
from w4a16_on_cpu import Program

from tests.gpu.oracles import Spec
from tests.tools.kernel_digest import text_of

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
N, K = 120, 288  # neither is a multiple of a block; nine groups of 32
FEW = SmallBatch(1, 1, 4, 2, 1, 2)
SPLIT = SmallBatch(1, 3, 4, 1, 2, 2)
TALL, WIDE = StreamK(16, 1, 2, 3, 64), StreamK(32, 1, 1, 2, 128)
CASES = {  # program, schedule, target, M, format, group (negative: scales in x's dtype), dtype; slow: others imply it
    "mxfp4 small_batch bf16": (small_batch, FEW, "sm_90a", 4, "mxfp4", 32, "bfloat16"),
    "mxfp4 stream_k bf16": (stream_k, TALL, "sm_90a", 20, "mxfp4", 32, "bfloat16"),
    "mxfp4 multistage f16": (multistage, Multistage(32, 4, 2, 3), "sm_80", 20, "mxfp4", 32, "float16"),
    "mxfp4 small_batch f16, k shared": (small_batch, SPLIT, "sm_89", 3, "mxfp4", 32, "float16"),
    "mxfp4 stream_k f16": (stream_k, WIDE, "sm_90a", 20, "mxfp4", 32, "float16"),
    "mxfp4 multistage bf16, k shared": (
        multistage,
        Multistage(32, 4, 2, 3, kc=2),
        "sm_89",
        20,
        "mxfp4",
        32,
        "bfloat16",
    ),
    "nvfp4 small_batch bf16": (small_batch, FEW, "sm_90a", 4, "nvfp4", 16, "bfloat16"),
    "nvfp4 stream_k bf16": (stream_k, TALL, "sm_90a", 20, "nvfp4", 16, "bfloat16"),
    "nvfp4 multistage f16": (multistage, Multistage(32, 4, 2, 3), "sm_80", 20, "nvfp4", 16, "float16"),
    "nvfp4 small_batch f16, k shared": (small_batch, SPLIT, "sm_89", 3, "nvfp4", 16, "float16"),
    "nvfp4 stream_k f16": (stream_k, WIDE, "sm_90a", 20, "nvfp4", 16, "float16"),
    "nvfp4 multistage bf16, k shared": (
        multistage,
        Multistage(32, 4, 2, 3, kc=2),
        "sm_89",
        20,
        "nvfp4",
        16,
        "bfloat16",
    ),
    "fp8 rows small_batch bf16": (small_batch, FEW, "sm_90a", 4, "fp8", K, "bfloat16"),
    "fp8 blocks small_batch f16": (small_batch, SPLIT, "sm_80", 3, "fp8", 128, "float16"),
    "fp8 rows stream_k f16": (stream_k, WIDE, "sm_90a", 20, "fp8", K, "float16"),
    "fp8 blocks stream_k bf16": (stream_k, WIDE, "sm_90a", 20, "fp8", 128, "bfloat16"),
    "fp8 blocks stream_k f16, halves": (stream_k, StreamK(16, 2, 1, 3, 64), "sm_90a", 20, "fp8", 128, "float16"),
    "fp8 blocks stream_k bf16, two row blocks": (stream_k, TALL, "sm_90a", 20, "fp8", 128, "bfloat16"),
    "fp8 folded blocks stream_k bf16": (stream_k, WIDE, "sm_90a", 20, "fp8", -128, "bfloat16"),
    "fp8 folded blocks small_batch f16": (small_batch, FEW, "sm_90a", 4, "fp8", -128, "float16"),
    "fp8 folded blocks multistage bf16": (multistage, Multistage(32, 4, 2, 3), "sm_89", 20, "fp8", -128, "bfloat16"),
    "fp8 rows multistage bf16": (multistage, Multistage(32, 4, 2, 3), "sm_80", 20, "fp8", K, "bfloat16"),
    "nf4 stream_k bf16": (stream_k, TALL, "sm_90a", 20, "nf4", 64, "bfloat16"),
    "nf4 small_batch f16, k shared": (small_batch, SPLIT, "sm_80", 3, "nf4", 64, "float16"),
    "nf4 multistage f16": (multistage, Multistage(32, 4, 2, 3), "sm_89", 20, "nf4", 64, "float16"),
    "nf4 folded small_batch bf16": (small_batch, FEW, "sm_90a", 4, "nf4", -64, "bfloat16"),
    "nf4 folded stream_k f16": (stream_k, WIDE, "sm_90a", 20, "nf4", -64, "float16"),
    "nf4 folded multistage bf16": (multistage, Multistage(32, 4, 2, 3), "sm_80", 20, "nf4", -64, "bfloat16"),
    "fp8 blocks multistage f16": (multistage, Multistage(32, 4, 2, 3), "sm_89", 20, "fp8", 128, "float16"),
}
QUICK = ("mxfp4 multistage f16", "nvfp4 stream_k bf16", "fp8 rows small_batch bf16", "fp8 blocks stream_k bf16",
         "nf4 stream_k bf16", "nf4 small_batch f16, k shared", "nf4 folded multistage bf16")  # fmt: skip
"""Each format and each program; w4a16's cases have the other pairs' programs."""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(w4a16_on_cpu, "cuda_text", text_of)


def made(
    weight: str, group: int, seed: int, bias: torch.Tensor | None, far: int = 60, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """A weight whose products with small integers add up exactly in float32, of many codes. far: how far the rows of
    MXFP4 lie apart, in powers of two."""
    rng = torch.Generator().manual_seed(seed)
    if get_codes(weight).scales == ("e8m0",):
        codes = torch.randint(0, 16, (N, K), generator=rng, dtype=torch.uint8)
        scales = torch.randint(120, 124, (N, -(-K // group)), generator=rng)
        scales = scales + torch.randint(-far, far, (N, 1), generator=rng)
        return QuantizedWeight.canonical(codes, scales.to(torch.uint8), weight=weight, group_size=group, bias=bias)
    if weight == "nvfp4":
        codes = torch.randint(0, 16, (N, K), generator=rng, dtype=torch.uint8)
        scales = 2.0 ** torch.randint(-4, 3, (N, K // 16), generator=rng) * (
            1 - 2 * torch.randint(0, 2, (N, K // 16), generator=rng)
        )
        scales[0, ::2], scales[1, ::3] = 0, 2.0**-9
        factors = 2.0 ** torch.randint(-far // 4, far // 4, (N,), generator=rng)
        facts = dict(weight=weight, group_size=16, bias=bias, factors=factors)
        return QuantizedWeight.canonical(codes, scales.to(torch.float8_e4m3fn), **facts)
    if weight == "nf4":
        codes = torch.randint(0, 16, (N, K), generator=rng, dtype=torch.uint8)
        scales = 2.0 ** torch.randint(-far // 4, far // 4, (N, 1), generator=rng).expand(N, -(-K // group)) * 1
        scales[::7] *= -1
        return QuantizedWeight.canonical(codes, scales.to(dtype), weight=weight, group_size=group, bias=bias)
    codes = torch.randint(0, 128, (N, K), generator=rng, dtype=torch.uint8).clamp(48, 95) * 1
    codes |= torch.randint(0, 2, (N, K), generator=rng, dtype=torch.uint8) << 7
    codes[0], codes[1] = torch.arange(K) % 127, (torch.arange(K) % 127) + 128
    scales = (2.0 ** torch.randint(-6, 2, (N, -(-K // group)), generator=rng)).to(dtype)
    return QuantizedWeight.canonical(codes, scales, weight=weight, group_size=group, bias=bias)


def spec_of(case, bias: bool) -> Spec:
    *_, weight, group, dtype = case
    own = get_codes(weight).scales[0]
    scale = own if own in SMALL_SCALES else "float32" if group > 0 else dtype
    return Spec(N, K, -1 if group == K else abs(group), True, dtype, scale, bias)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_integers_come_out_exactly(name, tmp_path):
    case = program, schedule, target, m, weight, group, dtype = CASES[name]
    rng = torch.Generator().manual_seed(7)
    bias = torch.randint(-8, 9, (N,), generator=rng).to(getattr(torch, dtype))
    far, scale = 60 if dtype == "bfloat16" else 4, torch.float32 if group > 0 else bias.dtype
    w = made(weight, abs(group), 3, bias, far, scale)
    x = torch.randint(-2, 3, (m, K), generator=rng).to(bias.dtype)
    numerics = choose_way(w.format, w.scale_dtype, dtype, program is small_batch).name
    run = Program(program, schedule, spec_of(case, True), numerics, tmp_path, target=target, weight=weight)
    packed = w.pack()
    y = (
        run.stream_k(x, packed, 2, 1)
        if program is stream_k
        else getattr(run, program.__name__.rpartition(".")[2])(x, packed)
    )
    expected = reference.gemm(x, w, numerics)
    if weight in ("mxfp4", "nvfp4", "nf4") or group == K:
        assert torch.equal(y[:, 2:], expected.to(y.dtype)[:, 2:]), "no sum rounds"
    bound = reference.forward_error_bound(x, w, numerics)
    assert bool(((y.double() - expected).abs() <= bound).all())
    again = run.stream_k(x, packed, 2, 1) if program is stream_k else None
    assert again is None or torch.equal(again, y)
    if weight == "nvfp4":
        check_every_scale(run, program, m, bias)


STAND_INS = ("mxfp4 small_batch bf16", "mxfp4 stream_k bf16", "nvfp4 stream_k bf16", "nvfp4 small_batch bf16",
             "fp8 rows small_batch bf16", "fp8 rows stream_k f16", "fp8 blocks stream_k bf16",
             "nf4 stream_k bf16")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_has_the_bits_of_the_kernel_that_is_made_for_the_shape(name, tmp_path):
    case = program, schedule, target, m, weight, group, dtype = CASES[name]
    rng = torch.Generator().manual_seed(7)
    w = made(weight, abs(group), 3, None, 4)
    x = torch.randn(m, K, generator=rng).to(getattr(torch, dtype))
    numerics = choose_way(w.format, w.scale_dtype, dtype, program is small_batch).name
    ys = []
    for generic in (False, True):
        folder = tmp_path / str(generic)
        folder.mkdir()
        facts = dict(target=target, weight=weight, generic=generic)
        run = Program(program, schedule, spec_of(case, False), numerics, folder, **facts)
        ys.append(run.stream_k(x, w.pack(), 2, 1) if program is stream_k else run.small_batch(x, w.pack()))
    assert torch.equal(*ys) and bool(ys[0].isfinite().all())


def check_every_scale(run: Program, program, m: int, bias: torch.Tensor) -> None:
    """Random data and unit vectors, with every e4m3 scale above 0 and factors of rows that are no powers of two."""
    rng = torch.Generator().manual_seed(11)
    codes = torch.randint(0, 16, (N, K), generator=rng, dtype=torch.uint8)
    scales = (1 + torch.randperm(N * K // 16, generator=rng) % 126).view(N, -1).to(torch.uint8)
    facts = dict(weight="nvfp4", group_size=16, bias=bias, factors=1e-4 + 1e-3 * torch.rand(N, generator=rng))
    w = QuantizedWeight.canonical(codes, scales, **facts)
    units = torch.zeros(m, K)
    units[torch.arange(m), torch.randperm(K, generator=rng)[:m]] = 1
    for x in (torch.randn(m, K, generator=rng).to(bias.dtype), units.to(bias.dtype)):
        packed = w.pack()
        name = program.__name__.rpartition(".")[2]
        y = run.stream_k(x, packed, 2, 1) if program is stream_k else getattr(run, name)(x, packed)
        expected, bound = reference.gemm(x, w, "exact"), reference.forward_error_bound(x, w, "exact")
        assert bool(((y.double() - expected).abs() <= bound).all())


@pytest.mark.slow
@pytest.mark.parametrize("program", [stream_k, multistage], ids=["wgmma", "mma"])
@pytest.mark.parametrize("weight, group", [("mxfp4", 32), ("nvfp4", 16), ("fp8", K), ("fp8", 128), ("nf4", 64)])
def test_experts_of_which_one_has_no_tokens(weight, group, program, tmp_path):
    experts = [made(weight, group, seed, None) for seed in range(3)]
    schedule, target = (WIDE, "sm_90a") if program is stream_k else (Multistage(32, 4, 2, 3), "sm_80")
    case = (program, schedule, target, 40, weight, group, "bfloat16")
    numerics = choose_way(experts[0].format, experts[0].scale_dtype, "bfloat16", False).name
    more = dict(target=target, experts=3, weight=weight)
    run = Program(program, schedule, spec_of(case, False), numerics, tmp_path, **more)
    x = torch.randint(-2, 3, (40, K), generator=torch.Generator().manual_seed(1)).bfloat16()
    offsets = torch.tensor([0, 33, 33, 40], dtype=torch.int32)
    s = GroupedWeight.stack([w.pack() for w in experts]).stacked
    flat = type("Flat", (), {"words": s.words.flatten(0, 1), "params": s.params.flatten(0, 1), "bias": None})
    y = run.stream_k(x, flat, 3, offsets) if program is stream_k else run.multistage(x, flat, offsets)
    for e, w in enumerate(experts):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        expected, bound = reference.gemm(x[rows], w, numerics), reference.forward_error_bound(x[rows], w, numerics)
        assert bool(((y[rows].double() - expected).abs() <= bound).all()), e
