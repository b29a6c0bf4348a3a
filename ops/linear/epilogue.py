"""From float32 sums of a wgmma tile to rows of y: bias, transposition through shared memory (staged_rows.py)."""

from types import SimpleNamespace

from terrazzo.ops.linear.sizes import Sizes
from terrazzo.ops.tiles.calls import has, pack2, syncwarp, wg_sync
from terrazzo.ops.tiles.staged_rows import out_tokens, row_macros


def store_macros(
    *,
    size: Sizes,
    block_tokens: int,
    row_blocks: int,
    cta_blocks: int,
    bf16: bool,
    factors: SimpleNamespace | None = None,
) -> SimpleNamespace:
    """Macros `store`, `store_slice` and `store_share` of `row_blocks` row blocks of 64 of a warpgroup, whose tile has
    `cta_blocks`. factors: `factor_macros` of linear/params.py, where rows have such.

    `to` holds Y [M, n]; B [n of every expert] or, without a bias, of another extent; Os [warpgroups, staged] in the
    dtype of Y; registers o, uint32 [4], and bb, float32 [2]; P as the program has it.
    """
    import tilelang.language as T

    bm, rb, nacc, step = block_tokens, row_blocks, block_tokens // 2, out_tokens(block_tokens)
    n, bias, records = size.n, size.has_bias, size.records
    own_factors = factors is not None
    rows = row_macros(n=n, out_dtype="bfloat16" if bf16 else "float16", out_bytes=2, whole=size.whole)

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
    def store(to, acc, c, wg, wt):
        """The warpgroup stores every row block, `step` tokens at a time."""
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64
            if own_factors:
                scale_rows(to, acc, c.expert[0], row0 + warp * 16 + lane // 4, r)
            if bias:
                add_bias(to.B, acc, to.bb, c.expert[0], row0 + warp * 16 + lane // 4, r)
            for b in T.unroll(bm // step):
                wg_sync(wg)
                for q in T.unroll(step // 16):
                    stage(to, acc, r, b * step, q, wg, warp, lane, False)
                wg_sync(wg)
                rows.write(to.Y, to.Os, wg, warp, lane, c.first[0] + b * step, c.end[0], row0, step, False)

    @T.macro
    def store_slice(to, acc, c, x, wg, wt):
        """Each warp stores its 16 rows of 16 tokens for each bit of x.units, counted through the row blocks."""
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + warp * 16
            if own_factors:
                scale_rows(to, acc, c.expert[0], row0 + lane // 4, r)
            if bias:
                add_bias(to.B, acc, to.bb, c.expert[0], row0 + lane // 4, r)
            for b in T.unroll(bm // 16):
                if has(x.units[0], r * (bm // 16) + b):
                    syncwarp()
                    stage(to, acc, r, b * 16, 0, wg, warp, lane, True)
                    syncwarp()
                    rows.write(to.Y, to.Os, wg, warp, lane, c.first[0] + b * 16, c.end[0], row0, 16, True)

    @T.macro
    def store_share(to, acc, c, share, units, wg, wt):
        """The warpgroup stores the share-th part of its sums, `units` units of 16 tokens, counted through the row
        blocks."""
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64
            if own_factors:
                scale_rows(to, acc, c.expert[0], row0 + warp * 16 + lane // 4, r)
            if bias:
                add_bias(to.B, acc, to.bb, c.expert[0], row0 + warp * 16 + lane // 4, r)
            for b in T.unroll(bm // 16):
                if share == (r * (bm // 16) + b) // units:
                    wg_sync(wg)
                    stage(to, acc, r, b * 16, 0, wg, warp, lane, False)
                    wg_sync(wg)
                    rows.write(to.Y, to.Os, wg, warp, lane, c.first[0] + b * 16, c.end[0], row0, 16, False)

    return SimpleNamespace(store=store, store_slice=store_slice, store_share=store_share)
