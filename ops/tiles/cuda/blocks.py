"""W4Ax: blocks of a row that are quantized, scaled and handed on."""

FLAGS = """\
// the CTA's earlier stores are visible to whoever sees the flag
__device__ __forceinline__ void tz_cta_signal(int *flag) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("st.release.gpu.s32 [%0],%1;" :: "l"(flag), "r"(1) : "memory");
}
// waits for `count` flags in a row, a thread for each, and takes them down again
__device__ __forceinline__ void tz_cta_await(int *flag, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    int v;
    do { asm volatile("ld.acquire.gpu.s32 %0,[%1];" : "=r"(v) : "l"(flag + i) : "memory"); } while (!v);
    flag[i] = 0;
  }
  __syncthreads();
}
"""
"""Why not TileLang: a barrier of the CTA and a flag are one function; T.atomic_load asks for an element of a buffer."""
ROW_BLOCKS = """\
// 16 bytes of a row: to shared memory; with NORM the squares of its 8 values join sum[0]
template <bool BF16, bool NORM> __device__ __forceinline__ void tz_row_stage(void *to, void *sum_, const void *x_) {
  const unsigned *x = (const unsigned *)x_;
  if constexpr (NORM) {
    float *sum = (float *)sum_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float lo = tz_unpack<BF16, 0>(x[i]), hi = tz_unpack<BF16, 1>(x[i]);
      sum[0] = fmaf(lo, lo, sum[0]); sum[0] = fmaf(hi, hi, sum[0]);
    }
  }
  *(uint4 *)to = *(const uint4 *)x;
}
// the sum over all threads; every thread gets it, and the row in shared memory is complete
template <int WARPS> __device__ __forceinline__ float tz_cta_sum(float sum, void *shared_) {
  float *shared = (float *)shared_; int lane = threadIdx.x % 32;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < WARPS ? shared[lane] : 0.0f;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}
__device__ __forceinline__ void tz_ldg16(void *out, const void *p) { *(int4 *)out = __ldg((const int4 *)p); }
// four values of a row: at `at` and on, or where a permutation says (negative: 0), times their gains
template <bool BF16, bool PERM, bool GAIN> __device__ __forceinline__ void tz_gather4(
    void *v_, const void *row_, int at, const void *order, const void *gain) {
  float *v = (float *)v_; const unsigned short *row = (const unsigned short *)row_;
  if constexpr (PERM) {
    int4 p = *(const int4 *)order;
    v[0] = p.x < 0 ? 0.0f : tz_unpack<BF16, 0>(row[p.x]); v[1] = p.y < 0 ? 0.0f : tz_unpack<BF16, 0>(row[p.y]);
    v[2] = p.z < 0 ? 0.0f : tz_unpack<BF16, 0>(row[p.z]); v[3] = p.w < 0 ? 0.0f : tz_unpack<BF16, 0>(row[p.w]);
  } else {
    uint2 x = *(const uint2 *)(row + at);
    v[0] = tz_unpack<BF16, 0>(x.x); v[1] = tz_unpack<BF16, 1>(x.x);
    v[2] = tz_unpack<BF16, 0>(x.y); v[3] = tz_unpack<BF16, 1>(x.y);
  }
  if constexpr (GAIN) {
    float4 g = *(const float4 *)gain;
    v[0] *= g.x; v[1] *= g.y; v[2] *= g.z; v[3] *= g.w;
  }
}
// largest magnitude of the four values of every lane; NaN wins: the bits of magnitudes order as integers
__device__ __forceinline__ float tz_warp_largest(const void *v_) {
  const float *v = (const float *)v_; unsigned m = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) m = max(m, __float_as_uint(fabsf(v[i])));
  return __uint_as_float(__reduce_max_sync(~0u, m));
}
// largest of shared[lo .. hi), for every lane
__device__ __forceinline__ float tz_largest_of(const void *shared, int lo, int hi) {
  unsigned m = 0;
  for (int i = lo + threadIdx.x % 32; i < hi; i += 32) m = max(m, ((const unsigned *)shared)[i]);
  return __uint_as_float(__reduce_max_sync(~0u, m));
}
// four values times `inverse`, half to even, as bytes or (NIBBLES) as nibbles; with CLAMP kept inside -qmax .. qmax,
// with TIMES multiplied by an integer afterwards
template <bool NIBBLES, bool CLAMP, bool TIMES> __device__ __forceinline__ void tz_store_codes(
    void *to, const void *v_, float inverse, float qmax, float times) {
  const float *v = (const float *)v_; unsigned b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x = fmaf(v[i], inverse, 12582912.0f);  // 1.5 * 2^23: ulp 1
    if constexpr (CLAMP) {
      if (v[i] * inverse > qmax) x = 12582912.0f + qmax;
      if (v[i] * inverse < -qmax) x = 12582912.0f - qmax;
    }
    if constexpr (TIMES) x = fmaf(x - 12582912.0f, times, 12582912.0f);
    b[i] = __float_as_uint(x);
  }
  if constexpr (NIBBLES)
    *(unsigned short *)to = (b[0] & 15) | (b[1] & 15) << 4 | (b[2] & 15) << 8 | (b[3] & 15) << 12;
  else
    *(unsigned *)to = __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410);
}
"""
"""Why not TileLang: maxima that keep NaN, warp reductions, and conversions to packed nibbles and bytes."""
BLOCK_SCALES = """\
// s32 sums of a block times the scale of their token and of their row, added to f32 sums
__device__ __forceinline__ float tz_scaled(float y, float sum, float token, float row) {
  return fmaf(sum, token * row, y);
}
// two bfloat16 scales: of row g and of row g + 8
__device__ __forceinline__ void tz_row_scales(void *s_, unsigned u) {
  float *s = (float *)s_;
  s[0] = __uint_as_float(u << 16); s[1] = __uint_as_float(u & 0xffff0000u);
}
// multipliers of row g and of row g + 8, the first byte of each record
__device__ __forceinline__ void tz_row_multipliers(void *s_, unsigned u) {
  float *s = (float *)s_;
  s[0] = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7440)) - 8388608.0f;  // 2^23 and a byte, without it
  s[1] = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7442)) - 8388608.0f;
}
"""
"""Why not TileLang: reinterpreted halves of a word; the association of the product is part of the result's bits."""
MMA_S4 = """\
__device__ __forceinline__ void tz_mma_s4(void *d_, const void *a_, const void *b_) {
  int *d = (int *)d_; const unsigned *a = (const unsigned *)a_, *b = (const unsigned *)b_;
  asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
"""
"""Why not TileLang: its ptx_mma counts the offsets of int4 operands in half registers."""
