"""Macros of programs whose CTA owns one tile, on mma.sync behind a cp.async ring (sm_80, sm_86, sm_89).

Weights are the A operand, X is the B operand: a warp computes y^T of 16 * row_blocks output features by 16 * pairs
tokens. A row of a ring stage of X is 128 bytes, swizzled by 16-byte chunks. An accumulator holds, for each row tile m
and pair p of token tiles, eight sums at (m * pairs + p) * 8: token tile, row g or g + 8, token 2t or 2t + 1.

Each function returns macros for one program.
"""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

STAGE_BYTES = 128  # of a token in a ring stage
SOURCE = """\
// element `ahead` of (row, col), SIZE bytes each, in 64-bit arithmetic: M * k may pass 2^31. It may lie outside the
// matrix if nothing is copied from there. `ahead` is a constant, apart so that copies share the rest
template <int SIZE> __device__ __forceinline__ void *tz_at(const void *p, int row, int pitch, int col, int ahead) {
  return (char *)p + SIZE * ((long long)row * pitch + col) + SIZE * ahead;
}
__device__ __forceinline__ void tz_store_ragged(void *dst, const void *src, int count) {
#pragma unroll
  for (int i = 0; i < 8; ++i) if (i < count) ((unsigned short *)dst)[i] = ((const unsigned short *)src)[i];
}
// 8x8 matrix of 16-bit values, two in a lane, transposed in registers: sm_80 has no stmatrix
__device__ __forceinline__ unsigned tz_movmatrix(unsigned a) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ void tz_sts32(void *p, unsigned v) { *(unsigned *)p = v; }
"""


def out_pitch(row_blocks: int) -> int:
    """16-bit elements of a staged output token of a warp, free of bank conflicts."""
    return row_blocks * 16 + 8


def x_bytes(block_tokens: int, stages: int, warps: int, row_blocks: int) -> int:
    """Shared memory of the ring of X, which the staged output of 16-bit results reuses."""
    return max(stages * block_tokens * STAGE_BYTES, warps * 16 * out_pitch(row_blocks) * 2)


def place_macros(*, block_tokens: int, row_tiles: int, raster: int) -> SimpleNamespace:
    """Macro `place`: c.tokens, the first token, and c.rows, the row tile, of CTA `at`; c.count is scratch.

    Groups of `raster` token blocks walk over the rows together, so that both operands stay in L2.
    """
    import tilelang.language as T

    @T.macro
    def place(c, at, m):
        c.tokens[0] = T.truncdiv(at, raster * row_tiles) * raster
        c.rows[0] = T.truncmod(at, raster * row_tiles)
        c.count[0] = T.min(T.ceildiv(m, block_tokens) - c.tokens[0], raster)
        c.tokens[0] = (c.tokens[0] + T.truncmod(c.rows[0], c.count[0])) * block_tokens
        c.rows[0] = T.truncdiv(c.rows[0], c.count[0])

    return SimpleNamespace(place=place)


def x_macros(*, k: int, stage_k: int, block_tokens: int, warp_tokens: int, threads: int) -> SimpleNamespace:
    """Macros `issue` (one stage of X by `copy`, a primitive as tz_cp_async) and `load` (fragments of 16 tokens).

    Args:
        k: columns of X. stage_k: columns of a stage, STAGE_BYTES in all.
        block_tokens, warp_tokens: tokens of a CTA and of a warp. threads: of the CTA.
    """
    import tilelang.language as T

    size, vec, pitch = STAGE_BYTES // stage_k, stage_k // 8, stage_k

    @T.macro
    def issue(X, Xs, copy, tokens, at, slot, tx, m):
        """Columns `at` * stage_k and on; rows >= M and columns >= k become zero."""
        for e in T.unroll(-(-block_tokens * 8 // threads)):
            row = e * (threads // 8) + tx // 8
            to = slot * (block_tokens * pitch) + row * pitch + (tx % 8 ^ row % 8) * vec
            col = at * stage_k + tx % 8 * vec
            if row < block_tokens:
                T.call_extern(
                    "handle",
                    copy,
                    T.access_ptr(Xs[to], "w", vec),
                    T.call_extern(
                        "handle",
                        f"tz_at<{size}>",
                        T.access_ptr(X[0, 0], "r", 1),
                        tokens + tx // 8,
                        k,
                        col,
                        e * (threads // 8) * k,
                    ),
                    T.if_then_else(
                        tokens + row < m, 16 if k % 128 == 0 else T.max(T.min(k - col, vec), 0) * size, 0
                    ),
                )  # fmt: skip

    @T.macro
    def load(Xs, x, slot, step, p, column, lane):
        """B fragments of 16 tokens and 32 bytes of k."""
        row = column * warp_tokens + p * 16 + lane // 16 * 8 + lane % 8
        T.call_extern(
            "handle",
            "tz_ldmatrix4",
            T.access_ptr(x[p * 4], "w", 4),
            T.access_ptr(
                Xs[slot * (block_tokens * pitch) + row * pitch + ((lane // 8 % 2 ^ lane % 8) ^ step * 2) * vec],
                "r",
                vec,
            ),
        )

    return SimpleNamespace(issue=issue, load=load)


def partial_macros(*, sums: int, kc: int, load: str, add: str) -> SimpleNamespace:
    """Macros `leave` and `gather` of `sums` 32-bit sums of a thread through WS [tiles, kc, sums / 4, threads, 4].

    `load` and `add` are the primitives that read and add four of them.
    """
    import tilelang.language as T

    @T.macro
    def leave(WS, acc, tile, z, tx):
        for i in T.unroll(sums // 4):
            T.call_extern(
                "handle", "tz_copy16", T.access_ptr(WS[tile, z, i, tx, 0], "w", 4), T.access_ptr(acc[i * 4], "r", 4)
            )

    @T.macro
    def gather(WS, acc, tile, tx):
        """The kc partial tiles in order of k."""
        for i in T.unroll(sums // 4):
            T.call_extern("handle", load, T.access_ptr(acc[i * 4], "w", 4), T.access_ptr(WS[tile, 0, i, tx, 0], "r", 4))
        for z in T.unroll(1, kc, unroll_factor=1):  # unrolled, its loads would take every register
            for i in T.unroll(sums // 4):
                T.call_extern(
                    "handle", add, T.access_ptr(acc[i * 4], "rw", 4), T.access_ptr(WS[tile, z, i, tx, 0], "r", 4)
                )

    return SimpleNamespace(leave=leave, gather=gather)


def out_macros(*, n: int, row_blocks: int, vec: int) -> SimpleNamespace:
    """Macros `stage` and `write`: 16 tokens of a warp, transposed in registers, staged, written 16 bytes a lane.

    `vec`: elements of the staging buffer in 16 bits (a buffer of bytes has 2).
    """
    import tilelang.language as T

    pitch = out_pitch(row_blocks)
    whole = n % 8 == 0

    @T.macro
    def stage(Os, o, at, m, i, lane):
        """o[0]: two tokens of a row. i // 2 is the token tile, i % 2 picks row g or g + 8 of row tile m."""
        o[0] = T.call_extern("uint32", "tz_movmatrix", o[0])
        T.call_extern(
            "handle",
            "tz_sts32",
            T.access_ptr(
                Os[(at + (i // 2 * 8 + lane // 4) * pitch + m * 16 + i % 2 * 8 + lane % 4 * 2) * vec], "w", 2 * vec
            ),
            o[0],
        )

    @T.macro
    def write(Y, Os, at, token0, row0, m, lane):
        for q in T.unroll(row_blocks):
            token = (q * 32 + lane) // (row_blocks * 2)
            chunk = (q * 32 + lane) % (row_blocks * 2) * 8
            if T.And(token0 + token < m, row0 + chunk < n):
                T.call_extern(
                    "handle",
                    "tz_copy16" if whole else "tz_store_ragged",
                    T.call_extern(
                        "handle", "tz_at<2>", T.access_ptr(Y[0, 0], "w", 1), token0 + token, n, row0 + chunk, 0
                    ),
                    T.access_ptr(Os[(at + token * pitch + chunk) * vec], "r", 8 * vec),
                    *([] if whole else [T.min(n - row0 - chunk, 8)]),
                )

    return SimpleNamespace(stage=stage, write=write)


def check(
    *,
    block_tokens: int,
    warps: int,
    row_blocks: int,
    stages: int,
    token_warps: int,
    kc: int,
    units: int,
    most: int,
    need: int,
    target: Target | None,
) -> None:
    """Refuse configurations that the programs have no code for, or that cannot run.

    Args:
        units: of 128 along k. most: row_blocks * tokens of a warp, twice the accumulators of a thread.
        need: bytes of shared memory; target: a Target that must have them, or None.

    Raises:
        ArgumentError: what cannot run, by name.
    """
    tw = token_warps
    if tw < 1 or block_tokens % (16 * tw) or block_tokens < 16 * tw:
        raise ArgumentError(
            "block_tokens", block_tokens, f"must be a multiple of 16 * token_warps = {16 * tw}", "round it up"
        )
    if not 1 <= warps <= 16 or warps % tw or warps // tw * row_blocks % 4:
        raise ArgumentError(
            "warps",
            warps,
            f"must be at most 16, and warps / {tw} * {row_blocks} row tiles of 16 a multiple of 4",
            "use 4 or 8 warps with token_warps 1 or 2",
        )
    if stages < 2:
        raise ArgumentError("stages", stages, "must be at least 2", "use 3 or 4")
    if row_blocks * block_tokens // tw > most:
        raise ArgumentError(
            "row_blocks",
            row_blocks,
            f"row_blocks * block_tokens / token_warps must be at most {most} here (registers)",
            "use fewer row blocks, or split the tokens over more warps",
        )
    if not 1 <= kc <= units:
        raise ArgumentError("kc", kc, f"must be 1 to {units}, the units of 128 along k", "use a smaller kc")
    if target is not None and need > target.smem_per_block:
        raise ArgumentError(
            "stages",
            stages,
            f"needs {need} bytes of shared memory, {target.arch} has {target.smem_per_block}",
            "use fewer",
        )
