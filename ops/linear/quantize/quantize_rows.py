"""Tile program that quantizes activations: per token, dynamic, to int8 or e4m3, in one pass over memory.

`warps` warps hold a row of x in their registers, 16 bytes for each load, so x is read once: first the largest magnitude
(and, with RMSNorm in front, the sum of squares) of the row, then the codes and their sum. RMSNorm's factor is the same
for the whole row, so it only enters the scale.

A warp's vectors lie side by side in the row.

A gain, the product of RMSNorm's weight and the reciprocal of the smooth vector, has twice the bytes of a row. Its loads
follow those of the row, whose products with it stay in registers; `early`, they come before the kernel ahead has ended.
Long rows leave no registers for products and read the gain twice.

Before the kernel ahead of it on the stream has ended (programmatic dependent launch), a CTA of the first wave fetches
`ahead` sixteenths of its rows into L2. That kernel may still write them, and does so in L2: nothing is read into the SM
until it has ended. Where x is in L2 already this does nothing. Half of a short row is best: loads of what has come
would wait behind the fetches of what has not.

A CTA also fetches `later` sixteenths of the row that comes a wave of CTAs after its own, so that bytes are on their way
from DRAM while sums and codes are made. With `persistent`, as many CTAs as fit walk over the rows and read their gains
once; x and gains then both stay in registers, and products are made twice.
"""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles.calls import call
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Call, Macro, Scalar

PASS_CONFIGS = (  # barriers are inside the primitives
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
VECTOR = 8  # values of one 16-byte load
HELD_VECTORS = 4  # most vectors of a thread whose products with gains stay in registers
# form of the codes -> its largest, and the largest magnitude below which a row counts as zeros: the references say why
FORMS = {"int8": (127, 2.0**-119), "e4m3": (448, 2.0**-117)}


@dataclass(frozen=True)
class Rows:
    """What a kernel does with rows, and how threads hold one: see `build`, whose arguments these are.

    Raises:
        ArgumentError: a value outside of what it says.
    """

    k: int
    dtype: str
    gain: bool
    norm: bool
    warps: int
    rows: int
    vectors: int
    persistent: bool = False
    early: bool = False
    codes: str = "int8"

    def __post_init__(self):
        if self.dtype not in ("float16", "bfloat16"):
            raise ArgumentError("dtype", self.dtype, "must be float16 or bfloat16", "cast the activations")
        if self.codes not in FORMS:
            raise ArgumentError("codes", self.codes, f"must be one of {tuple(FORMS)}", "use int8")
        if self.k % VECTOR or self.k < VECTOR:
            raise ArgumentError("k", self.k, "must be a multiple of 8", "pad x with zeros")
        held = self.warps * 32 * self.vectors * VECTOR
        if held < self.out_k or (self.rows > 1 and self.warps > 1) or self.warps > 32:
            shape = (self.warps, self.rows, self.vectors)
            raise ArgumentError("warps", shape, f"do not hold rows of {self.k} values", "choose() them")

    @property
    def out_k(self) -> int:
        """Columns of the codes."""
        return -(-self.k // 16) * 16

    @property
    def integer(self) -> bool:
        """Whether codes are int8, whose sums are wanted too."""
        return self.codes == "int8"

    @property
    def products(self) -> bool:
        """Whether products of x with the gains take the gains' registers."""
        return self.gain and self.vectors <= HELD_VECTORS and not self.persistent

    @property
    def held(self) -> bool:
        """Whether gains are in registers before x."""
        return self.gain and (self.persistent or (self.products and self.early))

    @property
    def twice(self) -> bool:
        """Whether gains are read twice."""
        return self.gain and not (self.products or self.held)

    @property
    def slots(self) -> int:
        """Vectors of gains or products that a thread holds."""
        return self.vectors if self.held or self.products else 1


def row_macros(r: Rows, *, wave: int, later: int) -> tuple[Call, Macro, Macro, Macro]:
    """Function `column(v, lane)`, where vector v of a thread of a row begins; macros `load_gain`, `fetch`, `quantize`.

    wave: CTAs that run at a time. later: values of a row of the next wave that are fetched into L2.
    """
    k, out_k, warps, vectors, slots = r.k, r.out_k, r.warps, r.vectors, r.slots
    gain, norm, products, held, twice, integer = r.gain, r.norm, r.products, r.held, r.twice, r.integer
    bf16, has_norm, kept = (str(flag).lower() for flag in (r.dtype == "bfloat16", norm, r.persistent))
    largest, tiny = FORMS[r.codes]

    def column(v, lane):
        """Where vector v of a thread of a row begins."""
        return (lane // 32 * 32 * vectors + v * 32 + lane % 32) * VECTOR

    @T.macro
    def load_gain(G, g, v, at, late):
        call(
            f"row_gain<{late}>",
            T.access_ptr(g[v * VECTOR], "w", VECTOR),
            T.access_ptr(G[T.min(at, k - VECTOR)], "r", VECTOR),
        )

    @T.macro
    def fetch(X, row, lane, values):
        if T.And(lane == 0, row < X.shape[0]):
            call("prefetch", T.access_ptr(X[row, 0], "r", values), 2 * values)

    @T.macro
    def quantize(X, G, Q, XS, RS, eps, columns, shared, x, g, m, factor, total, row, lane):
        for v in T.unroll(vectors):
            for i in T.unroll(4):
                x[v * 4 + i] = T.uint32(0)
            at = column(v, lane)
            if T.And(row < X.shape[0], at < k):
                call("stream16", T.access_ptr(x[v * 4], "w", 4), T.access_ptr(X[row, at], "r", VECTOR))
        if later:
            fetch(X, row + wave * r.rows, lane, later)
        if twice:  # all loads of the row first: ptxas would put sums between them
            T.sync_threads()
        m[0] = 0.0
        m[1] = 0.0
        if not gain and not norm:
            m[0] = call(f"row_largest<{bf16}, {4 * vectors}>", T.access_ptr(x, "r"), returns="float32")
        else:
            for v in T.unroll(vectors):
                if gain and not held:
                    load_gain(G, g, v if products else 0, column(v, lane), "true")
                call(
                    f"row_scan<{bf16}, {int(gain)}, {has_norm}, {kept}>", T.access_ptr(m, "rw"),
                    T.access_ptr(x[v * 4], "r", 4), T.access_ptr(g[v % slots * VECTOR], "rw", VECTOR),
                )  # fmt: skip
        call(f"row_reduce<{warps}, {has_norm}>", T.access_ptr(m, "rw"), T.access_ptr(shared[0], "rw", 2 * warps))
        factor[0] = T.if_then_else(m[0] < T.float32(tiny), T.float32(0), T.float32(largest) / m[0])
        total[0] = 0
        for v in T.unroll(vectors):
            if not products:  # x stays in registers; else its products do
                call("row_keep", T.access_ptr(x[v * 4], "rw", 4))
            at = column(v, lane)
            if twice:
                load_gain(G, g, 0, at, "false")
            if T.And(row < X.shape[0], at < out_k):
                call(
                    f"row_{'quantize' if integer else 'e4m3'}<{bf16}, {2 if products else int(gain)}>",
                    T.access_ptr(Q[row, at], "w", VECTOR), T.access_ptr(total, "rw"), T.access_ptr(x[v * 4], "r", 4),
                    T.access_ptr(g[v % slots * VECTOR], "r", VECTOR), factor[0],
                )  # fmt: skip
        if integer:
            total[0] = call(
                f"row_sum<{warps}>", total[0], T.access_ptr(shared[2 * warps], "rw", warps), returns="int32"
            )
        if T.And(row < X.shape[0], lane == 0):
            factor[1] = m[0] / T.float32(largest)
            if norm:
                factor[1] = factor[1] * T.rsqrt(m[1] / columns + eps)
            XS[row] = T.if_then_else(m[0] < T.float32(tiny), T.float32(1), factor[1])
            if integer:
                RS[row] = total[0]

    return column, load_gain, fetch, quantize


def build(target, *, resident: int = 1024, ahead: int = 0, later: int = 0, **params: Scalar):
    """The prim_func `main(X, G, Q, XS, RS, eps, columns)`.

    Shapes: X [M, k] in `dtype` ("float16" or "bfloat16"), k a multiple of 8; G f32 [k] (one element without a gain); Q
    int8 [M, K], K = k rounded up to 16, columns from k on become 0; XS f32 [M] scales; RS int32 [M] sums of Q's rows;
    eps f32, RMSNorm's, and `columns` f32, those of the k that its mean counts (with `norm`). A CTA holds `rows` rows of
    `warps` warps, each thread `vectors` vectors; rows > 1 needs warps = 1. Registers are limited so that `resident`
    threads fit on an SM. `ahead` and `later`: sixteenths of rows that are fetched into L2 early; `early`: gains are
    read before the kernel ahead has ended. With `codes` "e4m3", the bytes of Q are e4m3 and RS [1] is not written.
    """
    r = Rows(**params)
    for name, part in (("ahead", ahead), ("later", later)):
        if not 0 <= part <= 16:
            raise ArgumentError(name, part, "must be 0..16, sixteenths of a row", "fetch no more than a row")
    k, dtype, gain, warps, rows, vectors, persistent = r.k, r.dtype, r.gain, r.warps, r.rows, r.vectors, r.persistent
    threads, lanes = 32 * warps * rows, 32 * warps
    blocks = max(1, resident // threads)
    wave = blocks * target.sms  # CTAs that run at a time
    pdl = target.supports("pdl")
    ahead, later = (part * k // VECTOR // 16 * VECTOR if pdl else 0 for part in (ahead, later))  # values
    column, load_gain, fetch, quantize = row_macros(r, wave=wave, later=later)
    forms = ([] if r.integer else ["e4m3_rows"]) + (["prefetch"] if ahead or later else [])
    source = prelude("pack", "rows", *forms)
    M = T.dynamic("m")

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        G: T.Tensor((k if gain else 1,), "float32"),
        Q: T.Tensor((M, r.out_k), "int8"),
        XS: T.Tensor((M,), "float32"),
        RS: T.Tensor((M if r.integer else 1,), "int32"),
        eps: T.float32,
        columns: T.float32,
    ):
        with T.Kernel(
            T.min(T.ceildiv(M, rows), wave) if persistent else T.ceildiv(M, rows), threads=threads, prelude=source
        ) as block:
            T.annotate_min_blocks_per_sm(blocks)
            shared = T.alloc_shared((3 * warps,), "float32")  # one buffer: two might get the same place
            x = T.alloc_local((4 * vectors,), "uint32")
            g = T.alloc_local((VECTOR * r.slots,), "float32")
            m = T.alloc_local((2,), "float32")
            factor = T.alloc_local((2,), "float32")  # of the codes, of the scale
            total = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            row = block * rows + tx // lanes
            lane = tx % lanes
            if ahead:
                if block < wave:
                    fetch(X, row, lane, ahead)
            if r.held:  # a weight: activations._gain keeps its writer from being the kernel ahead
                for v in T.unroll(vectors):
                    load_gain(G, g, v, column(v, lane), "false")
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            if persistent:
                for turn in T.serial(T.ceildiv(T.ceildiv(M, rows) - block, wave)):
                    if not r.integer and warps > 1:  # with a sum of codes, its barrier stands between two reductions
                        T.sync_threads()
                    quantize(
                        X, G, Q, XS, RS, eps, columns, shared, x, g, m, factor, total, row + turn * wave * rows, lane
                    )
            else:
                quantize(X, G, Q, XS, RS, eps, columns, shared, x, g, m, factor, total, row, lane)

    return main
