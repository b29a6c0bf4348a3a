"""Tile program on wgmma (sm_90a) of W8A8 in blocks, for wide batches: tokens are the A operand.

`stream_k` has weights as A there: a thread's sums are of two rows and many tokens, so that each 128 k cost it a load
and two products of scales for every four sums. Here they are of two tokens and many rows, sixteen of which share a
scale: two products for every eight sums, and the scales of a tile come in a few wide loads while products run.

A CTA computes tiles of `block_tokens` tokens by 64 * row_blocks output features. Each consumer warpgroup owns blocks of
64 of the tokens, and multiplies them with all of the rows: sums of 128 k, which join float32 sums times the scale of
the token and that of the row. While one warpgroup scales, another multiplies.

The packed weight, the ring, the partition of the tiles and the shares are those of `stream_k`.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes import direct
from terrazzo.ops.linear.bytes.problem import UNIT_K
from terrazzo.ops.linear.bytes.stages import fill_macros
from terrazzo.ops.tiles.calls import fma, lds128, pack2, stmatrix4, store_row, syncwarp, uniform
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.pipeline import Steps, Work, pipeline_macro
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile, take
from terrazzo.ops.tiles.scheduler import Ring, expert_macros, partition_macros, ring_macros
from terrazzo.ops.tiles.shares import finish_macros, share_macros, spare_registers
from terrazzo.ops.tiles.staged_rows import Out
from terrazzo.ops.tiles.types import Buffers, Macro, Scalar
from terrazzo.schedules.token_tiles import TokenTiles

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
PRIMITIVES = (
    "lds", "place", "pack", "bulk", "bulk_at", "stmatrix", "semaphore", "quotient", "exchange", "rows_out", "warpgroup",
    "e4m3", "uniform",
)  # fmt: skip
_PITCH = 72  # elements of a staged token of 64 rows: free of bank conflicts, 16-byte aligned
_BLOCK = 64 * UNIT_K // 16  # of 64 tokens or rows, in 16 bytes


def build(target, *, whole: bool = True, **params: Scalar):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y, sk)`, with the operands of `stream_k.build` in blocks.

    WS is f32 [grid, 64-token blocks of a tile, 8 * row_blocks, 128, 4]. With n = k = 0 the kernel has no shape.
    """
    gemm = take(direct.Gemm, params)
    if not gemm.blocks:
        constraint = "must be 'block': others have no scales for each 128 k"
        raise ArgumentError("dequantization", gemm.dequantization, constraint, "build stream_k")
    gemm = gemm if gemm.n else gemm.at_launch(whole)
    schedule = TokenTiles(**params)
    check_tile(schedule)
    return program(gemm, schedule)


def steps_of(gemm: direct.Gemm, schedule: TokenTiles, rings: Ring) -> Steps:
    """What warps do."""
    bm, tb, cta_blocks, pieces = schedule.block_tokens, schedule.token_blocks, schedule.row_blocks, schedule.pieces
    nacc, nsum = cta_blocks * 32, cta_blocks * 32 // pieces  # of 64 tokens: f32 sums, and those of one product
    own = dict(row_blocks=gemm.row_blocks, cta_blocks=cta_blocks, unit=lambda c, kb: kb)
    also_tokens, also = direct.scale_macros(block_tokens=bm, **own)
    fills = fill_macros(rings, unit_words=gemm.unit_words, also=also, also_tokens=also_tokens, **own)
    find = direct.consumer_macros(block_tokens=bm, cta_blocks=cta_blocks).find

    @T.macro
    def open(io, ring):
        """Both operands and the ring's barriers."""
        find(io.at.all, io.desc, io.Xs, 0)
        find(io.at.w, io.rows, io.Ws, 0)
        rings.find(io.full, io.empty, ring, 0)

    @T.macro
    def begin(io, ring, c, wg, wt):
        """Sums of nothing, and the warpgroup's tokens."""
        for i in T.unroll(tb * nacc):
            io.acc[i] = 0
        io.at.x[0] = io.at.all[0] + T.cast(T.cast(uniform(wg), "uint32") * T.uint32(tb * _BLOCK), "uint64")

    def operand(first, stage, blocks, block):
        """The descriptor of a block of 64 tokens or rows of a stage."""
        return first + T.cast(T.cast(stage, "uint32") * T.uint32(blocks * _BLOCK) + T.uint32(block * _BLOCK), "uint64")

    @T.macro
    def multiply(io, x, w):
        """128 k of 64 tokens, as one group; the sums start anew."""
        T.warpgroup_fence_operand(io.part, num_regs=nsum)
        T.warpgroup_arrive()
        for e in T.unroll(UNIT_K // 32):
            T.ptx_wgmma_ss(
                "float32", f"m64n{nsum * 2}k32", True, True, "e4m3", "e4m3", "float32", x, e * 2, w, e * 2,
                io.part.data, 0, T.bool(e > 0), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(io.part, num_regs=nsum)

    @T.macro
    def settle(io, first):
        """Sums of 128 k join those at `first`, times the scales of their tokens and rows."""
        for g in T.unroll(nsum // 8):  # of 16 rows
            for h in T.unroll(2):
                io.f[h] = io.sx[h] * io.sw[g]
            for i in T.unroll(8):
                at = first + g * 8 + i
                io.acc[at] = fma(io.part[g * 8 + i], io.f[i // 2 % 2], io.acc[at])
        T.warpgroup_fence_operand(io.acc, first, nsum)

    @T.macro
    def unit(io, place, follows):
        """128 k: wait, multiply each block of tokens with each piece of the rows, give the stage back."""
        place.wait(0)
        for p in T.unroll(pieces):
            for t in T.unroll(tb):
                x = operand(io.at.x[0], place.stage(0), bm // 64, t)
                w = operand(io.at.w[0], place.stage(0), cta_blocks, p * cta_blocks // pieces)
                multiply(io, x, w)
                if t == 0:
                    for b in T.unroll(nsum // 32):
                        lds128(io.sw[b * 4], io.Ss[place.stage(0), p * nsum // 8 + b * 4])
                for h in T.unroll(2):
                    token = (io.wg * tb + t) * 64 + io.wt // 32 * 16 + io.lane // 4 + h * 8
                    io.sx[h] = io.Ts[place.stage(0), token]
                T.warpgroup_wait(0)
                T.warpgroup_fence_operand(io.part, num_regs=nsum)
                if p * tb + t == pieces * tb - 1:  # the scales came while products ran
                    place.give_back(0, io.lane == 0)
                settle(io, t * nacc + p * nsum)
        place.advance()

    @T.macro
    def drain(io):
        """All products are complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=tb * nacc)
        T.warpgroup_fence_operand(io.part, num_regs=nsum)

    @T.macro
    def end(io, ring, c, lane):
        """The sums are complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=tb * nacc)

    return Steps(*fills, open, begin, unit, drain, end)


def store_macro(gemm: direct.Gemm, schedule: TokenTiles) -> Macro:
    """Macro `store(to, acc, c, wg, wt)`: each warp stages 16 tokens by 64 rows, and writes whole lines of y."""
    tb, cta_blocks, bf16 = schedule.token_blocks, schedule.row_blocks, gemm.out_dtype == "bfloat16"

    @T.macro
    def stage(to, acc, wg, warp, lane, at, row, q):
        """16 tokens by rows 16 q .. 16 q + 15 of 64, whose sums begin at `at`; the first of the 64 is `row`."""
        for i in T.unroll(4):
            to.b[i] = 0.0
            if gemm.adds_bias:
                to.b[i] = to.B[T.min(row + q * 16 + i // 2 * 8 + lane % 4 * 2 + i % 2, gemm.n - 1)]
        for e in T.unroll(4):  # tokens g and g + 8 of rows 0 .. 7, then of 8 .. 15
            for i in T.unroll(2):
                to.f[i] = acc[at + q * 8 + e * 2 + i] + to.b[e // 2 * 2 + i]
            to.o[e] = pack2(to.f[0], to.f[1], bf16=bf16)
        token = warp * 16 + lane // 8 % 2 * 8 + lane % 8
        stmatrix4(to.Os[wg, token * _PITCH + q * 16 + lane // 16 * 8], to.o[0])

    @T.macro
    def store(to, acc, c, wg, wt):
        warp = wt // 32
        lane = wt % 32
        for t in T.unroll(tb):
            for r in T.unroll(cta_blocks):
                row = (c.rows[0] * cta_blocks + r) * 64
                syncwarp()
                for q in T.unroll(4):
                    stage(to, acc, wg, warp, lane, (t * cta_blocks + r) * 32, row, q)
                syncwarp()
                for e in T.unroll(4):
                    token = e * 4 + lane // 8
                    column = lane % 8 * 8
                    at = c.first[0] + (wg * tb + t) * 64 + warp * 16 + token
                    if T.And(at < c.end[0], row + column < gemm.n):
                        store_row(
                            gemm.out_dtype, gemm.whole, to.Y, at, gemm.n, row + column,
                            to.Os[wg, (warp * 16 + token) * _PITCH + column],
                        )  # fmt: skip

    return store


def program(gemm: direct.Gemm, schedule: TokenTiles):
    """The prim_func of `build` for a problem and a legal schedule."""
    from tilelang.layout import make_full_bank_swizzled_layout

    bm, wgs, tb, stages = schedule.block_tokens, schedule.warpgroups, schedule.token_blocks, schedule.stages
    cta_blocks, units, all_blocks = schedule.row_blocks, gemm.units, gemm.row_blocks
    sums, nsum = tb * cta_blocks * 32, cta_blocks * 32 // schedule.pieces
    row_tiles = -(-all_blocks // cta_blocks)
    if gemm.launched is not None:
        row_tiles = T.truncdiv(all_blocks + (cta_blocks - 1), cta_blocks)
    rings = ring_macros(stages=stages, rounds=schedule.sums < 192)
    tokens = expert_macros(experts=0, block_tokens=bm, units=units, row_tiles=row_tiles)
    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=schedule.raster)
    shares = share_macros(
        vectors=cta_blocks * 8, row_blocks=tb, flags=schedule.flags, dtype="float32",
        spare=spare_registers(wgs, schedule.sums),
    )  # fmt: skip
    finish, _ = finish_macros(tiles, shares, Out(store_macro(gemm, schedule)))
    work = Work(tokens, tiles, rings, finish)
    run = pipeline_macro(steps_of(gemm, schedule, rings), work, schedule)
    all_units, extent = gemm.extents(1)
    M, MP, G = T.dynamic("m"), T.dynamic("mp"), T.dynamic("grid")

    @T.prim_func
    def main(
        X: T.Tensor((M, gemm.k), "int8"),
        W: T.Tensor((all_units, all_blocks, gemm.unit_words), "int32"),
        S: T.Tensor((all_units, all_blocks * direct.GROUPS), "float32"),
        XS: T.Tensor((units, MP), "float32"),
        RS: T.Tensor((1,), "int32"),
        B: T.Tensor((extent,), "float32"),
        WS: T.Tensor((G, wgs * tb, cta_blocks * 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs * 4), "int32"),
        Y: T.Tensor((M, gemm.n), gemm.out_dtype),
        parts: T.int32,
    ):
        with T.Kernel(G, threads=wgs * 128 + 128, prelude=prelude(*PRIMITIVES)) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, cta_blocks * 64, UNIT_K // 4), "int32")
            Os = T.alloc_shared((wgs, 64 * _PITCH), gemm.out_dtype)
            Ts = T.alloc_shared((stages, bm), "float32")
            Ss = T.alloc_shared((stages, max(cta_blocks * direct.GROUPS, 32)), "float32")
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            acc = T.alloc_local((sums,), "float32")
            part = T.alloc_local((nsum,), "float32")
            sx = T.alloc_local((2,), "float32")
            sw = T.alloc_local((nsum // 8,), "float32")
            f = T.alloc_local((2,), "float32")
            to = Buffers(Y=Y, Os=Os, B=B, b=(4, "float32"), f=f, o=(4, "uint32"))
            desc = T.alloc_wgmma_desc()
            rows = T.alloc_wgmma_desc()
            at = Buffers(**dict.fromkeys(("x", "all", "w"), (1, "uint64")))
            T.annotate_layout({it: make_full_bank_swizzled_layout(it) for it in (Xs, Ws)})
            io = Buffers(
                X=X, W=W, S=S, XS=XS, B=B, WS=WS, SEM=SEM, Xs=Xs, Ws=Ws, Es=None, full=full, empty=empty, ready=None,
                acc=acc, part=part, sx=sx, sw=sw, f=f, desc=desc, rows=rows, at=at, to=to, Ts=Ts, Ss=Ss,
            )  # fmt: skip
            run(io, parts, G, cta)

    return main
