"""Decode attention over an int4 KV cache as a TileLang tile program: one new token, the heads of a group as columns.

Keys are operand A, 128 tokens by 128 channels, and values are, 128 channels by 128 tokens, in the packed blocks of
tile_w4a16.py. Scales of a token multiply its score and its probability. With a GPU it is compared and timed.
"""

import tilelang
import tilelang.language as T
import torch
from terrazzo.layouts.tilelang import expressions, fragment
from tile_w4a16 import BLOCK, FIELDS, ZERO, compiled

DIM, TOKENS, HEADS = 128, 128, 16  # of a block of the cache; query heads of one kv head, padded
WORDS = (DIM // BLOCK.block_k, TOKENS // BLOCK.block_rows, BLOCK.words_per_block)  # of its keys, or its values


@T.macro
def convert(Ws, A):
    """Eight words of each thread to 64 halves of A, exact: 1024 + code, less 1024 and the zero point."""
    thread = T.get_thread_binding()
    w = T.alloc_local((BLOCK.load_words,), "uint32")
    pair = T.alloc_local((1,), "uint32")
    for part in T.unroll(WORDS[0]):
        for i in T.vectorized(BLOCK.load_words):
            w[i] = Ws[part, thread // BLOCK.threads, thread % BLOCK.threads * BLOCK.load_words + i]
        for word in T.unroll(BLOCK.load_words):
            for register in T.unroll(4):
                pair[0] = (w[word] >> T.cast(4 * register, "uint32")) & T.uint32(0x000F000F) | T.uint32(0x64006400)
                for element in T.unroll(2):
                    field = expressions(FIELDS, register=register, element=element)["field"]
                    to = expressions(BLOCK.map, field=field, word=word, thread=thread % BLOCK.threads)
                    value = T.reinterpret(T.cast(pair[0] >> T.cast(16 * element, "uint32"), "uint16"), "float16")
                    row, k = thread // BLOCK.threads * BLOCK.block_rows + to["row"], part * BLOCK.block_k + to["k"]
                    A[row, k] = value - T.float16(1024 + ZERO)


def tile_kv_decode(pairs, blocks, stages=2):
    """The prim_func of Q [pairs, 16, 128], packed K and V [pairs, blocks, 2, 2, 512], their scales [pairs, tokens] and
    O [pairs, 16, 128]; a pair is a sequence and one kv head, and all sequences have blocks x 128 tokens."""
    packed, tokens, scale = (pairs, blocks, *WORDS), blocks * TOKENS, 1.44269504 / DIM**0.5  # log2(e)

    @T.prim_func
    def main(
        Q: T.Tensor((pairs, HEADS, DIM), "float16"),
        K: T.Tensor(packed, "uint32"),
        KS: T.Tensor((pairs, tokens), "float32"),
        V: T.Tensor(packed, "uint32"),
        VS: T.Tensor((pairs, tokens), "float32"),
        O: T.Tensor((pairs, HEADS, DIM), "float16"),
    ):
        with T.Kernel(pairs, threads=2 * BLOCK.threads) as pair:
            Qs, Fs = T.alloc_shared((HEADS, DIM), "float16"), T.alloc_shared((HEADS,), "float32")
            Ks, Vs = T.alloc_shared(WORDS, "uint32"), T.alloc_shared(WORDS, "uint32")
            Ss, Ps = T.alloc_shared((HEADS, TOKENS), "float32"), T.alloc_shared((HEADS, TOKENS), "float16")
            A, B = T.alloc_fragment((TOKENS, DIM), "float16"), T.alloc_fragment((DIM, TOKENS), "float16")
            S, acc = T.alloc_fragment((TOKENS, HEADS), "float32"), T.alloc_fragment((DIM, HEADS), "float32")
            rows = T.alloc_fragment((HEADS, TOKENS), "float32")  # scores once more, a head's in few threads
            highest, before, total, part = (T.alloc_fragment((HEADS,), "float32") for _ in range(4))
            T.annotate_layout({A: fragment(BLOCK.fragment, TOKENS, DIM), B: fragment(BLOCK.fragment, DIM, TOKENS)})
            T.copy(Q[pair, 0, 0], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(highest, -T.infinity("float32"))
            for block in T.Pipelined(blocks, num_stages=stages):
                T.copy(K[pair, block, 0, 0, 0], Ks)
                T.copy(V[pair, block, 0, 0, 0], Vs)
                convert(Ks, A)
                T.clear(S)
                T.gemm(A, Qs, S, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for t, h in T.Parallel(TOKENS, HEADS):
                    Ss[h, t] = S[t, h]
                for h, t in T.Parallel(HEADS, TOKENS):
                    rows[h, t] = Ss[h, t] * KS[pair, block * TOKENS + t] * T.float32(scale)
                T.copy(highest, before)
                T.reduce_max(rows, highest, dim=1, clear=False)
                for h, t in T.Parallel(HEADS, TOKENS):
                    rows[h, t] = T.exp2(rows[h, t] - highest[h])
                T.reduce_sum(rows, part, dim=1)
                for h in T.Parallel(HEADS):
                    before[h] = T.exp2(before[h] - highest[h])
                    total[h] = total[h] * before[h] + part[h]
                T.copy(before, Fs)
                for h, t in T.Parallel(HEADS, TOKENS):
                    Ps[h, t] = rows[h, t] * VS[pair, block * TOKENS + t]
                for d, h in T.Parallel(DIM, HEADS):
                    acc[d, h] *= Fs[h]
                convert(Vs, B)
                T.gemm(B, Ps, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(total, Fs)
            for d, h in T.Parallel(DIM, HEADS):
                O[pair, h, d] = acc[d, h] / Fs[h]

    return main


def packed(codes, values):
    """Words [2, 2, 512] of a block of codes [128 tokens, 128 channels]; of values, whose rows are channels."""
    return torch.from_numpy(BLOCK.pack((codes.T if values else codes).contiguous().numpy()).view("int32"))


def reference(q, codes, scales):
    """float64 output; codes [keys and values, pairs, blocks, tokens, channels], scales [2, pairs, tokens]."""
    k, v = (codes.flatten(2, 3).double() - ZERO) * scales.double()[..., None]
    return (q.double() @ k.mT * DIM**-0.5).softmax(-1) @ v


if __name__ == "__main__":
    for arch in ("sm_90a", "sm_80"):
        text = compiled(tile_kv_decode(64, 64), arch).get_kernel_source()
        print(arch, {name: text.count(f"tl::{name}<") for name in ("wgmma_rs", "mma_sync", "cp_async_gs")})
    if torch.cuda.is_available():
        codes, q = torch.randint(0, 16, (2, 64, 1, TOKENS, DIM), dtype=torch.uint8), torch.randn(64, HEADS, DIM).half()
        scales, out = 0.02 + 0.1 * torch.rand(2, 64, TOKENS), torch.full((64, HEADS, DIM), float("nan")).half().cuda()
        words = [torch.stack([packed(pair[0], i) for pair in part])[:, None] for i, part in enumerate(codes)]
        k, v, ks, vs = (t.repeat_interleave(64, 1).cuda() for t in (*words, *scales))  # the same block 64 times
        kernel = compiled(tile_kv_decode(64, 64), "sm_90a" if torch.cuda.get_device_capability()[0] == 9 else "sm_80")
        call = lambda: kernel(q.cuda(), k.view(torch.uint32), ks, v.view(torch.uint32), vs, out)
        call()
        print(f"largest error {(out.cpu() - reference(q, codes, scales)).abs().max():.3g}, 64 x 8192 tokens in")
        print(f"{1e3 * tilelang.profiler.do_bench(call):.1f} us")
