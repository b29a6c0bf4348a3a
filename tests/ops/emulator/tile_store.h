// T.copy of a shared tile to global memory by the copy engine: boxes of 64 halves, swizzled rows of 128 bytes.
constexpr int BOX_ROWS = @ROWS@;
namespace tl {
template <> inline bool tl_shuffle_elect<256>() { return threadIdx.x == 0; }
inline void tma_store(const TensorMap *map, const void *from, int col, int row) {
  reads(from, BOX_ROWS * 128);
  for (int r = 0; r < BOX_ROWS; ++r) for (int c = 0; c < 64; ++c)
    if (row + r < map->rows && 2 * (col + c) < map->bytes)
      memcpy((char *)map->base + (row + r) * map->bytes + 2 * (col + c),
             (const char *)from + r * 128 + ((c / 8 ^ r % 8) * 16 + c % 8 * 2), 2);
}
inline void tma_store_arrive() {}
template <int N, bool READ> void tma_store_wait() {}
template <class T> void increase_descriptor_offset(GmmaDescriptor &d, T bytes) { d.desc_ += (unsigned)bytes >> 4; }
}  // namespace tl
