"""Tile program on wgmma (sm_90a) without roles: every warpgroup copies, converts and multiplies in turn.

The software pipeline that warp specialization is compared with: a ring of stages of 128 k, filled `stages - 1` ahead.
A CTA-wide barrier once for each stage says that its predecessor is free, and a warp that has just issued its product
issues the next copies (X as a 128-byte-swizzled TMA tile, weights as one 1-D bulk copy). Then each warpgroup converts
64 k of its rows and multiplies. With `operands` = 1 it waits for that product before it converts again; with 2 it has
a second set of operand registers and converts beside the product. Copies run ahead into the CTA's next tile.

Stream-K shares, the order of sums and the epilogue are those of stream_k.py; its sums are the same bits.
"""

from terrazzo.ablation.w4a8.baseline import Gemm
from terrazzo.ablation.w4a8.schedules import Basic
from terrazzo.ablation.w4a8.tiles import PRIMITIVES, tile_macros
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.problem import UNIT_K
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile
from terrazzo.ops.tiles.scheduler import plan_state, ring_state, scalars, segment_state
from terrazzo.ops.tiles.staged_rows import out_tokens, staged

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
    operands: int = 1,
):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y, sk)`, arguments as in stream_k.build without experts.

    `dequantization` may also be "vadd4", QServe's form.

    Raises:
        ArgumentError: a tile that does not fit the registers, fewer than two stages, operands other than 1 and 2.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    gemm = Gemm(n, k, group, out_dtype, dequantization, bias)
    bm, wgs, rb = block_tokens, warpgroups, row_blocks
    if operands not in (1, 2):
        raise ArgumentError("operands", operands, "must be 1 or 2 sets of registers", "leave it out")
    check_tile(Basic(bm, wgs, rb, stages, operands=operands))
    cta_blocks = wgs * rb
    ct, nacc = wgs * 128, bm // 2
    tiles = tile_macros(
        gemm, block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks, flags=wgs, raster=raster, stages=stages
    )
    steps, rings, out = tiles.steps, tiles.rings, tiles.out
    source = prelude(*PRIMITIVES, extra=(gemm.converter.device_source,))
    M, G = T.dynamic("m"), T.dynamic("grid")

    @T.macro
    def fetch(X, W, Xs, Ws, full, p, at, c, ring, weights, cta, sk, m, tx):
        """One warp: the unit that the CTA needs `stages - 1` units from now, unless there is none."""
        if at.segment[0] < p.all[0]:
            steps.load_tokens(X, Xs, full, ring.stage[0], c, at.k[0])
            if T.And(tx == 0, weights):
                steps.load_weights(W, Ws, full, ring.stage[0], c, at.k[0])
            T.barrier_arrive(full[ring.stage[0]])
            rings.advance(ring)
            at.k[0] = at.k[0] + 1
            if at.k[0] == c.k1[0]:
                at.segment[0] = at.segment[0] + 1
                if at.segment[0] < p.all[0]:
                    tiles.segment(p, c, at.segment[0], cta, G, sk, m)
                    at.k[0] = c.k0[0]

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((gemm.units, gemm.row_blocks, gemm.unit_words), "int32"),
        S: T.Tensor((gemm.row_blocks * 64,), "float32"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((M,), "int32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((G, cta_blocks, bm // 8, 128, 4), "int32"),
        SEM: T.Tensor((G, wgs), "int32"),
        Y: T.Tensor((M, n), out_dtype),
        sk: T.int32,
    ):
        with T.Kernel(G, threads=ct, prelude=source) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, cta_blocks, gemm.unit_words), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm))), out_dtype)
            Fs = T.alloc_shared((wgs, bm), "float32")
            Rs = T.alloc_shared((wgs, bm if gemm.unsigned else 1), "int32")
            full = T.alloc_barrier([32] * stages)
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((gemm.groups,), "uint32")
            codes = steps.registers()
            a = T.alloc_local((8 * operands,), "uint32")
            acc = T.alloc_local((rb * nacc,), "int32")
            to = out.state(Y, Os, Fs, Rs)
            desc = T.alloc_wgmma_desc()
            found = steps.places()
            p = plan_state()
            c = segment_state()
            ahead = segment_state()
            at = scalars("segment", "k", "early")
            ring = ring_state()
            fill = ring_state()
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            tx = T.get_thread_binding()
            wg = tx // 128
            wt = tx % 128
            rings.reset(ring)
            rings.reset(fill)
            T.pdl_trigger()
            tiles.plan(p, cta, G, sk, M)
            steps.find_tokens(found, desc, Xs, 0)
            steps.find_units(found, Ws, 0, wg * rb, wt)
            rings.find(full, None, ring, 0)
            at.segment[0] = 0
            tiles.segment(p, ahead, 0, cta, G, sk, M)
            at.k[0] = ahead.k0[0]
            at.early[0] = T.if_then_else(p.all[0] > 0, T.min(ahead.k1[0] - ahead.k0[0], stages - 1), 0)
            if tx == 0:  # weights do not depend on the kernel before: fetch them while it still runs
                for i in T.serial(at.early[0]):
                    steps.load_weights(W, Ws, full, i, ahead, ahead.k0[0] + i)
            T.pdl_sync()
            if tx < 32:
                for i in T.serial(stages - 1):
                    fetch(X, W, Xs, Ws, full, p, at, ahead, fill, i >= at.early[0], cta, sk, M, tx)
            for seg in T.serial(p.all[0]):
                tiles.segment(p, c, seg, cta, G, sk, M)
                out.fetch(S, XS, RS, B, to, c, wg, wt)
                for i in T.unroll(rb * nacc):
                    acc[i] = 0
                for _ in T.serial(c.k1[0] - c.k0[0]):
                    rings.wait(ring)
                    tile = steps.tokens(found, ring.stage[0])
                    for r in T.unroll(rb):
                        steps.load_unit(found, w, u, ring.stage[0], r)
                        for h in T.unroll(2):
                            steps.convert(w, h * 4, u, a, h * 8 * (operands - 1), codes, h)
                            steps.multiply(a, h * 8 * (operands - 1), acc, tile, r, h)
                            if r == 0 and h == 0:
                                T.warpgroup_wait(1)  # the products on the stage before are complete
                                T.sync_threads()  # in every warpgroup: the stage is free
                                if tx < 32:
                                    fetch(X, W, Xs, Ws, full, p, at, ahead, fill, True, cta, sk, M, tx)
                            T.warpgroup_wait(operands - 1)
                    rings.advance(ring)
                T.warpgroup_wait(0)
                T.warpgroup_fence_operand(acc, num_regs=rb * nacc)
                tiles.finish(WS, SEM, acc, to, c, cta, G, sk, wg, wt)

    return main
