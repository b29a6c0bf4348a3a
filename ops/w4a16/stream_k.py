"""Tile program for 17 tokens and more on sm_90a: weights are the register operand of wgmma, one producer warp, stream-K.

A CTA computes tiles of 64 * warpgroups output features by `block_tokens` tokens. The producer warp fills a ring of
stages: X by TMA (128-byte swizzle), packed weights and their parameters by 1-D bulk copies. Each consumer warpgroup owns
64 rows: it loads its words, converts 64 k while the wgmmas of the 64 k before run, and issues four wgmma m64nNk16.

Work partition (schedules.stream_k): the first `sk` tiles are cut along k into equal shares, one for each CTA, the others are
whole tiles in waves. A CTA that starts inside a tile leaves its sum in the workspace; the CTA that holds the head of that
tile adds the shares in order of k, so the result has the same bits in every run. Shares are waited for only from CTAs
with a lower index, which the hardware has started earlier.

A stage is released one half-stage after its last wgmma was waited for, long after the shared-memory loads of its words
were consumed: ptxas may move an arrive in front of a load's return (measured.md, "A race to design out").
"""

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.primitives import prelude
from terrazzo.ops.w4a16.operand import Operand

STAGE_K = 128


def build(
    target,
    *,
    n: int,
    k: int,
    group: int,
    symmetric: bool,
    scale_dtype: str,
    dtype: str,
    numerics: str,
    bias: bool,
    block_tokens: int,
    warpgroups: int,
    stages: int,
    raster: int = 8,
):
    """The prim_func `main(X, W, P, B, WS, SEM, Y, grid, sk)`.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Np/64, Kp/64, 512]; P uint8 [Np/64, G, R]; B [n] in `dtype` (one
    element without a bias); WS f32 [grid, warpgroups, block_tokens / 8, 128, 4]; SEM int32 [grid * warpgroups], zero before
    the first launch and after each one. `grid` CTAs at most the number of SMs; `sk` tiles shared along k, 0 <= sk <= tiles.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    op = Operand(group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, numerics=numerics)
    post = numerics == "post"
    short = "bf16" if dtype == "bfloat16" else "f16"
    cvt = get_converter(f"u4_{short}_exact" if post else op.converter)
    bm, wgs, bf16 = block_tokens, warpgroups, dtype == "bfloat16"
    np_, kp = -(-n // 64) * 64, -(-k // STAGE_K) * STAGE_K
    kb_all, groups, ig, rec = kp // STAGE_K, op.groups(kp), op.groups_per(STAGE_K), op.record_bytes
    bn_tiles = -(-np_ // (64 * wgs))
    row_blocks = np_ // 64
    ct = wgs * 128
    nacc = bm // 2
    sb = op.scale_bytes
    f32 = scale_dtype == "float32"
    tb, stb = ("true" if bf16 else "false"), ("true" if scale_dtype == "bfloat16" else "false")
    ab = "bf16" if bf16 else "fp16"
    one2 = 0x3F803F80 if bf16 else 0x3C003C00
    pitch = 24  # halves of a staged output row: 16 rows and 16 bytes of padding, free of bank conflicts
    out_toks = 32 if bm % 32 == 0 else (16 if bm % 16 == 0 else 8)
    prefix = f"m64n{bm}k16"
    x_bytes = bm * 64 * 2
    source = prelude("lds", "pack", "bulk", "stmatrix_trans", "semaphore", "warpgroup", extra=(cvt.device_source,))
    M = T.dynamic("m")
    G = T.dynamic("grid")

    @T.macro
    def plan(p, cta, grid, sk, mt):
        """p = [first and last shared iteration, shared segments, all segments] of this CTA (see `segment`)."""
        r = grid - 1 - cta  # high shares on low CTAs: a share is only awaited from a CTA that started earlier
        p[0][0] = T.truncdiv(r * (sk * kb_all), grid)
        p[1][0] = T.truncdiv((r + 1) * (sk * kb_all), grid)
        p[2][0] = T.if_then_else(p[1][0] > p[0][0], T.truncdiv(p[1][0] - 1, kb_all) - T.truncdiv(p[0][0], kb_all) + 1, 0)
        p[3][0] = p[2][0] + T.max(T.truncdiv(mt * bn_tiles - sk - r + grid - 1, grid), 0)

    @T.macro
    def segment(p, c, seg, cta, grid, sk, mt):
        """c = [first k block, one past the last, token block, row block, tile] of the CTA's segment `seg`."""
        if seg < p[2][0]:
            c[4][0] = T.truncdiv(p[0][0], kb_all) + seg
            c[0][0] = T.max(p[0][0] - c[4][0] * kb_all, 0)
            c[1][0] = T.min(p[1][0] - c[4][0] * kb_all, kb_all)
        else:
            c[4][0] = sk + grid - 1 - cta + (seg - p[2][0]) * grid
            c[0][0] = 0
            c[1][0] = kb_all
        # groups of `raster` token blocks walk over the rows together, so that both operands stay in L2
        c[2][0] = T.truncdiv(c[4][0], raster * bn_tiles) * raster
        c[5][0] = T.min(mt - c[2][0], raster)
        c[6][0] = T.truncmod(c[4][0], raster * bn_tiles)
        c[2][0] = c[2][0] + T.truncmod(c[6][0], c[5][0])
        c[3][0] = T.truncdiv(c[6][0], c[5][0])

    @T.macro
    def advance(ring):
        """ring = [stage, parity, stage before]"""
        ring[2][0] = ring[0][0]
        ring[0][0] = ring[0][0] + 1
        if ring[0][0] == stages:
            ring[0][0] = 0
            ring[1][0] = ring[1][0] ^ 1

    @T.macro
    def operand_words(s, u, v, q):
        if symmetric:
            u[2] = T.uint32(0x0808)
        if numerics == "fused":
            z0 = T.cast(u[2] & T.uint32(255), "float32")
            z1 = T.cast(u[2] >> T.uint32(8), "float32")
            v[q * 4] = T.call_extern("uint32", f"tz_pack2<{tb}>", -z0 * s[q * 2], -z0 * s[q * 2])
            v[q * 4 + 2] = T.call_extern("uint32", f"tz_pack2<{tb}>", -z1 * s[q * 2 + 1], -z1 * s[q * 2 + 1])
        elif bf16:
            v[q * 4] = (T.uint32(0x4300) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[q * 4 + 2] = (T.uint32(0x4300) + (u[2] >> T.uint32(8))) * T.uint32(0x10001)
        else:
            v[q * 4] = (T.uint32(0x6400) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[q * 4 + 2] = (T.uint32(0x5400) + (u[2] >> T.uint32(8)) * T.uint32(16)) * T.uint32(0x10001)
        if post:
            v[q * 4 + 1] = T.uint32(one2)
            v[q * 4 + 3] = T.uint32(one2)
        else:
            v[q * 4 + 1] = (u[0] & T.uint32(0xFFFF)) * T.uint32(0x10001)
            v[q * 4 + 3] = (u[0] >> T.uint32(16)) * T.uint32(0x10001)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        W: T.Tensor((row_blocks, kp // 64, 512), "int32"),
        P: T.Tensor((row_blocks, groups, rec), "uint8"),
        B: T.Tensor((n if bias else 1,), dtype),
        WS: T.Tensor((G, wgs, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G * wgs,), "int32"),
        Y: T.Tensor((M, n), dtype),
        sk: T.int32,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            Xs = T.alloc_shared((stages, 2, bm, 64), dtype)
            Ws = T.alloc_shared((stages, wgs, 1024), "int32")
            Ps = T.alloc_shared((stages, wgs * ig * rec), "uint8")
            Os = T.alloc_shared((wgs * 4, out_toks * pitch), dtype)
            full = T.alloc_barrier([32] * stages)
            empty = T.alloc_barrier([wgs * 4] * stages)
            w = T.alloc_local((4,), "uint32")
            a = T.alloc_local((32,), "uint32")
            acc = T.alloc_local((nacc,), "float32")
            s = T.alloc_local((2 * ig,), "float32")
            z = T.alloc_local((2,), "float32")
            u = T.alloc_local((3,), "uint32")
            v = T.alloc_local((4 * ig,), "uint32")
            o = T.alloc_local((4,), "uint32")
            bb = T.alloc_local((2,), "float32")
            desc = T.alloc_wgmma_desc()
            p = [T.alloc_local((1,), "int32") for _ in range(4)]
            c = [T.alloc_local((1,), "int32") for _ in range(7)]
            ring = [T.alloc_local((1,), "int32") for _ in range(3)]
            part = T.alloc_local((nacc if post else 1,), "float32")
            sums = part if post else acc
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            tx = T.get_thread_binding()
            mt = T.ceildiv(M, bm)
            plan(p, cta, G, sk, mt)
            ring[0][0] = 0
            ring[1][0] = 0
            ring[2][0] = 0
            if tx >= ct:
                T.dec_max_nreg(24)
                if tx < ct + 32:
                    for seg in T.serial(p[3][0]):
                        segment(p, c, seg, cta, G, sk, mt)
                        for kb in T.serial(c[1][0] - c[0][0]):
                            T.barrier_wait(empty[ring[0][0]], ring[1][0] ^ 1)
                            for h in T.unroll(2):
                                T.tma_copy(
                                    X[c[2][0] * bm : c[2][0] * bm + bm, (c[0][0] + kb) * 128 + h * 64 : (c[0][0] + kb) * 128 + h * 64 + 64],
                                    Xs[ring[0][0], h, :, :], barrier=full[ring[0][0]], leader_scope_threads=32,
                                )
                            if tx == ct:
                                T.mbarrier_expect_tx(full[ring[0][0]], T.min(wgs, row_blocks - c[3][0] * wgs) * (4096 + ig * rec))
                                for b in T.unroll(wgs):
                                    if c[3][0] * wgs + b < row_blocks:
                                        T.call_extern(
                                            "handle", "tz_bulk", T.access_ptr(Ws[ring[0][0], b, 0], "w", 1024),
                                            T.access_ptr(W[c[3][0] * wgs + b, (c[0][0] + kb) * 2, 0], "r", 1024), 4096, T.access_ptr(full[ring[0][0]], "rw", 1),
                                        )
                                        T.call_extern(
                                            "handle", "tz_bulk", T.access_ptr(Ps[ring[0][0], b * ig * rec], "w", ig * rec),
                                            T.access_ptr(P[c[3][0] * wgs + b, 0 if group == 0 else (c[0][0] + kb) * ig, 0], "r", ig * rec), ig * rec,
                                            T.access_ptr(full[ring[0][0]], "rw", 1),
                                        )
                            T.barrier_arrive(full[ring[0][0]])
                            advance(ring)
            else:
                T.inc_max_nreg({2: 240, 3: 160, 4: 112}[wgs])
                wg = tx // 128
                wt = tx % 128
                warp = wt // 32
                lane = tx % 32
                for seg in T.serial(p[3][0]):
                    segment(p, c, seg, cta, G, sk, mt)
                    for i in T.unroll(nacc):
                        acc[i] = 0.0
                    for i in T.serial(c[1][0] - c[0][0]):
                        T.barrier_wait(full[ring[0][0]], ring[1][0])
                        T.call_extern("handle", "tz_fence")
                        for q in T.unroll(ig):
                            pbase = (wg * ig + q) * rec + (warp * 8 + lane // 4) * 2 * sb
                            if not symmetric:
                                u[2] = T.call_extern(
                                    "uint32", "tz_lds16_at", T.access_ptr(Ps[ring[0][0], (wg * ig + q) * rec + 64 * sb], "r", 64), warp * 8 + lane // 4
                                )
                            if f32:
                                u[0] = T.call_extern("uint32", "tz_lds32", T.access_ptr(Ps[ring[0][0], pbase], "r", 4))
                                u[1] = T.call_extern("uint32", "tz_lds32", T.access_ptr(Ps[ring[0][0], pbase + 4], "r", 4))
                                s[q * 2] = T.reinterpret(u[0], "float32")
                                s[q * 2 + 1] = T.reinterpret(u[1], "float32")
                            else:
                                u[0] = T.call_extern("uint32", "tz_lds32", T.access_ptr(Ps[ring[0][0], pbase], "r", 4))
                                s[q * 2] = T.call_extern("float32", f"tz_unpack<{stb}, 0>", u[0])
                                s[q * 2 + 1] = T.call_extern("float32", f"tz_unpack<{stb}, 1>", u[0])
                            operand_words(s, u, v, q)
                        T.initialize_wgmma_descriptor(desc, T.access_ptr(Xs[0, 0, 0, 0], "r"), 1, 1, 64)
                        T.increase_descriptor_offset(desc, ring[0][0] * (2 * x_bytes))
                        for h in T.unroll(2):
                            T.call_extern("handle", "tz_lds128", T.access_ptr(w, "w"), T.access_ptr(Ws[ring[0][0], wg, h * 512 + wt * 4], "r", 4))
                            T.warpgroup_wait(1)
                            if h == 1:
                                if i > 0:
                                    if lane == 0:
                                        T.barrier_arrive(empty[ring[2][0]])
                            for j in T.unroll(4):
                                q = (h * 4 + j) * ig // 8
                                T.call_extern("handle", cvt.device_name, w[j], T.access_ptr(a[h * 16 + j * 4], "w", 4), v[q * 4], v[q * 4 + 1], v[q * 4 + 2], v[q * 4 + 3])
                            T.warpgroup_fence_operand(a, h * 16, 16)
                            T.warpgroup_fence_operand(sums, num_regs=nacc)
                            T.warpgroup_arrive()
                            for j in T.unroll(4):
                                T.ptx_wgmma_rs(
                                    "float32", prefix, True, ab, ab, "fp32", a.data, h * 16 + j * 4, desc.data, (h * x_bytes + j * 32) // 16,
                                    sums.data, 0, T.bool(not post or (h * 4 + j) % (8 // ig) > 0), 1, 1,
                                )
                                if post and (h * 4 + j) % (8 // ig) == 8 // ig - 1:
                                    T.warpgroup_commit_batch()
                                    T.warpgroup_wait(0)
                                    T.warpgroup_fence_operand(part, num_regs=nacc)
                                    for e in T.unroll(nacc):
                                        acc[e] = acc[e] + s[(h * 4 + j) * ig // 8 * 2 + e % 4 // 2] * part[e]
                                    T.warpgroup_fence_operand(part, num_regs=nacc)
                                    T.warpgroup_arrive()
                            T.warpgroup_commit_batch()
                            T.warpgroup_fence_operand(sums, num_regs=nacc)
                        advance(ring)
                    T.warpgroup_wait(0)
                    T.warpgroup_fence_operand(acc, num_regs=nacc)
                    if lane == 0:
                        T.barrier_arrive(empty[ring[2][0]])
                    if c[0][0] > 0:  # a share of a tile whose head another CTA holds
                        for i in T.unroll(bm // 8):
                            T.call_extern("handle", "tz_copy16", T.access_ptr(WS[cta, wg, i, wt, 0], "w", 4), T.access_ptr(acc[i * 4], "r", 4))
                        T.call_extern("handle", "tz_signal", T.access_ptr(SEM[cta * wgs + wg], "rw", 1), wg + 1)
                    else:
                        if c[1][0] < kb_all:  # the head: add the other shares in order of k
                            # c[6][0] = number of CTAs whose shares start inside this tile
                            c[6][0] = T.truncdiv((c[4][0] + 1) * kb_all * G - 1, sk * kb_all) - (G - 1 - cta)
                            for b in T.serial(c[6][0]):
                                T.call_extern("handle", "tz_await", T.access_ptr(SEM[(cta - 1 - b) * wgs + wg], "rw", 1), wg + 1)
                                for i in T.unroll(bm // 8):
                                    T.call_extern("handle", "tz_addcg4", T.access_ptr(acc[i * 4], "rw", 4), T.access_ptr(WS[cta - 1 - b, wg, i, wt, 0], "r", 4))
                        row0 = (c[3][0] * wgs + wg) * 64 + warp * 16
                        if bias:
                            bb[0] = T.cast(B[T.min(row0 + lane // 4, n - 1)], "float32")
                            bb[1] = T.cast(B[T.min(row0 + lane // 4 + 8, n - 1)], "float32")
                            for i in T.unroll(nacc):
                                acc[i] = acc[i] + bb[i % 4 // 2]
                        for b in T.unroll(bm // out_toks):
                            T.call_extern("handle", "tz_syncwarp")
                            for p in T.unroll(out_toks // 16):
                                for e in T.unroll(4):
                                    o[e] = T.call_extern("uint32", f"tz_pack2<{tb}>", acc[(b * out_toks // 8 + p * 2) * 4 + e * 2], acc[(b * out_toks // 8 + p * 2) * 4 + e * 2 + 1])
                                T.call_extern(
                                    "handle", "tz_stmatrix4_trans",
                                    T.access_ptr(Os[wg * 4 + warp, (p * 16 + lane // 16 * 8 + lane % 8) * pitch + lane // 8 % 2 * 8], "w", 8),
                                    o[0], o[1], o[2], o[3],
                                )
                            T.call_extern("handle", "tz_syncwarp")
                            for p in T.unroll(out_toks // 16):
                                tok = c[2][0] * bm + b * out_toks + p * 16 + lane // 2
                                row = row0 + lane % 2 * 8
                                if n % 8 == 0:
                                    if T.And(tok < M, row < n):
                                        T.call_extern("handle", "tz_copy16", T.access_ptr(Y[tok, row], "w", 8), T.access_ptr(Os[wg * 4 + warp, (p * 16 + lane // 2) * pitch + lane % 2 * 8], "r", 8))
                                else:
                                    if tok < M:
                                        for e in T.unroll(8):
                                            if row + e < n:
                                                Y[tok, row + e] = Os[wg * 4 + warp, (p * 16 + lane // 2) * pitch + lane % 2 * 8 + e]

    return main
