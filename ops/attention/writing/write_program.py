"""Tile program that stores new tokens: append in decode, and quantize-and-pack after prefill (specs.md C, I.8).

A warp holds the keys or the values of a tile of 16 tokens of one kv head as decode's A operand: rows come through
shared memory and ldmatrix (transposed for values), codes are made in registers, words leave as the layout wants them.
Without a residual block a tile is merged into what its page holds. With one, a block that the new tokens complete is
packed by all warps of a CTA from residual tiles and new rows, and the last, incomplete one goes to the residual ring.
All of it is decided from lengths in device memory, so that a captured graph does the right thing in every replay, and a
call repeated with the same lengths writes the same bits.

A CTA serves a block of `per` (sequence, kv head) pairs: its warps share the tiles that are merged or kept, keys and
values apart, and pack complete blocks together, one pair after the other. An append is a chain of trips to memory, and
every SM that it takes is one on which decode cannot start: what tells where tokens go is read by the lanes at once, a
pair each, old contents are on their way beside the new rows, and many pairs need one wave of few CTAs.

The kernel may start before the one ahead of it on the stream has ended (programmatic dependent launch), and waits for
its end before it reads or writes anything: that one may write the rows, or still read the tokens that this one
overwrites. Until then it fetches into L2 what the residual ring holds of the block, if lengths are what they seem, and
guesses which page is asked for.
"""

from typing import NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout, residual_layout
from terrazzo.ops.attention.device.tile_macros import Sizes, each, larger, less, smaller
from terrazzo.ops.attention.writing.quantize_macros import tile_state
from terrazzo.ops.attention.writing.turned_macros import SOURCES as TURNING
from terrazzo.ops.attention.writing.turned_macros import make_turned_macros
from terrazzo.ops.attention.writing.write_macros import (
    INTEGERS,
    OF_PAIR,
    Rows,
    Tensors,
    Writing,
    arguments,
    make_write_macros,
    newest_rows,
    prelude,
    row_pitch,
    sizes,
)
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS
from terrazzo.ops.tiles.types import Macro, scalars

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS


def chunk_warps(residual: int) -> int:
    """Warps of a CTA, and tiles of its blocks: those of a residual block, or 4."""
    return residual // 16 or 4


def shares(pairs: int, most_new: int, warps: int, sms: int) -> tuple[int, int]:
    """(pairs of a CTA, tiles of a block that up to `most_new` tokens of a sequence can touch): as many pairs as keep
    the grid within two CTAs of an SM, and no more than the warps have hands for."""
    touched = min(warps, (most_new + 14) // 16 + 1)
    return max(1, min(warps // (2 * touched), -(-pairs // (2 * sms)))), touched


class Blocks(NamedTuple):
    """Macros of a block of new tokens: `place` it, `prefetch` for it, store a tile `alone`, pack it `together`."""

    place: Macro
    prefetch: Macro
    alone: Macro
    together: Macro


def make_block_macros(
    m: Writing, d: Sizes, layout: CacheLayout, page: int, residual: int, pdl: bool, fetch_keys: Macro
) -> Blocks:
    """Those of a program.

    Args:
        pdl: whether the kernel may start early, and guesses pages. fetch_keys: brings a tile's new rows of keys.
    """
    spare, chunk = residual_layout(layout), 16 * chunk_warps(residual)
    stats = first_of_statistics(layout, residual)
    learn, fetch, collect, find_block, spare_tile, block_of, tile_of, *_ = m
    HK, SLOTS = d.hk, d.slots

    def place_of(operand):
        """Words into a tile of the ring where an operand begins."""
        return 0 if operand.of.is_key else spare.k_words

    @T.macro
    def place(known, w, i, block):
        """The pair i of the CTA, and its block of new tokens."""
        w.b[0] = T.truncdiv(w.first + i, HK)
        w.h[0] = w.first + i - w.b[0] * HK
        w.length[0] = T.call_extern("int32", "tz_of_lane", known.length[0], i)
        w.row[0] = T.call_extern("int32", "tz_of_lane", known.row[0], i)
        w.old[0] = w.length[0] - T.call_extern("int32", "tz_of_lane", known.new[0], i)
        w.base[0] = (w.old[0] // chunk + block) * chunk
        if residual:
            w.slot[0] = T.call_extern("int32", "tz_of_lane", known.slot[0], i)
        if page and pdl:
            w.page[0] = T.call_extern("int32", "tz_of_lane", known.page[0], i)
            w.guess[0] = T.call_extern("int32", "tz_of_lane", known.guess[0], i)

    @T.macro
    def prefetch(t, known, w, pairs, block, per, lane):
        """Old tokens of complete and of touched tiles on their way to L2, a tile for each warp, and a guess which page
        is needed; what says where they are may be wrong, so it is clamped."""
        known.guess[0] = 0
        learn(t.LEN, t.CU, t.SLOT, known, w, pairs, lane)
        known.page[0] = known.length[0] - known.new[0]
        known.guess[0] = larger(known.page[0], (known.page[0] // chunk + block) * chunk) // max(page, 1)
        if residual:
            for i in T.serial(per):
                if less(w.first + i, pairs):
                    place(known, w, i, block)
                    w.token[0] = w.base[0] + w.warp * 16
                    wanted = T.Or(less(w.old[0], w.token[0] + 16), less(w.base[0] + chunk - 1, w.length[0]))
                    if T.And(T.And(less(w.token[0], w.old[0]), less(-1, w.token[0])), T.And(wanted, less(lane, 1))):
                        T.call_extern(
                            "handle", "tz_prefetch",
                            spare_tile(t.RES, w, smaller(larger(w.slot[0], 0), SLOTS - 1), 0, "r"),
                            4 * spare.tile_words,
                        )  # fmt: skip

    @T.macro
    def pack(operand, st, rows, KV, w, merge, lane):
        """The operand's words, and parameters, to the page."""
        if operand.of.fmt.token_wise:
            operand.token_parameters(st, tile_of(KV, w), rows, w.warp * 16 * row_pitch(layout.head_dim), lane)
        if operand.of.fmt.group:
            operand.channel_parameters(st, rows, stats, block_of(KV, w), w.warp, lane)
        operand.store(st, rows, stats, tile_of(KV, w), merge, lane)

    @T.macro
    def alone(operand, of, st, rows, t, w, lane):
        """One operand of a tile that a warp stores by itself: merged into its page, or kept in the residual ring."""
        is_key = operand.of.is_key
        if is_key:
            fetch_keys(rows, w, of, lane)
        else:
            fetch(rows, w, of, lane)
        operand.find_new(st, w.token[0], w.old[0], lane)
        older = less(w.token[0], w.old[0])
        if residual:
            if older:
                operand.recall(st, spare_tile(t.RES, w, w.slot[0], place_of(operand), "r"), lane)
            collect(st, rows, w, is_key, lane)
            if older:
                operand.mix(st)
            operand.keep(st, spare_tile(t.RES, w, w.slot[0], place_of(operand), "w"), lane)
        else:
            find_block(w)
            if operand.of.fmt.static:
                operand.recall_scales(st, t.SK if is_key else t.SV, w.h[0], lane)
            if older:
                operand.recall_words(st, tile_of(t.KV, w), lane)
            collect(st, rows, w, is_key, lane)
            pack(operand, st, rows, t.KV, w, older, lane)

    @T.macro
    def together(operand, after, st, rows, t, w, lane):
        """One operand of the warp's tile of a complete block; `after` is fetched once it has left shared memory."""
        operand.find_new(st, w.token[0], w.old[0], lane)
        older = less(w.token[0], w.old[0])
        if older:
            operand.recall(st, spare_tile(t.RES, w, w.slot[0], place_of(operand), "r"), lane)
        if operand.of.fmt.static:
            operand.recall_scales(st, t.SK if operand.of.is_key else t.SV, w.h[0], lane)
        collect(st, rows, w, operand.of.is_key, lane)
        if after is not None:
            fetch(rows, w, after, lane)
        if older:
            operand.mix(st)
        for c in each(4):
            st.new[c] = T.uint32(0xFFFFFFFF)
        pack(operand, st, rows, t.KV, w, False, lane)

    return Blocks(place, prefetch, alone, together)


def first_of_statistics(layout: CacheLayout, residual: int) -> int:
    """The word of shared memory behind the warps' rows: statistics of channels begin there."""
    return chunk_warps(residual) * 16 * row_pitch(layout.head_dim)


def make_store_macro(
    m: Writing, d: Sizes, layout: CacheLayout, page: int, residual: int, pdl: bool, fetch_keys: Macro
) -> Macro:
    """The macro that stores the blocks of a CTA; arguments as of make_block_macros."""
    made = make_block_macros(m, d, layout, page, residual, pdl, fetch_keys)
    D, warps = layout.head_dim, chunk_warps(residual)
    chunk, stats, B, HK = 16 * warps, first_of_statistics(layout, residual), d.b, d.hk

    @T.macro
    def store(t, keys_of, values_of, first, blocks, per, touched, cta, tx):
        """What a CTA stores of rows of keys and of values."""
        rows = T.alloc_shared((stats + ((2 + warps) * D if layout.k.group else 0),), "int32")
        lane = tx % 32
        st = tile_state(D, layout.k, layout.v)
        known = scalars(*OF_PAIR)
        w = scalars(*INTEGERS)
        x = T.truncmod(cta, blocks)
        vars(w).update(warp=tx // 32, first=T.truncdiv(cta, blocks) * per, table=t.TABLE)
        if pdl:
            T.pdl_trigger()
            made.prefetch(t, known, w, B * HK, first + x, per, lane)
            T.pdl_sync()
        m.learn(t.LEN, t.CU, t.SLOT, known, w, B * HK, lane)
        for n in T.serial(T.truncdiv(2 * per * touched + warps - 1 - w.warp, warps)):  # keys | values of a tile
            job = (n * warps + w.warp) // 2
            if less(w.first + T.truncdiv(job, touched), B * HK):
                made.place(known, w, T.truncdiv(job, touched), first + x)
                w.token[0] = larger(w.base[0], w.old[0] // 16 * 16) + T.truncmod(job, touched) * 16
                apart = T.And(less(w.token[0], smaller(w.base[0] + chunk, w.length[0])), less(w.old[0], w.length[0]))
                if T.And(apart, less(w.length[0], w.base[0] + chunk)) if residual else apart:
                    if less((n * warps + w.warp) % 2, 1):
                        made.alone(m.keys, keys_of, st, rows, t, w, lane)
                    else:
                        made.alone(m.values, values_of, st, rows, t, w, lane)
        if residual:
            for i in T.serial(per):
                if less(w.first + i, B * HK):
                    made.place(known, w, i, first + x)
                    w.token[0] = w.base[0] + w.warp * 16
                    if T.And(less(w.old[0], w.length[0]), less(w.base[0] + chunk - 1, w.length[0])):
                        m.find_block(w)
                        fetch_keys(rows, w, keys_of, lane)
                        made.together(m.keys, values_of, st, rows, t, w, lane)
                        made.together(m.values, None, st, rows, t, w, lane)

    return store


def build(
    target, *, k_format: str, v_format: str, head_dim: int, dtype: str, page: int, residual: int, rotary_dim: int = 0,
    rope: str = "neox", norm: str = "none", numerics: str = "fused",
):  # fmt: skip
    """The prim_func `main`.

    Args:
        dtype: of new keys and values. page: tokens of a page, 0 for a contiguous cache. residual: tokens of the f16
            residual block: the group of channel-wise keys, else 0 (ring_write_program.py).
        rotary_dim: dims of a head that are turned to its token's position first, 0 for none: see below. rope, norm,
            numerics: as ops/tiles/heads.py has them.

    Shapes: K and V in `dtype`, flat: value d of token i and head h at i * token pitch + h * head pitch + d; CU int32
    [B + 1], where each sequence's new tokens start; LEN int32 [B], tokens in all, the new ones included; KV, TABLE,
    RES, SLOT, SK and SV as in decode_program. Scalars: pitches of K and of V, first block of new tokens, number of
    blocks, CTAs of a block, and what `shares` says (at most 32 pairs of a CTA).

    With `rotary_dim`, keys are as the product left them, normed and turned on their way to shared memory, and CTAs
    behind the others do the same with queries. In front of the shapes above: X in `dtype`, flat, queries, value d of
    token i and head h at i * token pitch + h * head_dim + d; COS and SIN f32 [tokens, width]; QW and KW [head_dim] in
    `dtype`, weights of RMSNorm over heads; Q [heads of all tokens, head_dim] in `dtype`. Behind them: X's pitch, heads
    of a token, rows of Q that this launch makes, eps.
    """
    layout = CacheLayout(k_format, v_format, head_dim)
    D, warps = head_dim, chunk_warps(residual)
    if residual != layout.k.group:
        remedy = "a ring of token-wise keys has a program of its own"
        raise ArgumentError("residual", residual, f"must be {layout.k.group}", remedy)
    if page % layout.block_tokens:
        raise ArgumentError("page", page, f"must be a multiple of {layout.block_tokens}", "use 128 tokens")
    pdl = target.supports("pdl")
    sources = prelude(target, layout, *(["rows"] if rotary_dim else []), extra=TURNING if rotary_dim else ())
    if rotary_dim:
        kind = dict(head_dim=D, rotary_dim=rotary_dim, layout=rope, dtype=dtype, norm=norm, numerics=numerics)
        turned = make_turned_macros(kind, newest_rows(), warps, pdl)
    d = sizes()
    m = make_write_macros(target, layout, d, dtype=dtype, page=page, residual=residual, warps=warps)
    store = make_store_macro(m, d, layout, page, residual, pdl, turned.fetch if rotary_dim else m.fetch)
    static = "static" in (layout.k.scaling, layout.v.scaling)  # scales of all dimensions lie in registers beside heads
    min_blocks = max(1, (8 if D > 128 else 12 if static and rotary_dim else 16) // warps)

    a = arguments(d, dtype)
    if rotary_dim:
        NX, P, WIDTH, QR = T.dynamic("nx"), T.dynamic("p"), T.dynamic("width"), T.dynamic("qr")
        weights = (D if norm != "none" else 1,)

        @T.prim_func
        def main(
            X: T.Tensor((NX,), dtype), COS: T.Tensor((P, WIDTH), "float32"), SIN: T.Tensor((P, WIDTH), "float32"),
            QW: T.Tensor(weights, dtype), KW: T.Tensor(weights, dtype), Q: T.Tensor((QR, D), dtype),
            K: a.K, V: a.V, CU: a.CU, LEN: a.LEN, KV: a.KV, TABLE: a.TABLE, RES: a.RES, SLOT: a.SLOT,
            SK: a.SK, SV: a.SV,
            k_token: T.int32, k_head: T.int32, v_token: T.int32, v_head: T.int32,
            first: T.int32, blocks: T.int32, groups: T.int32, per: T.int32, touched: T.int32,
            q_token: T.int32, heads: T.int32, q_rows: T.int32, eps: T.float32,
        ):  # fmt: skip
            with T.Kernel(
                blocks * groups + T.ceildiv(q_rows, turned.per_cta), threads=warps * 32, prelude=sources
            ) as cta:
                T.annotate_min_blocks_per_sm(min_blocks)
                tx = T.get_thread_binding()
                h = turned.state()
                t = Tensors(
                    K, V, CU, LEN, KV, TABLE, RES, SLOT, SK, SV, X=X, COS=COS, SIN=SIN, QW=QW, KW=KW, Q=Q, eps=eps
                )
                if less(cta, blocks * groups):
                    keys, values = Rows(K, k_token, k_head, h, t), Rows(V, v_token, v_head)
                    store(t, keys, values, first, blocks, per, touched, cta, tx)
                else:
                    unit = (cta - blocks * groups) * turned.per_cta
                    turned.queries(t, h, unit, q_token, heads, q_rows, tx)

        return main

    @T.prim_func
    def main(
        K: a.K, V: a.V, CU: a.CU, LEN: a.LEN, KV: a.KV, TABLE: a.TABLE, RES: a.RES, SLOT: a.SLOT, SK: a.SK, SV: a.SV,
        k_token: T.int32, k_head: T.int32, v_token: T.int32, v_head: T.int32,
        first: T.int32, blocks: T.int32, groups: T.int32, per: T.int32, touched: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks * groups, threads=warps * 32, prelude=sources) as cta:
            T.annotate_min_blocks_per_sm(min_blocks)
            tx = T.get_thread_binding()
            keys, values = Rows(K, k_token, k_head), Rows(V, v_token, v_head)
            t = Tensors(K, V, CU, LEN, KV, TABLE, RES, SLOT, SK, SV)
            store(t, keys, values, first, blocks, per, touched, cta, tx)

    return main
