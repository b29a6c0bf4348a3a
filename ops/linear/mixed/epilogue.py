"""From f32 sums of a wgmma tile to rows of y: channel scales, bias, transposition through shared memory
(ops/tiles/staged_rows.py)."""

from terrazzo.ops.linear.mixed.problem import Gemm
from terrazzo.ops.tiles.calls import pack2
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.staged_rows import Out, row_macros, store_macros
from terrazzo.ops.tiles.types import Buffer, Buffers, Call, Macro


def out_macros(
    gemm: Gemm, *, block_tokens: int, cta_blocks: int, step: int = 0, experts: int = 0
) -> tuple[Call, Macro, Out]:
    """Function `state` of the epilogue, macro `fetch` (when a tile begins), and what stores (when its sums are done).

    A thread's sums `acc` are float32 [block_tokens / 2]; a tile has `cta_blocks` row blocks, one for each warpgroup.
    `step`: tokens that a warpgroup stages at a time, 16 or 32. With `experts`, scales and biases are those of
    c.expert.
    """
    n, wide, bf16 = gemm.n, gemm.out_bytes == 4, gemm.out_dtype == "bfloat16"
    rows = row_macros(n=n, out_dtype=gemm.out_dtype, out_bytes=gemm.out_bytes)
    of_expert = lambda c, size, at: c.expert[0] * size + at if experts else at

    def state(Y: Buffer, Os: Buffer) -> Buffers:
        """Y [M, n], the program's shared buffer Os [warpgroups, staged] in the dtype of Y, and registers for the values
        that wait."""
        return Buffers(Y=Y, Os=Os, b=(2, "float32"), s=(2, "float32"), o=(4, "uint32"))

    @T.macro
    def fetch(S, B, to, c, wg, wt):
        """Bias and channel scale (two-level ones only: else `S` is not read) of the thread's rows."""
        for e in T.unroll(2):
            row = (c.rows[0] * cta_blocks + wg) * 64 + wt // 32 * 16 + e * 8 + wt % 32 // 4
            if gemm.two_level:
                to.s[e] = S[of_expert(c, gemm.row_blocks * 64, T.min(row, gemm.row_blocks * 64 - 1))]
            if gemm.bias:
                to.b[e] = B[of_expert(c, n, T.min(row, n - 1))]

    @T.macro
    def stage(to, acc, r, first, q, wg, warp, lane, alone):
        at = (first // 8 + q * 2) * 4
        if gemm.two_level:
            for i in T.unroll(8):
                acc[at + i] = acc[at + i] * to.s[i // 2 % 2]
        if gemm.bias:
            for i in T.unroll(8):
                acc[at + i] = acc[at + i] + to.b[i // 2 % 2]
        if wide:
            for i in T.unroll(8):
                token = q * 16 + i // 4 * 8 + lane % 4 * 2 + i % 2
                to.Os[wg, rows.place(warp, token, i // 2 % 2 * 8 + lane // 4, False)] = acc[at + i]
        else:
            for e in T.unroll(4):
                to.o[e] = pack2(acc[at + e * 2], acc[at + e * 2 + 1], bf16=bf16)
            rows.put(to.Os, wg, warp, lane, q, to.o, False)

    own = dict(block_tokens=block_tokens, row_blocks=1, cta_blocks=cta_blocks, step=step)
    return state, fetch, store_macros(rows, stage, **own)
