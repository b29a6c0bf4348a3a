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

from types import SimpleNamespace

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding.decode_arguments import (
    PASS_CONFIGS,
    arguments,
    check_cache,
    check_cluster,
    make_rows_macros,
    program,
    stage_words,
    work_of,
)
from terrazzo.ops.attention.decoding.decode_codes import code_sources, make_code_macros
from terrazzo.ops.attention.decoding.decode_merge import BATCH, inbox_words, make_merge_macros, merge_words
from terrazzo.ops.attention.decoding.decode_merge import state as merge_state
from terrazzo.ops.attention.decoding.decode_places import make_place_macros
from terrazzo.ops.attention.decoding.decode_ring import make_ring_macros
from terrazzo.ops.attention.decoding.decode_rows import (
    make_fetch_macros,
    make_fragment_macros,
    query_words,
    row_facts,
    row_pitch,
    rows_of_slot,
)
from terrazzo.ops.attention.device.decode_copies import make_copy_macros, peek
from terrazzo.ops.attention.device.primitives import attention_prelude
from terrazzo.ops.attention.device.tile_macros import each, less, make_tile_macros, smaller

MAX_SPLITS = 128

__all__ = ["MAX_SPLITS", "PASS_CONFIGS", "build", "shared_words"]


def shared_words(
    layout: CacheLayout,
    row_tiles: int,
    warps: int,
    tiles: int,
    stages: int,
    shared_rows: bool = False,
    cluster: int = 1,
) -> int:
    """int32 words of shared memory: the rings, which the merges reuse, and behind them the rows of Q if no ring has
    room for them, and their B fragments (`query_words`)."""
    merges = merge_words(layout.head_dim, row_tiles, warps) + inbox_words(layout.head_dim, row_tiles, cluster)
    rings = max(warps * stages * stage_words(layout, tiles), merges)
    apart = 0 if rows_of_slot(layout, row_tiles, warps, tiles) else 8 * row_tiles * row_pitch(layout.head_dim)
    return rings + apart + query_words(layout, row_tiles, warps, shared_rows)


def _check(layout: CacheLayout, target, tiles, shared_rows, page, residual, ahead, parts, cluster, balanced) -> None:
    """Raise ArgumentError for arguments of `build` that do not fit one another."""
    group, mini = layout.k.group, 16 * tiles
    if group and (group % mini or residual != group):
        constraint = f"16 * tiles must divide the group {group}, and residual be {group}"
        raise ArgumentError("tiles", tiles, constraint, "change it")
    if parts > 1 and (not group or group % (mini * parts)):
        raise ArgumentError("parts", parts, f"warps take whole stages of {mini} tokens of a group of {group}", "use 1")
    if shared_rows and layout.k_layout.block_k < 32:
        constraint = f"{layout.k_format} keys are loaded one atom at a time"
        raise ArgumentError("shared_rows", shared_rows, constraint, "use False")
    check_cache(layout, page=page, residual=residual, tokens=mini, remedy="change tiles")
    if not 0 <= ahead <= 32:
        raise ArgumentError("ahead", ahead, "must be 0..32: a lane fetches a stage", "use 0")
    constraint = "balanced kernels have none" if balanced else f"{target.arch} has clusters of 1..16 CTAs or none"
    check_cluster(cluster, BATCH if target.supports("cluster") and not balanced else 1, constraint)


def _prelude(layout: CacheLayout, residual: int, output: str) -> str:
    """Device code: primitives, the conversions of packed and of f16 tiles, and what makes codes."""
    names, more = code_sources(output)
    found = [layout.k.converter, layout.v.converter, *([get_converter("f16_f16")] if residual else [])]
    return attention_prelude(
        "cp_async", "lds", "ldmatrix", "pack", "bulk", "semaphore", "warpgroup", "prefetch", *names,
        extra=(*dict.fromkeys(c.device_source for c in sorted(found, key=lambda c: c.name)), *more),
    )  # fmt: skip


def _state(tile: SimpleNamespace, layout: CacheLayout, row_facts, scale, cap, window) -> SimpleNamespace:
    """Registers of a warp; row_facts: address of what is true of each row."""
    import tilelang.language as T

    st = tile.state(scale, cap, window)
    st.row_facts = row_facts
    if layout.k.rotated or layout.v.rotated:
        st.turned = T.alloc_local((1,), "float32")
    if layout.k.rotated:
        st.rotated = T.alloc_local((8,), "float32")
    return st


def _make_loop_macros(f: SimpleNamespace, tile, copies, rows_of, *, bulk: bool, sliding: bool) -> SimpleNamespace:
    """Macros `load` and `attend` of the main loop; f: facts of decode_rows."""
    import tilelang.language as T

    layout, stages, stage, queries, fragment_words = f.layout, f.stages, f.stage, f.queries, f.fragment_words
    mini, sink_tokens = (stage - layout.channel_words) // layout.tile_words * 16, layout.sink_tokens

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
            if i % copies.per_chunk == 0:  # the scales of a channel group are the rows'
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

    return SimpleNamespace(load=load, attend=attend)


def build(
    target, *, k_format: str, v_format: str, head_dim: int, dtype: str, row_tiles: int, warps: int, tiles: int,
    stages: int, min_blocks: int, shared_rows: bool, page: int, residual: int, softcap: bool, sinks: bool,
    ahead: int = 0, parts: int = 1, cluster: int = 1, balanced: bool = False,
    sink_tokens: int = 0, ragged: bool = False, output: str = "none", smooth: bool = False, column_scales: bool = False,
):  # fmt: skip
    """The prim_func `main` for up to 8 * row_tiles rows in a CTA.

    Args:
        dtype: of q and out. tiles: 16-token tiles in a stage of a warp. min_blocks: CTAs on an SM that registers allow.
        shared_rows: the rows' B fragments stay in shared memory, for more warps with more rows.
        page: tokens of a page, 0 for a contiguous cache (one page for each sequence).
        residual: tokens of the f16 residual ring, 0 for none. Its tiles are one more, and behind them lies that of the
            `sink_tokens` first tokens (`PackedCache`).
        softcap, sinks: whether the logits are capped, and whether each head has a sink.
        ahead: stages of a warp that are fetched into L2 while the kernel ahead may still run (decode_copies.py), 0..32.
        parts: warps that share a group of channel-wise keys. cluster: splits whose CTAs are a cluster, 1..16.
        balanced: sequences get splits in proportion to their tokens, without clusters. Of P CTAs along x, P - B are
            what the tokens of all are divided by (schedules/attention_balance.py).
        ragged: sequences have numbers of new tokens of their own, up to most_new.
        output: "none", or the form of codes that the last CTA of a sequence makes of its rows of O (decode_codes.py).
        smooth: whether columns are multiplied with SM first. column_scales: scales of blocks as [Hq D / 128, M4].

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
    import tilelang.language as T

    layout = CacheLayout(k_format, v_format, head_dim, sink_tokens)
    _check(layout, target, tiles, shared_rows, page, residual, ahead, parts, cluster, balanced)
    nt, group, threads = row_tiles, layout.k.group, warps * 32
    bulk, pdl = target.supports("bulk_copy"), target.supports("pdl")
    sliding = bool(residual) and not group  # the ring takes over inside a stage
    total_words = shared_words(layout, nt, warps, tiles, stages, shared_rows, cluster)
    f = row_facts(
        layout, row_tiles=nt, warps=warps, tiles=tiles, stages=stages, shared_rows=shared_rows, dtype=dtype,
        words=total_words,
    )  # fmt: skip
    tile = make_tile_macros(layout, nt, tiles, softcap, shared_rows, sliding)
    spare = make_tile_macros(CacheLayout("float16", "float16", head_dim), nt, 1, softcap) if residual else None
    copies = make_copy_macros(
        layout, tiles=tiles, stages=stages, warps=warps, parts=parts, page=page, residual=residual, bulk=bulk,
        ahead=ahead if pdl else 0, known=balanced,
    )  # fmt: skip
    ring_of = make_ring_macros(tile, spare, warps=warps, residual=residual, sink_tokens=sink_tokens)
    places = make_place_macros(copies, ring_of if sliding else None, early_start=bool(pdl and ahead))
    rows = make_fetch_macros(f, bulk)
    fragments = make_fragment_macros(f, tile, rows.at_row)
    loop = _make_loop_macros(f, tile, copies, fragments.rows_of, bulk=bulk, sliding=sliding)
    coding = output != "none"
    args = arguments(
        head_dim, dtype, cols=8 * nt, cluster=cluster, balanced=balanced, ragged=ragged, coded=coding
    )  # fmt: skip
    codes = make_code_macros(
        target, args.sizes, head_dim=head_dim, dtype=dtype, output=output, smooth=smooth, column_scales=column_scales,
        cols=8 * nt, cluster=cluster, threads=threads,
    ) if coding else None  # fmt: skip
    merge = make_merge_macros(
        layout, tile, row_tiles=nt, warps=warps, cluster=cluster, dtype=dtype, sinks=sinks, codes=codes
    )
    cluster_dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    source = _prelude(layout, residual, output)
    cta_rows = make_rows_macros(args.sizes, 8 * nt, ragged)

    @T.macro
    def body(Q, KV, TABLE, LEN, RES, SLOT, SK, SV, SINK, OP, LP, SEM, O, LSE, CU, most_new, made, scale, cap, window):
        with T.Kernel(*args.grid, threads=threads, prelude=source, **cluster_dims) as (bx, hy, bz):
            ring = T.alloc_shared((total_words,), "int32")
            full = T.alloc_barrier([1] * (warps * stages)) if bulk else None
            sent = T.alloc_barrier([1]) if cluster > 1 else None
            T.annotate_min_blocks_per_sm(min_blocks)
            tx = T.get_thread_binding()
            st = _state(tile, layout, T.access_ptr(ring[f.facts], "r"), scale, cap, window)
            c = merge_state()
            coded = codes.state() if codes is not None else None
            place = T.alloc_local((5,), "int32")  # of tz_place
            early, late, moved = (T.alloc_local((size,), "int32") for size in (4, 4, 1))
            w = work_of(
                args.sizes, ("tile", "parts", "slot") if sliding else (), most_new,
                b=place[0] if balanced else bz, hy=hy, split=place[1] if balanced else bx,
                splits=place[2] if balanced else args.splits, partials=place[2] if balanced else args.sizes.p,
                part_row=0 if balanced else bz, part_base=place[3] if balanced else 0, window=window, sent=sent,
                row_query=T.alloc_local((f.turns,), "int32"), row_head=T.alloc_local((f.turns,), "int32"),
            )  # fmt: skip
            if pdl:
                T.pdl_trigger()
            w.lane[0] = tx % 32
            w.warp[0] = tx // 32
            cta_rows.find_rows(w)
            if not ragged:
                rows.place_rows(st, w, tx)
            if balanced:
                places.expect_work(KV, TABLE, LEN, RES, SLOT, place, early, bx, w)
            elif pdl and ahead:
                copies.prefetch(KV, TABLE, LEN, w)
                if sliding:
                    ring_of.prefetch_ring(RES, SLOT, w)
            if pdl:
                T.pdl_sync()
            if balanced:
                places.find_work(TABLE, LEN, place, early, late, moved, bx, w)
            if ragged:
                cta_rows.find_own(CU, w)
                rows.place_rows(st, w, tx)
            rows.ask_rows(Q, ring, w, tx)
            if sliding:
                w.slot[0] = peek(SLOT, w.b)
            copies.start(KV, TABLE, LEN, ring, full, w)
            copies.confirm(KV, TABLE, ring, full, w)
            tile.clear(st)
            rows.await_rows()
            for i in each(nt * 2):
                st.hi[i] = st.hi[i] + w.length[0]
            w.least[0] = w.least[0] + w.length[0]
            if layout.k.rotated:
                rows.rotate_rows(ring, st, w)
            if residual:
                if less(0 if sink_tokens else w.packed[0], w.length[0]):
                    fragments.spare_q(ring, st, w)
                    if sliding:
                        ring_of.read_ring(RES, SLOT, st, w)
                    else:
                        ring_of.read_group(RES, SLOT, st, w)
            fragments.load_q(ring, SK, st, w)  # behind the residual block, which has fragments of its own
            if group or shared_rows:
                fragments.share_q(ring, st, w)
            elif f.in_slot:
                T.sync_threads()  # every warp has its rows before a slot of any ring is refilled
            for i in T.serial(w.count[0]):
                loop.load(KV, TABLE, ring, full, w, i)
                loop.attend(ring, st, w, i)
                copies.release(w)
            merge.stage_sums(ring, SV, st, w)
            if codes is None:
                merge.merge(ring, OP, LP, SEM, O, LSE, SINK, c, w, tx)
            else:
                merge.merge(ring, OP, LP, SEM, O, LSE, SINK, made, c, coded, w, tx)

    return program(body, args, ragged, codes is not None)
