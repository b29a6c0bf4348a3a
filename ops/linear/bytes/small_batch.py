"""Tile program for small batches: mma.sync m16n8k32, weights through warp-private cp.async rings, X resident.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X is loaded once. The warps of a CTA split its k range, so each streams its own units (two runs of 512 bytes and the
parameters of 16 rows for each 128 k) with no barrier in the main loop; they sum their partial tiles through shared
memory once per `chunk` tiles. With kc > 1 the last CTA of a row range sums the kc partials. All sums are int32.
"""

from types import SimpleNamespace

from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes.operand import operand_macros
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.tiles.calls import lds32, lds128
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS
from terrazzo.ops.tiles.resident import (
    ROW_WORDS,
    Split,
    cluster_shape,
    resident_macros,
    resident_rows,
    sum_macros,
    unit_macros,
    write_macro,
    x_bytes,
)
from terrazzo.ops.tiles.resident_pipeline import nothing, walk_macro
from terrazzo.schedules.clusters import PAIR

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def out_macros(gemm: Gemm, split: Split, *, tokens: int) -> SimpleNamespace:
    """Macros `store`, as `sum_macros` wants it, and `fetch_tokens`, of up to `tokens` of them.

    `to` of `store` is (Cs, Fs, Rs, at, B, Y, o4): scales of rows and of tokens and sums of tokens in shared memory, the
    CTA's place, bias, y, four registers in its dtype.
    """
    import tilelang.language as T

    write = write_macro(gemm.n)

    @T.macro
    def store(to, r4, tok, row):
        """Four rows of one token in the output dtype."""
        Cs, Fs, Rs, at, B, Y, o4 = to
        if row < gemm.n:
            for i in T.unroll(4):
                if gemm.unsigned:
                    r4[i] = r4[i] - Rs[tok] * 128
                if gemm.raw:
                    o4[i] = r4[i]
                else:
                    o4[i] = T.cast(
                        T.call_extern(
                            "float32",
                            "tz_rescale",
                            r4[i],
                            Cs[row - at.t0 * 16 + i],
                            Fs[tok],
                            B[T.min(row + i, gemm.n - 1)] if gemm.bias else T.float32(0),
                        ),
                        gemm.out_dtype,
                    )
            write(Y, o4, tok, row)

    @T.macro
    def fetch_tokens(XS, RS, Fs, Rs, m, tx):
        """What the sums of the tokens below m are scaled with, and what is subtracted from them."""
        tok = split.threads - 1 - tx  # the first warp asks for X
        if tok < T.min(m, tokens):
            if not gemm.raw:
                Fs[tok] = XS[tok]
            if gemm.unsigned:
                Rs[tok] = RS[tok]

    return SimpleNamespace(store=store, fetch_tokens=fetch_tokens)


def build(
    target,
    *,
    n: int,
    k: int,
    group: int,
    out_dtype: str,
    dequantization: str,
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
):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y)` for M <= tokens, which is 8 * token_tiles where it is 0.

    Shapes: X int8 [M, k]; W int32 [Kp/128, Np/64, unit words]; S f32 [Np] channel scales; XS f32 [M] token scales; RS
    int32 [M] sums of the rows of X (read by "unsigned" only); B f32 [n] (one element without a bias); WS int32
    [kc, tokens, Np]; SEM int32 [nc], zero before the first launch and after each one; Y [M, n] in `out_dtype`.
    With `dequantization` "e4m3", the bytes of X are e4m3, RS [1] is not read, and WS is f32. With `joined`,
    pairs of CTAs along k are clusters, WS is [kc / 2, tokens, Np] and SEM [2 nc]; one pair needs neither.
    """
    import tilelang.language as T

    gemm = fp8_problem.of(n, k, group, out_dtype, dequantization, bias)
    e4m3 = gemm.float_sums
    sum_type = "float32" if e4m3 else "int32"
    nt, ig, rows = token_tiles, gemm.groups, gemm.row_blocks * 64
    most = resident_rows(nt, tokens)
    split = Split(gemm.units, gemm.row_blocks * 4, kc, nc, warps, chunk)
    pitch = split.cta_items * UNIT_K + 16  # bytes; 16 mod 128: ldmatrix without conflicts
    raw = gemm.raw
    pdl = target.supports("pdl")
    bulk_copies = target.supports("bulk_copy")
    operand = fp8_problem.operand_macros(gemm) if e4m3 else operand_macros(gemm)
    resident = resident_macros(split, k=k, rows=most, pitch=pitch, size=1, bulk_copies=bulk_copies, cluster=cluster)
    ring = unit_macros(token_tiles=nt, rows=most, chunk=chunk, groups=ig, stages=stages, pitch=pitch)
    source = prelude(
        "cp_async",
        "lds",
        "ldmatrix",
        "semaphore",
        "int8",
        *(["pack", "e4m3"] if e4m3 else []),
        *(["multicast" if cluster > 1 else "bulk"] if bulk_copies else []),
        *(["cluster"] if joined else []),
        extra=(gemm.converter.device_source,),
    )
    cluster_dims = cluster_shape(target, kc, cluster, joined)
    M = T.dynamic("m")

    out = out_macros(gemm, split, tokens=most)
    sums = sum_macros(split, token_tiles=nt, tokens=most, dtype=sum_type, store=out.store, joined=joined)

    @T.macro
    def issue(io, at, base, q, lane):
        ring.issue(io.W, io.R, base, q, at, lane)

    @T.macro
    def before(io, at, tx):
        if not raw:
            resident.fetch_scales(io.S, io.Cs, at, tx)

    @T.macro
    def fetch_tokens(io, m, tx, at):
        out.fetch_tokens(io.XS, io.RS, io.Fs, io.Rs, m, tx)

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
        SimpleNamespace(issue=issue, before=before, behind=nothing, tokens=fetch_tokens, open=nothing, item=item),
        split=split, resident=resident, sums=sums, stages=stages, step_words=ring.step, token_tiles=nt, pdl=pdl,
        joined=joined,
    )  # fmt: skip

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((gemm.units, gemm.row_blocks, gemm.unit_words), "int32"),
        S: T.Tensor((rows,), "float32"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((1 if e4m3 else M,), "int32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((kc // PAIR if joined else kc, most, rows), sum_type),
        SEM: T.Tensor((nc * PAIR if joined else nc,), "int32"),
        Y: T.Tensor((M, n), out_dtype),
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
            o4 = T.alloc_local((4,), out_dtype)
            held = operand.registers()
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            at = resident.place(bk, bn, warp)
            io = SimpleNamespace(
                X=X, W=W, S=S, XS=XS, RS=RS, WS=WS, SEM=SEM, Xs=Xs, R=R, Q=Q, Cs=Cs, Fs=Fs, Rs=Rs, xbar=xbar, mail=mail,
                w=w, u=u, a=a, x=x, acc=acc, f=f, r4=r4, held=held, to=(Cs, Fs, Rs, at, B, Y, o4),
            )  # fmt: skip
            walk(io, M, bk, bn, at, warp, lane, tx)

    return main
