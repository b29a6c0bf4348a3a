"""Where sums wait for their way to y: no two of them in one place, none outside the buffer, few bank conflicts."""

import itertools

import pytest
from terrazzo.ops.tiles import staged_rows

CASES = [(size, tokens, alone) for size in (2, 4) for tokens in (16, 32) for alone in (False, True)]


@pytest.mark.parametrize("size, tokens, alone", CASES)
def test_places(size, tokens, alone):
    """A buffer for `tokens` tokens holds the rows of all warps; of a warp's own rows it holds 16 tokens."""
    macros = staged_rows.row_macros(n=64, out_dtype="float16" if size == 2 else "int32", out_bytes=size)
    staged = [
        macros.place(warp, token, row, alone)
        for warp, token, row in itertools.product(range(4), range(16 if alone else tokens), range(16))
    ]
    assert len(set(staged)) == len(staged)
    assert max(staged) < staged_rows.staged(size, tokens, alone=alone)


@pytest.mark.parametrize("size, tokens, alone", CASES)
def test_pieces_are_aligned_and_in_other_banks(size, tokens, alone):
    """16 bytes by each of eight lanes: rows of stmatrix (eight tokens, eight values), and as they are read for y. A
    warp that reads its own rows alone finds pairs in the same banks: no pitch is free of conflicts for both."""
    macros = staged_rows.row_macros(n=64, out_dtype="float16" if size == 2 else "int32", out_bytes=size)
    chunk, lanes = 16 // size, (16 if alone else 64) * size // 16

    def at(token, column):  # of the rows that are stored together
        warp, row = (0, column) if alone else divmod(column, 16)
        return macros.place(warp, token, row, alone) * size

    written = [[at(first + i, row) for i in range(8)] for first in (0, 8) for row in (0, 8)] if size == 2 else []
    read = [[at(i // lanes, i % lanes * chunk) for i in range(p, p + 8)] for p in range(0, 16 * lanes, 8)]
    assert all(address % 16 == 0 for phase in written + read for address in phase)
    assert all(len({address // 16 % 8 for address in phase}) == 8 for phase in written + ([] if alone else read))
    assert all(len({address // 16 % 8 for address in phase}) >= 6 for phase in read)
