"""Macros of programs whose CTA owns one tile, on mma.sync behind a cp.async ring (sm_80, sm_86, sm_89).

Weights are the A operand, X is the B operand: a warp computes y^T of 16 * row_blocks output features by 16 * pairs
tokens. A row of a ring stage of X is 128 bytes, swizzled by 16-byte chunks. An accumulator holds, for each row tile m
and pair p of token tiles, eight sums at (m * pairs + p) * 8: token tile, row g or g + 8, token 2t or 2t + 1.

Each function returns macros for one program.
"""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.tiles.calls import addcg4, address, call, copy16, cp_async, ldcg4, ldmatrix4
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Call, Expr, Macro, Place

STAGE_BYTES = 128  # of a token in a ring stage


@dataclass(frozen=True)
class Tile:
    """What a CTA computes: `block_tokens` tokens, an equal multiple of 16 for each of `token_warps` columns of warps;
    `row_blocks` row tiles of 16 for each warp of a column, whole blocks of 64 rows in all. `kc` CTAs share the k of a
    tile; groups of `raster` token blocks walk over the rows together, so that both operands stay in L2."""

    block_tokens: int
    warps: int
    row_blocks: int = 2
    stages: int = 3
    token_warps: int = 1
    kc: int = 1
    raster: int = 8

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def tokens(self) -> int:
        """Of a warp."""
        return self.block_tokens // self.token_warps

    @property
    def pairs(self) -> int:
        """Pairs of token tiles of a warp."""
        return self.tokens // 16

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.row_blocks * self.tokens // 2

    @property
    def row_warps(self) -> int:
        """Warps of a column."""
        return self.warps // self.token_warps

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows."""
        return self.row_warps * self.row_blocks // 4

    @property
    def out_pitch(self) -> int:
        """16-bit elements of a staged output token of a warp, free of bank conflicts."""
        return self.row_blocks * 16 + 8

    @property
    def x_bytes(self) -> int:
        """Shared memory of the ring of X, which the staged output of 16-bit results reuses."""
        return max(self.stages * self.block_tokens * STAGE_BYTES, self.warps * 16 * self.out_pitch * 2)

    def check(self, *, units: int, most: int, need: int, target: Target | None) -> None:
        """Refuse configurations that the programs have no code for, or that cannot run.

        Args:
            units: of 128 along k.
            most: row_blocks * tokens of a warp, twice the accumulators of a thread.
            need: bytes of shared memory; target: a Target that must have them, or None.

        Raises:
            ArgumentError: what cannot run, by name.
        """
        tw = self.token_warps
        if tw < 1 or self.block_tokens % (16 * tw) or self.block_tokens < 16 * tw:
            raise ArgumentError(
                "block_tokens", self.block_tokens, f"must be a multiple of 16 * token_warps = {16 * tw}", "round it up"
            )
        if not 1 <= self.warps <= 16 or self.warps % tw or self.row_warps * self.row_blocks % 4:
            raise ArgumentError(
                "warps",
                self.warps,
                f"must be at most 16, and warps / {tw} * {self.row_blocks} row tiles of 16 a multiple of 4",
                "use 4 or 8 warps with token_warps 1 or 2",
            )
        if self.stages < 2:
            raise ArgumentError("stages", self.stages, "must be at least 2", "use 3 or 4")
        if self.row_blocks * self.tokens > most:
            raise ArgumentError(
                "row_blocks",
                self.row_blocks,
                f"row_blocks * block_tokens / token_warps must be at most {most} here (registers)",
                "use fewer row blocks, or split the tokens over more warps",
            )
        if not 1 <= self.kc <= units:
            raise ArgumentError("kc", self.kc, f"must be 1 to {units}, the units of 128 along k", "use a smaller kc")
        if target is not None and need > target.smem_per_block:
            raise ArgumentError(
                "stages", self.stages,
                f"needs {need} bytes of shared memory, {target.arch} has {target.smem_per_block}", "use fewer",
            )  # fmt: skip


def element(size: int, matrix: Place, access: str, row: Place, pitch: int, col: Expr, ahead: Expr = 0) -> Expr:
    """Address of element `ahead` of (row, col) of a matrix in global memory, whose rows are `pitch` elements of `size`
    bytes apart; it is read ("r") or written ("w")."""
    return call(f"at<{size}>", T.access_ptr(matrix[0, 0], access, 1), row, pitch, col, ahead)


def sts32(to: Place, word: Expr) -> Expr:
    """A 32-bit value to an address."""
    return call("sts32", address(to, "w", 4), word)


def place_macros(tile: Tile, *, row_tiles: int, experts: int = 0) -> tuple[Macro, Call]:
    """Macro `place`: c.tokens, the first token, and c.rows, the row tile, of CTA `at`; c.count is scratch. With
    experts, whose tokens `offsets` [experts + 1] tell, also c.expert and c.end, the token behind its last one; 0
    where the CTA has no tile. Function `token_blocks`: those of m tokens or, with experts, at most.

    Groups of token blocks are of one expert.
    """
    bm, raster = tile.block_tokens, tile.raster

    @T.macro
    def place(c, at, offsets, m):
        """CTA `at` of those for m tokens."""
        c.tokens[0] = T.truncdiv(at, raster * row_tiles) * raster
        c.rows[0] = T.truncmod(at, raster * row_tiles)
        c.count[0] = T.min(T.ceildiv(m, bm) - c.tokens[0], raster)
        c.tokens[0] = (c.tokens[0] + T.truncmod(c.rows[0], c.count[0])) * bm
        c.rows[0] = T.truncdiv(c.rows[0], c.count[0])

    @T.macro
    def place_of_expert(c, at, offsets, m):
        """CTA `at` of those for the experts' m tokens."""
        found = T.alloc_local((5,), "int32")
        call(
            f"expert_at<{experts}>", T.access_ptr(found[0], "w", 5), T.access_ptr(offsets[0], "r", experts + 1), m, bm,
            T.truncdiv(at, row_tiles),
        )  # fmt: skip
        c.expert[0] = found[0]
        c.end[0] = found[4]
        c.rows[0] = at - found[1] * row_tiles
        c.tokens[0] = T.truncdiv(c.rows[0], raster * row_tiles) * raster
        c.rows[0] = T.truncmod(c.rows[0], raster * row_tiles)
        c.count[0] = T.min(found[2] - c.tokens[0], raster)
        c.tokens[0] = found[3] + (c.tokens[0] + T.truncmod(c.rows[0], c.count[0])) * bm
        c.rows[0] = T.truncdiv(c.rows[0], c.count[0])

    def token_blocks(m: Expr) -> Expr:
        return T.min(m, T.truncdiv(m + experts * (bm - 1), bm)) if experts else T.ceildiv(m, bm)

    return place_of_expert if experts else place, token_blocks


def x_macros(tile: Tile, *, k: int, stage_k: int) -> tuple[Macro, Macro]:
    """Macros `issue` (one stage of X [m, k] by `copy`, a primitive as tz_cp_async) and `load` (fragments of 16 tokens).

    A stage holds `stage_k` columns, STAGE_BYTES in all; Xs [stages * block_tokens * stage_k].
    """
    size, vec, pitch = STAGE_BYTES // stage_k, stage_k // 8, stage_k
    block_tokens, threads = tile.block_tokens, tile.threads

    @T.macro
    def issue(X, Xs, copy, tokens, at, slot, tx, m):
        """Columns `at` * stage_k and on; rows >= M and columns >= k become zero."""
        for e in T.unroll(-(-block_tokens * 8 // threads)):
            row = e * (threads // 8) + tx // 8
            to = slot * (block_tokens * pitch) + row * pitch + (tx % 8 ^ row % 8) * vec
            col = at * stage_k + tx % 8 * vec
            if row < block_tokens:
                T.call_extern(
                    "handle", copy, T.access_ptr(Xs[to], "w", vec),
                    element(size, X, "r", tokens + tx // 8, k, col, e * (threads // 8) * k),
                    T.if_then_else(tokens + row < m, 16 if k % 128 == 0 else T.max(T.min(k - col, vec), 0) * size, 0),
                )  # fmt: skip

    @T.macro
    def load(Xs, x, slot, step, p, column, lane):
        """B fragments of 16 tokens and 32 bytes of k."""
        row = column * tile.tokens + p * 16 + lane // 16 * 8 + lane % 8
        ldmatrix4(
            x[p * 4], Xs[slot * (block_tokens * pitch) + row * pitch + ((lane // 8 % 2 ^ lane % 8) ^ step * 2) * vec]
        )

    return issue, load


def unit_macro(tile: Tile, *, row_blocks: int, unit_words: int) -> Macro:
    """Macro `issue`: the units of 64 rows by 128 k of a CTA's rows, of W [units, row_blocks, unit_words], to a slot of
    Ws [slots * tile.blocks * unit_words], both int32."""
    blocks, threads = tile.blocks, tile.threads
    copies = blocks * unit_words // 4  # 16-byte pieces

    @T.macro
    def issue(W, Ws, c, unit, slot, tx):
        """Row blocks past the end keep what is there: their rows are not stored."""
        for e in T.unroll(-(-copies // threads)):
            at = e * threads + tx
            if at < T.min(copies, (row_blocks - c.rows[0] * blocks) * (unit_words // 4)):
                cp_async(Ws[slot * (blocks * unit_words) + at * 4], W[unit, c.rows[0] * blocks, at * 4])

    return issue


def partial_macros(tile: Tile, dtype: str) -> tuple[Macro, Macro]:
    """Macros `leave` and `gather` of a thread's sums in `dtype`, through WS [tiles, kc, tile.sums / 4, threads, 4]."""

    @T.macro
    def leave(WS, acc, tile_, z, tx):
        """The sums of CTA z along k of a tile."""
        for i in T.unroll(tile.sums // 4):
            copy16(WS[tile_, z, i, tx, 0], acc[i * 4])

    @T.macro
    def gather(WS, acc, tile_, tx):
        """The kc partial tiles in order of k."""
        for i in T.unroll(tile.sums // 4):
            ldcg4(acc[i * 4], WS[tile_, 0, i, tx, 0])
        for z in T.unroll(1, tile.kc, unroll_factor=1):  # unrolled, its loads would take every register
            for i in T.unroll(tile.sums // 4):
                addcg4(acc[i * 4], WS[tile_, z, i, tx, 0], dtype=dtype)

    return leave, gather


def out_macros(tile: Tile, *, n: int, vec: int) -> tuple[Macro, Macro]:
    """Macros `stage` and `write`: 16 tokens of a warp, transposed in registers, staged in Os, written 16 bytes a lane.

    `vec`: elements of Os in 16 bits (a buffer of bytes has 2).
    """
    pitch, row_blocks = tile.out_pitch, tile.row_blocks
    whole = n % 8 == 0

    @T.macro
    def stage(Os, o, at, m, i, lane):
        """o[0]: two tokens of a row. i // 2 is the token tile, i % 2 picks row g or g + 8 of row tile m."""
        o[0] = call("movmatrix", o[0], returns="uint32")
        sts32(Os[(at + (i // 2 * 8 + lane // 4) * pitch + m * 16 + i % 2 * 8 + lane % 4 * 2) * vec], o[0])

    @T.macro
    def write(Y, Os, at, token0, row0, m, lane):
        """Tokens from token0 on, below m; rows from row0 on, below n, of Y [m, n]."""
        for q in T.unroll(row_blocks):
            token = (q * 32 + lane) // (row_blocks * 2)
            chunk = (q * 32 + lane) % (row_blocks * 2) * 8
            if T.And(token0 + token < m, row0 + chunk < n):
                call(
                    "copy16" if whole else "store_ragged", element(2, Y, "w", token0 + token, n, row0 + chunk),
                    T.access_ptr(Os[(at + token * pitch + chunk) * vec], "r", 8 * vec),
                    *([] if whole else [T.min(n - row0 - chunk, 8)]),
                )  # fmt: skip

    return stage, write
