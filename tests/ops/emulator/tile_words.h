// What TileLang itself emits for T.copy, T.gemm and half arithmetic, for programs that are written in its words alone.
typedef unsigned char uchar;
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; }; struct uint4 { unsigned x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct f16 {
  uint16_t bits;
  f16() = default;
  explicit f16(float v) : bits(narrow<false>(v)) {}
  operator float() const { return widen<false>(bits); }
};
struct half2 { f16 x, y; };
static half2 __float22half2_rn(float2 v) { return {f16(v.x), f16(v.y)}; }
static f16 operator-(f16 a, f16 b) { return f16(float(a) - float(b)); }
static f16 operator*(f16 a, f16 b) { return f16(float(a) * float(b)); }
namespace tl {
template <int N> void cp_async_gs_conditional(void *to, const void *from, bool there) {
  static_assert(N == 16);
  tz_cp_async(to, there ? from : to, there ? N : 0);  // zeros where there is nothing
}
template <int N> void cp_async_gs(void *to, const void *from) { cp_async_gs_conditional<N>(to, from, true); }
inline void cp_async_commit() { tz_cp_commit(); }
template <int N> void cp_async_wait() { tz_cp_wait<N>(); }
inline void ptx_ldmatrix_x4(const void *from, void *out) { ldmatrix<false>(out, from); }
inline void ptx_ldmatrix_x4_trans(const void *from, void *out) { ldmatrix<true>(out, from); }
struct MaxOp { static float of(float a, float b) { return std::max(a, b); } };
struct SumOp { static float of(float a, float b) { return a + b; } };
template <int> struct NamedBarrier {};
template <class Op, int THREADS, int SCALE, int, class> struct AllReduce {  // of THREADS / SCALE lanes of a warp
  static_assert(THREADS <= 32);
  static float run(float x) {
    for (int mask = THREADS / 2; mask >= SCALE; mask /= 2) x = Op::of(x, tz_xor_shuffle(x, mask));
    return x;
  }
};
}  // namespace tl
