"""The smallest programs that show what docs/tile-programs.md says of TileLang 0.1.15 and warp specialization by hand.

test_tilelang_traps.py lowers each one and asserts what was seen, so that a TileLang which mends it is noticed.
"""

import tilelang.language as T
from terrazzo.layouts import Fragment
from terrazzo.layouts.tilelang import fragment

STEPS, TILE = 8, 64
WIDE = (TILE, STEPS * TILE)


def by_hand():
    """Works: a producer branch with T.tma_copy, barriers, T.gemm on an annotated fragment, named barriers."""

    @T.prim_func
    def main(A: T.Tensor(WIDE, "float16"), B: T.Tensor(WIDE, "float16"), C: T.Tensor((TILE, TILE), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((2, TILE, TILE), "float16"), T.alloc_shared((2, TILE, TILE), "float16")
            left, acc = T.alloc_fragment((TILE, TILE), "float16"), T.alloc_fragment((TILE, TILE), "float32")
            full, empty = T.alloc_barrier([128] * 2), T.alloc_barrier([128] * 2)
            T.annotate_layout({left: fragment(Fragment.wgmma_a(16), TILE, TILE)})
            if T.get_thread_binding() >= 128:
                for k in T.serial(STEPS):
                    T.barrier_wait(empty[k % 2], k // 2 % 2 ^ 1)
                    T.tma_copy(A[:, k * TILE : (k + 1) * TILE], As[k % 2, :, :], barrier=full[k % 2])
                    T.tma_copy(B[:, k * TILE : (k + 1) * TILE], Bs[k % 2, :, :], barrier=full[k % 2])
                    T.barrier_arrive(full[k % 2])
            else:
                T.clear(acc)
                for k in T.serial(STEPS):
                    T.barrier_wait(full[k % 2], k // 2 % 2)
                    for i, j in T.Parallel(TILE, TILE):
                        left[i, j] = As[k % 2, i, j] * T.float16(2)
                    T.sync_threads(1, 128)
                    T.gemm(left, Bs[k % 2, :, :], acc, transpose_B=True)
                    T.barrier_arrive(empty[k % 2])
                T.copy(acc, C)

    return main


def copy_with_barrier():
    """T.copy takes no barrier; T.tma_copy does."""

    @T.prim_func
    def main(A: T.Tensor((TILE, TILE), "float16"), B: T.Tensor((TILE, TILE), "float16")):
        with T.Kernel(1, threads=128):
            tile, full = T.alloc_shared((TILE, TILE), "float16"), T.alloc_barrier([1])
            T.copy(A, tile, barrier=full[0])
            T.barrier_wait(full[0], 0)
            T.copy(tile, B)

    return main


def pipelined_group():
    """T.Pipelined has lost its argument `group`."""

    @T.prim_func
    def main(A: T.Tensor(WIDE, "float16"), B: T.Tensor(WIDE, "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((TILE, TILE), "float16")
            for k in T.Pipelined(STEPS, num_stages=2, group=[[0], [1]]):
                T.copy(A[0, k * TILE], tile)
                T.copy(tile, B[0, k * TILE])

    return main


def producer(copy=T.copy, pipelined=False, siblings=False):
    """One warpgroup fills a tile, another one stores it. copy: T.copy, or T.tma_copy with its barrier."""
    bulk = copy is T.tma_copy

    @T.macro
    def fill(A, tile, full, empty):
        for k in T.Pipelined(STEPS, num_stages=2) if pipelined else T.serial(STEPS):
            T.barrier_wait(empty[0], k % 2 ^ 1)
            if bulk:
                T.tma_copy(A[0, k * TILE], tile, barrier=full[0])
            else:
                T.copy(A[0, k * TILE], tile)
            T.barrier_arrive(full[0])

    @T.macro
    def store(tile, B, full, empty):
        for k in T.serial(STEPS):
            T.barrier_wait(full[0], k % 2)
            for i, j in T.Parallel(TILE, TILE):
                B[i, k * TILE + j] = tile[i, j]
            T.barrier_arrive(empty[0])

    @T.prim_func
    def branches(A: T.Tensor(WIDE, "float16"), B: T.Tensor(WIDE, "float16")):
        with T.Kernel(1, threads=256):
            tile, full, empty = T.alloc_shared((TILE, TILE), "float16"), T.alloc_barrier([128]), T.alloc_barrier([128])
            if T.get_thread_binding() >= 128:
                fill(A, tile, full, empty)
            else:
                store(tile, B, full, empty)

    @T.prim_func
    def blocks(A: T.Tensor(WIDE, "float16"), B: T.Tensor(WIDE, "float16")):
        with T.Kernel(1, threads=256):
            tile, full, empty = T.alloc_shared((TILE, TILE), "float16"), T.alloc_barrier([128]), T.alloc_barrier([128])
            with T.ws(1):
                fill(A, tile, full, empty)
            with T.ws(0):
                store(tile, B, full, empty)

    return blocks if siblings else branches


def pipelined_product(stages=0, order=None, stage=None, annotated=False):
    """A product of a run-time number of steps; annotated: of STEPS, and operand A is made in registers."""
    options = dict(num_stages=stages) if order is None else dict(order=order, stage=stage)

    @T.prim_func
    def run_time(
        A: T.Tensor(WIDE, "float16"), B: T.Tensor(WIDE, "float16"), C: T.Tensor((TILE, TILE), "float32"), n: T.int32
    ):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((TILE, TILE), "float16"), T.alloc_shared((TILE, TILE), "float16")
            acc = T.alloc_fragment((TILE, TILE), "float32")
            T.clear(acc)
            for k in T.Pipelined(n, **options):
                T.copy(A[0, k * TILE], As)
                T.copy(B[0, k * TILE], Bs)
                T.gemm(As, Bs, acc, transpose_B=True)
            T.copy(acc, C)

    @T.prim_func
    def registers(A: T.Tensor(WIDE, "float16"), B: T.Tensor(WIDE, "float16"), C: T.Tensor((TILE, TILE), "float32")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((TILE, TILE), "float16"), T.alloc_shared((TILE, TILE), "float16")
            left, acc = T.alloc_fragment((TILE, TILE), "float16"), T.alloc_fragment((TILE, TILE), "float32")
            T.annotate_layout({left: fragment(Fragment.wgmma_a(16), TILE, TILE)})
            T.clear(acc)
            for k in T.Pipelined(STEPS, **options):
                T.copy(A[0, k * TILE], As)
                T.copy(B[0, k * TILE], Bs)
                for i, j in T.Parallel(TILE, TILE):
                    left[i, j] = As[i, j] * T.float16(2)
                T.gemm(left, Bs, acc, transpose_B=True)
            T.copy(acc, C)

    return registers if annotated else run_time


def viewed():
    """Operand A in registers, written through a view of its words."""

    @T.prim_func
    def main(
        W: T.Tensor((TILE, TILE // 2), "uint32"),
        B: T.Tensor((TILE, TILE), "float16"),
        C: T.Tensor((TILE, TILE), "float32"),
    ):
        with T.Kernel(1, threads=128):
            left, Bs = T.alloc_fragment((TILE, TILE), "float16"), T.alloc_shared((TILE, TILE), "float16")
            acc = T.alloc_fragment((TILE, TILE), "float32")
            words = T.view(left, (TILE, TILE // 2), "uint32")
            T.copy(B, Bs)
            T.clear(acc)
            for i, j in T.Parallel(TILE, TILE // 2):
                words[i, j] = W[i, j]
            T.gemm(left, Bs, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def words_of_a_stage():
    """Automatic specialization: words of a stage are loaded to registers and used; then the stage is given back."""

    @T.prim_func
    def main(W: T.Tensor((STEPS, 512), "uint32"), B: T.Tensor(WIDE, "float16"), C: T.Tensor((TILE, TILE), "float32")):
        with T.Kernel(1, threads=128):
            Ws, Bs = T.alloc_shared((512,), "uint32"), T.alloc_shared((TILE, TILE), "float16")
            left, acc = T.alloc_fragment((TILE, TILE), "float16"), T.alloc_fragment((TILE, TILE), "float32")
            words, thread = T.alloc_local((4,), "uint32"), T.get_thread_binding()
            T.annotate_layout({left: fragment(Fragment.wgmma_a(16), TILE, TILE)})
            T.clear(acc)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(W[k, 0], Ws)
                T.copy(B[0, k * TILE], Bs)
                for i in T.vectorized(4):
                    words[i] = Ws[thread * 4 + i]
                for i in T.unroll(32):
                    row, col = (
                        thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8,
                        i // 4 * 8 + thread % 4 * 2 + i % 2,
                    )
                    left[row, col] = T.cast((words[i // 8] >> T.cast(i % 8 * 4, "uint32")) & T.uint32(15), "float16")
                T.gemm(left, Bs, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def atomics(which):
    """T.atomic_or, or T.atomic_add with and without its result, that shall be acquire and release."""

    @T.prim_func
    def main(A: T.Tensor((TILE,), "uint32")):
        with T.Kernel(1, threads=TILE):
            thread = T.cast(T.get_thread_binding(), "uint32")
            if which == "or":
                T.atomic_or(A[0], thread, memory_order="acq_rel")
            elif which == "add":
                T.atomic_add(A[0], thread, memory_order="acq_rel")
            else:
                A[T.get_thread_binding()] = T.atomic_add(A[0], thread, memory_order="acq_rel", return_prev=True)

    return main
