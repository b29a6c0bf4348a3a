// ---------------------------------------------------------------- integers
static int tz_quotient(int n, int d) { return n / d; }
// ---------------------------------------------------------------- 16-bit floats
template <bool BF16> static float widen(uint16_t v) {
  if (BF16) { uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f; }
  _Float16 h; memcpy(&h, &v, 2); return (float)h;
}
template <bool BF16> static uint16_t narrow(float f) {
  if (BF16) {
    uint32_t u; memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  _Float16 h = (_Float16)f; uint16_t v; memcpy(&v, &h, 2); return v;
}

// ---------------------------------------------------------------- tensor core, warp, memory
namespace tl {
enum class DataType { kFloat16, kBFloat16, kFloat32 };
template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB>
void mma_sync(float *c, const unsigned *a, const unsigned *b) {
  constexpr bool bf = A == DataType::kBFloat16;
  uint32_t in[10]; memcpy(in, a, 16); memcpy(in + 4, b, 8); memcpy(in + 6, c, 16);
  uint32_t out[4];
  meet(in, 10, out, 4, [](Meeting &w) {
    double x[16][16], y[16][8];
    for (int l = 0; l < 32; ++l) {
      int g = l / 4, t = l % 4;
      for (int r = 0; r < 4; ++r) for (int e = 0; e < 2; ++e)
        x[g + 8 * (r & 1)][2 * t + e + 8 * (r >> 1)] = widen<bf>(w.in[l][r] >> 16 * e);
      for (int r = 0; r < 2; ++r) for (int e = 0; e < 2; ++e)
        y[2 * t + e + 8 * r][g] = widen<bf>(w.in[l][4 + r] >> 16 * e);
    }
    for (int l = 0; l < 32; ++l) for (int v = 0; v < 4; ++v) {
      int row = l / 4 + 8 * (v >> 1), col = 2 * (l % 4) + (v & 1);
      float c; memcpy(&c, &w.in[l][6 + v], 4);
      double sum = c;
      for (int k = 0; k < 16; ++k) sum += x[row][k] * y[k][col];
      float f = (float)sum; memcpy(&w.out[l][v], &f, 4);
    }
  });
  memcpy(c, out, 16);
}
template <int N> bool tl_shuffle_elect() { return threadIdx.x == 0; }
inline void fence_barrier_init() {}
}  // namespace tl
