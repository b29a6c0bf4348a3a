// programmatic dependent launch: what the kernel ahead still writes (`late`) is there once a block has waited for it
#define EARLY
static std::vector<Copy> later; static bool landed; static PerCta<Together> waiting;
static std::vector<std::pair<const char *, long>> storage;
static void swap_later() {
  for (auto &c : later) std::swap_ranges((char *)c.to, (char *)c.to + c.bytes, (char *)c.from);
  landed = !landed;
}
extern "C" void late(void *to, void *from, int bytes) { later.push_back({to, from, bytes}); }
extern "C" void allocation(const void *at, long bytes) { storage.push_back({(const char *)at, bytes}); }
static void cudaTriggerProgrammaticLaunchCompletion() { Unseen unseen; if (landed) swap_later(); }
static void cudaGridDependencySynchronize() { gather<true>(*waiting, THREADS, swap_later); }
static void tz_prefetch(const void *p, int bytes) {
  const char *at = (const char *)p; bool known = false;
  for (auto &[from, size] : storage) known |= at >= from && at + bytes <= from + size;
  if (((uintptr_t)p | bytes) & 15 || bytes <= 0 || !known || landed) {
    fprintf(stderr, "prefetch of %d bytes beside the %zu allocations\n", bytes, storage.size()); abort(); }
}
