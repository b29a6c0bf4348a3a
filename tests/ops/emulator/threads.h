// CUDA threads as fibers of one process: several CTAs at once, in an order that a seed picks. With RACES they are
// threads of ThreadSanitizer, to which only what CUDA says orders memory is an order.
#include <ucontext.h>
#include <sys/mman.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>
using std::max; using std::min;
typedef unsigned uint;
#define __device__
#define __forceinline__ inline
#define __global__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __restrict__
#define CUDART_INF_F INFINITY
struct half_t { uint16_t bits; };
struct bfloat16_t { uint16_t bits; };
struct dim { unsigned x, y, z; };

// ---------------------------------------------------------------- what ThreadSanitizer is told
#ifdef RACES
extern "C" {
void *__tsan_get_current_fiber(); void *__tsan_create_fiber(unsigned); void __tsan_destroy_fiber(void *);
void __tsan_switch_to_fiber(void *, unsigned); void __tsan_acquire(void *); void __tsan_release(void *);
void __tsan_read_range(void *, unsigned long); void __tsan_write_range(void *, unsigned long);
void AnnotateIgnoreReadsBegin(const char *, int); void AnnotateIgnoreReadsEnd(const char *, int);
void AnnotateIgnoreWritesBegin(const char *, int); void AnnotateIgnoreWritesEnd(const char *, int);
}
struct Unseen {  // the emulator's own accesses, while one of these lives
  Unseen() { AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0); }
  ~Unseen() { AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreReadsEnd("", 0); }
};
static void released(const volatile void *at) { __tsan_release((void *)at); }  // earlier accesses come before `acquired`
static void acquired(const volatile void *at) { __tsan_acquire((void *)at); }
static void reads(const void *at, long bytes) { __tsan_read_range((void *)at, bytes); }
static void writes(void *at, long bytes) { __tsan_write_range(at, bytes); }
static void become(void *fiber) { __tsan_switch_to_fiber(fiber, 1); }
#else
struct Unseen { Unseen() {} };
static void released(const volatile void *) {}
static void acquired(const volatile void *) {}
static void reads(const void *, long) {}
static void writes(void *, long) {}
static void become(void *) {}
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// ---------------------------------------------------------------- CTAs and their threads
static int THREADS;
constexpr long SHARED = 256 * 1024, STACK = 192 * 1024;
struct Meeting { int arrived = 0; long round = 0; uint32_t in[32][12], out[32][8]; };
struct Cta {
  int slot, left; dim index; char *memory = nullptr;  // shared memory, a shared-memory heap for `__shared__`, stacks
  std::vector<ucontext_t> fibers; std::vector<char> finished; std::vector<void *> known;
};
static std::deque<Cta> ctas; static Cta *cta;
static ucontext_t home; static void *home_known;
static dim threadIdx, blockIdx; static int current; static long idle;
static char *shared_memory() { return cta->memory; }
static char *shared_slot(int index) { return cta->memory + SHARED + index * 8192L; }  // a `__shared__` declaration's
constexpr long HEAP = 16 * 8192;

struct PerCtaState {
  static std::vector<PerCtaState *> &all() { static std::vector<PerCtaState *> states; return states; }
  PerCtaState() { all().push_back(this); }
  virtual void start(int slot) = 0;
  virtual void end(int) {}
};
template <class T> struct PerCta : PerCtaState {  // state of the emulator that each CTA has for itself
  std::deque<T> at;
  void start(int slot) { while ((int)at.size() <= slot) at.emplace_back(); at[slot] = T(); }
  T &operator*() { return at[cta->slot]; }
  auto &operator[](int i) { return at[cta->slot][i]; }
};

static uint32_t chance = 1;
static uint32_t random_word() { chance ^= chance << 13; chance ^= chance >> 17; return chance ^= chance << 5; }
static void yield() {
  Cta *mine = cta; int me = current;
  become(home_known); swapcontext(&mine->fibers[me], &home);
}
template <class F> static void wait_until(F ready) {
  while (!ready()) { Unseen unseen; ++idle; yield(); }
  Unseen unseen; idle = 0;
}

// ---------------------------------------------------------------- threads that meet
static PerCta<std::array<Meeting, 32>> warps;
struct Together { int arrived = 0; long round = 0; char order[2]; };
// `count` threads meet, the last one does `work`; ORDERS: as a barrier does, their earlier accesses come before
template <bool ORDERS, class F> static void gather(Together &t, int count, F work) {
  long round;
  {
    Unseen unseen; round = t.round;
    if (ORDERS) released(&t.order[round & 1]);
    if (++t.arrived == count) { work(); t.arrived = 0; ++t.round; }
    else wait_until([&] { return t.round != round; });
  }
  if (ORDERS) acquired(&t.order[round & 1]);
}
// a warp exchanges words, which orders no memory
template <class F> static void meet(const uint32_t *in, int n, uint32_t *out, int m, F work) {
  Unseen unseen;
  Meeting &w = warps[current / 32]; int lane = current % 32;
  if (n) memcpy(w.in[lane], in, 4 * n);
  long round = w.round;
  if (++w.arrived == 32) { work(w); w.arrived = 0; ++w.round; }
  else wait_until([&] { return w.round != round; });
  if (m) memcpy(out, w.out[lane], 4 * m);
}
static PerCta<Together> whole; static PerCta<std::array<Together, 32>> each_warp, warpgroups, named;
static void __syncthreads() { gather<true>(*whole, THREADS, [] {}); }
static void __syncwarp() { gather<true>(each_warp[current / 32], 32, [] {}); }
static void tz_syncwarp() { __syncwarp(); }
template <class F> static void wg_meet(F work) { gather<false>(warpgroups[current / 128], 128, work); }
static void bar_sync(int id, int count) { gather<true>(named[id], count, [] {}); }
static int __clz(int a) { return a ? __builtin_clz(a) : 32; }

// ---------------------------------------------------------------- words of global memory that CTAs share
static int load_acquire(int *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store_release(int *word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static int add_acq_rel(int *word, int value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
