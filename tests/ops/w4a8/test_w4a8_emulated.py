"""The generated multistage kernels, run on the CPU from their CUDA text: int32 sums exact, the rest one rounding."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.bytes import multistage
from terrazzo.ops.w4a8.format import QuantizedWeight, pack
from terrazzo.schedules.multistage import Multistage, launch_sizes
from terrazzo.schedules.problem import Gemm

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
EXTRA = r"""
typedef unsigned char uchar;
static void mma_8bit(uint32_t *c, const uint32_t *a, const uint32_t *b, bool is_signed) {
  uint32_t in[11]; memcpy(in, a, 16); memcpy(in + 4, b, 8); memcpy(in + 6, c, 16); in[10] = is_signed;
  meet(in, 11, c, 4, [](Meeting &w) {
    int x[16][32], y[32][8];
    for (int l = 0; l < 32; ++l) for (int e = 0; e < 4; ++e) {
      int g = l / 4, t = l % 4;
      for (int r = 0; r < 4; ++r) {
        uint8_t byte = w.in[l][r] >> 8 * e;
        x[g + 8 * (r & 1)][4 * t + e + 16 * (r >> 1)] = w.in[l][10] ? (int)(int8_t)byte : (int)byte;
      }
      for (int r = 0; r < 2; ++r) y[4 * t + e + 16 * r][g] = (int8_t)(w.in[l][4 + r] >> 8 * e);
    }
    for (int l = 0; l < 32; ++l) for (int v = 0; v < 4; ++v) {
      int sum = (int)w.in[l][6 + v];
      for (int k = 0; k < 32; ++k) sum += x[l / 4 + 8 * (v >> 1)][k] * y[k][2 * (l % 4) + (v & 1)];
      w.out[l][v] = sum;
    }
  });
}
static void mma_s8(unsigned *c, const unsigned *a, const unsigned *b) { mma_8bit(c, a, b, true); }
static void tz_mma_u8s8(void *c, const void *a, const void *b) {
  mma_8bit((uint32_t *)c, (const uint32_t *)a, (const uint32_t *)b, false);
}
static void tz_ldmatrix4(void *out, const void *p) {
  if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned ldmatrix\n"); abort(); }
  uint32_t row[4]; memcpy(row, p, 16);
  meet(row, 4, (uint32_t *)out, 4, [](Meeting &w) {
    for (int l = 0; l < 32; ++l) for (int r = 0; r < 4; ++r) w.out[l][r] = w.in[r * 8 + l / 4][l % 4];
  });
}
static unsigned tz_movmatrix(unsigned x) { return tz_transpose(x); }
alignas(16) static const char zeros[16] = {};
static void cp_async_or_zero(void *to, const void *from, int bytes) {
  if (bytes != 0 && bytes != 16) { fprintf(stderr, "part of 16 bytes\n"); abort(); }
  tz_cp_async(to, bytes ? from : zeros, 16);
}
static void tz_lds128(void *out, const void *p) { memcpy(out, p, 16); }
static unsigned tz_lds32(const void *p) { return *(const unsigned *)p; }
static void tz_copy16(void *d, const void *p) { tz_load<4>(d, p); }
static void tz_sts32(void *p, unsigned v) { *(unsigned *)p = v; }
static void tz_ldcg4(void *r, const void *p) { memcpy(r, p, 16); }
static void tz_load_share(void *r, const void *p, int pitch, int back, int count) {
  if (back <= count) memcpy(r, (const float *)p - (long long)back * pitch, 16);
  else memset(r, 0, 16);
}
static int tz_slice(unsigned share, unsigned q, unsigned parts) {
  return (1 << (share + 1) * parts / q) - (1 << share * parts / q);
}
static bool tz_has(int units, int unit) { return units >> unit & 1; }
static void tz_opaque(void *) {}
static void tz_give(void *to, int bytes, const void *from, int units, int unit) {
  if (tz_has(units, unit)) memcpy((char *)to + bytes, from, 16);
}
static int of_first_lane(int x) {
  uint32_t out, in = x;
  meet(&in, 1, &out, 1, [](Meeting &w) { for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[0][0]; });
  return out;
}
static int tz_meet(int *word, int q) {  // the clock is a count of turns
  int seen = 0, got = 1;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    seen = add_acq_rel(word, 1);
    if ((seen & 255) == q - 1) got |= seen >> 16 << 1;
    else {
      int patience = 300;
      wait_until([&] { return (load_acquire(word) & 255) == q || --patience < 0; });
      got = (load_acquire(word) & 255) == q;
    }
  }
  got = of_first_lane(got);
  __syncwarp();
  return got;
}
static int tz_withdraw(int *word, int q, int share) {
  int seen = 0;
  __syncwarp();
  if (threadIdx.x % 32 == 0) seen = __atomic_fetch_or(word, 65536 << share, __ATOMIC_ACQ_REL);
  seen = of_first_lane(seen);
  __syncwarp();
  return (seen & 255) == q;
}
static int tz_turn_away(int *word) {
  return threadIdx.x % 32 ? 0 : __atomic_fetch_add(word, 256, __ATOMIC_RELAXED);
}
static void tz_depart(int *word, int q, int seen) {
  if (threadIdx.x % 32) return;
  if ((seen >> 8 & 255) == q - 1) __atomic_store_n(word, 0, __ATOMIC_RELAXED);
}
static void tz_load_part(void *r, const void *p, int elements, int bytes, int units, int unit) {
  if (tz_has(units, unit)) memcpy(r, (const char *)((const float *)p + elements) + bytes, 16);
  else memset(r, 0, 16);
}
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static void tz_addcg4i(void *r, const void *p) { for (int i = 0; i < 4; ++i) ((int *)r)[i] += ((const int *)p)[i]; }
static float tz_rescale(int acc, float s, float x, float b) { return fmaf((float)acc * s, x, b); }
static void tz_lqq_params(unsigned u, void *out) {
  unsigned *v = (unsigned *)out;
  for (int i = 0; i < 2; ++i) { v[2 * i] = u >> 16 * i & 255; v[2 * i + 1] = (u >> (16 * i + 8) & 255) * 0x01010101u; }
}
template <int SIZE> static void *tz_at(const void *p, int row, int pitch, int col, int ahead) {
  return (char *)p + SIZE * ((long long)row * pitch + col + ahead);
}
static void tz_store_ragged(void *d, const void *p, int count) {
  for (int i = 0; i < std::min(count, 8); ++i) ((uint16_t *)d)[i] = ((const uint16_t *)p)[i];
}
"""


def on_cpu(source: str) -> str:
    """CUDA text with the names of the emulation."""
    product = "tl::mma_sync<tl::DataType::kInt8, tl::DataType::kInt8, tl::DataType::kInt32, 16, 8, 32, false, true>"
    return source.replace(product, "mma_s8").replace("tz_cp_async(", "cp_async_or_zero(")


def emulate(weight, x, x_scales, schedule, folder, *, out_dtype, dequantization, bias):
    """y of one launch on the CPU, in an output that was NaN (int32: garbage)."""
    packed, (m, k) = pack(weight), x.shape
    params = dict(
        n=weight.n, k=k, group=weight.group_size, out_dtype=out_dtype, dequantization=dequantization,
        bias=bias is not None, **schedule.params(),
    )  # fmt: skip
    request = KernelRequest(
        "w4a8.multistage", f"{multistage.__name__}:build", tuple(params.items()), "sm_80", multistage.PASS_CONFIGS
    )
    source = on_cpu(cuda_text(request))
    gemm = multistage.Gemm(weight.n, k, weight.group_size, out_dtype, dequantization, bias is not None)
    kernel = CpuKernel(source, [EXTRA, gemm.converter.device_source], schedule.warps * 32, folder)
    problem = Gemm.of_bytes(weight.n, k, weight.group_size, gemm.out_bytes)
    space, flags = launch_sizes(schedule, problem, m)
    dtype = getattr(torch, out_dtype)
    y = torch.full((m, weight.n), -77 if gemm.raw else float("nan"), dtype=dtype)
    semaphores = torch.zeros(flags, dtype=torch.int32)
    grid = (schedule.tiles(problem, m), schedule.kc, 1)
    kernel(
        grid, X=x, W=packed.words, S=packed.channel_scales, XS=x_scales, RS=x.sum(1, dtype=torch.int32), B=bias, Y=y,
        WS=torch.full(space, 0x5A5A5A5A, dtype=torch.int32), SEM=semaphores, m=m,
        tiles=flags[0],
    )  # fmt: skip
    assert not semaphores.any()
    return y


CASES = {  # n, k, group, m, schedule, output, dequantization, bias
    "split k": (192, 656, 64, 37, Multistage(32, 4, 2, 3, kc=3), "int32", "xor", False),
    "token warps": (130, 288, 32, 100, Multistage(64, 8, 1, 2, token_warps=2), "int32", "unsigned", False),
    "float16": (200, 400, 128, 70, Multistage(64, 4, 2, 4, raster=2), "float16", "unsigned", True),
    "ragged": (67, 512, 64, 33, Multistage(32, 4, 2, 2, kc=2), "bfloat16", "xor", True),
}


@pytest.mark.parametrize("name", cases(CASES, ("float16",)))
def test_multistage(name, tmp_path):
    n, k, group, m, schedule, out_dtype, dequantization, with_bias = CASES[name]
    rng = torch.Generator().manual_seed(n + k)
    groups = -(-k // group)
    scales = torch.randint(1, 17, (n, groups), generator=rng)
    weight = QuantizedWeight.canonical(
        torch.randint(0, 16, (n, k), generator=rng),
        scales,
        (torch.rand(n, groups, generator=rng) * (256 - 15 * scales)).long(),
        torch.rand(n, generator=rng) * 1e-2 + 1e-3,
        group_size=group,
    )
    x = torch.randint(-128, 128, (m, k), generator=rng, dtype=torch.int8)
    x_scales = torch.rand(m, generator=rng) * 1e-3 + 1e-4
    bias = torch.randn(n, generator=rng) if with_bias else None
    y = emulate(weight, x, x_scales, schedule, tmp_path, out_dtype=out_dtype, dequantization=dequantization, bias=bias)
    exact = x.double() @ weight.bytes().double().T
    if out_dtype == "int32":
        assert torch.equal(y.double(), exact)
        return
    product = exact * weight.channel_scales.double() * x_scales.double()[:, None]
    bound = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[out_dtype] * (product + bias).abs() * 1.001
    bound += 2.0**-21 * (product.abs() + bias.abs()) + 2.0**-25
    assert bool(((y.double() - product - bias).abs() <= bound).all())
