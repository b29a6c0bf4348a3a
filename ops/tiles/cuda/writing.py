"""What cache writes need beside the table of attention: clipped formats, slots."""

from __future__ import annotations

import numpy as np
from terrazzo.ops.products.kv import CLIP_STEPS, CLIPS
from terrazzo.ops.tiles.cuda.primitive import Primitive


def f16_pair(value: float) -> int:
    """Two f16 of one value as a word."""
    return int(np.float16(value).view(np.uint16)) * 0x10001


_OUTER = ", ".join(map(str, CLIPS))
_EDGES = ", ".join(hex(f16_pair(2 * outer // 3)) + "u" for outer in CLIPS)
_PARTS = ", ".join(f"{float(np.float32(outer / CLIP_STEPS))!r}f" for outer in CLIPS)
PAIRS_OF_F16 = Primitive(
    "pairs of f16",
    "TileLang's packed arithmetic takes vectors, not registers",
    """\
__device__ __forceinline__ unsigned tz_hadd2(unsigned a, unsigned b) {
  unsigned r; asm("add.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ unsigned tz_hsub2(unsigned a, unsigned b) {
  unsigned r; asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
// by what a exceeds b, or 0
__device__ __forceinline__ unsigned tz_excess(unsigned a, unsigned b) {
  unsigned r; asm("fma.rn.relu.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(0x3c003c00u), "r"(b ^ 0x80008000u));
  return r; }
""",
)
SLOTS = Primitive(
    "slots",
    "numbers are read behind the wait for the kernel ahead, and votes of a run of lanes are one function",
    """\
// slot `at` of `count`; -1 where there is none, or it lies outside of `room` slots
template <class T> __device__ __forceinline__ int tz_slot(const void *p, int at, int count, int room) {
  if (at < 0 || at >= count) return -1;
  T slot = *((const volatile T *)p + at);
  return slot < 0 || slot >= room ? -1 : (int)slot; }
// whether lane `at` begins a run of slots of one tile of 16
__device__ __forceinline__ bool tz_begins(int slot, int at) {
  int own = __shfl_sync(~0u, slot, at), before = __shfl_sync(~0u, slot, at - 1);
  return own >= 0 && (before < 0 || before >> 4 != own >> 4); }
// the run that begins at lane `at` > 0: a bit for each token of its tile; places[token]: its place in the run
__device__ __forceinline__ unsigned tz_run(void *places, int slot, int at) {
  int lane = threadIdx.x % 32, tile = __shfl_sync(~0u, slot, at) >> 4;
  unsigned others = ~(__ballot_sync(~0u, slot >> 4 == tile) >> at);
  bool in = lane >= at && lane - at < min(__ffs(others) - 1, 16);
  unsigned marks = 0;
  if (in) ((int *)places)[slot & 15] = lane - at;
  tz_syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) marks |= __ballot_sync(~0u, in && (slot & 15) == i) ? 1u << i : 0u;
  return marks; }
// row of a table that a token's position names, within its `rows`
template <class T> __device__ __forceinline__ int tz_angle(const void *p, int at, int rows) {
  T position = *((const volatile T *)p + at);
  return position < 0 ? 0 : position < rows ? (int)position : rows - 1; }
""",
)
FLIP = Primitive(
    "flip",
    "warps that store other bits of the same words at the same time need an atomic operation without a result",
    """\
// N words: bits of `v` are flipped
template <int N> __device__ __forceinline__ void tz_flip(void *p, const void *v_) {
  const unsigned *v = (const unsigned *)v_;
  if constexpr (N == 1) asm volatile("red.relaxed.gpu.global.xor.b32 [%0],%1;" :: "l"(p), "r"(v[0]) : "memory");
  else
#pragma unroll
    for (int i = 0; i < N; i += 2)
      asm volatile("red.relaxed.gpu.global.xor.b64 [%0],%1;"
                   :: "l"((unsigned *)p + i), "l"((unsigned long long)v[i + 1] << 32 | v[i]) : "memory");
}
""",
)
CLIPPING = Primitive(
    "clipping",
    "tables of constants in loops that nvcc unrolls; quantizer.py to the bit: no contraction of rounded sums",
    f"""\
// middles of the ranges of two tokens, and steps of {CLIP_STEPS} for half of each
__device__ __forceinline__ void tz_clip_middle(float low0, float high0, float low1, float high1, void *out_) {{
  unsigned *out = (unsigned *)out_;
  float a = __fdiv_rn({CLIP_STEPS}.f, __fmul_rn(__fsub_rn(high0, low0), .5f));
  float b = __fdiv_rn({CLIP_STEPS}.f, __fmul_rn(__fsub_rn(high1, low1), .5f));
  out[0] = tz_pack2<false>(__fmul_rn(__fadd_rn(low0, high0), .5f), __fmul_rn(__fadd_rn(low1, high1), .5f));
  out[1] = tz_pack2<false>(a <= 65504.f ? a : 0.f, b <= 65504.f ? b : 0.f);
}}
// two values' distances from the middles: what they exceed each range's edge by joins its sum, what lies below the
// last edge joins the last sum. Sums of a lane are integers below 2^11
__device__ __forceinline__ void tz_clip_count(unsigned x, const void *middle_, void *far_) {{
  constexpr unsigned edges[] = {{{_EDGES}}};
  const unsigned *middle = (const unsigned *)middle_;
  unsigned *far = (unsigned *)far_;
  unsigned at = tz_hmul2(tz_hsub2(x, middle[0]) & 0x7fff7fffu, middle[1]);
  at = tz_hsub2(tz_hadd2(tz_min2<false>(at, {f16_pair(CLIP_STEPS):#x}u), {f16_pair(1024):#x}u), {f16_pair(1024):#x}u);
#pragma unroll
  for (int i = 0; i < {len(CLIPS)}; ++i) far[i] = tz_hadd2(far[i], tz_excess(at, edges[i]));
  far[{len(CLIPS)}] = tz_hadd2(far[{len(CLIPS)}], tz_min2<false>(at, edges[{len(CLIPS) - 1}]));
}}
// the sums of a lane, pairs of f16, as pairs of 16-bit integers
__device__ __forceinline__ unsigned tz_clip_integers(unsigned sums) {{
  return tz_hadd2(sums, {f16_pair(1024):#x}u) - {f16_pair(1024):#x}u; }}
// low .. high of D values as the range with the least squared error; their sums are half `which` of each pair. Codes
// lie at +-c and +-c / 3, edges at 2 c / 3, so the error is D (c / 3)^2 - 2 c / 3 (all distances + twice the excess)
template <int D> __device__ __forceinline__ void tz_clip_range(void *low_, void *high_, const void *sums_, int which) {{
  constexpr int outers[] = {{{_OUTER}}};
  constexpr float parts[] = {{{_PARTS}}};
  const unsigned *sums = (const unsigned *)sums_;
  float low = *(float *)low_, high = *(float *)high_, part = 1.f;
  int excess[{len(CLIPS) + 1}], least = 0x7fffffff;
#pragma unroll
  for (int i = 0; i <= {len(CLIPS)}; ++i) excess[i] = which ? sums[i] >> 16 : sums[i] & 0xffffu;
  int total = excess[{len(CLIPS) - 1}] + excess[{len(CLIPS)}];
#pragma unroll
  for (int i = 0; i < {len(CLIPS)}; ++i) {{
    int inner = outers[i] / 3, error = D * inner * inner - 2 * inner * (total + 2 * excess[i]);
    if (error < least && (total > 0 || i == 0)) {{ least = error; part = parts[i]; }}
  }}
  if (part == 1.f) return;
  float half = __fmul_rn(__fmul_rn(__fsub_rn(high, low), .5f), part), middle = __fmul_rn(__fadd_rn(low, high), .5f);
  *(float *)low_ = __fsub_rn(middle, half);
  *(float *)high_ = __fadd_rn(middle, half);
}}
""",
)
"""Not in every kernel's prelude: for those that store clipped formats."""
