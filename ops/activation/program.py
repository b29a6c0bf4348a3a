"""Tile program: activation of gate times up, and quantization of a row, in one pass over memory.

`warps` warps hold a row of h = act(gate) * up in their registers; gate and up are read once. Rows may be in experts'
order: then each belongs to the expert whose range of `expert_offsets` it lies in, and rows of no expert are left alone.

Before the kernel ahead of it on the stream has ended (programmatic dependent launch), a CTA only fetches `ahead`
sixteenths of its rows into L2. A CTA also fetches `later` sixteenths of the row that comes a wave of CTAs later.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.gates import ACTIVATIONS
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.cuda.experts import EXPERT_OF_ROW
from terrazzo.ops.tiles.cuda.rows import GATED, ROW_OUTPUTS
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.row_outputs import VECTOR

PASS_CONFIGS = (  # barriers are inside the primitives
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
LAYOUTS = ("gate_up", "up_gate", "interleaved")
"""Where gate and up are: halves of a row, in this order, or columns by turns, gate first."""
NUMERICS = ("fused", "model")
MOST_EXPERTS = 1024


def build(
    target, *, k: int, dtype: str, activation: str, layout: str, clamps: bool, numerics: str, smooth: bool,
    by_expert: bool, experts: int, output: str, column_scales: bool, warps: int, rows: int, vectors: int,
    resident: int, ahead: int, later: int, parts: int = 1,
):  # fmt: skip
    """The prim_func `main(X, S, OFFSETS, Y, Q, XS, RS, alpha, limit)`.

    Shapes: X [M, 2k] in `dtype`, k a multiple of 8; S f32 [k], or (`by_expert`) [experts, k], factors of h (`smooth`);
    OFFSETS int32 [experts + 1], where each expert's rows start (`experts`); Y [M, k] in `dtype` with output "none"; Q,
    XS and RS as in ops/norm/program.py. What is not there has one element. `alpha` is swiglu_oai's, `limit` that of
    `clamps`. `parts` CTAs share a row; where it has one scale, they are a cluster.
    """
    import tilelang.language as T

    row_outputs.check(target, k=k, dtype=dtype, output=output, warps=warps, rows=rows, vectors=vectors, parts=parts)
    for name, value, known in (
        ("activation", activation, ACTIVATIONS),
        ("layout", layout, LAYOUTS),
        ("numerics", numerics, NUMERICS),
    ):
        if value not in known:
            raise ArgumentError(name, value, f"must be one of {known}", f"use {known[0]}")
    if not 0 <= experts <= MOST_EXPERTS:
        raise ArgumentError("experts", experts, f"must be 0..{MOST_EXPERTS}", "leave it 0 for rows of no expert")
    facts = dict(k=k, dtype=dtype, warps=warps, vectors=vectors)
    out = row_outputs.outputs(output=output, column_scales=column_scales, **facts)
    threads, lanes = 32 * warps * rows, 32 * warps
    pairs, coded = layout == "interleaved", output != "none"
    flags = (dtype == "bfloat16", ACTIVATIONS.index(activation), numerics == "model", pairs, clamps)
    gated = f"tz_gated8<{', '.join(str(flag).lower() for flag in flags)}>"
    pdl = target.supports("pdl")
    ahead, later = (part * 2 * k // VECTOR // 16 * VECTOR if pdl else 0 for part in (ahead, later))  # values
    blocks = max(1, resident // threads)
    wave = blocks * target.sms  # CTAs that run at a time
    fetches = bool(ahead or later)
    joined = parts > 1 and output in row_outputs.FORMS
    peers, shape = (
        row_outputs.cluster_of_row(parts, -(-3 * warps // 2) * 2),
        dict(cluster_dims=(parts, 1, 1)) if joined else {},
    )
    own = (ROW_OUTPUTS, EXPERT_OF_ROW + GATED)
    source = prelude(*row_outputs.primitives(output, fetches, joined), extra=own)
    M, MP = T.dynamic("m"), T.dynamic("mp")

    def place(at, second):
        """Where the first or second 8 values of the vector at column `at` of h lie."""
        if pairs:
            return 2 * at + second * VECTOR
        return at + (k if second == (layout == "gate_up") else 0)

    @T.macro
    def fetch(X, row, lane, values):
        if T.And(lane == 0, row < M):
            T.call_extern("handle", "tz_prefetch", T.access_ptr(X[row, 0], "r", values), 2 * values)

    @T.macro
    def load(to, X, row, lane, second, wanted):
        for i in T.unroll(vectors):
            for e in T.unroll(4):
                to[i * 4 + e] = T.uint32(0)
            at = out.column(i, lane)
            if T.And(wanted, at < k):
                T.call_extern(
                    "handle", "tz_stream16", T.access_ptr(to[i * 4], "w", 4),
                    T.access_ptr(X[row, place(at, second)], "r", VECTOR),
                )  # fmt: skip

    @T.macro
    def values(v, a, b, S, m, expert, lane, alpha, limit):
        m[0] = 0.0
        for i in T.unroll(vectors):
            T.call_extern(
                "handle", gated, T.access_ptr(v[i * VECTOR], "w", VECTOR), T.access_ptr(a[i * 4], "r", 4),
                T.access_ptr(b[i * 4], "r", 4), alpha, limit,
            )  # fmt: skip
            if smooth:
                at = T.min(out.column(i, lane), k - VECTOR)
                T.call_extern(
                    "handle", "tz_values_times", T.access_ptr(v[i * VECTOR], "rw", VECTOR),
                    T.access_ptr(S[T.max(expert[0], 0), at] if by_expert else S[at], "r", VECTOR),
                )  # fmt: skip
            if coded:
                out.scan(m, v, i)

    @T.prim_func
    def main(
        X: T.Tensor((M, 2 * k), dtype),
        S: T.Tensor((experts, k) if by_expert else (k if smooth else 1,), "float32"),
        OFFSETS: T.Tensor((experts + 1 if experts else 1,), "int32"),
        Y: T.Tensor((1, 1) if coded else (M, k), dtype),
        Q: T.Tensor(out.codes_shape(M), "int8"),
        XS: T.Tensor(out.scales_shape(M, MP), "float32"),
        RS: T.Tensor(out.sums_shape(M), "int32"),
        alpha: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows) * parts, threads=threads, prelude=source, **shape) as cta:
            T.annotate_min_blocks_per_sm(blocks)
            # one buffer: two might get the same place
            shared = T.alloc_shared((-(-3 * warps // 2) * 2 + (peers.room if joined else 0),), "float32")
            sent = T.alloc_barrier([1, 1]) if joined else None
            a = T.alloc_local((4 * vectors,), "uint32")
            b = T.alloc_local((4 * vectors,), "uint32")
            v = T.alloc_local((VECTOR * vectors,), "float32")
            m = T.alloc_local((2,), "float32")
            f = T.alloc_local((2,), "float32")
            total = T.alloc_local((1,), "int32")
            expert = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            block, part = T.truncdiv(cta, parts), T.truncmod(cta, parts)
            row = block * rows + tx // lanes
            lane = part * lanes + tx % lanes
            if joined:
                peers.open(sent, tx)
            if ahead:
                if block < wave:
                    fetch(X, row, lane, ahead)
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            expert[0] = 0
            if experts:
                expert[0] = T.call_extern(
                    "int32", f"tz_expert_of<{experts}>", T.access_ptr(OFFSETS[0], "r", experts + 1), row
                )
            wanted = T.And(row < M, expert[0] >= 0)
            load(a, X, row, lane, 0, wanted)
            load(b, X, row, lane, 1, wanted)
            if later:
                fetch(X, row + wave * rows, lane, later)
            values(v, a, b, S, m, expert, lane, alpha, limit)
            if coded:
                if not out.block:
                    T.call_extern(
                        "handle", f"tz_row_reduce<{warps}, false>", T.access_ptr(m, "rw"),
                        T.access_ptr(shared[0], "rw", 2 * warps),
                    )  # fmt: skip
                if joined:
                    peers.largest(shared, sent, m, part, tx)
                join = (lambda total: peers.sum(shared, sent, total, part, tx)) if joined else None
                out.emit(Q, XS, RS, v, m, f, total, T.float32(1), shared[2 * warps], row, lane, wanted, join)
            else:
                out.store(Y, v, T.float32(1), row, lane, wanted)

    return main
