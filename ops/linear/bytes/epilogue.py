"""From int32 sums of a wgmma tile to rows of y: scales, bias, transposition through shared memory (staged_rows.py).

Token scales are fetched when the tile begins, one for each thread, and meet the sums through shared memory; channel
scales and bias wait in registers.
"""

from terrazzo.ops.linear.bytes.problem import Gemm
from terrazzo.ops.tiles.calls import lds64, pack2, rescale, wg_sync
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.staged_rows import Out, row_macros, store_macros
from terrazzo.ops.tiles.types import Buffer, Buffers, Call, Macro


def entering(gemm: Gemm) -> tuple[bool, bool]:
    """Whether sums of a tile have a scale for each token and channel, and whether they lose what RS says."""
    return not (gemm.raw or gemm.blocks), gemm.unsigned or gemm.zeros


def fetch_macro(gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int) -> Macro:
    """`fetch` of `store_macros`."""
    n, bm, rb, raw = gemm.n, block_tokens, row_blocks, gemm.raw
    scaled, corrected = entering(gemm)
    per_thread, of_matrix = -(-bm // 128), gemm.channels * (gemm.row_blocks * 64)

    @T.macro
    def fetch(S, XS, RS, B, to, c, wg, wt):
        """Scales, sums and bias of tokens c.first .. c.end - 1, row tile c.rows of matrix c.expert."""
        for e in T.unroll(per_thread):
            token = T.min(c.first[0] + (e * 128 + wt) % bm, c.end[0] - 1)
            if scaled:
                to.x[e] = 1.0 if gemm.grouped_tokens else XS[token]
            if corrected:
                to.r[e] = RS[token]
        if gemm.zeros:
            for e in T.unroll(rb * 2):
                row = (c.rows[0] * cta_blocks + wg * rb + e // 2) * 64 + wt // 32 * 16 + e % 2 * 8 + wt % 32 // 4
                at = (c.expert[0] * 2 + 1) * (gemm.row_blocks * 64) + T.min(row, gemm.row_blocks * 64 - 1)
                to.w[e] = T.cast(S[at], "int32")
        if not raw:
            for e in T.unroll(rb * 2):
                row = (c.rows[0] * cta_blocks + wg * rb + e // 2) * 64 + wt // 32 * 16 + e % 2 * 8 + wt % 32 // 4
                if scaled:
                    to.s[e] = S[c.expert[0] * of_matrix + T.min(row, gemm.row_blocks * 64 - 1)]
                if gemm.adds_bias:
                    to.b[e] = B[c.expert[0] * n + T.min(row, n - 1)]
                else:
                    to.b[e] = 0.0

    return fetch


def out_macros(gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int) -> tuple[Call, Macro, Out]:
    """Function `state` of the epilogue, macro `fetch` (when a tile begins), and what stores (when its sums are done).

    A thread's sums `acc` are int32 or float32 [row_blocks * block_tokens / 2]; a tile has `cta_blocks` row blocks.
    """
    n, bm, rb, nacc = gemm.n, block_tokens, row_blocks, block_tokens // 2
    raw, bf16 = gemm.raw, gemm.out_dtype == "bfloat16"
    scaled, corrected = entering(gemm)
    per_thread = -(-bm // 128)
    rows = row_macros(n=n, out_dtype=gemm.out_dtype, out_bytes=gemm.out_bytes, whole=gemm.whole)

    def state(**buffers: Buffer | None) -> Buffers:
        """Y [M, n], the program's shared buffers Os [warpgroups, staged], Fs f32 and Rs int32 [warpgroups, tokens],
        what else the program adds, and registers for the values that wait."""
        rows, two = (rb * 2, "float32"), (2, "float32")
        return Buffers(
            **buffers, x=(per_thread, "float32"), r=(per_thread, "int32"), s=rows, b=rows, x2=two, r2=(2, "int32"),
            w=(rb * 2, "int32") if gemm.zeros else None, f=two, o=(4, "uint32"),
        )  # fmt: skip

    fetch = fetch_macro(gemm, block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks)

    @T.macro
    def prepare(to, wg, wt):
        """The token scales of the tile go to shared memory, before its first `store` or `store_slice`."""
        wg_sync(wg)  # every warp is done with the scales of the tile before
        for e in T.unroll(per_thread):
            if e * 128 + wt < bm:
                if scaled:
                    to.Fs[wg, e * 128 + wt] = to.x[e]
                if corrected:
                    to.Rs[wg, e * 128 + wt] = to.r[e]
        wg_sync(wg)

    @T.macro
    def scale(to, acc, at, i, e):
        """Element i of the pair of sums at `at`, scaled; e picks its row of `to.s`."""
        if scaled:
            to.f[i] = rescale(acc[at + i], to.s[e], to.x2[i], to.b[e])
        else:
            to.f[i] = acc[at + i] + to.b[e]

    @T.macro
    def stage(to, acc, r, first, q, wg, warp, lane, alone):
        """16 tokens of row block r, from token `first` + 16 q of the tile on."""
        for e in T.unroll(4):
            at = r * nacc + (first // 8 + q * 2) * 4 + e * 2
            column = first + q * 16 + e // 2 * 8 + lane % 4 * 2
            if e % 2 == 0:
                if scaled:
                    lds64(to.x2, to.Fs[wg, column])
                if corrected:
                    lds64(to.r2, to.Rs[wg, column])
            for i in T.unroll(2):
                if gemm.zeros:
                    acc[at + i] = acc[at + i] - to.r2[i] * to.w[r * 2 + e % 2]
                elif gemm.unsigned:
                    acc[at + i] = acc[at + i] - to.r2[i] * 128
                if raw:
                    token = q * 16 + e // 2 * 8 + lane % 4 * 2 + i
                    to.Os[wg, rows.place(warp, token, e % 2 * 8 + lane // 4, alone)] = acc[at + i]
                else:
                    scale(to, acc, at, i, r * 2 + e % 2)
            if not raw:
                to.o[e] = pack2(to.f[0], to.f[1], bf16=bf16)
        if not raw:
            rows.put(to.Os, wg, warp, lane, q, to.o, alone)

    own = dict(block_tokens=bm, row_blocks=rb, cta_blocks=cta_blocks)
    return state, fetch, store_macros(rows, stage, prepare=prepare if scaled or corrected else None, **own)
