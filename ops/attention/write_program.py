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

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache import residual_layout
from terrazzo.ops.attention.decode_copies import differ, peek
from terrazzo.ops.attention.device import CLIPPING, attention_prelude
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.quantize_macros import make_quantize_macros, tile_state
from terrazzo.ops.attention.tile_macros import each, larger, less, smaller
from terrazzo.ops.tiles import heads as heads_in_lanes
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.row_outputs import VECTOR

PASS_CONFIGS = (  # barriers and bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
OF_PAIR = ("length", "row", "new", "slot", "page", "guess")
"""What lanes know of their pairs: tokens, first new row, new rows, residual block, and the page at a guessed place."""
INTEGERS = ("b", "h", "length", "old", "base", "token", "row", "slot", "page", "guess", "at", "inside")


def chunk_warps(residual: int) -> int:
    """Warps of a CTA, and tiles of its blocks: those of a residual block, or 4."""
    return residual // 16 or 4


def shares(pairs: int, most_new: int, warps: int, sms: int) -> tuple[int, int]:
    """(pairs of a CTA, tiles of a block that up to `most_new` tokens of a sequence can touch): as many pairs as keep
    the grid within two CTAs of an SM, and no more than the warps have hands for."""
    touched = min(warps, (most_new + 14) // 16 + 1)
    return max(1, min(warps // (2 * touched), -(-pairs // (2 * sms)))), touched


def build(
    target, *, k_format: str, v_format: str, head_dim: int, dtype: str, page: int, residual: int, rotary_dim: int = 0,
    rope: str = "neox", norm: str = "none", numerics: str = "fused",
):  # fmt: skip
    """The prim_func `main`.

    Args:
        dtype: of new keys and values. page: tokens of a page, 0 for a contiguous cache. residual: tokens of the f16
            residual block, 0 for none; channel-wise keys need one of their group's size.
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
    import tilelang.language as T

    layout = CacheLayout(k_format, v_format, head_dim)
    spare = residual_layout(layout)
    D, warps, group = head_dim, chunk_warps(residual), layout.k.group
    chunk, spare_tiles = 16 * warps, residual // 16 + 1
    if residual != group and (group or residual % 16):
        raise ArgumentError("residual", residual, f"must be {group or 'a multiple of 16'}", "leave it out")
    if page % layout.block_tokens:
        raise ArgumentError("page", page, f"must be a multiple of {layout.block_tokens}", "use 128 tokens")
    pitch = D // 2 + 4  # words of a row in shared memory: the 8 rows of a matrix lie in different banks
    stats = warps * 16 * pitch
    total_words = stats + ((2 + warps) * D if group else 0)
    rows_bf16 = dtype == "bfloat16"
    through_f16 = bool(residual) and rows_bf16
    bf16 = rows_bf16 and not residual
    chunks_per_row = D // 8
    pdl = target.supports("pdl")
    clipping = (CLIPPING.source,) if layout.k.clip or layout.v.clip else ()
    turning = (row_outputs.SOURCE, heads_in_lanes.SOURCE) if rotary_dim else ()
    sources = attention_prelude(
        "cp_async", "lds", "ldmatrix", "pack", *(["rows"] if rotary_dim else []), *(["prefetch"] if pdl else []),
        extra=(*clipping, *turning),
    )  # fmt: skip
    if rotary_dim:
        kind = dict(head_dim=D, rotary_dim=rotary_dim, layout=rope, dtype=dtype, norm=norm, numerics=numerics)
        heads_in_lanes.check(**kind)
        turned = heads_in_lanes.heads(**kind)
    keys, values = (
        make_quantize_macros(layout, is_key, bf16 and not fmt.rotation, warps)
        for is_key, fmt in ((True, layout.k), (False, layout.v))
    )

    NK, NV, B, B1, HK = T.dynamic("nk"), T.dynamic("nv"), T.dynamic("b"), T.dynamic("b1"), T.dynamic("hk")
    PAGES, PAGE_WORDS, TABLE_B, MOST = T.dynamic("pages"), T.dynamic("page_words"), T.dynamic("tb"), T.dynamic("most")
    SLOTS, RES_H, RES_WORDS = T.dynamic("slots"), T.dynamic("rh"), T.dynamic("res_words")
    SKH, SKD, SVH, SVD = (T.dynamic(name) for name in ("skh", "skd", "svh", "svd"))

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
    def fetch(rows, w, of, lane):
        """The tile's new rows on their way to shared memory; rows of other tokens become zeros."""
        for j in each(16 * chunks_per_row // 32):
            at = j * 32 + lane
            row = at // chunks_per_row
            fresh = T.And(w.token[0] + row >= w.old[0], w.token[0] + row < w.length[0])
            T.call_extern(
                "handle", "tz_cp_async",
                T.access_ptr(rows[(w.warp * 16 + row) * pitch + at % chunks_per_row * 4], "w", 4),
                T.call_extern(
                    "handle", "tz_row16", T.access_ptr(of.data[0], "r", 1),
                    w.row[0] + T.if_then_else(fresh, w.token[0] + row - w.old[0], 0), of.token,
                    w.h[0] * of.head + at % chunks_per_row * 8,
                ),
                T.if_then_else(fresh, 16, 0),
            )  # fmt: skip
        T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def load_head(h, of, row, at, j):
        for i in each(2):
            place_of = turned.second(j) if i else turned.first(j)
            T.call_extern(
                "handle", "tz_stream16", T.access_ptr(h.x, "w", 4),
                T.call_extern("handle", "tz_row16", T.access_ptr(of.data[0], "r", 1), row, of.token, at + place_of),
            )  # fmt: skip
            T.call_extern(
                "handle", f"tz_widen8<{turned.bf16}>", T.access_ptr(h.v[i * VECTOR], "w", VECTOR),
                T.access_ptr(h.x, "r", 4),
            )  # fmt: skip

    @T.macro
    def turn_head(h, W, COS, SIN, row, eps, j, wanted):
        """The head in the lanes' registers, normed and turned."""
        if norm != "none":
            turned.factor(h, eps)
            if wanted:
                turned.norm(h, W, j)
        if wanted:
            turned.turn(h, COS, SIN, row, j)

    @T.macro
    def fetch_turned(rows, w, of, lane):
        """`fetch`, of keys that are turned on the way."""
        h, j = of.h, lane % turned.lanes
        for i in T.serial(turned.lanes // 2):  # 16 rows, 32 / lanes at a time
            row = i * (32 // turned.lanes) + lane // turned.lanes
            fresh = T.And(w.token[0] + row >= w.old[0], w.token[0] + row < w.length[0])
            source = w.row[0] + T.if_then_else(fresh, w.token[0] + row - w.old[0], 0)
            for e in T.unroll(2 * VECTOR):
                h.v[e] = 0.0
            if T.And(fresh, j < turned.used):
                load_head(h, of, source, w.h[0] * of.head, j)
            turn_head(h, of.t.KW, of.t.COS, of.t.SIN, source, of.t.eps, j, T.And(fresh, j < turned.used))
            if j < turned.used:
                for e in each(2):
                    at = turned.second(j) if e else turned.first(j)
                    T.call_extern(
                        "handle", f"tz_values_store<{turned.bf16}>",
                        T.access_ptr(rows[(w.warp * 16 + row) * pitch + at // 2], "w", 4),
                        T.access_ptr(h.v[e * VECTOR], "r", VECTOR), T.float32(1),
                    )  # fmt: skip

    fetch_keys = fetch_turned if rotary_dim else fetch

    @T.macro
    def collect(st, rows, w, is_key, lane):
        """The rows as operand registers."""
        T.call_extern("handle", "tz_cp_wait<0>")
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
        if keys.rotated if is_key else values.rotated:
            if is_key:
                keys.rotate(st, lane, rows_bf16)
            else:
                values.rotate(st, lane, rows_bf16)
        elif through_f16:
            for i in each(D // 4):
                for e in each(2):
                    st.f[e] = T.call_extern("float32", f"tz_unpack<true, {e}>", st.x[i])
                st.x[i] = T.call_extern("uint32", "tz_clamp2<false>", st.f[0], st.f[1])

    def spare_tile(RES, w, slot, offset, access):
        """Address of the token's tile in the residual ring, `offset` words into it."""
        at = w.h[0] * RES_WORDS + w.token[0] // 16 % spare_tiles * spare.tile_words + offset
        return T.call_extern("handle", "tz_page", T.access_ptr(RES[0, 0, 0], access, 1), slot, RES_H * RES_WORDS, at)

    @T.macro
    def prefetch(LEN, CU, SLOT, RES, known, w, pairs, block, per, lane):
        """Old tokens of complete and of touched tiles on their way to L2, a tile for each warp, and a guess which page
        is needed; what says where they are may be wrong, so it is clamped."""
        known.guess[0] = 0
        learn(LEN, CU, SLOT, known, w, pairs, lane)
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
                            spare_tile(RES, w, smaller(larger(w.slot[0], 0), SLOTS - 1), 0, "r"), 4 * spare.tile_words,
                        )  # fmt: skip

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

    @T.macro
    def pack(operand, st, rows, KV, w, merge, lane):
        """The operand's words, and parameters, to the page."""
        if operand.token_wise:
            operand.token_parameters(st, tile_of(KV, w), lane)
        if operand.channel:
            operand.channel_parameters(st, rows, stats, block_of(KV, w), w.warp, lane)
        operand.store(st, rows, stats, tile_of(KV, w), merge, lane)

    @T.macro
    def alone(operand, is_key, of, offset, st, rows, KV, RES, scale, w, lane):
        """One operand of a tile that a warp stores by itself: merged into its page, or kept in the residual ring."""
        if is_key:
            fetch_keys(rows, w, of, lane)
        else:
            fetch(rows, w, of, lane)
        operand.find_new(st, w.token[0], w.old[0], lane)
        older = less(w.token[0], w.old[0])
        if residual:
            if older:
                operand.recall(st, spare_tile(RES, w, w.slot[0], offset, "r"), lane)
            collect(st, rows, w, is_key, lane)
            if older:
                operand.mix(st)
            operand.keep(st, spare_tile(RES, w, w.slot[0], offset, "w"), lane)
        else:
            find_block(w)
            if operand.static:
                operand.recall_scales(st, scale, w.h[0], lane)
            if older:
                operand.recall_words(st, tile_of(KV, w), lane)
            collect(st, rows, w, is_key, lane)
            pack(operand, st, rows, KV, w, older, lane)

    @T.macro
    def together(operand, is_key, after, offset, st, rows, KV, RES, scale, w, lane):
        """One operand of the warp's tile of a complete block; `after` is fetched once it has left shared memory."""
        operand.find_new(st, w.token[0], w.old[0], lane)
        older = less(w.token[0], w.old[0])
        if older:
            operand.recall(st, spare_tile(RES, w, w.slot[0], offset, "r"), lane)
        if operand.static:
            operand.recall_scales(st, scale, w.h[0], lane)
        collect(st, rows, w, is_key, lane)
        if after is not None:
            fetch(rows, w, after, lane)
        if older:
            operand.mix(st)
        for c in each(4):
            st.new[c] = T.uint32(0xFFFFFFFF)
        pack(operand, st, rows, KV, w, False, lane)

    @T.macro
    def store(t, pitches, first, blocks, per, touched, cta, tx, h):
        """What a CTA stores; t: the tensors, h: registers of the heads that it turns, or None."""
        rows = T.alloc_shared((total_words,), "int32")
        lane = tx % 32
        st = tile_state(D, layout.k, layout.v)
        known = SimpleNamespace(**{name: T.alloc_local((1,), "int32") for name in OF_PAIR})
        ints = {name: T.alloc_local((1,), "int32") for name in INTEGERS}
        x = T.truncmod(cta, blocks)
        w = SimpleNamespace(warp=tx // 32, first=T.truncdiv(cta, blocks) * per, table=t.TABLE, **ints)
        keys_of = SimpleNamespace(data=t.K, token=pitches.k_token, head=pitches.k_head, h=h, t=t)
        values_of = SimpleNamespace(data=t.V, token=pitches.v_token, head=pitches.v_head)
        if pdl:
            T.pdl_trigger()
            prefetch(t.LEN, t.CU, t.SLOT, t.RES, known, w, B * HK, first + x, per, lane)
            T.pdl_sync()
        learn(t.LEN, t.CU, t.SLOT, known, w, B * HK, lane)
        for n in T.serial(T.truncdiv(2 * per * touched + warps - 1 - w.warp, warps)):  # keys | values of a tile
            job = (n * warps + w.warp) // 2
            if less(w.first + T.truncdiv(job, touched), B * HK):
                place(known, w, T.truncdiv(job, touched), first + x)
                w.token[0] = larger(w.base[0], w.old[0] // 16 * 16) + T.truncmod(job, touched) * 16
                apart = T.And(less(w.token[0], smaller(w.base[0] + chunk, w.length[0])), less(w.old[0], w.length[0]))
                if T.And(apart, less(w.length[0], w.base[0] + chunk)) if residual else apart:
                    if less((n * warps + w.warp) % 2, 1):
                        alone(keys, True, keys_of, 0, st, rows, t.KV, t.RES, t.SK, w, lane)
                    else:
                        alone(values, False, values_of, spare.k_words, st, rows, t.KV, t.RES, t.SV, w, lane)
        if residual:
            for i in T.serial(per):
                if less(w.first + i, B * HK):
                    place(known, w, i, first + x)
                    w.token[0] = w.base[0] + w.warp * 16
                    if T.And(less(w.old[0], w.length[0]), less(w.base[0] + chunk - 1, w.length[0])):
                        find_block(w)
                        fetch_keys(rows, w, keys_of, lane)
                        together(keys, True, values_of, 0, st, rows, t.KV, t.RES, t.SK, w, lane)
                        together(values, False, None, spare.k_words, st, rows, t.KV, t.RES, t.SV, w, lane)

    @T.macro
    def turn_queries(t, h, unit, q_token, heads, q_rows, tx):
        """Heads of q from row `unit` of Q on, normed and turned."""
        row, j = unit + tx // turned.lanes, tx % turned.lanes
        at = T.alloc_local((1,), "int32")  # the division, once and in 32 bits
        at[0] = T.truncdiv(row, heads)
        token = at[0]
        wanted = T.And(row < q_rows, j < turned.used)
        if pdl:
            T.pdl_trigger()
            T.pdl_sync()
        for e in T.unroll(2 * VECTOR):
            h.v[e] = 0.0
        if wanted:
            load_head(h, SimpleNamespace(data=t.X, token=q_token), token, (row - token * heads) * D, j)
        turn_head(h, t.QW, t.COS, t.SIN, token, t.eps, j, wanted)
        if wanted:
            for e in each(2):
                place_of = turned.second(j) if e else turned.first(j)
                T.call_extern(
                    "handle", f"tz_values_store<{turned.bf16}>", T.access_ptr(t.Q[row, place_of], "w", VECTOR),
                    T.access_ptr(h.v[e * VECTOR], "r", VECTOR), T.float32(1),
                )  # fmt: skip

    if rotary_dim:
        NX, P, WIDTH, QR = T.dynamic("nx"), T.dynamic("p"), T.dynamic("width"), T.dynamic("qr")

        @T.prim_func
        def main(
            X: T.Tensor((NX,), dtype),
            COS: T.Tensor((P, WIDTH), "float32"),
            SIN: T.Tensor((P, WIDTH), "float32"),
            QW: T.Tensor((D if norm != "none" else 1,), dtype),
            KW: T.Tensor((D if norm != "none" else 1,), dtype),
            Q: T.Tensor((QR, D), dtype),
            K: T.Tensor((NK,), dtype),
            V: T.Tensor((NV,), dtype),
            CU: T.Tensor((B1,), "int32"),
            LEN: T.Tensor((B,), "int32"),
            KV: T.Tensor((PAGES, HK, PAGE_WORDS), "int32"),
            TABLE: T.Tensor((TABLE_B, MOST), "int32"),
            RES: T.Tensor((SLOTS, RES_H, RES_WORDS), "int32"),
            SLOT: T.Tensor((B,), "int32"),
            SK: T.Tensor((SKH, SKD), "float32"),
            SV: T.Tensor((SVH, SVD), "float32"),
            k_token: T.int32,
            k_head: T.int32,
            v_token: T.int32,
            v_head: T.int32,
            first: T.int32,
            blocks: T.int32,
            groups: T.int32,
            per: T.int32,
            touched: T.int32,
            q_token: T.int32,
            heads: T.int32,
            q_rows: T.int32,
            eps: T.float32,
        ):
            with T.Kernel(
                blocks * groups + T.ceildiv(q_rows, warps * (32 // turned.lanes)), threads=warps * 32, prelude=sources
            ) as cta:
                T.annotate_min_blocks_per_sm(max(1, (16 if D <= 128 else 8) // warps))
                tx = T.get_thread_binding()
                h = turned.state()
                t = SimpleNamespace(
                    X=X, COS=COS, SIN=SIN, QW=QW, KW=KW, Q=Q, K=K, V=V, CU=CU, LEN=LEN, KV=KV, TABLE=TABLE, RES=RES,
                    SLOT=SLOT, SK=SK, SV=SV, eps=eps,
                )  # fmt: skip
                pitches = SimpleNamespace(k_token=k_token, k_head=k_head, v_token=v_token, v_head=v_head)
                if less(cta, blocks * groups):
                    store(t, pitches, first, blocks, per, touched, cta, tx, h)
                else:
                    unit = (cta - blocks * groups) * (warps * (32 // turned.lanes))
                    turn_queries(t, h, unit, q_token, heads, q_rows, tx)

        return main

    @T.prim_func
    def main(
        K: T.Tensor((NK,), dtype),
        V: T.Tensor((NV,), dtype),
        CU: T.Tensor((B1,), "int32"),
        LEN: T.Tensor((B,), "int32"),
        KV: T.Tensor((PAGES, HK, PAGE_WORDS), "int32"),
        TABLE: T.Tensor((TABLE_B, MOST), "int32"),
        RES: T.Tensor((SLOTS, RES_H, RES_WORDS), "int32"),
        SLOT: T.Tensor((B,), "int32"),
        SK: T.Tensor((SKH, SKD), "float32"),
        SV: T.Tensor((SVH, SVD), "float32"),
        k_token: T.int32,
        k_head: T.int32,
        v_token: T.int32,
        v_head: T.int32,
        first: T.int32,
        blocks: T.int32,
        groups: T.int32,
        per: T.int32,
        touched: T.int32,
    ):
        with T.Kernel(blocks * groups, threads=warps * 32, prelude=sources) as cta:
            T.annotate_min_blocks_per_sm(max(1, (16 if D <= 128 else 8) // warps))
            tx = T.get_thread_binding()
            t = SimpleNamespace(K=K, V=V, CU=CU, LEN=LEN, KV=KV, TABLE=TABLE, RES=RES, SLOT=SLOT, SK=SK, SV=SV)
            pitches = SimpleNamespace(k_token=k_token, k_head=k_head, v_token=v_token, v_head=v_head)
            store(t, pitches, first, blocks, per, touched, cta, tx, None)

    return main
