"""Tile program on wgmma (sm_90a): weights are the register operand, two producer warps, stream-K.

A CTA computes tiles of 64 * row_blocks * warpgroups output features by `block_tokens` tokens. Two producer warps fill a
ring whose stages hold 64 or 128 k: one by TMA with X (128-byte swizzle), one by 1-D bulk copies with packed weights and
parameters. A consumer warpgroup owns `row_blocks` blocks of 64 rows: it loads its words, converts them into one of two
sets of operand registers and issues four wgmma m64nNk16 (two where registers are short), while those before are still
running on the other set.

Work partition: ops/tiles/scheduler.py; shares of tiles: ops/tiles/shares.py. The result has the same bits in every run.
With experts, x holds the tokens of all of them, sorted, and the loop runs over (expert, tile) pairs; the partition is
made on the device (grouped GEMM). The expert of a tile is known only after the kernel before: nothing is fetched ahead
of it.

A stage is released when the wgmmas that read it were waited for, long after the shared-memory loads of its words were
consumed: ptxas may move an arrive in front of a load's return (docs/tile-programs.md,
"A release of a stage").
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.epilogue import out_macros
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.params import Factors, factor_macros
from terrazzo.ops.linear.sizes import UNIT_K, sizes
from terrazzo.ops.linear.stages import Shape, fill_macros, operand_macros
from terrazzo.ops.products.codes import BLOCK_WORDS
from terrazzo.ops.tiles.calls import matrix, mma_kind, opaque, wgmma
from terrazzo.ops.tiles.cluster_shares import cluster_macros
from terrazzo.ops.tiles.cuda.experts import EXPERT_TABLE
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.pipeline import Steps, Work, pipeline_macro
from terrazzo.ops.tiles.program import OWN_BARRIERS, take
from terrazzo.ops.tiles.scheduler import Ring, expert_macros, partition_macros, ring_macros, table_words
from terrazzo.ops.tiles.shares import finish_macros, share_macros, spare_registers
from terrazzo.ops.tiles.staged_rows import out_tokens, staged
from terrazzo.ops.tiles.types import Buffers, Macro, PrimFunc, Scalar
from terrazzo.schedules import tile_costs

PASS_CONFIGS = OWN_BARRIERS
PRIMITIVES = (
    "lds", "place", "pack", "bulk", "stmatrix_trans", "semaphore", "quotient", "exchange", "warpgroup", "rows_out",
)  # fmt: skip


def multiply_macro(shape: Shape, convert: Macro) -> Macro:
    """The macro `multiply` of 64 k of a row block, by how scales enter."""
    op, halves, blocks, rb, ig = shape.op, shape.halves, shape.blocks, shape.row_blocks, shape.slot_groups
    bm, nacc, batch, slot_units = shape.block_tokens, shape.sums, shape.batch, shape.slot_units
    kinds = (mma_kind(op.dtype),) * 2

    @T.macro
    def multiply(w, a, acc, part, s, v, x, h, r):
        """64 k of row block r, by sets of operands: while the products of one run, the other is converted."""
        for b in T.unroll(4 // batch):
            half = ((h * rb + r) * (4 // batch) + b) % 2 * (batch * 4)
            convert(w, (h % halves * rb + r) * 4 * blocks, a, half, v, r, b * batch, batch)
            T.warpgroup_fence_operand(acc, r * nacc, nacc)
            T.warpgroup_arrive()
            for j in T.unroll(batch):
                at = (b * batch + j) * 2
                wgmma(bm, kinds, acc, r * nacc, a, half + j * 4, x, h % halves * slot_units + at)
            T.warpgroup_commit_batch()
            T.warpgroup_fence_operand(acc, r * nacc, nacc)
            T.warpgroup_wait(1)

    @T.macro
    def multiply_post(w, a, acc, part, s, v, x, h, r):
        """64 k of row block r: the sums of each group of k, `part`, are scaled and added to the tile's."""
        half = (h * rb + r) % 2 * 16
        convert(w, (h % halves * rb + r) * 4 * blocks, a, half, v, r, 0, 4)
        for q in T.unroll(ig):
            T.warpgroup_fence_operand(part, num_regs=nacc)
            T.warpgroup_arrive()
            for j in T.unroll(4 // ig):
                at = q * (4 // ig) + j
                wgmma(bm, kinds, part, 0, a, half + at * 4, x, h % halves * slot_units + at * 2, j != 0)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(part, num_regs=nacc)
            for e in T.unroll(nacc):
                acc[r * nacc + e] = acc[r * nacc + e] + s[(r * ig + q) * 2 + e % 4 // 2] * part[e]

    @T.macro
    def multiply_long(w, a, acc, part, s, v, x, h, r):
        """64 of the 128 k of a group, which are converted while the products of the others run; behind the second half
        the sums are scaled and added to the tile's."""
        half = h % 2 * 16
        convert(w, h % halves * 4 * blocks, a, half, v, r, 0, 4)
        T.warpgroup_fence_operand(part, num_regs=nacc)
        T.warpgroup_arrive()
        for j in T.unroll(4):
            wgmma(bm, kinds, part, 0, a, half + j * 4, x, h % halves * slot_units + j * 2, h * 4 + j != 0)
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(part, num_regs=nacc)
        if h == 1:
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(part, num_regs=nacc)
            for e in T.unroll(nacc):
                acc[e] = acc[e] + s[e % 4 // 2] * part[e]

    if not op.scales_sums:
        return multiply
    # older formats' kernels scale the sums of each 64 k
    return multiply_long if op.group == UNIT_K and rb == 1 and op.format.row_factors else multiply_post


def work_of(shape: Shape, factors: Factors | None, exchange: bool) -> Work:
    """The work of CTAs; `exchange`: those that share a tile alike part its sum."""
    op, size, experts, cluster = shape.op, shape.size, shape.experts, shape.cluster
    bm, wgs, rb, stages = shape.block_tokens, shape.warpgroups, shape.row_blocks, shape.stages
    units, row_tiles, each, sums = size.units, shape.row_tiles, 2 // shape.halves, (rb + op.scales_sums) * shape.sums
    tokens = expert_macros(experts=experts, block_tokens=bm, units=units, row_tiles=row_tiles)
    tiles = partition_macros(
        units=units, row_tiles=row_tiles, raster=shape.raster, head_units=1, exchange=exchange or cluster > 1,
        cluster=cluster,
    )  # fmt: skip
    rings = ring_macros(stages=stages, each=each, rounds=not experts)
    spare = spare_registers(wgs, sums, shape.per_sm) if cluster == 1 else 0  # shares are rare there
    shares = share_macros(vectors=bm // 8, row_blocks=rb, flags=wgs * 4, dtype="float32", spare=spare)
    out = out_macros(shape, factors)
    peers = cluster_macros(
        size=cluster, warpgroups=wgs, row_blocks=rb, block_tokens=bm, dtype="float32", units=units, stages=stages,
        each=each, stage_bytes=bm * shape.stage_k * 2, rings=rings,
    )  # fmt: skip
    finish, _ = finish_macros(tiles, shares, out, exchange=exchange, peers=peers if cluster > 1 else None)
    return Work(tokens, tiles, rings, finish, peers)


def build(target, *, n: int, k: int, bias: bool, experts: int = 0, whole: bool = True, **params: Scalar):
    """The prim_func `main(X, W, P, B, WS, SEM, Y, sk)`; with E = `experts`, int32 [E + 1] instead of sk.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Kp/KB, Np/64, 512], blocks of KB k of the format `weight`; P
    uint8 [G, Np/64, R]; B [n] in `dtype` (one element without a bias); WS f32 [grid, warpgroups * row_blocks,
    block_tokens / 8, 128, 4]; SEM int32 [grid, 4 * warpgroups], zero before the first launch and after each one. `grid`
    CTAs, at most `per_sm` for each SM; the first `sk` tiles are shared along k, 0 <= sk <= tiles. A ring stage holds
    `stage_k` = 64 or 128 k. `cluster`: of so many CTAs, which divide `grid`; where each tile is shared by as many, its
    sum does not leave the chip's SMs.

    With experts, W, P and B hold one matrix after the other: [E * Kp/KB, Np/64, 512], [E * G, Np/64, R], [E * n];
    expert e owns the rows offsets[e] .. offsets[e + 1] - 1 of X and Y, in ascending order. Rows of no expert are not
    written.

    With n = k = 0 the kernel is generic: both come with the launch. `whole` then says that rows of Y are whole 16-byte
    pieces (n a multiple of 8), and the bias is a branch: B has n elements, or any other number where there is none.
    """
    op = take(Operand, params)
    size = sizes(op, n, k, bias=bias, whole=whole, matrices=max(experts, 1))
    shape = Shape(op, size, experts, **params)
    if shape.cluster > 1 and experts:
        constraint = "tiles of experts are found on the device, not shared by clusters"
        raise ArgumentError("cluster", shape.cluster, constraint, "use 1")
    return program(shape)


def steps_of(shape: Shape, rings: Ring, factors: Factors | None) -> Steps:
    """What warps do: the main loop is `unit`."""
    op, size, halves, rb, nacc = shape.op, shape.size, shape.halves, shape.row_blocks, shape.sums
    cta_blocks = shape.cta_blocks
    find, load_words, load_params, convert = operand_macros(shape)
    multiply = multiply_macro(shape, convert)

    @T.macro
    def unit(io, place, follows):
        """128 k, in two slots."""
        for h in T.unroll(2):
            stage = h // halves
            if h % halves == 0:
                place.wait(stage)
                load_words(io.at, io.w, place.stage(stage))
            for r in T.unroll(rb):
                if op.has_groups and (h == 0 or not shape.shared_params):
                    load_params(io.at, shape.param_slot(place.stage(stage), h), r, io.s, io.u, io.v)
                tile = io.at.x[0] + shape.first_tile(place.stage(stage))
                multiply(io.w, io.a, io.acc, io.part, io.s, io.v, tile, h, r)
                if r == 0 and h % halves == 0:  # the wgmmas on the stage before are complete
                    place.release(stage, T.And(io.lane == 0, T.Or(h > 0, follows)))
            if (h + 1) % halves == 0:
                place.advance()

    @T.macro
    def open(io, ring):
        """X, from the first stage on."""
        T.initialize_wgmma_descriptor(io.desc, T.access_ptr(io.Xs[0, 0, 0], "r"), 1, 1, 64)
        io.at.x[0] = matrix(io.desc)

    @T.macro
    def begin(io, ring, c, wg, wt):
        """Sums of nothing; places anew: kept while the tile before ended, they would be spilled."""
        for i in T.unroll(rb * nacc):
            io.acc[i] = 0.0
        if op.format.row_factors:
            for r in T.unroll(rb):
                row = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + wt // 32 * 16
                factors.fetch(io.P, row, c.expert[0] * size.records)
        find(io.at, io.Ws, io.Ps, wg, wt)
        rings.find(io.full, io.empty, ring, 0)

    @T.macro
    def drain(io):
        """All products are complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=rb * nacc)

    @T.macro
    def end(io, ring, c, lane):
        """The last products are complete, and their stage goes back."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=rb * nacc)
        rings.release(ring, T.And(lane == 0, c.k1[0] > c.k0[0]))
        opaque(c.first[0])  # addresses of y are not made before, and spilled

    return Steps(*fill_macros(shape, rings), open, begin, unit, drain, end)


def program(shape: Shape) -> PrimFunc:
    """The prim_func of `build` for a legal shape."""
    from tilelang.layout import make_full_bank_swizzled_layout

    op, size, dtype, experts = shape.op, shape.size, shape.op.dtype, shape.experts
    cluster, per_sm = shape.cluster, shape.per_sm
    bm, wgs, rb, stages, halves = shape.block_tokens, shape.warpgroups, shape.row_blocks, shape.stages, shape.halves
    blocks, cta_blocks, nacc, ig = shape.blocks, shape.cta_blocks, shape.sums, shape.slot_groups
    factors, sums = factor_macros(op, size.n, size.units * UNIT_K), (rb + op.scales_sums) * nacc
    exchange = cluster == per_sm == 1 and not experts and tile_costs.parts_sums(wgs, sums)
    work = work_of(shape, factors, exchange)
    run = pipeline_macro(steps_of(shape, work.rings, factors), work, shape, experts)
    more = (
        ("bulk_at", not size.known), ("cluster", cluster > 1), ("prefetch_line", op.format.row_factors),
        ("lds64", op.format.record_groups > 1),
    )  # fmt: skip
    source = prelude(
        *PRIMITIVES,
        *(name for name, wanted in more if wanted),
        extra=(op.scaling_converter.device_source, *([EXPERT_TABLE] if experts else [])),
    )
    last = T.Tensor((experts + 1,), "int32") if experts else T.int32
    cluster_dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    M, G = T.dynamic("m"), T.dynamic("grid")

    @T.prim_func
    def main(
        X: T.Tensor((M, size.k), dtype),
        W: T.Tensor((size.word_blocks, size.blocks, BLOCK_WORDS), "int32"),
        P: T.Tensor((max(experts, 1) * size.records, size.blocks, op.record_bytes), "uint8"),
        B: T.Tensor((size.bias,), dtype),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs * 4), "int32"),
        Y: T.Tensor((M, size.n), dtype),
        parts: last,
    ):
        with T.Kernel(G, threads=wgs * 128 + 128, prelude=source, **cluster_dims) as cta:
            if per_sm > 1:
                T.annotate_min_blocks_per_sm(per_sm)
            Xs = T.alloc_shared((stages * halves, bm, 64), dtype)
            Ws = T.alloc_shared((stages * halves * blocks, cta_blocks, BLOCK_WORDS), "int32")
            Ps = T.alloc_shared(shape.param_shape, "uint8")
            Os = T.alloc_shared((wgs, staged(2, out_tokens(bm), alone=exchange)), dtype)
            Es = T.alloc_shared((table_words(experts),), "int32")
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            sent = T.alloc_barrier([1] * (wgs * 4)) if cluster > 1 else None
            ready = T.alloc_barrier([cluster - 1]) if cluster > 1 else None
            w = T.alloc_local((halves * rb * blocks * 4,), "uint32")
            a = T.alloc_local((8 * shape.batch,), "uint32")
            acc = T.alloc_local((rb * nacc,), "float32")
            part = T.alloc_local((nacc if op.scales_sums else 1,), "float32")
            s = T.alloc_local((rb * ig * 2,), "float32")
            u = T.alloc_local((3,), "uint32")
            v = T.alloc_local((rb * ig * 4,), "uint32")
            o = T.alloc_local((4,), "uint32")
            bb = T.alloc_local((2,), "float32")
            desc = T.alloc_wgmma_desc()
            at = Buffers(words=(1, "uint32"), scales=(1, "uint32"), zeros=(1, "uint32"), x=(1, "uint64"))
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            io = Buffers(
                X=X, W=W, P=P, WS=WS, SEM=SEM, Xs=Xs, Ws=Ws, Ps=Ps, Es=Es, full=full, empty=empty, ready=ready, w=w,
                a=a, acc=acc, part=part, s=s, u=u, v=v, desc=desc, at=at,
                to=Buffers(Y=Y, B=B, P=P, Os=Os, o=o, bb=bb, ring=Xs, ready=ready, sent=sent),
            )  # fmt: skip
            run(io, parts, G, cta)

    return main
