"""Tile program that lays new tokens out as wgmma reads them from shared memory: images for prefill to copy.

An image has 64 tokens of one kv head: keys, then values, each [head_dim / 64, 64 tokens, 64 values] in rows of 128
bytes whose 16-byte pieces are swizzled. S = Q K^T reads keys as a K-major matrix [token, dim], O = P V values as the
transposed one. Rows behind the sequence's last token are zeros: their weights are 0, and 0 * NaN is NaN.
"""

from typing import NamedTuple

from terrazzo.ops.attention.device.calls import at_page, clamp2, load_words, row16, store_words
from terrazzo.ops.attention.device.rotation_macros import make_rotation, row_stages
from terrazzo.ops.attention.device.tile_macros import each, less
from terrazzo.ops.attention.prefilling.prefill_rows import swizzled
from terrazzo.ops.attention.prefilling.prefill_stages import STAGE
from terrazzo.ops.tiles.calls import unpack
from terrazzo.ops.tiles.cuda.attention import attention_prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS
from terrazzo.ops.tiles.types import Buffer, Buffers

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
THREADS = 128
AHEAD = 8
"""Most pieces of 16 bytes that a thread has under way."""


class New(NamedTuple):
    """New keys or values, flat; dtype of their images, whether they are rotated, and where they go."""

    data: Buffer
    operand: str
    rotated: bool
    images: Buffer


def image_words(head_dim: int) -> int:
    """int32 words of the image of 64 tokens of a kv head."""
    return STAGE * head_dim


def build(
    target, *, head_dim: int, dtype: str, k_operand: str, v_operand: str, k_rotated: bool = False,
    v_rotated: bool = False,
):  # fmt: skip
    """The prim_func `main`.

    Args:
        dtype: of new keys and values. k_operand, v_operand: dtypes of the images, each float16 or bfloat16; values
            beyond the largest finite float16 become that. k_rotated, v_rotated: the images are rotated, in float16.

    Shapes: K and V in `dtype`, flat, pitches in values, as in write_program.build; CU int32 [B + 1], where each
    sequence's new tokens start; NEW int32 [pages, Hk, 64 * head_dim], of which sequence b owns the pages from
    CU[b] // 64 + b on. Grid: Hk, `most` tokens / 64, B.
    """
    chunks = head_dim // 8  # 16-byte pieces of a row
    ahead = min(AHEAD, STAGE * chunks // THREADS)
    NK, NV, B1 = T.dynamic("nk"), T.dynamic("nv"), T.dynamic("b1")
    PAGES, HK = T.dynamic("pages"), T.dynamic("hk")
    source = attention_prelude("pack")
    rotation = make_rotation(head_dim, 8, row_stages(head_dim))

    @T.macro
    def move(of, page, first, count, token, head, h, word, st):
        """The 64 rows of one tensor, `count` of which are the sequence's, to words from `word` on."""
        held, tx = st.held, st.tx
        for part in each(STAGE * chunks // (THREADS * ahead)):
            for e in each(ahead):
                at = (part * ahead + e) * THREADS + tx
                for i in each(4):
                    held[e * 4 + i] = T.uint32(0)
                if less(at // chunks, count):
                    load_words(4, held[e * 4], row16(of.data, first + at // chunks, token, h * head + at % chunks * 8))
            for e in each(ahead):
                at = (part * ahead + e) * THREADS + tx
                if of.rotated:
                    rotation.from_words(st.rotated, held, lambda i, e=e: e * 4 + i, dtype == "bfloat16")
                    rotation.turn(st, st.rotated, tx % 32)
                    rotation.to_words(st.rotated, held, lambda i, e=e: e * 4 + i, True)
                elif of.operand != dtype:
                    bf16 = dtype == "bfloat16"
                    for i in each(4):
                        pair = held[e * 4 + i]
                        held[e * 4 + i] = clamp2(unpack(0, pair, bf16=bf16), unpack(1, pair, bf16=bf16), bf16=not bf16)
                byte = at % chunks // 8 * (STAGE * 128) + swizzled(at // chunks, at % chunks % 8)
                store_words(4, at_page(of.images, page, word + byte // 4), held[e * 4])

    @T.prim_func
    def main(
        K: T.Tensor((NK,), dtype), V: T.Tensor((NV,), dtype), CU: T.Tensor((B1,), "int32"),
        NEW: T.Tensor((PAGES, HK, image_words(head_dim)), "int32"), k_token: T.int32, k_head: T.int32, v_token: T.int32,
        v_head: T.int32, stages: T.int32, batch: T.int32,
    ):  # fmt: skip
        with T.Kernel(HK, stages, batch, threads=THREADS, prelude=source) as (h, y, b):
            tx = T.get_thread_binding()
            held = T.alloc_local((ahead * 4,), "uint32")
            rotated = dict(rotated=(8, "float32"), turned=(1, "float32")) if k_rotated or v_rotated else {}
            st = Buffers(held=held, tx=tx, **rotated)
            first = T.alloc_local((1,), "int32")
            count = T.alloc_local((1,), "int32")
            first[0] = CU[b]
            count[0] = CU[b + 1] - first[0] - y * STAGE
            if less(0, count[0]):
                page = T.truncdiv(first[0], STAGE) + b + y
                word = h * image_words(head_dim)
                row = first[0] + y * STAGE
                keys, values = New(K, k_operand, k_rotated, NEW), New(V, v_operand, v_rotated, NEW)
                move(keys, page, row, count[0], k_token, k_head, h, word, st)
                move(values, page, row, count[0], v_token, v_head, h, word + image_words(head_dim) // 2, st)

    return main
