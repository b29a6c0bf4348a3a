"""What both programs that store new tokens do alike: where a pair's tokens go, and the way of rows to registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from terrazzo.ops.attention.cache.layout import CacheLayout, residual_layout
from terrazzo.ops.attention.device.calls import load_words, store_words
from terrazzo.ops.attention.device.decode_copies import differ, peek
from terrazzo.ops.attention.device.rotation_macros import make_rotation, row_stages
from terrazzo.ops.attention.device.tile_macros import Sizes, each, larger, less, smaller
from terrazzo.ops.attention.writing.quantize_macros import Quantizing, make_quantize_macros
from terrazzo.ops.tiles.cuda.attention import attention_prelude
from terrazzo.ops.tiles.cuda.writing import CLIPPING, PAIRS_OF_F16
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Buffers, Call, Expr, Macro

OF_PAIR = ("length", "row", "new", "slot", "page", "guess")
"""What lanes know of their pairs: tokens, first new row, new rows, residual block, and the page at a guessed place."""
INTEGERS = ("b", "h", "length", "old", "base", "token", "row", "slot", "page", "guess", "at", "inside")


class NewRows(NamedTuple):
    """Which of the 16 rows of a warp's tile are new tokens, as expressions of its registers w and a row.

    Attributes:
        fresh(w, row): whether the row is new. source(w, row, fresh): the row of the new tokens that it is.
        some(w, first, count): whether one of `count` rows from `first` on may be new.
        angle(t, source): the row of the tables of angles for a row of the new tokens; t: the tensors.
    """

    fresh: Callable
    source: Callable
    some: Callable
    angle: Callable = lambda t, source: source


def newest_rows() -> NewRows:
    """The tokens from number `old` on, in turn: what an append by sequences has."""
    return NewRows(
        fresh=lambda w, row: T.And(w.token[0] + row >= w.old[0], w.token[0] + row < w.length[0]),
        source=lambda w, row, fresh: w.row[0] + T.if_then_else(fresh, w.token[0] + row - w.old[0], 0),
        some=lambda w, first, count: T.And(
            less(w.old[0] - w.token[0], first + count), less(w.token[0] + first, w.length[0])
        ),
    )


def row_pitch(head_dim: int) -> int:
    """int32 words of a row in shared memory: the 8 rows of a matrix lie in different banks."""
    return head_dim // 2 + 4


def sizes() -> Sizes:
    """The sizes that launches name."""
    names = ("nk", "nv", "b", "b1", "hk", "pages", "page_words", "tb", "most", "slots", "rh", "res_words")
    return Sizes(*names, "skh", "skd", "svh", "svd")


class Rows(NamedTuple):
    """New rows of keys or of values: value d of row i and head h at data[i * token + h * head + d]. Of keys that are
    turned, `registers` of a head, and what of the `tensors` turns it."""

    data: Buffer
    token: Expr
    head: Expr = 0
    registers: Buffers | None = None
    tensors: Tensors | None = None


class Tensors(NamedTuple):
    """The tensors of a kernel, and their types (shapes: write_program.build and slot_write_program.build); the first
    ten are those of every one that stores by lengths."""

    K: Buffer
    V: Buffer
    CU: Buffer | None
    LEN: Buffer | None
    KV: Buffer
    TABLE: Buffer | None
    RES: Buffer | None
    SLOT: Buffer | None
    SK: Buffer
    SV: Buffer
    MAP: Buffer | None = None
    X: Buffer | None = None
    COS: Buffer | None = None
    SIN: Buffer | None = None
    QW: Buffer | None = None
    KW: Buffer | None = None
    Q: Buffer | None = None
    eps: Expr = 0.0
    POS: Buffer | None = None
    rows: Expr = 0


def arguments(d: Sizes, dtype: str) -> Tensors:
    """The types of the tensors that programs which store have."""
    return Tensors(
        K=T.Tensor((d.nk,), dtype),
        V=T.Tensor((d.nv,), dtype),
        CU=T.Tensor((d.b1,), "int32"),
        LEN=T.Tensor((d.b,), "int32"),
        KV=T.Tensor((d.pages, d.hk, d.page_words), "int32"),
        TABLE=T.Tensor((d.tb, d.most), "int32"),
        RES=T.Tensor((d.slots, d.rh, d.res_words), "int32"),
        SLOT=T.Tensor((d.b,), "int32"),
        SK=T.Tensor((d.skh, d.skd), "float32"),
        SV=T.Tensor((d.svh, d.svd), "float32"),
    )


def prelude(target, layout: CacheLayout, *names: str, extra: tuple[str, ...] = ()) -> str:
    """CUDA text for a kernel that stores this layout: with general primitives of these names, and `extra` sources."""
    clipping = (PAIRS_OF_F16.source, CLIPPING.source) if layout.k.clip or layout.v.clip else ()
    early = ["prefetch"] if target.supports("pdl") else []
    return attention_prelude("cp_async", "lds", "ldmatrix", "pack", *names, *early, extra=(*clipping, *extra))


class Writing(NamedTuple):
    """Macros `learn`, `fetch`, `collect` and `find_block`; the addresses `spare_tile`, `block_of` and `tile_of`; the
    operands' macros `keys` and `values`."""

    learn: Macro
    fetch: Macro
    collect: Macro
    find_block: Macro
    spare_tile: Call
    block_of: Call
    tile_of: Call
    keys: Quantizing
    values: Quantizing


def make_write_macros(
    target, layout: CacheLayout, d: Sizes, *, dtype: str, page: int, residual: int, warps: int,
    new_rows: NewRows | None = None,
) -> Writing:  # fmt: skip
    """Those of a program.

    Args:
        d: of `sizes`. warps: tiles of a channel group. new_rows: of a tile; the newest tokens where None.
    """
    D, spare, spare_tiles = layout.head_dim, residual_layout(layout), residual // 16 + 1
    pitch, chunks_per_row = row_pitch(D), D // 8
    rows_bf16 = dtype == "bfloat16"
    through_f16 = bool(residual) and rows_bf16
    bf16 = rows_bf16 and not residual
    pdl, new_rows = target.supports("pdl"), new_rows or newest_rows()
    keys, values = (
        make_quantize_macros(layout, is_key, bf16 and not fmt.rotation, warps)
        for is_key, fmt in ((True, layout.k), (False, layout.v))
    )
    HK, MOST, RES_H, RES_WORDS, PAGE_WORDS = d.hk, d.most, d.rh, d.res_words, d.page_words

    @T.macro
    def learn(LEN, CU, SLOT, known, w, pairs, lane):
        """What each lane knows of its pair, in one trip to memory."""
        w.b[0] = T.truncdiv(smaller(w.first + lane, pairs - 1), HK)
        known.length[0] = peek(LEN, w.b[0])
        known.row[0] = peek(CU, w.b[0])
        known.new[0] = peek(CU, w.b[0] + 1)
        if residual:
            known.slot[0] = peek(SLOT, w.b[0])
        if page and pdl:  # beside the others, from where it seemed to lie
            known.page[0] = peek(w.table, w.b[0], smaller(larger(known.guess[0], 0), MOST - 1))
        known.new[0] = known.new[0] - known.row[0]

    @T.macro
    def fetch(rows, w, of, lane):
        """The tile's new rows on their way to shared memory; rows of other tokens become zeros."""
        for j in each(16 * chunks_per_row // 32):
            at = j * 32 + lane
            row = at // chunks_per_row
            fresh = new_rows.fresh(w, row)
            T.call_extern(
                "handle", "tz_cp_async",
                T.access_ptr(rows[(w.warp * 16 + row) * pitch + at % chunks_per_row * 4], "w", 4),
                T.call_extern(
                    "handle", "tz_row16", T.access_ptr(of.data[0], "r", 1),
                    new_rows.source(w, row, fresh), of.token, w.h[0] * of.head + at % chunks_per_row * 8,
                ),
                T.if_then_else(fresh, 16, 0),
            )  # fmt: skip
        T.call_extern("handle", "tz_cp_commit")

    rotation, of_row = make_rotation(D, 8, row_stages(D)), D // 8  # lanes that hold a row

    @T.macro
    def rotate_rows(st, rows, w, lane):
        """The tile's new rows in shared memory, f16 or bf16, rotated where they lie, f16: as many at a time as the
        warp's lanes hold, in a loop, since an append has one new row, and its time is that of cold instructions."""
        T.call_extern("handle", "tz_syncwarp")
        for j in T.serial(T.call_extern("int32", "tz_now", of_row // 2)):
            first = j * (32 // of_row)
            if new_rows.some(w, first, 32 // of_row):
                at = (w.warp * 16 + first + lane // of_row) * pitch + lane % of_row * 4
                load_words(4, st.s, rows[at])
                rotation.from_words(st.rotated, st.s, lambda i: i, rows_bf16)
                rotation.turn(st, st.rotated, lane)
                rotation.to_words(st.rotated, st.s, lambda i: i, True)
                store_words(4, rows[at], st.s)
        T.call_extern("handle", "tz_syncwarp")

    @T.macro
    def collect(st, rows, w, is_key, lane):
        """The rows as operand registers."""
        T.call_extern("handle", "tz_cp_wait<0>")
        if (layout.k if is_key else layout.v).rotated:
            rotate_rows(st, rows, w, lane)
        for a in each(D // 16):
            if is_key:
                row = lane % 16
                col = lane // 16 * 4
            else:
                row = lane % 8 + lane // 16 * 8
                col = lane // 8 % 2 * 4
            T.call_extern(
                "handle", "tz_ldmatrix4" if is_key else "tz_ldmatrix4_trans", T.access_ptr(st.x[a * 4], "w", 4),
                T.access_ptr(rows[(w.warp * 16 + row) * pitch + a * 8 + col], "r", 4),
            )  # fmt: skip
        T.call_extern("handle", "tz_syncwarp")
        if through_f16 and not (layout.k if is_key else layout.v).rotated:
            for i in each(D // 4):
                for e in each(2):
                    st.f[e] = T.call_extern("float32", f"tz_unpack<true, {e}>", st.x[i])
                st.x[i] = T.call_extern("uint32", "tz_clamp2<false>", st.f[0], st.f[1])

    def spare_tile(RES, w, slot, offset, access):
        """Address of the token's tile in the residual ring, `offset` words into it."""
        at = w.h[0] * RES_WORDS + w.token[0] // 16 % spare_tiles * spare.tile_words + offset
        return T.call_extern("handle", "tz_page", T.access_ptr(RES[0, 0, 0], access, 1), slot, RES_H * RES_WORDS, at)

    @T.macro
    def find_block(w):
        """Page and word of the token's block."""
        w.inside[0] = w.token[0]
        if page:
            w.at[0] = w.token[0] // page
            if pdl:
                if differ(w.at[0], w.guess[0]):
                    w.page[0] = peek(w.table, w.b[0], w.at[0])
            else:
                w.page[0] = peek(w.table, w.b[0], w.at[0])
            w.inside[0] = w.token[0] % page
        else:
            w.page[0] = w.b[0]
        w.inside[0] = w.h[0] * PAGE_WORDS + w.inside[0] // layout.block_tokens * layout.block_words

    def block_of(KV, w, words=0):
        """Address in the token's block, found before."""
        return T.call_extern(
            "handle", "tz_page", T.access_ptr(KV[0, 0, 0], "w", 1), w.page[0], HK * PAGE_WORDS, w.inside[0] + words
        )

    def tile_of(KV, w):
        """Address of the token's tile."""
        return block_of(KV, w, layout.channel_words + w.token[0] % layout.block_tokens // 16 * layout.tile_words)

    return Writing(learn, fetch, collect, find_block, spare_tile, block_of, tile_of, keys, values)
