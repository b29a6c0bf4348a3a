"""From float32 sums of a wgmma tile to rows of y: bias, transposition through shared memory (staged_rows.py)."""

from terrazzo.ops.linear.params import Factors
from terrazzo.ops.linear.stages import Shape
from terrazzo.ops.tiles.calls import pack2
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.staged_rows import Out, row_macros, store_macros


def out_macros(shape: Shape, factors: Factors | None) -> Out:
    """Of the row blocks of 64 of a warpgroup. factors: where rows have such.

    `to` holds Y [M, n]; B [n of every expert] or, without a bias, of another extent; Os [warpgroups, staged] in the
    dtype of Y; registers o, uint32 [4], and bb, float32 [2]; P as the program has it.
    """
    size, bm, rb, nacc = shape.size, shape.block_tokens, shape.row_blocks, shape.sums
    n, bias, records, bf16 = size.n, size.has_bias, size.records, shape.op.dtype == "bfloat16"
    rows = row_macros(n=n, out_dtype=shape.op.dtype, out_bytes=2, whole=size.whole)

    @T.macro
    def scale_rows(to, acc, expert, row, r):
        """The sums of row block r, of rows `row` and `row` + 8, times the factors of the rows."""
        factors.load(to.P, to.bb, 0, row, expert * records)
        factors.load(to.P, to.bb, 1, row + 8, expert * records)
        for i in T.unroll(nacc):
            acc[r * nacc + i] = acc[r * nacc + i] * to.bb[i % 4 // 2]

    @T.macro
    def add_bias(B, acc, bb, expert, row, r):
        """To row block r, of rows `row` and `row` + 8."""
        bb[0] = T.cast(B[expert * n + T.min(row, n - 1)], "float32")
        bb[1] = T.cast(B[expert * n + T.min(row + 8, n - 1)], "float32")
        for i in T.unroll(nacc):
            acc[r * nacc + i] = acc[r * nacc + i] + bb[i % 4 // 2]

    @T.macro
    def stage(to, acc, r, first, q, wg, warp, lane, alone):
        """16 tokens of row block r, from token `first` + 16 q of the tile on."""
        for e in T.unroll(4):
            at = r * nacc + (first // 8 + q * 2) * 4 + e * 2
            to.o[e] = pack2(acc[at], acc[at + 1], bf16=bf16)
        rows.put(to.Os, wg, warp, lane, q, to.o, alone)

    @T.macro
    def enter(to, acc, c, row, r):
        if factors is not None:
            scale_rows(to, acc, c.expert[0], row, r)
        if bias:
            add_bias(to.B, acc, to.bb, c.expert[0], row, r)

    return store_macros(rows, stage, block_tokens=bm, row_blocks=rb, cta_blocks=shape.cta_blocks, enter=enter)
