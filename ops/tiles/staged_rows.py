"""From the sums of a warpgroup to rows of y, through shared memory.

The accumulator of a wgmma program is y^T: a thread holds two neighbouring tokens of rows g and g + 8, a warp 16 rows, a
warpgroup 64. All four warps stage some tokens, and what is stored of one of them is a whole line of y: by each warp
alone, 32 bytes of a token at a time, L1 took four times as many, and a tile of 256 rows by 128 tokens two microseconds.
Warps that may not wait for each other (tiles whose sum is parted) stage and store 16 tokens of their own rows.
"""

from dataclasses import dataclass

from terrazzo.ops.tiles.calls import has, stmatrix4_trans, store_row, syncwarp, wg_sync
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro, Place

_PITCH = {2: 72, 4: 68}  # elements of a staged token of 64 rows: free of bank conflicts, 16-byte aligned
_WARP_PITCH = {2: 24, 4: 20}  # of 16 rows: stmatrix without conflicts, pairs of them as it is read


def out_tokens(block_tokens: int) -> int:
    """Tokens that a warpgroup stages at a time."""
    return next(t for t in (32, 16) if block_tokens % t == 0)


def staged(out_bytes: int, tokens: int, *, alone: bool = False) -> int:
    """Elements of a warpgroup's buffer for `tokens` tokens, padding included; with `alone`, also for 16 tokens of each
    warp's own rows."""
    return max(tokens * _PITCH[out_bytes], 4 * 16 * _WARP_PITCH[out_bytes] if alone else 0)


@dataclass(frozen=True)
class Rows:
    """Of `row_macros`: functions that stage, and the macro that stores."""

    place: Call
    put: Call
    write: Macro


def row_macros(*, n: int, out_dtype: str, out_bytes: int, whole: bool | None = None) -> Rows:
    """Through a buffer of the program's.

    Os [warpgroups, staged] in the dtype of y belongs to the program. `alone`: of a warp's own rows; else of the
    warpgroup's. `whole`: whether rows of y are whole 16-byte pieces; None: n, a number, says it.
    """
    if whole is None:
        whole = n * out_bytes % 16 == 0
    chunk = 16 // out_bytes  # elements of 16 bytes

    def pitch(alone: bool) -> int:
        return (_WARP_PITCH if alone else _PITCH)[out_bytes]

    def corner(warp: Expr, alone: bool) -> Expr:
        """Where a warp's part of the buffer begins."""
        return warp * (16 * pitch(True)) if alone else warp * 16

    def place(warp: Expr, token: Expr, row: Place, alone: bool) -> Expr:
        """Of a staged value, 32-bit results: row 0..15 of the warp."""
        return corner(warp, alone) + token * pitch(alone) + row

    def put(Os: Place, wg: Expr, warp: Expr, lane: Expr, q: int, words: Place, alone: bool) -> Expr:
        """16-bit results: tokens 16 q .. 16 q + 15 of a warp's rows, from the four words of each thread."""
        at = place(warp, q * 16 + lane // 16 * 8 + lane % 8, lane // 8 % 2 * 8, alone)
        return stmatrix4_trans(Os[wg, at], *(words[e] for e in range(4)))

    @T.macro
    def write(Y, Os, wg, warp, lane, first, end, row0, count, alone):
        """The staged tokens, `count` of them from row `first` of y on and before `end`, to columns from `row0` on: of
        the warp, or of the warpgroup."""
        lanes = (16 if alone else 64) // chunk  # 16-byte pieces of a token
        threads = 32 if alone else 128
        thread = lane if alone else warp * 32 + lane
        for e in T.unroll(count * lanes // threads):
            token = (e * threads + thread) // lanes
            column = (e * threads + thread) % lanes * chunk
            if T.And(first + token < end, row0 + column < n):
                at = corner(warp if alone else 0, alone) + token * pitch(alone) + column
                store_row(out_dtype, whole, Y, first + token, n, row0 + column, Os[wg, at])

    return Rows(place, put, write)


@dataclass(frozen=True)
class Out:
    """Macros by which the sums of a tile become rows of y.

    Attributes:
        store(to, acc, c, wg, wt): a whole tile; `to` is what the program hands to `finish` for it.
        store_slice(to, acc, c, x, wg, wt): of each warp's 16 rows, 16 tokens for each bit of x.units (`slice_state`),
            counted through the row blocks.
        store_share(to, acc, c, share, units, wg, wt): the share-th part of a warpgroup's sums, `units` units of 16
            tokens, counted alike.
        prepare(to, wg, wt): before the first slice or share; None: nothing.
    """

    store: Macro
    store_slice: Macro | None = None
    store_share: Macro | None = None
    prepare: Macro | None = None


def store_macros(
    rows: Rows, stage: Macro, *, block_tokens: int, row_blocks: int, cta_blocks: int, step: int = 0,
    enter: Macro | None = None, prepare: Macro | None = None,
) -> Out:  # fmt: skip
    """Of `row_blocks` row blocks of 64 of a warpgroup, whose tile has `cta_blocks`.

    Args:
        stage: macro `stage(to, acc, r, first, q, wg, warp, lane, alone)`: 16 tokens of row block r, from token `first`
            + 16 q of the tile on, into `to.Os`; `alone` as of `row_macros`.
        enter: macro `enter(to, acc, c, row, r)`, before row block r is staged, of rows `row` and `row` + 8. None:
            nothing.
        prepare: of the result; a barrier of the warpgroup.
        step: tokens that a warpgroup stages at a time; 0: `out_tokens`.
    """
    step = step or out_tokens(block_tokens)

    def first_row(c: Buffers, wg: Expr, r: Expr) -> Expr:
        return (c.rows[0] * cta_blocks + wg * row_blocks + r) * 64

    @T.macro
    def store(to, acc, c, wg, wt):
        warp = wt // 32
        lane = wt % 32
        if prepare is not None:
            prepare(to, wg, wt)
        for r in T.unroll(row_blocks):
            row0 = first_row(c, wg, r)
            if enter is not None:
                enter(to, acc, c, row0 + warp * 16 + lane // 4, r)
            for b in T.unroll(block_tokens // step):
                if prepare is None or r + b > 0:
                    wg_sync(wg)
                for q in T.unroll(step // 16):
                    stage(to, acc, r, b * step, q, wg, warp, lane, False)
                wg_sync(wg)
                rows.write(to.Y, to.Os, wg, warp, lane, c.first[0] + b * step, c.end[0], row0, step, False)

    @T.macro
    def store_slice(to, acc, c, x, wg, wt):
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(row_blocks):
            row0 = first_row(c, wg, r) + warp * 16
            if enter is not None:
                enter(to, acc, c, row0 + lane // 4, r)
            for b in T.unroll(block_tokens // 16):
                if has(x.units[0], r * (block_tokens // 16) + b):
                    syncwarp()
                    stage(to, acc, r, b * 16, 0, wg, warp, lane, True)
                    syncwarp()
                    rows.write(to.Y, to.Os, wg, warp, lane, c.first[0] + b * 16, c.end[0], row0, 16, True)

    @T.macro
    def store_share(to, acc, c, share, units, wg, wt):
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(row_blocks):
            row0 = first_row(c, wg, r)
            if enter is not None:
                enter(to, acc, c, row0 + warp * 16 + lane // 4, r)
            for b in T.unroll(block_tokens // 16):
                if share == (r * (block_tokens // 16) + b) // units:
                    wg_sync(wg)
                    stage(to, acc, r, b * 16, 0, wg, warp, lane, False)
                    wg_sync(wg)
                    rows.write(to.Y, to.Os, wg, warp, lane, c.first[0] + b * 16, c.end[0], row0, 16, False)

    return Out(store, store_slice, store_share, prepare)
