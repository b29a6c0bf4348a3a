"""Tile program of decode attention: split-KV over packed tiles, keys and values as register operands (specs.md I.6).

S^T[16 tokens, 8 rows] = K Q^T and O^T[16 dims, 8 rows] += V^T P^T, mma.sync m16n8k16; a row is one (new token, query
head) of a kv head. Every warp owns a private ring of stages, its tokens, and its (m, l, O^T): between the first copy
and the last merge no warp waits for another one. A stage is refilled one iteration after its last read, behind the MMAs
that consumed it (docs/tile-programs.md).

Codes enter the tensor core unscaled. Token-wise scales multiply rows of S^T and of P^T, channel-wise ones multiply Q
once for each group, static ones Q and O; zeros become a rank-one term. P^T is transposed in registers (movmatrix). The
running maximum is lazy: sums are rescaled only when a score exceeds it by 2^4, so steady iterations shuffle nothing.

The last split to finish combines all splits of its rows in a fixed order: results have the same bits in every run.
"""

from types import SimpleNamespace

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.ablation import PlainLayout
from terrazzo.ops.attention.device import attention_prelude
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.tile_macros import LOWEST, each, larger, less, make_tile_macros, smaller

PASS_CONFIGS = (  # barriers and bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
MAX_SPLITS = 128
BATCH = 16  # partial results that the combine loads at once
INTEGERS = (
    *("length", "group", "rows", "h", "y", "here"),  # of the sequence and of the CTA's rows
    *("packed", "start", "r0", "r1", "first", "count"),  # tokens and stages of the warp
    *("page", "read", "parity"),  # of the ring
    *("lane", "warp", "query", "head"),  # of the thread, and of a row
    "least",  # tokens below need no mask, unless a window ends there
)


def stage_words(layout: CacheLayout, tiles: int) -> int:
    """int32 words of one stage of a warp's ring."""
    return layout.channel_words + tiles * layout.tile_words


def query_words(layout: CacheLayout, row_tiles: int, warps: int, shared_rows: bool) -> int:
    """int32 words of the rows' B fragments in shared memory, from where channel-wise scales take them anew, or every
    step with `shared_rows`; then each warp's scaled ones lie there too, and where its tokens end and the sum of Q for
    each row."""
    copies = bool(layout.k.group or shared_rows) + (warps if layout.k.group and shared_rows else 0)
    return 4 * layout.head_dim * row_tiles * copies + (16 * row_tiles if shared_rows else 0)


def shared_words(
    layout: CacheLayout, row_tiles: int, warps: int, tiles: int, stages: int, shared_rows: bool = False
) -> int:
    """int32 words of shared memory: the rings, which the merge of the warps reuses, and
    behind them the B fragments of `query_words`."""
    rows = 8 * row_tiles
    merge = warps * rows * (layout.head_dim + 4 + 2)
    rings = max(warps * stages * stage_words(layout, tiles), merge)
    return rings + query_words(layout, row_tiles, warps, shared_rows)


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
    convert: str = "masked",
):
    """The prim_func `main` for up to 8 * row_tiles rows in a CTA.

    Args:
        dtype: of q and out. tiles: 16-token tiles in a stage of a warp. min_blocks: CTAs on an SM that registers allow.
        shared_rows: the rows' B fragments stay in shared memory, for more warps with more rows.
        page: tokens of a page, 0 for a contiguous cache (one page for each sequence).
        residual: tokens of the f16 residual block, 0 for none. Its tiles are a ring of one more (`PackedCache`).
        softcap, sinks: whether the logits are capped, and whether each head has a sink.
        convert: "masked", or "plain" for integer-to-float instructions (ablation.py).

    Shapes: Q and O [B, q_len, Hq, D] in `dtype`; KV int32 [pages, Hkv, page words]; TABLE int32 [B, most pages] (one
    element when contiguous); LEN int32 [B], tokens in all, the q_len new ones included; RES int32 [slots, Hkv, words]
    and SLOT int32 [B]; SK, SV f32 [Hkv, D] for static formats (one element otherwise); SINK f32 [Hq]; OP f32
    [B, Y, S, rows, D] and LP f32 [B, Y, S, rows], Y = Hkv * row groups; SEM int32 [B * Y], zero between launches; LSE
    f32 [B, q_len, Hq], base 2. Scalars: softmax scale * log2(e), cap * log2(e), window in tokens (0: none).
    """
    import tilelang.language as T

    layout = {"masked": CacheLayout, "plain": PlainLayout}[convert](k_format, v_format, head_dim)
    D, nt, cols, slices = head_dim, row_tiles, 8 * row_tiles, head_dim // 16
    group, mini = layout.k.group, 16 * tiles
    if group and (group % mini or residual != group):
        raise ArgumentError(
            "tiles", tiles, f"16 * tiles must divide the group {group}, and residual be {group}", "change it"
        )
    if residual and layout.v.scaling == "static":
        raise ArgumentError(
            "v_format", v_format, "static values cannot join f16 residual tokens", "use token-wise values"
        )
    if residual % mini:
        raise ArgumentError("tiles", tiles, f"16 * tiles must divide the residual block of {residual}", "change it")
    if page % max(mini, layout.block_tokens):
        raise ArgumentError("page", page, f"must be a multiple of {max(mini, layout.block_tokens)}", "change tiles")
    per_chunk = max(group // mini, 1)  # stages that a warp takes from one group
    chunk = per_chunk * mini
    head_words, tile_words, stage = layout.channel_words, layout.tile_words, stage_words(layout, tiles)
    threads = warps * 32
    total_words = shared_words(layout, nt, warps, tiles, stages, shared_rows)
    queries = total_words - query_words(layout, nt, warps, shared_rows)
    fragment_words, facts = 4 * D * nt, total_words - 2 * cols
    spare_tiles = residual // 16 + 1  # one more than a block: new tokens never overwrite those of a block to be packed
    bulk = target.supports("bulk_copy")
    pitch = D + 4  # of a merge row: the lanes of a quad store to different banks
    merge_warp = cols * (pitch + 2)
    bf16 = "true" if dtype == "bfloat16" else "false"
    found = [layout.k.converter, layout.v.converter, *([get_converter("f16_f16")] if residual else [])]
    source = attention_prelude(
        "cp_async", "lds", "pack", "bulk", "semaphore", "warpgroup",
        extra=tuple(dict.fromkeys(c.device_source for c in sorted(found, key=lambda c: c.name))),
    )  # fmt: skip
    tile = make_tile_macros(layout, nt, tiles, softcap, shared_rows)
    spare = make_tile_macros(CacheLayout("float16", "float16", head_dim), nt, 1, softcap) if residual else None
    k_static, v_static = layout.k.scaling == "static", layout.v.scaling == "static"
    mixed = layout.k.operand != dtype

    B, QL, HQ, HK = T.dynamic("b"), T.dynamic("q_len"), T.dynamic("hq"), T.dynamic("hk")
    PAGES, PAGE_WORDS, TABLE_B, MOST = T.dynamic("pages"), T.dynamic("page_words"), T.dynamic("tb"), T.dynamic("most")
    SLOTS, RES_H, RES_WORDS = T.dynamic("slots"), T.dynamic("rh"), T.dynamic("res_words")
    SKH, SKD, SVH, SVD, SINKS = (T.dynamic(name) for name in ("skh", "skd", "svh", "svd", "n_sinks"))
    Y, S = T.dynamic("y"), T.dynamic("s")

    def token_of(w, i):
        """First token of the warp's stage i."""
        return w.first[0] + i // per_chunk * (warps * chunk) + i % per_chunk * mini

    @T.macro
    def fetch(KV, TABLE, ring, full, w, i, place):
        """Copies of the warp's stage i, into slot `place` of its ring."""
        token = token_of(w, i)
        inside = token % page if page else token
        word = w.h[0] * PAGE_WORDS + inside // layout.block_tokens * layout.block_words
        skip = T.if_then_else(i % per_chunk == 0, 0, head_words) if group else 0
        at = word + (skip + i % per_chunk * (tiles * tile_words) if group else 0)
        words = stage - skip
        if not page and not group and tiles > 1:  # a sequence's storage may end inside a stage
            words = smaller(stage, PAGE_WORDS - inside // layout.block_tokens * layout.block_words)
        bar = w.warp[0] * stages + place
        slot = bar * stage + skip
        if bulk:
            if less(w.lane[0], 1):
                T.mbarrier_expect_tx(full[bar], words * 4)
                T.call_extern(
                    "handle",
                    "tz_bulk",
                    T.access_ptr(ring[slot], "w", stage),
                    T.call_extern(
                        "handle", "tz_page", T.access_ptr(KV[0, 0, 0], "r", 1), w.page[0], HK * PAGE_WORDS, at
                    ),
                    words * 4,
                    T.access_ptr(full[bar], "rw", 1),
                )
                T.barrier_arrive(full[bar])
        else:
            for j in each(-(-stage // 128)):
                if less(j * 128 + w.lane[0] * 4, words):
                    T.call_extern(
                        "handle",
                        "tz_cp_async",
                        T.access_ptr(ring[slot + j * 128 + w.lane[0] * 4], "w", 4),
                        T.call_extern(
                            "handle",
                            "tz_page",
                            T.access_ptr(KV[0, 0, 0], "r", 1),
                            w.page[0],
                            HK * PAGE_WORDS,
                            at + j * 128 + w.lane[0] * 4,
                        ),
                        16,
                    )
        if page:  # the page of the next stage, an iteration ahead of its use
            w.page[0] = TABLE[w.b, token_of(w, smaller(i + 1, w.count[0] - 1)) // page]

    @T.macro
    def limits(st, w):
        """End of what each row sees."""
        for t in each(nt):
            for j in each(2):
                w.query[0] = T.truncdiv(w.y[0] * cols + t * 8 + w.lane[0] % 4 * 2 + j, w.group[0])
                st.hi[t * 2 + j] = w.length[0] - w.q_len + 1 + smaller(w.query[0], w.q_len - 1)

    @T.macro
    def row_words(Q, words, w, t):
        """Words of a lane's row of tile t, as they lie in Q; zeros for rows that do not exist."""
        row = w.y[0] * cols + t * 8 + w.lane[0] // 4
        exists = T.call_extern("uint32", "tz_less_mask", row, w.rows[0])
        w.query[0] = smaller(row, w.rows[0] - 1)
        w.head[0] = w.h[0] * w.group[0] + T.truncmod(w.query[0], w.group[0])
        w.query[0] = T.truncdiv(w.query[0], w.group[0])
        for k in each(slices):
            for half in each(2):
                words[(k * nt + t) * 2 + half] = exists & T.call_extern(
                    "uint32",
                    "tz_load32",
                    T.access_ptr(Q[w.b, w.query[0], w.head[0], k * 16 + half * 8 + w.lane[0] % 4 * 2], "r", 2),
                )

    @T.macro
    def load_q(Q, SK, st, w):
        """B fragments of the rows, and the sums of Q that zeros multiply."""
        for t in each(nt):
            row_words(Q, st.q, w, t)
            if mixed or k_static or tile.k_shift != (0, 0):
                for k in each(slices):
                    for half in each(2):
                        at = (k * nt + t) * 2 + half
                        st.f[0] = T.call_extern("float32", f"tz_unpack<{bf16}, 0>", st.q[at])
                        st.f[1] = T.call_extern("float32", f"tz_unpack<{bf16}, 1>", st.q[at])
                        for e in each(2):
                            st.f[e] = st.f[e] * T.float32(2.0 ** tile.k_shift[half])
                            if k_static:
                                st.f[e] = st.f[e] * SK[w.h[0], k * 16 + half * 8 + w.lane[0] % 4 * 2 + e]
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
    def spare_q(Q, st, w):
        """The same fragments for the f16 residual block, where the packed keys want other ones."""
        for t in each(nt):
            row_words(Q, st.qk, w, t)
            if dtype == "bfloat16":
                for k in each(slices):
                    for half in each(2):
                        at = (k * nt + t) * 2 + half
                        st.f[0] = T.call_extern("float32", "tz_unpack<true, 0>", st.qk[at])
                        st.f[1] = T.call_extern("float32", "tz_unpack<true, 1>", st.qk[at])
                        st.qk[at] = T.call_extern("uint32", "tz_pack2<false>", st.f[0], st.f[1])

    @T.macro
    def stage_sums(ring, SV, st, w):
        """The warp's sums to shared memory, true scale, rows [row][dim] | m | l."""
        for i in each(nt * 2):
            for d in each(3):
                st.l[i] = st.l[i] + T.call_extern("float32", "tz_xor_shuffle", st.l[i], 4 << d)
                if tile.v_token:
                    st.z[i] = st.z[i] + T.call_extern("float32", "tz_xor_shuffle", st.z[i], 4 << d)
        T.sync_threads()  # every warp is done with its ring
        for t in each(nt):
            for j in each(2):
                row = t * 8 + w.lane[0] % 4 * 2 + j
                at = w.warp[0] * merge_warp + row * pitch + w.lane[0] // 4
                for a in each(slices):
                    for half in each(2):
                        st.f[0] = st.o[(a * nt + t) * 4 + half * 2 + j] * T.float32(tile.v_factor[half])
                        if tile.v_token:
                            st.f[0] = st.f[0] + st.z[t * 2 + j]
                        if layout.v.bias:
                            st.f[0] = st.f[0] + st.l[t * 2 + j] * T.float32(layout.v.bias)
                        if v_static:
                            st.f[0] = st.f[0] * SV[w.h[0], a * 16 + half * 8 + w.lane[0] // 4]
                        ring[at + a * 16 + half * 8] = T.reinterpret(st.f[0], "int32")
                if less(w.lane[0], 4):
                    ring[w.warp[0] * merge_warp + cols * pitch + row] = T.reinterpret(st.m[t * 2 + j], "int32")
                    ring[w.warp[0] * merge_warp + cols * (pitch + 1) + row] = T.reinterpret(st.l[t * 2 + j], "int32")
        T.sync_threads()

    @T.macro
    def finish_row(O, LSE, SINK, c, w, row, col):
        """Four head dimensions of an output row from their weighted sum, c.l and c.m."""
        w.query[0] = T.truncdiv(row, w.group[0])
        w.head[0] = w.h[0] * w.group[0] + T.truncmod(row, w.group[0])
        if sinks:  # one more column of logits, without a value
            c.top[0] = T.max(c.m[0], SINK[w.head[0]] * T.float32(1.4426950408889634))
            c.f[0] = T.call_extern("float32", "tz_ex2", c.m[0] - c.top[0])
            c.l[0] = c.l[0] * c.f[0] + T.call_extern(
                "float32", "tz_ex2", SINK[w.head[0]] * T.float32(1.4426950408889634) - c.top[0]
            )
            for e in each(4):
                c.o[e] = c.o[e] * c.f[0]
            c.m[0] = c.top[0]
        c.f[0] = T.if_then_else(c.l[0] > 0, T.float32(1) / c.l[0], T.float32(0))
        T.call_extern(
            "handle",
            "tz_store8",
            T.access_ptr(O[w.b, w.query[0], w.head[0], col], "w", 4),
            T.call_extern("uint32", f"tz_pack2<{bf16}>", c.o[0] * c.f[0], c.o[1] * c.f[0]),
            T.call_extern("uint32", f"tz_pack2<{bf16}>", c.o[2] * c.f[0], c.o[3] * c.f[0]),
        )
        if less(col, 1):
            LSE[w.b, w.query[0], w.head[0]] = T.if_then_else(
                c.l[0] > 0, c.m[0] + T.call_extern("float32", "tz_log2", c.l[0]), -T.infinity("float32")
            )

    @T.macro
    def merge_warps(ring, OP, LP, O, LSE, SINK, c, w, tx):
        """Sum over the warps in their order; the result is the output, or a partial one with its (m, l) as one lse."""
        for v in T.serial(T.ceildiv(w.here[0] * (D // 4), threads)):
            row = (v * threads + tx) // (D // 4)
            col = (v * threads + tx) % (D // 4) * 4
            if less(row, w.here[0]):
                c.m[0] = T.float32(LOWEST)
                c.l[0] = 0.0
                for e in each(4):
                    c.o[e] = 0.0
                for k in each(warps):
                    c.m[0] = T.max(c.m[0], T.reinterpret(ring[k * merge_warp + cols * pitch + row], "float32"))
                for k in each(warps):
                    c.f[0] = T.call_extern(
                        "float32",
                        "tz_ex2",
                        T.reinterpret(ring[k * merge_warp + cols * pitch + row], "float32") - c.m[0],
                    )
                    c.l[0] = c.l[0] + c.f[0] * T.reinterpret(ring[k * merge_warp + cols * (pitch + 1) + row], "float32")
                    T.call_extern(
                        "handle",
                        "tz_load<4>",
                        T.access_ptr(c.x, "w", 4),
                        T.access_ptr(ring[k * merge_warp + row * pitch + col], "r", 4),
                    )
                    for e in each(4):
                        c.o[e] = c.o[e] + c.f[0] * c.x[e]
                if S == 1:
                    finish_row(O, LSE, SINK, c, w, w.y[0] * cols + row, col)
                else:
                    c.f[0] = T.if_then_else(c.l[0] > 0, T.float32(1) / c.l[0], T.float32(0))
                    for e in each(4):
                        c.o[e] = c.o[e] * c.f[0]
                    T.call_extern(
                        "handle",
                        "tz_store16",
                        T.access_ptr(OP[w.b, w.hy, w.split, row, col], "w", 4),
                        T.access_ptr(c.o, "r"),
                    )
                    if less(col, 1):
                        LP[w.b, w.hy, w.split, row] = T.if_then_else(
                            c.l[0] > 0,
                            c.m[0] + T.call_extern("float32", "tz_log2", c.l[0]),
                            T.float32(LOWEST),
                        )

    @T.macro
    def load_partials(OP, LP, c, w, k, half, row, col):
        """Half a batch of partial results of a row, and their lse."""
        for i in each(half * BATCH // 2, (half + 1) * BATCH // 2):
            T.call_extern(
                "handle",
                "tz_load16cg",
                T.access_ptr(c.x[i * 4], "w", 4),
                T.access_ptr(OP[w.b, w.hy, smaller(k * BATCH + i, S - 1), row, col], "r", 4),
            )
            c.lse[i] = T.call_extern(
                "float32", "tz_loadcg", T.access_ptr(LP[w.b, w.hy, smaller(k * BATCH + i, S - 1), row], "r", 1)
            )

    @T.macro
    def add_partials(c, k, half):
        for i in each(half * BATCH // 2, (half + 1) * BATCH // 2):
            if less(k * BATCH + i, S):
                c.f[0] = T.if_then_else(
                    c.lse[i] > T.float32(LOWEST),
                    T.call_extern("float32", "tz_ex2", c.lse[i] - c.m[0]),
                    T.float32(0),
                )
                c.l[0] = c.l[0] + c.f[0]
                for e in each(4):
                    c.o[e] = c.o[e] + c.f[0] * c.x[i * 4 + e]

    @T.macro
    def combine_splits(OP, LP, O, LSE, SINK, c, w, tx):
        """The last split adds all of them in their order, with a running maximum."""
        for v in T.serial(T.ceildiv(w.here[0] * (D // 4), threads)):
            row = (v * threads + tx) // (D // 4)
            col = (v * threads + tx) % (D // 4) * 4
            if less(row, w.here[0]):
                c.m[0] = T.float32(LOWEST)
                c.l[0] = 0.0
                for e in each(4):
                    c.o[e] = 0.0
                for k in T.serial(T.ceildiv(S, BATCH)):  # loads of a batch are in flight together
                    load_partials(OP, LP, c, w, k, 0, row, col)
                    for i in each(BATCH // 2, BATCH):
                        c.lse[i] = T.float32(LOWEST)
                    if less(k * BATCH + BATCH // 2, S):
                        load_partials(OP, LP, c, w, k, 1, row, col)
                    c.top[0] = c.m[0]
                    for i in each(BATCH):
                        c.top[0] = T.max(c.top[0], c.lse[i])
                    c.f[0] = T.call_extern("float32", "tz_ex2", c.m[0] - c.top[0])
                    c.m[0] = c.top[0]
                    c.l[0] = c.l[0] * c.f[0]
                    for e in each(4):
                        c.o[e] = c.o[e] * c.f[0]
                    add_partials(c, k, 0)
                    if less(k * BATCH + BATCH // 2, S):
                        add_partials(c, k, 1)
                finish_row(O, LSE, SINK, c, w, w.y[0] * cols + row, col)

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
        OP: T.Tensor((B, Y, S, cols, D), "float32"),
        LP: T.Tensor((B, Y, S, cols), "float32"),
        SEM: T.Tensor((B * Y,), "int32"),
        O: T.Tensor((B, QL, HQ, D), dtype),
        LSE: T.Tensor((B, QL, HQ), "float32"),
        scale: T.float32,
        cap: T.float32,
        window: T.int32,
    ):
        with T.Kernel(S, Y, B, threads=threads, prelude=source) as (split, hy, b):
            ring = T.alloc_shared((total_words,), "int32")
            full = T.alloc_barrier([1] * (warps * stages)) if bulk else None
            T.annotate_min_blocks_per_sm(min_blocks)
            tx = T.get_thread_binding()
            st = tile.state(scale, cap, window)
            setattr(st, "row_facts", T.access_ptr(ring[facts], "r"))  # noqa: B010  (TileLang takes = for a buffer's)
            c = SimpleNamespace(
                **{name: T.alloc_local((1,), "float32") for name in ("m", "l", "f", "top")},
                o=T.alloc_local((4,), "float32"),
                x=T.alloc_local((4 * BATCH,), "float32"),
                lse=T.alloc_local((BATCH,), "float32"),
            )
            ints = {name: T.alloc_local((1,), "int32") for name in INTEGERS}
            w = SimpleNamespace(b=b, hy=hy, split=split, q_len=QL, **ints)
            w.lane[0] = tx % 32
            w.warp[0] = tx // 32
            w.length[0] = LEN[b]
            w.group[0] = T.truncdiv(HQ, HK)
            w.rows[0] = w.group[0] * QL
            w.h[0] = T.truncdiv(hy * HK, Y)
            w.y[0] = hy - w.h[0] * T.truncdiv(Y, HK)
            w.here[0] = smaller(cols, w.rows[0] - w.y[0] * cols)
            w.packed[0] = w.length[0] - w.length[0] % residual if residual else w.length[0]
            w.start[0] = 0
            if window > 0:
                w.start[0] = larger(w.length[0] - w.q_len + 1 - window, 0) // chunk * chunk
            w.r1[0] = larger(w.packed[0] - w.start[0] + warps * chunk - 1, 0) // (warps * chunk)  # rounds of the CTAs
            w.r0[0] = T.truncdiv(split * w.r1[0], S)
            w.r1[0] = T.truncdiv((split + 1) * w.r1[0], S)
            w.first[0] = w.start[0] + (w.r0[0] * warps + w.warp[0]) * chunk
            w.count[0] = w.packed[0] - (w.start[0] + ((w.r1[0] - 1) * warps + w.warp[0]) * chunk)  # of the last round
            w.count[0] = smaller(larger(w.count[0] + mini - 1, 0) // mini, per_chunk)
            w.count[0] = T.call_extern(
                "int32", "tz_select", less(w.r0[0], w.r1[0]), (w.r1[0] - w.r0[0] - 1) * per_chunk + w.count[0], 0
            )
            w.read[0] = 0
            w.parity[0] = 0
            w.page[0] = b
            if page:
                if less(0, w.count[0]):
                    w.page[0] = TABLE[b, w.first[0] // page]
            for i in each(stages - 1):
                if less(i, w.count[0]):
                    fetch(KV, TABLE, ring, full, w, i, i)
                if not bulk:
                    T.call_extern("handle", "tz_cp_commit")
            tile.clear(st)
            limits(st, w)
            w.least[0] = w.length[0] - w.q_len + 1 + T.truncdiv(w.y[0] * cols, w.group[0])
            if residual:
                if less(w.packed[0], w.length[0]):
                    spare_q(Q, st, w)
                    for i in T.serial(T.ceildiv(w.length[0] - w.packed[0], 16 * warps * S)):
                        j = (i * warps + w.warp[0]) * S + split
                        if less(w.packed[0] + j * 16, w.length[0]):
                            spare.step(
                                T.call_extern(
                                    "handle",
                                    "tz_page",
                                    T.access_ptr(RES[0, 0, 0], "r", 1),
                                    SLOT[b],
                                    RES_H * RES_WORDS,
                                    w.h[0] * RES_WORDS + (w.packed[0] // 16 + j) % spare_tiles * spare.tile_words,
                                ),
                                st, st.qk, w.packed[0] + j * 16, w.length[0], True, w.lane[0],
                            )  # fmt: skip
                    tile.adopt(st)
            load_q(Q, SK, st, w)  # behind the residual block, which has fragments of its own
            if group or shared_rows:
                share_q(ring, st, w)
            for i in T.serial(w.count[0]):
                if stages == 1:  # load, then compute: what the ring is compared with
                    T.call_extern("handle", "tz_syncwarp")
                    fetch(KV, TABLE, ring, full, w, i, 0)
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
                        fetch(
                            KV, TABLE, ring, full, w, i + stages - 1,
                            T.call_extern(
                                "int32", "tz_select", less(0, w.read[0]), w.read[0] - 1, stages - 1
                            ),  # the slot that was read last
                        )  # fmt: skip
                if not bulk and stages > 1:
                    T.call_extern("handle", "tz_cp_commit")
                token = token_of(w, i)
                at = (w.warp[0] * stages + w.read[0]) * stage
                if group:
                    if i % per_chunk == 0:
                        tile.scale_q(
                            T.access_ptr(ring[at], "r", stage),
                            T.access_ptr(ring[queries], "r"),
                            T.access_ptr(ring[queries + (1 + w.warp[0]) * fragment_words], "rw"),
                            st,
                            w.lane[0],
                        )
                begins = T.call_extern("int32", "tz_select", less(0, window), w.length[0] - window, 0)
                tile.step(
                    T.access_ptr(ring[at + head_words], "r", stage),
                    st, rows_of(ring, st, w), token, w.length[0],
                    T.Or(less(w.least[0], token + mini), less(token, begins)), w.lane[0],
                )  # fmt: skip
                w.read[0] = w.read[0] + 1
                if w.read[0] == stages:
                    w.read[0] = 0
                    w.parity[0] = w.parity[0] ^ 1
            stage_sums(ring, SV, st, w)
            merge_warps(ring, OP, LP, O, LSE, SINK, c, w, tx)
            if S > 1:
                if T.call_extern("bool", "tz_last_arrival", T.access_ptr(SEM[b * Y + hy], "rw", 1), S):
                    combine_splits(OP, LP, O, LSE, SINK, c, w, tx)

    return main
