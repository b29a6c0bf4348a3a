"""Tile program: residual sum, RMSNorm and quantization of a row, in one pass over memory.

`warps` warps hold a row: x and the residual are read once, their sum leaves in the residual's place. RMSNorm's factor
is the same for the whole row. Without roundings between ("fused") it only enters the scale, so that the sum of squares
and the largest magnitude are found together. Where y itself leaves beside its codes, or is rounded as models round it,
the factor comes first.

A sandwich norms x itself before the sum: one more reduction.

Before the kernel ahead of it on the stream has ended (programmatic dependent launch), a CTA only fetches into L2: the
weight, and `ahead` sixteenths of its rows. That kernel may still write them, and does so in L2. A CTA also fetches
`later` sixteenths of the row that comes a wave of CTAs after its own.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.cuda.rows import NORMS, ROW_OUTPUTS, ROW_SUMS
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.row_outputs import VECTOR

PASS_CONFIGS = (  # barriers are inside the primitives
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
STYLES = ("llama", "gemma", "gpt_oss")
"""Where the weight enters: llama w * round(x s), gpt_oss round(w * (x s)), gemma round((x s) * (1 + w))."""
NUMERICS = ("fused", "model")
HELD = 2  # vectors of a thread up to which weights are read beside the row, not behind its sum


@dataclass(frozen=True)
class Norm:
    """What `build` is asked for, and what follows from it."""

    k: int
    dtype: str
    weight: str
    style: str
    numerics: str
    residual: bool
    post: bool
    smooth: bool
    coded: bool
    plain: bool
    warps: int
    vectors: int

    @property
    def model(self) -> bool:
        """Whether values are rounded where models round them."""
        return self.numerics == "model"

    @property
    def factor_first(self) -> bool:
        """Whether the row's factor enters its values, and not their scale."""
        return self.model or (self.plain and self.coded) or self.smooth

    @property
    def held(self) -> bool:
        """Whether a thread holds all its weights, before it needs them."""
        return self.vectors <= HELD

    @property
    def wide(self) -> bool:
        return self.weight == "float32"

    @property
    def words(self) -> int:
        """Of the weights of a vector."""
        return 8 if self.wide else 4

    @property
    def held_vectors(self) -> int:
        """Vectors whose weights a thread holds at a time."""
        return self.vectors if self.held else 1

    @property
    def bf16(self) -> str:
        """Argument of the templates above."""
        return str(self.dtype == "bfloat16").lower()


def copy_macros(norm: Norm, out: SimpleNamespace, M: Any) -> SimpleNamespace:
    """Macros `load_weights`, `fetch`, `load` and `store_sum` of rows of M; out: of `row_outputs.outputs`."""
    import tilelang.language as T

    k, vectors, words = norm.k, norm.vectors, norm.words

    @T.macro
    def load_weights(W, w, i, lane):
        T.call_extern(
            "handle",
            f"tz_weights8<{str(norm.wide).lower()}>",
            T.access_ptr(w[i % norm.held_vectors * words], "w", words),
            T.access_ptr(W[T.min(out.column(i, lane), k - VECTOR)], "r", VECTOR),
        )

    @T.macro
    def fetch(X, R, row, lane, values):
        if T.And(lane == 0, row < M):
            T.call_extern("handle", "tz_prefetch", T.access_ptr(X[row, 0], "r", values), 2 * values)
            if norm.residual:
                T.call_extern("handle", "tz_prefetch", T.access_ptr(R[row, 0], "r", values), 2 * values)

    @T.macro
    def load(to, X, row, lane):
        for i in T.unroll(vectors):
            for e in T.unroll(4):
                to[i * 4 + e] = T.uint32(0)
            at = out.column(i, lane)
            if T.And(row < M, at < k):
                T.call_extern(
                    "handle", "tz_stream16", T.access_ptr(to[i * 4], "w", 4), T.access_ptr(X[row, at], "r", VECTOR)
                )

    @T.macro
    def store_sum(R, x, row, lane):
        for i in T.unroll(vectors):
            at = out.column(i, lane)
            if T.And(row < M, at < k):
                T.call_extern(
                    "handle", "tz_store4", T.access_ptr(R[row, at], "w", VECTOR), T.access_ptr(x[i * 4], "r", 4)
                )

    return SimpleNamespace(load_weights=load_weights, fetch=fetch, load=load, store_sum=store_sum)


def value_macros(norm: Norm, out: SimpleNamespace, load_weights: Any) -> SimpleNamespace:
    """Macros `add_residual`, `values` and `smoothed`: what becomes of a row between its load and its store.

    Registers m, float32 [2], hold the largest magnitude and the sum of squares.
    """
    import tilelang.language as T

    k, vectors, words, bf16 = norm.k, norm.vectors, norm.words, norm.bf16
    normed = f"tz_normed8<{bf16}, {str(norm.wide).lower()}, {str(norm.style == 'gemma').lower()}"
    rounds = (2 if norm.style == "llama" else 1) if norm.model else 0

    @T.macro
    def norm_vector(v, x, W, w, i, s, lane, loaded, rounds):
        """Vector i of the row's x times its factor s and its weights."""
        if not loaded:
            load_weights(W, w, i, lane)
        T.call_extern(
            "handle",
            f"{normed}, {rounds}>",
            T.access_ptr(v[i * VECTOR], "w", VECTOR),
            T.access_ptr(x[i * 4], "r", 4),
            T.access_ptr(w[i % norm.held_vectors * words], "r", words),
            s,
        )

    @T.macro
    def squares(m, x):
        m[1] = 0.0
        for i in T.unroll(vectors):
            T.call_extern("handle", f"tz_squares8<{bf16}>", T.access_ptr(m, "rw"), T.access_ptr(x[i * 4], "r", 4))

    @T.macro
    def reduce(m, shared, place):
        T.call_extern(
            "handle", f"tz_row_reduce<{norm.warps}, true>", T.access_ptr(m, "rw"),
            T.access_ptr(shared[place * 2 * norm.warps], "rw", 2 * norm.warps),
        )  # fmt: skip

    @T.macro
    def add_residual(x, r, v, m, P, w, shared, post_eps, lane):
        """x = round(r + x), or round(r + norm of x)."""
        if norm.post:
            m[0] = 0.0
            squares(m, x)
            reduce(m, shared, 2)
            m[1] = T.rsqrt(m[1] / T.float32(k) + post_eps)
            for i in T.unroll(vectors):
                norm_vector(v, x, P, w, i, m[1], lane, False, rounds)
                T.call_extern(
                    "handle", f"tz_sum8<{bf16}>", T.access_ptr(x[i * 4], "rw", 4), T.access_ptr(r[i * 4], "r", 4),
                    T.access_ptr(v[i * VECTOR], "r", VECTOR),
                )  # fmt: skip
        else:
            for i in T.unroll(vectors):
                T.call_extern(
                    "handle", f"tz_add8<{bf16}>", T.access_ptr(x[i * 4], "rw", 4), T.access_ptr(r[i * 4], "r", 4)
                )

    @T.macro
    def values(v, x, W, w, S, m, f, shared, eps, lane, loaded):
        """The row's values in v, its largest magnitude in m[0] where codes have one scale, its factor in f[2]."""
        m[0] = 0.0
        squares(m, x)
        if norm.factor_first:
            reduce(m, shared, 0)
            f[2] = T.rsqrt(m[1] / T.float32(k) + eps)
            for i in T.unroll(vectors):
                norm_vector(v, x, W, w, i, f[2] if norm.model else T.float32(1), lane, loaded, rounds)
        else:
            for i in T.unroll(vectors):
                norm_vector(v, x, W, w, i, T.float32(1), lane, loaded, 0)
                if norm.coded:
                    out.scan(m, v, i)
            reduce(m, shared, 0)
            f[2] = T.rsqrt(m[1] / T.float32(k) + eps)

    @T.macro
    def smoothed(v, S, m, shared, lane):
        """Values times the factors behind the norm, and their largest magnitude."""
        m[0] = 0.0
        for i in T.unroll(vectors):
            if norm.smooth:
                T.call_extern(
                    "handle", "tz_values_times", T.access_ptr(v[i * VECTOR], "rw", VECTOR),
                    T.access_ptr(S[T.min(out.column(i, lane), k - VECTOR)], "r", VECTOR),
                )  # fmt: skip
            out.scan(m, v, i)
        if not out.block:
            reduce(m, shared, 1)

    return SimpleNamespace(add_residual=add_residual, values=values, smoothed=smoothed)


def build(
    target, *, k: int, dtype: str, weight: str, style: str, numerics: str, residual: bool, post: bool, smooth: bool,
    output: str, plain: bool, column_scales: bool, warps: int, rows: int, vectors: int, resident: int, ahead: int,
    later: int, parts: int = 1,
):  # fmt: skip
    """The prim_func `main(X, R, W, P, S, Y, Q, XS, RS, eps, post_eps)`.

    Shapes: X and R [M, k] in `dtype`, k a multiple of 8; with `residual` R becomes round(R + X), else X is normed; W in
    the dtype `weight` [k]; P the same, of the norm of X before the sum (`post`); S f32 [k], factors behind the norm
    (`smooth`); Y [M, k] in `dtype` (`plain`, or output "none"); Q int8 [M, K16], columns from k on become 0; XS f32
    [M], [M, k/128] or (`column_scales`) [k/128, M4]; RS int32 [M], sums of Q's rows of output "int8". What is not there
    has one element. A CTA holds `rows` rows of `warps` warps, each thread `vectors` vectors of 8 values.
    """
    import tilelang.language as T

    if parts != 1:
        raise ArgumentError("parts", parts, "must be 1: a row has one sum of squares", "choose() it")
    row_outputs.check(target, k=k, dtype=dtype, output=output, warps=warps, rows=rows, vectors=vectors)
    for name, value, known in (("style", style, STYLES), ("numerics", numerics, NUMERICS)):
        if value not in known:
            raise ArgumentError(name, value, f"must be one of {known}", f"use {known[0]}")
    if weight not in (dtype, "float32"):
        raise ArgumentError("weight", weight, f"must be {dtype} or float32", "cast it")
    facts = dict(k=k, dtype=dtype, warps=warps, vectors=vectors)
    norm = Norm(
        weight=weight, style=style, numerics=numerics, residual=residual, post=post, smooth=smooth,
        coded=output != "none", plain=plain, **facts,
    )  # fmt: skip
    out = row_outputs.outputs(output=output, column_scales=column_scales, **facts)
    threads, lanes = 32 * warps * rows, 32 * warps
    pdl = target.supports("pdl")
    ahead, later = (part * k // VECTOR // 16 * VECTOR if pdl else 0 for part in (ahead, later))  # values
    blocks = max(1, resident // threads)
    wave = blocks * target.sms  # CTAs that run at a time
    source = prelude(*row_outputs.primitives(output, pdl), extra=(ROW_OUTPUTS, ROW_SUMS + NORMS))
    M, MP = T.dynamic("m"), T.dynamic("mp")
    copies = copy_macros(norm, out, M)
    steps = value_macros(norm, out, copies.load_weights)
    early = norm.held and not post  # weights are read beside the row

    def factor(f):
        """What values still lack."""
        return T.float32(1) if norm.model else f[2]

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        R: T.Tensor((M, k) if residual else (1, 1), dtype),
        W: T.Tensor((k,), weight),
        P: T.Tensor((k if post else 1,), weight),
        S: T.Tensor((k if smooth else 1,), "float32"),
        Y: T.Tensor((M, k) if plain or not norm.coded else (1, 1), dtype),
        Q: T.Tensor(out.codes_shape(M), "int8"),
        XS: T.Tensor(out.scales_shape(M, MP), "float32"),
        RS: T.Tensor(out.sums_shape(M), "int32"),
        eps: T.float32,
        post_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=threads, prelude=source) as block:
            T.annotate_min_blocks_per_sm(blocks)
            shared = T.alloc_shared((7 * warps,), "float32")  # three reductions and a sum, which wait apart
            x = T.alloc_local((4 * vectors,), "uint32")
            r = T.alloc_local((4 * vectors,), "uint32")
            w = T.alloc_local((norm.words * norm.held_vectors,), "uint32")
            v = T.alloc_local((VECTOR * vectors,), "float32")
            m = T.alloc_local((2,), "float32")  # largest magnitude, sum of squares
            f = T.alloc_local((3,), "float32")
            total = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            row = block * rows + tx // lanes
            lane = tx % lanes
            if pdl:
                if T.And(block == 0, tx == 0):  # once: all CTAs read the same lines
                    T.call_extern("handle", "tz_prefetch", T.access_ptr(W[0], "r", k), k * (4 if norm.wide else 2))
            if ahead:
                if block < wave:
                    copies.fetch(X, R, row, lane, ahead)
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            copies.load(x, X, row, lane)
            if residual:
                copies.load(r, R, row, lane)
            if early:
                for i in T.unroll(vectors):
                    copies.load_weights(W, w, i, lane)
            if later:
                copies.fetch(X, R, row + wave * rows, lane, later)
            if residual:
                steps.add_residual(x, r, v, m, P, w, shared, post_eps, lane)
                copies.store_sum(R, x, row, lane)
            steps.values(v, x, W, w, S, m, f, shared, eps, lane, early)
            if plain or not norm.coded:
                out.store(Y, v, factor(f), row, lane, row < M)
            if norm.coded:
                if norm.factor_first:
                    steps.smoothed(v, S, m, shared, lane)
                out.emit(Q, XS, RS, v, m, f, total, factor(f), shared[6 * warps], row, lane, row < M)

    return main
