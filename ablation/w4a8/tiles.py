"""What the compared pipelines share: tiles that a worker fills, adds up and stores, all of them in one way."""

from types import SimpleNamespace

from terrazzo.ops.linear.bytes.epilogue import store_macros
from terrazzo.ops.linear.bytes.operand import operand_macros
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.linear.bytes.stages import consumer_macros
from terrazzo.ops.tiles.calls import bulk, tma_tile, wgmma
from terrazzo.ops.tiles.scheduler import expert_macros, partition_macros, ring_macros
from terrazzo.ops.tiles.shares import finish_macros, share_macros

PRIMITIVES = (
    "lds", "place", "pack", "bulk", "stmatrix", "stmatrix_trans", "semaphore", "quotient", "int8", "rows_out",
    "warpgroup",
)  # fmt: skip


def tile_macros(
    gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int, flags: int, raster: int, stages: int
) -> SimpleNamespace:
    """Macros `plan` (of a worker), `segment`, `feed` and `finish`; `rings` of a ring, `out` of the epilogue, `steps` of
    a stage.

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
    rings = ring_macros(stages=stages)
    steps = stage_macros(gemm, block_tokens=block_tokens, cta_blocks=cta_blocks)
    out = store_macros(gemm, block_tokens=block_tokens, row_blocks=row_blocks, cta_blocks=cta_blocks)
    tail = finish_macros(
        tiles, shares, store=out.store, leaves=lambda c: c.leaves[0] == 1, adds=lambda c: c.adds[0] == 1
    )

    @T.macro
    def plan(p, worker, workers, sk, m):
        """The plan of a worker among `workers` for m tokens."""
        tiles.plan(p, worker, workers, sk, T.ceildiv(m, block_tokens))

    @T.macro
    def segment(p, c, seg, worker, workers, sk, m):
        """The worker's segment `seg`: tile, k units, tokens."""
        tiles.segment(p, c, seg, worker, workers, sk, T.ceildiv(m, block_tokens))
        tokens.locate(None, c, m)

    @T.macro
    def feed(io, p, c, workers, sk, m):
        """A warp fills the ring of a worker, tokens and weights of a stage together. Weights do not depend on the
        kernel before: those of the first stages come while it still runs.

        io: X, W, Xs, Ws, the barriers `full` and `empty`, `ring`; `worker`; `base`, its first stage; `leader`, whether
        this thread is the warp's first; `ahead`, one int32.
        """
        segment(p, c, 0, io.worker, workers, sk, m)
        io.ahead[0] = T.if_then_else(p.all[0] > 0, T.min(c.k1[0] - c.k0[0], stages), 0)
        if io.leader:
            for kb in T.serial(io.ahead[0]):
                steps.load_weights(io.W, io.Ws, io.full, io.base + kb, c, c.k0[0] + kb)
        T.pdl_sync()
        for seg in T.serial(p.all[0]):
            segment(p, c, seg, io.worker, workers, sk, m)
            for kb in T.serial(c.k1[0] - c.k0[0]):
                T.barrier_wait(io.empty[io.base + io.ring.stage[0]], io.ring.parity[0] ^ 1)
                steps.load_tokens(io.X, io.Xs, io.full, io.base + io.ring.stage[0], c, c.k0[0] + kb)
                if T.And(io.leader, T.Or(seg > 0, kb >= io.ahead[0])):
                    steps.load_weights(io.W, io.Ws, io.full, io.base + io.ring.stage[0], c, c.k0[0] + kb)
                T.barrier_arrive(io.full[io.base + io.ring.stage[0]])
                rings.advance(io.ring)

    return SimpleNamespace(
        plan=plan, segment=segment, feed=feed, finish=tail.finish_alone, out=out, rings=rings, steps=steps
    )


def stage_macros(gemm: Gemm, *, block_tokens: int, cta_blocks: int) -> SimpleNamespace:
    """Macros `load_weights`, `load_tokens`, `convert`, `multiply`, those of `consumer_macros`; `registers()` is
    convert's scratch.

    A stage holds 128 k of a tile: X, and the units of its `cta_blocks` row blocks.
    """
    import tilelang.language as T

    bm, nacc, unit_words = block_tokens, block_tokens // 2, gemm.unit_words
    operand = operand_macros(gemm)
    consumer = consumer_macros(block_tokens=bm, cta_blocks=cta_blocks, unit_words=unit_words, groups=gemm.groups)
    kinds = ("uint8" if gemm.unsigned else "int8", "int8")

    @T.macro
    def load_weights(W, Ws, full, slot, c, kb):
        """One thread: the units of the tile's row blocks, words and parameters in one copy."""
        count = T.max(T.min(cta_blocks, gemm.row_blocks - c.rows[0] * cta_blocks), 0)
        T.mbarrier_expect_tx(full[slot], count * (unit_words * 4))
        if count > 0:
            bulk(Ws[slot, 0, 0], W[kb, c.rows[0] * cta_blocks, 0], count * (unit_words * 4), full[slot])

    @T.macro
    def load_tokens(X, Xs, full, slot, c, kb):
        """One warp: the tile's tokens."""
        tma_tile(Xs, slot, X, c.first[0], kb * UNIT_K, full[slot])

    @T.macro
    def multiply(a, at, acc, x, r, h):
        """Two wgmma on 64 k, A in registers a[at .. at + 7], as one group; x: the stage's `tokens`."""
        T.warpgroup_fence_operand(a, at, 8)
        T.warpgroup_fence_operand(acc, r * nacc, nacc)
        T.warpgroup_arrive()
        for e in T.unroll(2):
            wgmma(bm, kinds, acc, r * nacc, a, at + e * 4, x, (h * 2 + e) * 2)
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(acc, r * nacc, nacc)

    return SimpleNamespace(
        load_weights=load_weights,
        load_tokens=load_tokens,
        convert=operand.convert,
        registers=operand.registers,
        multiply=multiply,
        **vars(consumer),
    )
