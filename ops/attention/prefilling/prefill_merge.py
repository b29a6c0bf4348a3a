"""Tile program that adds up the partial results of a prefill whose CTAs share the tokens (specs.md I.6).

A thread has four head dimensions of a row, and adds the parts in their order: results have the same bits in every run.
"""

from terrazzo.ops.attention.device.calls import ex2, log2, store_words
from terrazzo.ops.attention.device.tile_macros import LOWEST, each
from terrazzo.ops.tiles.calls import pack2
from terrazzo.ops.tiles.cuda.attention import attention_prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import OWN_BARRIERS_AND_BOUNDS

PASS_CONFIGS = OWN_BARRIERS_AND_BOUNDS
THREADS = 128
LOG2E = 1.4426950408889634


def build(target, *, head_dim: int, dtype: str, sinks: bool):
    """The prim_func `main`: partial results OP f32 [parts, N, Hq, D] and LP f32 [parts, N, Hq] to O [N, Hq, D] in
    `dtype` and LSE f32 [N, Hq], base 2, of the rows ahead of the last of CU int32 [B + 1].

    Args:
        sinks: whether each head has one, SINK f32 [Hq]; else it has one element.

    Scalar: blocks, CTAs of THREADS threads.
    """
    parts, n, hq, b1, n_sinks = (T.dynamic(name) for name in ("parts", "n", "hq", "b1", "n_sinks"))
    lanes = head_dim // 4

    @T.prim_func
    def main(
        OP: T.Tensor((parts, n, hq, head_dim), "float32"), LP: T.Tensor((parts, n, hq), "float32"),
        CU: T.Tensor((b1,), "int32"), SINK: T.Tensor((n_sinks,), "float32"), O: T.Tensor((n, hq, head_dim), dtype),
        LSE: T.Tensor((n, hq), "float32"), blocks: T.int32,
    ):  # fmt: skip
        with T.Kernel(blocks, threads=THREADS, prelude=attention_prelude("pack")) as bx:
            tx = T.get_thread_binding()
            top, total, weight = (T.alloc_local((1,), "float32") for _ in range(3))
            o = T.alloc_local((4,), "float32")
            words = T.alloc_local((2,), "uint32")
            row = T.alloc_local((1,), "int32")
            row[0] = T.truncdiv(bx * THREADS + tx, lanes)
            token = T.truncdiv(row[0], hq)
            head = T.truncmod(row[0], hq)
            col = T.truncmod(tx, lanes) * 4
            if token < CU[b1 - 1]:
                top[0] = SINK[head] * T.float32(LOG2E) if sinks else T.float32(LOWEST)
                for k in T.serial(parts):
                    top[0] = T.max(top[0], LP[k, token, head])
                total[0] = ex2(SINK[head] * T.float32(LOG2E) - top[0]) if sinks else T.float32(0)
                for e in each(4):
                    o[e] = 0.0
                for k in T.serial(parts):
                    weight[0] = ex2(LP[k, token, head] - top[0])
                    total[0] = total[0] + weight[0]
                    for e in each(4):
                        o[e] = o[e] + weight[0] * OP[k, token, head, col + e]
                weight[0] = T.if_then_else(total[0] > 0, T.float32(1) / total[0], T.float32(0))
                for i in each(2):
                    words[i] = pack2(o[2 * i] * weight[0], o[2 * i + 1] * weight[0], bf16=dtype == "bfloat16")
                store_words(2, O[token, head, col], words)
                if col == 0:
                    LSE[token, head] = T.if_then_else(total[0] > 0, top[0] + log2(total[0]), -T.infinity("float32"))

    return main
