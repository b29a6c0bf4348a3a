"""Tile program: RMSNorm over heads of q and k, and rotary positions, of a joined q, k, v as the product left it.

A head lies in the 16-byte vectors of a few neighbouring lanes, two for each: a warp holds 2 to 8 heads. Pairs that turn
together are in one lane, whether they are halves of the head or neighbours. Heads of q come first in the output, then
those of k. Nothing is read before the kernel ahead on the stream has ended (programmatic dependent launch).
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.primitives import prelude
from terrazzo.ops.tiles.row_outputs import VECTOR

PASS_CONFIGS = (
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
LAYOUTS = ("neox", "interleaved")
"""Which dims turn together: (i, i + R/2), or (2i, 2i + 1)."""
NORMS = ("none", "llama", "gemma")
NUMERICS = ("fused", "model")
MOST_DIMS = 512
WARPS = 4
SOURCE = """\
// squares of 16 values of a lane, summed over LANES lanes
template <int LANES> __device__ __forceinline__ float tz_head_squares(const void *v_) {
  const float *v = (const float *)v_; float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum = fmaf(v[i], v[i], sum);
#pragma unroll
  for (int d = LANES / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}
// 8 values times the factor and the weights of a head; ROUNDS as in RMSNorm, OFFSET: 1 + weight
template <bool BF16, bool OFFSET, int ROUNDS> __device__ __forceinline__ void tz_head_norm8(
    void *v_, const void *w_, float s) {
  float *v = (float *)v_, w[8];
  tz_widen8<BF16>(w, w_);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (OFFSET) w[i] += 1.0f;
    v[i] *= s;
    if constexpr (ROUNDS == 2) v[i] = tz_round<BF16>(v[i]);
    v[i] *= w[i];
    if constexpr (ROUNDS) v[i] = tz_round<BF16>(v[i]);
  }
}
// 16 bytes of weights as they are stored
__device__ __forceinline__ void tz_head_weights8(void *w, const void *p) { *(uint4 *)w = *(const uint4 *)p; }
__device__ __forceinline__ void tz_load_floats8(void *v_, const void *p) {
  *(float4 *)v_ = *(const float4 *)p; *((float4 *)v_ + 1) = *((const float4 *)p + 1);
}
// 8 pairs of v turned by c, s. PAIRS: of neighbours in 16 values, else v[i] with v[i + 8]. ROUNDS: each product, in
// 16 bits, as are c and s
template <bool BF16, bool PAIRS, bool ROUNDS> __device__ __forceinline__ void tz_turn8(
    void *v_, const void *c_, const void *s_) {
  float *v = (float *)v_; const float *c = (const float *)c_, *s = (const float *)s_;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int a = PAIRS ? 2 * i : i, b = PAIRS ? 2 * i + 1 : i + 8;
    float x = v[a], y = v[b], cc = c[i], ss = s[i];
    if constexpr (ROUNDS) {
      cc = tz_round<BF16>(cc); ss = tz_round<BF16>(ss);
      v[a] = tz_round<BF16>(tz_round<BF16>(x * cc) - tz_round<BF16>(y * ss));
      v[b] = tz_round<BF16>(tz_round<BF16>(y * cc) + tz_round<BF16>(x * ss));
    } else {
      v[a] = fmaf(x, cc, -(y * ss));
      v[b] = fmaf(y, cc, x * ss);
    }
  }
}
"""


def lanes_of(head_dim: int) -> int:
    """Lanes of a head: a power of two with 16 values for each, some of them idle."""
    return 1 << max(0, (head_dim // 16 - 1).bit_length())


def build(target, *, head_dim: int, rotary_dim: int, layout: str, dtype: str, norm: str, numerics: str, positions: str):
    """The prim_func `main(X, POS, COS, SIN, QW, KW, Q, K, heads, kv_heads, eps)`.

    Shapes: X [M, pitch] in `dtype`, heads of q before those of k in the first (heads + kv_heads) * head_dim columns;
    POS integers [M] in the dtype `positions`, rows of the tables, or one element where that is "none" and row i is
    token i's; COS and SIN f32 [P, width], width at least rotary_dim / 2; QW and KW [head_dim] in `dtype`, RMSNorm's
    weights (`norm`); Q [M, heads * head_dim], K [M, kv_heads * head_dim] in `dtype`.
    """
    import tilelang.language as T

    for name, value, known in (
        ("dtype", dtype, ("float16", "bfloat16")),
        ("layout", layout, LAYOUTS),
        ("norm", norm, NORMS),
        ("numerics", numerics, NUMERICS),
        ("positions", positions, ("none", "int32", "int64")),
    ):
        if value not in known:
            raise ArgumentError(name, value, f"must be one of {known}", f"use {known[0]}")
    if head_dim % 16 or not 16 <= head_dim <= MOST_DIMS:
        raise ArgumentError("head_dim", head_dim, f"must be a multiple of 16 up to {MOST_DIMS}", "pad heads with zeros")
    if rotary_dim % 16 or not 0 < rotary_dim <= head_dim:
        raise ArgumentError("rotary_dim", rotary_dim, f"must be a multiple of 16 up to {head_dim}", "use head_dim")
    lanes, pairs = lanes_of(head_dim), layout == "interleaved"
    per_warp = 32 // lanes
    model, bf16 = numerics == "model", str(dtype == "bfloat16").lower()
    rounds = (2 if norm == "llama" else 1) if model else 0
    half, used = rotary_dim // 2, head_dim // 16
    turn = f"tz_turn8<{bf16}, {str(pairs).lower()}, {str(model).lower()}>"
    normed = f"tz_head_norm8<{bf16}, {str(norm == 'gemma').lower()}, {rounds}>"
    pdl = target.supports("pdl")
    source = prelude(*row_outputs.primitives("none", False), extra=(row_outputs.SOURCE, SOURCE))
    M, PITCH, P, WIDTH, POSITIONS = (T.dynamic(name) for name in ("m", "pitch", "p", "width", "positions"))
    QN, KN = T.dynamic("qn"), T.dynamic("kn")

    def first(j):
        """Where the first vector of a head's lane j begins."""
        if pairs:
            return 2 * j * VECTOR
        return T.if_then_else(j < half // VECTOR, j * VECTOR, rotary_dim + 2 * (j - half // VECTOR) * VECTOR)

    def second(j):
        if pairs:
            return 2 * j * VECTOR + VECTOR
        passed = rotary_dim + 2 * (j - half // VECTOR) * VECTOR + VECTOR
        return T.if_then_else(j < half // VECTOR, half + j * VECTOR, passed)

    @T.macro
    def load(v, i, x, X, token, column):
        T.call_extern("handle", "tz_stream16", T.access_ptr(x, "w", 4), T.access_ptr(X[token, column], "r", VECTOR))
        T.call_extern("handle", f"tz_widen8<{bf16}>", T.access_ptr(v[i], "w", VECTOR), T.access_ptr(x, "r", 4))

    @T.macro
    def norm_vector(v, i, w, W, s, at):
        T.call_extern("handle", "tz_head_weights8", T.access_ptr(w, "w", 4), T.access_ptr(W[at], "r", VECTOR))
        T.call_extern("handle", normed, T.access_ptr(v[i], "rw", VECTOR), T.access_ptr(w, "r", 4), s[0])

    @T.macro
    def norm_head(v, w, W, s, j):
        norm_vector(v, 0, w, W, s, first(j))
        norm_vector(v, VECTOR, w, W, s, second(j))

    @T.macro
    def store_vector(Y, token, column, v, i):
        T.call_extern(
            "handle", f"tz_values_store<{bf16}>", T.access_ptr(Y[token, column], "w", VECTOR),
            T.access_ptr(v[i], "r", VECTOR), T.float32(1),
        )  # fmt: skip

    @T.macro
    def store(Y, token, head, v, j):
        store_vector(Y, token, head * head_dim + first(j), v, 0)
        store_vector(Y, token, head * head_dim + second(j), v, VECTOR)

    @T.prim_func
    def main(
        X: T.Tensor((M, PITCH), dtype),
        POS: T.Tensor((1 if positions == "none" else POSITIONS,), "int32" if positions == "none" else positions),
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
            x = T.alloc_local((4,), "uint32")
            v = T.alloc_local((2 * VECTOR,), "float32")
            c = T.alloc_local((VECTOR,), "float32")
            s = T.alloc_local((VECTOR,), "float32")
            f = T.alloc_local((1,), "float32")
            at = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            unit = block * WARPS * per_warp + tx // lanes
            j = tx % lanes
            token = T.truncdiv(unit, heads + kv_heads)
            head = unit - token * (heads + kv_heads)
            wanted = T.And(token < M, j < used)
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            for i in T.unroll(2 * VECTOR):
                v[i] = 0.0
            if wanted:
                load(v, 0, x, X, token, head * head_dim + first(j))
                load(v, VECTOR, x, X, token, head * head_dim + second(j))
            if norm != "none":
                f[0] = T.call_extern("float32", f"tz_head_squares<{lanes}>", T.access_ptr(v, "r"))
                f[0] = T.rsqrt(f[0] / T.float32(head_dim) + eps)
                if wanted:
                    if head < heads:
                        norm_head(v, x, QW, f, j)
                    else:
                        norm_head(v, x, KW, f, j)
            if wanted:
                if j < half // VECTOR:
                    at[0] = token if positions == "none" else T.cast(POS[token], "int32")
                    T.call_extern(
                        "handle", "tz_load_floats8", T.access_ptr(c, "w"), T.access_ptr(COS[at[0], j * VECTOR], "r", 8)
                    )
                    T.call_extern(
                        "handle", "tz_load_floats8", T.access_ptr(s, "w"), T.access_ptr(SIN[at[0], j * VECTOR], "r", 8)
                    )
                    T.call_extern("handle", turn, T.access_ptr(v, "rw"), T.access_ptr(c, "r"), T.access_ptr(s, "r"))
                if head < heads:
                    store(Q, token, head, v, j)
                else:
                    store(K, token, head - heads, v, j)

    return main
