"""Tile program of decode attention: split-KV over packed tiles, keys and values as register operands (specs.md I.6).

S^T[16 tokens, 8 rows] = K Q^T and O^T[16 dims, 8 rows] += V^T P^T, mma.sync m16n8k16; a row is one (new token, query
head) of a kv head. Every warp owns a private ring of stages, its tokens, and its (m, l, O^T): between the first copy
and the last merge no warp waits for another one. A stage is refilled one iteration after its last read, behind the MMAs
that consumed it (docs/tile-programs.md).

Codes enter the tensor core unscaled. Token-wise scales multiply rows of S^T and of P^T, channel-wise ones multiply Q
once for each group, static ones Q and O; zeros become a rank-one term. P^T is transposed in registers (movmatrix). The
running maximum is lazy: sums are rescaled only when a score exceeds it by 2^4, so steady iterations shuffle nothing.

The splits of a cluster add up what they send to one another's shared memory, and the last cluster to finish combines
what is left, in a fixed order: results have the same bits in every run.

A `balanced` kernel cuts ragged batches: each CTA reads all lengths and finds from them which split of which sequence it
is (`tz_place`), so that a long sequence has more splits than a short one, whatever the lengths are at that time.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding.decode_arguments import (
    PASS_CONFIGS,
    Decode,
    Tensors,
    arguments,
    check_cache,
    check_cluster,
    grid_of,
    make_rows_macros,
    program,
    stage_words,
    work_of,
)
from terrazzo.ops.attention.decoding.decode_codes import make_code_macro, prelude
from terrazzo.ops.attention.decoding.decode_codes import state as code_state
from terrazzo.ops.attention.decoding.decode_merge import BATCH, inbox_words, make_merge_macros, merge_words
from terrazzo.ops.attention.decoding.decode_merge import state as merge_state
from terrazzo.ops.attention.decoding.decode_places import make_place_macros
from terrazzo.ops.attention.decoding.decode_ring import make_ring_macros
from terrazzo.ops.attention.decoding.decode_rows import (
    Rows,
    make_fetch_macros,
    make_fragment_macros,
    query_words,
    row_pitch,
    rows_at_end,
    rows_of_slot,
)
from terrazzo.ops.attention.device.decode_copies import Copies, Stages, make_copy_macros, peek
from terrazzo.ops.attention.device.tile_macros import Arithmetic, Tile, each, less, make_tile_macros, smaller
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro, PrimFunc

MAX_SPLITS = 128

__all__ = ["MAX_SPLITS", "PASS_CONFIGS", "build", "shared_words"]


def shared_words(
    layout: CacheLayout, row_tiles: int, warps: int, tiles: int, stages: int, shared_rows: bool = False,
    cluster: int = 1,
) -> int:  # fmt: skip
    """int32 words of shared memory: the rings, which the merges reuse, and behind them the rows of Q if no ring has
    room for them, and their B fragments (`query_words`)."""
    merges = merge_words(layout.head_dim, row_tiles, warps) + inbox_words(layout.head_dim, row_tiles, cluster)
    rings = max(warps * stages * stage_words(layout, tiles), merges)
    apart = 0 if rows_of_slot(layout, row_tiles, warps, tiles) else 8 * row_tiles * row_pitch(layout.head_dim)
    return rings + apart + query_words(layout, row_tiles, warps, shared_rows)


def _check(p: Decode, target) -> None:
    """Raise ArgumentError for arguments of `build` that do not fit one another."""
    layout, group, mini, tiles, parts = p.layout, p.layout.k.group, 16 * p.tiles, p.tiles, p.parts
    if group and (group % mini or p.residual != group):
        constraint = f"16 * tiles must divide the group {group}, and residual be {group}"
        raise ArgumentError("tiles", tiles, constraint, "change it")
    if parts > 1 and (not group or group % (mini * parts)):
        raise ArgumentError("parts", parts, f"warps take whole stages of {mini} tokens of a group of {group}", "use 1")
    if p.shared_rows and layout.k_layout.block_k < 32:
        constraint = f"{layout.k_format} keys are loaded one atom at a time"
        raise ArgumentError("shared_rows", p.shared_rows, constraint, "use False")
    check_cache(p, mini, "change tiles")
    if not 0 <= p.ahead <= 32:
        raise ArgumentError("ahead", p.ahead, "must be 0..32: a lane fetches a stage", "use 0")
    constraint = "balanced kernels have none" if p.balanced else f"{target.arch} has clusters of 1..16 CTAs or none"
    check_cluster(p.cluster, BATCH if target.supports("cluster") and not p.balanced else 1, constraint)


def _state(p: Decode, tile: Tile, row_facts: Expr, t: Tensors) -> Buffers:
    """Registers of a warp; row_facts: address of what is true of each row."""
    st = tile.state(t.scale, t.cap, t.window)
    st.row_facts = row_facts
    if p.layout.k.rotated or p.layout.v.rotated:
        vars(st).update(vars(Buffers(turned=(1, "float32"))))
    if p.layout.k.rotated:
        vars(st).update(vars(Buffers(rotated=(8, "float32"))))
    return st


def _make_loop_macros(f: Rows, tile: Tile, copies: Copies, rows_of: Call) -> tuple[Macro, Macro]:
    """Macros `load` and `attend` of the main loop."""
    p, layout, queries, fragment_words, bulk = f.of, f.of.layout, f.queries, f.fragments, copies.of.bulk
    stages, stage, sliding, mini, sink_tokens = p.stages, p.stage, p.sliding, 16 * p.tiles, p.sink_tokens

    @T.macro
    def load(KV, TABLE, ring, full, w, i):
        """Stage i is there, for all lanes, and another one on its way to the slot that was read last."""
        if stages == 1:  # load, then compute: what the ring is compared with
            T.call_extern("handle", "tz_syncwarp")
            copies.fetch(KV, TABLE, ring, full, w, i, 0)
            if not bulk:
                T.call_extern("handle", "tz_cp_commit")
        if bulk:
            T.barrier_wait(full[w.warp[0] * stages + w.read[0]], w.parity[0])
            T.call_extern("handle", "tz_fence")
        else:
            T.call_extern("handle", f"tz_cp_wait<{max(stages - 2, 0)}>")
        T.call_extern("handle", "tz_syncwarp")  # every lane has read the slot that is refilled
        if stages > 1:
            copies.refill(KV, TABLE, ring, full, w, i)
        if not bulk and stages > 1:
            T.call_extern("handle", "tz_cp_commit")

    def outside(w, token, begins):
        """Whether tokens of the stage may lie outside of a row's limits, or are read from the ring."""
        found = T.Or(
            less(smaller(w.least[0], w.packed[0]) if sliding else w.least[0], token + mini), less(token, begins)
        )
        return T.Or(found, less(token, sink_tokens)) if sink_tokens else found

    @T.macro
    def attend(ring, st, w, i):
        """Tiles of stage i: converted, multiplied with the rows, weighed, and their values summed up."""
        token = copies.token_of(w, i)
        at = (w.warp[0] * stages + w.read[0]) * stage
        if layout.k.group:
            if i % copies.of.per_chunk == 0:  # the scales of a channel group are the rows'
                tile.scale_q(
                    T.access_ptr(ring[at], "r", stage),
                    T.access_ptr(ring[queries], "r"),
                    T.access_ptr(ring[queries + (1 + w.warp[0]) * fragment_words], "rw"),
                    st,
                    w.lane[0],
                )
        begins = T.call_extern("int32", "tz_select", less(0, w.window), w.length[0] - w.window, sink_tokens)
        tile.step(
            T.access_ptr(ring[at + layout.channel_words], "r", stage),
            st, rows_of(ring, st, w), token, w.packed[0] if sliding else w.length[0],
            outside(w, token, begins), w.lane[0],
        )  # fmt: skip

    return load, attend


def build(target, **params: str | int | bool) -> PrimFunc:
    """The prim_func `main` for up to 8 * row_tiles rows in a CTA; params: the attributes of `Decode`.

    Shapes: Q and O [B, q_len, Hq, D] in `dtype`; KV int32 [pages, Hkv, page words]; TABLE int32 [B, most pages] (one
    element when contiguous); LEN int32 [B], tokens in all, the q_len new ones included; RES int32 [slots, Hkv, words]
    and SLOT int32 [B]; SK, SV f32 [Hkv, D] for static formats (one element otherwise); SINK f32 [Hq]; OP f32
    [B, Y, P, rows, D] and LP f32 [B, Y, P, cluster * rows], Y = Hkv * row groups, P = splits / cluster, of a balanced
    kernel [1, Y, P, ...], P splits of all sequences; SEM int32 [B * Y * cluster], zero between launches; LSE f32
    [B, q_len, Hq], base 2; of a ragged kernel Q and O [1, N, Hq, D], LSE [1, N, Hq] and CU int32 [B + 1], where each
    sequence's new tokens begin. With codes of M tokens SEM [B * Y * cluster + B], XQ int8 [M, Hq D], XS f32 (flat), XR
    int32 [M], sums of rows of "int8", and SM f32 [Hq D]; what is not there has one element. Scalars: softmax scale *
    log2(e), cap * log2(e), window in tokens (0: none), of a ragged kernel most_new.
    """
    p = Decode(**params)
    _check(p, target)
    layout, nt, residual, warps, ahead, cluster = p.layout, p.row_tiles, p.residual, p.warps, p.ahead, p.cluster
    bulk, pdl, group, sliding = target.supports("bulk_copy"), target.supports("pdl"), layout.k.group, p.sliding
    total_words = shared_words(layout, nt, warps, p.tiles, p.stages, p.shared_rows, cluster)
    f = rows_at_end(p, total_words)
    tile = make_tile_macros(Arithmetic(layout, nt, p.tiles, p.softcap, p.shared_rows, sliding))
    spare = make_tile_macros(Arithmetic(p.plain, nt, 1, p.softcap)) if residual else None
    copies = make_copy_macros(
        Stages(layout, p.tiles, p.stages, warps, p.parts, p.page, residual, bulk, ahead if pdl else 0, known=p.balanced)
    )
    ring_of = make_ring_macros(p, tile, spare)
    expect_work, find_work = make_place_macros(copies, ring_of if sliding else None, early_start=bool(pdl and ahead))
    rows = make_fetch_macros(f, bulk)
    fragments = make_fragment_macros(f, tile, rows.at_row)
    load, attend = _make_loop_macros(f, tile, copies, fragments.rows_of)
    types, sizes = arguments(p)
    stage_sums, merge = make_merge_macros(
        p, tile.of, warps, make_code_macro(target, sizes, p) if p.coded else None
    )  # fmt: skip
    cluster_dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    names = ("cp_async", "lds", "ldmatrix", "pack", "bulk", "semaphore", "warpgroup", "prefetch")
    source = prelude(p, *names)
    find_rows, find_own = make_rows_macros(p, sizes)

    @T.macro
    def body(t):
        with T.Kernel(*grid_of(p, sizes), threads=p.threads, prelude=source, **cluster_dims) as (bx, hy, bz):
            ring = T.alloc_shared((total_words,), "int32")
            full = T.alloc_barrier([1] * (warps * p.stages)) if bulk else None
            sent = T.alloc_barrier([1]) if cluster > 1 else None
            T.annotate_min_blocks_per_sm(p.min_blocks)
            tx = T.get_thread_binding()
            st = _state(p, tile, T.access_ptr(ring[f.facts], "r"), t)
            c = merge_state()
            coded = code_state() if p.coded else None
            place = T.alloc_local((5,), "int32")  # of tz_place
            early, late, moved = (T.alloc_local((size,), "int32") for size in (4, 4, 1))
            w = work_of(
                sizes, ("tile", "parts", "slot") if sliding else (), t,
                b=place[0] if p.balanced else bz, hy=hy, split=place[1] if p.balanced else bx,
                splits=place[2] if p.balanced else sizes.p * cluster, partials=place[2] if p.balanced else sizes.p,
                part_row=0 if p.balanced else bz, part_base=place[3] if p.balanced else 0, sent=sent,
                row_query=T.alloc_local((f.turns,), "int32"), row_head=T.alloc_local((f.turns,), "int32"),
            )  # fmt: skip
            if pdl:
                T.pdl_trigger()
            w.lane[0] = tx % 32
            w.warp[0] = tx // 32
            find_rows(w)
            if not p.ragged:
                rows.place_rows(st, w, tx)
            if p.balanced:
                expect_work(t.KV, t.TABLE, t.LEN, t.RES, t.SLOT, place, early, bx, w)
            elif pdl and ahead:
                copies.prefetch(t.KV, t.TABLE, t.LEN, w)
                if sliding:
                    ring_of.prefetch_ring(t.RES, t.SLOT, w)
            if pdl:
                T.pdl_sync()
            if p.balanced:
                find_work(t.TABLE, t.LEN, place, early, late, moved, bx, w)
            if p.ragged:
                find_own(t.CU, w)
                rows.place_rows(st, w, tx)
            rows.ask_rows(t.Q, ring, w, tx)
            if sliding:
                w.slot[0] = peek(t.SLOT, w.b)
            copies.start(t.KV, t.TABLE, t.LEN, ring, full, w)
            copies.confirm(t.KV, t.TABLE, ring, full, w)
            tile.clear(st)
            rows.await_rows()
            for i in each(nt * 2):
                st.hi[i] = st.hi[i] + w.length[0]
            w.least[0] = w.least[0] + w.length[0]
            if layout.k.rotated:
                rows.rotate_rows(ring, st, w)
            if residual:
                if less(0 if p.sink_tokens else w.packed[0], w.length[0]):
                    fragments.spare_q(ring, st, w)
                    if sliding:
                        ring_of.read_ring(t.RES, t.SLOT, st, w)
                    else:
                        ring_of.read_group(t.RES, t.SLOT, st, w)
            fragments.load_q(ring, t.SK, st, w)  # behind the residual block, which has fragments of its own
            if group or p.shared_rows:
                fragments.share_q(ring, st, w)
            elif f.in_slot:
                T.sync_threads()  # every warp has its rows before a slot of any ring is refilled
            for i in T.serial(w.count[0]):
                load(t.KV, t.TABLE, ring, full, w, i)
                attend(ring, st, w, i)
                copies.release(w)
            stage_sums(ring, t.SV, st, w)
            merge(t, ring, c, coded, w, tx)

    return program(body, types, p)
