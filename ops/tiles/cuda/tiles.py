"""Tiles of mma.sync: addresses, ragged edges, sums that are scaled by token."""

MMA_TILES = """\
// element `ahead` of (row, col), SIZE bytes each, in 64-bit arithmetic: M * k may pass 2^31. It may lie outside the
// matrix if nothing is copied from there. `ahead` is a constant, apart so that copies share the rest
template <int SIZE> __device__ __forceinline__ void *tz_at(const void *p, int row, int pitch, int col, int ahead) {
  return (char *)p + SIZE * ((long long)row * pitch + col) + SIZE * ahead;
}
__device__ __forceinline__ void tz_store_ragged(void *dst, const void *src, int count) {
#pragma unroll
  for (int i = 0; i < 8; ++i) if (i < count) ((unsigned short *)dst)[i] = ((const unsigned short *)src)[i];
}
// 8x8 matrix of 16-bit values, two in a lane, transposed in registers: sm_80 has no stmatrix
__device__ __forceinline__ unsigned tz_movmatrix(unsigned a) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ void tz_sts32(void *p, unsigned v) { *(unsigned *)p = v; }
"""
"""Why not TileLang: indices of 64 bits, and no movmatrix."""
RAGGED = """\
// what cp.async does, for rows that are not aligned to 16 bytes
__device__ __forceinline__ void tz_copy_ragged(void *dst, const void *src, int bytes) {
  unsigned short r[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) r[i] = 2 * i < bytes ? ((const unsigned short *)src)[i] : 0;
  *(uint4 *)dst = make_uint4(r[0] | r[1] << 16, r[2] | r[3] << 16, r[4] | r[5] << 16, r[6] | r[7] << 16);
}
__device__ __forceinline__ bool tz_not_negative(int v) {
  asm volatile("" : "+r"(v));
  return v >= 0;
}
"""
"""Why not TileLang: rows that are not aligned to 16 bytes, and conditions kept from its solver."""
MMA_E4M3 = """\
// m16n8k32 of e4m3: c += f * (a b), f of tokens 2 t and 2 t + 1. One piece of asm: apart, products pile up in registers
__device__ __forceinline__ void tz_mma_e4m3_tokens(void *c_, const void *a_, const void *b_, float f0, float f1) {
  float *c = (float *)c_; const unsigned *a = (const unsigned *)a_, *b = (const unsigned *)b_;
  asm volatile("{ .reg .f32 d<4>;"
               "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {d0,d1,d2,d3},{%4,%5,%6,%7},{%8,%9},"
               "{%12,%12,%12,%12};"
               "fma.rn.f32 %0,d0,%10,%0; fma.rn.f32 %1,d1,%11,%1; fma.rn.f32 %2,d2,%10,%2; fma.rn.f32 %3,d3,%11,%3; }"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(f0), "f"(f1), "f"(0.0f));
}
// the same on sums that stay in the tensor core: c += a b
__device__ __forceinline__ void tz_mma_e4m3_sums(void *c_, const void *a_, const void *b_) {
  float *c = (float *)c_; const unsigned *a = (const unsigned *)a_, *b = (const unsigned *)b_;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
"""
"""Why not TileLang: it has no mma.sync of e4m3 on float32 sums, nor one whose products are scaled at once."""
MMA_E4M3_GROUPS = """\
// m16n8k32 of e4m3: c += f t (a b), f of a row, t of a token. One piece of asm: apart, products pile up in registers
__device__ __forceinline__ void tz_mma_e4m3_groups(
    void *c_, const void *a_, const void *b_, float f0, float f1, float t0, float t1) {
  float *c = (float *)c_; const unsigned *a = (const unsigned *)a_, *b = (const unsigned *)b_;
  asm volatile("{ .reg .f32 d<4>;"
               "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {d0,d1,d2,d3},{%4,%5,%6,%7},{%8,%9},"
               "{%14,%14,%14,%14};"
               "fma.rn.f32 %0,d0,%10,%0; fma.rn.f32 %1,d1,%11,%1; fma.rn.f32 %2,d2,%12,%2; fma.rn.f32 %3,d3,%13,%3; }"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(f0 * t0), "f"(f0 * t1),
                 "f"(f1 * t0), "f"(f1 * t1), "f"(0.0f));
}
"""
"""The same of groups of both operands."""
