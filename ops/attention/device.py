"""Named CUDA primitives of the attention programs; each says what TileLang 0.1.15 cannot express."""

from __future__ import annotations

from terrazzo.lowering.primitives import Primitive, prelude

_ALL = (
    Primitive(
        "warp",
        "TileLang has no movmatrix, its shuffles and votes take no expressions of locals, and T.exp2 handles denormals",
        """\
// 8x8 matrix of 16-bit values, two in a lane, transposed in registers
__device__ __forceinline__ unsigned tz_transpose(unsigned x) {
  unsigned r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(x)); return r; }
__device__ __forceinline__ float tz_ex2(float x) {
  float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ bool tz_any(bool x) { return __any_sync(~0u, x); }
__device__ __forceinline__ float tz_xor_shuffle(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ __forceinline__ float tz_fma(float a, float b, float c) { return fmaf(a, b, c); }
// tanh from one exponential: exact to f32 rounding away from 0, and 2^-22 absolute near it
__device__ __forceinline__ float tz_tanh(float x) {
  return 1.f - __fdividef(2.f, 1.f + tz_ex2(2.8853900817779268f * x)); }
__device__ __forceinline__ float tz_log2(float x) { return log2f(x); }
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
        "half2",
        "TileLang's packed arithmetic takes vectors, not registers of operands",
        """\
__device__ __forceinline__ unsigned tz_hmul2(unsigned a, unsigned b) {
  unsigned r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
""",
    ),
)

PRIMITIVES = {p.name: p for p in _ALL}


def attention_prelude(*names: str, extra: tuple[str, ...] = ()) -> str:
    """CUDA text of general primitives (by name), all of the attention primitives, then `extra` sources."""
    return prelude(*names, extra=(*(p.source for p in _ALL), *extra))
