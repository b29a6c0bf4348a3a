"""What programs of rows share: float32 values in registers, and how they leave, in 16 bits or as codes with scales.

A thread holds `vectors` vectors of 8 values of a row. A warp's vectors lie side by side, so that the 256 columns of one
vector of each lane are two blocks of 128, of 16 lanes each. A row's scale needs the largest magnitude of all its
threads; a block's needs that of 16 lanes alone.
"""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.tiles.calls import call, place, wait_together
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Call, Expr, Macro

VECTOR = 8  # values of one 16-byte load
BLOCK = 128  # columns of a block scale
OUTPUTS = ("none", "int8", "e4m3", "int8_block128", "e4m3_block128")
"""What rows leave as: in the dtype of x, or as codes with a scale for each token, or for each 128 columns of it."""
FORMS = {"int8": (127, 2.0**-119), "e4m3": (448, 2.0**-117)}
"""Form of codes -> its largest, and the largest magnitude below which values count as zeros."""
MOST_PARTS = 8
"""CTAs of a row: a portable cluster."""


def primitives(output: str, fetches: bool, joined: bool = False) -> list[str]:
    """Names of the primitives that a program with this output needs, SOURCE beside them; `joined`: rows of clusters."""
    names = [("prefetch", fetches), ("e4m3_rows", "e4m3" in output), ("place", joined), ("cluster", joined)]
    return ["pack", "rows", *(name for name, wanted in names if wanted)]


def padded_columns(k: int) -> int:
    """Columns of codes of k values: rows of 16 bytes."""
    return -(-k // 16) * 16


def check(
    target: Target, *, k: int, dtype: str, output: str, warps: int, rows: int, vectors: int, parts: int = 1
) -> None:
    """Raise ArgumentError unless threads hold rows of k values, and the CTAs of a row can join its scale."""
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError("dtype", dtype, "must be float16 or bfloat16", "cast the activations")
    if output not in OUTPUTS:
        raise ArgumentError("output", output, f"must be one of {OUTPUTS}", "use none")
    if k % VECTOR or k < VECTOR:
        raise ArgumentError("k", k, "must be a multiple of 8", "pad x with zeros")
    if parts > 1 and (rows > 1 or parts > MOST_PARTS or (output in FORMS and not target.supports("cluster"))):
        constraint = f"must be 1 for rows of a warp and for scales of tokens on {target.arch}, at most {MOST_PARTS}"
        raise ArgumentError("parts", parts, constraint, "choose() it")
    held = parts * warps * 32 * vectors * VECTOR
    if held < padded_columns(k) or (rows > 1 and warps > 1) or warps * rows > 32:
        raise ArgumentError("warps", (warps, rows, vectors), f"do not hold rows of {k} values", "choose() them")


@dataclass(frozen=True)
class Outputs:
    """Shapes and macros of what a row leaves as.

    Attributes:
        codes, block, integer: of the form. width: columns of codes.
        codes_shape, scales_shape, sums_shape: of Q, XS and RS for m rows (mp: m rounded up to 4).
        column: where vector v of a thread of a row begins.
        scan(m, v, i): vector i joins the largest magnitude of its row, where a row has one scale.
        emit(Q, XS, RS, ...): codes and scales of all vectors; `scale` is a factor of the row that no code has. Where
            CTAs share a row, `lane` counts through them, and `join` makes the sum of codes that of all in the first.
        store(Y, ...): all vectors in 16 bits, times a factor.
    """

    codes: str
    block: bool
    integer: bool
    width: int
    column: Call
    scan: Macro
    emit: Macro
    store: Macro
    codes_shape: Call
    scales_shape: Call
    sums_shape: Call


def outputs(*, k: int, dtype: str, output: str, column_scales: bool, warps: int, vectors: int) -> Outputs:
    """Shapes and macros of what a row leaves as."""
    codes, block = output.partition("_")[0], "_" in output
    integer, width, blocks = codes == "int8", padded_columns(k), -(-k // BLOCK)
    largest, tiny = FORMS.get(codes, (1, 0.0))
    bf16 = str(dtype == "bfloat16").lower()
    convert = f"tz_row_{'quantize' if integer else 'e4m3'}<{bf16}, 2>"

    def column(v: Expr, lane: Expr) -> Expr:
        return (lane // 32 * 32 * vectors + v * 32 + lane % 32) * VECTOR

    @T.macro
    def scan(m, v, i):
        if not block:
            call("values_scan", T.access_ptr(m, "rw"), T.access_ptr(v[i * VECTOR], "r", VECTOR))

    @T.macro
    def store(Y, v, factor, row, lane, wanted):
        for i in T.unroll(vectors):
            at = column(i, lane)
            if T.And(wanted, at < k):
                call(
                    f"values_store<{bf16}>", T.access_ptr(Y[row, at], "w", VECTOR),
                    T.access_ptr(v[i * VECTOR], "r", VECTOR), factor,
                )  # fmt: skip

    @T.macro
    def convert_vector(Q, v, i, total, inverse, row, lane, wanted):
        at = column(i, lane)
        if T.And(wanted, at < width):
            T.call_extern(
                "handle", convert, T.access_ptr(Q[row, at], "w", VECTOR), T.access_ptr(total, "rw"),
                T.access_ptr(v[i * VECTOR], "r", 1), T.access_ptr(v[i * VECTOR], "r", VECTOR), inverse,
            )  # fmt: skip

    @T.macro
    def emit_rows(Q, XS, RS, v, m, f, total, scale, shared, row, lane, wanted, join):
        f[0] = T.if_then_else(m[0] < T.float32(tiny), T.float32(0), T.float32(largest) / m[0])
        for i in T.unroll(vectors):
            convert_vector(Q, v, i, total, f[0], row, lane, wanted)
        if integer:
            total[0] = call(f"row_sum<{warps}>", total[0], T.access_ptr(shared, "rw", warps), returns="int32")
            if join is not None:
                join(total)
        if T.And(wanted, lane == 0):
            XS[row] = T.if_then_else(m[0] < T.float32(tiny), T.float32(1), m[0] / T.float32(largest) * scale)
            if integer:
                RS[row] = total[0]

    @T.macro
    def emit_blocks(Q, XS, v, f, total, scale, row, lane, wanted):
        for i in T.unroll(vectors):
            f[1] = call("block_largest", T.access_ptr(v[i * VECTOR], "r", VECTOR), returns="float32")
            f[0] = T.if_then_else(f[1] < T.float32(tiny), T.float32(0), T.float32(largest) / f[1])
            convert_vector(Q, v, i, total, f[0], row, lane, wanted)
            at = column(i, lane)
            if T.And(T.And(wanted, at < k), lane % 16 == 0):
                f[1] = T.if_then_else(f[1] < T.float32(tiny), T.float32(1), f[1] / T.float32(largest) * scale)
                if column_scales:
                    XS[at // BLOCK, row] = f[1]
                else:
                    XS[row, at // BLOCK] = f[1]

    @T.macro
    def emit(Q, XS, RS, v, m, f, total, scale, shared, row, lane, wanted, join=None):
        total[0] = 0
        if block:
            emit_blocks(Q, XS, v, f, total, scale, row, lane, wanted)
        else:
            emit_rows(Q, XS, RS, v, m, f, total, scale, shared, row, lane, wanted, join)

    def scales_shape(m: Expr, mp: Expr) -> tuple:
        if not block:
            return (m if codes != "none" else 1,)
        return (blocks, mp) if column_scales else (m, blocks)

    codes_shape = lambda m: (m, width) if codes != "none" else (1, 1)
    sums_shape = lambda m: (m if integer and not block else 1,)
    return Outputs(codes, block, integer, width, column, scan, emit, store, codes_shape, scales_shape, sums_shape)


@dataclass(frozen=True)
class RowCluster:
    """Macros of the CTAs of a cluster that share a row, through `room` floats of shared memory.

    Attributes:
        open(sent, tx): by all threads, before anything is sent; `sent`: two mbarriers of one arrival.
        largest(shared, sent, m, part, tx): m[0] of each CTA becomes that of all. sum(shared, sent, total, part, tx):
            total[0] of the first CTA's first thread becomes the sum over all.
    """

    room: int
    open: Macro
    largest: Macro
    sum: Macro


def cluster_of_row(parts: int, first: int) -> RowCluster:
    """first: where a buffer of floats in shared memory has that room, an even number."""
    sums = first + 2 * parts

    @T.macro
    def open(sent, tx):
        T.cluster_arrive()
        if tx == 0:
            for i in T.unroll(2):
                T.mbarrier_expect_tx(sent[i], 8 * parts)
                T.barrier_arrive(sent[i])

    @T.macro
    def send(shared, at, rank, value, barrier):
        call("send8", T.access_ptr(shared[at], "w", 2), rank, value, T.float32(0), T.access_ptr(barrier, "rw", 1))

    @T.macro
    def largest(shared, sent, m, part, tx):
        T.cluster_wait()  # the others' barriers are made
        if tx < parts:
            send(shared, first + 2 * part, tx, m[0], sent[0])
        wait_together(place(sent[0], "rw"), 0)
        for i in T.unroll(parts):
            call("join_largest", T.access_ptr(m, "rw"), shared[first + 2 * i])

    @T.macro
    def sum(shared, sent, total, part, tx):
        """Sums of codes are integers below 2^24: floats hold them."""
        if tx == 0:
            send(shared, sums + 2 * part, 0, T.cast(total[0], "float32"), sent[1])
        if T.And(part == 0, tx < 32):
            wait_together(place(sent[1], "rw"), 0)
            total[0] = 0
            for i in T.unroll(parts):
                total[0] = total[0] + T.cast(shared[sums + 2 * i], "int32")

    return RowCluster(4 * parts, open, largest, sum)
