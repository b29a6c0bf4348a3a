"""Tile program on wgmma (sm_90a) for scales of each block: weights are the register operand, stream-K.

Hopper's tensor cores have no s4: INT4 and INT8 blocks both run as s8 wgmma on codes converted to bytes, and x comes in
bytes throughout. What 4-bit weights save is their bytes.

A CTA computes tiles of 64 * warpgroups output features by `block_tokens` tokens. Two producer warps fill a
ring whose stages hold one block of 128 channels: one fetches X, a 128-byte-swizzled TMA tile, and the scales of its
tokens, one the units of the row blocks (words and scales), a 1-D bulk copy. A consumer warpgroup converts a block into
operand registers and multiplies it by wgmma m64nNk32.

A block's sums are s32 and become f32 with the scales of its tokens and rows, an instruction each for conversion,
product of scales and sum: more issue slots than the wgmmas take clocks (two-level scales do without: integer.py). By
the registers there are (`held` of schedules/forms.py), two sets of s32 sums alternate, or one is copied as f32 and
scaled behind the wgmmas of the next block, or the wgmmas that run while a warpgroup scales are those of the others. The
tensor core serves all that wait, so that warpgroups would end, and scale, at the same time: with `turns` each issues
its wgmmas when the one before it has.

A stage is released a whole step after its token scales were read, or behind the stores of the tile: ptxas may issue an
arrive while loads in front of it are still on their way, but not across a loop's end or a store that needs them. The
warp's other lanes have read by then, too: it meets before one of them arrives.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.stages import consumer_macros, fill_macros
from terrazzo.ops.linear.mixed import problem
from terrazzo.ops.linear.mixed.block_loop import loop_macro, registers_of
from terrazzo.ops.linear.mixed.epilogue import out_macros
from terrazzo.ops.linear.mixed.problem import UNIT_K, UNIT_WORDS, Gemm
from terrazzo.ops.tiles.calls import bulk, turn_pass, turn_wait
from terrazzo.ops.tiles.cuda.blocks import BLOCK_SCALES
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.pipeline import RoleSteps, role_macro
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile, take
from terrazzo.ops.tiles.scheduler import partition_macros, plan_state, ring_macros, ring_state, segment_state
from terrazzo.ops.tiles.shares import finish_macros, share_macros
from terrazzo.ops.tiles.staged_rows import out_tokens, staged
from terrazzo.ops.tiles.types import Buffers, Scalar, scalars
from terrazzo.schedules.stream_k import StreamK

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def build(target, **params: Scalar):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y, sk)`.

    Shapes: X int8 [M, k]; W int32 [k/128, Np/64, 1056]; XS f32 [k/128, MP] scales of the tokens, MP a multiple of 4; S
    [1] is not read; B f32 [n] (one element without a bias); WS f32 [grid, warpgroups, block_tokens / 8, 128, 4]; SEM
    int32 [grid, warpgroups], zero before the first launch and after each one; Y [M, n] in `out_dtype`. `grid` CTAs, at
    most the number of SMs; the first `sk` tiles are shared along k, 0 <= sk <= tiles. With `turns` = 1, warpgroups
    issue wgmmas in order.

    Raises:
        ArgumentError: a weight with two-level scales, or a tile that does not fit.
    """
    gemm, schedule = take(Gemm, params), StreamK(row_blocks=1, form="s4_s8 block", **params)
    turns, tokens = schedule.turns, schedule.block_tokens
    if gemm.two_level:
        raise ArgumentError("two_level", True, "must be false: records hold scales", "use integer")
    if turns not in (0, 1) or turns >= schedule.warpgroups:
        raise ArgumentError("turns", turns, "must be 0, or 1 with two warpgroups or more", "leave it out")
    if tokens % 16 or not 16 <= tokens <= 256:
        raise ArgumentError("block_tokens", tokens, "must be a multiple of 16 up to 256", "use 16, 32, 64 or 128")
    check_tile(schedule)
    return program(gemm, schedule)


def program(gemm: Gemm, schedule: StreamK):
    """The prim_func of `build` for a problem and a legal schedule."""
    from tilelang.layout import make_full_bank_swizzled_layout

    bm, wgs, stages, turns = schedule.block_tokens, schedule.warpgroups, schedule.stages, schedule.turns
    units, all_blocks, cta_blocks = gemm.units, gemm.row_blocks, wgs
    row_tiles, ct, nacc = -(-all_blocks // cta_blocks), wgs * 128, bm // 2
    held = registers_of(schedule)
    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=schedule.raster)
    rings = ring_macros(stages=stages)
    shares = share_macros(vectors=bm // 8, row_blocks=1, flags=wgs, dtype="float32", spare=0)
    steps = consumer_macros(block_tokens=bm, cta_blocks=cta_blocks, unit_words=UNIT_WORDS, groups=1)
    registers, convert = problem.convert_macros(gemm)
    state, fetch, out = out_macros(gemm, block_tokens=bm, cta_blocks=cta_blocks)
    _, finish_alone = finish_macros(tiles, shares, out, leaves=lambda c: c.k0[0] > 0, adds=lambda c: c.k1[0] < units)
    loop = loop_macro(schedule, rings, steps, convert)
    used = ("lds", "place", "pack", "bulk", "stmatrix_trans", "semaphore", "quotient", "int8", "rows_out", "warpgroup")
    source = prelude(*used, *(["turns"] if turns else []), extra=(gemm.converter.device_source, BLOCK_SCALES))
    M, MP, G = T.dynamic("m"), T.dynamic("mp"), T.dynamic("grid")

    @T.macro
    def load_token_scales(io, c, kb):
        """One thread: the block's scales of the tile's tokens."""
        count = T.min(bm, MP - c.first[0])
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * 4)
        bulk(io.Fs[io.ring.stage[0], 0], io.XS[kb, c.first[0]], count * 4, io.full[io.ring.stage[0]])

    @T.macro
    def open(io, ring, wg, wt):
        """X and the ring's barriers."""
        steps.find(io.at, io.desc, io.Xs, 0)
        rings.find(io.full, io.empty, ring, 0)

    @T.macro
    def enter(wg):
        """The last warpgroup gives the first one its turn."""
        if wg == wgs - 1:
            turn_pass(0)

    @T.macro
    def leave(wg):
        """The turn that was passed last."""
        if wg == 0:
            turn_wait(0)

    @T.macro
    def segment(io, c, ring, wg, wt, lane, cta, grid, sk):
        """Blocks of a tile, whose sums are then shared or stored; its last stages go back."""
        fetch(None, io.B, io.to, c, wg, wt)
        for i in T.unroll(nacc):
            io.acc[i] = 0.0
        for i in T.unroll(held.parts):
            io.part[i] = 0
        for i in T.unroll(held.copies):
            io.sums[i] = 0.0
        for i in T.unroll(2):
            io.s[i] = 0.0
        ring.before[0] = ring.stage[0]  # the first step scales sums of nothing by scales that are there
        loop(io, c, ring, wg, wt, lane)
        finish_alone(io.WS, io.SEM, io.acc, io.to, c, cta, grid, sk, wg, wt)
        if T.And(lane == 0, c.k1[0] - c.k0[0] > 1):  # the warp has met since it read this stage
            rings.give_back(ring, io.local.late[0])
        rings.release(ring, lane == 0)

    own = dict(row_blocks=all_blocks, cta_blocks=cta_blocks, unit_words=UNIT_WORDS)
    fills = fill_macros(rings, also_tokens=load_token_scales, ends=False, **own)
    roles = RoleSteps(*fills, open, segment, *((enter, leave) if turns else ()))
    run = role_macro(roles, schedule, tiles, rings)

    @T.prim_func
    def main(
        X: T.Tensor((M, gemm.k), "int8"),
        W: T.Tensor((units, all_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((1,), "float32"),
        B: T.Tensor((gemm.n if gemm.bias else 1,), "float32"),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs), "int32"),
        Y: T.Tensor((M, gemm.n), gemm.out_dtype),
        sk: T.int32,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, cta_blocks, UNIT_WORDS), "int32")
            Fs = T.alloc_shared((stages, max(bm, 32)), "float32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm))), gemm.out_dtype)
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((1,), "uint32")
            codes = registers()
            a = T.alloc_local((held.operands,), "uint32")
            acc = T.alloc_local((nacc,), "float32")
            part = T.alloc_local((held.parts,), "int32")
            sums = T.alloc_local((held.copies,), "float32")
            f = T.alloc_local((2,), "float32")
            s = T.alloc_local((2,), "float32")
            to = state(Y, Os)
            desc = T.alloc_wgmma_desc()
            at = steps.places()
            p = plan_state()
            c = segment_state()
            ring = ring_state()
            local = scalars("late")  # the stage before the one before
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            io = Buffers(
                X=X, W=W, XS=XS, B=B, WS=WS, SEM=SEM, Xs=Xs, Ws=Ws, Fs=Fs, full=full, empty=empty, w=w, u=u, a=a,
                codes=codes, acc=acc, part=part, sums=sums, f=f, s=s, to=to, desc=desc, at=at, local=local,
            )  # fmt: skip
            run(io, p, c, ring, sk, G, cta)

    return main
