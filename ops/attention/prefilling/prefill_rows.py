"""Rows of prefill attention, one for each (new token, query head) of a sequence: what they are and see, and Q in shared
memory as wgmma reads it.

`w` is a program's state of integers (prefill_stages.INTEGERS and its own), one-element buffers; h, the kv head.
"""

from terrazzo.ops.attention.device.calls import at8, load_words, store_words
from terrazzo.ops.attention.device.rotation_macros import make_rotation, row_stages
from terrazzo.ops.attention.device.tile_macros import each, less
from terrazzo.ops.tiles.calls import pack2, unpack
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro

ALL = 1 << 30
"""Tokens that a row without a window sees."""


def span(window: Expr) -> Expr:
    """The newest tokens that a row sees, itself included; window 0: all."""
    return T.if_then_else(window > 0, window, ALL)


def seen_by(w: Buffers, row: Expr) -> Expr:
    """The tokens of the sequence that a row sees without a window."""
    return w.before[0] + T.truncdiv(row, w.group[0]) + 1


def query_of(w: Buffers, row: Expr) -> Expr:
    """The new token, counted through all sequences, of a row of the CTA's sequence."""
    return w.first[0] + T.truncdiv(row, w.group[0])


def head_of(w: Buffers, row: Expr) -> Expr:
    """The query head of a row."""
    return w.h * w.group[0] + T.truncmod(row, w.group[0])


def swizzled(row: Expr, chunk: Expr) -> Expr:
    """Byte of 16-byte chunk `chunk` of row `row` in a tile of 128-byte rows, as wgmma reads it."""
    return row * 128 + T.bitwise_xor(chunk, row % 8) * 16


def make_q_macros(rows: int, head_dim: int, bf16: bool, k_bf16: bool, rotated: bool) -> tuple[Macro, Call]:
    """Macro `load_q` of `rows` rows of each warpgroup w.wg, and the place `in_q` of a piece of them.

    Q in shared memory is [warpgroups, head_dim / 64, rows, 64], from word 0 of int32 `space` on: K-major tiles of 64
    columns, swizzled. bf16, k_bf16: dtypes of q and of the keys' operand. rotated: the keys are, and so are the rows,
    by way of registers st.rotated and st.turned.
    """
    chunks = head_dim // 8  # 16-byte pieces of a row
    rotation = make_rotation(head_dim, 8, row_stages(head_dim)) if rotated else None

    def in_q(row, chunk, w):
        """Byte of chunk `chunk` of a row of the warpgroup."""
        return (w.wg * (head_dim // 64) + chunk // 8) * (rows * 128) + swizzled(row, chunk % 8)

    @T.macro
    def load_q(Q, space, st, w, wt):
        """The warpgroup's rows of Q [N, Hq, D], in the dtype of the keys' operand; those past the sequence's are 0."""
        for e in each(rows * chunks // 128):
            at = e * 128 + wt
            row = at // chunks
            chunk = at % chunks
            for i in each(4):
                st.w[i] = T.uint32(0)
            if less(w.row0[0] + w.wg * rows + row, w.rows[0]):
                w.query[0] = query_of(w, w.row0[0] + w.wg * rows + row)
                w.head[0] = head_of(w, w.row0[0] + w.wg * rows + row)
                load_words(4, st.w, Q[w.query[0], w.head[0], chunk * 8])
                if k_bf16 != bf16 and not rotated:
                    for i in each(4):
                        st.w[i] = pack2(unpack(0, st.w[i], bf16=bf16), unpack(1, st.w[i], bf16=bf16), bf16=k_bf16)
            if rotated:
                rotation.from_words(st.rotated, st.w, lambda i: i, bf16)
                rotation.turn(st, st.rotated, wt % 32)
                rotation.to_words(st.rotated, st.w, lambda i: i, False)
            store_words(4, at8(space[0], in_q(row, chunk, w), "w"), st.w)

    return load_q, in_q
