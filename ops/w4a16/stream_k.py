"""Tile program on wgmma (sm_90a): weights are the register operand, two producer warps, stream-K.

A CTA computes tiles of 64 * row_blocks * warpgroups output features by `block_tokens` tokens. Two producer warps fill a
ring whose stages hold 64 or 128 k: one by TMA with X (128-byte swizzle), one by 1-D bulk copies with packed weights and
parameters. A consumer warpgroup owns `row_blocks` blocks of 64 rows: it loads its words, converts them into one of two
sets of operand registers and issues four wgmma m64nNk16 (two where registers are short), while those before are still
running on the other set.

Work partition and shares of tiles: ops/tile_scheduler.py; the result has the same bits in every run. With experts, x
holds the tokens of all of them, sorted, and the loop runs over (expert, tile) pairs; the partition is made on the
device (grouped GEMM). The expert of a tile is known only after the kernel before: nothing is fetched ahead of it.

A stage is released when the wgmmas that read it were waited for, long after the shared-memory loads of its words were
consumed: ptxas may move an arrive in front of a load's return (measured.md, "A race to design out").
"""

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.primitives import prelude
from terrazzo.ops.tile_scheduler import (
    EXPERTS_SOURCE,
    expert_macros,
    partition_macros,
    plan_state,
    ring_macros,
    ring_state,
    segment_state,
    share_macros,
    slice_state,
    spare_registers,
    table_state,
    table_words,
)
from terrazzo.ops.w4a16.operand import Operand
from terrazzo.schedules import tile_costs

PASS_CONFIGS = (  # barriers are placed by hand: the automatic ones stand around every access by a primitive
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
UNIT_K = 128  # k extent of one unit of work: two slots of the ring
REGISTERS = {  # (warpgroups, CTAs on an SM) -> a producer's, a consumer's
    (1, 1): (40, 240), (2, 1): (40, 232), (3, 1): (40, 152), (4, 1): (32, 112), (1, 2): (40, 208), (2, 2): (32, 104)
}  # fmt: skip
OUT_PITCH = 24  # halves of a staged output row: 16 rows and 16 bytes of padding, free of bank conflicts


def build(
    target,
    *,
    n: int,
    k: int,
    group: int,
    symmetric: bool,
    scale_dtype: str,
    dtype: str,
    numerics: str,
    bias: bool,
    block_tokens: int,
    warpgroups: int,
    row_blocks: int,
    stages: int,
    stage_k: int = 64,
    raster: int = 8,
    per_sm: int = 1,
    experts: int = 0,
):
    """The prim_func `main(X, W, P, B, WS, SEM, Y, sk)`; with E = `experts`, int32 [E + 1] instead of sk.

    Shapes: X [M, k] and Y [M, n] in `dtype`; W int32 [Kp/64, Np/64, 512]; P uint8 [G, Np/64, R]; B [n] in `dtype` (one
    element without a bias); WS f32 [grid, warpgroups * row_blocks, block_tokens / 8, 128, 4]; SEM int32
    [grid, 4 * warpgroups], zero before the first launch and after each one. `grid` CTAs, at most `per_sm` for each SM;
    the first `sk` tiles are shared along k, 0 <= sk <= tiles. A ring stage holds `stage_k` = 64 or 128 k.

    With experts, W, P and B hold one matrix after the other: [E * Kp/64, Np/64, 512], [E * G, Np/64, R], [E * n];
    expert e owns the rows offsets[e] .. offsets[e + 1] - 1 of X and Y, in ascending order. Rows of no expert are not
    written.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    op = Operand(group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, numerics=numerics)
    post, bf16 = numerics == "post", dtype == "bfloat16"
    cvt = get_converter(f"u4_{'bf16' if bf16 else 'f16'}_exact" if post else op.converter)
    bm, wgs, rb = block_tokens, warpgroups, row_blocks
    halves = stage_k // 64  # a stage is so many slots of 64 k
    np_, kp = -(-n // 64) * 64, -(-k // UNIT_K) * UNIT_K
    units, groups, rec, sb = kp // UNIT_K, op.groups(kp), op.record_bytes, op.scale_bytes
    ig = op.groups_per(64)  # parameter records of a stage
    batch = 2 if wgs == 4 and bm == 128 else 4  # k16 steps of a set of operands: registers for more sums
    shared_params = group in (0, 128)  # then only even slots carry parameters
    all_blocks, cta_blocks = np_ // 64, wgs * rb
    row_tiles = -(-all_blocks // cta_blocks)
    ct, nacc = wgs * 128, bm // 2
    f32, vec8 = scale_dtype == "float32", n % 8 == 0
    tb, stb = ("true" if bf16 else "false"), ("true" if scale_dtype == "bfloat16" else "false")
    ab = "bf16" if bf16 else "fp16"
    one2 = 0x3F803F80 if bf16 else 0x3C003C00
    out_tokens = next(t for t in (32, 16) if bm % t == 0)
    slot_bytes = bm * 64 * 2
    used = ("lds", "pack", "bulk", "stmatrix_trans", "semaphore", "exchange", "warpgroup")
    source = prelude(*used, extra=(cvt.device_source, *([EXPERTS_SOURCE] if experts else [])))
    matrices = max(experts, 1)
    last = T.Tensor((experts + 1,), "int32") if experts else T.int32
    tokens = expert_macros(experts=experts, block_tokens=bm, units=units, row_tiles=row_tiles)
    exchange = per_sm == 1 and not experts and tile_costs.parts_sums(wgs, (rb + post) * nacc)
    tiles = partition_macros(units=units, row_tiles=row_tiles, raster=raster, head_units=1, exchange=exchange)
    rings = ring_macros(stages=stages)
    spare = spare_registers(wgs, (rb + post) * nacc + 48, per_sm)
    shares = share_macros(vectors=bm // 8, row_blocks=rb, flags=wgs * 4, dtype="float32", spare=spare)
    M = T.dynamic("m")
    G = T.dynamic("grid")

    def param_slot(ring, h):
        return ring.stage[0] if shared_params else ring.stage[0] * halves + h % halves

    @T.macro
    def load_weights(W, P, Ws, Ps, full, ring, c, kb, h):
        """One thread: the packed words of 64 k, and the parameters where the stage carries them."""
        count = T.max(T.min(cta_blocks, all_blocks - c.rows[0] * cta_blocks), 0)
        params = h == 0 or not shared_params
        T.mbarrier_expect_tx(full[ring.stage[0]], count * (2048 + (ig * rec if params else 0)))
        if count > 0:
            T.call_extern(
                "handle",
                "tz_bulk",
                T.access_ptr(Ws[ring.stage[0] * halves + h % halves, 0, 0], "w", 512),
                T.access_ptr(W[(c.expert[0] * units + kb) * 2 + h, c.rows[0] * cta_blocks, 0], "r", 512),
                count * 2048,
                T.access_ptr(full[ring.stage[0]], "rw", 1),
            )
            if params:
                for q in T.unroll(ig):
                    record = 0 if group == 0 else (kb if shared_params else (kb * 2 + h) * ig + q)
                    T.call_extern(
                        "handle",
                        "tz_bulk",
                        T.access_ptr(Ps[param_slot(ring, h), q * cta_blocks * rec], "w", rec),
                        T.access_ptr(P[c.expert[0] * groups + record, c.rows[0] * cta_blocks, 0], "r", rec),
                        count * rec,
                        T.access_ptr(full[ring.stage[0]], "rw", 1),
                    )

    @T.macro
    def load_params(Ps, stage, block, lane_row, s, u, v, slot):
        """Registers of slot: f32 scales of rows g and g + 8, and the converter's (bias, scale) words."""
        for q in T.unroll(ig):
            at = (q * cta_blocks + block) * rec
            u[0] = T.call_extern("uint32", "tz_lds32", T.access_ptr(Ps[stage, at + lane_row * 2 * sb], "r", 4))
            if f32:
                u[1] = T.call_extern("uint32", "tz_lds32", T.access_ptr(Ps[stage, at + lane_row * 2 * sb + 4], "r", 4))
            if symmetric:
                u[2] = T.uint32(0x0808)
            else:
                u[2] = T.call_extern("uint32", "tz_lds16_at", T.access_ptr(Ps[stage, at + 64 * sb], "r", 64), lane_row)
            if post or numerics == "fused":
                if f32:
                    s[(slot * ig + q) * 2] = T.reinterpret(u[0], "float32")
                    s[(slot * ig + q) * 2 + 1] = T.reinterpret(u[1], "float32")
                else:
                    s[(slot * ig + q) * 2] = T.call_extern("float32", f"tz_unpack<{stb}, 0>", u[0])
                    s[(slot * ig + q) * 2 + 1] = T.call_extern("float32", f"tz_unpack<{stb}, 1>", u[0])
            if numerics == "fused":
                for e in T.unroll(2):
                    zs = -T.cast(u[2] >> T.uint32(8 * e) & T.uint32(255), "float32") * s[(slot * ig + q) * 2 + e]
                    v[(slot * ig + q) * 4 + 2 * e] = T.call_extern("uint32", f"tz_pack2<{tb}>", zs, zs)
            elif bf16:
                v[(slot * ig + q) * 4] = (u[2] & T.uint32(255)) * T.uint32(0x10001) + T.uint32(0x43004300)
                v[(slot * ig + q) * 4 + 2] = (u[2] >> T.uint32(8)) * T.uint32(0x10001) + T.uint32(0x43004300)
            else:
                v[(slot * ig + q) * 4] = (u[2] & T.uint32(255)) * T.uint32(0x10001) + T.uint32(0x64006400)
                v[(slot * ig + q) * 4 + 2] = (u[2] >> T.uint32(8)) * T.uint32(0x100010) + T.uint32(0x54005400)
            v[(slot * ig + q) * 4 + 1] = T.uint32(one2) if post else (u[0] & T.uint32(0xFFFF)) * T.uint32(0x10001)
            v[(slot * ig + q) * 4 + 3] = T.uint32(one2) if post else (u[0] >> T.uint32(16)) * T.uint32(0x10001)

    @T.macro
    def wgmma(a, half, desc, offset, sums, at, fresh):
        T.ptx_wgmma_rs(
            "float32",
            f"m64n{bm}k16",
            True,
            ab,
            ab,
            "fp32",
            a.data,
            half,
            desc.data,
            offset,
            sums.data,
            at,
            T.bool(not fresh),
            1,
            1,
        )

    @T.macro
    def convert(w, words, a, half, v, r, first, count):
        """k16 steps first .. first + count - 1 of 64 k of row block r."""
        for j in T.unroll(count):
            at = (r * ig + (first + j) * ig // 4) * 4
            T.call_extern(
                "handle",
                cvt.device_name,
                w[words + first + j],
                T.access_ptr(a[half + j * 4], "w", 4),
                v[at],
                v[at + 1],
                v[at + 2],
                v[at + 3],
            )
        T.warpgroup_fence_operand(a, half, count * 4)

    @T.macro
    def multiply_scaled(a, half, desc, slot, part, acc, s, r):
        """64 k of row block r: the sums of each group of k are scaled and added to the tile's."""
        for q in T.unroll(ig):
            T.warpgroup_fence_operand(part, num_regs=nacc)
            T.warpgroup_arrive()
            for j in T.unroll(4 // ig):
                at = q * (4 // ig) + j
                wgmma(a, half + at * 4, desc, slot + at * 2, part, 0, j == 0)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(part, num_regs=nacc)
            for e in T.unroll(nacc):
                acc[r * nacc + e] = acc[r * nacc + e] + s[(r * ig + q) * 2 + e % 4 // 2] * part[e]

    @T.macro
    def stage_out(Os, values, at, o, wg, warp, lane, q):
        """16 rows x 16 tokens of a warp, from eight accumulator registers, transposed into part q of its buffer."""
        for e in T.unroll(4):
            o[e] = T.call_extern("uint32", f"tz_pack2<{tb}>", values[at + e * 2], values[at + e * 2 + 1])
        T.call_extern(
            "handle",
            "tz_stmatrix4_trans",
            T.access_ptr(
                Os[wg * 4 + warp, (q * 16 + lane // 16 * 8 + lane % 8) * OUT_PITCH + lane // 8 % 2 * 8],
                "w",
                8,
            ),
            o[0],
            o[1],
            o[2],
            o[3],
        )

    @T.macro
    def write_out(Y, Os, token, row, at, wg, warp, end):
        """Eight rows of one token."""
        if vec8:
            if T.And(token < end, row < n):
                T.call_extern(
                    "handle",
                    "tz_copy16",
                    T.access_ptr(Y[token, row], "w", 8),
                    T.access_ptr(Os[wg * 4 + warp, at], "r", 8),
                )
        elif token < end:
            for e in T.unroll(8):
                if row + e < n:
                    Y[token, row + e] = Os[wg * 4 + warp, at + e]

    @T.macro
    def load_bias(B, bb, expert, row):
        bb[0] = T.cast(B[expert * n + T.min(row, n - 1)], "float32")
        bb[1] = T.cast(B[expert * n + T.min(row + 8, n - 1)], "float32")

    @T.macro
    def store_block(Y, Os, acc, o, c, row0, first, count, r, wg, warp, lane):
        """`count` tokens of row block r from token `first` of the tile."""
        T.call_extern("handle", "tz_syncwarp")
        for q in T.unroll(count // 16):
            stage_out(Os, acc, r * nacc + (first // 8 + q * 2) * 4, o, wg, warp, lane, q)
        T.call_extern("handle", "tz_syncwarp")
        for q in T.unroll(count // 16):
            write_out(
                Y,
                Os,
                c.first[0] + first + q * 16 + lane // 2,
                row0 + lane % 2 * 8,
                (q * 16 + lane // 2) * OUT_PITCH + lane % 2 * 8,
                wg,
                warp,
                c.end[0],
            )

    @T.macro
    def store_tile(Y, B, Os, acc, o, bb, c, x, wg, warp, lane, sliced):
        """Each warp stores its 16 rows of every row block, with the bias; `sliced`: of 16 tokens, those of x.units."""
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + warp * 16
            if bias:
                load_bias(B, bb, c.expert[0], row0 + lane // 4)
                for i in T.unroll(nacc):
                    acc[r * nacc + i] = acc[r * nacc + i] + bb[i % 4 // 2]
            if sliced:
                for b in T.unroll(bm // 16):
                    if T.call_extern("int32", "tz_has", x.units[0], r * (bm // 16) + b) > 0:
                        store_block(Y, Os, acc, o, c, row0, b * 16, 16, r, wg, warp, lane)
            else:
                for b in T.unroll(bm // out_tokens):
                    store_block(Y, Os, acc, o, c, row0, b * out_tokens, out_tokens, r, wg, warp, lane)

    @T.macro
    def end_segment(WS, SEM, Y, B, Os, acc, o, bb, c, x, cta, ctas, sk, wg, wt):
        if c.leaves[0] > 0:
            shares.leave_share(WS, SEM, acc, cta, wg, wt)
        else:
            if c.adds[0] > 0:
                tiles.later_shares(c, cta, ctas, sk)
                shares.add_shares(WS, SEM, acc, c.count[0], cta, wg, wt)
            store_tile(Y, B, Os, acc, o, bb, c, x, wg, wt // 32, wt % 32, False)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        W: T.Tensor((matrices * kp // 64, all_blocks, 512), "int32"),
        P: T.Tensor((matrices * groups, all_blocks, rec), "uint8"),
        B: T.Tensor((matrices * n if bias else 1,), dtype),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), "float32"),
        SEM: T.Tensor((G, wgs * 4), "int32"),
        Y: T.Tensor((M, n), dtype),
        parts: last,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            if per_sm > 1:
                T.annotate_min_blocks_per_sm(per_sm)
            Xs = T.alloc_shared((stages * halves, bm, 64), dtype)
            Ws = T.alloc_shared((stages * halves, cta_blocks, 512), "int32")
            Ps = T.alloc_shared((stages if shared_params else stages * halves, cta_blocks * ig * rec), "uint8")
            Os = T.alloc_shared((wgs * 4, out_tokens * OUT_PITCH), dtype)
            Es = T.alloc_shared((table_words(experts),), "int32")
            full = T.alloc_barrier([1 + 32] * stages)  # weights, and the lanes of the warp that fetches X
            empty = T.alloc_barrier([wgs * 4] * stages)
            w = T.alloc_local((halves * rb * 4,), "uint32")
            a = T.alloc_local((8 * batch,), "uint32")
            acc = T.alloc_local((rb * nacc,), "float32")
            part = T.alloc_local((nacc if post else 1,), "float32")
            s = T.alloc_local((rb * ig * 2,), "float32")
            u = T.alloc_local((3,), "uint32")
            v = T.alloc_local((rb * ig * 4,), "uint32")
            o = T.alloc_local((4,), "uint32")
            bb = T.alloc_local((2,), "float32")
            desc = T.alloc_wgmma_desc()
            p = plan_state()
            c = segment_state()
            x = slice_state()
            ring = ring_state()
            table = table_state()
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            tx = T.get_thread_binding()
            rings.reset(ring)
            T.pdl_trigger()
            if experts:
                T.pdl_sync()
                tokens.partition(Es, table, parts, M, G)
            mt, sk, ctas = (
                (table.blocks[0], table.shared[0], table.grid[0]) if experts else (T.ceildiv(M, bm), parts, G)
            )
            tiles.plan(p, cta, ctas, sk, mt)
            if tx >= ct:
                T.dec_max_nreg(REGISTERS[wgs, per_sm][0])
                if tx < ct + 32:  # weights do not depend on the kernel before: the first ring comes while it still runs
                    for seg in T.serial(p.all[0]):
                        tiles.segment(p, c, seg, cta, ctas, sk, mt)
                        tokens.locate(Es, c, M)
                        for kb in T.unroll(c.k0[0], c.k1[0], unroll_factor=1):
                            for h in T.unroll(2):
                                if h % halves == 0:
                                    T.barrier_wait(empty[ring.stage[0]], ring.parity[0] ^ 1)
                                if tx == ct:
                                    load_weights(W, P, Ws, Ps, full, ring, c, kb, h)
                                    if (h + 1) % halves == 0:
                                        T.barrier_arrive(full[ring.stage[0]])
                                if (h + 1) % halves == 0:
                                    rings.advance(ring)
                elif tx < ct + 64:  # X: a warp of its own, whose first copy waits behind none of the weights'
                    if not experts:
                        T.pdl_sync()
                    for seg in T.serial(p.all[0]):
                        tiles.segment(p, c, seg, cta, ctas, sk, mt)
                        tokens.locate(Es, c, M)
                        for kb in T.unroll(c.k0[0], c.k1[0], unroll_factor=1):
                            for h in T.unroll(2):
                                if h % halves == 0:
                                    T.barrier_wait(empty[ring.stage[0]], ring.parity[0] ^ 1)
                                T.tma_copy(
                                    X[c.first[0] : c.first[0] + bm, kb * 128 + h * 64 : kb * 128 + h * 64 + 64],
                                    Xs[ring.stage[0] * halves + h % halves, :, :],
                                    barrier=full[ring.stage[0]],
                                    leader_scope_threads=32,
                                )
                                if (h + 1) % halves == 0:
                                    T.barrier_arrive(full[ring.stage[0]])
                                    rings.advance(ring)
            else:
                T.inc_max_nreg(REGISTERS[wgs, per_sm][1])
                wg = tx // 128
                wt = tx % 128
                warp = wt // 32
                lane = tx % 32
                T.initialize_wgmma_descriptor(desc, T.access_ptr(Xs[0, 0, 0], "r"), 1, 1, 64)
                if not experts:
                    T.pdl_sync()
                for seg in T.serial(p.all[0]):
                    tiles.segment(p, c, seg, cta, ctas, sk, mt)
                    tokens.locate(Es, c, M)
                    for i in T.unroll(rb * nacc):
                        acc[i] = 0.0
                    for kb in T.serial(c.k1[0] - c.k0[0]):
                        for h in T.unroll(2):
                            if h % halves == 0:
                                T.barrier_wait(full[ring.stage[0]], ring.parity[0])
                                T.call_extern("handle", "tz_fence")
                                for q in T.unroll(halves * rb):  # the words of the whole stage: one latency
                                    T.call_extern(
                                        "handle",
                                        "tz_lds128",
                                        T.access_ptr(w[q * 4], "w", 4),
                                        T.access_ptr(
                                            Ws[ring.stage[0] * halves + q // rb, wg * rb + q % rb, wt * 4], "r", 4
                                        ),
                                    )
                            for r in T.unroll(rb):
                                if h == 0 or not shared_params:
                                    load_params(Ps, param_slot(ring, h), wg * rb + r, warp * 8 + lane // 4, s, u, v, r)
                                slot = (ring.stage[0] * halves + h % halves) * (slot_bytes // 16)
                                if post:
                                    convert(w, (h % halves * rb + r) * 4, a, (h * rb + r) % 2 * 16, v, r, 0, 4)
                                    multiply_scaled(a, (h * rb + r) % 2 * 16, desc, slot, part, acc, s, r)
                                else:
                                    for b in T.unroll(4 // batch):
                                        half = ((h * rb + r) * (4 // batch) + b) % 2 * (batch * 4)
                                        convert(w, (h % halves * rb + r) * 4, a, half, v, r, b * batch, batch)
                                        T.warpgroup_fence_operand(acc, r * nacc, nacc)
                                        T.warpgroup_arrive()
                                        for j in T.unroll(batch):
                                            at = (b * batch + j) * 2
                                            wgmma(a, half + j * 4, desc, slot + at, acc, r * nacc, False)
                                        T.warpgroup_commit_batch()
                                        T.warpgroup_fence_operand(acc, r * nacc, nacc)
                                        T.warpgroup_wait(1)
                                if r == 0 and h % halves == 0:  # the wgmmas on the stage before are complete
                                    rings.release(empty, ring, T.And(lane == 0, kb * 2 + h > 0))
                            if (h + 1) % halves == 0:
                                rings.advance(ring)
                    T.warpgroup_wait(0)
                    T.warpgroup_fence_operand(acc, num_regs=rb * nacc)
                    rings.release(empty, ring, T.And(lane == 0, c.k1[0] > c.k0[0]))
                    if exchange:
                        if p.among[0] > 0:
                            shares.give(WS, SEM, acc, x, p.among[0], cta, ctas, wg, wt)
                            for _ in T.serial(x.rounds[0]):
                                shares.take(WS, acc, x, c, cta, wg, wt)
                                store_tile(Y, B, Os, acc, o, bb, c, x, wg, warp, lane, True)
                            shares.close(SEM, x, cta, wg, wt)
                        else:
                            end_segment(WS, SEM, Y, B, Os, acc, o, bb, c, x, cta, ctas, sk, wg, wt)
                    else:
                        end_segment(WS, SEM, Y, B, Os, acc, o, bb, c, x, cta, ctas, sk, wg, wt)

    return main
