"""Tile program for small batches (sm_90a): mma.sync m16n8k32, weights through warp-private cp.async rings, X resident.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X and of the tokens' scales is loaded once. The warps of a CTA split its k range, so each streams its own units (two
runs of 512 bytes and the scales of 16 rows for each block of 128 channels) with no barrier in the main loop. The int32
sums of a block, of either kind, become float32 with the scales of its tokens and rows; of two-level scales, the
channel's comes with the output. Warps, and with kc > 1 CTAs, are
added in order: the same bits in every run.
"""

from collections.abc import Callable
from types import SimpleNamespace

from terrazzo.ops.linear.mixed import problem
from terrazzo.ops.linear.mixed.problem import UNIT_K, UNIT_WORDS, Gemm
from terrazzo.ops.tiles.calls import lds32, lds64, lds128, mma
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


def scale_macros(split: Split, *, token_tiles: int, two_level: bool) -> SimpleNamespace:
    """Macros `tokens` and `channels`: scales of a CTA to shared memory."""
    import tilelang.language as T

    nt = token_tiles

    @T.macro
    def tokens(XS, Fs, at, tx):
        """Scales of the blocks of CTA `at` to Fs [blocks, tokens]; those of tokens from M on do not count. Two-level:
        over the 16 of the fast conversion."""
        for e in T.serial(-(-(split.cta_items * nt * 8) // split.threads)):
            i = e * split.threads + tx
            if i < at.kn * (nt * 8):
                Fs[i] = XS[at.k0 + i // (nt * 8), T.min(i % (nt * 8), XS.shape[1] - 1)] * T.float32(
                    0.0625 if two_level else 1
                )

    @T.macro
    def channels(S, Cs, at, tx):
        """Those of the rows of CTA `at`, behind the first weights: up to 4 % faster than in front by cp.async."""
        for e in T.serial(-(-split.most_rows // split.threads)):
            if e * split.threads + tx < (at.t1 - at.t0) * 16:
                Cs[e * split.threads + tx] = S[at.t0 * 16 + e * split.threads + tx]

    return SimpleNamespace(tokens=tokens, channels=channels)


def store_macro(gemm: Gemm) -> Callable[..., None]:
    """Macro `store`, as `sum_macros` wants it; `to` is (Cs, at, B, Y, o4): channel scales in shared memory, the CTA's
    place, bias, y, four registers in its dtype."""
    import tilelang.language as T

    write = write_macro(gemm.n)

    @T.macro
    def store(to, r4, tok, row):
        """Four rows of one token in the output dtype."""
        Cs, at, B, Y, o4 = to
        if row < gemm.n:
            for i in T.unroll(4):
                if gemm.two_level:
                    r4[i] = r4[i] * Cs[row - at.t0 * 16 + i]
                o4[i] = T.cast(r4[i] + (B[T.min(row + i, gemm.n - 1)] if gemm.bias else T.float32(0)), gemm.out_dtype)
            write(Y, o4, tok, row)

    return store


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
    joined: bool = False,
    tokens: int = 0,
):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y)` for M <= tokens, which is 8 * token_tiles where it is 0.

    Shapes: X int8 [M, k], both kinds of blocks in bytes; W int32 [k/128, Np/64, 1056]; XS f32 [k/128, MP] scales of the
    tokens, MP >= M; S f32 [Np] channel scales (one element unless two-level); B f32 [n] (one element without a bias);
    WS f32 [kc, tokens, Np]; SEM int32 [nc], zero before the first launch and after each one; Y [M, n] in
    `out_dtype`. With `joined`, pairs of CTAs along k are clusters, WS is [kc / 2, tokens, Np] and SEM [2 nc]; one pair
    needs neither.

    Raises:
        ArgumentError: a format outside the limits, or more warps than blocks of a CTA.
    """
    import tilelang.language as T

    gemm = Gemm(n, k, blocks8, out_dtype, bias, two_level)
    nt, units, rows = token_tiles, gemm.units, gemm.row_blocks * 64
    most = resident_rows(nt, tokens)
    split = Split(units, gemm.row_blocks * 4, kc, nc, warps, chunk)
    threads = split.threads
    pitch = split.cta_items * UNIT_K + 16  # bytes; 16 mod 128: ldmatrix without conflicts
    operand = problem.convert_macros(gemm)
    resident = resident_macros(split, k=k, rows=most, pitch=pitch, size=1, bulk_copies=True, cluster=cluster)
    ring = unit_macros(token_tiles=nt, rows=most, chunk=chunk, groups=1, stages=stages, pitch=pitch)
    copies = "multicast" if cluster > 1 else "bulk"
    used = ("cp_async", "lds", "ldmatrix", "semaphore", "int8", copies, *(["cluster"] if joined else []))
    source = prelude(*used, extra=(gemm.converter.device_source, problem.SOURCE))
    cluster_dims = cluster_shape(target, kc, cluster, joined)
    M, MP = T.dynamic("m"), T.dynamic("mp")

    @T.macro
    def multiply(R, w, a, x, part, codes, slot, m, lane):
        """The sums of a block: 16 rows by the tokens."""
        for i in T.unroll(nt * 4):
            part[i] = 0
        for j in T.unroll(2):
            lds128(w, R[slot + m * 256 + j * 128 + lane * 4])
            operand.convert(w, 0, a, 0, codes)
            for e in T.unroll(2):
                for t in T.unroll(nt):
                    mma("int8", part, t * 4, a, e * 4, x, (j * nt + t) * 4 + e * 2)

    fetch = scale_macros(split, token_tiles=nt, two_level=two_level)
    store = store_macro(gemm)
    sums = sum_macros(split, token_tiles=nt, tokens=most, dtype="float32", store=store, joined=joined)

    @T.macro
    def issue(io, at, base, q, lane):
        ring.issue(io.W, io.R, base, q, at, lane)

    @T.macro
    def behind(io, at, tx):
        if two_level:
            fetch.channels(io.S, io.Cs, at, tx)

    @T.macro
    def fetch_tokens(io, m, tx, at):
        fetch.tokens(io.XS, io.Fs, at, tx)

    @T.macro
    def item(io, at, gi, slot, lane):
        """A block of 128 channels: load, convert, multiply; its sums, scaled, join the tile's."""
        ring.load_x(io.Xs, io.x, (at.g0 + gi) * UNIT_K, lane)
        for t in T.unroll(nt):
            lds64(io.f[t * 2], io.Fs[((at.g0 + gi) * nt + t) * 8 + lane % 4 * 2])
        for m in T.unroll(chunk):
            multiply(io.R, io.w, io.a, io.x, io.part, io.codes, slot, m, lane)
            T.call_extern(
                "handle",
                "tz_row_multipliers" if two_level else "tz_row_scales",
                T.access_ptr(io.s, "w"),
                lds32(io.R[slot + ring.params + m * ROW_WORDS + lane // 4]),
            )
            for i in T.unroll(nt * 4):
                io.acc[m * nt * 4 + i] = T.call_extern(
                    "float32",
                    "tz_scaled",
                    io.acc[m * nt * 4 + i],
                    T.cast(io.part[i], "float32"),
                    io.f[i // 4 * 2 + i % 2],
                    io.s[i % 4 // 2],
                )

    walk = walk_macro(
        SimpleNamespace(issue=issue, before=nothing, behind=behind, tokens=fetch_tokens, open=nothing, item=item),
        split=split, resident=resident, sums=sums, stages=stages, step_words=ring.step, token_tiles=nt, pdl=True,
        joined=joined,
    )  # fmt: skip

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((units, gemm.row_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((rows if two_level else 1,), "float32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((kc // PAIR if joined else kc, most, rows), "float32"),
        SEM: T.Tensor((nc * PAIR if joined else nc,), "int32"),
        Y: T.Tensor((M, n), out_dtype),
    ):
        with T.Kernel(kc, nc, threads=threads, prelude=source, **cluster_dims) as (bk, bn):
            Xs = T.alloc_shared((x_bytes(target, most, pitch, 4 * warps * stages * ring.step),), "int8")
            R = T.alloc_shared((warps * stages * ring.step,), "int32")
            Q = T.alloc_shared((sums.words,), "float32")
            Fs = T.alloc_shared((split.cta_items * nt * 8,), "float32")
            Cs = T.alloc_shared((split.most_rows if two_level else 4,), "float32")
            xbar = T.alloc_cluster_barrier([1]) if cluster > 1 else T.alloc_barrier([1])
            mail = sums.mail()
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
            at = resident.place(bk, bn, warp)
            io = SimpleNamespace(
                X=X, W=W, XS=XS, S=S, WS=WS, SEM=SEM, Xs=Xs, R=R, Q=Q, Fs=Fs, Cs=Cs, xbar=xbar, mail=mail, w=w, a=a,
                x=x, f=f, s=s, part=part, acc=acc, r4=r4, codes=codes, to=(Cs, at, B, Y, o4),
            )  # fmt: skip
            walk(io, M, bk, bn, at, warp, lane, tx)

    return main
