// CTAs of a cluster, CLUSTER of them along x: one barrier, and what they send to one another's shared memory
static std::vector<std::array<long, 4>> clusters;  // x, y, z, and how many threads have arrived
struct NewLaunch : PerCtaState { void start(int) { if (ctas.size() == 1) clusters.clear(); } };
static NewLaunch new_launch;
static std::array<long, 4> &my_cluster() {
  long x = cta->index.x / CLUSTER, y = cta->index.y, z = cta->index.z;
  for (auto &it : clusters) if (it[0] == x && it[1] == y && it[2] == z) return it;
  return clusters.emplace_back(std::array<long, 4>{x, y, z, 0});
}
static Cta &peer(int rank) {
  for (auto &it : ctas)
    if (it.index.x == cta->index.x / CLUSTER * CLUSTER + rank && it.index.y == cta->index.y && it.index.z == cta->index.z) {
      if (!it.left) { fprintf(stderr, "a CTA of the cluster has ended\n"); abort(); }
      return it;
    }
  fprintf(stderr, "a CTA of the cluster has not begun\n"); abort();
}
template <class T> static T *of_peer(const T *p, int rank) {
  return (T *)(peer(rank).memory + ((const char *)p - shared_memory())); }
static char all_arrived;
struct Waits : PerCta<int> {  // of threads, for the cluster
  void end(int slot) {
    if (at[slot] % THREADS == 0) return;
    fprintf(stderr, "%d of %d threads wait for the cluster: racecheck hangs\n", at[slot] % THREADS, THREADS); abort();
  }
};
static Waits waits;
namespace tl {
static void cluster_arrive_relaxed() { Unseen unseen; ++my_cluster()[3]; }
static void cluster_arrive() { released(&all_arrived); cluster_arrive_relaxed(); }
static void cluster_wait() {
  wait_until([&] { return my_cluster()[3] == CLUSTER * THREADS; }); acquired(&all_arrived); Unseen unseen; ++*waits; }
}
static void send(void *p, int rank, const void *v, int bytes, const void *bar) {
  if ((uintptr_t)p % bytes) { fprintf(stderr, "misaligned st.async\n"); abort(); }
  Barrier &there = *of_peer((Barrier *)bar, rank);
  void *to = of_peer(p, rank);
  writes(to, bytes);
  Unseen unseen;
  memcpy(to, v, bytes);
  released(there.order(there.state & 1)); there.state -= 2 * bytes;
}
static void tz_send16(void *p, int rank, const void *v, const void *bar) { send(p, rank, v, 16, bar); }
static void tz_send8(void *p, int rank, float x, float y, const void *bar) {
  float v[2] = {x, y}; send(p, rank, v, 8, bar); }
static void tz_arrive_at(const void *bar, int rank) { of_peer((Barrier *)bar, rank)->arrive(); }
static void tz_wait_together(unsigned barrier, int parity) { tz_wait(barrier, parity); }
