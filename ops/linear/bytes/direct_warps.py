"""Products whose operands both come from shared memory, on mma.sync (`multistage`): forms are those of `direct`.

A unit of a weight, 64 rows of 128 bytes whose 16-byte chunks are swizzled for wgmma, is free of bank conflicts for
ldmatrix too: four 8x8 matrices of it are an A fragment. Sums of 128 k that `direct` keeps apart are those of each k32
step here, as in W4A8 on e4m3: with `promoted` they join float32 sums, with `block` times the scales of their rows and
tokens.
"""

from dataclasses import dataclass

from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes.direct import GROUPS, Gemm
from terrazzo.ops.linear.bytes.operand import operand_macros as byte_macros
from terrazzo.ops.linear.bytes.problem import UNIT_K
from terrazzo.ops.tiles.calls import call, ldmatrix4
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.mma_tiles import Tile
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro, Place


@dataclass(frozen=True)
class Warps:
    """Macros `load`, an A fragment from a stage of the ring, and `mma`; of `block` also `fetch` and `turn`.

    `scales()` are registers for `fetch`: scales of a warp's row tiles and of a thread's tokens, now and of the next
    128 k; None without blocks.
    """

    scales: Call
    load: Macro
    fetch: Macro
    turn: Macro
    mma: Call


def operand_macros(gemm: Gemm, shape: Tile) -> Warps:
    """Of a warp."""
    rb, tokens = shape.row_blocks, shape.pairs * 4
    row_words, unit_words = UNIT_K // 4, gemm.unit_words
    operand = fp8_problem.operand_macros(gemm) if gemm.float_sums else byte_macros(gemm)

    def scales() -> Buffers | None:
        each = rb + tokens, "float32"
        return Buffers(now=each, next=each, f=(2, "float32")) if gemm.blocks else None

    @T.macro
    def load(Ws, a, slot, step, half, m, tile, lane):
        """Row tile m of 32 k into half `half` of a."""
        row = (tile + m) % 4 * 16 + lane // 8 % 2 * 8 + lane % 8
        chunk = (lane // 16 ^ lane % 8) ^ step * 2
        at = slot * (shape.blocks * unit_words) + (tile + m) // 4 * unit_words + row * row_words + chunk * 4
        ldmatrix4(a[(half * rb + m) * 4], Ws[at])

    @T.macro
    def fetch(held, S, XS, matrix, unit, row_tile, token, m):
        """The scales of 128 k are on their way: of row tiles `row_tile` and on, of tokens `token` and on, of m."""
        for r in T.unroll(rb):
            held.next[r] = S[matrix * gemm.units + unit, T.min(row_tile + r, gemm.row_blocks * GROUPS - 1)]
        for i in T.unroll(tokens):
            held.next[rb + i] = XS[unit, T.min(token + i // 2 * 8 + i % 2, m - 1)]

    @T.macro
    def turn(held):
        """Those that were fetched are multiplied next."""
        for i in T.unroll(rb + tokens):
            held.now[i] = held.next[i]

    def mma(acc: Place, to: Place, a: Place, at: Place, x: Place, b: Place, held: Place, m: Expr, tile: Expr) -> Expr:
        """acc[to .. to + 3] += a[at .. at + 3] x[b .. b + 1], of row tile m and token tile `tile` of a warp."""
        if not gemm.float_sums:
            return operand.mma(acc, to, a, at, x, b)
        operands = (T.access_ptr(acc[to], "rw", 4), T.access_ptr(a[at], "r", 4), T.access_ptr(x[b], "r", 2))
        if gemm.blocks:
            scaled = [held.now[rb + tile * 2 + i] * held.now[m] for i in range(2)]
            return call("mma_e4m3_tokens", *operands, *scaled)
        if gemm.dequantization == "promoted":
            return call("mma_e4m3", *operands, T.float32(1), T.float32(1))
        return call("mma_e4m3_sums", *operands)

    return Warps(scales, load, fetch, turn, mma)
