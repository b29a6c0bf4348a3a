"""What the programs on wgmma share: how a ring stage is filled and used.

The shared memory of a stage is X int8 [block_tokens, 128], swizzled by 128 bytes, and the units of the row blocks of a
tile, int32 [row blocks, unit words]; programs hold them for all stages in Xs and Ws.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from terrazzo.ops.linear.bytes.problem import BLOCK_WORDS, UNIT_K
from terrazzo.ops.tiles.calls import bulk, bulk_at, lds32, lds128, matrix, place


def fill_macros(
    rings: SimpleNamespace,
    *,
    row_blocks: int,
    cta_blocks: int,
    unit_words: int,
    unit: Callable[[SimpleNamespace, Any], Any] = lambda c, kb: kb,
    also: Callable[..., None] | None = None,
) -> SimpleNamespace:
    """Macro `fill_weights(io, c, kb)`: the warp of the weights fills a stage, for `each_unit` of the tile scheduler.

    Args:
        rings: of `ring_macros`. row_blocks: of 64 rows, of the weight; cta_blocks: of them, those of a tile.
        unit: expression of the first index of W [units, row_blocks, unit_words].
        also: macro of what comes with the units, called as `fill_weights` is, by one thread.

    `io` holds W, Ws, the barriers `full` and `empty`, `ring` and `leader`, whether this thread is the warp's first.
    """
    import tilelang.language as T

    known = isinstance(row_blocks, int)

    @T.macro
    def load_weights(io, c, kb):
        """One thread: the units of the tile's row blocks, words and parameters in one copy."""
        count = T.max(T.min(cta_blocks, row_blocks - c.rows[0] * cta_blocks), 0)
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * (unit_words * 4))
        if not known:
            bulk_at(
                io.Ws[io.ring.stage[0], 0, 0],
                io.W,
                (unit(c, kb) * row_blocks + c.rows[0] * cta_blocks) * (unit_words // 4),
                count * (unit_words * 4),
                io.full[io.ring.stage[0]],
            )
        elif count > 0:
            bulk(
                io.Ws[io.ring.stage[0], 0, 0],
                io.W[unit(c, kb), c.rows[0] * cta_blocks, 0],
                count * (unit_words * 4),
                io.full[io.ring.stage[0]],
            )

    @T.macro
    def fill_weights(io, c, kb):
        """One stage: waits for it, copies, arrives."""
        rings.acquire(io.empty, io.ring)
        if io.leader:
            load_weights(io, c, kb)
            if also is not None:
                also(io, c, kb)
            T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    return SimpleNamespace(fill_weights=fill_weights)


def consumer_macros(*, block_tokens: int, cta_blocks: int, unit_words: int, groups: int) -> SimpleNamespace:
    """What a consumer finds once and then reads by adding bytes: `places()`, its state, macros `find_tokens`,
    `find_units` and `load_unit`, and `tokens(at, stage)`, for `wgmma`, the tile of X in a stage.

    A unit is of 64 rows by 128 k: int32 [unit_words], words of its two 64 k and 32 parameters for each group. A stage
    counts from the one that was found.
    """
    import tilelang.language as T

    def places() -> SimpleNamespace:
        kinds = {"words": "uint32", "params": "uint32", "x": "uint64"}
        return SimpleNamespace(**{name: T.alloc_local((1,), kind) for name, kind in kinds.items()})

    @T.macro
    def find_tokens(at, desc, Xs, stage):
        """X, from this stage on; desc: the descriptor to be made of it."""
        T.initialize_wgmma_descriptor(desc, T.access_ptr(Xs[stage, 0, 0], "r"), 1, 1, 64)
        at.x[0] = matrix(desc)

    @T.macro
    def find_units(at, Ws, stage, block, wt):
        """A thread's words and parameters, from this stage and row block of the tile on."""
        at.words[0] = place(Ws[stage, block, wt * 4])
        at.params[0] = place(Ws[stage, block, 2 * BLOCK_WORDS + wt // 4])

    @T.macro
    def load_unit(at, w, u, stage, r):
        """A thread's words of both 64 k of a row block, and the parameters of its rows g and g + 8 for each group."""
        first = T.cast(stage, "uint32") * T.uint32(cta_blocks * unit_words * 4) + T.uint32(r * unit_words * 4)
        for h in T.unroll(2):
            lds128(w[h * 4], at.words[0] + first + T.uint32(h * BLOCK_WORDS * 4))
        for q in T.unroll(groups):
            u[q] = lds32(at.params[0] + first + T.uint32(q * 32 * 4))

    def tokens(at: SimpleNamespace, stage: Any) -> Any:
        step = T.cast(stage, "uint32") * T.uint32(block_tokens * UNIT_K // 16)
        return at.x[0] + T.cast(step, "uint64")

    return SimpleNamespace(
        places=places, find_tokens=find_tokens, find_units=find_units, load_unit=load_unit, tokens=tokens
    )
