"""CTAs that share the sums of a tile."""

from terrazzo.ops.tiles.cuda.primitive import Primitive

TABLE = (
    Primitive(
        "semaphore",
        "deterministic split-K: T.atomic_load and T.atomic_add want an element of a buffer, and lanes wait as one",
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
)
