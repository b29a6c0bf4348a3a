"""Tile program for small batches: mma.sync m16n8k32, weights through warp-private cp.async rings, X resident.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X is loaded once. The warps of a CTA split its k range, so each streams its own units (two runs of 512 bytes and the
parameters of 16 rows for each 128 k) with no barrier in the main loop; they sum their partial tiles through shared
memory once per `chunk` tiles. With kc > 1 the last CTA of a row range sums the kc partials. All sums are int32.
"""

from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes.operand import operand_macros
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.tiles.calls import lds32, lds128, rescale
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, take
from terrazzo.ops.tiles.resident import (
    ROW_WORDS,
    Split,
    cluster_shape,
    resident_macros,
    sum_macros,
    unit_macros,
    write_macro,
    x_bytes,
)
from terrazzo.ops.tiles.resident_pipeline import Steps, walk_macro
from terrazzo.ops.tiles.types import Buffers, Macro, Scalar
from terrazzo.schedules.clusters import PAIR

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def out_macros(gemm: Gemm, split: Split) -> tuple[Macro, Macro]:
    """Macros `store`, as `sum_macros` wants it, and `fetch_tokens`.

    `to` of `store` has Cs, Fs and Rs, scales of rows and of tokens and sums of tokens in shared memory, B, Y, and o4,
    four registers in its dtype.
    """
    write = write_macro(gemm.n)
    bias = lambda to, row: to.B[T.min(row, gemm.n - 1)] if gemm.bias else T.float32(0)

    @T.macro
    def store(to, at, r4, tok, row):
        """Four rows of one token in the output dtype."""
        if row < gemm.n:
            for i in T.unroll(4):
                if gemm.unsigned:
                    r4[i] = r4[i] - to.Rs[tok] * 128
                if gemm.raw:
                    to.o4[i] = r4[i]
                else:
                    to.o4[i] = T.cast(
                        rescale(r4[i], to.Cs[row - at.t0 * 16 + i], to.Fs[tok], bias(to, row + i)), gemm.out_dtype
                    )
            write(to.Y, to.o4, tok, row)

    @T.macro
    def fetch_tokens(XS, RS, Fs, Rs, m, tx):
        """What the sums of the tokens below m are scaled with, and what is subtracted from them."""
        tok = split.threads - 1 - tx  # the first warp asks for X
        if tok < T.min(m, split.rows):
            if not gemm.raw:
                Fs[tok] = XS[tok]
            if gemm.unsigned:
                Rs[tok] = RS[tok]

    return store, fetch_tokens


def build(target, **params: Scalar):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y)` for M <= tokens, which is 8 * token_tiles where it is 0.

    Shapes: X int8 [M, k]; W int32 [Kp/128, Np/64, unit words]; S f32 [Np] channel scales; XS f32 [M] token scales; RS
    int32 [M] sums of the rows of X (read by "unsigned" only); B f32 [n] (one element without a bias); WS int32
    [kc, tokens, Np]; SEM int32 [nc], zero before the first launch and after each one; Y [M, n] in `out_dtype`.
    With `dequantization` "e4m3", the bytes of X are e4m3, RS [1] is not read, and WS is f32. With `joined`,
    pairs of CTAs along k are clusters, WS is [kc / 2, tokens, Np] and SEM [2 nc]; one pair needs neither.
    """
    gemm = take(fp8_problem.of, params)
    e4m3 = gemm.float_sums
    sum_type = "float32" if e4m3 else "int32"
    split = Split(gemm.units, gemm.row_blocks * 4, **params)
    nt, ig, rows, most = split.token_tiles, gemm.groups, gemm.row_blocks * 64, split.rows
    kc, nc, warps, chunk, cluster, joined = split.kc, split.nc, split.warps, split.chunk, split.cluster, split.joined
    n, k, stages = gemm.n, gemm.k, split.stages
    pitch = split.cta_items * UNIT_K + 16  # bytes; 16 mod 128: ldmatrix without conflicts
    raw = gemm.raw
    pdl = target.supports("pdl")
    bulk_copies = target.supports("bulk_copy")
    operand = fp8_problem.operand_macros(gemm) if e4m3 else operand_macros(gemm)
    resident = resident_macros(split, k=k, pitch=pitch, size=1, bulk_copies=bulk_copies)
    ring = unit_macros(split, groups=ig, pitch=pitch)
    source = prelude(
        "cp_async", "lds", "ldmatrix", "semaphore", "int8", *(["pack", "e4m3"] if e4m3 else []),
        *(["multicast" if cluster > 1 else "bulk"] if bulk_copies else []), *(["cluster"] if joined else []),
        extra=(gemm.converter.device_source,),
    )  # fmt: skip
    cluster_dims = cluster_shape(target, kc, cluster, joined)
    M = T.dynamic("m")

    store, fetch_scales = out_macros(gemm, split)
    sums = sum_macros(split, sum_type, store)

    @T.macro
    def issue(io, at, base, q, lane):
        ring.issue(io.W, io.R, base, q, at, lane)

    @T.macro
    def before(io, at, tx):
        if not raw:
            resident.fetch_scales(io.S, io.Cs, at, tx)

    @T.macro
    def fetch_tokens(io, m, tx, at):
        fetch_scales(io.XS, io.RS, io.Fs, io.Rs, m, tx)

    @T.macro
    def item(io, at, gi, slot, lane):
        """128 k: load, convert and multiply, 64 k at a time."""
        ring.load_x(io.Xs, io.x, (at.g0 + gi) * UNIT_K, lane)
        for m in T.unroll(chunk):
            for q in T.unroll(ig):
                io.u[q] = lds32(io.R[slot + ring.params + (m * ig + q) * ROW_WORDS + lane // 4])
                if e4m3:
                    operand.factors(io.f, q * 2, io.u[q])
            for j in T.unroll(2):
                lds128(io.w, io.R[slot + m * 256 + j * 128 + lane * 4])
                operand.convert(io.w, 0, io.u, io.a, 0, io.held, j)
                for e in T.unroll(2):
                    for t in T.unroll(nt):
                        to, b = (m * nt + t) * 4, (j * nt + t) * 4 + e * 2
                        if e4m3:
                            operand.mma(io.acc, to, io.a, e * 4, io.x, b, io.f, (j * 2 + e) * ig // 4 * 2)
                        else:
                            operand.mma(io.acc, to, io.a, e * 4, io.x, b)

    walk = walk_macro(
        Steps(issue, item, before, tokens=fetch_tokens), split, resident, sums, step_words=ring.step, pdl=pdl
    )

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((gemm.units, gemm.row_blocks, gemm.unit_words), "int32"),
        S: T.Tensor((rows,), "float32"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((1 if e4m3 else M,), "int32"),
        B: T.Tensor((n if gemm.bias else 1,), "float32"),
        WS: T.Tensor((kc // PAIR if joined else kc, most, rows), sum_type),
        SEM: T.Tensor((nc * PAIR if joined else nc,), "int32"),
        Y: T.Tensor((M, n), gemm.out_dtype),
    ):
        with T.Kernel(kc, nc, threads=split.threads, prelude=source, **cluster_dims) as (bk, bn):
            Xs = T.alloc_shared((x_bytes(target, most, pitch, 4 * warps * stages * ring.step),), "int8")
            R = T.alloc_shared((warps * stages * ring.step,), "int32")
            Q = T.alloc_shared((sums.words,), sum_type)
            Cs = T.alloc_shared((4 if raw else split.most_rows,), "float32")
            Fs = T.alloc_shared((most,), "float32")
            Rs = T.alloc_shared((most if gemm.unsigned else 1,), "int32")
            xbar = T.alloc_cluster_barrier([1]) if cluster > 1 else T.alloc_barrier([1]) if bulk_copies else None
            mail = sums.mail()
            w = T.alloc_local((4,), "uint32")
            u = T.alloc_local((ig,), "uint32")
            a = T.alloc_local((8,), "uint32")
            x = T.alloc_local((8 * nt,), "uint32")
            acc = T.alloc_local((chunk * nt * 4,), sum_type)
            f = T.alloc_local((2 * ig,), "float32")
            r4 = T.alloc_local((4,), sum_type)
            o4 = T.alloc_local((4,), gemm.out_dtype)
            held = operand.registers()
            io = Buffers(
                X=X, W=W, S=S, XS=XS, RS=RS, WS=WS, SEM=SEM, Xs=Xs, R=R, Q=Q, Cs=Cs, Fs=Fs, Rs=Rs, xbar=xbar, mail=mail,
                w=w, u=u, a=a, x=x, acc=acc, f=f, r4=r4, held=held, to=Buffers(Cs=Cs, Fs=Fs, Rs=Rs, B=B, Y=Y, o4=o4),
            )  # fmt: skip
            walk(io, M, bk, bn)

    return main
