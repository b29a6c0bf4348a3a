"""Named CUDA primitives that tile programs call where TileLang 0.1.15 has no form of its own.

Each is a few lines long and says in `why` what TileLang cannot express. A program asks for the ones it uses with
`prelude(...)` and calls them with ``T.call_extern``. Pointers are ``void *`` because TileLang types a shared buffer by
its pool, not by its element.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Primitive:
    """One device function (or a small family of templates) and the reason for its existence."""

    name: str
    why: str
    source: str


_ADDRESS = """\
__device__ __forceinline__ unsigned tz_smem(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
"""

_ALL = (
    Primitive(
        "cp_async",
        "warp-private cp.async rings: TileLang pipelines are per CTA, and its cp.async wrappers do not clobber memory",
        """\
// 16 bytes global -> shared; the bytes past `bytes` (0..16) become zero
__device__ __forceinline__ void tz_cp_async(void *dst, const void *src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;"
               :: "r"(tz_smem(dst)), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tz_cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// the calling warp sees all but its newest N groups, written by any of its lanes
template <int N> __device__ __forceinline__ void tz_cp_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); __syncwarp();
}
__device__ __forceinline__ void tz_zero16(void *p) { *(uint4 *)p = make_uint4(0, 0, 0, 0); }
""",
    ),
    Primitive(
        "prefetch_line",
        "TileLang has no prefetch: what an epilogue reads once would cost it a trip to DRAM",
        """\
// the line of an address in global memory to L2
__device__ __forceinline__ void tz_prefetch_line(const void *p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
""",
    ),
    Primitive(
        "lds",
        "loads that must stay between the asm of a hand-written ring: T.copy would add a block barrier",
        """\
__device__ __forceinline__ void tz_lds128(void *out, const void *p) { *(uint4 *)out = *(const uint4 *)p; }
__device__ __forceinline__ unsigned tz_lds32(const void *p) { return *(const unsigned *)p; }
__device__ __forceinline__ void tz_copy16(void *d, const void *p) { *(uint4 *)d = *(const uint4 *)p; }
__device__ __forceinline__ void tz_syncwarp() { __syncwarp(); }
__device__ __forceinline__ unsigned tz_lds16_at(const void *p, int i) { return ((const unsigned short *)p)[i]; }
""",
    ),
    Primitive(
        "place",
        "ptxas makes a stage's addresses anew for every load and barrier, in turns of the scheduler that wgmma leaves",
        """\
// an address in shared memory that stays in a register: the compiler does not know how it was made
__device__ __forceinline__ unsigned tz_place(const void *p) {
  unsigned at = tz_smem(p);
  asm volatile("" : "+r"(at));
  return at;
}
// what a wgmma descriptor says, for sums in 64 bits: one instruction each
template <class D> __device__ __forceinline__ unsigned long long tz_matrix(const D &descriptor) {
  unsigned long long at = descriptor.desc_;
  asm volatile("" : "+l"(at));
  return at;
}
__device__ __forceinline__ void tz_lds128(void *out, unsigned at) {
  unsigned *r = (unsigned *)out;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ unsigned tz_lds32(unsigned at) {
  unsigned r;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(r) : "r"(at));
  return r;
}
__device__ __forceinline__ unsigned tz_lds16(unsigned at) {
  unsigned short r;
  asm volatile("ld.shared.u16 %0,[%1];" : "=h"(r) : "r"(at));
  return r;
}
// an mbarrier's phase of this parity is complete, and what was written for it is seen
__device__ __forceinline__ void tz_wait(unsigned barrier, int parity) {
  asm volatile("{\\n.reg .pred p;\\nagain: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\\n@!p bra again;\\n}"
               :: "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void tz_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" :: "r"(barrier) : "memory");
}
""",
    ),
    Primitive(
        "lds64",
        "as lds and place, of eight bytes",
        """\
__device__ __forceinline__ void tz_lds64(void *out, const void *p) { *(uint2 *)out = *(const uint2 *)p; }
__device__ __forceinline__ void tz_lds64(void *out, unsigned at) {
  unsigned *r = (unsigned *)out; asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
}
""",
    ),
    Primitive(
        "ldmatrix",
        "T.ptx_ldmatrix takes access pointers only inside its own pipelines; this one orders with the rings above",
        """\
__device__ __forceinline__ void tz_ldmatrix4(void *out, const void *p) {
  unsigned *r = (unsigned *)out;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(tz_smem(p)));
}
""",
    ),
    Primitive(
        "stmatrix",
        "operand fragments go back to shared memory as they are, one instruction for four registers",
        """\
__device__ __forceinline__ void tz_stmatrix4(void *p, const void *a_) {
  const unsigned *a = (const unsigned *)a_;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};"
               :: "r"(tz_smem(p)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
""",
    ),
    Primitive(
        "stmatrix_trans",
        "T.copy stores a transposed accumulator with scalar 2-byte stores",
        """\
__device__ __forceinline__ void tz_stmatrix4_trans(void *p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};"
               :: "r"(tz_smem(p)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
""",
    ),
    Primitive(
        "pack",
        "TileLang converts fragments through T.copy only; these convert accumulators and parameters in place",
        """\
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <bool BF16> __device__ __forceinline__ unsigned tz_pack2(float lo, float hi) {
  if constexpr (BF16) { __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi); return *(unsigned *)&v; }
  else { half2 v = __floats2half2_rn(lo, hi); return *(unsigned *)&v; }
}
// 16-bit value in the low (HI = 0) or high half of a word -> float
template <bool BF16, int HI> __device__ __forceinline__ float tz_unpack(unsigned v) {
  if constexpr (BF16) return __uint_as_float(HI ? (v & 0xffff0000u) : (v << 16));
  else return __half2float(__ushort_as_half((unsigned short)(HI ? v >> 16 : v)));
}
""",
    ),
    Primitive(
        "multicast",
        "T.tma_copy multicasts only from the lowest rank; here each CTA of the cluster fetches its share of the rows",
        """\
__device__ __forceinline__ void tz_bulk_multicast(void *dst, const void *src, int bytes, void *bar, int mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0],[%1],%2,[%3],%4;"
               :: "r"(tz_smem(dst)), "l"(src), "r"(bytes), "r"(tz_smem(bar)), "h"((short)mask) : "memory");
}
""",
    ),
    Primitive(
        "cluster",
        "TileLang's copies between the CTAs of a cluster take whole tiles, and one thread for each",
        """\
// arrives at the mbarrier that CTA `rank` of the cluster has where this one has `bar`
__device__ __forceinline__ void tz_arrive_at(const void *bar, int rank) {
  asm volatile("{ .reg .b32 b; mapa.shared::cluster.u32 b,%0,%1;"
               " mbarrier.arrive.release.cluster.shared::cluster.b64 _,[b]; }"
               :: "r"(tz_smem(bar)), "r"(rank) : "memory"); }
// tz_wait by a warp whose lanes stay together: behind the plain loop ptxas keeps nothing in uniform registers
__device__ __forceinline__ void tz_wait_together(unsigned barrier, int parity) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    done = __reduce_min_sync(~0u, done);
  } while (!done);
}
__device__ __forceinline__ void *tz_past(void *p, int bytes) { return (char *)p + bytes; }
// 16 or 8 bytes to where CTA `rank` of the cluster has what this one has at p, counted by that CTA's barrier
__device__ __forceinline__ void tz_send16(void *p, int rank, const void *v, const void *bar) {
  const uint4 x = *(const uint4 *)v;
  asm volatile("{ .reg .b32 a, b; mapa.shared::cluster.u32 a,%0,%1; mapa.shared::cluster.u32 b,%2,%1;"
               " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a],{%3,%4,%5,%6},[b]; }"
               :: "r"(tz_smem(p)), "r"(rank), "r"(tz_smem(bar)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory"); }
__device__ __forceinline__ void tz_send8(void *p, int rank, float x, float y, const void *bar) {
  asm volatile("{ .reg .b32 a, b; mapa.shared::cluster.u32 a,%0,%1; mapa.shared::cluster.u32 b,%2,%1;"
               " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [a],{%3,%4},[b]; }"
               :: "r"(tz_smem(p)), "r"(rank), "r"(tz_smem(bar)), "r"(__float_as_uint(x)), "r"(__float_as_uint(y))
               : "memory"); }
""",
    ),
    Primitive(
        "uniform",
        "ptxas keeps descriptors in uniform registers only where it knows that all lanes have them, as of a reduction",
        """\
__device__ __forceinline__ int tz_uniform(int x) { return __reduce_min_sync(~0u, x); }
""",
    ),
    Primitive(
        "bulk",
        "1-D bulk copies from runtime addresses: T.tma_copy turns them into tensor maps when it cannot prove bounds",
        """\
__device__ __forceinline__ void tz_bulk(void *dst, const void *src, int bytes, void *bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(tz_smem(dst)), "l"(src), "r"(bytes), "r"(tz_smem(bar)) : "memory");
}
""",
    ),
    Primitive(
        "bulk_at",
        "the same where extents come with the launch: an index of three dimensions is 64-bit products and bounds",
        """\
__device__ __forceinline__ void tz_bulk_at(void *dst, const void *base, int at, int bytes, void *bar) {
  tz_bulk(dst, (const char *)base + (long long)at * 16, bytes, bar);
}
""",
    ),
    Primitive(
        "semaphore",
        "deterministic split-K: release/acquire counters in global memory, which TileLang has no form for",
        """\
// every thread's earlier stores are visible before the count rises; true for the `n`-th arrival, which resets it
__device__ __forceinline__ bool tz_last_arrival(int *sem, int n) {
  __shared__ int last;
  __syncthreads();
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;" : "=r"(before) : "l"(sem) : "memory");
    last = before == n - 1;
    if (last) *sem = 0;
  }
  __syncthreads();
  return last;
}
// four partial sums of another CTA, past the L1 that may hold stale lines
__device__ __forceinline__ void tz_ldcg4(void *r, const void *p) { *(float4 *)r = __ldcg((const float4 *)p); }
// the same of the CTA `back` before this one, whose sums are at p; zeros where there are fewer than `back`
__device__ __forceinline__ void tz_load_share(void *r_, const void *p, int pitch, int back, int count) {
  unsigned *r = (unsigned *)r_;
  asm volatile("{ .reg .pred v; setp.le.s32 v,%5,%6; mov.b32 %0,0; mov.b32 %1,0; mov.b32 %2,0; mov.b32 %3,0;"
               "@v ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4]; }"
               : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
               : "l"((const float *)p - (long long)back * pitch), "r"(back), "r"(count));
}
__device__ __forceinline__ void tz_addcg4(void *r_, const void *p) {
  float4 *r = (float4 *)r_, v = __ldcg((const float4 *)p);
  r->x += v.x; r->y += v.y; r->z += v.z; r->w += v.w;
}
""",
    ),
    Primitive(
        "quotient",
        "a division by a runtime value is 30 instructions one after the other, and a CTA's plan takes a chain of them",
        """\
// n / d for 0 <= n, 0 < d and a quotient below 2^22: what float32 says is off by one at most. Opaque: no part of it is
// computed before the main loop and kept in a register
__device__ __forceinline__ int tz_quotient(int n, int d) {
  float r;
  asm volatile("" : "+r"(n), "+r"(d));
  asm volatile("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"((float)d));
  int q = (int)((float)n * r), rest = n - q * d;
  return q + (rest >= d) - (rest < 0);
}
""",
    ),
    Primitive(
        "exchange",
        "CTAs that part the sum of a tile: a word for each warp counts arrivals (bits 0-7), departures and withdrawals",
        """\
// units of the `share`-th of q slices of a tile of `parts` units, a bit for each
__device__ __forceinline__ int tz_slice(unsigned share, unsigned q, unsigned parts) {
  return (int)((1u << (share + 1) * parts / q) - (1u << share * parts / q));
}
__device__ __forceinline__ bool tz_has(int units, int unit) { return units >> unit & 1; }
// an accumulator vector of unit `unit` goes `bytes` past `to` if that is one of `units`
__device__ __forceinline__ void tz_give(void *to, int bytes, const void *from, int units, int unit) {
  if (tz_has(units, unit)) *(uint4 *)((char *)to + bytes) = *(const uint4 *)from;
}
// the warp's part is written: 1 once those of all q are, with a bit more for each withdrawal; 0 after some 60 us.
// All lanes wait, by reductions: after a loop of one lane, or a shuffle, ptxas would not know that the warp goes on as
// one, and would keep nothing of the main loop in uniform registers
__device__ __forceinline__ int tz_meet(int *word, int q) {
  int seen = 0, got;
  bool first = threadIdx.x % 32 == 0;
  __syncwarp();
  if (first) asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;" : "=r"(seen) : "l"(word) : "memory");
  seen = __reduce_or_sync(~0u, seen);
  if ((seen & 255) == q - 1) got = 1 | seen >> 16 << 1;
  else {
    long long begin = clock64();
    do {
      seen = 0;
      if (first) {
        asm volatile("ld.acquire.gpu.global.s32 %0,[%1];" : "=r"(seen) : "l"(word) : "memory");
        if ((seen & 255) != q && clock64() - begin > 100000) seen |= 1 << 31;
      }
      seen = __reduce_or_sync(~0u, seen);
    } while (seen >= 0 && (seen & 255) != q);
    got = seen >= 0;
  }
  __syncwarp();  // what the first lane has acquired, the others see
  return got;
}
// the warp's slice is written too, and left to whoever comes last; 1 if all had come, so that nobody would add it
__device__ __forceinline__ int tz_withdraw(int *word, int q, int share) {
  int seen = 0;
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("atom.acq_rel.gpu.global.or.b32 %0,[%1],%2;" : "=r"(seen) : "l"(word), "r"(65536 << share) : "memory");
  seen = __reduce_or_sync(~0u, threadIdx.x % 32 ? 0 : (seen & 255) == q);
  __syncwarp();
  return seen;
}
// the word is not looked at again by this warp: what tz_depart wants, which nobody waits for until then
__device__ __forceinline__ int tz_turn_away(int *word) {
  int seen = 0;
  if (threadIdx.x % 32 == 0)
    asm volatile("atom.relaxed.gpu.global.add.s32 %0,[%1],256;" : "=r"(seen) : "l"(word) : "memory");
  return seen;
}
// the last of q warps that turned away clears the word
__device__ __forceinline__ void tz_depart(int *word, int q, int seen) {
  if (threadIdx.x % 32) return;
  if ((seen >> 8 & 255) == q - 1) *(volatile int *)word = 0;  // st.volatile: as strong as the atomics of others
}
// the vector `bytes` past p + `elements`, a share's sums, of unit `unit`; zeros if that is none of `units`
__device__ __forceinline__ void tz_load_part(void *r_, const void *p, int elements, int bytes, int units, int unit) {
  unsigned *r = (unsigned *)r_;
  const float *at = (const float *)p + elements;
  asm("" : "+l"(at));  // opaque, so that vectors are constant offsets from it
  asm volatile("{ .reg .pred v; .reg .b32 t; and.b32 t,%5,%6; setp.ne.b32 v,t,0;"
               "mov.b32 %0,0; mov.b32 %1,0; mov.b32 %2,0; mov.b32 %3,0; @v ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4]; }"
               : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
               : "l"((const char *)at + bytes), "r"(units), "r"(1 << unit));
}
""",
    ),
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

PRIMITIVES = {p.name: p for p in _ALL}


def prelude(*names: str, extra: tuple[str, ...] = ()) -> str:
    """CUDA text holding the named primitives, in the order of the table, followed by `extra` sources."""
    wanted = set(names)
    unknown = wanted - PRIMITIVES.keys()
    if unknown:
        raise KeyError(f"unknown primitives {sorted(unknown)}; known: {sorted(PRIMITIVES)}")
    return "\n".join([_ADDRESS, *(p.source for p in _ALL if p.name in wanted), *extra])
