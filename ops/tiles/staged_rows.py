"""From the sums of a warpgroup to rows of y, through shared memory.

The accumulator of a wgmma program is y^T: a thread holds two neighbouring tokens of rows g and g + 8, a warp 16 rows, a
warpgroup 64. All four warps stage some tokens, and what is stored of one of them is a whole line of y: by each warp
alone, 32 bytes of a token at a time, L1 took four times as many, and a tile of 256 rows by 128 tokens two microseconds.
Warps that may not wait for each other (tiles whose sum is parted) stage and store 16 tokens of their own rows.
"""

from types import SimpleNamespace
from typing import Any

from terrazzo.ops.tiles.calls import stmatrix4_trans, store_row

_PITCH = {2: 72, 4: 68}  # elements of a staged token of 64 rows: free of bank conflicts, 16-byte aligned
_WARP_PITCH = {2: 24, 4: 20}  # of 16 rows: stmatrix without conflicts, pairs of them as it is read


def out_tokens(block_tokens: int) -> int:
    """Tokens that a warpgroup stages at a time."""
    return next(t for t in (32, 16) if block_tokens % t == 0)


def staged(out_bytes: int, tokens: int, *, alone: bool = False) -> int:
    """Elements of a warpgroup's buffer for `tokens` tokens, padding included; with `alone`, also for 16 tokens of each
    warp's own rows."""
    return max(tokens * _PITCH[out_bytes], 4 * 16 * _WARP_PITCH[out_bytes] if alone else 0)


def row_macros(*, n: int, out_dtype: str, out_bytes: int, whole: bool | None = None) -> SimpleNamespace:
    """Functions `place` and `put`, macro `write`.

    Os [warpgroups, staged] in the dtype of y belongs to the program. `alone`: of a warp's own rows; else of the
    warpgroup's. `whole`: whether rows of y are whole 16-byte pieces; None: n, a number, says it.
    """
    import tilelang.language as T

    if whole is None:
        whole = n * out_bytes % 16 == 0
    chunk = 16 // out_bytes  # elements of 16 bytes

    def pitch(alone: bool) -> int:
        return (_WARP_PITCH if alone else _PITCH)[out_bytes]

    def corner(warp: Any, alone: bool) -> Any:
        """Where a warp's part of the buffer begins."""
        return warp * (16 * pitch(True)) if alone else warp * 16

    def place(warp: Any, token: Any, row: Any, alone: bool) -> Any:
        """Of a staged value, 32-bit results: row 0..15 of the warp."""
        return corner(warp, alone) + token * pitch(alone) + row

    def put(Os: Any, wg: Any, warp: Any, lane: Any, q: int, words: Any, alone: bool) -> Any:
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

    return SimpleNamespace(place=place, put=put, write=write)
