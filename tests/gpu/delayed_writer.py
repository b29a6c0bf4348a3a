"""A kernel for tests of programmatic dependent launch: it lets the next kernel start, sleeps, and writes then."""

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target

SOURCE = """\
__device__ __forceinline__ void tz_sleep(int us) {
  for (long long begin = clock64(); clock64() - begin < 1500ll * us;) __nanosleep(1000);
}
"""


def build(target: Target, *, dtype: str):
    """The prim_func `main(X, Y, us)`: Y [n] becomes X [n], some `us` microseconds after the next kernel may start."""
    import tilelang.language as T

    N = T.dynamic("n")

    @T.prim_func
    def main(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype), us: T.int32):
        with T.Kernel(T.ceildiv(N, 256), threads=256, prelude=SOURCE) as block:
            tx = T.get_thread_binding()
            T.pdl_trigger()
            T.pdl_sync()
            T.call_extern("handle", "tz_sleep", us)
            if block * 256 + tx < N:
                Y[block * 256 + tx] = X[block * 256 + tx]

    return main


def request(dtype: str, target: Target) -> KernelRequest:
    return KernelRequest("test.delayed_writer", f"{__name__}:build", (("dtype", dtype),), target)
