"""Tile program on wgmma (sm_90a): weights are the register operand, two producer warps, stream-K.

A CTA computes tiles of 64 * row_blocks * warpgroups output features by `block_tokens` tokens. Two producer warps fill a
ring whose stages hold 128 k: one fetches X, a 128-byte-swizzled TMA tile, one the units of the row blocks (words and
parameters), a 1-D bulk copy. A consumer warpgroup owns `row_blocks` blocks of 64 rows: it loads its words, converts
64 k of them into one of two sets of operand registers and issues two wgmma m64nNk32, while the two before are still
running on the other set (LiquidGEMM's implicit fine-grained pipeline: the hardware's warp schedulers do the rest).

With experts, x holds the tokens of all of them, sorted, and the loop runs over (expert, tile) pairs; the partition is
made on the device (grouped GEMM). The expert of a tile is known only after the kernel before, so nothing is fetched
ahead of it.

How scales enter is the product's form (forms.py): on int8, sums are int32, so shares of a tile may be added in any
order and give the same bits (ops/tiles/shares.py); on e4m3 (`dequantization` "e4m3") they are float32.

A stage is released when the wgmmas that read it were waited for, long after the shared-memory loads of its words were
consumed: ptxas may move an arrive in front of a load's return (docs/tile-programs.md,
"A release of a stage").
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes import direct, fp8_problem
from terrazzo.ops.linear.bytes.epilogue import out_macros
from terrazzo.ops.linear.bytes.forms import form_of
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.linear.bytes.stages import Form, consumer_macros, fill_macros
from terrazzo.ops.tiles.calls import opaque
from terrazzo.ops.tiles.cluster_shares import cluster_macros
from terrazzo.ops.tiles.cuda.experts import EXPERT_TABLE
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.pipeline import Steps, Work, pipeline_macro
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile, take
from terrazzo.ops.tiles.scheduler import Ring, expert_macros, partition_macros, ring_macros, table_words
from terrazzo.ops.tiles.shares import finish_macros, share_macros, spare_registers
from terrazzo.ops.tiles.staged_rows import Out, out_tokens, staged
from terrazzo.ops.tiles.types import Buffers, Call, Macro, Scalar
from terrazzo.schedules.stream_k import StreamK

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
PRIMITIVES = (
    "lds", "place", "pack", "bulk", "stmatrix_trans", "semaphore", "quotient", "exchange", "int8", "rows_out",
    "warpgroup",
)  # fmt: skip


def build(target, *, experts: int = 0, whole: bool = True, **params: Scalar):
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

    With n = k = 0 the kernel has no shape: both come with the launch, as does whether B has a bias. `whole`: rows of Y
    are whole pieces of 16 bytes.
    """
    gemm = take(fp8_problem.of, params)
    gemm = gemm if gemm.n else gemm.at_launch(whole, max(experts, 1))
    schedule = StreamK(**params, form=gemm.schedule_form)
    if schedule.cluster > 1 and experts:
        constraint = "tiles of experts are found on the device, not shared by clusters"
        raise ArgumentError("cluster", schedule.cluster, constraint, "use 1")
    check_tile(schedule)
    return program(gemm, schedule, experts)


def work_of(gemm: Gemm, schedule: StreamK, form: Form, out: Out, exchange: bool, experts: int) -> Work:
    """The work of CTAs; `exchange`: those that share a tile alike part its sum."""
    bm, wgs, rb, cluster = schedule.block_tokens, schedule.warpgroups, schedule.row_blocks, schedule.cluster
    cta_blocks = schedule.cta_blocks
    row_tiles = -(-gemm.row_blocks // cta_blocks)
    if gemm.launched is not None:
        row_tiles = T.truncdiv(gemm.row_blocks + (cta_blocks - 1), cta_blocks)
    tokens = expert_macros(experts=experts, block_tokens=bm, units=gemm.units, row_tiles=row_tiles)
    tiles = partition_macros(
        units=gemm.units, row_tiles=row_tiles, raster=schedule.raster, exchange=exchange or cluster > 1, cluster=cluster
    )
    rings = ring_macros(stages=schedule.stages, rounds=not experts and rb == 1 and form.pieces == 1)
    spare = spare_registers(wgs, schedule.sums) if cluster == 1 else 0  # shares are rare there
    shares = share_macros(vectors=bm // 8, row_blocks=rb, flags=schedule.flags, dtype=form.sums, spare=spare)
    peers = cluster_macros(
        size=cluster, warpgroups=wgs, row_blocks=rb, block_tokens=bm, dtype=form.sums, units=gemm.units,
        stages=schedule.stages, each=1, stage_bytes=bm * UNIT_K, rings=rings,
    )  # fmt: skip
    finish, _ = finish_macros(tiles, shares, out, exchange=exchange, peers=peers if cluster > 1 else None)
    return Work(tokens, tiles, rings, finish, peers)


def steps_of(gemm: Gemm, schedule: StreamK, form: Form, rings: Ring, fetch: Macro, experts: int) -> tuple[Steps, Call]:
    """The steps, and function `places`, a consumer's state. fetch: the epilogue's."""
    bm, rb, cta_blocks = schedule.block_tokens, schedule.row_blocks, schedule.cta_blocks
    converts, blocks, sums = gemm.converts, gemm.blocks, rb * bm // 2
    in_stages = blocks or gemm.grouped_tokens  # scales of tokens
    units, unit_words, all_blocks = gemm.units, gemm.unit_words, gemm.row_blocks
    unit_of = lambda c, kb: c.expert[0] * units + kb
    own = dict(row_blocks=all_blocks, cta_blocks=cta_blocks, unit=unit_of)
    also_tokens, also = direct.scale_macros(block_tokens=bm, anywhere=experts > 0, **own) if in_stages else (None, None)
    also = also if blocks else None
    fills = fill_macros(rings, unit_words=unit_words, also=also, also_tokens=also_tokens, **own)
    if converts:
        steps = consumer_macros(block_tokens=bm, cta_blocks=cta_blocks, unit_words=unit_words, groups=gemm.groups)
    else:
        steps = direct.consumer_macros(block_tokens=bm, cta_blocks=cta_blocks)

    @T.macro
    def open(io, ring):
        """X and the ring's barriers."""
        if converts:
            steps.find(io.at, io.desc, io.Xs, 0)
        else:
            steps.find(io.at.x, io.desc, io.Xs, 0)
            steps.find(io.at.all, io.rows, io.Ws, 0)
        rings.find(io.full, io.empty, ring, 0)

    @T.macro
    def begin(io, ring, c, wg, wt):
        """What the epilogue will want is on its way; sums of nothing."""
        fetch(io.S, io.XS, io.RS, io.B, io.to, c, wg, wt)
        if in_stages and experts:
            io.past[0] = c.first[0] % direct.MORE
        for i in T.unroll(sums):
            io.acc[i] = 0
        if form.start is not None:
            form.start(io)
        if converts:
            steps.find_units(io.at, io.Ws, 0, wg * rb, wt)  # anew: kept while the tile ends, it would be spilled
        else:
            steps.find_units(io.at, wg * rb)

    @T.macro
    def unit(io, place, follows):
        """128 k: wait, load the words of each row block, convert and multiply 64 k at a time, give the stage back."""
        place.wait(0)
        tile = steps.tokens(io.at, place.stage(0))
        for r in T.unroll(rb):
            if converts:
                steps.load(io.at, io.w, io.u, place.stage(0), r)
                for h in T.unroll(2):
                    form.step(io, tile, place, r, h, T.And(io.lane == 0, follows))
            else:
                rows = steps.load(io.at, place.stage(0), r)
                form.step(io, rows, tile, place, r, T.And(io.lane == 0, follows))
        place.advance()

    @T.macro
    def drain(io):
        """All products are complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=sums)
        if form.group_sums > 1:
            T.warpgroup_fence_operand(io.part, num_regs=form.group_sums)

    @T.macro
    def end(io, ring, c, lane):
        """The last products are complete, and their stage goes back."""
        if form.settle_last is not None:
            form.settle_last(Buffers(**vars(io), lane=lane), ring.before[0])
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=sums)
        if not form.settles:
            rings.release(ring, lane == 0)
        if rb > 1:
            opaque(c.first[0])  # addresses of y are not made before, and spilled

    return Steps(*fills, open, begin, unit, drain, end), steps.places


def program(gemm: Gemm, schedule: StreamK, experts: int = 0):
    """The prim_func of `build` for a problem and a legal schedule."""
    from tilelang.layout import make_full_bank_swizzled_layout

    bm, wgs, rb, cluster = schedule.block_tokens, schedule.warpgroups, schedule.row_blocks, schedule.cluster
    stages, cta_blocks, converts, blocks = schedule.stages, schedule.cta_blocks, gemm.converts, gemm.blocks
    units, unit_words, all_blocks = gemm.units, gemm.unit_words, gemm.row_blocks
    ct, sums, groups = wgs * 128, rb * bm // 2, gemm.grouped_tokens
    in_stages = blocks or groups  # scales of tokens
    form = form_of(gemm, block_tokens=bm, row_blocks=rb, pieces=schedule.pieces, experts=experts)
    exchange = not experts and schedule.parts and cluster == 1
    state, fetch, out = out_macros(gemm, block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks)
    work = work_of(gemm, schedule, form, out, exchange, experts)
    steps, places = steps_of(gemm, schedule, form, work.rings, fetch, experts)
    run = pipeline_macro(steps, work, schedule, experts)
    matrices = max(experts, 1)
    all_units, extent = gemm.extents(matrices)
    used = (*PRIMITIVES, *(["e4m3"] if gemm.float_sums else []), *(["cluster"] if cluster > 1 else []))
    used += () if converts else ("uniform",)
    used += ("bulk_at",) if gemm.launched is not None else ()
    source = prelude(
        *used, extra=(*([gemm.converter.device_source] if converts else []), *([EXPERT_TABLE] if experts else []))
    )
    last = T.Tensor((experts + 1,), "int32") if experts else T.int32
    scales = (all_units, all_blocks * direct.GROUPS) if blocks else (matrices * all_blocks * 64 * gemm.channels,)
    of_stage = (cta_blocks, unit_words) if converts else (cta_blocks * 64, UNIT_K // 4)  # rows of 128 bytes
    dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    M, G = T.dynamic("m"), T.dynamic("grid")
    MP = T.dynamic("mp") if in_stages else M
    kept = "int32" if groups else "float32"

    @T.prim_func
    def main(
        X: T.Tensor((M, gemm.k), "int8"),
        W: T.Tensor((all_units, all_blocks, unit_words), "int32"),
        S: T.Tensor(scales, "float32"),
        XS: T.Tensor((units, MP) if in_stages else (M,), kept),
        RS: T.Tensor((M if gemm.row_values else 1,), "int32"),
        B: T.Tensor((extent,), "float32"),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), form.sums),
        SEM: T.Tensor((G, wgs * 4), "int32"),
        Y: T.Tensor((M, gemm.n), gemm.out_dtype),
        parts: last,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source, **dims) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, *of_stage), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm), alone=exchange)), gemm.out_dtype)
            Fs = T.alloc_shared((wgs, bm), "float32")
            Rs = T.alloc_shared((wgs, bm if gemm.unsigned or gemm.zeros else 1), "int32")
            Es = T.alloc_shared((table_words(experts),), "int32")
            Ts = T.alloc_shared((stages, max(bm + direct.MORE * (experts > 0), 32)), kept) if in_stages else None
            Ss = T.alloc_shared((stages, max(cta_blocks * direct.GROUPS, 32)), "float32") if blocks else None
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            sent = T.alloc_barrier([1] * (wgs * 4)) if cluster > 1 else None
            ready = T.alloc_barrier([cluster - 1]) if cluster > 1 else None
            w = T.alloc_local((8,), "uint32") if converts else None
            u = T.alloc_local((gemm.groups,), "uint32") if converts else None
            codes = form.registers() if converts else None
            a = T.alloc_local((16,), "uint32") if converts else None
            acc = T.alloc_local((sums,), form.sums)
            part = T.alloc_local((form.group_sums,), "float32")
            f = T.alloc_local((3 if blocks else 2,), "float32")
            to = state(ring=Xs, ready=ready, sent=sent, Y=Y, Os=Os, Fs=Fs, Rs=Rs)
            past = T.alloc_local((1,), "int32") if in_stages and experts else None
            words = T.alloc_local((2,), "uint32") if groups else None
            powers = T.alloc_local((2,), "float32") if groups else None
            desc = T.alloc_wgmma_desc()
            rows = None if converts else T.alloc_wgmma_desc()
            at = places()
            T.annotate_layout({it: make_full_bank_swizzled_layout(it) for it in ((Xs,) if converts else (Xs, Ws))})
            io = Buffers(
                X=X, W=W, S=S, XS=XS, RS=RS, B=B, WS=WS, SEM=SEM, Xs=Xs, Ws=Ws, Es=Es, full=full, empty=empty,
                ready=ready, w=w, u=u, a=a, f=f, acc=acc, part=part, codes=codes, desc=desc, at=at, to=to, rows=rows,
                Ts=Ts, Ss=Ss, past=past, words=words, powers=powers,
            )  # fmt: skip
            run(io, parts, G, cta)

    return main
