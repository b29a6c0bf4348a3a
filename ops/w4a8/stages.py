"""What the wgmma pipelines basic, excp and pingpong share: how a ring stage is filled and used, how a tile ends."""

from types import SimpleNamespace

from terrazzo.ops.tile_scheduler import expert_macros, partition_macros, ring_macros, share_macros
from terrazzo.ops.w4a8.epilogue import store_macros
from terrazzo.ops.w4a8.operand import operand_macros
from terrazzo.ops.w4a8.problem import BLOCK_WORDS, UNIT_K, Gemm

PASS_CONFIGS = (  # the barriers and the bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)


PRIMITIVES = ("lds", "pack", "bulk", "stmatrix", "stmatrix_trans", "semaphore", "int8", "warpgroup")


def tile_macros(
    gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int, flags: int, raster: int, stages: int
) -> SimpleNamespace:
    """Macros `plan` (of a worker), `segment` and `finish`, those of a ring, `out` of the epilogue, and a stage's.

    A worker is a CTA with `flags` warpgroups that share a tile of `cta_blocks` row blocks, or (flags = 0) a warpgroup
    with tiles of its own.
    """
    import tilelang.language as T

    row_tiles = -(-gemm.row_blocks // cta_blocks)
    tokens = expert_macros(experts=0, block_tokens=block_tokens, units=gemm.units, row_tiles=row_tiles)
    tiles = partition_macros(units=gemm.units, row_tiles=row_tiles, raster=raster)
    shares = share_macros(
        vectors=block_tokens // 8, row_blocks=row_blocks, flags=max(flags, 1), dtype="int32", spare=0, apart=flags == 0
    )
    out = store_macros(gemm, block_tokens=block_tokens, row_blocks=row_blocks, cta_blocks=cta_blocks)

    @T.macro
    def plan(p, worker, workers, sk, m):
        tiles.plan(p, worker, workers, sk, T.ceildiv(m, block_tokens))

    @T.macro
    def segment(p, c, seg, worker, workers, sk, m):
        """The worker's segment `seg`: tile, k units, tokens."""
        tiles.segment(p, c, seg, worker, workers, sk, T.ceildiv(m, block_tokens))
        tokens.locate(None, c, m)

    @T.macro
    def finish(WS, SEM, Y, Os, Fs, Rs, acc, held, c, worker, workers, sk, wg, wt):
        """The end of a segment: its sums go to the tile's head, or the other shares join them and they are stored."""
        if c.leaves[0] == 1:
            shares.leave_share(WS, SEM, acc, worker, wg, wt)
        else:
            if c.adds[0] == 1:
                tiles.later_shares(c, worker, workers, sk)
                shares.add_shares(WS, SEM, acc, c.count[0], worker, wg, wt)
            out.store(Y, Os, Fs, Rs, acc, held, c, wg, wt)

    return SimpleNamespace(
        plan=plan,
        segment=segment,
        finish=finish,
        out=out,
        rings=ring_macros(stages=stages),
        steps=stage_macros(gemm, block_tokens=block_tokens, row_blocks=row_blocks, cta_blocks=cta_blocks),
    )


def stage_macros(gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int) -> SimpleNamespace:
    """Macros `load_weights`, `load_tokens`, `load_unit`, `convert`, `multiply`; `registers()` is convert's scratch.

    A stage holds 128 k of a tile: X int8 [block_tokens, 128], swizzled by 128 bytes, and the units of `cta_blocks` row
    blocks of which a warpgroup owns `row_blocks`.
    """
    import tilelang.language as T

    bm, nacc, unit_words = block_tokens, block_tokens // 2, gemm.unit_words
    operand = operand_macros(gemm)
    a_type = "uint8" if gemm.unsigned else "int8"

    @T.macro
    def load_weights(W, Ws, full, slot, c, kb):
        """One thread: the units of the tile's row blocks, words and parameters in one copy."""
        count = T.max(T.min(cta_blocks, gemm.row_blocks - c.rows[0] * cta_blocks), 0)
        T.mbarrier_expect_tx(full[slot], count * (unit_words * 4))
        if count > 0:
            T.call_extern(
                "handle",
                "tz_bulk",
                T.access_ptr(Ws[slot, 0, 0], "w", unit_words),
                T.access_ptr(W[kb, c.rows[0] * cta_blocks, 0], "r", unit_words),
                count * (unit_words * 4),
                T.access_ptr(full[slot], "rw", 1),
            )

    @T.macro
    def load_tokens(X, Xs, full, slot, c, kb):
        """One warp: the tile's tokens."""
        T.tma_copy(
            X[c.first[0] : c.first[0] + bm, kb * UNIT_K : kb * UNIT_K + UNIT_K],
            Xs[slot, :, :],
            barrier=full[slot],
            leader_scope_threads=32,
        )

    @T.macro
    def load_unit(Ws, w, u, slot, block, wt):
        """A thread's words of both 64 k of a row block, and the parameters of its rows g and g + 8 for each group."""
        for h in T.unroll(2):
            T.call_extern(
                "handle",
                "tz_lds128",
                T.access_ptr(w[h * 4], "w", 4),
                T.access_ptr(Ws[slot, block, h * BLOCK_WORDS + wt * 4], "r", 4),
            )
        for q in T.unroll(gemm.groups):
            u[q] = T.call_extern(
                "uint32", "tz_lds32", T.access_ptr(Ws[slot, block, 2 * BLOCK_WORDS + q * 32 + wt // 4], "r", 1)
            )

    @T.macro
    def multiply(a, at, acc, desc, slot, r, h):
        """Two wgmma on 64 k, A in registers a[at .. at + 7], as one group."""
        T.warpgroup_fence_operand(a, at, 8)
        T.warpgroup_fence_operand(acc, r * nacc, nacc)
        T.warpgroup_arrive()
        for e in T.unroll(2):
            T.ptx_wgmma_rs(
                "int32", f"m64n{bm}k32", True, a_type, "int8", "int32",
                a.data, at + e * 4, desc.data, slot * (bm * UNIT_K // 16) + (h * 2 + e) * 2,
                acc.data, r * nacc, T.bool(True), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(acc, r * nacc, nacc)

    return SimpleNamespace(
        load_weights=load_weights,
        load_tokens=load_tokens,
        load_unit=load_unit,
        convert=operand.convert,
        registers=operand.registers,
        multiply=multiply,
    )
