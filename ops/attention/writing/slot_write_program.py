"""Tile program that stores new tokens where a slot mapping says, for engines that own the page table.

Slot s is token s % page of page s // page. Tokens come in any order, of any sequences. Those that follow each other and
lie in one tile of 16 are a run: a warp stores the keys or the values of a run, laid out and quantized as the warps of
write_program do it. A complete tile is stored as it is. Of others a warp flips, in words that hold other tokens too,
those bits of its own tokens that change, by an atomic operation: so two runs of a tile may be stored at the same time,
and no other token changes. The result is the same in any order, as long as no slot is named twice.

With `rotary_dim`, keys and queries are normed and turned on the way, as in write_program.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.calls import flip_words, store_words
from terrazzo.ops.attention.device.tile_macros import Sizes, each, less
from terrazzo.ops.attention.writing.quantize_macros import tile_state
from terrazzo.ops.attention.writing.turned_macros import SOURCES as TURNING
from terrazzo.ops.attention.writing.turned_macros import make_turned_macros
from terrazzo.ops.attention.writing.write_macros import (
    NewRows,
    Rows,
    Tensors,
    Writing,
    arguments,
    make_write_macros,
    prelude,
    row_pitch,
    sizes,
)
from terrazzo.ops.attention.writing.write_program import PASS_CONFIGS
from terrazzo.ops.tiles.cuda.writing import FLIP, SLOTS
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Macro, scalars

__all__ = ["PASS_CONFIGS", "WARPS", "build", "launch"]

WARPS = 8
MOST = 4
"""Most tokens among which a warp looks for the first ones of runs: a tile of a prompt has one, so few warps idle, and a
token of a decode step waits for three others at most."""
INTEGERS = {"int32": "int", "int64": "long long"}
ONES = 0xFFFFFFFF


def launch(tokens: int, heads: int, sms: int) -> tuple[int, int]:
    """(CTAs, tokens of a warp) that store keys and values: a token for each warp up to two CTAs of an SM."""
    per = max(1, min(MOST, 2 * heads * tokens // (2 * sms * WARPS)))
    groups = (tokens + per - 1) // per
    return -(-groups * 2 * heads // WARPS), per


def marked_rows(angles: str) -> NewRows:
    """The rows of a run: w.marks has a bit for each token of the tile; words of shared memory from w.places on say
    their places in the run, of which w.row is the first token.

    Args:
        angles: dtype of the positions, or "none" where tables have a row for each token.
    """

    def angle(t, source):
        if angles == "none":
            return source
        at = T.access_ptr(t.POS[0], "r", 1)
        return T.call_extern("int32", f"tz_angle<{INTEGERS[angles]}>", at, source, t.rows)

    return NewRows(
        fresh=lambda w, row: (w.marks[0] >> row) % 2 == 1,
        source=lambda w, row, fresh: w.row[0] + T.if_then_else(fresh, w.rows[w.places + row], 0),
        some=lambda w, first, count: (w.marks[0] >> first) % (1 << count) != 0,
        angle=angle,
    )


def make_run_macros(
    m: Writing, d: Sizes, layout: CacheLayout, page: int, fetch_keys: Macro
) -> tuple[Macro, Macro]:  # fmt: skip
    """Macros `place`, a run's tokens and tile, and `take`, its keys or values to the tile.

    Args:
        page: tokens of a page. fetch_keys: brings a run's rows of keys.
    """

    @T.macro
    def place(w, found, at):
        """The run that begins at lane `at`: its tokens, and its tile."""
        w.row[0] = w.first + at - 1
        w.marks[0] = T.call_extern("uint32", "tz_run", T.access_ptr(w.rows[w.places], "w", 16), found, at)
        w.at[0] = T.call_extern("int32", "tz_of_lane", found, at)
        w.page[0] = T.truncdiv(w.at[0], page)
        w.token[0] = 0
        w.inside[0] = w.h[0] * d.page_words + T.truncmod(w.at[0], page) // 16 * layout.tile_words

    @T.macro
    def mark(operand, st, marks, lane):
        """All ones for each class of tokens that are new, and the bits of a load's words that are theirs."""
        tile = operand.of
        for c in each(tile.classes):
            st.new[c] = T.if_then_else((marks >> tile.token_of(c, lane)) % 2 == 1, T.uint32(ONES), T.uint32(0))
        for i in each(tile.words):
            st.pair[i] = T.uint32(0)
            for c in each(tile.classes):
                if tile.fields(i, c):
                    st.pair[i] = st.pair[i] | (st.new[c] & T.uint32(tile.fields(i, c)))
        st.some[0] = st.pair[0]
        st.every[0] = st.pair[0]
        for i in each(1, tile.words):
            st.some[0] = st.some[0] | st.pair[i]
            st.every[0] = st.every[0] & st.pair[i]

    @T.macro
    def store_marked(operand, st, rows, tile, lane):
        """The words of the tile at address `tile`, of which the tokens that are not new stay."""
        words = operand.of.words
        for j in each(operand.of.loads):
            for i in each(words):
                operand.word(st, rows, 0, j, i, lane)
            if st.every[0] == T.uint32(ONES):
                store_words(words, operand.words_at(tile, j, lane), st.w)
            else:
                for i in each(words):
                    st.w[i] = (st.w[i] ^ st.old[j * words + i]) & st.pair[i]
                flip_words(words, operand.words_at(tile, j, lane), st.w)

    @T.macro
    def take(operand, of, st, t, w, lane):
        rows, is_key = w.rows, operand.of.is_key
        if is_key:
            fetch_keys(rows, w, of, lane)
        else:
            m.fetch(rows, w, of, lane)
        mark(operand, st, w.marks[0], lane)
        if T.And(st.some[0] != T.uint32(0), st.every[0] != T.uint32(ONES)):
            operand.recall_words(st, m.tile_of(t.KV, w), lane)
        if operand.of.fmt.static:
            operand.recall_scales(st, t.SK if is_key else t.SV, w.h[0], lane)
        m.collect(st, rows, w, is_key, lane)
        if operand.of.fmt.token_wise:
            operand.token_parameters(st, m.tile_of(t.KV, w), rows, w.warp * 16 * row_pitch(layout.head_dim), lane)
        if st.some[0] != T.uint32(0):
            store_marked(operand, st, rows, m.tile_of(t.KV, w), lane)

    return place, take


def build(
    target, *, k_format: str, v_format: str, head_dim: int, dtype: str, page: int, slots: str, rotary_dim: int = 0,
    rope: str = "neox", norm: str = "none", numerics: str = "fused", positions: str = "none",
):  # fmt: skip
    """The prim_func `main`.

    Args:
        dtype: of new keys and values. page: tokens of a page. slots: dtype of the slot mapping, "int32" or "int64".
        rotary_dim, rope, norm, numerics: as in write_program. positions: "int32" or "int64" where COS and SIN are
            tables of positions, "none" where they have a row for each token.

    Shapes: K and V in `dtype`, flat, pitches in values, as in write_program; MAP integers [tokens or more], a slot or a
    negative number for each token; KV int32 [pages, Hk, words]; SK and SV as in decode_program. Scalars: pitches of K
    and of V, tokens, what `launch` says, slots of the pages.

    With `rotary_dim`, in front of them X, COS, SIN, QW, KW and Q as in write_program, and POS integers [tokens or more]
    (or one); behind them X's pitch, heads of a token, rows of Q, eps.
    """
    layout = CacheLayout(k_format, v_format, head_dim)
    if layout.k.group:
        raise ArgumentError("k_format", k_format, "must not be channel-wise", "groups of tokens take a block")
    if page % 16 or page < 16:
        raise ArgumentError("page", page, "must be a multiple of 16", "use 128 tokens")
    for name, value, known in (("slots", slots, INTEGERS), ("positions", positions, ("none", *INTEGERS))):
        if value not in known:
            raise ArgumentError(name, value, f"must be one of {tuple(known)}", "use int64")
    pdl, d, warps = target.supports("pdl"), sizes(), WARPS
    new_rows = marked_rows(positions)
    m = make_write_macros(
        target, layout, d, dtype=dtype, page=page, residual=0, warps=warps, new_rows=new_rows
    )  # fmt: skip
    if rotary_dim:
        kind = dict(head_dim=head_dim, rotary_dim=rotary_dim, layout=rope, dtype=dtype, norm=norm, numerics=numerics)
        turned = make_turned_macros(kind, new_rows, warps, pdl)
    place, take = make_run_macros(m, d, layout, page, turned.fetch if rotary_dim else m.fetch)
    extra = (SLOTS.source, FLIP.source, *(TURNING if rotary_dim else ()))
    source = prelude(target, layout, *(["rows"] if rotary_dim else []), extra=extra)
    MAPPED = T.dynamic("mapped")
    min_blocks = max(1, (16 if head_dim <= 128 else 8) // warps)

    @T.macro
    def store(t, keys_of, values_of, tokens, per, room, cta, tx):
        """What a CTA stores of rows of keys and of values."""
        tiles = warps * 16 * row_pitch(head_dim)
        rows = T.alloc_shared((tiles + warps * 16,), "int32")  # of the warps' tiles, then their places
        lane = tx % 32
        st = tile_state(head_dim, layout.k, layout.v)
        vars(st).update(vars(Buffers(some=(1, "uint32"), every=(1, "uint32"))))
        w = scalars("h", "row", "page", "inside", "at", "token", "found")
        marks = T.alloc_local((1,), "uint32")
        job = cta * warps + tx // 32
        first = T.truncdiv(job, 2 * d.hk) * per
        vars(w).update(warp=tx // 32, first=first, rows=rows, places=tiles + tx // 32 * 16, marks=marks)
        w.h[0] = T.truncdiv(job, 2) - T.truncdiv(job, 2 * d.hk) * d.hk
        if pdl:
            T.pdl_trigger()
            T.pdl_sync()
        w.found[0] = T.call_extern(
            "int32", f"tz_slot<{INTEGERS[slots]}>", T.access_ptr(t.MAP[0], "r", 1), w.first + lane - 1, tokens, room
        )  # fmt: skip
        for n in T.serial(per):
            if T.call_extern("bool", "tz_begins", w.found[0], n + 1):
                place(w, w.found[0], n + 1)
                if less(job % 2, 1):
                    take(m.keys, keys_of, st, t, w, lane)
                else:
                    take(m.values, values_of, st, t, w, lane)

    a = arguments(d, dtype)
    if rotary_dim:
        NX, P, WIDTH, QR, POSITIONS = (T.dynamic(name) for name in ("nx", "p", "width", "qr", "positions"))
        weights, given = (head_dim if norm != "none" else 1,), positions != "none"

        @T.prim_func
        def main(
            X: T.Tensor((NX,), dtype), POS: T.Tensor((POSITIONS if given else 1,), positions if given else "int32"),
            COS: T.Tensor((P, WIDTH), "float32"), SIN: T.Tensor((P, WIDTH), "float32"),
            QW: T.Tensor(weights, dtype), KW: T.Tensor(weights, dtype), Q: T.Tensor((QR, head_dim), dtype),
            K: a.K, V: a.V, MAP: T.Tensor((MAPPED,), slots), KV: a.KV, SK: a.SK, SV: a.SV,
            k_token: T.int32, k_head: T.int32, v_token: T.int32, v_head: T.int32,
            tokens: T.int32, ctas: T.int32, per: T.int32, room: T.int32,
            q_token: T.int32, heads: T.int32, q_rows: T.int32, eps: T.float32,
        ):  # fmt: skip
            with T.Kernel(ctas + T.ceildiv(q_rows, turned.per_cta), threads=warps * 32, prelude=source) as cta:
                T.annotate_min_blocks_per_sm(min_blocks)
                tx = T.get_thread_binding()
                h = turned.state()
                t = Tensors(
                    K, V, None, None, KV, None, None, None, SK, SV, MAP, X, COS, SIN, QW, KW, Q, eps, POS, rows=P
                )
                if less(cta, ctas):
                    keys, values = Rows(K, k_token, k_head, h, t), Rows(V, v_token, v_head)
                    store(t, keys, values, tokens, per, room, cta, tx)
                else:
                    turned.queries(t, h, (cta - ctas) * turned.per_cta, q_token, heads, q_rows, tx)

        return main

    @T.prim_func
    def main(
        K: a.K, V: a.V, MAP: T.Tensor((MAPPED,), slots), KV: a.KV, SK: a.SK, SV: a.SV,
        k_token: T.int32, k_head: T.int32, v_token: T.int32, v_head: T.int32,
        tokens: T.int32, ctas: T.int32, per: T.int32, room: T.int32,
    ):  # fmt: skip
        with T.Kernel(ctas, threads=warps * 32, prelude=source) as cta:
            T.annotate_min_blocks_per_sm(min_blocks)
            tx = T.get_thread_binding()
            keys, values = Rows(K, k_token, k_head), Rows(V, v_token, v_head)
            t = Tensors(K, V, None, None, KV, None, None, None, SK, SV, MAP)
            store(t, keys, values, tokens, per, room, cta, tx)

    return main
