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

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.stages import consumer_macros, fill_macros
from terrazzo.ops.tiles.calls import bulk, lds32, lds64, lds128, syncwarp, tma_tile, turn_pass, turn_wait, wgmma
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, REGISTERS, check_tile
from terrazzo.ops.tiles.scheduler import partition_macros, plan_state, ring_macros, ring_state, scalars, segment_state
from terrazzo.ops.tiles.shares import finish_macros, share_macros
from terrazzo.ops.tiles.staged_rows import out_tokens, staged
from terrazzo.ops.w4ax import problem
from terrazzo.ops.w4ax.epilogue import store_macros
from terrazzo.ops.w4ax.problem import BLOCK_WORDS, SCALES, UNIT_K, UNIT_WORDS, Gemm
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
    two_level: bool = False,
    block_tokens: int,
    warpgroups: int,
    stages: int,
    raster: int = 8,
    turns: int = 0,
):
    """The prim_func `main(X, W, XS, S, B, WS, SEM, Y, sk)`.

    Shapes: X int8 [M, k]; W int32 [k/128, Np/64, 1056]; XS f32 [k/128, MP] scales of the tokens, MP a multiple of 4; S
    [1] is not read; B f32 [n] (one element without a bias); WS f32 [grid, warpgroups, block_tokens / 8, 128, 4]; SEM
    int32 [grid, warpgroups], zero before the first launch and after each one; Y [M, n] in `out_dtype`. `grid` CTAs, at
    most the number of SMs; the first `sk` tiles are shared along k, 0 <= sk <= tiles. With `turns` = 1, warpgroups
    issue wgmmas in order.

    Raises:
        ArgumentError: a weight with two-level scales, or a tile that does not fit.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    gemm = Gemm(n, k, blocks8, out_dtype, bias)
    schedule = StreamK(block_tokens, warpgroups, 1, stages, turns=turns, form="s4_s8 block")
    bm, wgs, form = block_tokens, warpgroups, forms.held(schedule)
    if two_level:
        raise ArgumentError("two_level", two_level, "must be false: records hold scales", "use integer")
    if turns not in (0, 1) or turns >= wgs:
        raise ArgumentError("turns", turns, "must be 0, or 1 with two warpgroups or more", "leave it out")
    if bm % 16 or not 16 <= bm <= 256:
        raise ArgumentError("block_tokens", bm, "must be a multiple of 16 up to 256", "use 16, 32, 64 or 128")
    check_tile(schedule)
    units, all_blocks, cta_blocks = gemm.units, gemm.row_blocks, wgs
    row_tiles, ct, nacc = -(-all_blocks // cta_blocks), wgs * 128, bm // 2
    width = bm // 2 if form == "halves" else bm  # tokens of a wgmma
    parts = bm if form == "blocks" else width // 2  # s32 sums of a thread
    copies = nacc if form in ("blocks", "kept") else 1  # of them, as f32
    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=raster)
    rings = ring_macros(stages=stages)
    shares = share_macros(vectors=bm // 8, row_blocks=1, flags=wgs, dtype="float32", spare=0)
    steps = consumer_macros(block_tokens=bm, cta_blocks=cta_blocks, unit_words=UNIT_WORDS, groups=1)
    operand = problem.convert_macros(gemm)
    out = store_macros(gemm, block_tokens=bm, cta_blocks=cta_blocks)
    tail = finish_macros(tiles, shares, store=out.store, leaves=lambda c: c.k0[0] > 0, adds=lambda c: c.k1[0] < units)
    fills = fill_macros(rings, row_blocks=all_blocks, cta_blocks=cta_blocks, unit_words=UNIT_WORDS)
    used = ("lds", "place", "pack", "bulk", "stmatrix_trans", "semaphore", "quotient", "int8", "rows_out", "warpgroup")
    source = prelude(*used, *(["turns"] if turns else []), extra=(gemm.converter.device_source, problem.SOURCE))
    M, MP, G = T.dynamic("m"), T.dynamic("mp"), T.dynamic("grid")

    @T.macro
    def load_token_scales(io, c, kb):
        """One thread: the block's scales of the tile's tokens."""
        count = T.min(bm, MP - c.first[0])
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * 4)
        bulk(io.Fs[io.ring.stage[0], 0], io.XS[kb, c.first[0]], count * 4, io.full[io.ring.stage[0]])

    @T.macro
    def fill_tokens(io, c, kb):
        """The warp of X fills a stage."""
        rings.acquire(io.empty, io.ring)
        tma_tile(io.Xs, io.ring.stage[0], io.X, c.first[0], kb * UNIT_K, io.full[io.ring.stage[0]])
        if io.leader_of_tokens:
            load_token_scales(io, c, kb)
        T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    @T.macro
    def locate(io, c):
        """The first token of the segment's tile."""
        c.first[0] = c.tokens[0] * bm

    @T.macro
    def load_unit(Ws, w, u, stage, block, wt):
        """A thread's words of both 64 channels of a row block, and the scales of its rows g and g + 8. Addresses are
        made anew: a thread has no registers for `steps.find_units`."""
        for h in T.unroll(2):
            lds128(w[h * 4], Ws[stage, block, h * BLOCK_WORDS + wt * 4])
        u[0] = lds32(Ws[stage, block, SCALES + wt // 4])

    @T.macro
    def multiply(a, part, x, set, at, first):
        """A block's products with `width` tokens from `first` on, operands in a[set ..], sums in part[at ..]."""
        T.warpgroup_fence_operand(a, set, 16)
        T.warpgroup_fence_operand(part, at, width // 2)
        T.warpgroup_arrive()
        for e in T.unroll(4):
            offset = first * (UNIT_K // 16) + e * 2
            wgmma(width, ("int8", "int8"), part, at, a, set + e * 4, x, offset, e > 0)  # the first starts the sums
        T.warpgroup_commit_batch()

    @T.macro
    def multiply_in_turn(a, part, x, first, wg):
        """The same from a[0 ..] into part[0 ..], not before the warpgroup ahead has issued its own."""
        if turns:
            turn_wait(wg)
        multiply(a, part, x, 0, 0, first)
        if turns:
            turn_pass(T.if_then_else(wg == wgs - 1, 0, wg + 1))

    @T.macro
    def done(part):
        """The only set of sums is complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(part, 0, width // 2)

    @T.macro
    def keep(part, sums, at):
        """Sums part[at ..], as float32, in registers of their own: ptxas waits for every wgmma before it reads those of
        another turn of a loop."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(part, at, width // 2)
        for i in T.unroll(width // 2):
            sums[i] = T.cast(part[at + i], "float32")
        T.warpgroup_fence_operand(sums, num_regs=width // 2)

    @T.macro
    def scale(acc, sums, Fs, f, s, stage, lane, first):
        """Sums of a block and `width` tokens from `first` on, s32 or already f32, join the tile's sums."""
        for j in T.unroll(width // 8):
            lds64(f, Fs[stage, first + j * 8 + lane % 4 * 2])
            for i in T.unroll(4):
                acc[first // 2 + j * 4 + i] = T.call_extern(
                    "float32",
                    "tz_scaled",
                    acc[first // 2 + j * 4 + i],
                    T.cast(sums[j * 4 + i], "float32"),
                    f[i % 2],
                    s[i // 2],
                )

    @T.macro
    def fetch(Ws, w, u, ring, local, wg, wt, old):
        """Words of the next block; the stage before the one before goes back where the tile has had an `old` one."""
        syncwarp()  # the other lanes' reads of its scales come before the arrive, too
        if T.And(wt % 32 == 0, old):
            rings.give_back(ring, local.late[0])
        rings.wait(ring)
        load_unit(Ws, w, u, ring.stage[0], wg, wt)

    @T.macro
    def convert(w, a, codes, set):
        """The words of a block into a[set .. set + 15]: A fragments of four k32."""
        for h in T.unroll(2):
            operand.convert(w, h * 4, a, set + h * 8, codes)

    @T.macro
    def begin(Ws, w, u, a, codes, ring, local, wg, wt, set, old):
        """Operands of the next block."""
        fetch(Ws, w, u, ring, local, wg, wt, old)
        convert(w, a, codes, set)

    @T.macro
    def end(local, ring):
        """The step of a block is done: the ring goes on."""
        local.late[0] = ring.before[0]
        rings.advance(ring)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((units, all_blocks, UNIT_WORDS), "int32"),
        XS: T.Tensor((units, MP), "float32"),
        S: T.Tensor((1,), "float32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs), "int32"),
        Y: T.Tensor((M, n), out_dtype),
        sk: T.int32,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, cta_blocks, UNIT_WORDS), "int32")
            Fs = T.alloc_shared((stages, max(bm, 32)), "float32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm))), out_dtype)
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((1,), "uint32")
            codes = operand.registers()
            a = T.alloc_local((32 if form == "blocks" else 16,), "uint32")
            acc = T.alloc_local((nacc,), "float32")
            part = T.alloc_local((parts,), "int32")
            sums = T.alloc_local((copies,), "float32")
            f = T.alloc_local((2,), "float32")
            s = T.alloc_local((2,), "float32")
            to = out.state(Y, Os)
            desc = T.alloc_wgmma_desc()
            at = steps.places()
            p = plan_state()
            c = segment_state()
            ring = ring_state()
            local = scalars("late")  # the stage before the one before
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            tx = T.get_thread_binding()
            rings.reset(ring)
            T.pdl_trigger()
            if tx >= ct:  # each role makes its own plan: made before, it would be spilled
                T.dec_max_nreg(REGISTERS[wgs, 1][0])
                io = SimpleNamespace(
                    X=X, W=W, XS=XS, Xs=Xs, Ws=Ws, Fs=Fs, full=full, empty=empty, ring=ring, leader=tx == ct,
                    leader_of_tokens=tx == ct + 32,
                )  # fmt: skip
                if tx < ct + 32:  # weights do not depend on the kernel before: the first ring comes while it still runs
                    tiles.plan(p, cta, G, sk, T.ceildiv(M, bm))
                    tiles.each_unit(fills.fill_weights, io, None, p, c, cta, G, sk, T.ceildiv(M, bm))
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
                rings.find(full, empty, ring, 0)
                T.pdl_sync()
                if turns:
                    if wg == wgs - 1:
                        turn_pass(0)
                for seg in T.serial(p.all[0]):
                    tiles.segment(p, c, seg, cta, G, sk, T.ceildiv(M, bm))
                    c.first[0] = c.tokens[0] * bm
                    c.end[0] = M
                    out.fetch(None, B, to, c, wg, wt)
                    for i in T.unroll(nacc):
                        acc[i] = 0.0
                    for i in T.unroll(parts):
                        part[i] = 0
                    for i in T.unroll(copies):
                        sums[i] = 0.0
                    for i in T.unroll(2):
                        s[i] = 0.0
                    ring.before[0] = ring.stage[0]  # the first step scales sums of nothing by scales that are there
                    count = c.k1[0] - c.k0[0]
                    if form in ("kept", "whole"):
                        for kb in T.serial(count):
                            fetch(Ws, w, u, ring, local, wg, wt, kb > 1)
                            if form == "kept":
                                keep(part, sums, 0)
                                convert(w, a, codes, 0)
                                multiply_in_turn(a, part, steps.tokens(at, ring.stage[0]), 0, wg)
                                scale(acc, sums, Fs, f, s, ring.before[0], lane, 0)
                            else:
                                done(part)
                                convert(w, a, codes, 0)
                                scale(acc, part, Fs, f, s, ring.before[0], lane, 0)
                                multiply_in_turn(a, part, steps.tokens(at, ring.stage[0]), 0, wg)
                            T.call_extern("handle", "tz_row_scales", T.access_ptr(s, "w"), u[0])
                            end(local, ring)
                        done(part)
                        scale(acc, part, Fs, f, s, ring.before[0], lane, 0)
                    elif form == "halves":
                        for kb in T.serial(count):
                            begin(Ws, w, u, a, codes, ring, local, wg, wt, 0, kb > 1)
                            T.call_extern("handle", "tz_row_scales", T.access_ptr(s, "w"), u[0])
                            for q in T.unroll(2):
                                multiply_in_turn(a, part, steps.tokens(at, ring.stage[0]), q * width, wg)
                                done(part)
                                scale(acc, part, Fs, f, s, ring.stage[0], lane, q * width)
                            end(local, ring)
                    else:  # wgmmas on two sets must not run across the end of a loop's body: ptxas would serialize all
                        if count % 2 == 1:
                            begin(Ws, w, u, a, codes, ring, local, wg, wt, 16, False)
                            multiply(a, part, steps.tokens(at, ring.stage[0]), 16, nacc, 0)
                            T.call_extern("handle", "tz_row_scales", T.access_ptr(s, "w"), u[0])
                            end(local, ring)
                            keep(part, sums, nacc)
                        for kb in T.serial(count // 2):
                            begin(Ws, w, u, a, codes, ring, local, wg, wt, 0, kb * 2 + count % 2 > 1)
                            multiply(a, part, steps.tokens(at, ring.stage[0]), 0, 0, 0)
                            scale(acc, sums, Fs, f, s, ring.before[0], lane, 0)
                            T.call_extern("handle", "tz_row_scales", T.access_ptr(s, "w"), u[0])
                            end(local, ring)
                            begin(Ws, w, u, a, codes, ring, local, wg, wt, 16, kb + count % 2 > 0)
                            multiply(a, part, steps.tokens(at, ring.stage[0]), 16, nacc, 0)
                            T.warpgroup_wait(1)
                            T.warpgroup_fence_operand(part, 0, nacc)
                            scale(acc, part, Fs, f, s, ring.before[0], lane, 0)
                            T.call_extern("handle", "tz_row_scales", T.access_ptr(s, "w"), u[0])
                            end(local, ring)
                            keep(part, sums, nacc)
                        scale(acc, sums, Fs, f, s, ring.before[0], lane, 0)
                    tail.finish_alone(WS, SEM, acc, to, c, cta, G, sk, wg, wt)
                    if T.And(lane == 0, c.k1[0] - c.k0[0] > 1):  # the warp has met since it read this stage
                        rings.give_back(ring, local.late[0])
                    rings.release(ring, lane == 0)
                if turns:
                    if wg == 0:
                        turn_wait(0)

    return main
