"""Named CUDA primitives that tile programs call where TileLang 0.1.15 has no form of its own.

Each is a few lines long and says in `why` what TileLang cannot express. A program asks for the ones it uses with
`prelude(...)` and calls them with ``T.call_extern``. Pointers are ``void *`` because TileLang types a shared buffer by
its pool, not by its element (notes: tilelang.md section 8).
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
        "stmatrix_trans",
        "T.copy stores a transposed accumulator with scalar 2-byte stores (tilelang.md traps 7 and 10)",
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
__device__ __forceinline__ void tz_addcg4(void *r_, const void *p) {
  float4 *r = (float4 *)r_, v = __ldcg((const float4 *)p);
  r->x += v.x; r->y += v.y; r->z += v.z; r->w += v.w;
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
// the warpgroup's earlier stores are visible to whoever sees the flag
__device__ __forceinline__ void tz_signal(int *flag, int id) {
  tz_wg_sync(id);
  if (threadIdx.x % 128 == 0) asm volatile("st.release.gpu.s32 [%0],%1;" :: "l"(flag), "r"(1) : "memory");
}
// waits for `count` flags `stride` apart, a thread for each, and takes them down again
__device__ __forceinline__ void tz_await(int *flag, int count, int stride, int id) {
  if (threadIdx.x % 128 < count) {
    int v, *f = flag + (int)(threadIdx.x % 128) * stride;
    do { asm volatile("ld.acquire.gpu.s32 %0,[%1];" : "=r"(v) : "l"(f) : "memory"); } while (!v);
    *f = 0;
  }
  tz_wg_sync(id);
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
