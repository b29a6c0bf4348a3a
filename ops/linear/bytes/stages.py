"""What the programs on wgmma share: how a ring stage is filled and used.

The shared memory of a stage is X int8 [block_tokens, 128], swizzled by 128 bytes, and the units of the row blocks of a
tile, int32 [row blocks, unit words]; programs hold them for all stages in Xs and Ws.
"""

from dataclasses import dataclass

from terrazzo.ops.linear.bytes.problem import BLOCK_WORDS, UNIT_K
from terrazzo.ops.tiles.calls import bulk, bulk_at, lds32, lds128, matrix, place, tma_tile
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.scheduler import Ring
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro


def fill_macros(
    rings: Ring, *, row_blocks: Expr, cta_blocks: int, unit_words: int, unit: Call = lambda c, kb: kb,
    also: Macro | None = None, also_tokens: Macro | None = None, ends: bool = True,
) -> tuple[Macro, Macro]:  # fmt: skip
    """Macros `fill_weights(io, c, kb)` and `fill_tokens`: the warps of the weights and of X fill a stage, for
    `each_unit` of the tile scheduler.

    Args:
        row_blocks: of 64 rows, of the weight; cta_blocks: of them, those of a tile.
        unit: expression of the first index of W [units, row_blocks, unit_words].
        also, also_tokens: macros of what comes with the units and the tokens, called as these are, by one thread.
        ends: whether the tokens of a tile end at `c.end`; else with X.

    `io` holds W, Ws, X, Xs, the barriers `full` and `empty`, `ring`, `leader` and `leader_of_tokens`, whether this
    thread is a warp's first.
    """
    known = isinstance(row_blocks, int)

    @T.macro
    def load_weights(io, c, kb):
        """One thread: the units of the tile's row blocks, words and parameters in one copy."""
        count = T.max(T.min(cta_blocks, row_blocks - c.rows[0] * cta_blocks), 0)
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * (unit_words * 4))
        if not known:
            bulk_at(
                io.Ws[io.ring.stage[0], 0, 0], io.W,
                (unit(c, kb) * row_blocks + c.rows[0] * cta_blocks) * (unit_words // 4), count * (unit_words * 4),
                io.full[io.ring.stage[0]],
            )  # fmt: skip
        elif count > 0:
            bulk(
                io.Ws[io.ring.stage[0], 0, 0], io.W[unit(c, kb), c.rows[0] * cta_blocks, 0], count * (unit_words * 4),
                io.full[io.ring.stage[0]],
            )  # fmt: skip

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

    @T.macro
    def fill_tokens(io, c, kb):
        """The same of X."""
        rings.acquire(io.empty, io.ring)
        at = io.Xs, io.ring.stage[0], io.X, c.first[0], kb * UNIT_K, io.full[io.ring.stage[0]]
        tma_tile(*at, c.end[0] if ends else None)
        if also_tokens is not None:
            if io.leader_of_tokens:
                also_tokens(io, c, kb)
        T.barrier_arrive(io.full[io.ring.stage[0]])
        rings.advance(io.ring)

    return fill_weights, fill_tokens


@dataclass(frozen=True)
class Consumer:
    """What a consumer finds once and then reads by adding bytes.

    Attributes:
        places: function of no arguments, its state.
        find, find_units: macros.
        load: macro of a unit; or function `rows(at, stage, r)`, where units are operands as they lie.
        tokens: function `tokens(at, stage)`, for wgmma, the tile of X in a stage.
    """

    places: Call
    find: Macro
    find_units: Macro
    load: Call
    tokens: Call


@dataclass(frozen=True)
class Form:
    """How scales enter a product on wgmma (forms.py).

    Attributes:
        sums: dtype of a tile's sums.
        step: macro `step(io, x, place, r, h, free)`, 64 k of a row block; `free` says whether this lane gives the stage
            before back, which a step does when the wgmmas on it are complete. Of units that are operands as they lie
            `step(io, w, x, place, r, free)`, 128 k.
        registers: the converter's. group_sums: registers for sums of a group (1: none).
        pieces: products of a tile's tokens.
        start, settle_last: macros of `io`, at a tile's begin and end, there with the last stage. `io` holds w, u, a,
            codes, acc, part and f; of tokens with scales of groups also Ts, words, powers and lane.
        settles: whether a step gives the stage back that it used.
    """

    sums: str
    step: Macro
    registers: Call | None = None
    group_sums: int = 1
    pieces: int = 1
    start: Macro | None = None
    settle_last: Macro | None = None
    settles: bool = False


def consumer_macros(*, block_tokens: int, cta_blocks: int, unit_words: int, groups: int) -> Consumer:
    """Of units that are converted.

    A unit is of 64 rows by 128 k: int32 [unit_words], words of its two 64 k and 32 parameters for each group. A stage
    counts from the one that was found.
    """

    def places() -> Buffers:
        return Buffers(words=(1, "uint32"), params=(1, "uint32"), x=(1, "uint64"))

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

    def tokens(at: Buffers, stage: Expr) -> Expr:
        step = T.cast(stage, "uint32") * T.uint32(block_tokens * UNIT_K // 16)
        return at.x[0] + T.cast(step, "uint64")

    return Consumer(places, find_tokens, find_units, load_unit, tokens)
