"""Small TileLang programs for the tests of the ground floor, and one that does not compile."""

import tilelang.language as T


def scale(target, n=256):
    """y = alpha * x + m, the smallest program with a dynamic size and scalars of two dtypes."""
    rows = T.dynamic("rows")

    @T.prim_func
    def main(X: T.Tensor((rows, n), "float32"), Y: T.Tensor((rows, n), "float32"), m: T.int32, alpha: T.float32):
        with T.Kernel(rows, threads=128) as row:
            for i in T.Parallel(n):
                Y[row, i] = alpha * X[row, i] + T.cast(m, "float32")

    return main


def gemm(target, n=128):
    """C = A B^T of one depth of 64, with the target's tensor-core instruction."""

    @T.prim_func
    def main(A: T.Tensor((n, 64), "float16"), B: T.Tensor((n, 64), "float16"), C: T.Tensor((n, n), "float32")):
        with T.Kernel(n // 64, n // 64, threads=128) as (column, row):
            left = T.alloc_shared((64, 64), "float16")
            right = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(A[row * 64, 0], left)
            T.copy(B[column * 64, 0], right)
            T.clear(acc)
            T.gemm(left, right, acc, transpose_B=True)
            T.copy(acc, C[row * 64, column * 64])

    return main


def tma_copy(target, n=128):
    """A copy through shared memory that uses TMA descriptors for both tensors."""

    @T.prim_func
    def main(A: T.Tensor((n, 256), "float16"), B: T.Tensor((n, 256), "float16")):
        with T.Kernel(n // 64, threads=128) as row:
            tile = T.alloc_shared((64, 64), "float16")
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[row * 64, k * 64], tile)
                T.copy(tile, B[row * 64, k * 64])

    return main


def cluster(target, n=128):
    """Clusters of two blocks that wait for the kernel before them in the stream (programmatic dependent launch)."""

    @T.prim_func
    def main(A: T.Tensor((n, 256), "float16"), B: T.Tensor((n, 256), "float16")):
        with T.Kernel(n, 2, threads=128, cluster_dims=(2, 1, 1)) as (row, half):
            T.pdl_sync()
            for i in T.Parallel(128):
                B[row, half * 128 + i] = A[row, half * 128 + i]
            T.cluster_sync()

    return main


def broken(target, n=64):
    """Shared memory that no target has."""

    @T.prim_func
    def main(A: T.Tensor((n, n), "float16")):
        with T.Kernel(1, threads=128):
            T.call_extern("handle", "no_such_device_function", T.access_ptr(A, "rw"))

    return main
