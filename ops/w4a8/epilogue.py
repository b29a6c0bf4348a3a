"""From int32 sums of a wgmma tile to rows of y: scales, bias, transposition through shared memory.

The accumulator is y^T: a thread holds two neighbouring tokens of rows g and g + 8. Token scales are fetched when the
tile begins, one for each thread, and meet the sums through shared memory; channel scales and bias wait in registers.
"""

from types import SimpleNamespace

from terrazzo.ops.calls import has, lds64, pack2, stmatrix4_trans, store_row, syncwarp, wg_sync
from terrazzo.ops.w4a8.problem import Gemm

_PITCH = {2: 24, 4: 20}  # elements of a staged row of 16: free of bank conflicts, 16-byte aligned


def out_tokens(block_tokens: int) -> int:
    """Tokens that a warp stages at a time."""
    return next(t for t in (32, 16) if block_tokens % t == 0)


def staged(gemm: Gemm, block_tokens: int) -> int:
    """Output elements that a warp stages at a time, padding included."""
    return out_tokens(block_tokens) * _PITCH[gemm.out_bytes]


def shared_bytes(gemm: Gemm, block_tokens: int, warpgroups: int) -> int:
    """Shared memory of the epilogue, bytes."""
    scales = block_tokens * (8 if gemm.unsigned else 4)
    return warpgroups * (4 * staged(gemm, block_tokens) * gemm.out_bytes + scales)


def store_macros(gemm: Gemm, *, block_tokens: int, row_blocks: int, cta_blocks: int) -> SimpleNamespace:
    """`state` of the epilogue, macros `fetch` (when a tile begins) and `store` (when its sums are done), or `prepare`
    and `store_slice`.

    A thread's sums `acc` are int32 or float32 [row_blocks * block_tokens / 2]; a tile has `cta_blocks` row blocks.
    """
    import tilelang.language as T

    n, bm, rb, nacc = gemm.n, block_tokens, row_blocks, block_tokens // 2
    step, pitch, raw = out_tokens(bm), _PITCH[gemm.out_bytes], gemm.raw
    bf16, whole = gemm.out_dtype == "bfloat16", n * gemm.out_bytes % 16 == 0
    per_thread = -(-bm // 128)
    lanes, chunk = 16 * gemm.out_bytes // 16, 16 // gemm.out_bytes  # 16-byte pieces of a staged row, elements of one

    def state(Y, Os, Fs, Rs) -> SimpleNamespace:
        """Y [M, n], the program's shared buffers Os [warps, staged], Fs f32 and Rs int32 [warpgroups, tokens], and
        registers for the values that wait."""
        return SimpleNamespace(
            Y=Y,
            Os=Os,
            Fs=Fs,
            Rs=Rs,
            x=T.alloc_local((per_thread,), "float32"),
            r=T.alloc_local((per_thread,), "int32"),
            s=T.alloc_local((rb * 2,), "float32"),
            b=T.alloc_local((rb * 2,), "float32"),
            x2=T.alloc_local((2,), "float32"),
            r2=T.alloc_local((2,), "int32"),
            f=T.alloc_local((2,), "float32"),
            o=T.alloc_local((4,), "uint32"),
        )

    @T.macro
    def fetch(S, XS, RS, B, to, c, wg, wt):
        """Scales, sums and bias of tokens c.first .. c.end - 1, row tile c.rows of matrix c.expert."""
        for e in T.unroll(per_thread):
            token = T.min(c.first[0] + (e * 128 + wt) % bm, c.end[0] - 1)
            if not raw:
                to.x[e] = XS[token]
            if gemm.unsigned:
                to.r[e] = RS[token]
        if not raw:
            for e in T.unroll(rb * 2):
                row = (c.rows[0] * cta_blocks + wg * rb + e // 2) * 64 + wt // 32 * 16 + e % 2 * 8 + wt % 32 // 4
                to.s[e] = S[c.expert[0] * (gemm.row_blocks * 64) + T.min(row, gemm.row_blocks * 64 - 1)]
                if gemm.bias:
                    to.b[e] = B[c.expert[0] * n + T.min(row, n - 1)]
                else:
                    to.b[e] = 0.0

    @T.macro
    def prepare(to, wg, wt):
        """The token scales of the tile go to shared memory, before its first `store` or `store_slice`."""
        if not raw or gemm.unsigned:
            wg_sync(wg)  # every warp is done with the scales of the tile before
            for e in T.unroll(per_thread):
                if e * 128 + wt < bm:
                    if not raw:
                        to.Fs[wg, e * 128 + wt] = to.x[e]
                    if gemm.unsigned:
                        to.Rs[wg, e * 128 + wt] = to.r[e]
            wg_sync(wg)

    @T.macro
    def scale(to, acc, at, i, e):
        """Element i of the pair of sums at `at`, scaled; e picks its row of `to.s`."""
        to.f[i] = T.call_extern("float32", "tz_rescale", acc[at + i], to.s[e], to.x2[i], to.b[e])

    @T.macro
    def stage(to, acc, wg, warp, lane, r, first, q):
        """16 tokens of row block r, from token `first` + 16 q of the tile on, into part q of the warp's buffer."""
        for e in T.unroll(4):
            at = r * nacc + (first // 8 + q * 2) * 4 + e * 2
            column = first + q * 16 + e // 2 * 8 + lane % 4 * 2
            if e % 2 == 0:
                if not raw:
                    lds64(to.x2, to.Fs[wg, column])
                if gemm.unsigned:
                    lds64(to.r2, to.Rs[wg, column])
            for i in T.unroll(2):
                if gemm.unsigned:
                    acc[at + i] = acc[at + i] - to.r2[i] * 128
                if raw:
                    place = (q * 16 + e // 2 * 8 + lane % 4 * 2 + i) * pitch + e % 2 * 8 + lane // 4
                    to.Os[wg * 4 + warp, place] = acc[at + i]
                else:
                    scale(to, acc, at, i, r * 2 + e % 2)
            if not raw:
                to.o[e] = pack2(to.f[0], to.f[1], bf16=bf16)
        if not raw:
            stmatrix4_trans(
                to.Os[wg * 4 + warp, (q * 16 + lane // 16 * 8 + lane % 8) * pitch + lane // 8 % 2 * 8],
                *(to.o[i] for i in range(4)),
            )

    @T.macro
    def block(to, acc, c, wg, warp, lane, row0, r, first, count):
        """`count` tokens of row block r from token `first` of the tile."""
        syncwarp()
        for q in T.unroll(count // 16):
            stage(to, acc, wg, warp, lane, r, first, q)
        syncwarp()
        for q in T.unroll(count * lanes // 32):
            token = c.first[0] + first + (q * 32 + lane) // lanes
            row = row0 + lane % lanes * chunk
            if T.And(token < c.end[0], row < n):
                place = (q * 32 + lane) // lanes * pitch + lane % lanes * chunk
                store_row(gemm.out_dtype, whole, to.Y, token, n, row, to.Os[wg * 4 + warp, place])

    @T.macro
    def store(to, acc, c, wg, wt):
        """Each warp stores its 16 rows of every row block, `step` tokens at a time."""
        warp = wt // 32
        lane = wt % 32
        prepare(to, wg, wt)
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + warp * 16
            for b in T.unroll(bm // step):
                block(to, acc, c, wg, warp, lane, row0, r, b * step, step)

    @T.macro
    def store_slice(to, acc, c, x, wg, wt):
        """The same of 16 tokens for each bit of x.units, counted through the row blocks, after `prepare`."""
        warp = wt // 32
        lane = wt % 32
        for r in T.unroll(rb):
            row0 = (c.rows[0] * cta_blocks + wg * rb + r) * 64 + warp * 16
            for b in T.unroll(bm // 16):
                if has(x.units[0], r * (bm // 16) + b):
                    block(to, acc, c, wg, warp, lane, row0, r, b * 16, 16)

    return SimpleNamespace(state=state, fetch=fetch, prepare=prepare, store=store, store_slice=store_slice)
