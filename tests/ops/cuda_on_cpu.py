"""Runs the CUDA text of a generated kernel on the CPU, a fiber for each thread: for machines without a GPU.

Warp primitives, tensor-core products and barriers are emulated; asynchronous copies poison their destination when they
are issued and deliver when they are waited for, so that a stage that is read too early or refilled too soon is seen.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import torch
from terrazzo.ops.attention.device import PRIMITIVES as attention_primitives

HEADER = r"""
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
static dim threadIdx, blockIdx;
static int THREADS;
alignas(1024) static char smem[256 * 1024];

// ---------------------------------------------------------------- fibers
static std::vector<ucontext_t> fibers; static ucontext_t home; static int current; static std::vector<char> finished;
static long idle;
static void yield() { int me = current; swapcontext(&fibers[me], &home); threadIdx.x = me; }
template <class F> static void wait_until(F ready) { while (!ready()) { ++idle; yield(); } idle = 0; }
struct Meeting { int arrived = 0; long round = 0; uint32_t in[32][12], out[32][8]; };
static Meeting warps[32]; static int block_arrived; static long block_round;
template <class F> static void meet(const uint32_t *in, int n, uint32_t *out, int m, F work) {
  Meeting &w = warps[current / 32]; int lane = current % 32;
  if (n) memcpy(w.in[lane], in, 4 * n);
  long round = w.round;
  if (++w.arrived == 32) { work(w); w.arrived = 0; ++w.round; }
  else wait_until([&] { return w.round != round; });
  if (m) memcpy(out, w.out[lane], 4 * m);
}
static void __syncthreads() {
  long round = block_round;
  if (++block_arrived == THREADS) { block_arrived = 0; ++block_round; }
  else wait_until([&] { return block_round != round; });
}
static int __clz(int a) { return a ? __builtin_clz(a) : 32; }
static void __syncwarp() { meet(nullptr, 0, nullptr, 0, [](Meeting &) {}); }

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
    static double x[16][16], y[16][8];
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
struct Copy { void *to; const void *from; int bytes; };
static void poison(void *to, int bytes) { memset(to, 0xff, bytes); }
static void deliver(std::vector<Copy> &copies) {
  for (auto &c : copies) { memcpy(c.to, c.from, c.bytes); memset((char *)c.to + c.bytes, 0, 16 - c.bytes); }
  copies.clear();
}
struct Barrier {
  uint16_t expected, pending; int32_t state;  // bytes outstanding * 2 + phase
  static std::vector<std::pair<Barrier *, Copy>> flying;
  void init(int n) { expected = pending = n; state = 0; }
  void expect_transaction(int bytes) { state += 2 * bytes; }
  void arrive() { --pending; }
  void settle() {
    if (pending) return;
    auto mine = [&](auto &f) { return f.first == this; };
    for (auto &f : flying) if (mine(f)) {
      memcpy(f.second.to, f.second.from, f.second.bytes); state -= 2 * f.second.bytes; }
    flying.erase(std::remove_if(flying.begin(), flying.end(), mine), flying.end());
    if (state >> 1) { fprintf(stderr, "a barrier expects other bytes than were copied\n"); abort(); }
    state ^= 1; pending = expected;
  }
  void wait(int parity) { wait_until([&] { if ((state & 1) == parity) settle(); return (state & 1) != parity; }); }
};
std::vector<std::pair<Barrier *, Copy>> Barrier::flying;
static std::vector<std::vector<std::vector<Copy>>> groups;
static void tz_cp_async(void *to, const void *from, int bytes) {
  poison(to, 16); groups[current].back().push_back({to, from, bytes});
  if (((uintptr_t)to | (uintptr_t)from) & 15) { fprintf(stderr, "misaligned cp.async\n"); abort(); }
}
static void tz_cp_commit() { groups[current].emplace_back(); }
template <int N> static void tz_cp_wait() {
  auto &mine = groups[current];
  for (size_t i = 0; i + 1 + N < mine.size(); ++i) deliver(mine[i]);
  __syncwarp();
}
static void tz_bulk(void *to, const void *from, int bytes, void *bar) {
  if ((((uintptr_t)to | (uintptr_t)from) & 15) || bytes % 16 || bytes <= 0) {
    fprintf(stderr, "misaligned bulk copy\n"); abort(); }
  poison(to, bytes); Barrier::flying.push_back({(Barrier *)bar, {to, from, bytes}});
}
template <bool BF16> static unsigned tz_pack2(float lo, float hi) {
  return narrow<BF16>(lo) | (unsigned)narrow<BF16>(hi) << 16; }
template <bool BF16, int HI> static float tz_unpack(unsigned v) { return widen<BF16>(v >> 16 * HI); }
static bool tz_last_arrival(int *sem, int n) {
  static int last;
  __syncthreads();
  if (threadIdx.x == 0) { last = (*sem)++ == n - 1; if (last) *sem = 0; }
  __syncthreads();
  bool mine = last;
  __syncthreads();
  return mine;
}
static void tz_fence() {}
static unsigned tz_transpose(unsigned x) {
  unsigned r;
  meet(&x, 1, &r, 1, [](Meeting &w) {
    static uint16_t m[8][8];
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
"""

LDMATRIX = r"""
template <bool TRANS> static void ldmatrix(void *out, const void *p) {
  uint32_t in[4]; memcpy(in, p, 16);
  if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned ldmatrix\n"); abort(); }
  meet(in, 4, (uint32_t *)out, 4, [](Meeting &w) {
    for (int l = 0; l < 32; ++l) for (int j = 0; j < 4; ++j) {
      uint32_t r = 0;
      for (int e = 0; e < 2; ++e) {
        int row = TRANS ? l % 4 * 2 + e : l / 4, col = TRANS ? l / 4 : l % 4 * 2 + e;
        r |= (w.in[j * 8 + row][col / 2] >> 16 * (col % 2) & 0xFFFF) << 16 * e;
      }
      w.out[l][j] = r;
    }
  });
}
static void tz_ldmatrix4(void *out, const void *p) { ldmatrix<false>(out, p); }
static void tz_ldmatrix4_trans(void *out, const void *p) { ldmatrix<true>(out, p); }
"""

EARLY = r"""
// programmatic dependent launch: what the kernel ahead still writes (`late`) is there once a block has waited for it
static std::vector<Copy> later; static bool landed; static int waiting; static long waits;
static const char *storage; static long storage_bytes;
static void swap_later() {
  for (auto &c : later) std::swap_ranges((char *)c.to, (char *)c.to + c.bytes, (char *)c.from);
  landed = !landed;
}
extern "C" void late(void *to, void *from, int bytes) { later.push_back({to, from, bytes}); }
extern "C" void allocation(const void *at, long bytes) { storage = (const char *)at; storage_bytes = bytes; }
static void cudaTriggerProgrammaticLaunchCompletion() { if (landed) swap_later(); }
static void cudaGridDependencySynchronize() {
  long round = waits;
  if (++waiting == THREADS) { waiting = 0; ++waits; swap_later(); }
  else wait_until([&] { return waits != round; });
}
static void tz_prefetch(const void *p, int bytes) {
  const char *at = (const char *)p;
  if (((uintptr_t)p | bytes) & 15 || bytes <= 0 || at < storage || at + bytes > storage + storage_bytes || landed) {
    fprintf(stderr, "prefetch of %d bytes at %ld of %ld\n", bytes, long(at - storage), storage_bytes); abort(); }
}
"""

LAUNCH = r"""
static std::function<void()> body;
static void entry() { body(); finished[current] = 1; swapcontext(&fibers[current], &home); }
extern "C" int launch(void **slots, int gx, int gy, int gz, int threads) {
  THREADS = threads;
  for (unsigned block = 0; block < (unsigned)gx * gy * gz; ++block) {
    blockIdx = {block % gx, block / gx % gy, block / gx / gy};
    fibers.assign(threads, {}); finished.assign(threads, 0); Barrier::flying.clear(); block_arrived = 0;
    groups.assign(threads, std::vector<std::vector<Copy>>(1));
    memset(smem, 0xff, sizeof smem);
    for (auto &w : warps) w.arrived = 0;
    static std::vector<char> stacks; constexpr size_t SIZE = 192 * 1024; stacks.resize(threads * SIZE);
    body = [&] { main_kernel(ARGS); };
    for (int i = 0; i < threads; ++i) {
      getcontext(&fibers[i]); fibers[i].uc_stack.ss_sp = &stacks[i * SIZE]; fibers[i].uc_stack.ss_size = SIZE;
      fibers[i].uc_link = &home; makecontext(&fibers[i], entry, 0);
    }
    int left = threads; idle = 0;
    while (left) {
      for (int i = 0; i < threads; ++i) if (!finished[i]) {
        current = i; threadIdx.x = i; swapcontext(&home, &fibers[i]);
        if (finished[i]) --left;
      }
      if (idle > 100L * threads + 100000) return 1;  // nobody gets on
    }
  }
  return 0;
}
"""


class CpuKernel:
    """A compiled emulation; call it with the grid and every kernel parameter by name."""

    def __init__(self, source: str, converters: list[str], threads: int, folder: Path) -> None:
        text = source[source.index('extern "C" __global__') :]
        start = text.index("main_kernel", text.index("main_kernel") + 1)  # the second is the definition
        body = text[text.rindex("extern", 0, start) :]
        body = body.replace("extern __shared__", "//").replace("__shared__", "static")
        found = re.search(r"main_kernel\((.*?)\) \{", body, re.S).group(1)
        self.params = [(p.strip().rpartition(" ")[0], p.strip().rpartition(" ")[2]) for p in found.split(",")]
        args = ", ".join(
            f"*(({kind.replace('__restrict__', '').strip()} *)slots[{i}])" for i, (kind, _) in enumerate(self.params)
        )
        dynamic = re.findall(r"extern __shared__ [^;]*?(\w+)\[\]", source)
        shared = ""
        for name in dynamic:
            kind = re.search(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) " + name, source).group(1)
            shared += f"static {kind} *const {name} = ({kind} *)smem;\n"
        cpp, library = folder / "kernel.cpp", folder / "kernel.so"
        plain = attention_primitives["compare"].source  # host C++ as it is
        cpp.write_text(HEADER + plain + "".join(converters) + shared + body + LAUNCH.replace("ARGS", args))
        done = subprocess.run(
            ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(cpp)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        self.library, self.threads, self.held = ctypes.CDLL(str(library)), threads, []

    def late(self, tensor: torch.Tensor, stale: torch.Tensor) -> None:
        """Until a block waits for the kernel ahead, it sees `stale` in place of the tensor (with `EARLY`)."""
        held = tensor.clone()
        tensor.copy_(stale)
        self.held.append(held)
        self.library.late(*(ctypes.c_void_p(t.data_ptr()) for t in (tensor, held)), held.nbytes)

    def allocation(self, tensor: torch.Tensor) -> None:
        """The only memory that may be prefetched (with `EARLY`)."""
        self.library.allocation(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_long(tensor.nbytes))

    def __call__(self, grid: tuple[int, int, int], /, **values) -> None:
        held = []
        for kind, name in self.params:
            value = values[name]
            if "*" in kind:
                held.append(ctypes.c_void_p(value.data_ptr()))
            else:
                held.append(ctypes.c_float(value) if "float" in kind else ctypes.c_int(value))
        slots = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        stuck = self.library.launch(slots, *grid, self.threads)
        assert not stuck, "the kernel waits for something that never happens"
