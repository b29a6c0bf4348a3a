"""Tile program that quantizes activations to bytes otherwise than by a row's largest magnitude; see `build`.

A CTA takes rows as the programs of RMSNorm and gates do (`row_outputs`): each thread holds `vectors` vectors of 8
values, so x is read once.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.calls import call
from terrazzo.ops.tiles.cuda.rows import BYTE_CODES, GROUP_CODES, ROW_OUTPUTS
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.row_outputs import BLOCK, VECTOR, Outputs
from terrazzo.ops.tiles.types import Expr, Macro, Scalar
from terrazzo.schedules.rows import Rows

PASS_CONFIGS = (  # barriers are inside the primitives
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
FORMS = ("int8_static", "e4m3_static", "int8_asymmetric", "e4m3_block128", "e4m3_block128_ue8m0", "mxfp8")


def build(target, *, k: int, dtype: str, gain: bool, form: str, **params: Scalar):
    """The prim_func `main(X, G, Q, XS, ZS, scale, inverse, zero)`.

    Shapes: X [M, k] in `dtype`, k a multiple of 8; G f32 [k] (one element without a gain); Q int8 [M, K], K = k rounded
    up to 16, columns from k on become what 0 does; XS f32 [M], or [ceil(k / 128), MP] of blocks, MP a multiple of 4; ZS
    int32 [M], written by int8 forms. `form`, a key of FORMS:

    "int8_static", "e4m3_static": with `scale`, its reciprocal `inverse` and `zero` of all tokens, saturating.
    "int8_asymmetric": scale and zero point of each token by its smallest and largest value, and 0.
    "e4m3_block128": a scale for each 128 columns of a token. "e4m3_block128_ue8m0": the same, rounded up to a power of
    two before codes are made. "mxfp8": XS is int32 [ceil(k / 128), MP], the e8m0 bytes of four groups of 32 columns,
    whose largest magnitude says the power of two (ops/w4a8/mxfp8.py). `ahead` and `later` are not used, `parts` is 1.
    """
    tile = Rows(**params)
    warps, rows, vectors, parts = tile.warps, tile.rows, tile.vectors, tile.parts
    if form not in FORMS:
        raise ArgumentError("form", form, f"must be one of {FORMS}", "use the quantizer of tokens for others")
    groups, powers, integer = form == "mxfp8", form.endswith("_ue8m0"), form.startswith("int8")
    block = groups or "_block128" in form
    output = "e4m3_block128" if block else "int8" if integer else "e4m3"
    facts = dict(k=k, dtype=dtype, warps=warps, vectors=vectors)
    row_outputs.check(target, output=output, rows=rows, parts=parts, **facts)
    out = row_outputs.outputs(output=output, column_scales=block, **facts)
    largest, tiny = row_outputs.FORMS["int8" if integer else "e4m3"]
    threads, lanes = 32 * warps * rows, 32 * warps
    bf16 = str(dtype == "bfloat16").lower()
    blocks = max(1, tile.resident // threads)
    extra = (ROW_OUTPUTS, BYTE_CODES, *([GROUP_CODES] if groups else []))
    source = prelude(*row_outputs.primitives(output, False), extra=extra)
    pdl = target.supports("pdl")
    M, MP = T.dynamic("m"), T.dynamic("mp")

    @T.macro
    def load(X, G, x, v, row, lane):
        for i in T.unroll(vectors):
            for e in T.unroll(4):
                x[e] = T.uint32(0)
            at = out.column(i, lane)
            if T.And(row < M, at < k):
                call("stream16", T.access_ptr(x, "w"), T.access_ptr(X[row, at], "r", VECTOR))
            call(f"widen8<{bf16}>", T.access_ptr(v[i * VECTOR], "w", VECTOR), T.access_ptr(x, "r"))
            if gain:
                call(
                    "values_times",
                    T.access_ptr(v[i * VECTOR], "rw", VECTOR),
                    T.access_ptr(G[T.min(at, k - VECTOR)], "r", VECTOR),
                )

    @T.macro
    def find_range(m, low, v, f, shared):
        """f: inverse, scale and zero point of the row."""
        for i in T.unroll(2):
            m[i] = 0.0
        for i in T.unroll(vectors):
            call("range8", T.access_ptr(m, "rw"), T.access_ptr(v[i * VECTOR], "r", VECTOR))
        low[0] = m[1]
        for which, at in ((m, 0), (low, 2 * warps)):
            call(f"row_reduce<{warps}, false>", T.access_ptr(which, "rw"), T.access_ptr(shared[at], "rw", 2 * warps))
        f[1] = (m[0] + low[0]) / T.float32(255)
        if f[1] < T.float32(2.0**-119):
            f[1] = 1.0
        f[0] = T.float32(1) / f[1]
        f[2] = T.max(
            T.min(T.call_extern("float32", "rintf", low[0] / f[1]) - T.float32(128), T.float32(127)), T.float32(-128)
        )

    @T.macro
    def write_vector(Q, v, i, total, f, row, lane):
        at = out.column(i, lane)
        if T.And(row < M, at < out.width):
            if integer:
                call(
                    "affine8", T.access_ptr(Q[row, at], "w", VECTOR), T.access_ptr(v[i * VECTOR], "r", VECTOR), f[0],
                    f[2],
                )  # fmt: skip
            else:
                call(
                    f"row_e4m3<{bf16}, 2>", T.access_ptr(Q[row, at], "w", VECTOR), T.access_ptr(total, "rw"),
                    T.access_ptr(v[i * VECTOR], "r", 1), T.access_ptr(v[i * VECTOR], "r", VECTOR), f[0],
                )  # fmt: skip

    @T.macro
    def write(Q, v, total, f, row, lane):
        for i in T.unroll(vectors):
            write_vector(Q, v, i, total, f, row, lane)

    @T.macro
    def write_powers(Q, XS, v, total, f, row, lane):
        """Codes and scales of blocks; the reciprocal of a power of two is exact."""
        for i in T.unroll(vectors):
            f[1] = call("block_largest", T.access_ptr(v[i * VECTOR], "r", VECTOR), returns="float32")
            f[2] = call("power_above", f[1] / T.float32(largest), returns="float32")
            f[0] = T.if_then_else(f[1] < T.float32(tiny), T.float32(0), T.float32(1) / f[2])
            write_vector(Q, v, i, total, f, row, lane)
            if T.And(T.And(row < M, out.column(i, lane) < k), lane % 16 == 0):
                XS[out.column(i, lane) // BLOCK, row] = T.if_then_else(f[1] < T.float32(tiny), T.float32(1), f[2])

    write_groups = groups_macro(out, write_vector, rows=M, vectors=vectors, blocks=-(-k // BLOCK), tiny=tiny)

    @T.prim_func
    def main(
        X: T.Tensor((M, k), dtype),
        G: T.Tensor((k if gain else 1,), "float32"),
        Q: T.Tensor((M, out.width), "int8"),
        XS: T.Tensor(out.scales_shape(M, MP), "int32" if groups else "float32"),
        ZS: T.Tensor((M if integer else 1,), "int32"),
        scale: T.float32,
        inverse: T.float32,
        zero: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=threads, prelude=source) as cta:
            T.annotate_min_blocks_per_sm(blocks)
            shared = T.alloc_shared((4 * warps,), "float32")
            x = T.alloc_local((4,), "uint32")
            v = T.alloc_local((VECTOR * vectors,), "float32")
            m = T.alloc_local((2,), "float32")
            low = T.alloc_local((2,), "float32")
            f = T.alloc_local((3,), "float32")
            total = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding()
            row = cta * rows + tx // lanes
            lane = tx % lanes
            if pdl:
                T.pdl_trigger()
                T.pdl_sync()
            load(X, G, x, v, row, lane)
            if groups:
                write_groups(Q, XS, v, total, f, row, lane)
            elif powers:
                write_powers(Q, XS, v, total, f, row, lane)
            elif block:
                out.emit(Q, XS, None, v, m, f, total, T.float32(1), shared, row, lane, row < M)
            else:
                f[0] = inverse
                f[1] = scale
                f[2] = zero
                if form == "int8_asymmetric":
                    find_range(m, low, v, f, shared)
                write(Q, v, total, f, row, lane)
                if T.And(row < M, lane == 0):
                    XS[row] = f[1]
                    if integer:
                        ZS[row] = T.cast(f[2], "int32")

    return main


def groups_macro(out: Outputs, write_vector: Macro, *, rows: Expr, vectors: int, blocks: int, tiny: float) -> Macro:
    """Macro of the codes and scales of groups of 32 columns, of those behind the last column of a block of 128, too."""

    @T.macro
    def write_groups(Q, XS, v, total, f, row, lane):
        scale = T.alloc_local((1,), "uint32")
        for i in T.unroll(vectors):
            scale[0] = call(
                "group_scale", T.access_ptr(f, "w", 1), T.access_ptr(v[i * VECTOR], "r", VECTOR), T.float32(tiny),
                returns="uint32",
            )  # fmt: skip
            write_vector(Q, v, i, total, f, row, lane)
            at = out.column(i, lane)
            if T.And(T.And(row < rows, at < blocks * BLOCK), lane % 4 == 0):
                call("store_scale", T.access_ptr(XS[at // BLOCK, row], "w", 1), at % BLOCK // 32, scale[0])

    return write_groups
