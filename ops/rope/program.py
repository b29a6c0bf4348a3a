"""Tile program: RMSNorm over heads of q and k, and rotary positions, of a joined q, k, v as the product left it.

ops/tiles/heads.py says how a head lies in lanes. Heads of q go to one tensor, those of k to another. Nothing is read
before the kernel ahead on the stream has ended (programmatic dependent launch).
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles import heads as tiles
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.cuda.rows import HEADS, ROW_OUTPUTS
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.row_outputs import VECTOR

PASS_CONFIGS = (
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
WARPS = 4
POSITIONS = ("none", "int32", "int64")


def build(target, *, head_dim: int, rotary_dim: int, layout: str, dtype: str, norm: str, numerics: str, positions: str):
    """The prim_func `main(X, POS, COS, SIN, QW, KW, Q, K, heads, kv_heads, eps)`.

    Shapes: X [M, pitch] in `dtype`, heads of q before those of k in the first (heads + kv_heads) * head_dim columns;
    POS integers [M] in the dtype `positions`, rows of the tables, or one element where that is "none" and row i is
    token i's; COS and SIN f32 [P, width], width at least rotary_dim / 2; QW and KW [head_dim] in `dtype`, RMSNorm's
    weights (`norm`); Q [M, heads * head_dim], K [M, kv_heads * head_dim] in `dtype`.
    """
    import tilelang.language as T

    kind = dict(
        head_dim=head_dim, rotary_dim=rotary_dim, layout=layout, dtype=dtype, norm=norm, numerics=numerics
    )  # fmt: skip
    tiles.check(**kind)
    if positions not in POSITIONS:
        raise ArgumentError("positions", positions, f"must be one of {POSITIONS}", "use int32")
    of = tiles.heads(**kind)
    per_warp = 32 // of.lanes
    pdl = target.supports("pdl")
    source = prelude(*row_outputs.primitives("none", False), extra=(ROW_OUTPUTS, HEADS))
    M, PITCH, P, WIDTH, PLACES = (T.dynamic(name) for name in ("m", "pitch", "p", "width", "places"))
    QN, KN = T.dynamic("qn"), T.dynamic("kn")

    @T.macro
    def load(h, i, X, token, column):
        T.call_extern("handle", "tz_stream16", T.access_ptr(h.x, "w", 4), T.access_ptr(X[token, column], "r", VECTOR))
        T.call_extern("handle", f"tz_widen8<{of.bf16}>", T.access_ptr(h.v[i], "w", VECTOR), T.access_ptr(h.x, "r", 4))

    @T.macro
    def store_vector(Y, token, column, h, i):
        T.call_extern(
            "handle", f"tz_values_store<{of.bf16}>", T.access_ptr(Y[token, column], "w", VECTOR),
            T.access_ptr(h.v[i], "r", VECTOR), T.float32(1),
        )  # fmt: skip

    @T.macro
    def store(Y, token, head, h, j):
        store_vector(Y, token, head * head_dim + of.first(j), h, 0)
        store_vector(Y, token, head * head_dim + of.second(j), h, VECTOR)

    @T.prim_func
    def main(
        X: T.Tensor((M, PITCH), dtype),
        POS: T.Tensor((1 if positions == "none" else PLACES,), "int32" if positions == "none" else positions),
        COS: T.Tensor((P, WIDTH), "float32"),
        SIN: T.Tensor((P, WIDTH), "float32"),
        QW: T.Tensor((head_dim if norm != "none" else 1,), dtype),
        KW: T.Tensor((head_dim if norm != "none" else 1,), dtype),
        Q: T.Tensor((M, QN), dtype),
        K: T.Tensor((M, KN), dtype),
        heads: T.int32,
        kv_heads: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(M * (heads + kv_heads), WARPS * per_warp), threads=32 * WARPS, prelude=source) as block:
            h = of.state()
            at = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            unit = block * WARPS * per_warp + tx // of.lanes
            j = tx % of.lanes
            token = T.truncdiv(unit, heads + kv_heads)
            head = unit - token * (heads + kv_heads)
            wanted = T.And(token < M, j < of.used)
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            for i in T.unroll(2 * VECTOR):
                h.v[i] = 0.0
            if wanted:
                load(h, 0, X, token, head * head_dim + of.first(j))
                load(h, VECTOR, X, token, head * head_dim + of.second(j))
            if norm != "none":
                of.factor(h, eps)
                if wanted:
                    if head < heads:
                        of.norm(h, QW, j)
                    else:
                        of.norm(h, KW, j)
            if wanted:
                at[0] = token if positions == "none" else T.cast(POS[token], "int32")
                of.turn(h, COS, SIN, at[0], j)
                if head < heads:
                    store(Q, token, head, h, j)
                else:
                    store(K, token, head - heads, h, j)

    return main
