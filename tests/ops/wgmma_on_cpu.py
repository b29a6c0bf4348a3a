"""Hopper's asynchronous warpgroup products and TMA tiles for `cuda_on_cpu`: they happen when they are waited for.

A wgmma reads its operand registers and its tile in shared memory, and writes its accumulators, only inside
warpgroup_wait: registers or stages used again too early, and sums that are read too early, show as wrong results.
"""

from __future__ import annotations

import re

from terrazzo.ops.tiles.calls import tile_boxes

SHIMS = r"""
typedef unsigned char uchar;
struct TensorMap { long long base, rows, bytes; };  // of a matrix of bytes
// a descriptor's matrix, K-major: rows of 128 swizzled bytes, or core matrices of 8 rows of 16 bytes as they are; or
// `across`, 16-bit values [k, row]: 64 rows of a k lie in 128 swizzled bytes, `leading` to the next, `stride` to 8 k on
struct Tile {
  const char *base; bool swizzled; int leading, stride;  // bytes from one core matrix to the next along k, to 8 rows on
  bool across;
  const char *at(int row, int byte) const {
    if (across) {
      int k = byte / 2;
      uint64_t place = (uint64_t)base + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2;
      return (const char *)(place ^ (place >> 7 & 7) << 4);
    }
    if (!swizzled) return base + byte / 16 * leading + row / 8 * stride + row % 8 * 16 + byte % 16;
    uint64_t place = (uint64_t)base + row / 8 * stride + row % 8 * 128 + byte;
    return (const char *)(place ^ (place >> 7 & 7) << 4);
  }
  // 16 bytes of 32 of each of the rows from `first` on
  const char *piece(int first, int i) const {
    return across ? at(first + i / 16 * 8, i % 16 * 2) : at(first + i / 2, i % 2 * 16);
  }
};
struct Product {  // A: registers or memory
  const uint32_t *a; Tile at, b; int32_t *c; int n; bool add, sign, e4m3;
  int wide;  // 16-bit operands: 1 f16, 2 bf16
};
struct Products { std::vector<std::vector<Product>> of[1024]; };  // of each thread: groups, the last one open
static PerCta<Products> all_products;
#define products (*all_products).of
static float e4m3_value(uint8_t byte) {
  int e = byte >> 3 & 15, m = byte & 7;
  if ((byte & 127) == 127) return NAN;
  return (byte & 128 ? -1 : 1) * (e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9));
}
static void multiply_e4m3(int first, size_t group, size_t index) {  // sums rounded once
  static float x[64][32], y[256][32];
  Product &head = products[first][group][index];
  if (head.at.base) for (int m = 0; m < 64; ++m) for (int k = 0; k < 32; ++k)
    x[m][k] = e4m3_value(*(const uint8_t *)head.at.at(m, k));
  else for (int i = 0; i < 128; ++i) for (int r = 0; r < 4; ++r) for (int e = 0; e < 4; ++e)
    x[i / 32 * 16 + i % 32 / 4 + 8 * (r & 1)][4 * (i % 4) + e + 16 * (r >> 1)] =
        e4m3_value(products[first + i][group][index].a[r] >> 8 * e);
  for (int n = 0; n < products[first][group][index].n; ++n) for (int k = 0; k < 32; ++k)
    y[n][k] = e4m3_value(*(const uint8_t *)products[first][group][index].b.at(n, k));
  for (int i = 0; i < 128; ++i) {
    Product &p = products[first + i][group][index]; float *c = (float *)p.c;
    for (int v = 0; v < p.n / 2; ++v) {
      int row = i / 32 * 16 + i % 32 / 4 + 8 * (v >> 1 & 1), col = 8 * (v >> 2) + 2 * (i % 4) + (v & 1);
      double sum = p.add ? c[v] : 0;
      for (int k = 0; k < 32; ++k) sum += (double)x[row][k] * y[col][k];
      c[v] = (float)sum;
    }
  }
}
template <bool BF16> static void multiply_wide(int first, size_t group, size_t index) {
  static float x[64][16], y[256][16];
  Product &head = products[first][group][index];
  if (head.at.base) for (int m = 0; m < 64; ++m) for (int k = 0; k < 16; ++k)
    x[m][k] = widen<BF16>(*(const uint16_t *)head.at.at(m, k * 2));
  else for (int i = 0; i < 128; ++i) for (int r = 0; r < 4; ++r) for (int e = 0; e < 2; ++e)
    x[i / 32 * 16 + i % 32 / 4 + 8 * (r & 1)][2 * (i % 4) + e + 8 * (r >> 1)] =
        widen<BF16>(products[first + i][group][index].a[r] >> 16 * e);
  for (int n = 0; n < head.n; ++n) for (int k = 0; k < 16; ++k)
    y[n][k] = widen<BF16>(*(const uint16_t *)head.b.at(n, k * 2));
  for (int i = 0; i < 128; ++i) {
    Product &p = products[first + i][group][index]; float *c = (float *)p.c;
    for (int v = 0; v < p.n / 2; ++v) {
      int row = i / 32 * 16 + i % 32 / 4 + 8 * (v >> 1 & 1), col = 8 * (v >> 2) + 2 * (i % 4) + (v & 1);
      double sum = p.add ? c[v] : 0;
      for (int k = 0; k < 16; ++k) sum += (double)x[row][k] * y[col][k];
      c[v] = (float)sum;
    }
  }
}
static void multiply(int first, size_t group, size_t index) {
  Product &head = products[first][group][index];
  if (head.wide > 1) return multiply_wide<true>(first, group, index);
  if (head.wide) return multiply_wide<false>(first, group, index);
  if (head.e4m3) return multiply_e4m3(first, group, index);
  static int16_t x[64][32]; static int8_t y[256][32];
  auto of = [&](uint8_t byte) { return head.sign ? (int16_t)(int8_t)byte : (int16_t)byte; };
  if (head.at.base) for (int m = 0; m < 64; ++m) for (int k = 0; k < 32; ++k) x[m][k] = of(*head.at.at(m, k));
  for (int i = 0; i < 128; ++i) {
    Product &p = products[first + i][group][index]; int g = i % 32 / 4, t = i % 4;
    if (p.a) for (int r = 0; r < 4; ++r) for (int e = 0; e < 4; ++e)
      x[i / 32 * 16 + g + 8 * (r & 1)][4 * t + e + 16 * (r >> 1)] = of(p.a[r] >> 8 * e);
  }
  for (int n = 0; n < head.n; ++n) for (int k = 0; k < 32; ++k) y[n][k] = *head.b.at(n, k);
  for (int i = 0; i < 128; ++i) {
    Product &p = products[first + i][group][index]; int g = i % 32 / 4, t = i % 4;
    for (int v = 0; v < p.n / 2; ++v) {
      int row = i / 32 * 16 + g + 8 * (v >> 1 & 1), col = 8 * (v >> 2) + 2 * t + (v & 1), sum = p.add ? p.c[v] : 0;
      for (int k = 0; k < 32; ++k) sum += x[row][k] * y[col][k];
      p.c[v] = sum;
    }
  }
}
// a descriptor counts units of 16 bytes, its place from the beginning of shared memory
static Tile described(uint64_t d, bool across = false) {
  int kind = d >> 62;
  if (kind > 1) { fprintf(stderr, "an unknown swizzle\n"); abort(); }
  auto bytes = [&](int bit) { return int(d >> bit & 0x3FFF) * 16; };
  if (across && kind != 1) { fprintf(stderr, "an unknown layout\n"); abort(); }
  return {shared_memory() + bytes(0), kind == 1, bytes(16), bytes(32), across};
}
static void issue(const Product &p) { Unseen unseen; products[current].back().push_back(p); }
template <int N, bool SIGNED> static void wgmma_rs(const uint32_t *a, uint64_t b, uint32_t *c, bool add) {
  issue({a, {}, described(b), (int32_t *)c, N, add, SIGNED});
}
template <int N, int WIDE, bool ACROSS> static void wgmma_wide(const uint32_t *a, uint64_t b, uint32_t *c, bool add) {
  issue({a, {}, described(b, ACROSS), (int32_t *)c, N, add, true, false, WIDE});
}
template <int N, int WIDE, bool ACROSS> static void wgmma_wide(uint64_t a, uint64_t b, uint32_t *c, bool add) {
  issue({nullptr, described(a), described(b, ACROSS), (int32_t *)c, N, add, true, false, WIDE});
}
template <int N> static void wgmma_e4m3(const uint32_t *a, uint64_t b, uint32_t *c, bool add) {
  issue({a, {}, described(b), (int32_t *)c, N, add, true, true});
}
template <int N> static void wgmma_e4m3(uint64_t a, uint64_t b, uint32_t *c, bool add) {
  issue({nullptr, described(a), described(b), (int32_t *)c, N, add, true, true});
}
template <int N, bool SIGNED> static void wgmma_ss(uint64_t a, uint64_t b, uint32_t *c, bool add) {
  issue({nullptr, described(a), described(b), (int32_t *)c, N, add, SIGNED});
}
namespace tl {
template <> inline bool tl_shuffle_elect<32>() { return threadIdx.x % 32 == 0; }
struct GmmaDescriptor {
  uint64_t desc_;
  uint64_t operator+(int offset) const { return desc_ + offset; }
  operator uint64_t() const { return desc_; }
};
template <int KIND, int LEADING, int STRIDE> void initialize_wgmma_descriptor(GmmaDescriptor &d, const void *p) {
  Unseen unseen; products[current].assign(1, {});
  if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned operand\n"); abort(); }
  d.desc_ = (uint64_t)KIND << 62 | (uint64_t)STRIDE << 32 | LEADING << 16 | ((const char *)p - shared_memory()) / 16;
}
template <class T> void prefetch_tma_descriptor(T) {}
inline void fence_proxy_async() {}
template <class T> void warpgroup_fence_operand(T *, int) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { Unseen unseen; products[current].emplace_back(); }
static PerCta<std::array<char, 32>> wgmma_reads;
template <int N> void warpgroup_wait() {
  auto done = [] {
    size_t closed = products[current].size() - 1;
    return closed > N ? closed - N : 0;
  };
  char &warp_has_read = wgmma_reads[current / 32];
  if (current % 32 == 0) {  // a warp's part of a product has read its tiles; other warps' parts may still be under way
    std::vector<std::array<int, 2>> rows; std::vector<Tile> tiles;
    {
      Unseen unseen;
      for (size_t g = 0; g < done(); ++g) for (auto &p : products[current][g]) {
        tiles.push_back(p.b); rows.push_back({0, p.n});
        if (p.at.base) { tiles.push_back(p.at); rows.push_back({current / 32 % 4 * 16, 16}); }
      }
    }
    for (size_t t = 0; t < tiles.size(); ++t) for (int i = 0; i < 2 * rows[t][1]; ++i)
      reads(tiles[t].piece(rows[t][0], i), 16);
    released(&warp_has_read);
  }
  wg_meet([&] {
    int first = current / 128 * 128;
    size_t count = done();
    for (size_t g = 0; g < count; ++g)
      for (size_t i = 0; i < products[first][g].size(); ++i) multiply(first, g, i);
    for (int i = 0; i < 128; ++i)
      products[first + i].erase(products[first + i].begin(), products[first + i].begin() + count);
  });
  acquired(&warp_has_read);
}
template <int N> void warpgroup_reg_alloc() {}
template <int N> void warpgroup_reg_dealloc() {}
}  // namespace tl
static uint64_t tz_matrix(const tl::GmmaDescriptor &d) { return d.desc_; }
#ifndef EARLY
static void cudaTriggerProgrammaticLaunchCompletion() {}
static void cudaGridDependencySynchronize() {}
#endif
template <int ROWS> static void tma_tile(const TensorMap *map, Barrier &bar, void *to, int col, int row) {
  static std::deque<std::vector<char>> held;
  for (int r = 0; r < ROWS; ++r) if (row + r < map->rows && col < map->bytes)
    reads((const char *)map->base + (row + r) * map->bytes + col, std::min<long long>(128, map->bytes - col));
  poison(to, ROWS * 128);
  Unseen unseen;
  std::vector<char> &tile = held.emplace_back(ROWS * 128, 0);
  for (int r = 0; r < ROWS; ++r) for (int c = 0; c < 128; ++c)
    if (row + r < map->rows && col + c < map->bytes)
      tile[r * 128 + ((c / 16 ^ r % 8) * 16 + c % 16)] = ((const char *)map->base)[(row + r) * map->bytes + col + c];
  released(bar.order(bar.state & 1)); Barrier::flying.push_back({&bar, {to, tile.data(), ROWS * 128}});
}
static void tz_wg_sync(int id) { bar_sync(id, 128); }
struct Vote { int so_far, said; };
static PerCta<std::array<Vote, 32>> votes;
static bool tz_wg_any(int id, bool x) {
  { Unseen unseen; votes[id].so_far |= x; }
  gather<true>(named[id], 128, [&] { votes[id] = {0, votes[id].so_far}; });
  Unseen unseen;
  return votes[id].said;
}
static void tz_signal(int *flag, int id) { tz_wg_sync(id); if (threadIdx.x % 128 == 0) store_release(flag, 1); }
static void tz_await(int *flag, int count, int stride, int id) {
  for (int i = threadIdx.x % 128; i < count; i += 128) {
    int *f = flag + i * stride;
    wait_until([&] { return load_acquire(f) == 1; }); *f = 0;
  }
  tz_wg_sync(id);
}
static void tz_stmatrix4_trans(void *p, unsigned a, unsigned b, unsigned c, unsigned d) {
  uint32_t in[4] = {a, b, c, d}, row[4];
  meet(in, 4, row, 4, [](Meeting &w) {
    for (int j = 0; j < 4; ++j) for (int l = 0; l < 32; ++l) for (int h = 0; h < 2; ++h)
      ((uint16_t *)w.out[j * 8 + l % 4 * 2 + h])[l / 4] = w.in[l][j] >> 16 * h;
  });
  if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned stmatrix\n"); abort(); }
  memcpy(p, row, 16);
}
template <class T, bool WHOLE> static void tz_store_row(void *y, int row, int n, int col, const void *src) {
  for (int e = 0; e < 16 / (int)sizeof(T) && col + e < n; ++e)
    ((T *)y)[(long long)row * n + col + e] = ((const T *)src)[e];
}
"""
TURNS = r"""
static PerCta<std::array<Together, 4>> turns;  // named barriers of two warpgroups, one of which does not wait
static void tz_turn_pass(int wg) {
  Unseen unseen; Together &t = turns[wg];
  released(&t.order[t.round & 1]);
  if (++t.arrived == 256) { t.arrived = 0; ++t.round; }
}
static void tz_turn_wait(int wg) { gather<true>(turns[wg], 256, [] {}); }
"""
STMATRIX = r"""
static void tz_stmatrix4(void *p, const void *a) {
  uint32_t row[4];
  meet((const uint32_t *)a, 4, row, 4, [](Meeting &w) {
    for (int j = 0; j < 4; ++j) for (int l = 0; l < 32; ++l) w.out[j * 8 + l / 4][l % 4] = w.in[l][j];
  });
  memcpy(p, row, 16);
}
"""
"""Four 8x8 matrices of a warp to shared memory."""


def translated(source: str, block_tokens: int) -> str:
    """CUDA text of a wgmma program with its tensor maps as plain pointers and its products as calls of the shims."""
    source = source.replace("__grid_constant__ const CUtensorMap X_desc", "const TensorMap* X_desc")
    source = boxes_named(source, "tl::tma_load(", "tma_tile<{}>(", block_tokens)
    types = r"tl::DataType::k(B?)Float16, tl::DataType::kB?Float16, tl::DataType::kFloat32"
    wide = rf"tl::wgmma_[rs]s<{types}, 64, (\d+), 16, false, (true|false),[^>]*>"
    source = re.sub(wide, lambda found: f"wgmma_wide<{found[2]}, {2 if found[1] else 1}, {found[3]}>", source)
    floats = r"tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32"
    source = re.sub(rf"tl::wgmma_[rs]s<{floats}, 64, (\d+), 32,[^>]*>", r"wgmma_e4m3<\1>", source)
    types = r"tl::DataType::k(U?)Int8, tl::DataType::kInt8, tl::DataType::kInt32"
    product = rf"tl::wgmma_(rs|ss)<{types}, 64, (\d+), 32,[^>]*>"
    return re.sub(product, lambda found: f"wgmma_{found[1]}<{found[3]}, {str(not found[2]).lower()}>", source)


def boxes_named(source: str, load: str, named: str, block_tokens: int) -> str:
    """The text with each copy of a box of X as a call that names its rows: the n-th that is copied is the n-th largest,
    whatever number its tensor map has."""
    maps = dict.fromkeys(re.findall(re.escape(load) + r"(X_desc(?:_\d+)?), ", source))
    for desc, rows in zip(maps, reversed(tile_boxes(block_tokens) if block_tokens else [])):
        source = source.replace(f"{load}{desc}, ", f"{named.format(rows)}{desc}, ")
    return source
