"""Copies, loads and stores, and what they are ordered by."""

from terrazzo.ops.tiles.cuda.primitive import Primitive

TABLE = (
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
)
