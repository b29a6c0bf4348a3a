"""Rows of 16-bit values in registers: the ends of kernels that give rows, norms, gates, heads."""

ROW_OUTPUTS = """\
// 8 values of 16 bits -> floats, and back, rounded to nearest even
template <bool BF16> __device__ __forceinline__ void tz_widen8(void *v, const void *x) {
  tz_row_values<BF16, 0>((float *)v, x, x);
}
template <bool BF16> __device__ __forceinline__ void tz_narrow8(void *x_, const void *v_) {
  unsigned *x = (unsigned *)x_; const float *v = (const float *)v_;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = tz_pack2<BF16>(v[2 * i], v[2 * i + 1]);
}
// a value rounded to 16 bits, as a float
template <bool BF16> __device__ __forceinline__ float tz_round(float v) {
  return tz_unpack<BF16, 0>(tz_pack2<BF16>(v, 0.0f));
}
// the largest magnitude of 8 values joins m[0]; NaN wins: the bits of magnitudes order as integers
__device__ __forceinline__ void tz_values_scan(void *m_, const void *v_) {
  unsigned *m = (unsigned *)m_; const float *v = (const float *)v_;
#pragma unroll
  for (int i = 0; i < 8; ++i) m[0] = max(m[0], __float_as_uint(fabsf(v[i])));
}
// the largest magnitude of another CTA's values joins m[0]
__device__ __forceinline__ void tz_join_largest(void *m_, float other) {
  unsigned *m = (unsigned *)m_;
  m[0] = max(m[0], __float_as_uint(other));
}
// the largest magnitude of the values of 16 lanes
__device__ __forceinline__ float tz_block_largest(const void *v) {
  float m = 0.0f;
  tz_values_scan(&m, v);
#pragma unroll
  for (int d = 8; d; d /= 2)
    m = __uint_as_float(max(__float_as_uint(m), __float_as_uint(__shfl_xor_sync(~0u, m, d))));
  return m;
}
// 8 values times those of a vector in memory
__device__ __forceinline__ void tz_values_times(void *v_, const void *p) {
  float *v = (float *)v_;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float4 g = *((const float4 *)p + i / 4);
    v[i] *= g.x; v[i + 1] *= g.y; v[i + 2] *= g.z; v[i + 3] *= g.w;
  }
}
// 8 values of 16 bits to memory
__device__ __forceinline__ void tz_store4(void *p, const void *x_) {
  const unsigned *x = (const unsigned *)x_;
  *(uint4 *)p = make_uint4(x[0], x[1], x[2], x[3]);
}
// 8 values times `factor`, rounded to 16 bits, to memory
template <bool BF16> __device__ __forceinline__ void tz_values_store(void *y, const void *v_, float factor) {
  const float *v = (const float *)v_; float t[8]; unsigned w[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) t[i] = v[i] * factor;
  tz_narrow8<BF16>(w, t);
  tz_store4(y, w);
}
"""
"""Why not TileLang: maxima that keep NaN, and values of 16 bits and codes, eight at a time in registers."""
ROW_SUMS = """\
// x = round(x + r), 8 values
template <bool BF16> __device__ __forceinline__ void tz_add8(void *x, const void *r) {
  float a[8], b[8];
  tz_widen8<BF16>(a, x); tz_widen8<BF16>(b, r);
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] += b[i];
  tz_narrow8<BF16>(x, a);
}
"""
"""The sum with a residual. Why not TileLang: eight values in registers at a time."""
BYTE_CODES = """\
// the largest of 8 values and of 0 joins m[0], that of their negatives m[1]; NaN wins: bits of both order as integers
__device__ __forceinline__ void tz_range8(void *m_, const void *v_) {
  unsigned *m = (unsigned *)m_; const float *v = (const float *)v_;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    unsigned bits = __float_as_uint(v[i]);
    m[bits >> 31] = max(m[bits >> 31], bits & 0x7fffffffu);
  }
}
// 8 bytes round(v * inverse + zero), half to even, kept inside -128 .. 127
__device__ __forceinline__ void tz_affine8(void *q, const void *v_, float inverse, float zero) {
  const float *v = (const float *)v_; unsigned b[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // 1.5 * 2^23: ulp 1
    float x = fmaf(v[i], inverse, 12582912.0f + zero);
    b[i] = __float_as_uint(fminf(fmaxf(x, 12582912.0f - 128.0f), 12582912.0f + 127.0f));
  }
  unsigned lo = __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410);
  unsigned hi = __byte_perm(__byte_perm(b[4], b[5], 0x0040), __byte_perm(b[6], b[7], 0x0040), 0x5410);
  *(uint2 *)q = make_uint2(lo, hi);
}
// the least power of two that is not below a positive float, 2^-126 or more; infinity and NaN as they are
__device__ __forceinline__ float tz_power_above(float v) {
  unsigned bits = __float_as_uint(v);
  return bits < 0x7f800000u ? __uint_as_float((bits + 0x7fffffu) & 0x7f800000u) : v;
}
"""
"""Why not TileLang: maxima that keep NaN, and conversions to packed bytes."""
GROUP_CODES = """\
// e8m0 of 32 values, 8 of each of four lanes, whose largest magnitude has this exponent less 8; its reciprocal, or 0
__device__ __forceinline__ unsigned tz_group_scale(void *inverse, const void *v, float tiny) {
  unsigned m = 0;
  tz_values_scan(&m, v);
#pragma unroll
  for (int d = 2; d; d /= 2) m = max(m, __float_as_uint(__shfl_xor_sync(~0u, __uint_as_float(m), d)));
  unsigned scale = m >= 0x7f800000u ? 255u : m < __float_as_uint(tiny) ? 127u : (m >> 23) - 8;
  *(float *)inverse = scale == 255 || m < __float_as_uint(tiny) ? 0.0f : __uint_as_float((254 - scale) << 23);
  return scale;
}
// byte `group` of a word
__device__ __forceinline__ void tz_store_scale(void *word, int group, unsigned scale) {
  ((unsigned char *)word)[group] = scale;
}
"""
"""Of MXFP8. Why not TileLang: as above, and single bytes of words."""
NORMS = """\
// squares of 8 values join m[1]
template <bool BF16> __device__ __forceinline__ void tz_squares8(void *m_, const void *x) {
  float v[8], *m = (float *)m_;
  tz_widen8<BF16>(v, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) m[1] = fmaf(v[i], v[i], m[1]);
}
// weights of 8 columns as they are stored: WIDE, floats
template <bool WIDE> __device__ __forceinline__ void tz_weights8(void *w, const void *p) {
  *(uint4 *)w = *(const uint4 *)p;
  if constexpr (WIDE) *((uint4 *)w + 1) = *((const uint4 *)p + 1);
}
// v = x s w; ROUNDS 2: round(w round(x s)), 1: round((x s) w), 0: no rounding, and x w alone where s is 1
template <bool BF16, bool WIDE, bool OFFSET, int ROUNDS> __device__ __forceinline__ void tz_normed8(
    void *v_, const void *x, const void *w_, float s) {
  float *v = (float *)v_, w[8];
  tz_widen8<BF16>(v, x);
  if constexpr (WIDE) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = ((const float *)w_)[i];
  } else tz_widen8<BF16>(w, w_);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (OFFSET) w[i] += 1.0f;
    v[i] *= s;
    if constexpr (ROUNDS == 2) v[i] = tz_round<BF16>(v[i]);
    v[i] *= w[i];
    if constexpr (ROUNDS) v[i] = tz_round<BF16>(v[i]);
  }
}
// x = round(r + v), 8 values
template <bool BF16> __device__ __forceinline__ void tz_sum8(void *x, const void *r, const void *v_) {
  const float *v = (const float *)v_; float b[8];
  tz_widen8<BF16>(b, r);
#pragma unroll
  for (int i = 0; i < 8; ++i) b[i] += v[i];
  tz_narrow8<BF16>(x, b);
}
"""
"""Why not TileLang: eight values in registers at a time."""
GATED = """\
// ACT as the program counts activations; EXACT: float32 functions as torch calls them, rounded to 16 bits in between
template <bool BF16, int ACT, bool EXACT> __device__ __forceinline__ float tz_gated(float g, float u, float alpha) {
  if constexpr (EXACT) {
    float a;
    if constexpr (ACT == 0) a = g / (1.0f + expf(-g));
    if constexpr (ACT == 1) a = 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * (g * g * g))));
    if constexpr (ACT == 2) a = g * 0.5f * (1.0f + erff(g * 0.7071067811865476f));
    if constexpr (ACT == 3) {
      a = tz_round<BF16>(alpha * g);
      a = g * tz_round<BF16>(1.0f / (1.0f + expf(-a)));
      u = tz_round<BF16>(u + 1.0f);
    }
    return tz_round<BF16>(tz_round<BF16>(a) * u);
  } else {
    if constexpr (ACT == 2) return g * 0.5f * erfcf(g * -0.7071067811865476f) * u;  // 1 + erf cancels below 0
    // the others are g sigmoid(z): 1 + tanh(y) is 2 sigmoid(2 y)
    float z = ACT == 0 ? g : ACT == 3 ? alpha * g : 1.5957691216057308f * fmaf(0.044715f * g * g, g, g);
    if constexpr (ACT == 3) u += 1.0f;
    return __fdividef(g, 1.0f + __expf(-z)) * u;
  }
}
// 8 values of h: a and b are gate and up, or (PAIRS) 8 pairs of them; CLAMPS: gate at most, up within `limit`
template <bool BF16, int ACT, bool EXACT, bool PAIRS, bool CLAMPS> __device__ __forceinline__ void tz_gated8(
    void *v_, const void *a_, const void *b_, float alpha, float limit) {
  float *v = (float *)v_, a[8], b[8];
  tz_widen8<BF16>(a, a_); tz_widen8<BF16>(b, b_);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float g = PAIRS ? (i < 4 ? a[2 * i] : b[2 * i - 8]) : a[i];
    float u = PAIRS ? (i < 4 ? a[2 * i + 1] : b[2 * i - 7]) : b[i];
    if constexpr (CLAMPS) {  // NaN stays
      g = g > limit ? limit : g;
      u = u > limit ? limit : u < -limit ? -limit : u;
    }
    v[i] = tz_gated<BF16, ACT, EXACT>(g, u, alpha);
  }
}
"""
"""Of programs with ROW_OUTPUTS. Why not TileLang: eight values in registers at a time."""
HEADS = """\
// squares of 16 values of a lane, summed over LANES lanes
template <int LANES> __device__ __forceinline__ float tz_head_squares(const void *v_) {
  const float *v = (const float *)v_; float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum = fmaf(v[i], v[i], sum);
#pragma unroll
  for (int d = LANES / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}
// 8 values times the factor and the weights of a head; ROUNDS as in RMSNorm, OFFSET: 1 + weight
template <bool BF16, bool OFFSET, int ROUNDS> __device__ __forceinline__ void tz_head_norm8(
    void *v_, const void *w_, float s) {
  float *v = (float *)v_, w[8];
  tz_widen8<BF16>(w, w_);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (OFFSET) w[i] += 1.0f;
    v[i] *= s;
    if constexpr (ROUNDS == 2) v[i] = tz_round<BF16>(v[i]);
    v[i] *= w[i];
    if constexpr (ROUNDS) v[i] = tz_round<BF16>(v[i]);
  }
}
// 16 bytes of weights as they are stored
__device__ __forceinline__ void tz_head_weights8(void *w, const void *p) { *(uint4 *)w = *(const uint4 *)p; }
__device__ __forceinline__ void tz_load_floats8(void *v_, const void *p) {
  *(float4 *)v_ = *(const float4 *)p; *((float4 *)v_ + 1) = *((const float4 *)p + 1);
}
// 8 pairs of v turned by c, s. PAIRS: of neighbours in 16 values, else v[i] with v[i + 8]. ROUNDS: each product, in
// 16 bits, as are c and s
template <bool BF16, bool PAIRS, bool ROUNDS> __device__ __forceinline__ void tz_turn8(
    void *v_, const void *c_, const void *s_) {
  float *v = (float *)v_; const float *c = (const float *)c_, *s = (const float *)s_;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int a = PAIRS ? 2 * i : i, b = PAIRS ? 2 * i + 1 : i + 8;
    float x = v[a], y = v[b], cc = c[i], ss = s[i];
    if constexpr (ROUNDS) {
      cc = tz_round<BF16>(cc); ss = tz_round<BF16>(ss);
      v[a] = tz_round<BF16>(tz_round<BF16>(x * cc) - tz_round<BF16>(y * ss));
      v[b] = tz_round<BF16>(tz_round<BF16>(y * cc) + tz_round<BF16>(x * ss));
    } else {
      v[a] = fmaf(x, cc, -(y * ss));
      v[b] = fmaf(y, cc, x * ss);
    }
  }
}
"""
"""Of programs with ROW_OUTPUTS. Why not TileLang: eight values in registers at a time."""
