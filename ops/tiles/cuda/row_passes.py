"""One pass over a row in registers."""

from terrazzo.ops.tiles.cuda.primitive import Primitive

TABLE = (
    Primitive(
        "rows",
        "one pass over a row in registers: TileLang has neither maxima that keep NaN nor conversions to packed bytes",
        """\
__device__ __forceinline__ void tz_stream16(void *out_, const void *p) {
  unsigned *r = (unsigned *)out_;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
}
// four words that the compiler knows nothing about: it keeps them, not what was made of them, in registers
__device__ __forceinline__ void tz_row_keep(void *x_) {
  unsigned *x = (unsigned *)x_;
  asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3]));
}
// gains of 8 columns; LATE: not before a barrier that stands in front, whatever ptxas would gain by it
template <bool LATE> __device__ __forceinline__ void tz_row_gain(void *g_, const void *p) {
  float *g = (float *)g_;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    if constexpr (LATE)
      asm volatile("ld.global.v4.f32 {%0,%1,%2,%3},[%4];"
                   : "=f"(g[i]), "=f"(g[i + 1]), "=f"(g[i + 2]), "=f"(g[i + 3]) : "l"((const float *)p + i) : "memory");
    else *(float4 *)(g + i) = __ldg((const float4 *)p + i / 4);
  }
}
// 8 values of 16 bits as floats; GAIN 1: times the gains g of their columns, 2: such products are in g
template <bool BF16, int GAIN> __device__ __forceinline__ void tz_row_values(float *v, const void *x_, const void *g_) {
  const unsigned *x = (const unsigned *)x_; const float *g = (const float *)g_;
#pragma unroll
  for (int i = 0; i < 4; ++i) { v[2 * i] = tz_unpack<BF16, 0>(x[i]); v[2 * i + 1] = tz_unpack<BF16, 1>(x[i]); }
#pragma unroll
  for (int i = 0; i < 8; ++i) if constexpr (GAIN) v[i] = GAIN == 2 ? g[i] : v[i] * g[i];
}
// 8 values: their largest magnitude joins m[0] (NaN wins), with NORM their squares without gain join m[1]; their
// products with the gains take the place of these, unless the gains are to KEEP theirs
template <bool BF16, int GAIN, bool NORM, bool KEEP = false>
__device__ __forceinline__ void tz_row_scan(void *m_, const void *x, void *g) {
  float v[8], *m = (float *)m_;
  if constexpr (NORM) {
    tz_row_values<BF16, 0>(v, x, g);
#pragma unroll
    for (int i = 0; i < 8; ++i) m[1] = fmaf(v[i], v[i], m[1]);
  }
  tz_row_values<BF16, GAIN>(v, x, g);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    asm("max.NaN.f32 %0,%0,%1;" : "+f"(m[0]) : "f"(fabsf(v[i])));
    if constexpr (GAIN && !KEEP) ((float *)g)[i] = v[i];
  }
}
// the largest magnitude of WORDS pairs of 16-bit values, in pairs (NaN wins)
template <bool BF16, int WORDS> __device__ __forceinline__ float tz_row_largest(const void *x_) {
  const unsigned *x = (const unsigned *)x_;
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    unsigned pair = x[i] & 0x7fff7fffu;
    if constexpr (BF16) asm("max.NaN.bf16x2 %0,%0,%1;" : "+r"(most) : "r"(pair));
    else asm("max.NaN.f16x2 %0,%0,%1;" : "+r"(most) : "r"(pair));
  }
  float low = tz_unpack<BF16, 0>(most), high = tz_unpack<BF16, 1>(most);
  asm("max.NaN.f32 %0,%0,%1;" : "+f"(low) : "f"(high));
  return low;
}
// m[0] and, with NORM, m[1] of all threads of a row of WARPS warps; the bits of magnitudes order as integers
template <int WARPS, bool NORM> __device__ __forceinline__ void tz_row_reduce(void *m_, void *shared_) {
  float *m = (float *)m_, *shared = (float *)shared_;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 0; step < (WARPS > 1 ? 2 : 1); ++step) {
    m[0] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(m[0])));
    if constexpr (NORM) for (int d = 16; d; d /= 2) m[1] += __shfl_xor_sync(~0u, m[1], d);
    if (step || WARPS == 1) break;
    if (lane == 0) { shared[warp] = m[0]; if constexpr (NORM) shared[WARPS + warp] = m[1]; }
    __syncthreads();
    m[0] = lane < WARPS ? shared[lane] : 0.0f;
    if constexpr (NORM) m[1] = lane < WARPS ? shared[WARPS + lane] : 0.0f;
  }
}
// 8 values times `inverse`, rounded half to even, as 8 bytes; their sum joins sum[0]
template <bool BF16, int GAIN> __device__ __forceinline__ void tz_row_quantize(
    void *q, void *sum, const void *x, const void *g, float inverse) {
  float v[8]; unsigned b[8], w[2];
  tz_row_values<BF16, GAIN>(v, x, g);
#pragma unroll
  for (int i = 0; i < 8; ++i) b[i] = __float_as_uint(fmaf(v[i], inverse, 12582912.0f));  // 1.5 * 2^23: ulp 1
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned lo = __byte_perm(b[4 * i], b[4 * i + 1], 0x0040), hi = __byte_perm(b[4 * i + 2], b[4 * i + 3], 0x0040);
    w[i] = __byte_perm(lo, hi, 0x5410);
    *(int *)sum = __dp4a((int)w[i], 0x01010101, *(int *)sum);
  }
  *(uint2 *)q = make_uint2(w[0], w[1]);
}
// the sum over all threads of a row of WARPS warps; only its first warp gets it
template <int WARPS> __device__ __forceinline__ int tz_row_sum(int sum, void *shared_) {
  int *shared = (int *)shared_, lane = threadIdx.x % 32;
  sum = __reduce_add_sync(~0u, sum);
  if constexpr (WARPS > 1) {
    if (lane == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) sum = __reduce_add_sync(~0u, lane < WARPS ? shared[lane] : 0);
  }
  return sum;
}
""",
    ),
    Primitive(
        "prefetch",
        "TileLang has no prefetch: bytes on their way from DRAM to L2, where later writes of others still change them",
        """\
// `bytes`, a multiple of 16, from a 16-byte aligned address
__device__ __forceinline__ void tz_prefetch(const void *p, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" :: "l"(p), "r"(bytes) : "memory");
}
""",
    ),
    Primitive(
        "e4m3_rows",
        "rows of e4m3 codes: TileLang converts single values, not packed pairs",
        """\
// 8 values times `inverse`, rounded half to even, as 8 bytes of e4m3; there is no sum of codes
template <bool BF16, int GAIN> __device__ __forceinline__ void tz_row_e4m3(
    void *q, void *, const void *x, const void *g, float inverse) {
  float v[8]; unsigned short p[4];
  tz_row_values<BF16, GAIN>(v, x, g);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;"
        : "=h"(p[i]) : "f"(__fmul_rn(v[2 * i + 1], inverse)), "f"(__fmul_rn(v[2 * i], inverse)));
  *(uint2 *)q = make_uint2(p[0] | (unsigned)p[1] << 16, p[2] | (unsigned)p[3] << 16);
}
""",
    ),
)
