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
