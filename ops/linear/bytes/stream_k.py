"""Tile program on wgmma (sm_90a): weights are the register operand, two producer warps, stream-K.

A CTA computes tiles of 64 * row_blocks * warpgroups output features by `block_tokens` tokens. Two producer warps fill a
ring whose stages hold 128 k: one fetches X, a 128-byte-swizzled TMA tile, one the units of the row blocks (words and
parameters), a 1-D bulk copy. A consumer warpgroup owns `row_blocks` blocks of 64 rows: it loads its words, converts
64 k of them into one of two sets of operand registers and issues two wgmma m64nNk32, while the two before are still
running on the other set (LiquidGEMM's implicit fine-grained pipeline: the hardware's warp schedulers do the rest).

With experts, x holds the tokens of all of them, sorted, and the loop runs over (expert, tile) pairs; the partition is
made on the device (grouped GEMM). The expert of a tile is known only after the kernel before, so nothing is fetched
ahead of it.

On int8, sums are int32, so shares of a tile may be added in any order and give the same bits (ops/tiles/shares.py).

On e4m3 (`dequantization` "e4m3"), the tensor core's own sums keep about 14 bits, so they run over one group of k only:
they start at zero, and while the next 64 k are converted the tensor core finishes them; then they are multiplied with
the factors of the group's rows and added to the float32 sums of the tile. One group of wgmma is in flight for each
warpgroup; the other warpgroups' groups fill the tensor core meanwhile. A tile of more than 128 tokens is multiplied in
two pieces whose sums of a group take turns in the same registers: it converts half as often.

A stage is released when the wgmmas that read it were waited for, long after the shared-memory loads of its words were
consumed: ptxas may move an arrive in front of a load's return (docs/tile-programs.md,
"A release of a stage").
"""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes.epilogue import store_macros
from terrazzo.ops.linear.bytes.operand import operand_macros
from terrazzo.ops.linear.bytes.problem import UNIT_K
from terrazzo.ops.linear.bytes.stages import consumer_macros, fill_macros
from terrazzo.ops.tiles.calls import opaque, tma_tile, wgmma
from terrazzo.ops.tiles.cluster_shares import cluster_macros
from terrazzo.ops.tiles.pipeline import pipeline_macros
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile
from terrazzo.ops.tiles.scheduler import (
    EXPERTS_SOURCE,
    expert_macros,
    partition_macros,
    plan_state,
    ring_macros,
    ring_state,
    segment_state,
    table_state,
    table_words,
)
from terrazzo.ops.tiles.shares import finish_macros, share_macros, slice_state, spare_registers
from terrazzo.ops.tiles.staged_rows import out_tokens, staged
from terrazzo.schedules.stream_k import StreamK

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def build(
    target,
    *,
    n: int,
    k: int,
    group: int,
    out_dtype: str,
    dequantization: str,
    bias: bool,
    block_tokens: int,
    warpgroups: int,
    row_blocks: int,
    stages: int,
    raster: int = 8,
    cluster: int = 1,
    experts: int = 0,
):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y, sk)`; with E = `experts`, int32 [E + 1] instead of sk.

    Shapes: X int8 [M, k]; W int32 [Kp/128, Np/64, unit words]; S f32 [Np] channel scales; XS f32 [M] token scales; RS
    int32 [M] sums of the rows of X (read by "unsigned" only); B f32 [n] (one element without a bias); WS int32
    [grid, warpgroups * row_blocks, block_tokens / 8, 128, 4]; SEM int32 [grid, 4 * warpgroups], zero before the first
    launch and after each one; Y [M, n] in `out_dtype`. `grid` CTAs, at most the number of SMs; the first `sk` tiles
    are shared along k, 0 <= sk <= tiles. `cluster`: of so many CTAs, which divide `grid`; where each tile is shared by
    as many, its sum does not leave the chip's SMs. With "e4m3", the bytes of X are e4m3,
    RS [1] is not read, and WS is f32.
    With experts, W, S and B hold one matrix after the other: [E * Kp/128, Np/64, unit words], [E * Np], [E * n]; expert
    e owns the rows offsets[e] .. offsets[e + 1] - 1 of X and Y, in ascending order. Rows of no expert are not written.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    if cluster > 1 and experts:
        constraint = "tiles of experts are found on the device, not shared by clusters"
        raise ArgumentError("cluster", cluster, constraint, "use 1")
    gemm = fp8_problem.of(n, k, group, out_dtype, dequantization, bias)
    bm, wgs, rb = block_tokens, warpgroups, row_blocks
    e4m3 = dequantization == fp8_problem.E4M3
    schedule = StreamK(bm, wgs, rb, stages, form="e4m3 post" if e4m3 else "s8 integer")
    check_tile(schedule)
    units, ig, unit_words = gemm.units, gemm.groups, gemm.unit_words
    all_blocks, cta_blocks = gemm.row_blocks, wgs * rb
    row_tiles = -(-all_blocks // cta_blocks)
    ct, nacc = wgs * 128, bm // 2
    kinds = ("e4m3", "e4m3") if e4m3 else ("uint8" if gemm.unsigned else "int8", "int8")
    sum_type = "float32" if e4m3 else "int32"
    splits = max(ig // 2, 1)  # parts of 64 k with sums of their own
    pieces = schedule.pieces if e4m3 else 1
    at_once = bm // pieces  # tokens of a product
    nsum = at_once // 2
    tokens = expert_macros(experts=experts, block_tokens=bm, units=units, row_tiles=row_tiles)
    exchange = not experts and schedule.parts and cluster == 1
    tiles = partition_macros(
        units=units, row_tiles=row_tiles, raster=raster, exchange=exchange or cluster > 1, cluster=cluster
    )
    rings = ring_macros(stages=stages, rounds=not experts and rb == 1 and pieces == 1)
    spare = spare_registers(wgs, rb * nacc + e4m3 * nsum) if cluster == 1 else 0  # shares are rare there
    shares = share_macros(vectors=bm // 8, row_blocks=rb, flags=wgs * 4, dtype=sum_type, spare=spare)
    operand = fp8_problem.operand_macros(gemm) if e4m3 else operand_macros(gemm)
    out = store_macros(gemm, block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks)
    peers = cluster_macros(
        size=cluster, warpgroups=wgs, row_blocks=rb, block_tokens=bm, dtype=sum_type, units=units, stages=stages,
        each=1, stage_bytes=bm * UNIT_K, rings=rings,
    )  # fmt: skip
    tail = finish_macros(
        tiles, shares, store=out.store, exchange=exchange, prepare=out.prepare, store_slice=out.store_slice,
        peers=peers if cluster > 1 else None, store_share=out.store_share,
    )  # fmt: skip
    cluster_dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    fills = fill_macros(
        rings, row_blocks=all_blocks, cta_blocks=cta_blocks, unit_words=unit_words,
        unit=lambda c, kb: c.expert[0] * units + kb,
    )  # fmt: skip
    steps = consumer_macros(block_tokens=bm, cta_blocks=cta_blocks, unit_words=unit_words, groups=ig)
    used = (
        "lds",
        "place",
        "pack",
        "bulk",
        "stmatrix_trans",
        "semaphore",
        "quotient",
        "exchange",
        "int8",
        "rows_out",
        "warpgroup",
    )
    used += ("warpgroup", "e4m3") if e4m3 else ("warpgroup",)
    used += ("cluster",) if cluster > 1 else ()
    extra = (gemm.converter.device_source, *([EXPERTS_SOURCE] if experts else []))
    source = prelude(*used, extra=extra)
    matrices = max(experts, 1)
    last = T.Tensor((experts + 1,), "int32") if experts else T.int32
    M = T.dynamic("m")
    G = T.dynamic("grid")

    @T.macro
    def fill_tokens(io, c, kb):
        """The warp of X fills a stage."""
        rings.acquire(io.empty, io.ring)
        tma_tile(io.Xs, io.ring.stage[0], io.X, c.first[0], kb * UNIT_K, io.full[io.ring.stage[0]], c.end[0])
        T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    def of_piece(x, piece):
        """The tile of X, from a piece of its tokens on."""
        return x + T.uint64(piece * at_once * UNIT_K // 16)

    @T.macro
    def multiply(a, sums, at, x, h, first, count, before):
        """k32 steps first .. first + count - 1 of half h, on the sums at `at`; these start anew if `before` is 0."""
        T.warpgroup_fence_operand(a, h * 8, 8)
        T.warpgroup_fence_operand(sums, at, nsum)
        T.warpgroup_arrive()
        for e in T.unroll(count):
            wgmma(at_once, kinds, sums, at, a, h * 8 + (first + e) * 4, x, (h * 2 + first + e) * 2, before + e > 0)
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(sums, at, nsum)

    @T.macro
    def settle(acc, part, f, r, piece):
        """The sums of a group of k, times the factors of the rows, join those of a piece of the tokens of row block
        r."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(part, num_regs=nsum)
        first = r * nacc + piece * nsum
        for i in T.unroll(nsum):
            acc[first + i] = T.call_extern("float32", "__fmaf_rn", part[i], f[i % 4 // 2], acc[first + i])
        T.warpgroup_fence_operand(acc, first, nsum)  # before the next wgmma: moved behind it, ptxas serializes all

    @T.macro
    def step(io, x, place, r, h, free):
        """64 k of row block r; `free`: whether this lane gives the stage before back."""
        operand.convert(io.w, h * 4, io.u, io.a, h * 8, io.codes, h)
        multiply(io.a, io.acc, r * nacc, x, h, 0, 2, 1)
        T.warpgroup_wait(1)
        if r == 0 and h == 0:  # the wgmmas on the stage before are complete
            place.release(0, free)

    @T.macro
    def step_e4m3(io, x, place, r, h, free):
        """The same; at each beginning of a group of k, the group before joins the sums."""
        T.warpgroup_wait(1)  # the set of operands that is written next is free
        operand.convert(io.w, h * 4, io.u, io.a, h * 8, io.codes, h)
        for e in T.unroll(splits):
            if ig > 1 or h == 0:
                settle(io.acc, io.part, io.f, (r + rb - 1 + T.min(h + e, 1)) % rb, pieces - 1)
                operand.factors(io.f, 0, io.u[(h * 2 + e) * ig // 4])
                if r == 0 and h == 0 and e == 0:
                    place.release(0, free)
            multiply(io.a, io.part, 0, x, h, e, 2 // splits, h * 2 if ig == 1 else 0)
            if ig > 1:
                for piece in T.unroll(pieces - 1):
                    settle(io.acc, io.part, io.f, r, piece)
                    multiply(io.a, io.part, 0, of_piece(x, piece + 1), h, e, 2 // splits, 0)
        if ig == 1 and h == 1:
            for piece in T.unroll(pieces - 1):
                settle(io.acc, io.part, io.f, r, piece)
                for half in T.unroll(2):
                    multiply(io.a, io.part, 0, of_piece(x, piece + 1), half, 0, 2, half * 2)

    @T.macro
    def unit(io, place, follows):
        """128 k."""
        place.wait(0)
        tile = steps.tokens(io.at, place.stage(0))
        for r in T.unroll(rb):
            steps.load_unit(io.at, io.w, io.u, place.stage(0), r)
            for h in T.unroll(2):
                (step_e4m3 if e4m3 else step)(io, tile, place, r, h, T.And(io.lane == 0, follows))
        place.advance()

    @T.macro
    def drain(io):
        """All products are complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=rb * nacc)
        if e4m3:
            T.warpgroup_fence_operand(io.part, num_regs=nsum)

    @T.macro
    def open(io, ring):
        """X and the ring's barriers."""
        steps.find_tokens(io.at, io.desc, io.Xs, 0)
        rings.find(io.full, io.empty, ring, 0)

    @T.macro
    def begin(io, ring, c, wg, wt):
        """What the epilogue will want is on its way; sums of nothing."""
        out.fetch(io.S, io.XS, io.RS, io.B, io.to, c, wg, wt)
        for i in T.unroll(rb * nacc):
            io.acc[i] = 0
        if e4m3:  # the first group of k is preceded by one of nothing
            for i in T.unroll(nsum):
                io.part[i] = 0
            for i in T.unroll(2):
                io.f[i] = 0
        steps.find_units(io.at, io.Ws, 0, wg * rb, wt)  # anew: kept while the tile ends, it would be spilled

    @T.macro
    def end(io, ring, c, lane):
        """The last products are complete, and their stage goes back."""
        if e4m3:
            settle(io.acc, io.part, io.f, rb - 1, pieces - 1)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=rb * nacc)
        rings.release(ring, lane == 0)
        if rb > 1:
            opaque(c.first[0])  # addresses of y are not made before, and spilled

    pipeline = pipeline_macros(
        SimpleNamespace(
            fill_weights=fills.fill_weights, fill_tokens=fill_tokens, open=open, begin=begin, unit=unit, drain=drain,
            end=end,
        ),
        block_tokens=bm, warpgroups=wgs, tokens=tokens, tiles=tiles, rings=rings, peers=peers, tail=tail,
        experts=experts, cluster=cluster,
    )  # fmt: skip

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((matrices * units, all_blocks, unit_words), "int32"),
        S: T.Tensor((matrices * all_blocks * 64,), "float32"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((1 if e4m3 else M,), "int32"),
        B: T.Tensor((matrices * n if bias else 1,), "float32"),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), sum_type),
        SEM: T.Tensor((G, wgs * 4), "int32"),
        Y: T.Tensor((M, n), out_dtype),
        parts: last,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source, **cluster_dims) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, cta_blocks, unit_words), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm), alone=exchange)), out_dtype)
            Fs = T.alloc_shared((wgs, bm), "float32")
            Rs = T.alloc_shared((wgs, bm if gemm.unsigned else 1), "int32")
            Es = T.alloc_shared((table_words(experts),), "int32")
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            sent = T.alloc_barrier([1] * (wgs * 4)) if cluster > 1 else None
            ready = T.alloc_barrier([cluster - 1]) if cluster > 1 else None
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((ig,), "uint32")
            codes = operand.registers()
            a = T.alloc_local((16,), "uint32")
            acc = T.alloc_local((rb * nacc,), sum_type)
            part = T.alloc_local((nsum if e4m3 else 1,), "float32")
            f = T.alloc_local((2,), "float32")
            to = out.state(Y, Os, Fs, Rs, ring=Xs, ready=ready, sent=sent)
            desc = T.alloc_wgmma_desc()
            at = steps.places()
            p = plan_state()
            c = segment_state()
            x = slice_state()
            ring = ring_state()
            table = table_state()
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            io = SimpleNamespace(
                X=X, W=W, S=S, XS=XS, RS=RS, B=B, WS=WS, SEM=SEM, Xs=Xs, Ws=Ws, Es=Es, full=full, empty=empty,
                ready=ready, w=w, u=u, a=a, f=f, acc=acc, part=part, codes=codes, desc=desc, at=at, to=to,
            )  # fmt: skip
            pipeline.run(io, p, c, x, ring, table, parts, G, cta)

    return main
