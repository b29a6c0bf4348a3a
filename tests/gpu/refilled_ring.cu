// A ring of two stages that a bulk copy refills, for test_sanitizer.py. All threads of a warpgroup read a stage, meet
// at a barrier, and then tell the producer that it is free: each of them with EVERY, else one of each warp.
#include <cstdint>
#include <cstdio>

constexpr int STAGES = 2, ROUNDS = 8, WORDS = 128 * 4;
__device__ unsigned place(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(void *bar, int parity) {
  asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @!p bra AGAIN; }"
               :: "r"(place(bar)), "r"(parity) : "memory"); }
__device__ void arrive(void *bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" :: "r"(place(bar)) : "memory"); }

__global__ void ring(const unsigned *in, unsigned *out) {
  __shared__ __align__(128) unsigned stages[STAGES][WORDS];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  const int tx = threadIdx.x;
  if (tx == 0) {
    for (int i = 0; i < STAGES; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" :: "r"(place(&full[i])));
      asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(place(&empty[i])), "r"(EVERY ? 128 : 4));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  if (tx == 128)
    for (int n = 0; n < ROUNDS; ++n) {
      const int s = n % STAGES;
      if (n >= STAGES) wait(&empty[s], (n / STAGES - 1) & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" :: "r"(place(&full[s])), "n"(WORDS * 4)
                   : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
                   :: "r"(place(stages[s])), "l"(in + n * WORDS), "n"(WORDS * 4), "r"(place(&full[s])) : "memory");
    }
  if (tx >= 128) return;
  unsigned sum = 0;
  for (int n = 0; n < ROUNDS; ++n) {
    const int s = n % STAGES;
    wait(&full[s], n / STAGES & 1);
    for (int i = 0; i < 4; ++i) sum += *(volatile unsigned *)&stages[s][tx * 4 + i];
    asm volatile("bar.sync 1,128;" ::: "memory");
    if (EVERY || tx % 32 == 0) arrive(&empty[s]);
  }
  out[tx] = sum;
}

int main() {
  unsigned *in, *out, sums[128];
  cudaMalloc(&in, ROUNDS * WORDS * 4); cudaMalloc(&out, sizeof sums);
  cudaMemset(in, 1, ROUNDS * WORDS * 4);
  ring<<<1, 160>>>(in, out);
  if (cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost)) return 1;
  for (unsigned sum : sums) if (sum != ROUNDS * 4 * 0x01010101u) return 2;
  return 0;
}
