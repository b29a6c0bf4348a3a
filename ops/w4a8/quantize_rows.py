"""Tile program that quantizes activations: per token, dynamic, to int8 or e4m3, in one pass over memory.

`warps` warps hold a row of x in their registers, 16 bytes for each load, so x is read once: first the largest magnitude
(and, with RMSNorm in front, the sum of squares) of the row, then the codes and their sum. A gain, the product of
RMSNorm's weight and the reciprocal of the smooth vector, comes from L1 for every row. RMSNorm's factor is the same for
the whole row, so it only enters the scale.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.primitives import prelude

PASS_CONFIGS = (  # barriers are inside the primitives
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
VECTOR = 8  # values of one 16-byte load
# form of the codes -> its largest, and the largest magnitude below which a row counts as zeros: the references say why
FORMS = {"int8": (127, 2.0**-119), "e4m3": (448, 2.0**-117)}


def build(
    target, *, k: int, dtype: str, gain: bool, norm: bool, warps: int, rows: int, vectors: int, codes: str = "int8"
):
    """The prim_func `main(X, G, Q, XS, RS, eps, columns)`.

    Shapes: X [M, k] in `dtype` ("float16" or "bfloat16"), k a multiple of 8; G f32 [k] (one element without a gain); Q
    int8 [M, K], K = k rounded up to 16, columns from k on become 0; XS f32 [M] scales; RS int32 [M] sums of Q's rows;
    eps f32, RMSNorm's, and `columns` f32, those of the k that its mean counts (with `norm`). A CTA holds `rows` rows of
    `warps` warps, each thread `vectors` vectors; rows > 1 needs warps = 1. With `codes` "e4m3", the bytes of Q are
    e4m3 and RS [1] is not written.
    """
    import tilelang.language as T

    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError("dtype", dtype, "must be float16 or bfloat16", "cast the activations")
    if codes not in FORMS:
        raise ArgumentError("codes", codes, f"must be one of {tuple(FORMS)}", "use int8")
    if k % VECTOR or k < VECTOR:
        raise ArgumentError("k", k, "must be a multiple of 8", "pad x with zeros")
    out_k = -(-k // 16) * 16
    if warps * 32 * vectors * VECTOR < out_k or (rows > 1 and warps > 1) or warps > 32:
        raise ArgumentError("warps", (warps, rows, vectors), f"do not hold rows of {k} values", "choose() them")
    threads, lanes = 32 * warps * rows, 32 * warps
    bf16, has_gain, has_norm = (str(flag).lower() for flag in (dtype == "bfloat16", gain, norm))
    pdl = target.supports("pdl")
    # 64 registers, so that rows of several CTAs overlap; before sm_90, ptxas spills long rows with a gain at that
    blocks = 1 if gain and vectors > 4 and not pdl else max(1, 1024 // threads)
    largest, tiny = FORMS[codes]
    integer = codes == "int8"
    source = prelude("pack", "rows", *([] if integer else ["e4m3_rows"]))
    M = T.dynamic("m")

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        G: T.Tensor((k if gain else 1,), "float32"),
        Q: T.Tensor((M, out_k), "int8"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((M if integer else 1,), "int32"),
        eps: T.float32,
        columns: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=threads, prelude=source) as block:
            T.annotate_min_blocks_per_sm(blocks)
            shared = T.alloc_shared((3 * warps,), "float32")  # one buffer: two might get the same place
            x = T.alloc_local((4 * vectors,), "uint32")
            m = T.alloc_local((2,), "float32")
            factor = T.alloc_local((2,), "float32")  # of the codes, of the scale
            total = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            row = block * rows + tx // lanes
            lane = tx % lanes
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            for v in T.unroll(vectors):
                for i in T.unroll(4):
                    x[v * 4 + i] = T.uint32(0)
                at = (v * lanes + lane) * VECTOR
                if T.And(row < M, at < k):
                    T.call_extern(
                        "handle", "tz_stream16", T.access_ptr(x[v * 4], "w", 4), T.access_ptr(X[row, at], "r", VECTOR)
                    )
            m[0] = 0.0
            m[1] = 0.0
            for v in T.unroll(vectors):
                T.call_extern(
                    "handle",
                    f"tz_row_scan<{bf16}, {has_gain}, {has_norm}>",
                    T.access_ptr(m, "rw"),
                    T.access_ptr(x[v * 4], "r", 4),
                    T.access_ptr(G[T.min((v * lanes + lane) * VECTOR, k - VECTOR) if gain else 0], "r", 1),
                )
            T.call_extern(
                "handle",
                f"tz_row_reduce<{warps}, {has_norm}>",
                T.access_ptr(m, "rw"),
                T.access_ptr(shared[0], "rw", 2 * warps),
            )
            factor[0] = T.if_then_else(m[0] < T.float32(tiny), T.float32(0), T.float32(largest) / m[0])
            factor[1] = m[0] / T.float32(largest)
            if norm:
                factor[1] = factor[1] * T.rsqrt(m[1] / columns + eps)
            factor[1] = T.if_then_else(m[0] < T.float32(tiny), T.float32(1), factor[1])
            total[0] = 0
            for v in T.unroll(vectors):
                at = (v * lanes + lane) * VECTOR
                if T.And(row < M, at < out_k):
                    T.call_extern(
                        "handle",
                        f"tz_row_{'quantize' if integer else 'e4m3'}<{bf16}, {has_gain}>",
                        T.access_ptr(Q[row, at], "w", VECTOR),
                        T.access_ptr(total, "rw"),
                        T.access_ptr(x[v * 4], "r", 4),
                        T.access_ptr(G[T.min(at, k - VECTOR) if gain else 0], "r", 1),
                        factor[0],
                    )
            if integer:
                total[0] = T.call_extern(
                    "int32", f"tz_row_sum<{warps}>", total[0], T.access_ptr(shared[2 * warps], "rw", warps)
                )
            if T.And(row < M, lane == 0):
                XS[row] = factor[1]
                if integer:
                    RS[row] = total[0]

    return main
