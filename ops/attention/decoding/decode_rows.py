"""Rows of Q in decode attention: from memory to B fragments in the registers of every warp.

A row is one (new token, query head) of a kv head. All warps of a CTA have the same rows. They wait in the slots of the
rings that the first copies leave free, or behind the rings where those have no room.
"""

from typing import NamedTuple

from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding.decode_arguments import Decode, query_at, stage_words
from terrazzo.ops.attention.device.calls import load_words, store_words
from terrazzo.ops.attention.device.rotation_macros import Rotation, make_rotation, row_stages
from terrazzo.ops.attention.device.tile_macros import Tile, each, less, smaller
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Call, Macro


def row_pitch(head_dim: int) -> int:
    """int32 words of a row of Q in shared memory, where the eight rows of a matrix lie in different banks."""
    return head_dim // 2 + 4


def rows_of_slot(layout: CacheLayout, row_tiles: int, warps: int, tiles: int) -> int:
    """How many rows of Q wait in the slot of each ring that the first copies leave free; 0: they do not fit there."""
    rows = stage_words(layout, tiles) // row_pitch(layout.head_dim)
    return rows if rows * warps >= 8 * row_tiles else 0


def query_words(layout: CacheLayout, row_tiles: int, warps: int, shared_rows: bool) -> int:
    """int32 words of the rows' B fragments in shared memory, from where channel-wise scales take them anew, or every
    step with `shared_rows`; then each warp's scaled ones lie there too, and where its tokens end and the sum of Q for
    each row."""
    copies = bool(layout.k.group or shared_rows) + (warps if layout.k.group and shared_rows else 0)
    return 4 * layout.head_dim * row_tiles * copies + (16 * row_tiles if shared_rows else 0)


class Rows(NamedTuple):
    """Where the rows of a kernel lie.

    Attributes:
        in_slot: rows of Q in a slot of each ring, 0 for none. queries, facts: words of shared memory where the B
            fragments begin, and what is true of each row. fragments: words of the B fragments.
        dtype: of Q in shared memory. rotation: of the rows, or None.
    """

    of: Decode
    in_slot: int
    queries: int
    facts: int
    fragments: int
    dtype: str
    rotation: Rotation | None

    @property
    def turns(self) -> int:
        """Pieces of Q that a thread fetches."""
        return -(-self.of.cols * (self.of.head_dim // 8) // self.of.threads)


def rows_at_end(p: Decode, words: int) -> Rows:
    """The rows lie at the end of so many words of shared memory."""
    layout, rotated, nt = p.layout, bool(p.layout.k.rotation), p.row_tiles
    return Rows(
        of=p, in_slot=rows_of_slot(layout, nt, p.warps, p.tiles),
        queries=words - query_words(layout, nt, p.warps, p.shared_rows), facts=words - 2 * p.cols,
        fragments=4 * p.head_dim * nt, dtype="float16" if rotated else p.dtype,
        rotation=make_rotation(p.head_dim, 8, row_stages(p.head_dim)) if rotated else None,
    )  # fmt: skip


class Fetching(NamedTuple):
    """Macros up to rows in shared memory, and `at_row`, the word where one begins.

    `w` as in decode_copies, with `row_query` and `row_head` [turns], token and head of the rows that a thread fetches.
    """

    place_rows: Macro
    ask_rows: Macro
    await_rows: Macro
    rotate_rows: Macro
    at_row: Call


def make_fetch_macros(f: Rows, bulk: bool) -> Fetching:
    """Those of a kernel whose copies are bulk copies or not."""
    p, turns, in_slot, queries, rotation = f.of, f.turns, f.in_slot, f.queries, f.rotation
    D, nt, cols, warps, threads, dtype = p.head_dim, p.row_tiles, p.cols, p.warps, p.threads, p.dtype
    stages, stage, q_pitch = p.stages, p.stage, row_pitch(D)
    at_once = 256 // D  # rows of a warp with 8 dimensions in a lane

    def piece(v, tx):
        """(row of the CTA, first value) of the 16 bytes of Q that a thread fetches in turn v."""
        return (v * threads + tx) // (D // 8), (v * threads + tx) % (D // 8) * 8

    @T.macro
    def place_rows(st, w, tx):
        """Where what each row of a lane sees ends, from the sequence's end; token and head of the rows it fetches."""
        for v in each(turns):
            row = smaller(w.y[0] * cols + piece(v, tx)[0], w.rows[0] - 1)
            w.row_query[v] = T.call_extern("int32", "tz_now", T.truncdiv(row, w.group[0]))
            w.row_head[v] = T.call_extern("int32", "tz_now", w.h[0] * w.group[0] + row - w.row_query[v] * w.group[0])
        for t in each(nt):
            for j in each(2):
                w.query[0] = T.truncdiv(w.y[0] * cols + t * 8 + w.lane[0] % 4 * 2 + j, w.group[0])
                st.hi[t * 2 + j] = 1 - w.q_len + smaller(w.query[0], w.q_len - 1)
        w.least[0] = 1 - w.q_len + T.truncdiv(w.y[0] * cols, w.group[0])

    def at_row(row):
        """Word of shared memory where a row of Q begins."""
        if not in_slot:
            return queries - (cols - row) * q_pitch
        return row // in_slot * (stages * stage) + (stages - 1) * stage + row % in_slot * q_pitch

    @T.macro
    def ask_rows(Q, ring, w, tx):
        """The rows on their way to shared memory, ahead of the first copies: behind them they would wait for as many
        bytes as a full ring. Rows that do not exist become zeros."""
        for v in each(turns):
            row, col = piece(v, tx)
            if less(row, cols):
                T.call_extern(
                    "handle", "tz_cp_async", T.access_ptr(ring[at_row(row) + col // 2], "w", 4),
                    T.access_ptr(Q[w.q_of, query_at(w, w.row_query[v]), w.row_head[v], col], "r", 8),
                    T.call_extern("int32", "tz_select", less(w.y[0] * cols + row, w.rows[0]), 16, 0),
                )  # fmt: skip
        T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def await_rows():
        """The rows are there, for all warps."""
        T.call_extern("handle", f"tz_cp_wait<{0 if bulk else stages - 1}>")
        T.sync_threads()

    @T.macro
    def rotate_rows(ring, st, w):
        """The rows in shared memory rotated where they lie, f16, each by one warp."""
        for v in each(-(-cols // (warps * at_once))):
            first = (v * warps + w.warp[0]) * at_once
            if less(first, cols):  # all lanes or none
                at = at_row(first + w.lane[0] // (D // 8)) + w.lane[0] % (D // 8) * 4
                load_words(4, st.w, ring[at])
                rotation.from_words(st.rotated, st.w, lambda i: i, dtype == "bfloat16")
                rotation.turn(st, st.rotated, w.lane[0])
                rotation.to_words(st.rotated, st.w, lambda i: i, False)
                store_words(4, ring[at], st.w)
        T.sync_threads()

    return Fetching(place_rows, ask_rows, await_rows, rotate_rows, at_row)


class Fragments(NamedTuple):
    """Macros `load_q` and `share_q` (what steps over packed keys multiply, `rows_of`), and `spare_q` (the same for f16
    tokens)."""

    load_q: Macro
    share_q: Macro
    rows_of: Call
    spare_q: Macro


def make_fragment_macros(f: Rows, tile: Tile, at_row: Call) -> Fragments:
    """Those of rows that begin where `at_row` says."""
    layout, nt, slices = f.of.layout, f.of.row_tiles, f.of.head_dim // 16
    group, shared_rows, k_shift, k_bf16 = (
        layout.k.group,
        f.of.shared_rows,
        tile.of.k_shift,
        str(tile.of.layout.k.bf16).lower(),
    )
    queries, fragment_words, facts, row_dtype = f.queries, f.fragments, f.facts, f.dtype
    k_static, mixed = layout.k.static, layout.k.operand != row_dtype
    row_bf16 = "true" if row_dtype == "bfloat16" else "false"

    @T.macro
    def take_rows(ring, words, st, w, t):
        """Words of a lane's row of tile t."""
        for k in each(0, slices, 2):
            T.call_extern(
                "handle", "tz_ldmatrix4", T.access_ptr(st.w, "w", 4),
                T.access_ptr(ring[at_row(t * 8 + w.lane[0] % 8) + k * 8 + w.lane[0] // 8 * 4], "r", 4),
            )  # fmt: skip
            for i in each(4):
                words[((k + i // 2) * nt + t) * 2 + i % 2] = st.w[i]

    @T.macro
    def load_q(ring, SK, st, w):
        """B fragments of the rows, and the sums of Q that zeros multiply."""
        for t in each(nt):
            take_rows(ring, st.q, st, w, t)
            if mixed or k_static or k_shift != (0, 0):
                for k in each(slices):
                    for half in each(2):
                        at = (k * nt + t) * 2 + half
                        st.f[0] = T.call_extern("float32", f"tz_unpack<{row_bf16}, 0>", st.q[at])
                        st.f[1] = T.call_extern("float32", f"tz_unpack<{row_bf16}, 1>", st.q[at])
                        for e in each(2):
                            st.f[e] = st.f[e] * T.float32(2.0 ** k_shift[half])
                            if k_static:
                                st.f[e] = st.f[e] * T.reinterpret(
                                    T.call_extern(
                                        "uint32", "tz_read32",
                                        T.access_ptr(SK[w.h[0], k * 16 + half * 8 + w.lane[0] % 4 * 2 + e], "r", 1),
                                    ),
                                    "float32",
                                )  # fmt: skip
                        st.q[at] = T.call_extern("uint32", f"tz_pack2<{k_bf16}>", st.f[0], st.f[1])
        tile.sum_q(st)

    @T.macro
    def share_q(ring, st, w):
        """The B fragments to shared memory, so that no register holds them beside the scaled ones of a group."""
        if less(w.warp[0], 1):
            for j in each(slices // 2):
                for t in each(nt):
                    for i in each(4):
                        ring[queries + ((j * nt + t) * 32 + w.lane[0]) * 4 + i] = T.reinterpret(
                            st.q[((j * 2 + i // 2) * nt + t) * 2 + i % 2], "int32"
                        )
            if shared_rows:
                if less(w.lane[0], 4):
                    for t in each(nt):
                        for j in each(2):
                            ring[facts + t * 8 + w.lane[0] * 2 + j] = st.hi[t * 2 + j]
                            ring[facts + (nt + t) * 8 + w.lane[0] * 2 + j] = T.reinterpret(st.qs[t * 2 + j], "int32")
        T.sync_threads()

    def rows_of(ring, st, w):
        """The B fragments that a step multiplies: registers, or their address in shared memory."""
        if shared_rows:
            return T.access_ptr(ring[queries + ((1 + w.warp[0]) * fragment_words if group else 0)], "r")
        return st.qk if group else st.q

    @T.macro
    def spare_q(ring, st, w):
        """The same fragments for the f16 residual block, where the packed keys want other ones."""
        for t in each(nt):
            take_rows(ring, st.qk, st, w, t)
            if row_dtype == "bfloat16":
                for k in each(slices):
                    for half in each(2):
                        at = (k * nt + t) * 2 + half
                        st.f[0] = T.call_extern("float32", "tz_unpack<true, 0>", st.qk[at])
                        st.f[1] = T.call_extern("float32", "tz_unpack<true, 1>", st.qk[at])
                        st.qk[at] = T.call_extern("uint32", "tz_pack2<false>", st.f[0], st.f[1])

    return Fragments(load_q, share_q, rows_of, spare_q)
