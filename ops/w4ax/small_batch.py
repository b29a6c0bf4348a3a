"""Tile program for small batches (sm_90a): mma.sync m16n8k32, weights through warp-private cp.async rings, X resident.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X and of the tokens' scales is loaded once. The warps of a CTA split its k range, so each streams its own units (two
runs of 512 bytes and the scales of 16 rows for each block of 128 channels) with no barrier in the main loop. The int32
sums of a block, of either kind, become float32 with the scales of its tokens and rows; of two-level scales, the
channel's comes with the output. Warps, and with kc > 1 CTAs, are
added in order: the same bits in every run.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.primitives import prelude
from terrazzo.ops.resident import ROW_WORDS, resident_macros, sum_macros, unit_macros
from terrazzo.ops.w4ax import problem
from terrazzo.ops.w4ax.problem import UNIT_K, UNIT_WORDS, Gemm

PASS_CONFIGS = (  # the barriers and the bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)


def build(
    target,
    *,
    n: int,
    k: int,
    blocks8: int,
    out_dtype: str,
    bias: bool,
    two_level: bool = False,
    token_tiles: int,
    kc: int,
    nc: int,
    warps: int,
    chunk: int,
    stages: int,
    cluster: int = 1,
):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y)` for M <= 8 * token_tiles.

    Shapes: X int8 [M, k], both kinds of blocks in bytes; W int32 [k/128, Np/64, 1056]; XS f32 [k/128, MP] scales of the
    tokens, MP >= M; S f32 [Np] channel scales (one element unless two-level); B f32 [n] (one element without a bias);
    WS f32 [kc, token_tiles * 8, Np]; SEM int32 [nc], zero before the first launch and after each one; Y [M, n] in
    `out_dtype`.

    Raises:
        ArgumentError: a format outside the limits, or more warps than blocks of a CTA.
    """
    import tilelang.language as T

    gemm = Gemm(n, k, blocks8, out_dtype, bias, two_level)
    nt, units, tiles = token_tiles, gemm.units, gemm.row_blocks * 4
    even = units % kc == 0 and (units // kc) % warps == 0
    cta_units = -(-units // kc)  # most blocks of a CTA
    if warps > units // kc:  # TileLang drops the guard of a loop that runs zero times or once
        raise ArgumentError("warps", warps, f"must be at most the {units // kc} blocks of a CTA", "take fewer warps")
    threads = warps * 32
    pitch = cta_units * UNIT_K + 16  # bytes; 16 mod 128: ldmatrix without conflicts
    chunks = -(-tiles // (nc * chunk)) if tiles % nc == 0 else -(-(tiles // nc + 1) // chunk)
    operand = problem.convert_macros(gemm)
    resident = resident_macros(
        k=k, item_k=UNIT_K, items=units, cta_items=cta_units, rows=nt * 8, pitch=pitch, size=1, threads=threads,
        bulk=True, cluster=cluster,
    )  # fmt: skip
    ring = unit_macros(token_tiles=nt, chunk=chunk, groups=1, stages=stages, pitch=pitch)
    copies = "multicast" if cluster > 1 else "bulk"
    used = ("cp_async", "lds", "ldmatrix", "semaphore", "int8", copies)
    source = prelude(*used, extra=(gemm.converter.device_source, problem.SOURCE))
    cluster_dims = dict(cluster_dims=(1, cluster, 1)) if cluster > 1 else {}
    M, MP = T.dynamic("m"), T.dynamic("mp")

    @T.macro
    def load_token_scales(XS, Fs, k0, kn, tx):
        """Scales of the CTA's blocks; those of tokens from M on do not count. Two-level: over the 16 of the fast
        conversion."""
        for e in T.serial(-(-(cta_units * nt * 8) // threads)):
            at = e * threads + tx
            if at < kn * (nt * 8):
                Fs[at] = XS[k0 + at // (nt * 8), T.min(at % (nt * 8), MP - 1)] * T.float32(0.0625 if two_level else 1)

    @T.macro
    def load_channel_scales(S, Cs, t0, t1, tx):
        """Those of the CTA's rows."""
        for e in T.serial(-(-(chunks * chunk * 16) // threads)):
            if e * threads + tx < (t1 - t0) * 16:
                Cs[e * threads + tx] = S[t0 * 16 + e * threads + tx]

    @T.macro
    def multiply(R, w, a, x, part, codes, slot, m, lane):
        """The sums of a block: 16 rows by the tokens."""
        for i in T.unroll(nt * 4):
            part[i] = 0
        for j in T.unroll(2):
            T.call_extern(
                "handle",
                "tz_lds128",
                T.access_ptr(w, "w"),
                T.access_ptr(R[slot + m * 256 + j * 128 + lane * 4], "r", 4),
            )
            operand.convert(w, 0, a, 0, codes)
            for e in T.unroll(2):
                for t in T.unroll(nt):
                    T.ptx_mma(
                        "int32", "m16n8k32", "row", "col", "int8", "int8", "int32",
                        a.data, e * 4, x.data, (j * nt + t) * 4 + e * 2, part.data, t * 4, T.bool(False),
                    )  # fmt: skip

    @T.macro
    def store(to, r4, tok, row):
        """Four rows of one token in the output dtype."""
        Cs, t0, B, Y, o4 = to
        if row < n:
            for i in T.unroll(4):
                if two_level:
                    r4[i] = r4[i] * Cs[row - t0 * 16 + i]
                o4[i] = T.cast(r4[i] + (B[T.min(row + i, n - 1)] if bias else T.float32(0)), out_dtype)
            if n % 4 == 0:
                for i in T.vectorized(4):
                    Y[tok, row + i] = o4[i]
            else:
                for i in T.unroll(4):
                    if row + i < n:
                        Y[tok, row + i] = o4[i]

    sums = sum_macros(token_tiles=nt, chunk=chunk, chunks=chunks, warps=warps, kc=kc, add="tz_addcg4", store=store)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((units, gemm.row_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((gemm.row_blocks * 64 if two_level else 1,), "float32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((kc, nt * 8, tiles * 16), "float32"),
        SEM: T.Tensor((nc,), "int32"),
        Y: T.Tensor((M, n), out_dtype),
    ):
        with T.Kernel(kc, nc, threads=threads, prelude=source, **cluster_dims) as (bk, bn):
            Xs = T.alloc_shared((nt * 8 * pitch + 128,), "int8")  # the tail keeps what follows 128-byte aligned
            R = T.alloc_shared((warps * stages * ring.step,), "int32")
            Q = T.alloc_shared((sums.words,), "float32")
            Fs = T.alloc_shared((cta_units * nt * 8,), "float32")
            Cs = T.alloc_shared((chunks * chunk * 16 if two_level else 1,), "float32")
            xbar = T.alloc_cluster_barrier([1]) if cluster > 1 else T.alloc_barrier([1])
            w = T.alloc_local((4,), "uint32")
            a = T.alloc_local((8,), "uint32")
            x = T.alloc_local((8 * nt,), "uint32")
            f = T.alloc_local((2 * nt,), "float32")
            s = T.alloc_local((2,), "float32")
            part = T.alloc_local((nt * 4,), "int32")
            acc = T.alloc_local((chunk * nt * 4,), "float32")
            r4 = T.alloc_local((4,), "float32")
            o4 = T.alloc_local((4,), out_dtype)
            codes = operand.registers()
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            t0 = bn * tiles // nc
            t1 = (bn + 1) * tiles // nc
            k0 = bk * units // kc
            kn = units // kc if even else (bk + 1) * units // kc - k0
            g0 = warp * kn // warps
            gn = kn // warps if even else (warp + 1) * kn // warps - g0
            base = warp * stages * ring.step

            # weights first: the launch may overlap the kernel before, whose result X is
            T.pdl_trigger()
            for p in T.unroll(stages):
                ring.issue(W, R, base, p, gn, t0, t1, k0 + g0, lane)
            if two_level:
                load_channel_scales(S, Cs, t0, t1, tx)
            T.pdl_sync()
            resident.fetch(X, Xs, xbar, M, k0, kn, bn % cluster, tx)
            load_token_scales(XS, Fs, k0, kn, tx)
            resident.wait(xbar, stages)
            for ci in T.serial(chunks):
                for i in T.unroll(chunk * nt * 4):
                    acc[i] = 0.0
                for gi in T.serial(gn):
                    T.call_extern("handle", f"tz_cp_wait<{stages - 1}>")
                    slot = base + (ci * gn + gi) % stages * ring.step
                    ring.load_x(Xs, x, (g0 + gi) * UNIT_K, lane)
                    for t in T.unroll(nt):
                        T.call_extern(
                            "handle",
                            "tz_lds64",
                            T.access_ptr(f[t * 2], "w", 2),
                            T.access_ptr(Fs[((g0 + gi) * nt + t) * 8 + lane % 4 * 2], "r", 2),
                        )
                    for m in T.unroll(chunk):
                        multiply(R, w, a, x, part, codes, slot, m, lane)
                        T.call_extern(
                            "handle",
                            "tz_row_multipliers" if two_level else "tz_row_scales",
                            T.access_ptr(s, "w"),
                            T.call_extern(
                                "uint32",
                                "tz_lds32",
                                T.access_ptr(R[slot + ring.params + m * ROW_WORDS + lane // 4], "r", 1),
                            ),
                        )
                        for i in T.unroll(nt * 4):
                            acc[m * nt * 4 + i] = T.call_extern(
                                "float32",
                                "tz_scaled",
                                acc[m * nt * 4 + i],
                                T.cast(part[i], "float32"),
                                f[i // 4 * 2 + i % 2],
                                s[i % 4 // 2],
                            )
                    T.call_extern("handle", "tz_syncwarp")  # every lane has read the step before it is overwritten
                    ring.issue(W, R, base, ci * gn + gi + stages, gn, t0, t1, k0 + g0, lane)
                sums.add_warps(Q, WS, (Cs, t0, B, Y, o4), acc, r4, M, bk, t0, t1, ci, tx)
            sums.add_ctas(WS, SEM, (Cs, t0, B, Y, o4), r4, M, bn, t0, t1, tx)

    return main
