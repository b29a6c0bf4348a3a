"""W4A16, y = x w^T, as a TileLang tile program. It compiles for sm_90a and sm_80; with a GPU it is compared and timed.

The weights are operand A of the tensor core, in registers. `layouts` derives which thread holds which code of a packed
word. The same derivation is the TileLang layout of the fragment that T.gemm reads. So words become operands where they
are loaded, without a shuffle. T.Pipelined is cp.async here; T.gemm is wgmma on sm_90a and mma.sync on sm_80.
"""

import tilelang
import tilelang.language as T
from terrazzo.layouts import get_converter, get_instance
from terrazzo.layouts.tilelang import expressions, fragment
from tvm.target import Target

BLOCK = get_instance("w4a16")  # 64 x 64 codes: 128 threads, four 32-bit words each, one shared-memory load
FIELDS = get_converter("u4_f16_magic").pos_map  # (register, element) of a word's eight values -> its 4-bit field
# Automatic warp specialization would give a stage back after the load of its words, before they have arrived.
OWN_WARPS = {"tl.disable_warp_specialized": True}
BN, BK, GROUP, ZERO = 128, BLOCK.block_k, 128, 8  # a tile is two blocks, one for each warpgroup


@T.macro
def convert(Ws, Ss, A):
    """Four words of each thread to 32 halves of A: 1024 + code is one AND and one OR for two codes."""
    thread = T.get_thread_binding()
    w = T.alloc_local((BLOCK.load_words,), "uint32")
    pair = T.alloc_local((1,), "uint32")
    for i in T.vectorized(BLOCK.load_words):
        w[i] = Ws[thread // BLOCK.threads, thread % BLOCK.threads * BLOCK.load_words + i]
    for word in T.unroll(BLOCK.load_words):
        for register in T.unroll(4):
            pair[0] = (w[word] >> T.cast(4 * register, "uint32")) & T.uint32(0x000F000F) | T.uint32(0x64006400)
            for element in T.unroll(2):
                field = expressions(FIELDS, register=register, element=element)["field"]
                to = expressions(BLOCK.map, field=field, word=word, thread=thread % BLOCK.threads)
                row = thread // BLOCK.threads * BLOCK.block_rows + to["row"]
                value = T.reinterpret(T.cast(pair[0] >> T.cast(16 * element, "uint32"), "uint16"), "float16")
                A[row, to["k"]] = (value - T.float16(1024 + ZERO)) * Ss[row]


def tile_w4a16(n, k, block_tokens=64, stages=3):
    """The prim_func of X [m, k], W [k / 64, n / 64, 512] packed, S [k / GROUP, n], Y [m, n]; n, k multiples of 128."""
    m = T.dynamic("m")

    @T.prim_func
    def main(
        X: T.Tensor((m, k), "float16"),
        W: T.Tensor((k // BK, n // BLOCK.block_rows, BLOCK.words_per_block), "uint32"),
        S: T.Tensor((k // GROUP, n), "float16"),
        Y: T.Tensor((m, n), "float16"),
    ):
        with T.Kernel(T.ceildiv(m, block_tokens), n // BN, threads=2 * BLOCK.threads) as (bm, bn):
            Xs = T.alloc_shared((block_tokens, BK), "float16")
            Ws = T.alloc_shared((2, BLOCK.words_per_block), "uint32")
            Ss = T.alloc_shared((BN,), "float16")
            Ys = T.alloc_shared((block_tokens, BN), "float16")
            A = T.alloc_fragment((BN, BK), "float16")
            acc = T.alloc_fragment((BN, block_tokens), "float32")
            T.annotate_layout({A: fragment(BLOCK.fragment, BN, BK)})
            T.clear(acc)
            for step in T.Pipelined(k // BK, num_stages=stages):
                T.copy(X[bm * block_tokens, step * BK], Xs)
                T.copy(W[step, bn * 2, 0], Ws)
                T.copy(S[step * BK // GROUP, bn * BN], Ss)
                convert(Ws, Ss, A)
                T.gemm(A, Xs, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for row, token in T.Parallel(BN, block_tokens):
                Ys[token, row] = acc[row, token]
            T.copy(Ys, Y[bm * block_tokens, bn * BN])

    return main


def compiled(program, arch):
    """The kernel for "sm_90a" or "sm_80"; no GPU is needed."""
    return tilelang.compile(program, target=Target({"kind": "cuda", "arch": arch}), pass_configs=OWN_WARPS)


if __name__ == "__main__":
    import torch

    for arch in ("sm_90a", "sm_80"):
        text = compiled(tile_w4a16(4096, 4096), arch).get_kernel_source()
        print(arch, {name: text.count(f"tl::{name}<") for name in ("wgmma_rs", "mma_sync", "cp_async_gs")})
    if torch.cuda.is_available():
        codes = torch.randint(0, 16, (4096, 4096), dtype=torch.uint8)
        w, s = torch.from_numpy(BLOCK.pack(codes.numpy())).cuda(), torch.rand(4096 // GROUP, 4096).half().cuda()
        x, y = torch.randn(512, 4096).half().cuda() / 64, torch.full((512, 4096), float("nan")).half().cuda()
        kernel = compiled(tile_w4a16(4096, 4096), "sm_90a" if torch.cuda.get_device_capability()[0] == 9 else "sm_80")
        kernel(x, w, s, y)
        right = x.double() @ ((codes.cuda().double() - ZERO) * s.double().T.repeat_interleave(GROUP, 1)).T
        print(f"largest error {(y - right).abs().max():.3g} of {right.abs().max():.3g}, 512 tokens in")
        print(f"{1e3 * tilelang.profiler.do_bench(lambda: kernel(x, w, s, y)):.1f} us")
