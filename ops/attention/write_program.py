"""Tile program that stores new tokens: append in decode, and quantize-and-pack after prefill (specs.md C, I.8).

A warp holds a tile of 16 tokens of one kv head as decode's A operand: rows come through shared memory and ldmatrix
(transposed for values), codes are made in registers, words leave as the layout wants them. Without a residual block a
tile is merged into what its page holds. With one, a CTA owns a block: a block that the new tokens complete is packed
from residual tiles and new rows, the last, incomplete one goes to the residual ring. All of it is decided from lengths
in device memory, so that a captured graph does the right thing in every replay, and a call repeated with the same
lengths writes the same bits.

The kernel may start before the one ahead of it on the stream has ended (programmatic dependent launch), and waits for
its end before it reads or writes anything: that one may write the rows, or still read the tokens that this one
overwrites. Until then it fetches into L2 what the residual ring holds of the block, if lengths are what they seem.
"""

from types import SimpleNamespace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache import residual_layout
from terrazzo.ops.attention.decode_copies import peek
from terrazzo.ops.attention.device import attention_prelude
from terrazzo.ops.attention.layout import CacheLayout
from terrazzo.ops.attention.quantize_macros import make_quantize_macros, tile_state
from terrazzo.ops.attention.tile_macros import each, larger, less, smaller

PASS_CONFIGS = (  # barriers and bounds are the program's own
    ("tl.disable_safe_memory_legalize", True),
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
INTEGERS = ("length", "old", "base", "token", "row", "page", "inside")


def chunk_warps(residual: int) -> int:
    """Tiles of a CTA: those of a residual block, or 4."""
    return residual // 16 or 4


def build(target, *, k_format: str, v_format: str, head_dim: int, dtype: str, page: int, residual: int):
    """The prim_func `main`.

    Args:
        dtype: of new keys and values. page: tokens of a page, 0 for a contiguous cache. residual: tokens of the f16
            residual block, 0 for none; channel-wise keys need one of their group's size.

    Shapes: K and V in `dtype`, flat: value d of token i and head h at i * token pitch + h * head pitch + d; CU int32
    [B + 1], where each sequence's new tokens start; LEN int32 [B], tokens in all, the new ones included; KV, TABLE,
    RES, SLOT, SK and SV as in decode_program. Scalars: pitches of K and of V, first block of new tokens, number of
    blocks.
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
    through_f16 = bool(residual) and dtype == "bfloat16"
    bf16 = dtype == "bfloat16" and not residual
    chunks_per_row = D // 8
    pdl = target.supports("pdl")
    sources = attention_prelude("cp_async", "lds", "ldmatrix", "pack", *(["prefetch"] if pdl else []))
    keys, values = (make_quantize_macros(layout, is_key, bf16, warps) for is_key in (True, False))

    NK, NV, B, B1, HK = T.dynamic("nk"), T.dynamic("nv"), T.dynamic("b"), T.dynamic("b1"), T.dynamic("hk")
    PAGES, PAGE_WORDS, TABLE_B, MOST = T.dynamic("pages"), T.dynamic("page_words"), T.dynamic("tb"), T.dynamic("most")
    SLOTS, RES_H, RES_WORDS = T.dynamic("slots"), T.dynamic("rh"), T.dynamic("res_words")
    SKH, SKD, SVH, SVD = (T.dynamic(name) for name in ("skh", "skd", "svh", "svd"))

    @T.macro
    def place(LEN, CU, w, block):
        """The tile of the warp, in a block of new tokens."""
        w.length[0] = peek(LEN, w.b)
        w.row[0] = peek(CU, w.b)
        w.old[0] = w.length[0] - (peek(CU, w.b + 1) - w.row[0])
        w.base[0] = (w.old[0] // chunk + block) * chunk
        w.token[0] = w.base[0] + w.warp * 16

    @T.macro
    def fetch(rows, w, of, lane):
        """The tile's new rows on their way to shared memory; rows of other tokens become zeros."""
        for j in each(16 * chunks_per_row // 32):
            at = j * 32 + lane
            row = at // chunks_per_row
            new = T.And(w.token[0] + row >= w.old[0], w.token[0] + row < w.length[0])
            T.call_extern(
                "handle", "tz_cp_async",
                T.access_ptr(rows[(w.warp * 16 + row) * pitch + at % chunks_per_row * 4], "w", 4),
                T.call_extern(
                    "handle", "tz_row16", T.access_ptr(of.data[0], "r", 1),
                    w.row[0] + T.if_then_else(new, w.token[0] + row - w.old[0], 0), of.token,
                    w.h * of.head + at % chunks_per_row * 8,
                ),
                T.if_then_else(new, 16, 0),
            )  # fmt: skip
        T.call_extern("handle", "tz_cp_commit")

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
        if through_f16:
            for i in each(D // 4):
                for e in each(2):
                    st.f[e] = T.call_extern("float32", f"tz_unpack<true, {e}>", st.x[i])
                st.x[i] = T.call_extern("uint32", "tz_clamp2<false>", st.f[0], st.f[1])

    @T.macro
    def spare_tile(RES, SLOT, w, offset):
        """Address of the token's tile in the residual ring."""
        w.page[0] = peek(SLOT, w.b)
        w.inside[0] = w.h * RES_WORDS + w.token[0] // 16 % spare_tiles * spare.tile_words + offset

    @T.macro
    def prefetch(RES, SLOT, w, lane):
        """Old tokens of the tile on their way to L2; what says where they are may be wrong, so it is clamped."""
        spare_tile(RES, SLOT, w, 0)
        wanted = T.Or(less(w.old[0], w.token[0] + 16), less(w.base[0] + chunk - 1, w.length[0]))
        if T.And(T.And(less(w.token[0], w.old[0]), less(-1, w.token[0])), T.And(wanted, less(lane, 1))):
            T.call_extern(
                "handle", "tz_prefetch",
                T.call_extern(
                    "handle", "tz_page", T.access_ptr(RES[0, 0, 0], "r", 1),
                    smaller(larger(w.page[0], 0), SLOTS - 1), RES_H * RES_WORDS, w.inside[0],
                ),
                4 * spare.tile_words,
            )  # fmt: skip

    @T.macro
    def packed_tile(TABLE, w):
        """Page and word of the token's block."""
        w.page[0] = w.b
        w.inside[0] = w.token[0]
        if page:
            w.page[0] = peek(TABLE, w.b, w.token[0] // page)
            w.inside[0] = w.token[0] % page
        w.inside[0] = w.h * PAGE_WORDS + w.inside[0] // layout.block_tokens * layout.block_words

    @T.macro
    def pack(operand, st, rows, KV, TABLE, scale, w, merge, lane):
        """The operand's words, and parameters, to the page."""
        packed_tile(TABLE, w)
        block = T.call_extern(
            "handle", "tz_page", T.access_ptr(KV[0, 0, 0], "w", 1), w.page[0], HK * PAGE_WORDS, w.inside[0]
        )
        tile = T.call_extern(
            "handle", "tz_at32", block,
            layout.channel_words + w.token[0] % layout.block_tokens // 16 * layout.tile_words,
        )  # fmt: skip
        if operand.token_wise:
            operand.token_parameters(st, tile, lane)
        if operand.channel:
            operand.channel_parameters(st, rows, stats, block, w.warp, lane)
        operand.store(st, rows, stats, scale, w.h, tile, merge, lane)

    @T.macro
    def write(operand, st, rows, KV, TABLE, RES, SLOT, scale, w, offset, lane):
        """One operand of the tile to where it belongs."""
        operand.find_new(st, w.token[0], w.old[0], lane)
        if residual:
            if w.token[0] < w.old[0]:
                spare_tile(RES, SLOT, w, offset)
                operand.mix(
                    st, T.call_extern(
                        "handle", "tz_page", T.access_ptr(RES[0, 0, 0], "r", 1), w.page[0], RES_H * RES_WORDS,
                        w.inside[0],
                    ), lane,
                )  # fmt: skip
            for c in each(4):
                st.new[c] = T.uint32(0xFFFFFFFF)
            if w.base[0] + chunk <= w.length[0]:
                pack(operand, st, rows, KV, TABLE, scale, w, False, lane)
            else:
                spare_tile(RES, SLOT, w, offset)
                operand.keep(
                    st, T.call_extern(
                        "handle", "tz_page", T.access_ptr(RES[0, 0, 0], "w", 1), w.page[0], RES_H * RES_WORDS,
                        w.inside[0],
                    ), lane,
                )  # fmt: skip
        else:
            pack(operand, st, rows, KV, TABLE, scale, w, w.token[0] < w.old[0], lane)

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
    ):
        with T.Kernel(blocks, HK, B, threads=warps * 32, prelude=sources) as (x, h, b):
            rows = T.alloc_shared((total_words,), "int32")
            T.annotate_min_blocks_per_sm(max(1, (16 if D <= 128 else 8) // warps))
            tx = T.get_thread_binding()
            lane = tx % 32
            st = tile_state(D)
            ints = {name: T.alloc_local((1,), "int32") for name in INTEGERS}
            w = SimpleNamespace(b=b, h=h, warp=tx // 32, **ints)
            if pdl:
                T.pdl_trigger()
                if residual:
                    place(LEN, CU, w, first + x)
                    prefetch(RES, SLOT, w, lane)
                T.pdl_sync()
            place(LEN, CU, w, first + x)
            touched = T.And(w.token[0] + 16 > w.old[0], w.token[0] < w.length[0])
            complete = w.base[0] + chunk <= w.length[0] if residual else False
            if T.And(w.old[0] < w.length[0], T.And(w.base[0] < w.length[0], T.Or(touched, complete))):
                fetch(rows, w, SimpleNamespace(data=K, token=k_token, head=k_head), lane)
                collect(st, rows, w, True, lane)
                fetch(rows, w, SimpleNamespace(data=V, token=v_token, head=v_head), lane)
                write(keys, st, rows, KV, TABLE, RES, SLOT, SK, w, 0, lane)
                collect(st, rows, w, False, lane)
                write(values, st, rows, KV, TABLE, RES, SLOT, SV, w, spare.k_words, lane)

    return main
