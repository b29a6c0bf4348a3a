"""Tile program on wgmma (sm_90a): stream_k.py's pipeline with a tile for each warpgroup instead of halves of one.

LiquidGEMM's other reading ("ping-pong"): a warpgroup that converts and multiplies takes whole tiles of 64 * row_blocks
rows by `block_tokens` tokens, from a ring that a producer warp of its own fills. Nothing couples the warpgroups of a
CTA but the SM's schedulers, so one's conversion, or its epilogue, runs beside another's products; tokens are copied
once for each of them. To the work partition a warpgroup is a CTA: number cta * warpgroups + wg of grid * warpgroups.

The order of sums and the epilogue are those of stream_k.py; its sums are the same bits. A stage is released when the
wgmmas that read it were waited for.
"""

from types import SimpleNamespace

from terrazzo.ablation.w4a8.schedules import PingPong
from terrazzo.ablation.w4a8.tiles import PRIMITIVES, tile_macros
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, REGISTERS, check_tile
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
):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y, sk)`, arguments as in stream_k.build without experts, but WS
    int32 [grid * warpgroups, row_blocks, block_tokens / 8, 128, 4] and SEM int32 [grid * warpgroups, 1].

    Raises:
        ArgumentError: fewer than two warpgroups, a tile that does not fit the registers, fewer than two stages.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    gemm = Gemm(n, k, group, out_dtype, dequantization, bias)
    bm, wgs, rb = block_tokens, warpgroups, row_blocks
    if wgs not in (2, 3):
        raise ArgumentError("warpgroups", wgs, "must be 2 or 3, each with a tile", "take the program stream_k")
    check_tile(PingPong(bm, wgs, rb, stages))
    ct, nacc = wgs * 128, bm // 2
    tiles = tile_macros(gemm, block_tokens=bm, row_blocks=rb, cta_blocks=rb, flags=0, raster=raster, stages=stages)
    steps, rings, out = tiles.steps, tiles.rings, tiles.out
    source = prelude(*PRIMITIVES, extra=(gemm.converter.device_source,))
    M, G = T.dynamic("m"), T.dynamic("grid")

    @T.macro
    def begin(p, at, cta, wg, sk, m):
        """The plan of warpgroup `wg`, for itself or for the warp that feeds it."""
        at.base[0] = wg * stages
        at.worker[0] = cta * wgs + wg
        tiles.plan(p, at.worker[0], G * wgs, sk, m)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), "int8"),
        W: T.Tensor((gemm.units, gemm.row_blocks, gemm.unit_words), "int32"),
        S: T.Tensor((gemm.row_blocks * 64,), "float32"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((M,), "int32"),
        B: T.Tensor((n if bias else 1,), "float32"),
        WS: T.Tensor((G * wgs, rb, bm // 8, 128, 4), "int32"),
        SEM: T.Tensor((G * wgs, 1), "int32"),
        Y: T.Tensor((M, n), out_dtype),
        sk: T.int32,
    ):
        with T.Kernel(G, threads=ct + 128, prelude=source) as cta:
            Xs = T.alloc_shared((wgs * stages, bm, UNIT_K), "int8")
            Ws = T.alloc_shared((wgs * stages, rb, gemm.unit_words), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm))), out_dtype)
            Fs = T.alloc_shared((wgs, bm), "float32")
            Rs = T.alloc_shared((wgs, bm if gemm.unsigned else 1), "int32")
            full = T.alloc_barrier([32] * (wgs * stages))
            empty = T.alloc_barrier([4] * (wgs * stages))
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((gemm.groups,), "uint32")
            codes = steps.registers()
            a = T.alloc_local((16,), "uint32")
            acc = T.alloc_local((rb * nacc,), "int32")
            to = out.state(Y, Os, Fs, Rs)
            desc = T.alloc_wgmma_desc()
            own = steps.places()
            p = plan_state()
            c = segment_state()
            ring = ring_state()
            at = scalars("ahead", "base", "worker")
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs)})
            tx = T.get_thread_binding()
            lane = tx % 32
            rings.reset(ring)
            T.pdl_trigger()
            if tx >= ct:
                T.dec_max_nreg(REGISTERS[wgs, 1][0])
                if tx < ct + wgs * 32:
                    begin(p, at, cta, (tx - ct) // 32, sk, M)
                    io = SimpleNamespace(
                        X=X, W=W, Xs=Xs, Ws=Ws, full=full, empty=empty, ring=ring, worker=at.worker[0],
                        base=at.base[0], leader=lane == 0, ahead=at.ahead,
                    )  # fmt: skip
                    tiles.feed(io, p, c, G * wgs, sk, M)
            else:
                T.inc_max_nreg(REGISTERS[wgs, 1][1])
                wg = tx // 128
                wt = tx % 128
                begin(p, at, cta, wg, sk, M)
                steps.find_tokens(own, desc, Xs, at.base[0])
                steps.find_units(own, Ws, at.base[0], 0, wt)
                rings.find(full, empty, ring, at.base[0])
                T.pdl_sync()
                for seg in T.serial(p.all[0]):
                    tiles.segment(p, c, seg, at.worker[0], G * wgs, sk, M)
                    c.rows[0] = c.rows[0] - wg  # the epilogue adds the warpgroup's place in a common tile
                    out.fetch(S, XS, RS, B, to, c, wg, wt)
                    for i in T.unroll(rb * nacc):
                        acc[i] = 0
                    for kb in T.unroll(c.k1[0] - c.k0[0], unroll_factor=1):  # unrolled, it spills
                        rings.wait(ring)
                        tile = steps.tokens(own, ring.stage[0])
                        for r in T.unroll(rb):
                            steps.load_unit(own, w, u, ring.stage[0], r)
                            for h in T.unroll(2):
                                steps.convert(w, h * 4, u, a, h * 8, codes, h)
                                steps.multiply(a, h * 8, acc, tile, r, h)
                                T.warpgroup_wait(1)
                                if r == 0 and h == 0:  # the wgmmas on the stage before are complete
                                    rings.release(ring, T.And(lane == 0, kb > 0))
                        rings.advance(ring)
                    T.warpgroup_wait(0)
                    T.warpgroup_fence_operand(acc, num_regs=rb * nacc)
                    rings.release(ring, lane == 0)
                    tiles.finish(WS, SEM, acc, to, c, at.worker[0], G * wgs, sk, wg, wt)

    return main
