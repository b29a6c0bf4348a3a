"""Tile program for small batches: mma.sync, weights through warp-private cp.async rings, X resident in shared memory.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X is loaded once. The warps of a CTA split its k range, so each streams its own weights with no barrier in the main
loop; they sum their partial tiles through shared memory in a fixed order once per `chunk` tiles. With kc > 1 the last
CTA of a row range sums the kc partials in a fixed order, so the result has the same bits in every run. `joined`: pairs
of CTAs along k are clusters, and each sums half of the rows, as the other sends them to its shared memory.

Numerics (specs.md B.3): `post` multiplies unscaled codes and applies scale and zero to f32 sums, once per group;
`exact` and `fused` scale the operand.
"""

from types import SimpleNamespace

from terrazzo.layouts.converters import get_converter
from terrazzo.ops.formats.weight import BLOCK_ROWS, BLOCK_WORDS, TILE_WORDS
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.params import factor_macros, param_macros
from terrazzo.ops.tiles.calls import (
    cp_async,
    cp_commit,
    cp_wait,
    ldmatrix4,
    lds16_at,
    lds32,
    lds128,
    mma,
    mma_kind,
    pack2,
    syncwarp,
)
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS
from terrazzo.ops.tiles.resident import (
    ITEM_K,
    Split,
    cluster_shape,
    resident_macros,
    resident_rows,
    sum_macros,
    x_bytes,
    x_row,
)
from terrazzo.schedules.clusters import PAIR

PASS_CONFIGS = OWN_BARRIERS


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
    joined: bool = False,
    tokens: int = 0,
    weight: str = "u4",
):
    """The prim_func `main(X, W, P, B, WS, SEM, Y)` for M <= tokens, which is 8 * token_tiles where it is 0.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Kp/KB, Np/64, 512], blocks of KB k of the format `weight`; P
    uint8 [G, Np/64, R]; B [n] in `dtype` (one element when there is no bias); WS f32 [kc, tokens, Np]; SEM int32 [nc],
    zero before the first launch and after each one. `group` is 0 for one scale per row. With `joined`, pairs of CTAs
    along k are clusters, WS is [kc / 2, tokens, Np] and SEM [2 nc]; one pair needs neither.
    """
    import tilelang.language as T

    op = Operand(group, symmetric, scale_dtype, dtype, numerics, weight)
    fmt = op.format
    cvt = get_converter(op.converter)
    nt, post, bf16 = token_tiles, op.scales_sums, dtype == "bfloat16"
    np_, kp = -(-n // BLOCK_ROWS) * BLOCK_ROWS, -(-k // ITEM_K) * ITEM_K
    split = Split(kp // ITEM_K, np_ // 16, kc, nc, warps, chunk)
    rows = resident_rows(nt, tokens)
    threads = split.threads
    pitch = split.cta_items * ITEM_K + 8  # halves; 16 bytes mod 128: ldmatrix without conflicts
    records, ig = op.records(kp), op.groups_per(ITEM_K)
    rec, sb, steps = op.record_bytes, op.scale_bytes, 8 // ig  # k16 steps of a group
    seg, zseg = sb * 16, 0 if symmetric else 16  # bytes of 16 rows in a parameter record
    per_group = (seg + zseg) // 16  # 16-byte copies of one group of one item
    p_words = ig * (seg + zseg) // 4 if op.has_groups else 0
    blocks, per_step = fmt.blocks(ITEM_K), fmt.step_words  # packed blocks of an item, words of a k16 step
    ahead = 4 // per_step  # k16 steps of a load
    tile_words = blocks * TILE_WORDS  # of a row tile and an item
    p_base = chunk * tile_words
    step = p_base + -(-chunk * p_words // 32) * 32  # words of a ring step, 128-byte aligned
    kind = mma_kind(dtype)
    one_bits = 0x3F803F80 if bf16 else 0x3C003C00
    factors = factor_macros(op, n, kp)  # which undo the operands' exponent, too
    e0, e1 = (2.0 ** cvt.scale_exp2[0], 2.0 ** cvt.scale_exp2[1]) if post and not fmt.row_factors else (1.0, 1.0)
    zero = float(fmt.zero + cvt.bias[0]) if post else 0.0
    biased = "b0" in cvt.params
    counts = post and (not symmetric or zero != 0)  # sums of x matter, times zero points
    pdl = target.supports("pdl")
    bulk_copies = target.supports("bulk_copy")  # then X does not queue behind the first weights
    resident = resident_macros(split, k=k, rows=rows, pitch=pitch, size=2, bulk_copies=bulk_copies, cluster=cluster)
    words = param_macros(op)
    source = prelude(
        "cp_async",
        "lds",
        "ldmatrix",
        "pack",
        "semaphore",
        *(["multicast" if cluster > 1 else "bulk"] if bulk_copies else []),
        *(["cluster"] if joined else []),
        *(["prefetch_line"] if fmt.row_factors else []),
        extra=(cvt.device_source,),
    )
    cluster_dims = cluster_shape(target, kc, cluster, joined)
    M = T.dynamic("m")

    @T.macro
    def issue(W, P, R, base, q, at, lane):
        """Ring step q of a warp of CTA `at`: `chunk` row tiles x one item, with their parameters."""
        first = at.t0 + q // at.gn * chunk
        item = at.kg + q % at.gn
        slot = base + q % stages * step
        for m in T.unroll(chunk):
            if first + m < at.t1:
                tile = first + m
                for h in T.unroll(blocks):
                    cp_async(
                        R[slot + m * tile_words + h * TILE_WORDS + lane * 4],
                        W[item * blocks + h, tile // 4, tile % 4 * TILE_WORDS + lane * 4],
                    )
                if op.has_groups and lane < ig * per_group:
                    cp_async(
                        R[slot + p_base + m * p_words + lane * 4],
                        P[
                            0 if group == 0 else item * ig + lane // per_group,
                            tile // 4,
                            T.if_then_else(
                                lane % per_group < seg // 16,
                                tile % 4 * seg + lane % per_group * 16,
                                4 * seg + tile % 4 * 16,
                            ),
                        ],
                    )
        cp_commit()

    @T.macro
    def load_x(Xs, x, col, lane):
        """B fragments of one item from the resident X."""
        for j in T.unroll(4):
            for t in T.unroll(nt):
                ldmatrix4(x[(j * nt + t) * 4], Xs[x_row(nt, rows, t, lane) * pitch + col + j * 32 + lane // 8 * 8])

    def fragment(j, t):
        """Where in x the B fragment of k16 step j and token tile t begins."""
        return (j // 2 * nt + t) * 4 + j % 2 * 2

    @T.macro
    def load_params(R, p, q, s, z, u, lane):
        """Scale and zero point of rows g and g + 8 for group q of an item whose parameters start at word p."""
        if scale_dtype == "float32":
            u[0] = lds32(R[p + q * per_group * 4 + lane // 4 * 2])
            u[1] = lds32(R[p + q * per_group * 4 + lane // 4 * 2 + 1])
        elif sb == 1:
            u[0] = lds16_at(R[p + q * per_group * 4], lane // 4, nbytes=16)
        else:
            u[0] = lds32(R[p + q * per_group * 4 + lane // 4])
        words.scales(s, 0, u)
        if not symmetric:
            u[2] = lds16_at(R[p + q * per_group * 4 + seg // 4], lane // 4, nbytes=16)
            z[0] = T.cast(u[2] & T.uint32(255), "float32")
            z[1] = T.cast(u[2] >> T.uint32(8), "float32")

    @T.macro
    def operand_words(s, z, u, v):
        """exact / fused: the converter's packed (bias, scale) pairs of rows g and g + 8."""
        if symmetric:
            u[2] = T.uint32(fmt.zero * 0x0101)
            z[0] = float(fmt.zero)
            z[1] = float(fmt.zero)
        words.scale_words(v, 0, u)
        if numerics == "fused":
            v[0] = pack2(-z[0] * s[0], -z[0] * s[0], bf16=bf16)
            v[2] = pack2(-z[1] * s[1], -z[1] * s[1], bf16=bf16)
        elif not biased:
            v[0] = T.uint32(0)
        elif bf16:
            v[0] = (T.uint32(0x4300) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[2] = (T.uint32(0x4300) + (u[2] >> T.uint32(8))) * T.uint32(0x10001)
        else:
            v[0] = (T.uint32(0x6400) + (u[2] & T.uint32(255))) * T.uint32(0x10001)
            v[2] = (T.uint32(0x5400) + (u[2] >> T.uint32(8)) * T.uint32(16)) * T.uint32(0x10001)

    @T.macro
    def sum_tokens(Xs, C0, x, a, d, at, lane):
        """post: C0 = -2^e0 * sum of x over each group of the warp's items, in accumulator column order."""
        for gi in T.serial(at.gn):
            load_x(Xs, x, (at.g0 + gi) * ITEM_K, lane)
            for i in T.unroll(4):
                a[i] = T.uint32(one_bits)
            for q in T.unroll(ig):
                for t in T.unroll(nt):
                    for i in T.unroll(4):
                        d[i] = 0.0
                    for j in T.unroll(steps):
                        mma(kind, d, 0, a, 0, x, fragment(q * steps + j, t))
                    for i in T.unroll(2):  # all rows of `a` are ones: each has the same sums
                        if T.And(lane < 4, t * 8 + lane * 2 + i < rows):
                            C0[((at.g0 + gi) * ig + q) * rows + t * 8 + lane * 2 + i] = d[i] * T.float32(-e0)
        syncwarp()

    def registers(a, i):
        """What word i of a k16 step becomes."""
        return T.access_ptr(a[i * (4 // per_step)], "w", 4 // per_step)

    @T.macro
    def convert(w, a, v, step):
        """Operand registers of a k16 step of those that are loaded."""
        for i in T.unroll(per_step):
            T.call_extern(
                "handle", cvt.device_name, w[step * per_step + i], registers(a, i), *words.of_converter(cvt, v, 0)
            )

    @T.macro
    def begin_sums(C0, d, c, z, at, gi, q, lane):
        """post: the sums of group q start with what its zero points and the codes' bias make of the tokens' sums."""
        for t in T.unroll(nt):
            for i in T.unroll(2):
                c[i] = C0[((at.g0 + gi) * ig + q) * rows + T.min(t * 8 + lane % 4 * 2 + i, rows - 1)]
                d[t * 8 + i] = c[i] * (T.float32(zero) if symmetric else z[0] + T.float32(cvt.bias[0]))
                d[t * 8 + 2 + i] = c[i] * (
                    T.float32(zero * e1 / e0)
                    if symmetric
                    else z[1] * T.float32(e1 / e0) + T.float32(cvt.bias[0] * e1 / e0)
                )
                d[t * 8 + 4 + i] = 0.0
                d[t * 8 + 6 + i] = 0.0

    @T.macro
    def clear_sums(d):
        """post, codes that are numbers as they are."""
        for i in T.unroll(8 * nt):
            d[i] = 0.0

    @T.macro
    def end_sums(acc, d, s, m):
        """post: the sums of a group, times the scales, join those of row tile m."""
        s[0] = s[0] * T.float32(1.0 / e0)
        s[1] = s[1] * T.float32(1.0 / e1)
        for t in T.unroll(nt):
            for i in T.unroll(4):
                acc[(m * nt + t) * 4 + i] = acc[(m * nt + t) * 4 + i] + s[i // 2] * (d[t * 8 + i] + d[t * 8 + 4 + i])

    @T.macro
    def store(to, r4, tok, row):
        """Four rows of one token, with the bias, in the output dtype."""
        Y, B, o4 = to.y, to.b, to.o4
        if fmt.row_factors:
            lds128(to.f4, factors.at(to.p, T.min(row, np_ - 4)))
            for i in T.unroll(4):
                r4[i] = r4[i] * (to.f4[i] * T.float32(op.undone))
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

    sums = sum_macros(split, token_tiles=nt, tokens=rows, dtype="float32", store=store, floor=True, joined=joined)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        W: T.Tensor((fmt.blocks(kp), np_ // 64, BLOCK_WORDS), "int32"),
        P: T.Tensor((records, np_ // 64, rec), "uint8"),
        B: T.Tensor((n if bias else 1,), dtype),
        WS: T.Tensor((kc // PAIR if joined else kc, rows, np_), "float32"),
        SEM: T.Tensor((nc * PAIR if joined else nc,), "int32"),
        Y: T.Tensor((M, n), dtype),
    ):
        with T.Kernel(kc, nc, threads=threads, prelude=source, **cluster_dims) as (bk, bn):
            Xs = T.alloc_shared((x_bytes(target, rows, 2 * pitch, 4 * warps * stages * step) // 2,), dtype)
            R = T.alloc_shared((warps * stages * step,), "int32")
            Q = T.alloc_shared((sums.words,), "float32")
            C0 = T.alloc_shared((split.cta_items * ig * rows if counts or not fmt.row_factors else 4,), "float32")
            xbar = T.alloc_cluster_barrier([1]) if cluster > 1 else T.alloc_barrier([1]) if bulk_copies else None
            mail = sums.mail()
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
            f4 = T.alloc_local((4,), "float32") if fmt.row_factors else None
            to = SimpleNamespace(y=Y, b=B, p=P, o4=o4, f4=f4)
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            at = resident.place(bk, bn, warp)
            ring = warp * stages * step

            if joined:
                sums.open(mail, M, bk, at, tx)
            # weights first where the launch may overlap the kernel before; X may be its result
            if pdl:
                T.pdl_trigger()
            else:
                resident.fetch(X, Xs, xbar, M, at, 0, tx)
            for p in T.unroll(stages):
                issue(W, P, R, ring, p, at, lane)
            if fmt.row_factors:
                factors.fetch(P, T.min(at.t0 + tx, at.t1 - 1) * 16)
            if pdl:
                resident.clear(Xs, M, at, tx)
                T.pdl_sync()
                resident.fetch(X, Xs, xbar, M, at, bn, tx)
            resident.wait(xbar, stages)
            if joined:
                T.cluster_wait()  # the others' barriers are made
            if counts:
                sum_tokens(Xs, C0, x, a, d, at, lane)
            for ci in T.serial(split.chunks):
                for i in T.unroll(chunk * nt * 4):
                    acc[i] = 0.0
                for gi in T.serial(at.gn):
                    cp_wait(stages - 1)
                    slot = ring + (ci * at.gn + gi) % stages * step
                    load_x(Xs, x, (at.g0 + gi) * ITEM_K, lane)
                    for m in T.unroll(chunk):
                        for q in T.unroll(ig):
                            if op.has_groups:
                                load_params(R, slot + p_base + m * p_words, q, s, z, u, lane)
                            if counts:
                                begin_sums(C0, d, c, z, at, gi, q, lane)
                            elif post:
                                clear_sums(d)
                            elif op.has_groups:
                                operand_words(s, z, u, v)
                            for j in T.unroll(steps):
                                if (q * steps + j) % ahead == 0:
                                    lds128(
                                        w, R[slot + m * tile_words + (q * steps + j) // ahead * TILE_WORDS + lane * 4]
                                    )
                                convert(w, a, v, (q * steps + j) % ahead)
                                if post:
                                    for t in T.unroll(nt):
                                        mma(kind, d, t * 8 + j % 2 * 4, a, 0, x, fragment(q * steps + j, t))
                                else:
                                    for t in T.unroll(nt):
                                        mma(kind, acc, (m * nt + t) * 4, a, 0, x, fragment(q * steps + j, t))
                            if post:
                                end_sums(acc, d, s, m)
                    syncwarp()  # every lane has read the step before it is overwritten
                    issue(W, P, R, ring, ci * at.gn + gi + stages, at, lane)
                sums.stage(Q, acc, ci, tx)
                sums.add_warps(Q, WS, mail, to, r4, M, bk, at, ci, tx)
            sums.add_ctas(WS, SEM, mail, to, r4, M, bk, bn, at, tx)

    return main
