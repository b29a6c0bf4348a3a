"""Which expert a row or a block of tokens belongs to."""

EXPERT_OF_ROW = """\
// the expert in whose range a row lies, -1 for none; offsets of E + 1 rows, ascending
template <int E> __device__ __forceinline__ int tz_expert_of(const void *offsets, int row) {
  const int *o = (const int *)offsets; int before = 0;
  for (int i = threadIdx.x % 32; i <= E; i += 32) before += o[i] <= row;
  before = __reduce_add_sync(~0u, before) - 1;
  return before < E ? before : -1;
}
"""
"""Why not TileLang: a search by the lanes of a warp, of any number of experts, in one function."""
EXPERT_TABLE = """\
// table[e], e <= E: token blocks of the experts before e; table[E + 1 + e]: their tokens, kept inside 0..m
template <int E> __device__ __forceinline__ void tz_expert_table(void *table_, const void *offsets_, int m, int block) {
  int *blocks = (int *)table_, *tokens = blocks + E + 1, lane = threadIdx.x % 32, before = 0;
  const int *offsets = (const int *)offsets_;
  if (threadIdx.x >= 32) return;
#pragma unroll
  for (int base = 0; base < E; base += 32) {
    int e = base + lane, lo = min(max(offsets[min(e, E)], 0), m), hi = min(max(offsets[min(e + 1, E)], 0), m);
    int sum = (max(hi - lo, 0) + block - 1) / block;
    for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, sum, d); if (lane >= d) sum += v; }
    if (e < E) { tokens[e] = lo; blocks[e + 1] = before + sum; }
    if (e == E - 1) tokens[E] = hi;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) blocks[0] = 0;
}
// the expert of a token block, by a whole warp
template <int E> __device__ __forceinline__ int tz_expert_of(const void *table, int block) {
  int found = 0, lane = threadIdx.x % 32;
#pragma unroll
  for (int base = 1; base <= E; base += 32)
    found += __popc(__ballot_sync(~0u, base + lane <= E && ((const int *)table)[min(base + lane, E)] <= block));
  return found;
}
"""
"""Why not TileLang: a scan and a search by warp votes."""
EXPERT_SEARCH = """\
// what expert owns token block `at` of all: found = its number, the blocks before its first one, how many it has, and
// its tokens [3] .. [4] - 1, kept inside 0..m; behind the last block, one without tokens. By a whole warp
template <int E>
__device__ __forceinline__ void tz_expert_at(void *found_, const void *offsets_, int m, int block, int at) {
  int *found = (int *)found_, lane = threadIdx.x % 32, before = 0;
  const int *offsets = (const int *)offsets_;
  found[0] = 0; found[1] = at; found[2] = 1; found[3] = 0; found[4] = 0;
#pragma unroll 1
  for (int base = 0; base < E; base += 32) {
    int e = base + lane, lo = min(max(offsets[min(e, E)], 0), m), hi = min(max(offsets[min(e + 1, E)], 0), m);
    int own = (max(hi - lo, 0) + block - 1) / block, sum = own;
    for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, sum, d); if (lane >= d) sum += v; }
    int lane_of = __popc(__ballot_sync(~0u, before + sum <= at));  // lanes whose blocks end before this one
    if (lane_of < 32) {
      found[0] = base + lane_of;
      found[1] = before + __shfl_sync(~0u, sum - own, lane_of);
      found[2] = __shfl_sync(~0u, own, lane_of);
      found[3] = __shfl_sync(~0u, lo, lane_of);
      found[4] = __shfl_sync(~0u, hi, lane_of);
      break;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
}
"""
"""Why not TileLang: a scan and a search by warp votes."""
