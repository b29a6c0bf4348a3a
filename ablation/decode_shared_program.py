"""Tile program of decode attention through shared memory: the schedule that the register pipeline is compared with.

BitDecoding's Hopper path (its v3): one warpgroup turns each block of packed tokens into f16 keys and values in shared
memory, scales and zeros applied, and wgmma reads both operands of S = Q K^T and the values of O += P V from there. The
64 rows of a product hold the query rows and padding. int4 tokens of the usual cache (layout.py), head_dim 128.

A bulk copy of the next block is on its way while a block is worked on; its dequantization and products follow one
another. The last split to finish combines all of them in a fixed order.
"""

from collections.abc import Callable
from types import SimpleNamespace

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.ops.attention.device import attention_prelude
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.tile_macros import each, less, smaller

PASS_CONFIGS = (  # barriers and bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
HEAD_DIM, THREADS, PADDED, ROWS = 128, 128, 64, 16
LOWEST = -1e30


def dequantize_macro(layout: CacheLayout, converter: Converter, block: int) -> Callable[..., None]:
    """Macro `dequantize`: a warp's tiles of a block of tokens, as operands of wgmma."""
    import tilelang.language as T

    per_warp, atoms = block // 16 // (THREADS // 32), HEAD_DIM // 16

    @T.macro
    def unpack(st, ring, at, lane, j):
        """Load j of a lane: 4 atoms of codes as f16."""
        T.call_extern(
            "handle", "tz_load<4>", T.access_ptr(st.w, "w"), T.access_ptr(ring[at + j * 128 + lane * 4], "r", 4)
        )
        for i in each(4):
            T.call_extern("handle", converter.device_name, st.w[i], T.access_ptr(st.a[i * 4], "w", 4))

    @T.macro
    def dequantize(st, ring, Ks, Vs, w, i, base):
        """The warp's tiles of block i to the operands: K [token, dim] and V^T [dim, token]."""
        lane = w.tx[0] % 32
        for x in each(per_warp):
            tile = w.tx[0] // 32 * per_warp + x
            at = base + tile * layout.tile_words
            params = at + layout.param_offset
            token = (w.first[0] + i) * block + tile * 16
            for e in each(2):  # rows g and g + 8 of keys
                st.p[0] = T.reinterpret(ring[params + lane // 4 * 4 + e], "uint32")
                st.s[e] = T.call_extern("uint32", "__byte_perm", st.p[0], st.p[0], 0x1010)
                st.z[e] = T.call_extern("uint32", "__byte_perm", st.p[0], st.p[0], 0x3232)
            for j in each(atoms // 4):
                unpack(st, ring, at, lane, j)
                for r in each(16):
                    T.call_extern(
                        "handle", "tz_store_swizzled", T.access_ptr(Ks[0, 0], "w"), block,
                        tile * 16 + lane // 4 + r % 2 * 8, (j * 4 + r // 4) * 16 + r % 4 // 2 * 8 + lane % 4 * 2,
                        T.call_extern("uint32", "tz_hfma2", st.a[r], st.s[r % 2], st.z[r % 2]),
                    )  # fmt: skip
            for k in each(2):  # tokens 2 t, 2 t + 1 and those 8 further on; past the end zeros, as 0 * NaN is NaN
                for e in each(2):
                    st.p[e] = T.reinterpret(ring[params + (lane % 4 * 2 + e) * 4 + 2 + k], "uint32") & T.call_extern(
                        "uint32", "tz_less_mask", token + lane % 4 * 2 + e + 8 * k, w.length[0]
                    )
                st.s[k] = T.call_extern("uint32", "__byte_perm", st.p[0], st.p[1], 0x5410)
                st.z[k] = T.call_extern("uint32", "__byte_perm", st.p[0], st.p[1], 0x7632)
            for j in each(atoms // 4):
                unpack(st, ring, at + layout.k_words, lane, j)
                for r in each(16):
                    T.call_extern(
                        "handle", "tz_store_swizzled", T.access_ptr(Vs[0, 0], "w"), HEAD_DIM,
                        (j * 4 + r // 4) * 16 + lane // 4 + r % 2 * 8, tile * 16 + r % 4 // 2 * 8 + lane % 4 * 2,
                        T.call_extern("uint32", "tz_hfma2", st.a[r], st.s[r % 4 // 2], st.z[r % 4 // 2]),
                    )  # fmt: skip

    return dequantize


def combine_macro() -> Callable[..., None]:
    """Macro `combine`: the sums of all splits, in their order."""
    import tilelang.language as T

    @T.macro
    def combine(OP, LP, O, LSE, w):
        """The last split adds all of them in their order; a thread has one head dimension."""
        m, total, sum_, part = (T.alloc_local((1,), "float32") for _ in range(4))
        for row in T.serial(w.rows[0]):
            m[0] = LOWEST
            for k in T.serial(OP.shape[2]):
                m[0] = T.max(m[0], T.call_extern("float32", "tz_loadcg", T.access_ptr(LP[w.b, w.h, k, row], "r", 1)))
            total[0] = 0.0
            sum_[0] = 0.0
            for k in T.serial(OP.shape[2]):
                part[0] = T.call_extern("float32", "tz_loadcg", T.access_ptr(LP[w.b, w.h, k, row], "r", 1))
                part[0] = T.if_then_else(
                    part[0] > T.float32(LOWEST), T.call_extern("float32", "tz_ex2", part[0] - m[0]), T.float32(0)
                )
                total[0] = total[0] + part[0]
                sum_[0] = sum_[0] + part[0] * T.call_extern(
                    "float32", "tz_loadcg", T.access_ptr(OP[w.b, w.h, k, row, w.tx[0]], "r", 1)
                )
            w.query[0] = T.truncdiv(row, w.group[0])
            w.head[0] = w.h * w.group[0] + T.truncmod(row, w.group[0])
            O[w.b, w.query[0], w.head[0], w.tx[0]] = T.cast(
                T.if_then_else(total[0] > 0, sum_[0] / total[0], T.float32(0)), "float16"
            )
            if less(w.tx[0], 1):
                LSE[w.b, w.query[0], w.head[0]] = T.if_then_else(
                    total[0] > 0, m[0] + T.call_extern("float32", "tz_log2", total[0]), -T.infinity("float32")
                )

    return combine


def build(target, *, block: int, stages: int):
    """The prim_func `main` for up to 16 rows of a kv head.

    Args:
        block: tokens that are dequantized at a time, 64 or 128. stages: blocks in the ring, at least 2.

    Shapes: Q and O f16 [B, q_len, Hq, 128]; KV int32 [B, Hkv, words]; LEN int32 [B]; OP f32 [B, Hkv, S, 16, 128] and LP
    f32 [B, Hkv, S, 16]; SEM int32 [B * Hkv], zero between launches; LSE f32 [B, q_len, Hq], base 2. scale: that of the
    softmax, times log2(e).
    """
    import tilelang.language as T

    layout = CacheLayout("int4", "int4", HEAD_DIM)
    tile_words, tiles = layout.tile_words, block // 16
    stage = tiles * tile_words
    converter = get_converter("u4_f16_magic")
    source = attention_prelude("pack", "bulk", "semaphore", extra=(converter.device_source,))

    B, QL, HQ, HK, WORDS, S = (T.dynamic(name) for name in ("b", "q_len", "hq", "hk", "page_words", "s"))

    @T.macro
    def fetch(KV, ring, full, w, i, place):
        """The copy of block i to a place of the ring; storage may end inside a block."""
        if less(w.tx[0], 1):
            first = (w.first[0] + i) * stage
            count = smaller(stage, WORDS - first) * 4
            T.mbarrier_expect_tx(full[place], count)
            T.call_extern(
                "handle", "tz_bulk", T.access_ptr(ring[place * stage], "w", stage),
                T.call_extern(
                    "handle", "tz_page", T.access_ptr(KV[0, 0, 0], "r", 1), w.b, HK * WORDS, w.h * WORDS + first
                ),
                count, T.access_ptr(full[place], "rw", 1),
            )  # fmt: skip
            T.barrier_arrive(full[place])

    dequantize = dequantize_macro(layout, converter, block)
    combine = combine_macro()

    @T.prim_func
    def main(
        Q: T.Tensor((B, QL, HQ, HEAD_DIM), "float16"),
        KV: T.Tensor((B, HK, WORDS), "int32"),
        LEN: T.Tensor((B,), "int32"),
        OP: T.Tensor((B, HK, S, ROWS, HEAD_DIM), "float32"),
        LP: T.Tensor((B, HK, S, ROWS), "float32"),
        SEM: T.Tensor((B * HK,), "int32"),
        O: T.Tensor((B, QL, HQ, HEAD_DIM), "float16"),
        LSE: T.Tensor((B, QL, HQ), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(S, HK, B, threads=THREADS, prelude=source) as (split, h, b):
            Qs = T.alloc_shared((PADDED, HEAD_DIM), "float16")
            Ks = T.alloc_shared((block, HEAD_DIM), "float16")
            Vs = T.alloc_shared((HEAD_DIM, block), "float16")
            ring = T.alloc_shared((stages * stage,), "int32")
            full = T.alloc_barrier([1] * stages)
            s = T.alloc_fragment((PADDED, block), "float32")
            p = T.alloc_fragment((PADDED, block), "float16")
            o = T.alloc_fragment((PADDED, HEAD_DIM), "float32")
            top, before, factor, part, total = (T.alloc_fragment((PADDED,), "float32") for _ in range(5))
            hi = T.alloc_fragment((PADDED,), "int32")
            names = ("tx", "length", "group", "rows", "first", "count", "read", "parity", "query", "head")
            w = SimpleNamespace(b=b, h=h, **{name: T.alloc_local((1,), "int32") for name in names})
            st = SimpleNamespace(
                **{
                    n: T.alloc_local((size,), "uint32")
                    for n, size in (("w", 4), ("a", 16), ("s", 2), ("z", 2), ("p", 2))
                }
            )
            w.tx[0] = T.get_thread_binding()
            w.length[0] = LEN[b]
            w.group[0] = T.truncdiv(HQ, HK)
            w.rows[0] = w.group[0] * QL
            w.count[0] = (w.length[0] + block - 1) // block
            w.first[0] = T.truncdiv(split * w.count[0], S)
            w.count[0] = T.truncdiv((split + 1) * w.count[0], S) - w.first[0]
            for r in T.Parallel(PADDED):  # end of what each row sees
                hi[r] = w.length[0] - QL + 1 + smaller(T.truncdiv(r, w.group[0]), QL - 1)
            w.read[0] = 0
            w.parity[0] = 0
            for i in each(stages - 1):
                if less(i, w.count[0]):
                    fetch(KV, ring, full, w, i, i)
            for r in T.serial(PADDED):
                w.query[0] = T.truncdiv(smaller(r, w.rows[0] - 1), w.group[0])
                w.head[0] = h * w.group[0] + T.truncmod(smaller(r, w.rows[0] - 1), w.group[0])
                Qs[r, w.tx[0]] = T.if_then_else(less(r, w.rows[0]), Q[b, w.query[0], w.head[0], w.tx[0]], T.float16(0))
            T.clear(o)
            T.clear(total)
            T.fill(top, LOWEST)
            T.fence_proxy_async()
            T.sync_threads()
            for i in T.serial(w.count[0]):
                T.barrier_wait(full[w.read[0]], w.parity[0])
                if less(i + stages - 1, w.count[0]):
                    fetch(
                        KV, ring, full, w, i + stages - 1,
                        T.call_extern("int32", "tz_select", less(0, w.read[0]), w.read[0] - 1, stages - 1),
                    )  # fmt: skip
                dequantize(st, ring, Ks, Vs, w, i, w.read[0] * stage)
                T.fence_proxy_async()
                T.sync_threads()
                T.gemm(Qs, Ks, s, transpose_B=True, clear_accum=True)
                for r, n in T.Parallel(PADDED, block):
                    s[r, n] = T.if_then_else(
                        less((w.first[0] + i) * block + n, hi[r]), s[r, n] * scale, -T.infinity("float32")
                    )
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for r in T.Parallel(PADDED):
                    factor[r] = T.call_extern("float32", "tz_ex2", before[r] - top[r])
                for r, n in T.Parallel(PADDED, block):
                    s[r, n] = T.call_extern("float32", "tz_ex2", s[r, n] - top[r])
                T.reduce_sum(s, part, dim=1)
                for r in T.Parallel(PADDED):
                    total[r] = total[r] * factor[r] + part[r]
                for r, d in T.Parallel(PADDED, HEAD_DIM):
                    o[r, d] = o[r, d] * factor[r]
                T.copy(s, p)
                T.gemm(p, Vs, o, transpose_B=True)
                T.sync_threads()  # every warp has read the operands and the stage
                w.read[0] = w.read[0] + 1
                if w.read[0] == stages:
                    w.read[0] = 0
                    w.parity[0] = w.parity[0] ^ 1
            for r, d in T.Parallel(PADDED, HEAD_DIM):
                if less(r, w.rows[0]):
                    OP[b, h, split, r, d] = T.if_then_else(total[r] > 0, o[r, d] / total[r], T.float32(0))
            for r in T.Parallel(PADDED):
                if less(r, w.rows[0]):
                    LP[b, h, split, r] = T.if_then_else(
                        total[r] > 0, top[r] + T.call_extern("float32", "tz_log2", total[r]), T.float32(LOWEST)
                    )
            if T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[b * HK + h], "rw", 1), S):
                combine(OP, LP, O, LSE, w)

    return main
