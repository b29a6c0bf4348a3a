"""INT8 weights through all programs, run on the CPU: unit vectors, integers bit for bit, random data in the bound."""

from __future__ import annotations

import pytest
import torch
import w4a16_on_cpu
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear import multistage, small_batch, stream_k
from terrazzo.ops.w4a16 import reference
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK
from w4a16_on_cpu import Program

from tests.gpu import oracles
from tests.gpu.oracles import Spec
from tests.tools.kernel_digest import text_of

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
BF16, F32 = "bfloat16", "float32"
SYMMETRIC = dict(symmetric=True, weight="u8")
FEW, SPLIT = SmallBatch(1, 1, 4, 2, 1, 2), SmallBatch(1, 3, 4, 1, 2, 2)
TALL, WIDE, MMA = StreamK(16, 1, 2, 3, 64), StreamK(32, 1, 1, 2, 128), Multistage(32, 4, 2, 3)
CASES = {  # program, schedule, target, M, weight, numerics; slow: others imply it
    "rows, few tokens, bf16": (small_batch, FEW, "sm_90a", 4, Spec(120, 288, -1, dtype=BF16, **SYMMETRIC), "post"),
    "zeros, few tokens, f16": (small_batch, SPLIT, "sm_80", 3, Spec(120, 288, 32, weight="u8", bias=True), "post"),
    "rows, tiles of wgmma, f16": (stream_k, WIDE, "sm_90a", 20, Spec(120, 288, -1, bias=True, **SYMMETRIC), "exact"),
    "zeros, tiles of wgmma, bf16": (stream_k, TALL, "sm_90a", 20, Spec(120, 288, 64, dtype=BF16, weight="u8"), "exact"),
    "groups, tiles of mma, bf16": (multistage, MMA, "sm_89", 20, Spec(120, 288, 128, dtype=BF16, **SYMMETRIC), "exact"),
    "zeros, tiles of mma, f16": (multistage, MMA, "sm_80", 20, Spec(120, 288, 32, weight="u8"), "exact"),
    "zeros, few tokens, bf16": (small_batch, FEW, "sm_90a", 4, Spec(120, 288, 64, dtype=BF16, weight="u8"), "post"),
    "zeros, few tokens, folded": (small_batch, FEW, "sm_90a", 4, Spec(120, 288, 64, weight="u8"), "exact"),
    "zeros, few tokens, folded bf16": (
        small_batch, FEW, "sm_90a", 4, Spec(120, 288, 64, dtype=BF16, weight="u8"), "exact",
    ),
    "groups, tiles of wgmma": (stream_k, WIDE, "sm_90a", 20, Spec(120, 288, 32, dtype=BF16, **SYMMETRIC), "exact"),
    "float32 scales": (stream_k, WIDE, "sm_90a", 20, Spec(120, 288, 128, scale=F32, **SYMMETRIC), "post"),
    "float32 scales, zeros": (stream_k, WIDE, "sm_90a", 20, Spec(120, 288, 64, scale=F32, weight="u8"), "post"),
    "float32 scales, tiles of mma": (multistage, MMA, "sm_80", 20, Spec(120, 288, 64, scale=F32, weight="u8"), "post"),
}  # fmt: skip
QUICK = ("rows, few tokens, bf16",)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(w4a16_on_cpu, "cuda_text", text_of)
    monkeypatch.setattr(oracles, "DEVICE", "cpu")


def launched(run: Program, program, x: torch.Tensor, packed) -> torch.Tensor:
    """y of a launch into NaN."""
    if program is stream_k:
        return run.stream_k(x, packed, 2, 1)
    return getattr(run, program.__name__.rpartition(".")[2])(x, packed)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_products_are_those_of_the_oracles(name, tmp_path):
    program, schedule, target, m, spec, numerics = CASES[name]
    run = Program(program, schedule, spec, numerics, tmp_path, target=target, weight="u8")
    rng, dtype = torch.Generator().manual_seed(7), getattr(torch, spec.dtype)
    units = torch.zeros(m, spec.k, dtype=dtype)
    at = torch.randperm(spec.k, generator=rng)[:m]
    units[torch.arange(m), at] = 1
    inputs = {
        "units": units,
        "integers": torch.randint(-2, 3, (m, spec.k), generator=rng).to(dtype),
        "random": torch.randn(m, spec.k, generator=rng).to(dtype),
    }
    for kind, x in inputs.items():
        w = oracles.canonical.__wrapped__(spec, kind == "integers", 3)
        packed = w.pack()
        y, expected = launched(run, program, x, packed), reference.gemm(x, w, numerics)
        if kind == "integers" or (kind == "units" and spec.scale_dtype != F32 and numerics == "exact"):
            assert torch.equal(y, expected.to(dtype)), kind
        bound = reference.forward_error_bound(x, w, numerics)
        assert bool(((y.double() - expected).abs() <= bound).all()), kind
        assert torch.equal(launched(run, program, x, packed), y), "two runs differ"


@pytest.mark.slow
@pytest.mark.parametrize("program", [stream_k, multistage], ids=["wgmma", "mma"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_experts_of_which_one_has_no_tokens(symmetric, program, tmp_path):
    spec = Spec(120, 288, -1, symmetric=symmetric, dtype=BF16, weight="u8")
    experts = [oracles.canonical.__wrapped__(spec, False, seed) for seed in range(3)]
    schedule, target = (WIDE, "sm_90a") if program is stream_k else (MMA, "sm_80")
    run = Program(program, schedule, spec, "exact", tmp_path, target=target, experts=3, weight="u8")
    x = torch.randn(40, spec.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    offsets = torch.tensor([0, 33, 33, 40], dtype=torch.int32)
    s = GroupedWeight.stack([w.pack() for w in experts]).stacked
    flat = type("Flat", (), {"words": s.words.flatten(0, 1), "params": s.params.flatten(0, 1), "bias": None})
    y = run.stream_k(x, flat, 3, offsets) if program is stream_k else run.multistage(x, flat, offsets)
    for e, w in enumerate(experts):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        expected, bound = reference.gemm(x[rows], w, "exact"), reference.forward_error_bound(x[rows], w, "exact")
        assert bool(((y[rows].double() - expected).abs() <= bound).all()), e


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_stand_in_has_the_bits_of_the_kernel_that_is_made_for_the_shape(name, tmp_path):
    program, schedule, target, m, spec, numerics = CASES[name]
    x = torch.randn(m, spec.k, generator=torch.Generator().manual_seed(7)).to(getattr(torch, spec.dtype))
    packed, ys = oracles.canonical.__wrapped__(spec, False, 3).pack(), []
    for generic in (False, True):
        (folder := tmp_path / str(generic)).mkdir()
        run = Program(program, schedule, spec, numerics, folder, target=target, weight="u8", generic=generic)
        ys.append(launched(run, program, x, packed))
    assert torch.equal(*ys) and bool(ys[0].isfinite().all())
