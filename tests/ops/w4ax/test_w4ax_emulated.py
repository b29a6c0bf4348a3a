"""The W4Ax kernels, run on the CPU from their CUDA text: block sums exact, y inside its bound."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from cuda_on_cpu import VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.mixed import integer, persistent, problem, small_batch, stream_k
from terrazzo.ops.tiles.cuda.blocks import BLOCK_SCALES
from terrazzo.ops.tiles.cuda.experts import EXPERT_TABLE
from terrazzo.ops.w4ax import activations, reference
from terrazzo.schedules import w4ax as schedules
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.problem import Gemm
from terrazzo.schedules.small_batch import SmallBatch
from test_attention_prefill_emulated import on_cpu
from test_w4a8_emulated import EXTRA
from test_w4ax_format import random_weight
from w4ax_tiles import block_tile, integer_tile
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import TURNS, translated

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
"""Environment variable: every case; the default is one of each kind."""
SHIMS = r"""
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static void tz_lds64(void *out, const void *p) { memcpy(out, p, 8); }
static void tz_addcg4(void *r, const void *p) { for (int i = 0; i < 4; ++i) ((float *)r)[i] += ((const float *)p)[i]; }
static void tz_cta_signal(int *flag) { __syncthreads(); if (threadIdx.x == 0) store_release(flag, 1); }
static void tz_cta_await(int *flag, int count) {
  for (int i = threadIdx.x; i < count; i += THREADS) {
    wait_until([&] { return load_acquire(flag + i) == 1; }); flag[i] = 0;
  }
  __syncthreads();
}
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
static half_t half_of(float v) { return {narrow<false>(v)}; }
static bfloat16_t bfloat16_of(float v) { return {narrow<true>(v)}; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static int nibble(uint32_t w, int i) { return (int)(w << (28 - 4 * i)) >> 28; }
static void tz_mma_s4(void *c, const void *a, const void *b) {
  uint32_t in[10]; memcpy(in, a, 16); memcpy(in + 4, b, 8); memcpy(in + 6, c, 16);
  meet(in, 10, (uint32_t *)c, 4, [](Meeting &w) {
    int x[16][64], y[64][8];
    for (int l = 0; l < 32; ++l) for (int e = 0; e < 8; ++e) {
      int g = l / 4, t = l % 4;
      for (int r = 0; r < 4; ++r) x[g + 8 * (r & 1)][8 * t + e + 32 * (r >> 1)] = nibble(w.in[l][r], e);
      for (int r = 0; r < 2; ++r) y[8 * t + e + 32 * r][g] = nibble(w.in[l][4 + r], e);
    }
    for (int l = 0; l < 32; ++l) for (int v = 0; v < 4; ++v) {
      int sum = (int)w.in[l][6 + v];
      for (int k = 0; k < 64; ++k) sum += x[l / 4 + 8 * (v >> 1)][k] * y[k][2 * (l % 4) + (v & 1)];
      w.out[l][v] = sum;
    }
  });
}
"""
MMA = "tl::mma_sync<tl::DataType::kInt8, tl::DataType::kInt8, tl::DataType::kInt32, 16, 8, 32, false, true>"


def channel_scales(packed):
    return torch.full((1,), float("nan")) if packed.channel_scales is None else packed.channel_scales


def emulate(weight, q, scales, schedule, ctas, folder, *, out_dtype):
    """y of one launch on the CPU, in an output that was NaN."""
    packed, m = weight.pack(target="sm_80"), q.shape[0]
    x = activations.from_codes(q, scales, packed)
    k = packed.blocks * 128
    params = dict(
        n=weight.n, k=k, blocks8=weight.blocks8, out_dtype=out_dtype, bias=weight.bias is not None,
        two_level=weight.two_level, **schedule.params(),
    )  # fmt: skip
    request = KernelRequest(
        "w4ax.persistent", f"{persistent.__name__}:build", tuple(params.items()), "sm_80", persistent.PASS_CONFIGS
    )
    source = cuda_text(request)
    for name, here in (
        (MMA, "mma_s8"),
        ("tz_cp_async(", "cp_async_or_zero("),
    ):
        source = source.replace(name, here)
    gemm = problem.Gemm(weight.n, k, weight.blocks8, out_dtype, False)
    extra = [EXTRA, SHIMS, gemm.converter.device_source, BLOCK_SCALES.replace("__forceinline__ float", "float")]
    kernel = CpuKernel(source, extra, schedule.warps * 32, folder)
    of = Gemm.of_blocks(weight.n, k, weight.blocks8)
    plan = schedules.work_plan(schedule, of, Target.parse("sm_80"), m, ctas)
    items, first, slots = schedules.work_list(plan, -(-m // schedule.block_tokens))
    y = torch.full((m, weight.n), float("nan"), dtype=getattr(torch, out_dtype))
    semaphores = torch.zeros(max(slots, 1), dtype=torch.int32)
    workspace = torch.full((max(slots, 1), schedule.sums // 4, schedule.warps * 32, 4), float("nan"))
    kernel(
        (plan.sms, 1, 1), X4=x.q4, X8=x.q8, W=packed.words, XS=x.scales, S=channel_scales(packed), B=weight.bias,
        ITEMS=torch.tensor(items, dtype=torch.int32), FIRST=torch.tensor(first, dtype=torch.int32), WS=workspace,
        SEM=semaphores, Y=y, m=m, mp=x.scales.shape[1], ends=len(first), count=len(items), slots=max(slots, 1),
    )  # fmt: skip
    assert not semaphores.any()
    return y, slots


def random_activations(m: int, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes that use the whole range of their blocks, and scales."""
    rng = torch.Generator().manual_seed(1)
    limit = reference.limits(weight.blocks, weight.blocks8).int().repeat_interleave(128)
    q = torch.randint(-127, 128, (m, weight.codes.shape[1]), generator=rng)
    q = torch.where(limit == 7, q % 15 - 7, q).to(torch.int8)
    return q, torch.exp(torch.randn(m, weight.blocks, generator=rng) * 0.3 - 3)


CASES = {  # n, k, INT8 blocks, m, schedule, CTAs, output, bias, two-level scales
    "mixed": (192, 640, 2, 37, schedules.Persistent(32, 4, 2, 3), 3, "float16", True, True),
    "all int4": (70, 333, 0, 20, schedules.Persistent(16, 4, 1, 2), 3, "bfloat16", False, False),
    "all int8": (128, 256, 2, 9, schedules.Persistent(16, 4, 2, 4), 1, "float32", True, False),
    "token warps": (200, 512, 1, 70, schedules.Persistent(64, 8, 2, 2, token_warps=2), 5, "float32", False, True),
}


@pytest.mark.parametrize("name", cases(CASES, ("mixed",)))
def test_persistent(name, tmp_path):
    n, k, blocks8, m, schedule, ctas, out_dtype, bias, two_level = CASES[name]
    weight = random_weight(n, k, blocks8, seed=n, bias=bias, two_level=two_level)
    q, scales = random_activations(m, weight)
    y, slots = emulate(weight, q, scales, schedule, ctas, tmp_path, out_dtype=out_dtype)
    assert slots or ctas == 1  # some tile is shared
    ref = reference.gemm(q, scales, weight)
    bound = reference.forward_error_bound(q, scales, weight, getattr(torch, out_dtype))
    assert bool(((y.double() - ref).abs() <= bound).all())


@pytest.mark.slow
def test_a_single_block_is_exact_in_float32(tmp_path):
    """Scales of 1, all blocks but one scaled by 0: what is left is that block's int32 sum."""
    weight = random_weight(64, 384, 1, seed=5)
    weight = type(weight)(**(weight.__dict__ | {"scales": torch.ones_like(weight.scales)}))
    q, scales = random_activations(16, weight)
    for block in (0, 2):
        only = torch.zeros_like(scales)
        only[:, block] = 1
        (tmp_path / str(block)).mkdir()
        schedule = schedules.Persistent(16, 4, 1, 3)
        y, _ = emulate(weight, q, only, schedule, 2, tmp_path / str(block), out_dtype="float32")
        assert torch.equal(y.double(), reference.block_sums(q, weight)[block].double())


def emulate_stream_k(weight, q, scales, schedule, partition, folder, *, out_dtype):
    """y of one launch of the wgmma program, in an output that was NaN."""
    packed = weight.pack(target="sm_90a")
    x = activations.from_codes(q, scales, packed)
    grid, shared = partition
    return launch_wgmma(packed, x, schedule, grid, folder, out_dtype=out_dtype, sk=shared)


def launch_wgmma(packed, x, schedule, grid, folder, *, out_dtype, experts=0, **last):
    """The same of a packed weight, or of the stacked one of experts; `last`: shared tiles or offsets, by name."""
    k, bias, m = packed.blocks * 128, packed.bias, x.m
    params = dict(
        n=packed.n, k=k, blocks8=packed.blocks8, out_dtype=out_dtype, bias=bias is not None, two_level=packed.two_level,
        **schedule.params(), **({"experts": experts} if experts else {}),
    )  # fmt: skip
    program = integer if packed.two_level else stream_k
    request = KernelRequest("w4ax", f"{program.__name__}:build", tuple(params.items()), "sm_90a", program.PASS_CONFIGS)
    source = translated(cuda_text(request), schedule.block_tokens)
    gemm = problem.Gemm(packed.n, k, packed.blocks8, out_dtype, bias is not None)
    converter = (problem.byte_gemm(gemm) if packed.two_level else gemm).converter
    base = EXTRA.replace("typedef unsigned char uchar;", "")
    kernel = CpuKernel(
        source.replace("int grid", "int ctas").replace("grid", "ctas"),
        [WGMMA, base, SHIMS, TURNS, on_cpu(converter), BLOCK_SCALES, *([VOTES, EXPERT_TABLE] if experts else [])],
        schedule.warpgroups * 128 + 128,
        folder,
    )
    y = torch.full((m, packed.n), float("nan"), dtype=getattr(torch, out_dtype))
    semaphores = torch.zeros(grid, schedule.warpgroups, dtype=torch.int32)
    workspace = torch.full((grid, schedule.warpgroups, schedule.block_tokens // 8, 128, 4), float("nan"))
    kernel(
        (grid, 1, 1), X_desc=torch.tensor([x.q8.data_ptr(), m, k]), W=packed.words, XS=x.scales,
        S=channel_scales(packed), B=bias, WS=workspace, SEM=semaphores, Y=y, m=m, mp=x.scales.shape[1],
        ctas=grid, **last,
    )  # fmt: skip
    assert not semaphores.any()
    return y


STREAM_K = {  # n, k, INT8 blocks, m, schedule, (grid, shared tiles), output, bias
    "narrow": (200, 640, 2, 37, block_tile(16, 2, 3), (3, 6), "float16", True),
    "wide": (130, 333, 1, 130, block_tile(128, 2, 2, turns=1), (3, 3), "bfloat16", False),
    "four": (256, 512, 4, 20, block_tile(32, 4, 4), (1, 0), "float32", True),
    "halves": (130, 333, 1, 130, block_tile(128, 3, 2, turns=1), (2, 2), "float32", True),
    "three": (200, 896, 3, 60, block_tile(64, 3, 3), (3, 2), "float32", True),
    "three in turn": (200, 896, 3, 60, block_tile(64, 3, 3, turns=1), (3, 2), "float32", True),
    "four of 64 tokens": (256, 512, 2, 60, block_tile(64, 4, 2), (2, 1), "float16", False),
    "four in turn": (256, 512, 2, 60, block_tile(64, 4, 2, turns=1), (2, 1), "float16", False),
    "one block": (70, 100, 0, 9, block_tile(16, 2, 2), (1, 0), "float16", False),
    "wide, some tiles shared": (130, 640, 2, 200, block_tile(128, 2, 3), (3, 1), "float32", True),
    "halves, some tiles shared": (130, 640, 2, 200, block_tile(128, 3, 3), (1, 0), "float32", True),
}


@pytest.mark.parametrize("name", cases(STREAM_K, ("halves",)))
def test_stream_k(name, tmp_path):
    n, k, blocks8, m, schedule, partition, out_dtype, bias = STREAM_K[name]
    weight = random_weight(n, k, blocks8, seed=n, bias=bias)
    q, scales = random_activations(m, weight)
    y = emulate_stream_k(weight, q, scales, schedule, partition, tmp_path, out_dtype=out_dtype)
    ref = reference.gemm(q, scales, weight)
    bound = reference.forward_error_bound(q, scales, weight, getattr(torch, out_dtype))
    assert bool(((y.double() - ref).abs() <= bound).all())


def emulate_small_batch(weight, q, scales, schedule, folder, *, out_dtype):
    """y of one launch of the small-batch program, in an output that was NaN."""
    packed, m = weight.pack(target="sm_90a"), q.shape[0]
    x = activations.from_codes(q, scales, packed)
    k, bias = packed.blocks * 128, weight.bias
    params = dict(
        n=weight.n, k=k, blocks8=weight.blocks8, out_dtype=out_dtype, bias=bias is not None, two_level=weight.two_level,
        **schedule.params(),
    )  # fmt: skip
    request = KernelRequest(
        "w4ax.small_batch", f"{small_batch.__name__}:build", tuple(params.items()), "sm_90a", small_batch.PASS_CONFIGS
    )
    source = cuda_text(request)
    source = re.sub(r"\(((?:half|bfloat16)_t)\)(\w+\[\w+\])", r"(\1)(\2)", source.replace(MMA, "mma_s8"))
    source = source.replace("(half_t)(", "half_of(").replace("(bfloat16_t)(", "bfloat16_of(")
    gemm = problem.Gemm(weight.n, k, weight.blocks8, out_dtype, bias is not None)
    base = EXTRA.replace("typedef unsigned char uchar;", "")
    kernel = CpuKernel(
        source, [WGMMA, base, SHIMS, gemm.converter.device_source, BLOCK_SCALES], schedule.warps * 32, folder,
        PAIR if schedule.joined else 1,
    )  # fmt: skip
    kernel.give(request)
    y = torch.full((m, weight.n), float("nan"), dtype=getattr(torch, out_dtype))
    space, counters = schedule.workspace(packed.words.shape[1] * 64)
    semaphores, workspace = torch.zeros(counters, dtype=torch.int32), torch.full(space, float("nan"))
    kernel(
        (schedule.kc, schedule.nc, 1), X=x.q8, W=packed.words, XS=x.scales, S=channel_scales(packed), B=bias,
        WS=workspace, SEM=semaphores, Y=y, m=m, mp=x.scales.shape[1],
    )  # fmt: skip
    assert not semaphores.any()
    return y


def uniform_activations(m: int, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes hold them with two-level scales, and scales that are the same in all blocks of a precision."""
    q, scales = random_activations(m, weight)
    high = weight.blocks - weight.blocks8
    factor = torch.randint(1, 19, (m, high, 1), generator=torch.Generator().manual_seed(m))
    q[:, : high * 128] = (q[:, : high * 128].view(m, high, 128) * factor).view(m, -1)
    scales[:, :high], scales[:, high:] = scales[:, :1].clone(), scales[:, -1:].clone()
    return q, scales


INTEGER = {  # n, k, INT8 blocks, m, schedule, (grid, shared tiles), output, bias
    "sums in shared memory": (130, 512, 1, 130, integer_tile(128, 3, 2), (2, 2), "float32", True),
    "narrow": (200, 640, 2, 37, integer_tile(16, 2, 3), (3, 6), "float16", True),
    "wide": (130, 333, 1, 130, integer_tile(128, 2, 2), (3, 3), "bfloat16", False),
    "all int4": (256, 512, 0, 20, integer_tile(32, 4, 4), (1, 0), "float32", True),
    "all int8": (200, 384, 3, 60, integer_tile(64, 3, 3), (2, 1), "bfloat16", False),
    "four of 64 tokens": (256, 512, 2, 60, integer_tile(64, 4, 2), (2, 1), "float16", True),
    "one block": (70, 100, 0, 9, integer_tile(16, 1, 2), (1, 0), "float16", False),
}


@pytest.mark.parametrize("name", cases(INTEGER, list(INTEGER)[:1]))
def test_integer(name, tmp_path):
    n, k, blocks8, m, schedule, partition, out_dtype, bias = INTEGER[name]
    weight = random_weight(n, k, blocks8, seed=n, bias=bias, two_level=True)
    q, scales = uniform_activations(m, weight)
    y = emulate_stream_k(weight, q, scales, schedule, partition, tmp_path, out_dtype=out_dtype)
    ref = reference.gemm(q, scales, weight)
    bound = reference.forward_error_bound(q, scales, weight, getattr(torch, out_dtype))
    assert bool(((y.double() - ref).abs() <= bound).all())


@pytest.mark.slow
def test_integer_sums_are_exact(tmp_path):
    """Scales of 1: y is the sum over all of k, however tiles are shared, below 2^24."""
    n, k, blocks8, _, schedule, partition, out_dtype, _ = INTEGER["sums in shared memory"]
    weight, m = random_weight(n, k, blocks8, seed=3, two_level=True), 20
    ones = dict(scales=weight.multipliers(), channel_scales=torch.ones(n), bias=torch.zeros(n))
    weight = dataclasses.replace(weight, **ones)
    q, _ = uniform_activations(m, weight)
    y = emulate_stream_k(weight, q, torch.ones(m, k // 128), schedule, partition, tmp_path, out_dtype=out_dtype)
    assert torch.equal(y.double(), q.double() @ weight.values().T)


SMALL_BATCH = {  # n, k, INT8 blocks, m, schedule, output, bias, two-level scales
    "two levels": (130, 900, 3, 5, SmallBatch(1, 2, 3, 3, 2, 2), "float16", True, True),
    "one tile": (130, 900, 3, 5, SmallBatch(1, 2, 3, 3, 2, 2), "float16", True, False),
    "joined": (130, 900, 3, 5, SmallBatch(1, 2, 3, 3, 2, 2, joined=True), "float16", True, True),
    "three of four rows": (
        130,
        900,
        3,
        3,
        SmallBatch(1, 2, 3, 3, 2, 2, joined=True, tokens=4),
        "float16",
        True,
        True,
    ),
    "two tiles": (200, 640, 1, 15, SmallBatch(2, 1, 4, 2, 1, 1), "bfloat16", False, False),
    "one chunk": (67, 333, 0, 1, SmallBatch(1, 1, 1, 2, 8, 3), "float32", True, True),
}


@pytest.mark.parametrize("name", cases(SMALL_BATCH, list(SMALL_BATCH)[:1]))
def test_small_batch(name, tmp_path):
    n, k, blocks8, m, schedule, out_dtype, bias, two_level = SMALL_BATCH[name]
    weight = random_weight(n, k, blocks8, seed=n, bias=bias, two_level=two_level)
    q, scales = (uniform_activations if two_level else random_activations)(m, weight)
    y = emulate_small_batch(weight, q, scales, schedule, tmp_path, out_dtype=out_dtype)
    ref = reference.gemm(q, scales, weight)
    bound = reference.forward_error_bound(q, scales, weight, getattr(torch, out_dtype))
    assert bool(((y.double() - ref).abs() <= bound).all())
