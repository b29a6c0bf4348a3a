// CUDA's votes and shuffles of a warp
static int __shfl_up_sync(unsigned, int x, int d) {
  uint32_t in[2] = {(uint32_t)x, (uint32_t)d}, out;
  meet(in, 2, &out, 1, [](Meeting &w) {
    for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[std::max(l - (int)w.in[l][1], 0)][0]; });
  return out;
}
static int __shfl_sync(unsigned, int x, int from) {
  uint32_t in[2] = {(uint32_t)x, (uint32_t)from}, out;
  meet(in, 2, &out, 1, [](Meeting &w) { for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[w.in[l][1]][0]; });
  return out;
}
static unsigned __ballot_sync(unsigned, bool x) {
  uint32_t in = x, out;
  meet(&in, 1, &out, 1, [](Meeting &w) {
    uint32_t all = 0; for (int l = 0; l < 32; ++l) all |= w.in[l][0] << l;
    for (int l = 0; l < 32; ++l) w.out[l][0] = all; });
  return out;
}
static int __ffs(unsigned v) { return __builtin_ffs(v); }
