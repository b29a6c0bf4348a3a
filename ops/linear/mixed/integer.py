"""Tile program on wgmma (sm_90a) for two-level scales: int32 sums over all blocks of a precision, stream-K.

The multiplier of a weight's block is applied when its codes become bytes, that of an activation's block when it was
quantized. What is left of the scales is one for each token and precision and one for each output channel, so the
main loop is that of W4A8 (ops/linear/bytes/stream_k.py): words of 64 channels are converted into one of two sets of
operand registers while the two wgmmas before still run on the other.

A segment of k runs in up to two phases, INT4 blocks and INT8 blocks. At the end of a phase its sums, exact in int32,
become float32 with the scales of its tokens. Those of the INT4 phase wait for the others in registers, or, where a
thread has no registers for both (`stashes` of schedules/forms.py), in shared memory. Shares of a tile are float32 and
are added in order of k; the channel's scale is applied when the tile is stored.

With experts, x holds the tokens of all of them, sorted, and the loop runs over (expert, tile) pairs, as in W4A8's.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.forms import form_of
from terrazzo.ops.linear.bytes.stages import consumer_macros, fill_macros
from terrazzo.ops.linear.mixed.epilogue import out_macros
from terrazzo.ops.linear.mixed.problem import UNIT_K, UNIT_WORDS, Gemm, byte_gemm
from terrazzo.ops.tiles.calls import copy16, fma, lds64, lds128, opaque, tma_tile, wg_sync
from terrazzo.ops.tiles.cuda.experts import EXPERT_TABLE
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.pipeline import RoleSteps, role_macro
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile, take
from terrazzo.ops.tiles.scheduler import (
    expert_macros,
    partition_macros,
    plan_state,
    ring_macros,
    ring_state,
    segment_state,
    table_state,
    table_words,
)
from terrazzo.ops.tiles.shares import finish_macros, share_macros, spare_registers
from terrazzo.ops.tiles.staged_rows import out_tokens, staged
from terrazzo.ops.tiles.types import Buffers, Macro, Scalar, scalars
from terrazzo.schedules import forms
from terrazzo.schedules.stream_k import StreamK

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def phase_macros(gemm: Gemm, schedule: StreamK) -> tuple[Macro, Macro, Macro, Macro, Macro, Macro]:
    """Macros of a phase: `bound`, `fetch_scales` and `share_scales`, `settle`, `stash_sums` and `add_stash`."""
    bm, blocks4 = schedule.block_tokens, gemm.blocks4
    both = 0 < blocks4 < gemm.units
    own = -(-bm // 128)  # tokens whose scales a thread fetches

    @T.macro
    def bound(c, local, ph):
        """Blocks [lo, hi) of a precision in the segment; none if lo >= hi."""
        local.lo[0] = c.k0[0]
        local.hi[0] = c.k1[0]
        if both:
            if ph == 0:
                local.hi[0] = T.min(c.k1[0], blocks4)
            else:
                local.lo[0] = T.max(c.k0[0], blocks4)

    @T.macro
    def fetch_scales(XS, x, c, local, wt):
        """The tokens' scales of a phase, one for each thread."""
        for e in T.unroll(own):
            x[e] = XS[local.lo[0], T.min(c.first[0] + (e * 128 + wt) % bm, XS.shape[1] - 1)]

    @T.macro
    def share_scales(Fs, x, wg, wt):
        """Those scales for all threads of the warpgroup."""
        wg_sync(wg)  # every warp is done with those of the phase before
        for e in T.unroll(own):
            if e * 128 + wt < bm:
                Fs[wg, e * 128 + wt] = x[e]
        wg_sync(wg)

    @T.macro
    def settle(Fs, acc, sums, f, j, wg, lane, fresh):
        """Four sums of tokens j * 8 .. j * 8 + 7 become float32 and join `sums`, or start them."""
        lds64(f, Fs[wg, j * 8 + lane % 4 * 2])
        for i in T.unroll(4):
            if fresh:
                sums[j * 4 + i] = T.cast(acc[j * 4 + i], "float32") * f[i % 2]
            else:
                sums[j * 4 + i] = fma(T.cast(acc[j * 4 + i], "float32"), f[i % 2], sums[j * 4 + i])

    @T.macro
    def stash_sums(Ps, sums, wg, wt):
        """The float32 sums of the INT4 blocks wait in shared memory."""
        for j in T.unroll(bm // 8):
            copy16(Ps[wg, j, wt, 0], sums[j * 4])

    @T.macro
    def add_stash(Ps, sums, f, wg, wt):
        """Those sums join the ones of the INT8 blocks."""
        for j in T.unroll(bm // 8):
            lds128(f, Ps[wg, j, wt, 0])
            for i in T.unroll(4):
                sums[j * 4 + i] = sums[j * 4 + i] + f[i]

    return bound, fetch_scales, share_scales, settle, stash_sums, add_stash


def build(target, *, experts: int = 0, **params: Scalar):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y, sk)`; with E = `experts`, int32 [E + 1] instead of sk.

    Shapes: X int8 [M, k], codes times the multipliers of their blocks; W int32 [k/128, Np/64, 1056]; XS f32
    [k/128, MP] scales of the tokens, the same in all INT4 blocks and in all INT8 blocks; S f32 [Np] channel scales; B
    f32 [n] (one element without a bias); WS f32 [grid, warpgroups, block_tokens / 8, 128, 4]; SEM int32
    [grid, warpgroups], zero before the first launch and after each one; Y [M, n] in `out_dtype`. `grid` CTAs, at most
    the number of SMs; the first `sk` tiles are shared along k, 0 <= sk <= tiles.
    With experts, W, S and B hold one matrix after the other: [E * k/128, Np/64, 1056], [E * Np], [E * n]; expert e owns
    the rows offsets[e] .. offsets[e + 1] - 1 of X and Y, in ascending order. Rows of no expert are not written.

    Raises:
        ArgumentError: a weight without two-level scales, or a tile that does not fit.
    """
    gemm, schedule = take(Gemm, params), StreamK(row_blocks=1, form="s4_s8 integer", **params)
    if not gemm.two_level:
        raise ArgumentError("two_level", False, "must be true: sums run over blocks", "use stream_k")
    check_tile(schedule)
    return program(gemm, schedule, experts)


def program(gemm: Gemm, schedule: StreamK, experts: int = 0):
    """The prim_func of `build` for a problem and a legal schedule."""
    from tilelang.layout import make_full_bank_swizzled_layout

    bm, wgs, stages, stash = schedule.block_tokens, schedule.warpgroups, schedule.stages, forms.stashes(schedule)
    units, all_blocks, blocks4 = gemm.units, gemm.row_blocks, gemm.blocks4
    row_tiles, ct, nacc = -(-all_blocks // wgs), wgs * 128, bm // 2
    both = 0 < blocks4 < units
    own = -(-bm // 128)  # tokens whose scales a thread fetches
    inner = byte_gemm(gemm)
    form = form_of(inner, block_tokens=bm, row_blocks=1)
    steps = consumer_macros(block_tokens=bm, cta_blocks=wgs, unit_words=UNIT_WORDS, groups=1)
    tokens = expert_macros(experts=experts, block_tokens=bm, units=units, row_tiles=row_tiles) if experts else None
    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=schedule.raster)
    rings = ring_macros(stages=stages, rounds=False)
    unit_of = (lambda c, kb: c.expert[0] * units + kb) if experts else (lambda c, kb: kb)
    fill_weights, _ = fill_macros(rings, row_blocks=all_blocks, cta_blocks=wgs, unit_words=UNIT_WORDS, unit=unit_of)
    bound, fetch_scales, share_scales, settle, stash_sums, add_stash = phase_macros(gemm, schedule)
    spare = 0 if stash else spare_registers(wgs, nacc)  # then shares are added in place: no registers for loads
    shares = share_macros(vectors=bm // 8, row_blocks=1, flags=wgs, dtype="float32", spare=spare)
    step = 16 if stash else out_tokens(bm)  # less of them to leave room for the ring
    state, fetch, out = out_macros(gemm, block_tokens=bm, cta_blocks=wgs, step=step, experts=experts)
    _, finish_alone = finish_macros(tiles, shares, out, leaves=lambda c: c.k0[0] > 0, adds=lambda c: c.k1[0] < units)
    used = ("lds", "place", "pack", "bulk", "stmatrix_trans", "semaphore", "quotient", "int8", "rows_out", "warpgroup")
    source = prelude(*used, extra=(inner.converter.device_source, *([EXPERT_TABLE] if experts else [])))
    matrices, parts = max(experts, 1), T.Tensor((experts + 1,), "int32") if experts else T.int32
    M, MP, G = T.dynamic("m"), T.dynamic("mp"), T.dynamic("grid")

    @T.macro
    def fill_tokens(io, c, kb):
        """The warp of X fills a stage."""
        rings.acquire(io.empty, io.ring)
        end = c.end[0] if experts else None
        tma_tile(io.Xs, io.ring.stage[0], io.X, c.first[0], kb * UNIT_K, io.full[io.ring.stage[0]], end)
        T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    @T.macro
    def open(io, ring, wg, wt):
        """X, the units of the warpgroup and the ring's barriers."""
        steps.find(io.at, io.desc, io.Xs, 0)
        steps.find_units(io.at, io.Ws, 0, wg, wt)
        rings.find(io.full, io.empty, ring, 0)

    @T.macro
    def unit(io, place, follows):
        """128 channels: wait, load the words, convert and multiply 64 of them at a time, give the stage back."""
        place.wait(0)
        tile = steps.tokens(io.at, place.stage(0))
        steps.load(io.at, io.w, io.u, place.stage(0), 0)
        for h in T.unroll(2):
            form.step(io, tile, place, 0, h, T.And(io.lane == 0, follows))
        place.advance()

    @T.macro
    def sum_blocks(io, ring, count, lane):
        """The int32 sums of a phase."""
        for i in T.unroll(nacc):
            io.acc[i] = 0
        rings.consume(unit, None, Buffers(**vars(io), lane=lane), ring, count)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.acc, num_regs=nacc)
        rings.release(ring, lane == 0)

    @T.macro
    def segment(io, c, ring, wg, wt, lane, cta, grid, sk):
        """Up to two phases, then the tile's end."""
        fetch(io.S, io.B, io.to, c, wg, wt)
        if both and not stash:
            for i in T.unroll(nacc):
                io.sums[i] = 0.0
        for ph in T.serial(1 + both):
            bound(c, io.local, ph)
            if io.local.lo[0] < io.local.hi[0]:
                fetch_scales(io.XS, io.x, c, io.local, wt)
                count = io.local.hi[0] - io.local.lo[0]
                sum_blocks(io, ring, count, lane)
                opaque(c.first)  # rows' bounds: later
                share_scales(io.Fs, io.x, wg, wt)
                for j in T.unroll(bm // 8):
                    settle(io.Fs, io.acc, io.sums, io.f, j, wg, lane, stash or not both)
                if stash and both:
                    if io.local.hi[0] < c.k1[0]:
                        stash_sums(io.Ps, io.sums, wg, wt)
                    elif io.local.lo[0] > c.k0[0]:
                        add_stash(io.Ps, io.sums, io.f, wg, wt)
                if io.local.hi[0] == c.k1[0]:
                    finish_alone(io.WS, io.SEM, io.sums, io.to, c, cta, grid, sk, wg, wt)

    roles = RoleSteps(fill_weights, fill_tokens, open, segment)
    run = role_macro(roles, schedule, tiles, rings, tokens)

    @T.prim_func
    def main(
        X: T.Tensor((M, gemm.k), "int8"),
        W: T.Tensor((matrices * units, all_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((matrices * all_blocks * 64,), "float32"),
        B: T.Tensor((matrices * gemm.n if gemm.bias else 1,), "float32"),
        WS: T.Tensor((G, wgs, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs), "int32"),
        Y: T.Tensor((M, gemm.n), gemm.out_dtype),
        sk: parts,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, wgs, UNIT_WORDS), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, step)), gemm.out_dtype)
            Fs = T.alloc_shared((wgs, max(bm, 32)), "float32")
            Es = T.alloc_shared((table_words(experts),), "int32") if experts else None
            Ps = T.alloc_shared((wgs, bm // 8, 128, 4) if stash and both else (1, 1, 1, 4), "float32")
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((1,), "uint32")
            codes = form.registers()
            a = T.alloc_local((16,), "uint32")
            acc = T.alloc_local((nacc,), "int32")
            sums = T.alloc_local((nacc,), "float32")
            x = T.alloc_local((own,), "float32")
            f = T.alloc_local((4,), "float32")
            to = state(Y, Os)
            desc = T.alloc_wgmma_desc()
            at = steps.places()
            p = plan_state()
            c = segment_state()
            ring = ring_state()
            table = table_state() if experts else None
            local = scalars("lo", "hi")
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            io = Buffers(
                X=X, W=W, XS=XS, S=S, B=B, WS=WS, SEM=SEM, Xs=Xs, Ws=Ws, Fs=Fs, Ps=Ps, full=full, empty=empty, w=w, u=u,
                codes=codes, a=a, acc=acc, sums=sums, x=x, f=f, to=to, desc=desc, at=at, local=local, Es=Es,
                table=table,
            )  # fmt: skip
            run(io, p, c, ring, sk, G, cta)

    return main
