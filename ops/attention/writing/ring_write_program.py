"""Tile program that stores new tokens of a cache whose newest ones lie in a sliding f16 ring: append, and store.

A ring of N tokens packs its oldest 16 once it holds N (`CacheLayout.packed`). So a step touches one or two tiles of the
ring, which get new tokens, and packs one tile at most, N - 16 tokens back, once in 16 steps: no step is a burst. A warp
takes the keys or the values of one such tile: new rows and what the ring holds become operand registers, which go to
the ring again, or as codes to the page. The tile of the first tokens goes to its place behind the ring, too, and new
tokens that are packed at once stay in the ring as far as it reaches, so that a few may be taken back.

More than 16 new tokens take two launches: tiles that hold older tokens, whose places in the ring others want, then the
rest (`phase`). All of it is decided from lengths in device memory, as in write_program, and starts as early as there.
"""

from typing import NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout, residual_layout
from terrazzo.ops.attention.device.tile_macros import Sizes, each, larger, less, smaller
from terrazzo.ops.attention.writing.quantize_macros import tile_state
from terrazzo.ops.attention.writing.write_macros import (
    INTEGERS,
    OF_PAIR,
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
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Call, Macro, scalars

__all__ = ["PASS_CONFIGS", "WARPS", "build", "launches"]

WARPS = 8
ALL, OLDER, NEWER = 0, 1, 2
"""Phases: every tile; those that hold tokens of the ring; the others."""
ONE_LAUNCH = 16
"""New tokens of a sequence whose tiles take no place in the ring of one that is packed in the same launch."""


def launches(most_new: int, residual: int, pairs: int, sms: int) -> list[tuple[int, int, int, int]]:
    """(phase, blocks, pairs of a CTA, tiles of a pair in a block) of each launch that together store up to `most_new`
    tokens of a sequence: as many pairs in a CTA as keep an append within two CTAs of an SM, and in reach of its warps.
    """
    touched = (most_new + 14) // 16 + 1
    if not most_new:
        return []
    if most_new <= ONE_LAUNCH:
        tiles = touched + min(residual // 16, touched)
        return [(ALL, 1, max(1, min(WARPS // (2 * touched), -(-pairs // (2 * sms)))), tiles)]
    tiles = WARPS // 2
    return [(phase, -(-n // tiles), 1, tiles) for phase, n in ((OLDER, residual // 16 + 1), (NEWER, touched))]


class Ring(NamedTuple):
    """Macros `place`, `prefetch` and `take` of a tile of one operand; `packed`, tokens that are packed of so many."""

    place: Macro
    prefetch: Macro
    take: Macro
    packed: Call


def make_ring_macros(m: Writing, d: Sizes, layout: CacheLayout, page: int, residual: int, pdl: bool) -> Ring:
    """Those of a program; pdl: whether the kernel starts early, and guesses pages."""
    spare, kept, sink_tokens = residual_layout(layout), layout.kept(residual)[0], layout.sink_tokens

    def place_of(operand):
        """Words into a tile of the ring where an operand begins."""
        return 0 if operand.of.is_key else spare.k_words

    def packed(length):
        return larger(length - kept, 0) // 16 * 16

    @T.macro
    def place(known, w, i, index, phase):
        """The pair i of the CTA, and its tile number `index` of the phase: first those that new tokens touch, then
        those that are packed as the ring holds them. w.index < 0 where there is none."""
        w.b[0] = T.truncdiv(w.first + i, d.hk)
        w.h[0] = w.first + i - w.b[0] * d.hk
        w.length[0] = T.call_extern("int32", "tz_of_lane", known.length[0], i)
        w.row[0] = T.call_extern("int32", "tz_of_lane", known.row[0], i)
        w.old[0] = w.length[0] - T.call_extern("int32", "tz_of_lane", known.new[0], i)
        w.slot[0] = T.call_extern("int32", "tz_of_lane", known.slot[0], i)
        if page and pdl:
            w.page[0] = T.call_extern("int32", "tz_of_lane", known.page[0], i)
            w.guess[0] = T.call_extern("int32", "tz_of_lane", known.guess[0], i)
        w.packed[0] = packed(w.length[0])
        w.base[0] = packed(w.old[0])
        w.token[0] = w.old[0] // 16 * 16  # of the first tile that is touched
        w.at[0] = T.call_extern("int32", "tz_select", less(w.token[0], w.old[0]), 1, 0)  # it holds older tokens
        w.inside[0] = larger(smaller(w.packed[0], w.token[0]) - w.base[0], 0) // 16  # tiles of older tokens alone
        w.touched[0] = (w.length[0] + 15) // 16 - w.token[0] // 16
        if T.And(less(ALL, phase), less(phase, NEWER)):
            w.touched[0] = smaller(w.touched[0], w.at[0])
        if less(OLDER, phase):
            w.token[0] = w.token[0] + w.at[0] * 16
            w.touched[0] = w.touched[0] - w.at[0]
            w.inside[0] = 0
        w.index[0] = index
        if less(w.index[0], w.touched[0]):
            w.token[0] = w.token[0] + w.index[0] * 16
        else:
            w.token[0] = w.base[0] + (w.index[0] - w.touched[0]) * 16
        missing = T.Or(less(w.touched[0] + w.inside[0] - 1, w.index[0]), less(w.length[0] - 1, w.old[0]))
        w.index[0] = T.call_extern("int32", "tz_select", missing, -1, w.index[0])

    @T.macro
    def prefetch(operand, RES, w, lane):
        """What the ring holds of the tile, of one operand, on its way to L2; where that is may be wrong."""
        is_key = operand.of.is_key
        wanted = T.And(less(-1, w.index[0]), T.And(less(w.token[0], w.old[0]), less(-1, w.token[0])))
        if T.And(wanted, less(lane, 1)):
            slot = smaller(larger(w.slot[0], 0), d.slots - 1)
            words = spare.k_words if is_key else spare.v_words
            T.call_extern("handle", "tz_prefetch", m.spare_tile(RES, w, slot, place_of(operand), "r"), 4 * words)

    def sink_tile(RES, w, offset):
        """Address of the first tokens' tile, `offset` words into it."""
        at = w.h[0] * d.res_words + (residual // 16 + 1) * spare.tile_words + offset
        return T.call_extern("handle", "tz_page", T.access_ptr(RES[0, 0, 0], "w", 1), w.slot[0], d.rh * d.res_words, at)

    @T.macro
    def take(operand, of, st, rows, t, w, lane):
        """One operand of the tile: from the ring and from new rows, to the ring or to the page."""
        is_key, offset = operand.of.is_key, place_of(operand)
        operand.find_new(st, w.token[0], w.old[0], lane)
        if less(w.old[0], w.token[0] + 16):
            m.fetch(rows, w, of, lane)
        if less(w.token[0], w.old[0]):
            operand.recall(st, m.spare_tile(t.RES, w, w.slot[0], offset, "r"), lane)
        if less(w.old[0], w.token[0] + 16):
            m.collect(st, rows, w, is_key, lane)
        if less(w.token[0], w.old[0]):
            operand.mix(st)
        if less(w.token[0], w.packed[0]):
            m.find_block(w)
            if operand.of.fmt.static:
                operand.recall_scales(st, t.SK if is_key else t.SV, w.h[0], lane)
            for c in each(4):
                st.new[c] = T.uint32(0xFFFFFFFF)
            if operand.of.fmt.token_wise:
                operand.token_parameters(st, m.tile_of(t.KV, w), rows, w.warp * 16 * row_pitch(layout.head_dim), lane)
            operand.store(st, rows, 0, m.tile_of(t.KV, w), False, lane)
            if sink_tokens:
                if less(w.token[0], 1):
                    operand.keep(st, sink_tile(t.RES, w, offset), lane)
            reach = ((w.length[0] - 1) // 16 - residual // 16) * 16  # a truncation may want it back
            if T.And(less(w.old[0], w.token[0] + 16), less(reach - 1, w.token[0])):
                operand.keep(st, m.spare_tile(t.RES, w, w.slot[0], offset, "w"), lane)
        else:
            operand.keep(st, m.spare_tile(t.RES, w, w.slot[0], offset, "w"), lane)

    return Ring(place, prefetch, take, packed)


def build(
    target, *, k_format: str, v_format: str, head_dim: int, dtype: str, page: int, residual: int, sink_tokens: int = 0
):
    """The prim_func `main`; tensors as of write_program.

    Args:
        dtype: of new keys and values. page: tokens of a page, 0 for a contiguous cache. residual: tokens of the f16
            ring. sink_tokens: first tokens that stay f16, 0 or 16.

    Scalars: pitches of K and of V, then what `launches` says, the number of groups of `per` pairs behind the blocks.
    """
    layout = CacheLayout(k_format, v_format, head_dim, sink_tokens)
    warps = WARPS
    if layout.k.group or not residual or residual % 16:
        raise ArgumentError("residual", residual, "must be a multiple of 16, of token-wise keys", "use 128")
    if page % layout.block_tokens:
        raise ArgumentError("page", page, f"must be a multiple of {layout.block_tokens}", "use 128 tokens")
    pdl = target.supports("pdl")
    d = sizes()
    m = make_write_macros(target, layout, d, dtype=dtype, page=page, residual=residual, warps=warps)
    ring = make_ring_macros(m, d, layout, page, residual, pdl)
    wide = head_dim > 128

    a = arguments(d, dtype)

    @T.prim_func
    def main(
        K: a.K, V: a.V, CU: a.CU, LEN: a.LEN, KV: a.KV, TABLE: a.TABLE, RES: a.RES, SLOT: a.SLOT, SK: a.SK, SV: a.SV,
        k_token: T.int32, k_head: T.int32, v_token: T.int32, v_head: T.int32,
        phase: T.int32, blocks: T.int32, groups: T.int32, per: T.int32, tiles: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks * groups, threads=warps * 32, prelude=prelude(target, layout)) as cta:
            rows = T.alloc_shared((warps * 16 * row_pitch(head_dim),), "int32")
            T.annotate_min_blocks_per_sm(max(1, (8 if wide else 16) // warps))
            tx = T.get_thread_binding()
            lane = tx % 32
            st = tile_state(head_dim, layout.k, layout.v)
            known = scalars(*OF_PAIR)
            w = scalars(*INTEGERS, "packed", "touched", "index")
            x = T.truncmod(cta, blocks)
            vars(w).update(warp=tx // 32, first=T.truncdiv(cta, blocks) * per, table=TABLE)
            keys, values = Rows(K, k_token, k_head), Rows(V, v_token, v_head)
            t = Tensors(K, V, CU, LEN, KV, TABLE, RES, SLOT, SK, SV)
            jobs = T.truncdiv(2 * per * tiles + warps - 1 - w.warp, warps)  # keys | values of a tile
            if pdl:
                T.pdl_trigger()
                known.guess[0] = 0
                m.learn(LEN, CU, SLOT, known, w, d.b * d.hk, lane)
                known.guess[0] = ring.packed(known.length[0] - known.new[0]) // max(page, 1)
                for n in T.serial(jobs):
                    job = (n * warps + w.warp) // 2
                    if less(w.first + T.truncmod(job, per), d.b * d.hk):
                        ring.place(known, w, T.truncmod(job, per), x * tiles + T.truncdiv(job, per), phase)
                        if less((n * warps + w.warp) % 2, 1):
                            ring.prefetch(m.keys, RES, w, lane)
                        else:
                            ring.prefetch(m.values, RES, w, lane)
                T.pdl_sync()
            m.learn(LEN, CU, SLOT, known, w, d.b * d.hk, lane)
            for n in T.serial(jobs):
                job = (n * warps + w.warp) // 2
                if less(w.first + T.truncmod(job, per), d.b * d.hk):
                    ring.place(known, w, T.truncmod(job, per), x * tiles + T.truncdiv(job, per), phase)
                    if less(-1, w.index[0]):
                        if less((n * warps + w.warp) % 2, 1):
                            ring.take(m.keys, keys, st, rows, t, w, lane)
                        else:
                            ring.take(m.values, values, st, rows, t, w, lane)

    return main
