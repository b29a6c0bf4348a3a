"""From float32 sums of a wgmma tile to rows of y: bias, transposition through shared memory.

The accumulator is y^T: a thread holds two neighbouring tokens of rows g and g + 8. A warp stages its 16 rows of up to
32 tokens by stmatrix and stores them 16 bytes a lane.
"""

from types import SimpleNamespace

from terrazzo.ops.calls import copy16, has, pack2, stmatrix4_trans, syncwarp

OUT_PITCH = 24  # halves of a staged output row: 16 rows and 16 bytes of padding, free of bank conflicts


def out_tokens(block_tokens: int) -> int:
    """Tokens that a warp stages at a time."""
    return next(t for t in (32, 16) if block_tokens % t == 0)


def store_macros(
    *, n: int, block_tokens: int, row_blocks: int, cta_blocks: int, bf16: bool, bias: bool
) -> SimpleNamespace:
    """Macros `store` and `store_slice` of `row_blocks` row blocks of 64 of a warpgroup, whose tile has `cta_blocks`.

    `to` holds Y [M, n]; B [n of every expert] or, without a bias, [1]; Os [warps, out_tokens * OUT_PITCH] in the dtype
    of Y; registers o, uint32 [4], and bb, float32 [2].
    """
    import tilelang.language as T

    bm, rb, nacc, step = block_tokens, row_blocks, block_tokens // 2, out_tokens(block_tokens)

    @T.macro
    def stage_out(Os, values, at, o, wg, warp, lane, q):
        """16 rows x 16 tokens of a warp, from eight accumulator registers, transposed into part q of its buffer."""
        for e in T.unroll(4):
            o[e] = pack2(values[at + e * 2], values[at + e * 2 + 1], bf16=bf16)
        stmatrix4_trans(
            Os[wg * 4 + warp, (q * 16 + lane // 16 * 8 + lane % 8) * OUT_PITCH + lane // 8 % 2 * 8],
            *(o[i] for i in range(4)),
        )

    @T.macro
    def write_out(Y, Os, token, row, at, wg, warp, end):
        """Eight rows of one token."""
        if n % 8 == 0:
            if T.And(token < end, row < n):
                copy16(Y[token, row], Os[wg * 4 + warp, at])
        elif token < end:
            for e in T.unroll(8):
                if row + e < n:
                    Y[token, row + e] = Os[wg * 4 + warp, at + e]

    @T.macro
    def add_bias(B, acc, bb, expert, row, r):
        """To row block r, of rows `row` and `row` + 8."""
        bb[0] = T.cast(B[expert * n + T.min(row, n - 1)], "float32")
        bb[1] = T.cast(B[expert * n + T.min(row + 8, n - 1)], "float32")
        for i in T.unroll(nacc):
            acc[r * nacc + i] = acc[r * nacc + i] + bb[i % 4 // 2]

    @T.macro
    def block(to, acc, c, row0, first, count, r, wg, warp, lane):
        """`count` tokens of row block r from token `first` of the tile."""
        syncwarp()
        for q in T.unroll(count // 16):
            stage_out(to.Os, acc, r * nacc + (first // 8 + q * 2) * 4, to.o, wg, warp, lane, q)
        syncwarp()
        for q in T.unroll(count // 16):
            write_out(
                to.Y, to.Os, c.first[0] + first + q * 16 + lane // 2, row0 + lane % 2 * 8,
                (q * 16 + lane // 2) * OUT_PITCH + lane % 2 * 8, wg, warp, c.end[0],
            )  # fmt: skip

    @T.macro
    def store(to, acc, c, wg, wt):
        """Each warp stores its 16 rows of every row block, `step` tokens at a time."""
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + warp * 16
            if bias:
                add_bias(to.B, acc, to.bb, c.expert[0], row0 + lane // 4, r)
            for b in T.unroll(bm // step):
                block(to, acc, c, row0, b * step, step, r, wg, warp, lane)

    @T.macro
    def store_slice(to, acc, c, x, wg, wt):
        """The same of 16 tokens for each bit of x.units, counted through the row blocks."""
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + warp * 16
            if bias:
                add_bias(to.B, acc, to.bb, c.expert[0], row0 + lane // 4, r)
            for b in T.unroll(bm // 16):
                if has(x.units[0], r * (bm // 16) + b):
                    block(to, acc, c, row0, b * 16, 16, r, wg, warp, lane)

    return SimpleNamespace(store=store, store_slice=store_slice)
