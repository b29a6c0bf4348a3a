"""Attention: warps, cache pages, early starts, places of a ragged batch, codes."""

from __future__ import annotations

from terrazzo.ops.tiles.cuda.primitive import Primitive
from terrazzo.ops.tiles.cuda.text import prelude

_ALL = (
    Primitive(
        "warp",
        "TileLang has no movmatrix, and T.exp2 handles denormals",
        """\
// 8x8 matrix of 16-bit values, two in a lane, transposed in registers
__device__ __forceinline__ unsigned tz_transpose(unsigned x) {
  unsigned r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(x)); return r; }
__device__ __forceinline__ float tz_ex2(float x) {
  float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ bool tz_any(bool x) { return __any_sync(~0u, x); }
__device__ __forceinline__ float tz_xor_shuffle(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
// x of lane `from` modulo 32
__device__ __forceinline__ int tz_of_lane(int x, int from) { return __shfl_sync(~0u, x, from); }
__device__ __forceinline__ float tz_fma(float a, float b, float c) { return fmaf(a, b, c); }
// tanh from one exponential: exact to f32 rounding away from 0, and 2^-22 absolute near it
__device__ __forceinline__ float tz_tanh(float x) {
  return 1.f - __fdividef(2.f, 1.f + tz_ex2(2.8853900817779268f * x)); }
__device__ __forceinline__ float tz_log2(float x) { return log2f(x); }
""",
    ),
    Primitive(
        "compare",
        "TileLang asks an SMT solver about every integer condition it sees, in nine passes: 9/10 of the compile time",
        """\
__device__ __forceinline__ bool tz_less(int a, int b) { return a < b; }
__device__ __forceinline__ bool tz_differ(int a, int b) { return a != b; }
// all ones if a < b
__device__ __forceinline__ unsigned tz_less_mask(int a, int b) { return a < b ? ~0u : 0u; }
// whether `at` is one of the `span` integers right below `end`
__device__ __forceinline__ bool tz_among(int at, int end, int span) {
  return (unsigned)(end - 1 - at) < (unsigned)span; }
__device__ __forceinline__ int tz_min(int a, int b) { return min(a, b); }
__device__ __forceinline__ int tz_max(int a, int b) { return max(a, b); }
// bits of a number that is not negative
__device__ __forceinline__ int tz_bits(int a) { return 32 - __clz(a); }
__device__ __forceinline__ int tz_select(bool which, int a, int b) { return which ? a : b; }
""",
    ),
    Primitive(
        "address",
        "a cache may hold more than 2^31 words, and TileLang computes indices in 32 bits",
        """\
// word `at` of page `page`, pages `pitch` words apart
__device__ __forceinline__ void *tz_page(const void *p, int page, int pitch, int at) {
  return (int *)p + ((long long)page * pitch + at); }
__device__ __forceinline__ void *tz_at32(const void *p, int at) { return (int *)p + at; }
""",
    ),
    Primitive(
        "words",
        "loads of 1, 2 or 4 words into registers from shared or global memory, in program order",
        """\
template <int N> __device__ __forceinline__ void tz_load(void *out, const void *p) {
  if constexpr (N == 4) *(uint4 *)out = *(const uint4 *)p;
  else if constexpr (N == 2) *(uint2 *)out = *(const uint2 *)p;
  else *(unsigned *)out = *(const unsigned *)p;
}
__device__ __forceinline__ unsigned tz_load32(const void *p) { return *(const unsigned *)p; }
__device__ __forceinline__ void tz_store8(void *p, unsigned a, unsigned b) { *(uint2 *)p = make_uint2(a, b); }
__device__ __forceinline__ void tz_store16(void *p, const void *v) { __stcg((float4 *)p, *(const float4 *)v); }
__device__ __forceinline__ void tz_load16cg(void *v, const void *p) { *(float4 *)v = __ldcg((const float4 *)p); }
__device__ __forceinline__ float tz_loadcg(const void *p) { return __ldcg((const float *)p); }
""",
    ),
    Primitive(
        "early",
        "a kernel that starts before the one ahead of it has ended: TileLang's loads may be moved in front of the wait",
        """\
// past L1, where nothing of it stays
__device__ __forceinline__ int tz_peek(const void *p) {
  int v; asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ unsigned tz_read32(const void *p) {
  unsigned v; asm volatile("ld.global.u32 %0,[%1];" : "=r"(v) : "l"(p)); return v; }
__device__ __forceinline__ void tz_read128(void *out_, const void *p) {
  unsigned *r = (unsigned *)out_;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p)); }
// x, computed where this stands and not behind a wait
__device__ __forceinline__ int tz_now(int x) { asm volatile("" : "+r"(x)); return x; }
// a barrier of one arrival, all of whose copies have landed, as it was before the first of them
__device__ __forceinline__ void tz_rearm(void *bar) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0]; mbarrier.init.shared::cta.b64 [%0],1;"
               "fence.mbarrier_init.release.cluster; fence.proxy.async;" :: "r"(tz_smem(bar)) : "memory"); }
""",
    ),
    Primitive(
        "places",
        "TileLang has no sums over the lanes below a lane, and would read lengths in front of the wait",
        """\
// 128 of `count` lengths from number `base` on, four in a lane; -1 behind the last. NOW: past L1
template <bool NOW> __device__ __forceinline__ void tz_lengths(void *out, const void *lengths, int count, int base) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    int i = base + q * 32 + threadIdx.x % 32;
    const int *at = (const int *)lengths + i;
    ((int *)out)[q] = i >= count ? -1 : tz_max(0, NOW ? tz_peek(at) : (int)tz_read32(at)); }
}
// The work of CTA `place` of a ragged batch, as {sequence, split, its splits, place of the first, length}; 0 splits if
// there is none. A sequence has 1 .. `most` splits, one for each begun `total / shares` tokens or `least`; those beyond
// `reach` are not seen. So there are at most shares + count places. `held` are the first 128 lengths.
__device__ __forceinline__ void tz_place(void *out, const void *held, const void *lengths, int count, int reach,
                                         int place, int shares, int least, int most) {
  int *found = (int *)out, lane = threadIdx.x % 32, seen[4], before = 0;
  float total = 0.f;
#pragma unroll
  for (int q = 0; q < 4; ++q) seen[q] = ((const int *)held)[q];
  for (int base = 0; base < count; base += 128) {
    if (base) tz_lengths<false>(seen, lengths, count, base);
#pragma unroll
    for (int q = 0; q < 4; ++q) total += (float)tz_max(tz_min(seen[q], reach), 0);
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) total += tz_xor_shuffle(total, d);
  // a little more than a share, whatever the rounding of the sum
  int per = tz_max(least, (int)fminf(ceilf(total * 1.0005f / (float)shares), 1073741824.f));
  found[0] = found[1] = found[2] = found[3] = found[4] = 0;
  for (int base = 0; base < count && !found[2]; base += 128) {
    if (count > 128) tz_lengths<false>(seen, lengths, count, base);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (base + q * 32 >= count || found[2]) break;
      int cut = (int)(((unsigned)tz_min(seen[q], reach) + per - 1) / (unsigned)per);
      int n = seen[q] < 0 ? 0 : tz_max(1, tz_min(most, cut)), sum = n;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, sum, d); if (lane >= d) sum += v; }
      unsigned behind = __ballot_sync(~0u, place < before + sum);
      if (behind) {
        int at = __ffs(behind) - 1, own = tz_of_lane(n, at), end = before + tz_of_lane(sum, at);
        found[0] = base + q * 32 + at; found[1] = place - end + own; found[2] = own; found[3] = end - own;
        found[4] = tz_of_lane(seen[q], at);
      }
      before += tz_of_lane(sum, 31);
    }
  }
}
// whether a lane's four words are others than at another time
__device__ __forceinline__ bool tz_differ4(const void *a, const void *b) {
  const int *x = (const int *)a, *y = (const int *)b;
  return x[0] != y[0] || x[1] != y[1] || x[2] != y[2] || x[3] != y[3]; }
""",
    ),
    Primitive(
        "tiles",
        "16-bit rows go to registers as operand tiles, transposed or not, and packed words to runtime addresses",
        """\
__device__ __forceinline__ void tz_ldmatrix4_trans(void *out, const void *p) {
  unsigned *r = (unsigned *)out;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(tz_smem(p)));
}
// 16-bit value `at` of row `row`, rows `pitch` values apart
__device__ __forceinline__ void *tz_row16(const void *p, int row, int pitch, int at) {
  return (unsigned short *)p + ((long long)row * pitch + at); }
template <int N> __device__ __forceinline__ void tz_store(void *p, const void *v) {
  if constexpr (N == 4) *(uint4 *)p = *(const uint4 *)v;
  else if constexpr (N == 2) *(uint2 *)p = *(const uint2 *)v;
  else *(unsigned *)p = *(const unsigned *)v;
}
""",
    ),
    Primitive(
        "pairs",
        "TileLang's packed arithmetic takes vectors, not registers",
        """\
template <bool BF16> __device__ __forceinline__ unsigned tz_min2(unsigned a, unsigned b) {
  unsigned r;
  if constexpr (BF16) asm("min.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("min.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <bool BF16> __device__ __forceinline__ unsigned tz_max2(unsigned a, unsigned b) {
  unsigned r;
  if constexpr (BF16) asm("max.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("max.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ unsigned tz_xor_word(unsigned x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
""",
    ),
    Primitive(
        "codes",
        "quantizer.py to the bit: no contraction of a rounded difference, and quotients rounded once",
        """\
template <bool BF16> __device__ __forceinline__ unsigned tz_clamp2(float lo, float hi) {
  const float top = BF16 ? 3.3895313892515355e38f : 65504.f;
  return tz_pack2<BF16>(fminf(fmaxf(lo, -top), top), fminf(fmaxf(hi, -top), top));
}
// scale (low half) and zero of values lo .. hi; out = {scale, zero, 1 / scale or 0}. Adding 0 turns -0 into 0.
__device__ __forceinline__ unsigned tz_range(float lo, float hi, float levels, void *out_) {
  float *out = (float *)out_, zero = fminf(fmaxf(lo, -65504.f), 65504.f) + 0.f;
  out[1] = tz_unpack<false, 1>(tz_pack2<false>(0.f, zero));
  float scale = fminf(fmaxf(__fdiv_rn(hi - out[1], levels), 0.f), 65504.f) + 0.f;
  unsigned both = tz_pack2<false>(scale, zero);
  out[0] = tz_unpack<false, 0>(both);
  out[2] = out[0] > 0.f ? __fdiv_rn(1.f, out[0]) : 0.f;
  return both;
}
// bits of 2^23 + rint((x - z) / s), clamped to 0 .. top, half to even. r is 1 / s, rounded: a Newton step then ends at
// the correctly rounded quotient (Markstein), as s is an f16 number, whose quotients keep away from halves of a step
__device__ __forceinline__ unsigned tz_code(float x, float z, float s, float r, float top) {
  float a = x - z, q = a * r;
  q = fmaf(fmaf(-q, s, a), r, q);
  return __float_as_uint(fminf(fmaxf(q, 0.f), top) + 8388608.f);
}
// x / s, rounded once, for s in 2^-100 .. 2^100, or far beyond all codes: as CUDA divides such numbers, without the
// branch for others that would keep one quotient from the next
__device__ __forceinline__ float tz_quotient(float x, float s) {
  float r = __fdividef(1.f, s);
  r = fmaf(fmaf(-s, r, 1.f), r, r);
  float q = x * r, p = fmaf(fmaf(-q, s, x), r, q);
  p = fmaf(fmaf(-p, s, x), r, p);
  return fabsf(q) < 1e6f ? copysignf(p, x) : q;  // -0 / s is -0
}
// bits of 2^23 + 128 + rint(x), clamped to -127 .. 127
__device__ __forceinline__ unsigned tz_code8(float x) {
  return __float_as_uint(fminf(fmaxf(x, -127.f), 127.f) + 8388736.f); }
// e4m3 of x, clamped to +-448, half to even
__device__ __forceinline__ unsigned tz_e4m3(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short r; asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(0.f), "f"(x)); return r;
#else
  if (x != x) return 0x7Fu;
  unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
  x = fminf(fabsf(x), 448.f);
  unsigned u = __float_as_uint(x);
  unsigned normal = (u + 0x7FFFFu + (u >> 20 & 1u) >> 20) - 960u;          // exponent bias 127 -> 7
  unsigned small = __float_as_uint(x + 16384.f) - __float_as_uint(16384.f);  // ulp 2^-9
  return sign | (x < 0.015625f ? small : normal);
#endif
}
""",
    ),
    Primitive(
        "half2",
        "TileLang's packed arithmetic takes vectors, not registers of operands",
        """\
__device__ __forceinline__ unsigned tz_hmul2(unsigned a, unsigned b) {
  unsigned r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
// bits of an integer as f16
__device__ __forceinline__ unsigned tz_plain(unsigned x) {
  unsigned short r; asm("cvt.rn.f16.u32 %0,%1;" : "=h"(r) : "r"(x)); return r; }
__device__ __forceinline__ unsigned tz_hfma2(unsigned a, unsigned b, unsigned c) {
  unsigned r; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
""",
    ),
    Primitive(
        "swizzled",
        "operands of wgmma are written word by word in the byte order that T.gemm reads, which T.copy alone knows",
        """\
// two f16 at (row, col) of a K-major operand [rows, cols], in blocks of 64 columns with the 128-byte swizzle
__device__ __forceinline__ void tz_store_swizzled(void *p, int rows, int row, int col, unsigned v) {
  *(unsigned *)((char *)p + col / 64 * (rows * 128) + row * 128 + ((col % 64 * 2) ^ (row % 8 << 4))) = v; }
""",
    ),
)

PRIMITIVES = {p.name: p for p in _ALL}

BYTES_ON = """\
__device__ __forceinline__ void *tz_at8(const void *p, int at) { return (char *)p + at; }
"""


def attention_prelude(*names: str, extra: tuple[str, ...] = ()) -> str:
    """CUDA text of general primitives (by name), all of the attention primitives, then `extra` sources."""
    return prelude(*names, "cluster", extra=(*(p.source for p in _ALL), *extra))
