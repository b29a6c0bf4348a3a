"""Tile program for small batches: mma.sync, weights through warp-private cp.async rings, X resident in shared memory.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X is loaded once. The warps of a CTA split its k range, so each streams its own weights with no barrier in the main
loop; they sum their partial tiles through shared memory in a fixed order once per `chunk` tiles. With kc > 1 the last
CTA of a row range sums the kc partials in a fixed order, so the result has the same bits in every run.

Numerics (specs.md B.3): `post` multiplies unscaled codes and applies scale and zero to f32 sums, once per group;
`exact` and `fused` scale the operand.
"""

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.primitives import prelude
from terrazzo.ops.w4a16.operand import Operand

PASS_CONFIGS = (  # barriers are placed by hand: the automatic ones stand around every access by a primitive
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
ITEM_K = 128  # k extent of one work item: 16 rows x 128 k


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
    token_tiles: int,
    kc: int,
    nc: int,
    warps: int,
    chunk: int,
    stages: int,
    cluster: int = 1,
):
    """The prim_func `main(X, W, P, B, WS, SEM, Y)` for M <= 8 * token_tiles.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Kp/64, Np/64, 512]; P uint8 [G, Np/64, R]; B [n] in `dtype`
    (one element when there is no bias); WS f32 [kc, token_tiles * 8, Np]; SEM int32 [nc], zero before the first
    launch and after each one. `group` is 0 for one scale per row.
    """
    import tilelang.language as T

    op = Operand(group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, numerics=numerics)
    cvt = get_converter(op.converter)
    nt, post = token_tiles, numerics == "post"
    np_, kp = -(-n // 64) * 64, -(-k // ITEM_K) * ITEM_K
    items_k, tiles, kb64 = kp // ITEM_K, np_ // 16, kp // 64
    even = items_k % kc == 0 and (items_k // kc) % warps == 0
    cta_items = -(-items_k // kc)  # most items of a CTA along k
    if warps > items_k // kc:  # TileLang drops the guard of a loop that runs zero times or once
        raise ArgumentError(
            "warps", warps, f"must be at most the {items_k // kc} items of a CTA along k", "take fewer warps"
        )
    threads = warps * 32
    pitch = cta_items * ITEM_K + 8  # halves; 16 bytes mod 128: ldmatrix without conflicts
    groups, ig = op.groups(kp), op.groups_per(ITEM_K)
    rec = op.record_bytes
    seg, zseg = op.scale_bytes * 16, 0 if symmetric else 16  # bytes of 16 rows in a parameter record
    per_group = (seg + zseg) // 16  # 16-byte copies of one group of one item
    p_words = ig * (seg + zseg) // 4
    p_base = chunk * 256
    step = p_base + -(-chunk * p_words // 32) * 32  # words of a ring step, 128-byte aligned
    q_pitch = chunk * 16 + 4  # partial tiles [token][row]: stores and vector loads without bank conflicts
    part = nt * 8 * q_pitch
    chunks = -(-tiles // (nc * chunk)) if tiles % nc == 0 else -(-(tiles // nc + 1) // chunk)
    bf16 = dtype == "bfloat16"
    ab = "bf16" if bf16 else "fp16"
    tb, stb = ("true" if bf16 else "false"), ("true" if scale_dtype == "bfloat16" else "false")
    f32 = scale_dtype == "float32"
    one_bits = 0x3F803F80 if bf16 else 0x3C003C00
    e0, e1 = (2.0 ** cvt.scale_exp2[0], 2.0 ** cvt.scale_exp2[1]) if post else (1.0, 1.0)
    zero8 = float(8 + cvt.bias[0]) if post else 0.0
    x_copies = nt * 8 * cta_items * 16
    pdl = target.supports("pdl")
    bulk_x = target.supports("bulk_copy")  # then X does not queue behind the first weights
    source = prelude(
        "cp_async",
        "lds",
        "ldmatrix",
        "pack",
        "semaphore",
        *(["multicast" if cluster > 1 else "bulk"] if bulk_x else []),
        extra=(cvt.device_source,),
    )
    cluster_dims = dict(cluster_dims=(1, cluster, 1)) if cluster > 1 else {}
    M = T.dynamic("m")

    @T.macro
    def issue(W, P, R, base, q, gn, t0, t1, kg, lane):
        """Ring step q of this warp: `chunk` row tiles x one item, with their parameters."""
        first = t0 + q // gn * chunk
        item = kg + q % gn
        slot = base + q % stages * step
        for m in T.unroll(chunk):
            if first + m < t1:
                tile = first + m
                for h in T.unroll(2):
                    T.call_extern(
                        "handle",
                        "tz_cp_async",
                        T.access_ptr(R[slot + m * 256 + h * 128 + lane * 4], "w", 4),
                        T.access_ptr(W[item * 2 + h, tile // 4, tile % 4 * 128 + lane * 4], "r", 4),
                        16,
                    )
                if lane < ig * per_group:
                    T.call_extern(
                        "handle",
                        "tz_cp_async",
                        T.access_ptr(R[slot + p_base + m * p_words + lane * 4], "w", 4),
                        T.access_ptr(
                            P[
                                0 if group == 0 else item * ig + lane // per_group,
                                tile // 4,
                                T.if_then_else(
                                    lane % per_group < seg // 16,
                                    tile % 4 * seg + lane % per_group * 16,
                                    4 * seg + tile % 4 * 16,
                                ),
                            ],
                            "r",
                            16,
                        ),
                        16,
                    )
        T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def fetch_x(X, Xs, xbar, m, k0, kn, bn, tx):
        """X of this CTA's k range; rows >= m and columns >= k become zero. The CTAs of a cluster share it."""
        if bulk_x:
            for e in T.serial(T.ceildiv((nt * 8 - m) * (pitch // 8), threads)):
                if e * threads + tx < (nt * 8 - m) * (pitch // 8):
                    for i in T.vectorized(8):
                        Xs[m * pitch + (e * threads + tx) * 8 + i] = T.cast(0, dtype)
            if kp > k:  # the last CTA along k: columns past the end
                for e in T.serial(T.ceildiv(m * (kp - k) // 8, threads)):
                    if T.And(e * threads + tx < m * ((kp - k) // 8), k0 + kn == items_k):
                        for i in T.vectorized(8):
                            Xs[
                                (e * threads + tx) // ((kp - k) // 8) * pitch
                                + (k - k0 * ITEM_K)
                                + (e * threads + tx) % ((kp - k) // 8) * 8
                                + i
                            ] = T.cast(0, dtype)
            if tx == 0:
                row_bytes = T.min(kn * ITEM_K, k - k0 * ITEM_K) * 2
                T.mbarrier_expect_tx(xbar, m * row_bytes)
                T.barrier_arrive(xbar)
                rank = bn % cluster
                count = T.ceildiv(m - rank, cluster)
                for i in T.serial(count):
                    r = T.truncmod(i + bn // cluster, count)  # not all CTAs at the same row: it lies in a few L2 slices
                    if cluster > 1:
                        T.call_extern(
                            "handle",
                            "tz_bulk_multicast",
                            T.access_ptr(Xs[(r * cluster + rank) * pitch], "w", 8),
                            T.access_ptr(X[r * cluster + rank, k0 * ITEM_K], "r", 8),
                            row_bytes,
                            T.access_ptr(xbar, "rw", 1),
                            (1 << cluster) - 1,
                        )
                    else:
                        T.call_extern(
                            "handle",
                            "tz_bulk",
                            T.access_ptr(Xs[r * pitch], "w", 8),
                            T.access_ptr(X[r, k0 * ITEM_K], "r", 8),
                            row_bytes,
                            T.access_ptr(xbar, "rw", 1),
                        )
        else:
            for e in T.serial(-(-x_copies // threads)):
                row = (e * threads + tx) // (cta_items * 16)
                col = k0 * ITEM_K + (e * threads + tx) % (cta_items * 16) * 8
                if e * threads + tx < x_copies:
                    T.call_extern(
                        "handle",
                        "tz_cp_async",
                        T.access_ptr(Xs[row * pitch + (e * threads + tx) % (cta_items * 16) * 8], "w", 8),
                        T.access_ptr(X[T.min(row, m - 1), T.min(col, k - 8)], "r", 8),
                        T.if_then_else(T.And(row < m, col < k), 16, 0),
                    )
            T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def load_x(Xs, x, col, lane):
        """B fragments of one item from the resident X."""
        for j in T.unroll(4):
            for t in T.unroll(nt):
                T.call_extern(
                    "handle",
                    "tz_ldmatrix4",
                    T.access_ptr(x[(j * nt + t) * 4], "w", 4),
                    T.access_ptr(Xs[(t * 8 + lane % 8) * pitch + col + j * 32 + lane // 8 * 8], "r", 8),
                )

    @T.macro
    def mma(d, off, a, x, j, t):
        T.ptx_mma(
            "float32",
            "m16n8k16",
            "row",
            "col",
            ab,
            ab,
            "fp32",
            a.data,
            0,
            x.data,
            (j // 2 * nt + t) * 4 + j % 2 * 2,
            d.data,
            off,
            T.bool(False),
        )

    @T.macro
    def load_params(R, p, q, s, z, u, lane):
        """Scale and zero point of rows g and g + 8 for group q of an item whose parameters start at word p."""
        if f32:
            u[0] = T.call_extern("uint32", "tz_lds32", T.access_ptr(R[p + q * per_group * 4 + lane // 4 * 2], "r", 1))
            u[1] = T.call_extern(
                "uint32", "tz_lds32", T.access_ptr(R[p + q * per_group * 4 + lane // 4 * 2 + 1], "r", 1)
            )
            s[0] = T.reinterpret(u[0], "float32")
            s[1] = T.reinterpret(u[1], "float32")
        else:
            u[0] = T.call_extern("uint32", "tz_lds32", T.access_ptr(R[p + q * per_group * 4 + lane // 4], "r", 1))
            s[0] = T.call_extern("float32", f"tz_unpack<{stb}, 0>", u[0])
            s[1] = T.call_extern("float32", f"tz_unpack<{stb}, 1>", u[0])
        if not symmetric:
            u[2] = T.call_extern(
                "uint32", "tz_lds16_at", T.access_ptr(R[p + q * per_group * 4 + seg // 4], "r", 4), lane // 4
            )
            z[0] = T.cast(u[2] & T.uint32(255), "float32")
            z[1] = T.cast(u[2] >> T.uint32(8), "float32")

    @T.macro
    def operand_words(s, z, u, v):
        """exact / fused: the converter's packed (bias, scale) pairs of rows g and g + 8."""
        if symmetric:
            u[2] = T.uint32(0x0808)
            z[0] = 8.0
            z[1] = 8.0
        v[1] = (u[0] & T.uint32(0xFFFF)) * T.uint32(0x10001)
        v[3] = (u[0] >> T.uint32(16)) * T.uint32(0x10001)
        if numerics == "fused":
            v[0] = T.call_extern("uint32", f"tz_pack2<{tb}>", -z[0] * s[0], -z[0] * s[0])
            v[2] = T.call_extern("uint32", f"tz_pack2<{tb}>", -z[1] * s[1], -z[1] * s[1])
        elif bf16:
            v[0] = (T.uint32(0x4300) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[2] = (T.uint32(0x4300) + (u[2] >> T.uint32(8))) * T.uint32(0x10001)
        else:
            v[0] = (T.uint32(0x6400) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[2] = (T.uint32(0x5400) + (u[2] >> T.uint32(8)) * T.uint32(16)) * T.uint32(0x10001)

    @T.macro
    def store(Y, B, r4, o4, tok, row):
        """Four rows of one token, with the bias, in the output dtype."""
        if n % 4 == 0:
            if row < n:
                for i in T.unroll(4):
                    o4[i] = T.cast(r4[i] + (T.cast(B[row + i], "float32") if bias else T.float32(0)), dtype)
                for i in T.vectorized(4):
                    Y[tok, row + i] = o4[i]
        else:
            for i in T.unroll(4):
                if row + i < n:
                    Y[tok, row + i] = T.cast(r4[i] + (T.cast(B[row + i], "float32") if bias else T.float32(0)), dtype)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        W: T.Tensor((kb64, np_ // 64, 512), "int32"),
        P: T.Tensor((groups, np_ // 64, rec), "uint8"),
        B: T.Tensor((n if bias else 1,), dtype),
        WS: T.Tensor((kc, nt * 8, np_), "float32"),
        SEM: T.Tensor((nc,), "int32"),
        Y: T.Tensor((M, n), dtype),
    ):
        with T.Kernel(kc, nc, threads=threads, prelude=source, **cluster_dims) as (bk, bn):
            Xs = T.alloc_shared((nt * 8 * pitch + 64,), dtype)  # the tail keeps what follows 128-byte aligned
            R = T.alloc_shared((warps * stages * step,), "int32")
            Q = T.alloc_shared((warps * part,), "float32")
            C0 = T.alloc_shared((cta_items * ig * nt * 8,), "float32")
            xbar = T.alloc_cluster_barrier([1]) if cluster > 1 else T.alloc_barrier([1]) if bulk_x else None
            w = T.alloc_local((4,), "uint32")
            a = T.alloc_local((4,), "uint32")
            x = T.alloc_local((16 * nt,), "uint32")
            d = T.alloc_local((8 * nt,), "float32")
            c = T.alloc_local((2 * nt,), "float32")
            s = T.alloc_local((2,), "float32")
            z = T.alloc_local((2,), "float32")
            u = T.alloc_local((3,), "uint32")
            v = T.alloc_local((4,), "uint32")
            acc = T.alloc_local((chunk * nt * 4,), "float32")
            r4 = T.alloc_local((4,), "float32")
            o4 = T.alloc_local((4,), dtype)
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            t0 = bn * tiles // nc
            t1 = (bn + 1) * tiles // nc
            k0 = bk * items_k // kc
            kn = items_k // kc if even else (bk + 1) * items_k // kc - k0
            g0 = warp * kn // warps
            gn = kn // warps if even else (warp + 1) * kn // warps - g0
            ring = warp * stages * step

            # weights first where the launch may overlap the kernel before; X may be its result
            if pdl:
                T.pdl_trigger()
            else:
                fetch_x(X, Xs, xbar, M, k0, kn, 0, tx)
            for p in T.unroll(stages):
                issue(W, P, R, ring, p, gn, t0, t1, k0 + g0, lane)
            if pdl:
                T.pdl_sync()
                fetch_x(X, Xs, xbar, M, k0, kn, bn, tx)
            if bulk_x:
                T.barrier_wait(xbar, 0)
            else:
                T.call_extern("handle", f"tz_cp_wait<{stages}>")
            T.sync_threads()
            if post:  # C0 = -2^e0 * sum of x over each group, in accumulator column order
                for gi in T.serial(gn):
                    load_x(Xs, x, (g0 + gi) * ITEM_K, lane)
                    for i in T.unroll(4):
                        a[i] = T.uint32(one_bits)
                    for q in T.unroll(ig):
                        for t in T.unroll(nt):
                            for i in T.unroll(4):
                                d[i] = 0.0
                            for j in T.unroll(8 // ig):
                                mma(d, 0, a, x, q * (8 // ig) + j, t)
                            if lane < 4:  # all rows of `a` are ones: each has the same sums
                                for i in T.unroll(2):
                                    C0[(((g0 + gi) * ig + q) * nt + t) * 8 + lane * 2 + i] = d[i] * T.float32(-e0)
                T.call_extern("handle", "tz_syncwarp")
            for ci in T.serial(chunks):
                for i in T.unroll(chunk * nt * 4):
                    acc[i] = 0.0
                for gi in T.serial(gn):
                    T.call_extern("handle", f"tz_cp_wait<{stages - 1}>")
                    slot = ring + (ci * gn + gi) % stages * step
                    load_x(Xs, x, (g0 + gi) * ITEM_K, lane)
                    for m in T.unroll(chunk):
                        for q in T.unroll(ig):
                            load_params(R, slot + p_base + m * p_words, q, s, z, u, lane)
                            if not post:
                                operand_words(s, z, u, v)
                            else:
                                for t in T.unroll(nt):
                                    for i in T.unroll(2):
                                        c[i] = C0[(((g0 + gi) * ig + q) * nt + t) * 8 + lane % 4 * 2 + i]
                                        d[t * 8 + i] = c[i] * (
                                            T.float32(zero8) if symmetric else z[0] + T.float32(cvt.bias[0])
                                        )
                                        d[t * 8 + 2 + i] = c[i] * (
                                            T.float32(zero8 * e1 / e0)
                                            if symmetric
                                            else z[1] * T.float32(e1 / e0) + T.float32(cvt.bias[0] * e1 / e0)
                                        )
                                        d[t * 8 + 4 + i] = 0.0
                                        d[t * 8 + 6 + i] = 0.0
                            for j in T.unroll(8 // ig):
                                if (q * (8 // ig) + j) % 4 == 0:
                                    T.call_extern(
                                        "handle",
                                        "tz_lds128",
                                        T.access_ptr(w, "w"),
                                        T.access_ptr(
                                            R[slot + m * 256 + (q * (8 // ig) + j) // 4 * 128 + lane * 4], "r", 4
                                        ),
                                    )
                                if post:
                                    T.call_extern(
                                        "handle", cvt.device_name, w[(q * (8 // ig) + j) % 4], T.access_ptr(a, "w")
                                    )
                                    for t in T.unroll(nt):
                                        mma(d, t * 8 + j % 2 * 4, a, x, q * (8 // ig) + j, t)
                                else:
                                    T.call_extern(
                                        "handle",
                                        cvt.device_name,
                                        w[(q * (8 // ig) + j) % 4],
                                        T.access_ptr(a, "w"),
                                        v[0],
                                        v[1],
                                        v[2],
                                        v[3],
                                    )
                                    for t in T.unroll(nt):
                                        mma(acc, (m * nt + t) * 4, a, x, q * (8 // ig) + j, t)
                            if post:
                                s[0] = s[0] * T.float32(1.0 / e0)
                                s[1] = s[1] * T.float32(1.0 / e1)
                                for t in T.unroll(nt):
                                    for i in T.unroll(4):
                                        acc[(m * nt + t) * 4 + i] = acc[(m * nt + t) * 4 + i] + s[i // 2] * (
                                            d[t * 8 + i] + d[t * 8 + 4 + i]
                                        )
                    T.call_extern("handle", "tz_syncwarp")  # every lane has read the step before it is overwritten
                    issue(W, P, R, ring, ci * gn + gi + stages, gn, t0, t1, k0 + g0, lane)
                if chunks == 1:
                    T.sync_threads()  # Q may share memory with Xs and R, whose last use this is
                for m in T.unroll(chunk):
                    for t in T.unroll(nt):
                        for i in T.unroll(4):
                            Q[
                                warp * part + (t * 8 + lane % 4 * 2 + i % 2) * q_pitch + m * 16 + i // 2 * 8 + lane // 4
                            ] = acc[(m * nt + t) * 4 + i]
                T.sync_threads()
                for e in T.serial(-(-(nt * 8 * chunk * 4) // threads)):
                    tok = (e * threads + tx) // (chunk * 4)
                    row = (e * threads + tx) % (chunk * 4) * 4
                    if T.And(tok < T.min(M, nt * 8), t0 * 16 + ci * chunk * 16 + row < t1 * 16):
                        for i in T.vectorized(4):
                            r4[i] = Q[tok * q_pitch + row + i]
                        for wi in T.unroll(1, warps):
                            for i in T.vectorized(4):
                                r4[i] = r4[i] + Q[wi * part + tok * q_pitch + row + i]
                        if kc > 1:
                            for i in T.vectorized(4):
                                WS[bk, tok, (t0 + ci * chunk) * 16 + row + i] = r4[i]
                        else:
                            store(Y, B, r4, o4, tok, (t0 + ci * chunk) * 16 + row)
                T.sync_threads()
            if kc > 1:
                if T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[bn], "rw", 1), kc):
                    for e in T.serial(T.ceildiv((t1 - t0) * 4 * T.min(M, nt * 8), threads)):
                        tok = (e * threads + tx) // ((t1 - t0) * 4)
                        row = t0 * 16 + (e * threads + tx) % ((t1 - t0) * 4) * 4
                        if tok < T.min(M, nt * 8):
                            T.call_extern(
                                "handle", "tz_ldcg4", T.access_ptr(r4, "w"), T.access_ptr(WS[0, tok, row], "r", 4)
                            )
                            for kk in T.unroll(1, kc):
                                T.call_extern(
                                    "handle",
                                    "tz_addcg4",
                                    T.access_ptr(r4, "rw"),
                                    T.access_ptr(WS[kk, tok, row], "r", 4),
                                )
                            store(Y, B, r4, o4, tok, row)

    return main
