"""Tile program for small batches (sm_90a): mma.sync m16n8k32, weights through warp-private cp.async rings, X resident.

Persistent: kc x nc CTAs, at most one for each SM. A CTA owns one k range and about N/16/nc row tiles of 16; its slice
of X and of the tokens' scales is loaded once. The warps of a CTA split its k range, so each streams its own units (two
runs of 512 bytes and the scales of 16 rows for each block of 128 channels) with no barrier in the main loop. The int32
sums of a block, of either kind, become float32 with the scales of its tokens and rows; of two-level scales, the
channel's comes with the output. Warps, and with kc > 1 CTAs, are
added in order: the same bits in every run.
"""

from terrazzo.ops.linear.mixed import problem
from terrazzo.ops.linear.mixed.problem import UNIT_K, UNIT_WORDS, Gemm
from terrazzo.ops.tiles.calls import call, lds32, lds64, lds128, mma
from terrazzo.ops.tiles.cuda.blocks import BLOCK_SCALES
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


def scale_macros(split: Split, two_level: bool) -> tuple[Macro, Macro]:
    """Macros `tokens` and `channels`: scales of a CTA to shared memory."""
    nt = split.token_tiles

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

    return tokens, channels


def store_macro(gemm: Gemm) -> Macro:
    """Macro `store`, as `sum_macros` wants it; `to` has Cs, channel scales in shared memory, B, Y, and o4,
    four registers in its dtype."""
    write = write_macro(gemm.n)
    bias = lambda to, row: to.B[T.min(row, gemm.n - 1)] if gemm.bias else T.float32(0)

    @T.macro
    def store(to, at, r4, tok, row):
        """Four rows of one token in the output dtype."""
        if row < gemm.n:
            for i in T.unroll(4):
                if gemm.two_level:
                    r4[i] = r4[i] * to.Cs[row - at.t0 * 16 + i]
                to.o4[i] = T.cast(r4[i] + bias(to, row + i), gemm.out_dtype)
            write(to.Y, to.o4, tok, row)

    return store


def build(target, **params: Scalar):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y)` for M <= tokens, which is 8 * token_tiles where it is 0.

    Shapes: X int8 [M, k], both kinds of blocks in bytes; W int32 [k/128, Np/64, 1056]; XS f32 [k/128, MP] scales of the
    tokens, MP >= M; S f32 [Np] channel scales (one element unless two-level); B f32 [n] (one element without a bias);
    WS f32 [kc, tokens, Np]; SEM int32 [nc], zero before the first launch and after each one; Y [M, n] in
    `out_dtype`. With `joined`, pairs of CTAs along k are clusters, WS is [kc / 2, tokens, Np] and SEM [2 nc]; one pair
    needs neither.

    Raises:
        ArgumentError: a format outside the limits, or more warps than blocks of a CTA.
    """
    gemm = take(Gemm, params)
    split = Split(gemm.units, gemm.row_blocks * 4, **params)
    nt, units, rows, most = split.token_tiles, gemm.units, gemm.row_blocks * 64, split.rows
    kc, nc, warps, chunk, cluster, joined = split.kc, split.nc, split.warps, split.chunk, split.cluster, split.joined
    n, k, stages, threads, two_level = gemm.n, gemm.k, split.stages, split.threads, gemm.two_level
    pitch = split.cta_items * UNIT_K + 16  # bytes; 16 mod 128: ldmatrix without conflicts
    registers, convert = problem.convert_macros(gemm)
    resident = resident_macros(split, k=k, pitch=pitch, size=1, bulk_copies=True)
    ring = unit_macros(split, groups=1, pitch=pitch)
    copies = "multicast" if cluster > 1 else "bulk"
    used = ("cp_async", "lds", "ldmatrix", "semaphore", "int8", copies, *(["cluster"] if joined else []))
    source = prelude(*used, extra=(gemm.converter.device_source, BLOCK_SCALES))
    cluster_dims = cluster_shape(target, kc, cluster, joined)
    M, MP = T.dynamic("m"), T.dynamic("mp")

    @T.macro
    def multiply(R, w, a, x, part, codes, slot, m, lane):
        """The sums of a block: 16 rows by the tokens."""
        for i in T.unroll(nt * 4):
            part[i] = 0
        for j in T.unroll(2):
            lds128(w, R[slot + m * 256 + j * 128 + lane * 4])
            convert(w, 0, a, 0, codes)
            for e in T.unroll(2):
                for t in T.unroll(nt):
                    mma("int8", part, t * 4, a, e * 4, x, (j * nt + t) * 4 + e * 2)

    tokens_of, channels_of = scale_macros(split, two_level)
    store = store_macro(gemm)
    sums = sum_macros(split, "float32", store)

    @T.macro
    def issue(io, at, base, q, lane):
        ring.issue(io.W, io.R, base, q, at, lane)

    @T.macro
    def behind(io, at, tx):
        if two_level:
            channels_of(io.S, io.Cs, at, tx)

    @T.macro
    def fetch_tokens(io, m, tx, at):
        tokens_of(io.XS, io.Fs, at, tx)

    @T.macro
    def item(io, at, gi, slot, lane):
        """A block of 128 channels: load, convert, multiply; its sums, scaled, join the tile's."""
        ring.load_x(io.Xs, io.x, (at.g0 + gi) * UNIT_K, lane)
        for t in T.unroll(nt):
            lds64(io.f[t * 2], io.Fs[((at.g0 + gi) * nt + t) * 8 + lane % 4 * 2])
        for m in T.unroll(chunk):
            multiply(io.R, io.w, io.a, io.x, io.part, io.codes, slot, m, lane)
            call(
                "row_multipliers" if two_level else "row_scales",
                T.access_ptr(io.s, "w"),
                lds32(io.R[slot + ring.params + m * ROW_WORDS + lane // 4]),
            )
            for i in T.unroll(nt * 4):
                to = m * nt * 4 + i
                io.acc[to] = problem.scaled(io.acc[to], io.part[i], io.f[i // 4 * 2 + i % 2], io.s[i % 4 // 2])

    steps = Steps(issue, item, behind=behind, tokens=fetch_tokens)
    walk = walk_macro(steps, split, resident, sums, step_words=ring.step, pdl=True)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((units, gemm.row_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((rows if two_level else 1,), "float32"),
        B: T.Tensor((n if gemm.bias else 1,), "float32"),
        WS: T.Tensor((kc // PAIR if joined else kc, most, rows), "float32"),
        SEM: T.Tensor((nc * PAIR if joined else nc,), "int32"),
        Y: T.Tensor((M, n), gemm.out_dtype),
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
            o4 = T.alloc_local((4,), gemm.out_dtype)
            codes = registers()
            io = Buffers(
                X=X, W=W, XS=XS, S=S, WS=WS, SEM=SEM, Xs=Xs, R=R, Q=Q, Fs=Fs, Cs=Cs, xbar=xbar, mail=mail, w=w, a=a,
                x=x, f=f, s=s, part=part, acc=acc, r4=r4, codes=codes, to=Buffers(Cs=Cs, B=B, Y=Y, o4=o4),
            )  # fmt: skip
            walk(io, M, bk, bn)

    return main
