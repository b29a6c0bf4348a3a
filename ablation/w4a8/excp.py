"""Tile program on wgmma (sm_90a), LiquidGEMM's explicit coarse-grained pipeline: load, convert and multiply apart.

One warp copies (X as a 128-byte-swizzled TMA tile, weights as one 1-D bulk copy), a warpgroup converts, one or two
warpgroups multiply. Converted weights pass through shared memory: the converting warpgroup stores the fragments of 64
rows by 128 k with stmatrix, swizzled by 128 bytes as a K-major wgmma operand, and both operands of the product are
descriptors. Two rings join the three roles, each with full and empty mbarriers: the copied stages (read by converters
and, for X, by multipliers) and the converted ones. The program exists to be compared with stream_k.py, where each
warpgroup keeps what it converts in registers.

Stream-K shares, the order of sums and the epilogue are those of stream_k.py; its sums are the same bits.

A copied stage is given back by the converters when its words went through stmatrix, by the multipliers when the
products on it were waited for.
"""

from types import SimpleNamespace

from terrazzo.ablation.w4a8.schedules import Excp
from terrazzo.ablation.w4a8.tiles import PRIMITIVES, tile_macros
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.tiles.calls import stmatrix4, syncwarp
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS, check_tile
from terrazzo.ops.tiles.scheduler import plan_state, ring_macros, ring_state, scalars, segment_state
from terrazzo.ops.tiles.staged_rows import out_tokens, staged

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
REGISTERS = {1: (40, 152, 240), 2: (40, 120, 176)}  # warpgroups that multiply -> of a loader, a converter, a multiplier
BLOCK_BYTES = 64 * UNIT_K  # converted: 64 rows by 128 k


def role_macros(
    gemm: Gemm, steps: SimpleNamespace, *, block_tokens: int, row_blocks: int, cta_blocks: int
) -> SimpleNamespace:
    """Macros `convert_stage`, of the warpgroup that converts, and `multiply`, of those that multiply."""
    import tilelang.language as T

    bm, rb, nacc = block_tokens, row_blocks, block_tokens // 2
    a_type = "uint8" if gemm.unsigned else "int8"

    @T.macro
    def convert_stage(at, As, w, u, a, codes, stage, to, wt):
        """The converters' warpgroup: every unit of a copied stage, as K-major operands in stage `to`."""
        lane = wt % 32
        for b in T.unroll(cta_blocks):
            steps.load_unit(at, w, u, stage, b)
            for h in T.unroll(2):
                steps.convert(w, h * 4, u, a, h * 8, codes, h)
                for e in T.unroll(2):  # lanes 8i .. 8i + 7 name the rows of register i: row half i % 2, k half i / 2
                    stmatrix4(
                        As[
                            to * cta_blocks + b,
                            wt // 32 * 16 + lane // 8 % 2 * 8 + lane % 8,
                            (h * 2 + e) * 32 + lane // 16 * 16,
                        ],
                        a[h * 8 + e * 4],
                    )

    @T.macro
    def multiply(acc, a_desc, desc, stage, to, wg):
        """A warpgroup: its rows by 128 k, as one group."""
        T.warpgroup_fence_operand(acc, num_regs=rb * nacc)
        T.warpgroup_arrive()
        for r in T.unroll(rb):
            for e in T.unroll(4):
                T.ptx_wgmma_ss(
                    "int32", f"m64n{bm}k32", True, True, a_type, "int8", "int32",
                    a_desc.data, (to * cta_blocks + wg * rb + r) * (BLOCK_BYTES // 16) + e * 2,
                    desc.data, stage * (bm * UNIT_K // 16) + e * 2,
                    acc.data, r * nacc, T.bool(True), 1, 1,
                )  # fmt: skip
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(acc, num_regs=rb * nacc)

    return SimpleNamespace(convert_stage=convert_stage, multiply=multiply)


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
    operands: int = 2,
):
    """The prim_func `main(X, W, S, XS, RS, B, WS, SEM, Y, sk)`, arguments as in stream_k.build without experts.

    Args:
        warpgroups: those that multiply. operands: stages of converted weights.

    Raises:
        ArgumentError: a tile that does not fit the registers, fewer than two stages, no stage of converted weights.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    gemm = Gemm(n, k, group, out_dtype, dequantization, bias)
    bm, wgs, rb = block_tokens, warpgroups, row_blocks
    if operands < 1:
        raise ArgumentError("operands", operands, "must be at least 1 stage of converted weights", "leave it out")
    check_tile(Excp(bm, wgs, rb, stages, operands=operands))
    cta_blocks = wgs * rb
    ct, nacc = wgs * 128, bm // 2
    tiles = tile_macros(
        gemm, block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks, flags=wgs, raster=raster, stages=stages
    )
    steps, rings, out = tiles.steps, tiles.rings, tiles.out
    made = ring_macros(stages=operands)
    source = prelude(*PRIMITIVES, extra=(gemm.converter.device_source,))
    M, G = T.dynamic("m"), T.dynamic("grid")

    roles = role_macros(gemm, steps, block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks)

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
        with T.Kernel(G, threads=ct + 256, prelude=source) as cta:
            Xs = T.alloc_shared((stages, bm, UNIT_K), "int8")
            As = T.alloc_shared((operands * cta_blocks, 64, UNIT_K), "int8")
            Ws = T.alloc_shared((stages, cta_blocks, gemm.unit_words), "int32")
            Os = T.alloc_shared((wgs, staged(gemm.out_bytes, out_tokens(bm))), out_dtype)
            Fs = T.alloc_shared((wgs, bm), "float32")
            Rs = T.alloc_shared((wgs, bm if gemm.unsigned else 1), "int32")
            full = T.alloc_barrier([32] * stages)
            empty = T.alloc_barrier([wgs * 4 + 4] * stages)
            converted = T.alloc_barrier([4] * operands)
            used_up = T.alloc_barrier([wgs * 4] * operands)
            w = T.alloc_local((8,), "uint32")
            u = T.alloc_local((gemm.groups,), "uint32")
            codes = steps.registers()
            a = T.alloc_local((16,), "uint32")
            acc = T.alloc_local((rb * nacc,), "int32")
            to = out.state(Y, Os, Fs, Rs)
            desc, a_desc = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
            at = steps.places()
            p = plan_state()
            c = segment_state()
            ring, made_ring = ring_state(), ring_state()
            T.annotate_layout({Xs: make_full_bank_swizzled_layout(Xs), As: make_full_bank_swizzled_layout(As)})
            tx = T.get_thread_binding()
            lane = tx % 32
            rings.reset(ring)
            made.reset(made_ring)
            T.pdl_trigger()
            tiles.plan(p, cta, G, sk, M)
            if tx >= ct + 128:
                T.dec_max_nreg(REGISTERS[wgs][0])
                if tx < ct + 160:
                    io = SimpleNamespace(
                        X=X, W=W, Xs=Xs, Ws=Ws, full=full, empty=empty, ring=ring, worker=cta, base=0,
                        leader=tx == ct + 128, ahead=scalars("units").units,
                    )  # fmt: skip
                    tiles.feed(io, p, c, G, sk, M)
            else:
                if tx >= ct:
                    T.dec_max_nreg(REGISTERS[wgs][1])
                    steps.find_units(at, Ws, 0, 0, tx - ct)
                    rings.find(full, empty, ring, 0)
                    for seg in T.serial(p.all[0]):
                        tiles.segment(p, c, seg, cta, G, sk, M)
                        for _ in T.serial(c.k1[0] - c.k0[0]):
                            rings.wait(ring)
                            made.acquire(used_up, made_ring)
                            roles.convert_stage(at, As, w, u, a, codes, ring.stage[0], made_ring.stage[0], tx - ct)
                            T.fence_proxy_async()  # wgmma reads through the asynchronous proxy
                            syncwarp()
                            if lane == 0:
                                T.barrier_arrive(converted[made_ring.stage[0]])
                                rings.give_back(ring, ring.stage[0])
                            rings.advance(ring)
                            made.advance(made_ring)
                else:
                    T.inc_max_nreg(REGISTERS[wgs][2])
                    wg = tx // 128
                    wt = tx % 128
                    T.initialize_wgmma_descriptor(desc, T.access_ptr(Xs[0, 0, 0], "r"), 1, 1, 64)
                    rings.find(full, empty, ring, 0)
                    made.find(converted, used_up, made_ring, 0)
                    T.initialize_wgmma_descriptor(a_desc, T.access_ptr(As[0, 0, 0], "r"), 1, 1, 64)
                    T.pdl_sync()
                    for seg in T.serial(p.all[0]):
                        tiles.segment(p, c, seg, cta, G, sk, M)
                        out.fetch(S, XS, RS, B, to, c, wg, wt)
                        for i in T.unroll(rb * nacc):
                            acc[i] = 0
                        for kb in T.serial(c.k1[0] - c.k0[0]):
                            rings.wait(ring)
                            made.wait(made_ring)
                            roles.multiply(acc, a_desc, desc, ring.stage[0], made_ring.stage[0], wg)
                            if operands == 1:
                                T.warpgroup_wait(0)
                                rings.advance(ring)
                                made.advance(made_ring)
                                rings.release(ring, lane == 0)
                                made.release(made_ring, lane == 0)
                            else:
                                T.warpgroup_wait(1)  # the products on the stages before are complete
                                rings.release(ring, T.And(lane == 0, kb > 0))
                                made.release(made_ring, T.And(lane == 0, kb > 0))
                                rings.advance(ring)
                                made.advance(made_ring)
                        T.warpgroup_wait(0)
                        T.warpgroup_fence_operand(acc, num_regs=rb * nacc)
                        if operands > 1:
                            rings.release(ring, lane == 0)
                            made.release(made_ring, lane == 0)
                        tiles.finish(WS, SEM, acc, to, c, cta, G, sk, wg, wt)

    return main
