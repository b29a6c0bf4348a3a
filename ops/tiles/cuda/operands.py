"""8-bit operands and warpgroups of their own."""

from terrazzo.ops.tiles.cuda.primitive import Primitive

TABLE = (
    Primitive(
        "int8",
        "8-bit operands: packed parameters, the mixed-sign mma.sync, exact rescaling of int32 sums",
        """\
// (s, a) of rows g and g + 8 in the bytes of a word -> factor and four-lane offset of each row
__device__ __forceinline__ void tz_lqq_params(unsigned u, void *out) {
  unsigned *v = (unsigned *)out;
  v[0] = __byte_perm(u, 0, 0x4440); v[1] = __byte_perm(u, 0, 0x1111);
  v[2] = __byte_perm(u, 0, 0x4442); v[3] = __byte_perm(u, 0, 0x3333);
}
// m16n8k32 with an unsigned A operand
__device__ __forceinline__ void tz_mma_u8s8(void *d_, const void *a_, const void *b_) {
  int *d = (int *)d_; const unsigned *a = (const unsigned *)a_, *b = (const unsigned *)b_;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// four int32 sums of another CTA, past the L1 that may hold stale lines
__device__ __forceinline__ void tz_addcg4i(void *r_, const void *p) {
  int4 *r = (int4 *)r_, v = __ldcg((const int4 *)p);
  r->x += v.x; r->y += v.y; r->z += v.z; r->w += v.w;
}
// the same bits in every program: acc * s and its product with x are rounded, the sum with b is fused
__device__ __forceinline__ float tz_rescale(int acc, float s, float x, float b) {
  return __fmaf_rn(__fmul_rn((float)acc, s), x, b);
}
__device__ __forceinline__ void tz_lds64(void *out, const void *p) { *(uint2 *)out = *(const uint2 *)p; }
""",
    ),
    Primitive(
        "rows_out",
        "16 bytes of a matrix whose rows may not be multiples of 16 bytes: a branch on a constant, not on a pointer",
        """\
// 16 bytes of row `row` of a matrix with n columns: at once, or (rows not 16-byte aligned) element by element up to n
template <typename T, bool WHOLE> __device__ __forceinline__ void tz_store_row(
    void *y, int row, int n, int col, const void *src) {
  T *p = (T *)y + (long long)row * n + col;
  if constexpr (WHOLE) *(uint4 *)p = *(const uint4 *)src;
  else {
#pragma unroll
    for (int e = 0; e < 16 / (int)sizeof(T); ++e) if (col + e < n) p[e] = ((const T *)src)[e];
  }
}
""",
    ),
    Primitive(
        "e4m3",
        "8-bit floats: mma.sync whose sums start at zero and are scaled at once, rescaling of float sums as tz_rescale",
        """\
// m16n8k32: c += f * (a b), f of rows g and g + 8. One piece of asm: apart, products pile up in registers
__device__ __forceinline__ void tz_mma_e4m3(void *c_, const void *a_, const void *b_, float f0, float f1) {
  float *c = (float *)c_; const unsigned *a = (const unsigned *)a_, *b = (const unsigned *)b_;
  asm volatile("{ .reg .f32 d<4>;"
               "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {d0,d1,d2,d3},{%4,%5,%6,%7},{%8,%9},"
               "{%12,%12,%12,%12};"
               "fma.rn.f32 %0,d0,%10,%0; fma.rn.f32 %1,d1,%10,%1; fma.rn.f32 %2,d2,%11,%2; fma.rn.f32 %3,d3,%11,%3; }"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(f0), "f"(f1), "f"(0.0f));
}
__device__ __forceinline__ float tz_rescale(float acc, float s, float x, float b) {
  return __fmaf_rn(__fmul_rn(acc, s), x, b);
}
""",
    ),
    Primitive(
        "warpgroup",
        "warpgroups that work on tiles of their own need barriers and flags with a runtime index",
        """\
// keeps shared-memory loads behind TileLang's mbarrier waits, whose asm has no memory clobber
__device__ __forceinline__ void tz_fence() { asm volatile("" ::: "memory"); }
__device__ __forceinline__ void tz_wg_sync(int id) { asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory"); }
// whether x holds in any thread of the 128; a barrier
__device__ __forceinline__ bool tz_wg_any(int id, bool x) {
  int r;
  asm volatile("{ .reg .pred p, q; setp.ne.s32 p,%2,0; bar.red.or.pred q,%1,128,p; selp.s32 %0,1,0,q; }"
               : "=r"(r) : "r"(id), "r"((int)x) : "memory");
  return r; }
// an integer that the compiler knows nothing about: what depends on it is not hoisted from a loop, nor computed ahead
__device__ __forceinline__ void tz_opaque(void *x) { asm volatile("" : "+r"(*(int *)x)); }
// the warpgroup's earlier stores are visible to whoever sees the flag
__device__ __forceinline__ void tz_signal(int *flag, int id) {
  tz_wg_sync(id);
  if (threadIdx.x % 128 == 0) asm volatile("st.release.gpu.s32 [%0],%1;" :: "l"(flag), "r"(1) : "memory");
}
// waits for `count` flags `stride` apart, a thread for each, and takes them down again
__device__ __forceinline__ void tz_await(int *flag, int count, int stride, int id) {
  for (int i = threadIdx.x % 128; i < count; i += 128) {
    int v, *f = flag + i * stride;
    do { asm volatile("ld.acquire.gpu.s32 %0,[%1];" : "=r"(v) : "l"(f) : "memory"); } while (!v);
    *f = 0;
  }
  tz_wg_sync(id);
}
""",
    ),
    Primitive(
        "turns",
        "TileLang's named barriers have no form that only arrives",
        """\
// a warpgroup issues its wgmmas when its turn has come, and passes it on: a named barrier of both for each turn
__device__ __forceinline__ void tz_turn_wait(int wg) { asm volatile("bar.sync %0, 256;" :: "r"(wg + 8) : "memory"); }
__device__ __forceinline__ void tz_turn_pass(int wg) { asm volatile("bar.arrive %0, 256;" :: "r"(wg + 8) : "memory"); }
""",
    ),
)
