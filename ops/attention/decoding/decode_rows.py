"""Rows of Q in decode attention: from memory to B fragments in the registers of every warp.

A row is one (new token, query head) of a kv head. All warps of a CTA have the same rows. They wait in the slots of the
rings that the first copies leave free, or behind the rings where those have no room.
"""

from types import SimpleNamespace

from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding.decode_arguments import query_at, stage_words
from terrazzo.ops.attention.device.calls import load_words, store_words
from terrazzo.ops.attention.device.rotation_macros import make_rotation, row_stages
from terrazzo.ops.attention.device.tile_macros import each, less, smaller


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


def row_facts(
    layout: CacheLayout,
    *,
    row_tiles: int,
    warps: int,
    tiles: int,
    stages: int,
    shared_rows: bool,
    dtype: str,
    words: int,
) -> SimpleNamespace:
    """Sizes of the rows; words: of shared memory in all, at whose end they lie.

    `queries`, `fragment_words` and `facts` are the word where the B fragments begin, their number, and the word of what
    is true of each row.
    """
    cols, stage = 8 * row_tiles, stage_words(layout, tiles)
    rotated = bool(layout.k.rotated)
    return SimpleNamespace(
        layout=layout, nt=row_tiles, cols=cols, warps=warps, threads=warps * 32, stages=stages, stage=stage,
        shared_rows=shared_rows, dtype=dtype,
        row_dtype="float16" if rotated else dtype,  # of Q in shared memory
        turns=-(-cols * (layout.head_dim // 8) // (warps * 32)),  # pieces of Q that a thread fetches
        q_pitch=row_pitch(layout.head_dim), in_slot=rows_of_slot(layout, row_tiles, warps, tiles),
        queries=words - query_words(layout, row_tiles, warps, shared_rows),
        fragment_words=4 * layout.head_dim * row_tiles, facts=words - 2 * cols,
        rotation=make_rotation(layout.head_dim, 8, row_stages(layout.head_dim)) if rotated else None,
    )  # fmt: skip


def make_fetch_macros(f: SimpleNamespace, bulk: bool) -> SimpleNamespace:
    """Macros `place_rows`, `ask_rows`, `await_rows` and `rotate_rows`, up to rows in shared memory; `at_row`.

    `w` as in decode_copies, with `row_query` and `row_head` [turns], token and head of the rows that a thread fetches.
    """
    import tilelang.language as T

    D, nt, cols, warps, threads = f.layout.head_dim, f.nt, f.cols, f.warps, f.threads
    turns, stages, stage, q_pitch, in_slot, queries = f.turns, f.stages, f.stage, f.q_pitch, f.in_slot, f.queries
    rotation, dtype = f.rotation, f.dtype
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

    return SimpleNamespace(
        place_rows=place_rows, ask_rows=ask_rows, await_rows=await_rows, rotate_rows=rotate_rows, at_row=at_row
    )


def make_fragment_macros(f: SimpleNamespace, tile: SimpleNamespace, at_row) -> SimpleNamespace:
    """Macros `load_q` and `share_q` (what steps over packed keys multiply, `rows_of`), and `spare_q` (the same for f16
    tokens)."""
    import tilelang.language as T

    layout, nt, D = f.layout, f.nt, f.layout.head_dim
    slices, group, shared_rows = D // 16, layout.k.group, f.shared_rows
    queries, fragment_words, facts, row_dtype = f.queries, f.fragment_words, f.facts, f.row_dtype
    k_static, mixed = layout.k.scaling == "static", layout.k.operand != row_dtype
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
            if mixed or k_static or tile.k_shift != (0, 0):
                for k in each(slices):
                    for half in each(2):
                        at = (k * nt + t) * 2 + half
                        st.f[0] = T.call_extern("float32", f"tz_unpack<{row_bf16}, 0>", st.q[at])
                        st.f[1] = T.call_extern("float32", f"tz_unpack<{row_bf16}, 1>", st.q[at])
                        for e in each(2):
                            st.f[e] = st.f[e] * T.float32(2.0 ** tile.k_shift[half])
                            if k_static:
                                st.f[e] = st.f[e] * T.reinterpret(
                                    T.call_extern(
                                        "uint32", "tz_read32",
                                        T.access_ptr(SK[w.h[0], k * 16 + half * 8 + w.lane[0] % 4 * 2 + e], "r", 1),
                                    ),
                                    "float32",
                                )  # fmt: skip
                        st.q[at] = T.call_extern("uint32", f"tz_pack2<{tile.kb}>", st.f[0], st.f[1])
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

    return SimpleNamespace(load_q=load_q, share_q=share_q, rows_of=rows_of, spare_q=spare_q)
