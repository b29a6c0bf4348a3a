"""Tile program on wgmma (sm_90a) for two-level scales: int32 sums over all blocks of a precision, stream-K.

The multiplier of a weight's block is applied when its codes become bytes, that of an activation's block when it was
quantized. What is left of the scales is one for each token and precision and one for each output channel, so the
main loop is that of W4A8 (ops/linear/bytes/stream_k.py): words of 64 channels are converted into one of two sets of
operand registers while the two wgmmas before still run on the other.

A segment of k runs in up to two phases, INT4 blocks and INT8 blocks. At the end of a phase its sums, exact in int32,
become float32 with the scales of its tokens. Those of the INT4 phase wait for the others in registers, or, where a
thread has no registers for both (`stashes` of schedules/forms.py), in shared memory. Shares of a tile are float32 and
are added in order of k; the channel's scale is applied when the tile is stored.
"""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.stages import stage_macros
from terrazzo.ops.tiles.calls import copy16, lds64, lds128, opaque, wg_sync
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, REGISTERS, check_tile
from terrazzo.ops.tiles.scheduler import partition_macros, plan_state, ring_macros, ring_state, scalars, segment_state
from terrazzo.ops.tiles.shares import finish_macros, share_macros, spare_registers
from terrazzo.ops.tiles.staged_rows import out_tokens, staged
from terrazzo.ops.w4ax.epilogue import store_macros
from terrazzo.ops.w4ax.problem import UNIT_K, UNIT_WORDS, Gemm, byte_gemm
from terrazzo.schedules import forms
from terrazzo.schedules.stream_k import StreamK

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def build(
    target,
    *,
    n: int,
    k: int,
    blocks8: int,
    out_dtype: str,
    bias: bool,
    two_level: bool,
    block_tokens: int,
    warpgroups: int,
    stages: int,
    raster: int = 8,
):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y, sk)`.

    Shapes: X int8 [M, k], codes times the multipliers of their blocks; W int32 [k/128, Np/64, 1056]; XS f32
    [k/128, MP] scales of the tokens, the same in all INT4 blocks and in all INT8 blocks; S f32 [Np] channel scales; B
    f32 [n] (one element without a bias); WS f32 [grid, warpgroups, block_tokens / 8, 128, 4]; SEM int32
    [grid, warpgroups], zero before the first launch and after each one; Y [M, n] in `out_dtype`. `grid` CTAs, at most
    the number of SMs; the first `sk` tiles are shared along k, 0 <= sk <= tiles.

    Raises:
        ArgumentError: a weight without two-level scales, or a tile that does not fit.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    gemm = Gemm(n, k, blocks8, out_dtype, bias, two_level)
    schedule = StreamK(block_tokens, warpgroups, 1, stages, form="s4_s8 integer")
    if not two_level:
        raise ArgumentError("two_level", two_level, "must be true: sums run over blocks", "use stream_k")
    check_tile(schedule)
    bm, wgs, stash = block_tokens, warpgroups, forms.stashes(schedule)
    units, all_blocks, blocks4 = gemm.units, gemm.row_blocks, gemm.blocks4
    row_tiles, ct, nacc = -(-all_blocks // wgs), wgs * 128, bm // 2
    both = 0 < blocks4 < units
    own = -(-bm // 128)  # tokens whose scales a thread fetches
    inner = byte_gemm(gemm)
    steps = stage_macros(inner, block_tokens=bm, cta_blocks=wgs)
    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=raster)
    rings = ring_macros(stages=stages)
    spare = 0 if stash else spare_registers(wgs, nacc)  # then shares are added in place: no registers for loads
    shares = share_macros(vectors=bm // 8, row_blocks=1, flags=wgs, dtype="float32", spare=spare)
    step = 16 if stash else out_tokens(bm)  # less of them to leave room for the ring
    out = store_macros(gemm, block_tokens=bm, cta_blocks=wgs, step=step)
    tail = finish_macros(tiles, shares, store=out.store, leaves=lambda c: c.k0[0] > 0, adds=lambda c: c.k1[0] < units)
    used = ("lds", "place", "pack", "bulk", "stmatrix_trans", "semaphore", "quotient", "int8", "rows_out", "warpgroup")
    source = prelude(*used, extra=(inner.converter.device_source,))
    M, MP, G = T.dynamic("m"), T.dynamic("mp"), T.dynamic("grid")

    @T.macro
    def fill_weights(io, c, kb):
        """The warp of the weights fills a stage."""
        rings.acquire(io.empty, io.ring)
        if io.leader:
            steps.load_weights(io.W, io.Ws, io.full, io.ring.stage[0], c, kb)
            T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    @T.macro
    def fill_tokens(io, c, kb):
        """The warp of X fills a stage."""
        rings.acquire(io.empty, io.ring)
        steps.load_tokens(io.X, io.Xs, io.full, io.ring.stage[0], c, kb)
        T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    @T.macro
    def locate(io, c):
        """The first token of the segment's tile."""
        c.first[0] = c.tokens[0] * bm

    @T.macro
    def phase(c, local, ph):
        """Blocks [lo, hi) of a precision in the segment; none if lo >= hi."""
        local.lo[0] = c.k0[0]
        local.hi[0] = c.k1[0]
        if both:
            if ph == 0:
                local.hi[0] = T.min(c.k1[0], blocks4)
            else:
                local.lo[0] = T.max(c.k0[0], blocks4)

    @T.macro
    def sum_blocks(at, ring, w, u, a, codes, acc, count, lane):
        """The int32 sums of a phase."""
        for i in T.unroll(nacc):
            acc[i] = 0
        for kb in T.serial(count):
            rings.wait(ring)
            tile = steps.tokens(at, ring.stage[0])
            steps.load_unit(at, w, u, ring.stage[0], 0)
            for h in T.unroll(2):
                steps.convert(w, h * 4, u, a, h * 8, codes, h)
                steps.multiply(a, h * 8, acc, tile, 0, h)
                T.warpgroup_wait(1)
                if h == 0:  # the wgmmas on the stage before are complete
                    rings.release(ring, T.And(lane == 0, kb > 0))
            rings.advance(ring)
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(acc, num_regs=nacc)
        rings.release(ring, lane == 0)

    @T.macro
    def fetch_scales(XS, x, c, local, wt):
        """The tokens' scales of a phase, one for each thread."""
        for e in T.unroll(own):
            x[e] = XS[local.lo[0], T.min(c.first[0] + (e * 128 + wt) % bm, MP - 1)]

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
                sums[j * 4 + i] = T.call_extern(
                    "float32", "__fmaf_rn", T.cast(acc[j * 4 + i], "float32"), f[i % 2], sums[j * 4 + i]
                )

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

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((units, all_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((all_blocks * 64,), "float32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((G, wgs, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs), "int32"),
        Y: T.Tensor((M, n), out_dtype),
        sk: T.int32,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, wgs, UNIT_WORDS), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, step)), out_dtype)
            Fs = T.alloc_shared((wgs, max(bm, 32)), "float32")
            Ps = T.alloc_shared((wgs, bm // 8, 128, 4) if stash and both else (1, 1, 1, 4), "float32")
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((1,), "uint32")
            codes = steps.registers()
            a = T.alloc_local((16,), "uint32")
            acc = T.alloc_local((nacc,), "int32")
            sums = T.alloc_local((nacc,), "float32")
            x = T.alloc_local((own,), "float32")
            f = T.alloc_local((4,), "float32")
            to = out.state(Y, Os)
            desc = T.alloc_wgmma_desc()
            at = steps.places()
            p = plan_state()
            c = segment_state()
            ring = ring_state()
            local = scalars("lo", "hi")
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            tx = T.get_thread_binding()
            rings.reset(ring)
            T.pdl_trigger()
            if tx >= ct:  # each role makes its own plan: made before, it would live in the registers of both
                T.dec_max_nreg(REGISTERS[wgs, 1][0])
                io = SimpleNamespace(X=X, W=W, Xs=Xs, Ws=Ws, full=full, empty=empty, ring=ring, leader=tx == ct)
                if tx < ct + 32:  # weights do not depend on the kernel before: the first ring comes while it still runs
                    tiles.plan(p, cta, G, sk, T.ceildiv(M, bm))
                    tiles.each_unit(fill_weights, io, None, p, c, cta, G, sk, T.ceildiv(M, bm))
                elif tx < ct + 64:  # X: a warp of its own, whose first copy waits behind none of the weights'
                    tiles.plan(p, cta, G, sk, T.ceildiv(M, bm))
                    T.pdl_sync()
                    tiles.each_unit(fill_tokens, io, locate, p, c, cta, G, sk, T.ceildiv(M, bm))
            else:
                T.inc_max_nreg(REGISTERS[wgs, 1][1])
                tiles.plan(p, cta, G, sk, T.ceildiv(M, bm))
                wg = tx // 128
                wt = tx % 128
                lane = tx % 32
                steps.find_tokens(at, desc, Xs, 0)
                steps.find_units(at, Ws, 0, wg, wt)
                rings.find(full, empty, ring, 0)
                T.pdl_sync()
                for seg in T.serial(p.all[0]):
                    tiles.segment(p, c, seg, cta, G, sk, T.ceildiv(M, bm))
                    c.first[0] = c.tokens[0] * bm
                    c.end[0] = M
                    out.fetch(S, B, to, c, wg, wt)
                    if both and not stash:
                        for i in T.unroll(nacc):
                            sums[i] = 0.0
                    for ph in T.serial(1 + both):
                        phase(c, local, ph)
                        if local.lo[0] < local.hi[0]:
                            fetch_scales(XS, x, c, local, wt)
                            count = local.hi[0] - local.lo[0]
                            sum_blocks(at, ring, w, u, a, codes, acc, count, lane)
                            opaque(c.first)  # rows' bounds: later
                            share_scales(Fs, x, wg, wt)
                            for j in T.unroll(bm // 8):
                                settle(Fs, acc, sums, f, j, wg, lane, stash or not both)
                            if stash and both:
                                if local.hi[0] < c.k1[0]:
                                    stash_sums(Ps, sums, wg, wt)
                                elif local.lo[0] > c.k0[0]:
                                    add_stash(Ps, sums, f, wg, wt)
                            if local.hi[0] == c.k1[0]:
                                tail.finish_alone(WS, SEM, sums, to, c, cta, G, sk, wg, wt)

    return main
