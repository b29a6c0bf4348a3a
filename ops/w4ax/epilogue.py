"""From f32 sums of a wgmma tile to rows of y: channel scales, bias, transposition through shared memory.

The accumulator is y^T: a thread holds two neighbouring tokens of rows g and g + 8. A warp stages its 16 rows of up to
32 tokens, 16-bit results by stmatrix, and stores them 16 bytes a lane.
"""

from types import SimpleNamespace

from terrazzo.ops.calls import pack2, stmatrix4_trans, store_row, syncwarp
from terrazzo.ops.w4a8.epilogue import out_tokens
from terrazzo.ops.w4ax.problem import Gemm

_PITCH = {2: 24, 4: 20}  # elements of a staged row of 16, as `staged` counts them


def store_macros(gemm: Gemm, *, block_tokens: int, cta_blocks: int, step: int | None = None) -> SimpleNamespace:
    """`state` of the epilogue, macros `fetch` (when a tile begins) and `store` (when its sums are done).

    A thread's sums `acc` are float32 [block_tokens / 2]; a tile has `cta_blocks` row blocks, one for each warpgroup.
    `step`: tokens that a warp stages at a time, 16 or 32.
    """
    import tilelang.language as T

    n, step = gemm.n, step or out_tokens(block_tokens)
    pitch, wide = _PITCH[gemm.out_bytes], gemm.out_bytes == 4
    bf16, whole = gemm.out_dtype == "bfloat16", n * gemm.out_bytes % 16 == 0
    lanes, chunk = gemm.out_bytes, 16 // gemm.out_bytes  # 16-byte pieces of a staged row, elements of one

    def state(Y, Os) -> SimpleNamespace:
        """Y [M, n], the program's shared buffer Os [warps, staged] in the dtype of Y, and registers for the values that
        wait."""
        return SimpleNamespace(
            Y=Y,
            Os=Os,
            b=T.alloc_local((2,), "float32"),
            s=T.alloc_local((2,), "float32"),
            o=T.alloc_local((4,), "uint32"),
        )

    @T.macro
    def fetch(S, B, to, c, wg, wt):
        """Bias and channel scale (two-level ones only: else `S` is not read) of the thread's rows."""
        for e in T.unroll(2):
            row = (c.rows[0] * cta_blocks + wg) * 64 + wt // 32 * 16 + e * 8 + wt % 32 // 4
            if gemm.two_level:
                to.s[e] = S[T.min(row, gemm.row_blocks * 64 - 1)]
            if gemm.bias:
                to.b[e] = B[T.min(row, n - 1)]

    @T.macro
    def stage(to, acc, at, q, slot, lane):
        """Sums of 16 tokens, from acc[at] on, into part q of a warp's buffer."""
        if gemm.two_level:
            for i in T.unroll(8):
                acc[at + i] = acc[at + i] * to.s[i // 2 % 2]
        if gemm.bias:
            for i in T.unroll(8):
                acc[at + i] = acc[at + i] + to.b[i // 2 % 2]
        if wide:
            for i in T.unroll(8):
                token = q * 16 + i // 4 * 8 + lane % 4 * 2 + i % 2
                to.Os[slot, token * pitch + i // 2 % 2 * 8 + lane // 4] = acc[at + i]
        else:
            for e in T.unroll(4):
                to.o[e] = pack2(acc[at + e * 2], acc[at + e * 2 + 1], bf16=bf16)
            place = (q * 16 + lane // 16 * 8 + lane % 8) * pitch + lane // 8 % 2 * 8
            stmatrix4_trans(to.Os[slot, place], *(to.o[e] for e in range(4)))

    @T.macro
    def store(to, acc, c, wg, wt):
        """Each warp stores its 16 rows, `step` tokens at a time."""
        slot = wg * 4 + wt // 32
        lane = wt % 32
        row0 = (c.rows[0] * cta_blocks + wg) * 64 + wt // 32 * 16
        for b in T.unroll(block_tokens // step):
            syncwarp()
            for q in T.unroll(step // 16):
                stage(to, acc, (b * step // 8 + q * 2) * 4, q, slot, lane)
            syncwarp()
            for q in T.unroll(step * lanes // 32):
                place = (q * 32 + lane) // lanes
                column = lane % lanes * chunk
                if T.And(c.first[0] + b * step + place < c.end[0], row0 + column < n):
                    store_row(
                        gemm.out_dtype, whole, to.Y, c.first[0] + b * step + place, n, row0 + column,
                        to.Os[slot, place * pitch + column],
                    )  # fmt: skip

    return SimpleNamespace(state=state, fetch=fetch, store=store)
