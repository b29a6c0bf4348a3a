"""The generated kernels of W4A8 on e4m3, run on the CPU from their CUDA text and held to float32's error bound."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.w4a8 import fp8, fp8_reference
from terrazzo.schedules import multistage
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK
from test_w4a8_emulated import EXTRA
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import translated

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
FLOATS = r"""
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float tz_rescale(float acc, float s, float x, float b) { return fmaf(acc * s, x, b); }
static void tz_addcg4(void *r, const void *p) { for (int i = 0; i < 4; ++i) ((float *)r)[i] += ((const float *)p)[i]; }
"""
HOPPER = r"""
static void tz_lds64(void *out, const void *p) { memcpy(out, p, 8); }
"""
ADA = r"""
struct float4 { float x, y, z, w; }; struct uint2 { unsigned x, y; };
template <class T, bool BF16> static T rescaled(float acc, float s, float x, float b) {
  return {narrow<BF16>(tz_rescale(acc, s, x, b))};
}
static float e4m3_value(uint8_t byte) {
  int e = byte >> 3 & 15, m = byte & 7;
  return (byte & 128 ? -1 : 1) * (e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9));
}
static void tz_mma_e4m3(void *c_, const void *a, const void *b, float f0, float f1) {
  uint32_t in[6]; float d[4], *c = (float *)c_; memcpy(in, a, 16); memcpy(in + 4, b, 8);
  meet(in, 6, (uint32_t *)d, 4, [](Meeting &w) {
    double x[16][32], y[32][8];
    for (int l = 0; l < 32; ++l) for (int e = 0; e < 4; ++e) {
      int g = l / 4, t = l % 4;
      for (int r = 0; r < 4; ++r) x[g + 8 * (r & 1)][4 * t + e + 16 * (r >> 1)] = e4m3_value(w.in[l][r] >> 8 * e);
      for (int r = 0; r < 2; ++r) y[4 * t + e + 16 * r][g] = e4m3_value(w.in[l][4 + r] >> 8 * e);
    }
    for (int l = 0; l < 32; ++l) for (int v = 0; v < 4; ++v) {
      double sum = 0;
      for (int k = 0; k < 32; ++k) sum += x[l / 4 + 8 * (v >> 1)][k] * y[k][2 * (l % 4) + (v & 1)];
      float f = (float)sum; memcpy(&w.out[l][v], &f, 4);
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = fmaf(d[i], i < 2 ? f0 : f1, c[i]);
}
static void tz_mma_e4m3_groups(void *c_, const void *a, const void *b, float f0, float f1, float t0, float t1) {
  float d[4] = {}, *c = (float *)c_; tz_mma_e4m3(d, a, b, 1, 1);
  for (int i = 0; i < 4; ++i) c[i] = fmaf(d[i], (i < 2 ? f0 : f1) * (i % 2 ? t1 : t0), c[i]);
}
"""


def random_weight(n: int, k: int, group: int) -> fp8.QuantizedWeight:
    rng = torch.Generator().manual_seed(n + k)
    groups = -(-k // group)
    return fp8.QuantizedWeight.canonical(
        torch.randint(-8, 8, (n, k), generator=rng),
        torch.randn(n, groups, generator=rng).half(),
        torch.rand(n, generator=rng) * 1e-2 + 1e-3,
        group_size=group,
        bias=torch.randn(n, generator=rng),
    )


def build(program: str, weight, q, scales, schedule, target, out_dtype, fold):
    """(CUDA text, values of the kernel's parameters that every program has, y full of NaN)."""
    module = importlib.import_module(f"terrazzo.ops.linear.bytes.{program}")
    (m, k), packed = q.shape, weight.pack()
    form = packed.DEQUANTIZATION
    gemm = fp8_problem.Gemm(weight.n, k, weight.group_size, out_dtype, form, True)
    params = dict(n=gemm.n, k=k, group=gemm.group, out_dtype=out_dtype, dequantization=form, bias=True)
    request = KernelRequest(
        f"w4a8.{program}", f"{module.__name__}:build", tuple((params | schedule.params()).items()), target,
        module.PASS_CONFIGS,
    )  # fmt: skip
    y = torch.full((m, weight.n), float("nan"), dtype=getattr(torch, out_dtype))
    values = dict(W=packed.words, S=packed.channel_scales, XS=scales, RS=torch.empty(1), B=weight.bias, Y=y, m=m)
    values["mp"] = scales.shape[-1]
    return cuda_text(request), values | fold(gemm), y, gemm


def stream_k(weight, q, scales, schedule, partition, folder, out_dtype):
    grid, shared = partition
    space = (grid, schedule.cta_blocks, schedule.block_tokens // 8, 128, 4)
    semaphores = torch.zeros(grid, schedule.flags, dtype=torch.int32)
    more = lambda gemm: dict(
        X_desc=torch.tensor([q.data_ptr(), *q.shape]), WS=torch.full(space, float("nan")), SEM=semaphores,
        parts=shared, sk=shared, ctas=grid,
    )  # fmt: skip
    source, values, y, gemm = build("stream_k", weight, q, scales, schedule, "sm_90a", out_dtype, more)
    source = translated(source, schedule.block_tokens).replace("int grid", "int ctas").replace("grid", "ctas")
    base = EXTRA.replace("typedef unsigned char uchar;", "")
    kernel = CpuKernel(
        source, [WGMMA, base, FLOATS, HOPPER, gemm.converter.device_source], schedule.warpgroups * 128 + 128, folder,
        schedule.cluster,
    )  # fmt: skip
    kernel((grid, 1, 1), **values)
    assert not semaphores.any()
    return y


def on_cpu(source: str) -> str:
    """CUDA text of a program on mma.sync with the names of the emulation."""
    for text, here in (
        ("tz_cp_async(", "cp_async_or_zero("),
        ("(half_t)tz_rescale(", "rescaled<half_t, false>("),
        ("(bfloat16_t)tz_rescale(", "rescaled<bfloat16_t, true>("),
    ):
        source = source.replace(text, here)
    return source


def mma_sync(program, weight, q, scales, schedule, grid, space, flags, folder, out_dtype):
    semaphores = torch.zeros(flags, dtype=torch.int32)
    more = lambda gemm: dict(X=q, WS=torch.full(space, float("nan")), SEM=semaphores, tiles=flags[0])
    source, values, y, gemm = build(program, weight, q, scales, schedule, "sm_89", out_dtype, more)
    kernel = CpuKernel(on_cpu(source), [EXTRA, FLOATS, ADA, gemm.converter.device_source], schedule.warps * 32, folder)
    kernel(grid, **values)
    assert not semaphores.any()
    return y


S, M = partial(StreamK, form="e4m3 post"), Multistage
CASES = {  # n, k, group, m, schedule, (grid, shared tiles) of stream_k, output; True: quick
    "stream_k": (130, 400, 128, 20, S(16, 2, 1, 3), (3, 3), "float16", True),
    "stream_k two row blocks": (200, 272, 64, 20, S(16, 1, 2, 2), (3, 3), "bfloat16", False),
    "stream_k groups of 32": (130, 656, 32, 33, S(32, 2, 1, 4), (3, 2), "float16", False),
    "stream_k clusters": (200, 656, 64, 37, S(32, 2, 1, 3, cluster=2), (8, 4), "float16", False),
    "stream_k two pieces": (130, 656, 128, 150, S(256, 2, 1, 3), (2, 1), "float16", False),
    "stream_k two pieces, groups of 64": (130, 400, 64, 260, S(256, 2, 1, 2), (3, 3), "bfloat16", False),
    "stream_k two pieces, groups of 32": (70, 272, 32, 140, S(256, 2, 1, 4), (1, 0), "float16", False),
    "multistage": (67, 288, 32, 40, M(64, 4, 1, 2), None, "float16", True),
    "multistage split": (67, 528, 128, 33, M(32, 4, 2, 3, kc=3), None, "bfloat16", False),
    "multistage token warps": (128, 400, 64, 130, M(128, 8, 1, 2, token_warps=2), None, "float16", False),
    "small_batch": (67, 400, 64, 11, SmallBatch(2, 2, 3, 2, 2, 2), None, "float16", False),
    "small_batch one": (48, 272, 32, 5, SmallBatch(1, 1, 2, 2, 1, 3), None, "bfloat16", False),
}


@pytest.mark.parametrize("name", cases(CASES, [name for name, case in CASES.items() if case[-1]]))
def test_kernel(name, tmp_path):
    check(name, random_weight(*CASES[name][:3]), CASES[name], tmp_path)


def check(name, weight, case, tmp_path):
    """A kernel on random activations is inside the bound."""
    n, k, group, m, schedule, partition, out_dtype, _ = case
    rng = torch.Generator().manual_seed(m)
    q, scales = fp8_reference.quantize_activations(torch.randn(m, k, generator=rng) * 3)
    given = q.view(torch.int8)
    if partition:
        y = stream_k(weight, given, scales, schedule, partition, tmp_path, out_dtype)
    elif name.startswith("multistage"):
        problem = Gemm.of_bytes(n, k, group)
        grid = (schedule.tiles(problem, m), schedule.kc, 1)
        space, flags = multistage.launch_sizes(schedule, problem, m)
        y = mma_sync("multistage", weight, given, scales, schedule, grid, space, flags, tmp_path, out_dtype)
    else:
        space, counters = schedule.workspace(-(-n // 64) * 64)
        grid = (schedule.kc, schedule.nc, 1)
        y = mma_sync("small_batch", weight, given, scales, schedule, grid, space, counters, tmp_path, out_dtype)
    ref = fp8_reference.gemm(q, scales, weight)
    bound = fp8_reference.forward_error_bound(q, scales, weight, y.dtype, fraction_bits=23)
    assert bool(((y.double() - ref).abs() <= bound).all())


def test_small_integers_are_exact(tmp_path):
    """Factors that are powers of two, |q| <= 4: every sum is a float32, split along k or not."""
    n, k, group, _, schedule, _, out_dtype, _ = CASES["stream_k"]
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (n, k), generator=rng)
    factors = 2.0 ** torch.randint(-2, 2, (n, 4), generator=rng)
    weight = fp8.QuantizedWeight.canonical(codes, factors.half(), torch.ones(n), group_size=group, bias=torch.zeros(n))
    q = torch.randint(-4, 5, (8, k), generator=rng).to(torch.float8_e4m3fn)
    y = stream_k(weight, q.view(torch.int8), torch.ones(8), schedule, (3, 1), tmp_path, out_dtype)
    assert torch.equal(y, fp8_reference.gemm(q, torch.ones(8), weight).half())
