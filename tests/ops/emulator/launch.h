static std::function<void()> body;
static char finish;  // what the host waits for
static void entry() {
  body();
  Cta *mine = cta; int me = current;
  { Unseen unseen; mine->finished[me] = 1; }
  released(&finish); become(home_known); swapcontext(&mine->fibers[me], &home);
}
extern "C" long dynamic_shared = SHARED;  // bytes that a launch gives a CTA
static void start(Cta &c, int slot, dim index, int threads) {
  c.slot = slot; c.index = index; c.left = threads;
  c.fibers.assign(threads, {}); c.finished.assign(threads, 0); c.known.assign(threads, nullptr);
  long bytes = SHARED + HEAP + threads * STACK;
  c.memory = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (c.memory == MAP_FAILED) { perror("stacks"); abort(); }
  memset(c.memory, 0xff, SHARED + HEAP);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(c.memory + dynamic_shared, SHARED - dynamic_shared);
#endif
  for (auto *state : PerCtaState::all()) state->start(slot);
  for (int i = 0; i < threads; ++i) {
    getcontext(&c.fibers[i]); c.fibers[i].uc_stack.ss_sp = c.memory + SHARED + HEAP + i * STACK;
    c.fibers[i].uc_stack.ss_size = STACK; c.fibers[i].uc_link = &home; makecontext(&c.fibers[i], entry, 0);
#ifdef RACES
    c.known[i] = __tsan_create_fiber(0);
#endif
  }
}
static void end(Cta &c) {
  for (auto *state : PerCtaState::all()) state->end(c.slot);
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(c.memory, SHARED + HEAP + THREADS * STACK);  // whoever is given these addresses next
#endif
  munmap(c.memory, SHARED + HEAP + THREADS * STACK);
#ifdef RACES
  for (void *fiber : c.known) __tsan_destroy_fiber(fiber);
#endif
}
// 1: all threads wait for something that never happens. `resident` CTAs run at once; a seed of 0 takes turns
extern "C" int launch(void **slots, int gx, int gy, int gz, int threads, int resident, unsigned seed) {
  Unseen unseen;
  THREADS = threads; chance = seed | 1; ctas.clear(); idle = 0;
#ifdef RACES
  home_known = __tsan_get_current_fiber();
#endif
  body = [&] { main_kernel(ARGS); };
  unsigned count = gx * gy * gz, next = 0; std::vector<Cta *> running; std::deque<int> free;
  for (int i = 0; i < resident; ++i) free.push_back(i);
  for (size_t turn = 0; next < count || running.size(); ++turn) {
    while (next < count && free.size()) {
      cta = &ctas.emplace_back();
      start(*cta, free.front(), {next % gx, next / gx % gy, next / gx / gy}, threads);
      free.pop_front(); running.push_back(cta); ++next;
    }
    size_t pick = (seed ? random_word() : turn) % running.size();
    Cta *mine = cta = running[pick];
    for (int n = 0; n < threads; ++n) {
      int i = seed ? (n + 32 * (seed % 7)) % threads : n;
      if (mine->finished[i]) continue;
      cta = mine; current = i; threadIdx = {(unsigned)i, 0, 0}; blockIdx = mine->index;
      become(mine->known[i]); swapcontext(&home, &mine->fibers[i]);
      mine->left -= mine->finished[i];
    }
    if (!mine->left) { end(*mine); free.push_back(mine->slot); running.erase(running.begin() + pick); }
    if (idle > (100L * threads + 100000) * resident) return 1;
  }
  acquired(&finish);
  return 0;
}
