"""The generated stream-K kernels, grouped and not, and grouped ones on mma.sync, run on the CPU from their CUDA text:
int32 sums are exact."""

from __future__ import annotations

import re
from functools import partial

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear.bytes import multistage, stream_k
from terrazzo.ops.linear.bytes.problem import Gemm
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.tiles.cuda.experts import EXPERT_SEARCH, EXPERT_TABLE
from terrazzo.ops.w4a8.format import QuantizedWeight, pack
from terrazzo.schedules.multistage import Multistage, launch_sizes
from terrazzo.schedules.problem import Gemm as Problem
from terrazzo.schedules.stream_k import StreamK
from test_w4a8_emulated import EXTRA, on_cpu
from wgmma_on_cpu import boxes_named

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
HOPPER = r"""
static void cudaTriggerProgrammaticLaunchCompletion() {}
static void cudaGridDependencySynchronize() {}
static void tz_wg_sync(int id) { bar_sync(id, 128); }
static void tz_signal(int *flag, int id) { tz_wg_sync(id); if (threadIdx.x % 128 == 0) store_release(flag, 1); }
static void tz_await(int *flag, int count, int stride, int id) {
  for (int i = threadIdx.x % 128; i < count; i += 128) {
    int *f = flag + i * stride;
    wait_until([&] { return load_acquire(f) == 1; }); *f = 0;
  }
  tz_wg_sync(id);
}
static void tz_lds64(void *out, const void *p) { memcpy(out, p, 8); }
static void tz_stmatrix4_trans(void *p, unsigned a, unsigned b, unsigned c, unsigned d) {
  uint32_t in[4] = {a, b, c, d}, row[4];
  meet(in, 4, row, 4, [](Meeting &w) {
    for (int j = 0; j < 4; ++j) for (int l = 0; l < 32; ++l) for (int h = 0; h < 2; ++h)
      ((uint16_t *)w.out[j * 8 + l % 4 * 2 + h])[l / 4] = w.in[l][j] >> 16 * h;
  });
  memcpy(p, row, 16);
}
template <typename T, bool WHOLE> static void tz_store_row(void *y, int row, int n, int col, const void *src) {
  T *p = (T *)y + (long long)row * n + col;
  for (int e = 0; e < 16 / (int)sizeof(T); ++e) if (col + e < n) p[e] = ((const T *)src)[e];
}
// what a descriptor and a tensor map address: rows of 128 bytes, 16-byte pieces swizzled by the row
static char *swizzled(uint64_t at) { return (char *)(at ^ (at >> 7 & 7) << 4); }
struct Descriptor { uint64_t desc_; };  // counts 16 bytes from the beginning of shared memory
static uint64_t tz_matrix(const Descriptor &d) { return d.desc_; }
template <int N, bool SIGNED> static void wgmma(const uint32_t *a, uint64_t b, uint32_t *c) {
  meet(a, 4, nullptr, 0, [](Meeting &) {});
  Meeting &w = warps[current / 32];
  uint64_t x = (uint64_t)shared_memory() + 16 * b;
  int g = current % 32 / 4, t = current % 4;
  for (int j = 0; j < N / 8; ++j) for (int v = 0; v < 4; ++v) {
    int row = g + 8 * (v >> 1), col = j * 8 + 2 * t + (v & 1), sum = (int)c[j * 4 + v];
    for (int k = 0; k < 32; ++k) {
      uint8_t byte = w.in[row % 8 * 4 + k % 16 / 4][row / 8 + 2 * (k / 16)] >> 8 * (k % 4);
      sum += (SIGNED ? (int)(int8_t)byte : (int)byte) * (int)*(int8_t *)swizzled(x + col * 128 + k);
    }
    c[j * 4 + v] = sum;
  }
  meet(nullptr, 0, nullptr, 0, [](Meeting &) {});
}
template <int BOX> static void tma(const signed char *x, Barrier &bar, void *to, int column, int row) {
  for (int r = 0; r < BOX; ++r) for (int e = 0; e < 8; ++e) {
    char *at = swizzled((uint64_t)to + r * 128 + e * 16);
    bool inside = row + r < M && column + e * 16 < K;
    const char *from = inside ? (const char *)x + (long long)(row + r) * K + column + e * 16 : zeros;
    fly(bar, at, from, 16);
  }
}
namespace tl {
template <int A, int B, int C> void initialize_wgmma_descriptor(Descriptor &d, const void *p) {
  d.desc_ = ((const char *)p - shared_memory()) / 16;
}
template <int N> void warpgroup_reg_alloc() {}
template <int N> void warpgroup_reg_dealloc() {}
template <int N> void warpgroup_wait() {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
inline void warpgroup_fence_operand(void *, int) {}
inline void fence_proxy_async() {}
}
"""
REWRITES = (
    (r"\bgrid\b", "ctas"),
    (r"__grid_constant__ const CUtensorMap X_desc", "const signed char* X_desc"),
    (r"tl::prefetch_tma_descriptor\(\w+\);", ""),
    (r"tl::tl_shuffle_elect<32>\(\)", "(threadIdx.x % 32 == 0)"),
    (r"tl::GmmaDescriptor", "Descriptor"),
    (r"tl::wgmma_rs<tl::DataType::kInt8, .*?, 64, (\d+), 32, .*?>\(", r"wgmma<\1, true>("),
    (r"tl::wgmma_rs<tl::DataType::kUInt8, .*?, 64, (\d+), 32, .*?>\(", r"wgmma<\1, false>("),
    (r", \(bool\)1\);", ");"),
)


def weights(experts: int, n: int, k: int, group: int) -> list[QuantizedWeight]:
    rng = torch.Generator().manual_seed(n + k)
    groups, made = -(-k // group), []
    for _ in range(experts):
        scales = torch.randint(1, 17, (n, groups), generator=rng)
        offsets = (torch.rand(n, groups, generator=rng) * (256 - 15 * scales)).long()
        codes = torch.randint(0, 16, (n, k), generator=rng)
        channel = torch.rand(n, generator=rng) * 1e-2 + 1e-3
        bias = torch.randn(n, generator=rng)
        made.append(QuantizedWeight.canonical(codes, scales, offsets, channel, group_size=group, bias=bias))
    return made


def emulate(
    made, x, x_scales, last, schedule, grid, folder, *, out_dtype, dequantization, bias, experts, generic=False
):
    """y of one launch on the CPU, in an output that was NaN (int32: garbage). `last`: offsets, or the shared tiles.
    generic: by the kernel of no shape."""
    w, (m, k) = GroupedWeight.stack([pack(v) for v in made]).stacked, x.shape
    facts = dict(
        n=w.n, k=k, group=w.group_size, out_dtype=out_dtype, dequantization=dequantization, bias=bias, experts=experts
    )
    facts |= schedule.params()
    params = tuple((shapeless(facts, 4 if out_dtype == "int32" else 2) if generic else facts).items())
    request = KernelRequest("w4a8.grouped", f"{stream_k.__name__}:build", params, "sm_90a", stream_k.PASS_CONFIGS)
    source = cuda_text(request)
    for pattern, text in REWRITES:
        source = re.sub(pattern, text, source)
    source = boxes_named(source, "tl::tma_load(", "tma<{}>(", schedule.block_tokens)
    sizes = f"enum {{ M = {m}, K = {k} }};\n"
    gemm = Gemm(w.n, k, w.group_size, out_dtype, dequantization, bias)
    extra = [EXTRA, sizes, VOTES, HOPPER, EXPERT_TABLE, gemm.converter.device_source]
    kernel = CpuKernel(source, extra, schedule.warpgroups * 128 + 128, folder, schedule.cluster)
    y = torch.full((m, w.n), -77 if gemm.raw else float("nan"), dtype=getattr(torch, out_dtype))
    semaphores = torch.zeros(grid, schedule.flags, dtype=torch.int32)
    space = (grid, schedule.cta_blocks, schedule.block_tokens // 8, 128, 4)
    kernel(
        (grid, 1, 1), X_desc=x, W=w.words, S=w.channel_scales, XS=x_scales, RS=x.sum(1, dtype=torch.int32), B=w.bias,
        Y=y, WS=torch.full(space, 0x5A5A5A5A, dtype=torch.int32), SEM=semaphores, m=m, ctas=grid, parts=last, sk=last,
        n=w.n, k=k, blocks=w.words.shape[2], units=len(made) * w.words.shape[1], bias=w.bias.numel(),
    )  # fmt: skip
    assert not semaphores.any()
    return y


def on_warps(made, x, x_scales, offsets, schedule, folder, *, out_dtype, dequantization, bias):
    """The same by the program on mma.sync."""
    w, (m, k) = GroupedWeight.stack([pack(v) for v in made]).stacked, x.shape
    facts = dict(n=w.n, k=k, group=w.group_size, out_dtype=out_dtype, dequantization=dequantization, bias=bias)
    params = tuple((facts | schedule.params() | {"experts": len(made)}).items())
    request = KernelRequest("w4a8.grouped", f"{multistage.__name__}:build", params, "sm_80", multistage.PASS_CONFIGS)
    gemm = Gemm(w.n, k, w.group_size, out_dtype, dequantization, bias)
    shims = [EXTRA, VOTES, EXPERT_SEARCH, gemm.converter.device_source]
    kernel = CpuKernel(on_cpu(cuda_text(request)), shims, 32 * schedule.warps, folder)
    problem = Problem.of_bytes(w.n, k, w.group_size, experts=len(made))
    space, flags = launch_sizes(schedule, problem, m)
    y = torch.full((m, w.n), -77 if gemm.raw else float("nan"), dtype=getattr(torch, out_dtype))
    semaphores = torch.zeros(flags, dtype=torch.int32)
    kernel(
        (schedule.tiles(problem, m), schedule.kc, 1), X=x, W=w.words, S=w.channel_scales, XS=x_scales,
        RS=x.sum(1, dtype=torch.int32), B=w.bias, Y=y, WS=torch.full(space, 0x5A5A5A5A, dtype=torch.int32),
        SEM=semaphores, m=m, tiles=flags[0], offsets=offsets,
    )  # fmt: skip
    assert not semaphores.any()
    return y


S = partial(StreamK, form="s8 integer")
CASES = {  # tokens of each expert, rows of nobody at both ends, n, k, group, schedule, grid, output, dequantization
    "one tile each": ((16, 3, 16), (0, 0), 256, 384, 64, S(16, 4, 1, 2), 5, "int32", "xor"),
    "empty experts": ((0, 5, 0, 0, 40, 1, 0), (0, 0), 130, 272, 32, S(16, 1, 2, 3, raster=2), 4, "int32", "unsigned"),
    "rows of nobody": ((7, 0, 33), (3, 6), 200, 640, 128, S(32, 2, 1, 2), 7, "float16", "xor"),
    "all shared": ((9,), (0, 0), 64, 1280, 64, S(16, 1, 1, 2), 6, "bfloat16", "unsigned"),
    "no tokens": ((0, 0), (2, 3), 64, 128, 64, S(16, 1, 1, 2), 3, "int32", "xor"),
    "waves and shares": ((20, 30, 1, 16), (0, 0), 320, 256, 64, S(16, 1, 1, 2), 9, "int32", "xor"),
    "mma, split k": ((0, 5, 0, 40, 1), (1, 0), 130, 272, 32, Multistage(16, 4, 2, 3, kc=2), 0, "int32", "unsigned"),
    "mma, rows of nobody": ((7, 0, 66), (3, 6), 200, 640, 128, Multistage(32, 4, 1, 2), 0, "bfloat16", "unsigned"),
    "mma, forty experts": (
        (0,) * 31 + (3, 17, 0, 0, 2, 0, 0, 0, 40), (0, 1), 100, 256, 64, Multistage(32, 4, 2, 2), 0, "float16", "xor",
    ),
    "mma, no tokens": ((0, 0), (2, 3), 64, 128, 64, Multistage(16, 4, 1, 2), 0, "int32", "xor"),
}  # fmt: skip


USUAL = ("waves and shares",)


@pytest.mark.parametrize("name", cases(CASES, USUAL))
def test_grouped(name, tmp_path):
    counts, (before, after), n, k, group, schedule, grid, out_dtype, dequantization = CASES[name]
    made, raw = weights(len(counts), n, k, group), out_dtype == "int32"
    offsets = torch.tensor([0, *counts]).cumsum(0).int() + before
    m = sum(counts) + before + after
    rng = torch.Generator().manual_seed(m)
    x = torch.randint(-128, 128, (m, k), generator=rng, dtype=torch.int8)
    x_scales = torch.rand(m, generator=rng) * 1e-3 + 1e-4
    facts = dict(out_dtype=out_dtype, dequantization=dequantization, bias=not raw)
    if isinstance(schedule, Multistage):
        y = on_warps(made, x, x_scales, offsets, schedule, tmp_path, **facts)
    else:
        y = emulate(made, x, x_scales, offsets, schedule, grid, tmp_path, **facts, experts=len(counts))
    nobody = torch.cat([y[:before], y[m - after :]])
    assert bool((nobody == -77).all() if raw else nobody.isnan().all())
    for e, w in enumerate(made):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        exact = x[rows].double() @ w.bytes().double().T
        if raw:
            assert torch.equal(y[rows].double(), exact), f"expert {e}"
            continue
        product = exact * w.channel_scales.double() * x_scales[rows].double()[:, None]
        bound = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[out_dtype] * (product + w.bias).abs() * 1.001
        bound += 2.0**-21 * (product.abs() + w.bias.abs()) + 2.0**-25
        assert bool(((y[rows].double() - product - w.bias).abs() <= bound).all()), f"expert {e}"


ONE = [(3, 4), (6, 4), (6, 18), (0, 4), (6, 12)]


@pytest.mark.parametrize(("shared", "grid"), cases(ONE, []))
def test_one_matrix(shared, grid, tmp_path):
    """The same program without experts: 6 tiles, some of them shared by the CTAs, or each parted by 3 or 2."""
    made, m = weights(1, 180, 512, 64), 37
    rng = torch.Generator().manual_seed(m)
    x = torch.randint(-128, 128, (m, 512), generator=rng, dtype=torch.int8)
    y = emulate(
        made, x, torch.ones(m), shared, S(32, 1, 1, 2), grid, tmp_path, out_dtype="int32", dequantization="xor",
        bias=False, experts=0, generic=True,
    )  # fmt: skip
    assert torch.equal(y.double(), x.double() @ made[0].bytes().double().T)


PAIRS = {  # n, k, m, schedule, output, dequantization, (CTAs, shared tiles)
    "int32": (180, 640, 37, S(32, 1, 1, 2, cluster=2), "int32", "unsigned", (12, 6)),
    "two row blocks": (200, 656, 70, S(64, 1, 2, 3, cluster=2), "float16", "xor", (8, 4)),
    "whole tiles": (180, 512, 37, S(32, 2, 1, 2, cluster=2), "float16", "xor", (4, 0)),
}


@pytest.mark.parametrize("name", cases(PAIRS, ("int32",)))
def test_clusters(name, tmp_path):
    """Two CTAs for each tile, which part its sum through shared memory."""
    n, k, m, schedule, out_dtype, dequantization, (grid, shared) = PAIRS[name]
    made, raw, rng = weights(1, n, k, 64), out_dtype == "int32", torch.Generator().manual_seed(m)
    x = torch.randint(-128, 128, (m, k), generator=rng, dtype=torch.int8)
    scales = torch.ones(m) if raw else torch.rand(m, generator=rng) * 1e-3 + 1e-4
    y = emulate(
        made, x, scales, shared, schedule, grid, tmp_path, out_dtype=out_dtype, dequantization=dequantization,
        bias=not raw, experts=0, generic=True,
    )  # fmt: skip
    exact = x.double() @ made[0].bytes().double().T
    if raw:
        assert torch.equal(y.double(), exact)
        return
    product = exact * made[0].channel_scales.double() * scales.double()[:, None]
    bound = 2.0**-11 * (product + made[0].bias).abs() * 1.001
    bound += 2.0**-21 * (product.abs() + made[0].bias.abs()) + 2.0**-25
    assert bool(((y.double() - product - made[0].bias).abs() <= bound).all())


ORDERS = [(1, 0), (18, 5), (2, 0), (3, 7), (5, 1), (18, 0)]


@pytest.mark.parametrize(("resident", "seed"), cases(ORDERS, [(18, 5)]))
def test_parted_tiles_in_any_order(resident, seed, monkeypatch, tmp_path):
    """6 tiles parted by 3 CTAs each: one CTA at a time (all but a tile's last withdraw), all at once, by chance."""
    monkeypatch.setattr(cuda_on_cpu, "RESIDENT", resident)
    monkeypatch.setattr(cuda_on_cpu, "SEED", seed)
    test_one_matrix(6, 18, tmp_path)
