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
from terrazzo.ops.attention.ablation import PlainLayout
from terrazzo.ops.attention.calls import load_words, store_words
from terrazzo.ops.attention.decode_copies import make_copy_macros, peek
from terrazzo.ops.attention.decode_merge import BATCH, inbox_words, make_merge_macros, merge_words
from terrazzo.ops.attention.decode_merge import state as merge_state
from terrazzo.ops.attention.device import attention_prelude
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.rotation_macros import make_rotation, row_stages
from terrazzo.ops.attention.tile_macros import each, larger, less, make_tile_macros, smaller
from terrazzo.schedules.attention_balance import MOST_SPLITS

PASS_CONFIGS = (  # barriers and bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
MAX_SPLITS = 128
_AT_A_TIME = 128  # lengths that a warp holds: more of them are not looked at before the wait
INTEGERS = (
    *("length", "group", "rows", "h", "y", "here"),  # of the sequence and of the CTA's rows
    *("packed", "start", "r0", "r1", "first", "count"),  # tokens and stages of the warp
    *("now", "again"),  # length and page, read once more
    *("page", "later", "source"),  # pages of stages
    *("read", "parity"),  # of the ring
    *("lane", "warp", "query", "head"),  # of the thread, and of a row
    "least",  # tokens below need no mask, unless a window ends there
)


def stage_words(layout: CacheLayout, tiles: int) -> int:
    """int32 words of one stage of a warp's ring."""
    return layout.channel_words + tiles * layout.tile_words


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


def build(
    target,
    *,
    k_format: str,
    v_format: str,
    head_dim: int,
    dtype: str,
    row_tiles: int,
    warps: int,
    tiles: int,
    stages: int,
    min_blocks: int,
    shared_rows: bool,
    page: int,
    residual: int,
    softcap: bool,
    sinks: bool,
    ahead: int = 0,
    parts: int = 1,
    cluster: int = 1,
    convert: str = "masked",
    balanced: bool = False,
    sink_tokens: int = 0,
):
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
        convert: "masked", or "plain" for integer-to-float instructions (ablation.py).
        balanced: sequences get splits in proportion to their tokens, without clusters. Of P CTAs along x, P - B are
            what the tokens of all are divided by (schedules/attention_balance.py).

    Shapes: Q and O [B, q_len, Hq, D] in `dtype`; KV int32 [pages, Hkv, page words]; TABLE int32 [B, most pages] (one
    element when contiguous); LEN int32 [B], tokens in all, the q_len new ones included; RES int32 [slots, Hkv, words]
    and SLOT int32 [B]; SK, SV f32 [Hkv, D] for static formats (one element otherwise); SINK f32 [Hq]; OP f32
    [B, Y, P, rows, D] and LP f32 [B, Y, P, cluster * rows], Y = Hkv * row groups, P = splits / cluster, of a balanced
    kernel [1, Y, P, ...], P splits of all sequences; SEM int32 [B * Y * cluster], zero between launches; LSE f32
    [B, q_len, Hq], base 2. Scalars: softmax scale * log2(e), cap * log2(e), window in tokens (0: none).
    """
    import tilelang.language as T

    layout = {"masked": CacheLayout, "plain": PlainLayout}[convert](k_format, v_format, head_dim, sink_tokens)
    D, nt, cols, slices = head_dim, row_tiles, 8 * row_tiles, head_dim // 16
    group, mini = layout.k.group, 16 * tiles
    if group and (group % mini or residual != group):
        raise ArgumentError(
            "tiles", tiles, f"16 * tiles must divide the group {group}, and residual be {group}", "change it"
        )
    if parts > 1 and (not group or group % (mini * parts)):
        raise ArgumentError("parts", parts, f"warps take whole stages of {mini} tokens of a group of {group}", "use 1")
    if shared_rows and layout.k_layout.block_k < 32:
        raise ArgumentError("shared_rows", shared_rows, f"{k_format} keys are loaded one atom at a time", "use False")
    if residual and layout.v.scaling == "static":
        raise ArgumentError(
            "v_format", v_format, "static values cannot join f16 residual tokens", "use token-wise values"
        )
    if page % max(mini, layout.block_tokens):
        raise ArgumentError("page", page, f"must be a multiple of {max(mini, layout.block_tokens)}", "change tiles")
    if not 0 <= ahead <= 32:
        raise ArgumentError("ahead", ahead, "must be 0..32: a lane fetches a stage", "use 0")
    if not 1 <= cluster <= (BATCH if target.supports("cluster") and not balanced else 1):
        constraint = "balanced kernels have none" if balanced else f"{target.arch} has clusters of 1..16 CTAs or none"
        raise ArgumentError("cluster", cluster, constraint, "use 1")
    stage = stage_words(layout, tiles)
    threads = warps * 32
    total_words = shared_words(layout, nt, warps, tiles, stages, shared_rows, cluster)
    queries = total_words - query_words(layout, nt, warps, shared_rows)
    q_pitch, in_slot = row_pitch(D), rows_of_slot(layout, nt, warps, tiles)
    turns = -(-cols * (D // 8) // threads)  # pieces of Q that a thread fetches
    fragment_words, facts = 4 * D * nt, total_words - 2 * cols
    spare_tiles = residual // 16 + 1  # one more than a block: new tokens never overwrite those of a block to be packed
    bulk, pdl = target.supports("bulk_copy"), target.supports("pdl")
    found = [layout.k.converter, layout.v.converter, *([get_converter("f16_f16")] if residual else [])]
    source = attention_prelude(
        "cp_async", "lds", "ldmatrix", "pack", "bulk", "semaphore", "warpgroup", "prefetch",
        extra=tuple(dict.fromkeys(c.device_source for c in sorted(found, key=lambda c: c.name))),
    )  # fmt: skip
    sliding = bool(residual) and not group  # the ring takes over inside a stage
    tile = make_tile_macros(layout, nt, tiles, softcap, shared_rows, sliding)
    spare = make_tile_macros(CacheLayout("float16", "float16", head_dim), nt, 1, softcap) if residual else None
    copies = make_copy_macros(
        layout, tiles=tiles, stages=stages, warps=warps, parts=parts, page=page, residual=residual, bulk=bulk,
        ahead=ahead if pdl else 0, known=balanced,
    )  # fmt: skip
    merge = make_merge_macros(layout, tile, row_tiles=nt, warps=warps, cluster=cluster, dtype=dtype, sinks=sinks)
    cluster_dims = dict(cluster_dims=(cluster, 1, 1)) if cluster > 1 else {}
    k_static = layout.k.scaling == "static"
    rotation = make_rotation(D, 8, row_stages(D)) if layout.k.rotated else None
    at_once = 256 // D  # rows of a warp with 8 dimensions in a lane
    row_dtype = dtype if rotation is None else "float16"  # of Q in shared memory
    row_bf16 = "true" if row_dtype == "bfloat16" else "false"
    mixed = layout.k.operand != row_dtype

    B, QL, HQ, HK = T.dynamic("b"), T.dynamic("q_len"), T.dynamic("hq"), T.dynamic("hk")
    PAGES, PAGE_WORDS, TABLE_B, MOST = T.dynamic("pages"), T.dynamic("page_words"), T.dynamic("tb"), T.dynamic("most")
    SLOTS, RES_H, RES_WORDS = T.dynamic("slots"), T.dynamic("rh"), T.dynamic("res_words")
    SKH, SKD, SVH, SVD, SINKS = (T.dynamic(name) for name in ("skh", "skd", "svh", "svd", "n_sinks"))
    Y, P = T.dynamic("y"), T.dynamic("p")
    S, part_rows = P * cluster, 1 if balanced else B

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
                    T.access_ptr(Q[w.b, w.row_query[v], w.row_head[v], col], "r", 8),
                    T.call_extern("int32", "tz_select", less(w.y[0] * cols + row, w.rows[0]), 16, 0),
                )  # fmt: skip
        T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def await_rows():
        """The rows are there, for all warps."""
        T.call_extern("handle", f"tz_cp_wait<{0 if bulk else stages - 1}>")
        T.sync_threads()

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

    @T.macro
    def find_place(LEN, place, held, x, window):
        """The work of CTA x of a balanced kernel, from the first lengths `held` and those that follow them."""
        T.call_extern(
            "handle", "tz_place", T.access_ptr(place, "w"), T.access_ptr(held, "r"), T.access_ptr(LEN, "r"), B,
            T.call_extern("int32", "tz_select", less(0, window), window + QL, 0x7FFFFFFF), x, P - B, copies.least,
            MOST_SPLITS,
        )  # fmt: skip

    @T.macro
    def find_ring(w, at):
        """w.source, w.tile: first token of the tile number `at` that lies in f16, its place; w.parts: how many there
        are, the first tokens' one counted if it is not the ring's."""
        first = T.call_extern("int32", "tz_select", less(0, w.packed[0]), 1, 0) if sink_tokens else 0
        w.parts[0] = (w.length[0] - w.packed[0] + 15) // 16 + first
        w.source[0] = w.packed[0] + (at - first) * 16
        w.tile[0] = w.source[0] // 16 % spare_tiles
        if sink_tokens:
            if less(at, first):
                w.source[0] = 0
                w.tile[0] = spare_tiles

    def ring_tile(RES, w, slot):
        """Address of the tile w.tile of a residual ring."""
        at = w.h[0] * RES_WORDS + w.tile[0] * spare.tile_words
        return T.call_extern("handle", "tz_page", T.access_ptr(RES[0, 0, 0], "r", 1), slot, RES_H * RES_WORDS, at)

    @T.macro
    def prefetch_ring(RES, SLOT, w):
        """The warp's first tile of those in f16 on its way to L2; where that is may be wrong."""
        find_ring(w, w.warp[0] * w.splits + w.split)
        wanted = T.And(less(w.warp[0] * w.splits + w.split, w.parts[0]), less(w.lane[0], 1))
        if T.And(wanted, less(-1, w.tile[0])):
            slot = smaller(larger(peek(SLOT, w.b), 0), SLOTS - 1)
            T.call_extern("handle", "tz_prefetch", ring_tile(RES, w, slot), 4 * spare.tile_words)

    @T.macro
    def expect_work(KV, TABLE, LEN, RES, SLOT, place, early, x, w):
        """What is most likely the CTA's work, and its first stages on their way to L2, whatever the kernel ahead does;
        `early` are the lengths that say so."""
        for i in each(4):
            early[i] = -2
        if pdl and ahead:
            if less(B, _AT_A_TIME + 1):
                T.call_extern("handle", "tz_lengths<true>", T.access_ptr(early, "w"), T.access_ptr(LEN, "r"), B, 0)
                find_place(LEN, place, early, x, w.window)
                w.length[0] = place[4]
                if less(0, place[2]):
                    copies.prefetch(KV, TABLE, LEN, w)
                    if sliding:
                        prefetch_ring(RES, SLOT, w)

    @T.macro
    def find_work(TABLE, LEN, place, early, late, moved, x, w):
        """The CTA's work, where the lengths are others than `early`; a CTA without work ends here."""
        T.call_extern("handle", "tz_lengths<false>", T.access_ptr(late, "w"), T.access_ptr(LEN, "r"), B, 0)
        differs = T.call_extern("bool", "tz_differ4", T.access_ptr(early, "r"), T.access_ptr(late, "r"))
        moved[0] = T.Cast("int32", T.call_extern("bool", "tz_any", differs))
        if less(0, moved[0]):
            find_place(LEN, place, late, x, w.window)
        if less(place[2], 1):
            T.thread_return()
        w.now[0] = place[4]
        if pdl and ahead:
            if less(0, moved[0]):
                copies.again(TABLE, w)
        else:
            w.length[0] = place[4]

    @T.macro
    def read_group(RES, SLOT, st, w):
        """The f16 tokens of a channel group that is not full yet, a tile for each warp in turn."""
        for i in T.serial(T.ceildiv(w.length[0] - w.packed[0], 16 * warps * w.splits)):
            j = (i * warps + w.warp[0]) * w.splits + w.split
            if less(w.packed[0] + j * 16, w.length[0]):
                spare.step(
                    T.call_extern(
                        "handle", "tz_page", T.access_ptr(RES[0, 0, 0], "r", 1), peek(SLOT, w.b), RES_H * RES_WORDS,
                        w.h[0] * RES_WORDS + (w.packed[0] // 16 + j) % spare_tiles * spare.tile_words,
                    ),
                    st, st.qk, w.packed[0] + j * 16, w.length[0], True, w.lane[0],
                )  # fmt: skip
        tile.adopt(st)

    @T.macro
    def read_ring(RES, SLOT, st, w):
        """The f16 tokens behind the packed ones, and those ahead of them, a tile for each warp in turn."""
        find_ring(w, 0)
        for i in T.serial((w.parts[0] + warps * w.splits - 1) // (warps * w.splits)):
            at = (i * warps + w.warp[0]) * w.splits + w.split
            if less(at, w.parts[0]):
                find_ring(w, at)
                spare.step(ring_tile(RES, w, w.slot[0]), st, st.qk, w.source[0], w.length[0], True, w.lane[0])
        tile.adopt(st)

    def outside(w, token, begins):
        """Whether tokens of the stage may lie outside of a row's limits, or are read from the ring."""
        found = T.Or(
            less(smaller(w.least[0], w.packed[0]) if sliding else w.least[0], token + mini), less(token, begins)
        )
        return T.Or(found, less(token, sink_tokens)) if sink_tokens else found

    @T.prim_func
    def main(
        Q: T.Tensor((B, QL, HQ, D), dtype),
        KV: T.Tensor((PAGES, HK, PAGE_WORDS), "int32"),
        TABLE: T.Tensor((TABLE_B, MOST), "int32"),
        LEN: T.Tensor((B,), "int32"),
        RES: T.Tensor((SLOTS, RES_H, RES_WORDS), "int32"),
        SLOT: T.Tensor((B,), "int32"),
        SK: T.Tensor((SKH, SKD), "float32"),
        SV: T.Tensor((SVH, SVD), "float32"),
        SINK: T.Tensor((SINKS,), "float32"),
        OP: T.Tensor((part_rows, Y, P, cols, D), "float32"),
        LP: T.Tensor((part_rows, Y, P, cluster * cols), "float32"),
        SEM: T.Tensor((B * Y * cluster,), "int32"),
        O: T.Tensor((B, QL, HQ, D), dtype),
        LSE: T.Tensor((B, QL, HQ), "float32"),
        scale: T.float32,
        cap: T.float32,
        window: T.int32,
    ):
        with T.Kernel(S, Y, part_rows, threads=threads, prelude=source, **cluster_dims) as (bx, hy, bz):
            ring = T.alloc_shared((total_words,), "int32")
            full = T.alloc_barrier([1] * (warps * stages)) if bulk else None
            sent = T.alloc_barrier([1]) if cluster > 1 else None
            T.annotate_min_blocks_per_sm(min_blocks)
            tx = T.get_thread_binding()
            st = tile.state(scale, cap, window)
            setattr(st, "row_facts", T.access_ptr(ring[facts], "r"))  # noqa: B010  (TileLang takes = for a buffer's)
            if layout.k.rotated or layout.v.rotated:
                setattr(st, "turned", T.alloc_local((1,), "float32"))  # noqa: B010
            if layout.k.rotated:
                setattr(st, "rotated", T.alloc_local((8,), "float32"))  # noqa: B010
            c = merge_state()
            ints = {name: T.alloc_local((1,), "int32") for name in INTEGERS}
            ints |= {name: T.alloc_local((1,), "int32") for name in ("tile", "parts", "slot")} if sliding else {}
            place = T.alloc_local((5,), "int32")  # of tz_place
            early, late, moved = (T.alloc_local((size,), "int32") for size in (4, 4, 1))
            w = SimpleNamespace(
                b=place[0] if balanced else bz, hy=hy, split=place[1] if balanced else bx,
                splits=place[2] if balanced else S, partials=place[2] if balanced else P,
                part_row=0 if balanced else bz, part_base=place[3] if balanced else 0, q_len=QL, window=window,
                kv_heads=HK, pages=PAGES, most=MOST, page_words=PAGE_WORDS, row_query=T.alloc_local((turns,), "int32"),
                row_head=T.alloc_local((turns,), "int32"), sent=sent, member=ints["lane"], **ints,
            )  # fmt: skip
            if pdl:
                T.pdl_trigger()
            w.lane[0] = tx % 32
            w.warp[0] = tx // 32
            w.group[0] = T.truncdiv(HQ, HK)
            w.rows[0] = w.group[0] * QL
            w.h[0] = T.truncdiv(hy * HK, Y)
            w.y[0] = hy - w.h[0] * T.truncdiv(Y, HK)
            w.here[0] = smaller(cols, w.rows[0] - w.y[0] * cols)
            w.read[0] = 0
            w.parity[0] = 0
            place_rows(st, w, tx)
            if balanced:
                expect_work(KV, TABLE, LEN, RES, SLOT, place, early, bx, w)
            elif pdl and ahead:
                copies.prefetch(KV, TABLE, LEN, w)
                if sliding:
                    prefetch_ring(RES, SLOT, w)
            if pdl:
                T.pdl_sync()
            if balanced:
                find_work(TABLE, LEN, place, early, late, moved, bx, w)
            ask_rows(Q, ring, w, tx)
            if sliding:
                w.slot[0] = peek(SLOT, w.b)
            copies.start(KV, TABLE, LEN, ring, full, w)
            copies.confirm(KV, TABLE, ring, full, w)
            tile.clear(st)
            await_rows()
            for i in each(nt * 2):
                st.hi[i] = st.hi[i] + w.length[0]
            w.least[0] = w.least[0] + w.length[0]
            if rotation is not None:
                rotate_rows(ring, st, w)
            if residual:
                if less(0 if sink_tokens else w.packed[0], w.length[0]):
                    spare_q(ring, st, w)
                    if sliding:
                        read_ring(RES, SLOT, st, w)
                    else:
                        read_group(RES, SLOT, st, w)
            load_q(ring, SK, st, w)  # behind the residual block, which has fragments of its own
            if group or shared_rows:
                share_q(ring, st, w)
            elif in_slot:
                T.sync_threads()  # every warp has its rows before a slot of any ring is refilled
            for i in T.serial(w.count[0]):
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
                    if less(i + stages - 1, w.count[0]):
                        copies.fetch(
                            KV, TABLE, ring, full, w, i + stages - 1,
                            T.call_extern(
                                "int32", "tz_select", less(0, w.read[0]), w.read[0] - 1, stages - 1
                            ),  # the slot that was read last
                        )  # fmt: skip
                if not bulk and stages > 1:
                    T.call_extern("handle", "tz_cp_commit")
                token = copies.token_of(w, i)
                at = (w.warp[0] * stages + w.read[0]) * stage
                if group:
                    if i % copies.per_chunk == 0:
                        tile.scale_q(
                            T.access_ptr(ring[at], "r", stage),
                            T.access_ptr(ring[queries], "r"),
                            T.access_ptr(ring[queries + (1 + w.warp[0]) * fragment_words], "rw"),
                            st,
                            w.lane[0],
                        )
                begins = T.call_extern("int32", "tz_select", less(0, window), w.length[0] - window, sink_tokens)
                tile.step(
                    T.access_ptr(ring[at + layout.channel_words], "r", stage),
                    st, rows_of(ring, st, w), token, w.packed[0] if sliding else w.length[0],
                    outside(w, token, begins), w.lane[0],
                )  # fmt: skip
                w.read[0] = w.read[0] + 1
                if w.read[0] == stages:
                    w.read[0] = 0
                    w.parity[0] = w.parity[0] ^ 1
            merge.stage_sums(ring, SV, st, w)
            if cluster > 1:
                T.cluster_wait()  # the others' rings are free, too
            merge.merge_warps(ring, OP, LP, O, LSE, SINK, c, w, tx)
            if cluster > 1:
                merge.merge_cluster(ring, OP, LP, O, LSE, SINK, c, w, tx)
            if w.partials > 1:
                group_of = (w.b * Y + hy) * cluster + w.split % cluster
                if T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[group_of], "rw", 1), w.partials):
                    merge.combine_splits(ring, OP, LP, O, LSE, SINK, c, w, tx)

    return main
