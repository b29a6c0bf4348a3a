// Copies that are under way: they poison their destination when they are issued and deliver when they are waited for,
// so that a stage that is read too early or refilled too soon is seen.
struct Copy { void *to; const void *from; int bytes; };
static void poison(void *to, int bytes) {
  writes(to, bytes);
  Unseen unseen;
  memset(to, 0xff, bytes);
}
static void deliver(std::vector<Copy> &copies) {
  Unseen unseen;  // the copy was seen when it was issued
  for (auto &c : copies) { memcpy(c.to, c.from, c.bytes); memset((char *)c.to + c.bytes, 0, 16 - c.bytes); }
  copies.clear();
}
struct Barrier {
  uint16_t expected, pending; int32_t state;  // bytes outstanding * 2 + phase
  static std::vector<std::pair<Barrier *, Copy>> flying;
  char *order(int phase) { return (char *)this + 4 * phase; }
  void init(int n) { Unseen unseen; expected = pending = n; state = 0; }
  void expect_transaction(int bytes) { Unseen unseen; released(order(state & 1)); state += 2 * bytes; }
  void arrive() {  // a phase without copies ends with its last arrival, waited for or not
    Unseen unseen; released(order(state & 1));
    if (!--pending && !(state >> 1)) { state ^= 1; pending = expected; }
  }
  void arrive_and_expect_tx(int bytes) { expect_transaction(bytes); arrive(); }
  void settle() {
    if (pending) return;
    auto mine = [&](auto &f) { return f.first == this; };
    for (auto &f : flying) if (mine(f)) {
      memcpy(f.second.to, f.second.from, f.second.bytes); state -= 2 * f.second.bytes; }
    flying.erase(std::remove_if(flying.begin(), flying.end(), mine), flying.end());
    if (state >> 1) return;  // more is sent, or a wait that never ends
    state ^= 1; pending = expected;
  }
  void wait(int parity) {
    {
      Unseen unseen;
      wait_until([&] { if ((state & 1) == parity) settle(); return (state & 1) != parity; });
    }
    acquired(order(parity));
  }
};
std::vector<std::pair<Barrier *, Copy>> Barrier::flying;
// a copy of another unit that ends in a barrier; what it writes comes before what a waiting thread does next
static void fly(Barrier &barrier, void *to, const void *from, int bytes) {
  poison(to, bytes); reads(from, bytes);
  Unseen unseen;
  released(barrier.order(barrier.state & 1)); Barrier::flying.push_back({&barrier, {to, from, bytes}});
}
struct Groups { std::vector<std::vector<std::vector<Copy>>> of; };
// addresses in shared memory as numbers
static unsigned tz_place(const void *p) { return (const char *)p - shared_memory(); }
static void *tz_past(void *p, int bytes) { return (char *)p + bytes; }
static char *placed(unsigned at, int bytes) {
  if (at % bytes || at + bytes > SHARED + HEAP) { fprintf(stderr, "misaligned, or not in shared memory\n"); abort(); }
  return shared_memory() + at;
}
static void tz_lds128(void *out, unsigned at) { memcpy(out, placed(at, 16), 16); }
static unsigned tz_lds32(unsigned at) { return *(const unsigned *)placed(at, 4); }
static void tz_lds64(void *out, unsigned at) { memcpy(out, placed(at, 8), 8); }
static unsigned tz_lds16(unsigned at) { return *(const uint16_t *)placed(at, 2); }
static void tz_wait(unsigned barrier, int parity) { ((Barrier *)placed(barrier, 8))->wait(parity); }
static void tz_arrive(unsigned barrier) { ((Barrier *)placed(barrier, 8))->arrive(); }
static PerCta<Groups> groups;
static std::vector<std::vector<Copy>> &my_groups() {
  auto &all = (*groups).of;
  if (all.empty()) all.assign(THREADS, std::vector<std::vector<Copy>>(1));
  return all[current];
}
static void tz_cp_async(void *to, const void *from, int bytes) {
  if (((uintptr_t)to | (uintptr_t)from) & 15) { fprintf(stderr, "misaligned cp.async\n"); abort(); }
  poison(to, 16); reads(from, bytes);
  Unseen unseen;
  my_groups().back().push_back({to, from, bytes});
}
static void tz_cp_commit() { Unseen unseen; my_groups().emplace_back(); }
template <int N> static void tz_cp_wait() {
  {
    Unseen unseen;
    auto &mine = my_groups();
    for (size_t i = 0; i + 1 + N < mine.size(); ++i) deliver(mine[i]);
  }
  __syncwarp();
}
static void tz_bulk(void *to, const void *from, int bytes, void *bar);
static void tz_bulk_at(void *to, const void *base, int at, int bytes, void *bar) {
  tz_bulk(to, (const char *)base + (long long)at * 16, bytes, bar);
}
static void tz_bulk(void *to, const void *from, int bytes, void *bar) {
  if ((((uintptr_t)to | (uintptr_t)from) & 15) || bytes % 16 || bytes <= 0) {
    fprintf(stderr, "misaligned bulk copy\n"); abort(); }
  fly(*(Barrier *)bar, to, from, bytes);
}
template <bool BF16> static unsigned tz_pack2(float lo, float hi) {
  return narrow<BF16>(lo) | (unsigned)narrow<BF16>(hi) << 16; }
template <bool BF16, int HI> static float tz_unpack(unsigned v) { return widen<BF16>(v >> 16 * HI); }
static PerCta<int> last_of_all;
static bool tz_last_arrival(int *sem, int n) {
  __syncthreads();
  if (threadIdx.x == 0) {
    bool last = add_acq_rel(sem, 1) == n - 1;
    if (last) *sem = 0;
    Unseen unseen;
    *last_of_all = last;
  }
  __syncthreads();
  Unseen unseen;
  return *last_of_all;
}
static void tz_fence() {}
static unsigned tz_transpose(unsigned x) {
  unsigned r;
  meet(&x, 1, &r, 1, [](Meeting &w) {
    uint16_t m[8][8];
    for (int l = 0; l < 32; ++l) for (int e = 0; e < 2; ++e) m[l / 4][l % 4 * 2 + e] = w.in[l][0] >> 16 * e;
    for (int l = 0; l < 32; ++l) w.out[l][0] = m[l % 4 * 2][l / 4] | (unsigned)m[l % 4 * 2 + 1][l / 4] << 16;
  });
  return r;
}
static float tz_ex2(float x) { return exp2f(x); }
static bool tz_any(bool x) {
  uint32_t in = x, out;
  meet(&in, 1, &out, 1, [](Meeting &w) {
    uint32_t any = 0; for (int l = 0; l < 32; ++l) any |= w.in[l][0];
    for (int l = 0; l < 32; ++l) w.out[l][0] = any; });
  return out;
}
static float tz_xor_shuffle(float x, int mask) {
  uint32_t in[2], out; memcpy(in, &x, 4); in[1] = mask;
  meet(in, 2, &out, 1, [](Meeting &w) { for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[l ^ w.in[l][1]][0]; });
  memcpy(&x, &out, 4); return x;
}
static int tz_now(int x) { return x; }
static int tz_of_lane(int x, int from) {
  uint32_t in[2] = {(uint32_t)x, (uint32_t)from}, out;
  meet(in, 2, &out, 1, [](Meeting &w) { for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[w.in[l][1] % 32][0]; });
  return out;
}
static float tz_fma(float a, float b, float c) { return fmaf(a, b, c); }
static float tz_tanh(float x) { return tanhf(x); }
static float tz_log2(float x) { return log2f(x); }
static void *tz_page(const void *p, int page, int pitch, int at) { return (int *)p + ((long long)page * pitch + at); }
static void *tz_at32(const void *p, int at) { return (int *)p + at; }
template <int N> static void tz_load(void *out, const void *p) {
  if ((uintptr_t)p % (4 * N)) { fprintf(stderr, "misaligned load\n"); abort(); }
  memcpy(out, p, 4 * N);
}
static unsigned tz_load32(const void *p) { unsigned v; memcpy(&v, p, 4); return v; }
static void tz_store8(void *p, unsigned a, unsigned b) { unsigned v[2] = {a, b}; memcpy(p, v, 8); }
static void tz_store16(void *p, const void *v) { memcpy(p, v, 16); }
static void tz_load16cg(void *v, const void *p) { memcpy(v, p, 16); }
static int tz_peek(const void *p) { int v; memcpy(&v, p, 4); return v; }
static unsigned tz_read32(const void *p) { return tz_load32(p); }
static void tz_read128(void *out, const void *p) { tz_load<4>(out, p); }
static void tz_rearm(void *bar) { ((Barrier *)bar)->init(1); }
static float tz_loadcg(const void *p) { float v; memcpy(&v, p, 4); return v; }
static unsigned tz_hmul2(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16)
    r |= (unsigned)narrow<false>(widen<false>(a >> e) * widen<false>(b >> e)) << e;
  return r;
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  uint64_t both = (uint64_t)b << 32 | a; unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
static void tz_zero16(void *p) { memset(p, 0, 16); }
