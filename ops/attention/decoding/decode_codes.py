"""Codes of decode's outputs: by the last CTA of a sequence, whose tokens' rows are spread over all kv heads.

A token's scale needs the largest magnitude of Hq D values, and each kv head has CTAs of its own. So they leave 16-bit
rows, and count themselves; the last one reads the rows back from L2, and writes codes, scales and sums. It is the same
rounding as that of a quantizer behind the kernel. Vectors of 8 values lie side by side in the lanes of a warp: 16 of
them are a block of 128 columns, whichever head dimension there is.
"""

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.decoding.decode_arguments import Decode, query_at
from terrazzo.ops.attention.device.tile_macros import Sizes, each, less, smaller
from terrazzo.ops.tiles import row_outputs
from terrazzo.ops.tiles.cuda.attention import attention_prelude
from terrazzo.ops.tiles.cuda.rows import ROW_OUTPUTS
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.row_outputs import BLOCK, FORMS, VECTOR
from terrazzo.ops.tiles.types import Buffers, Macro

HELD = 4  # vectors of a thread, between the two passes over a row
OUTPUTS = row_outputs.OUTPUTS[1:]


def prelude(p: Decode, *names: str) -> str:
    """Device code of a kernel: primitives of these names, the conversions of packed and of f16 tiles, and what makes
    codes."""
    names += tuple(row_outputs.primitives(p.output, False)) if p.coded else ()
    found = [p.layout.k.converter, p.layout.v.converter, *([p.plain.k.converter] if p.residual else [])]
    sources = dict.fromkeys(c.device_source for c in sorted(found, key=lambda c: c.name))
    return attention_prelude(*names, extra=(*sources, *((ROW_OUTPUTS,) if p.coded else ())))


def _check(target, output: str, column_scales: bool) -> None:
    """Raise ArgumentError for codes that no kernel makes."""
    if output not in OUTPUTS:
        raise ArgumentError("output", output, f"must be one of {OUTPUTS}", "use int8")
    if column_scales and "_" not in output:
        raise ArgumentError("column_scales", True, f"{output} has one scale for each token", "leave it out")
    if "e4m3" in output and not any(map(target.supports, ("mma.e4m3", "wgmma.e4m3"))):
        raise ArgumentError("output", output, f"{target.arch} has no e4m3 codes", "use int8")


def state() -> Buffers:
    """Registers of the macros; `done`: whether the CTA's share of the output is in memory."""
    return Buffers(
        x=(4 * HELD, "uint32"), v=(VECTOR, "float32"), m=(1, "float32"), f=(2, "float32"), total=(1, "int32"),
        done=(1, "int32"),
    )  # fmt: skip


def make_code_macro(target, sizes: Sizes, p: Decode) -> Macro:
    """Macro `finish`, by all threads of a CTA whose share of the output is written."""
    output, smooth, column_scales, cols = p.output, p.smooth, p.column_scales, p.cols
    head_dim, dtype, cluster, threads = p.head_dim, p.dtype, p.cluster, p.threads
    _check(target, output, column_scales)
    codes, block = output.partition("_")[0], "_" in output
    integer, (largest, tiny) = codes == "int8", FORMS[codes]
    warps, bf16, pieces = threads // 32, str(dtype == "bfloat16").lower(), head_dim // VECTOR
    convert = f"tz_row_{'quantize' if integer else 'e4m3'}<{bf16}, 2>"
    count = sizes.hq * pieces  # vectors of a row

    def vector_at(chunk, i, tx):
        """The number of a thread's vector i of a chunk."""
        return (chunk * HELD + i) * threads + tx

    @T.macro
    def load(t, s, w, row, chunk, tx):
        """A chunk of the row; zeros behind its end."""
        for i in each(HELD):
            for e in each(4):
                s.x[i * 4 + e] = T.uint32(0)
            at = vector_at(chunk, i, tx)
            if less(at, count):
                T.call_extern(
                    "handle", "tz_load16cg", T.access_ptr(s.x[i * 4], "w", 4),
                    T.access_ptr(t.O[w.q_of, row, at // pieces, at % pieces * VECTOR], "r", VECTOR),
                )  # fmt: skip

    @T.macro
    def values(t, s, chunk, i, tx):
        """Vector i in float32, smoothed."""
        T.call_extern("handle", f"tz_widen8<{bf16}>", T.access_ptr(s.v, "w", VECTOR), T.access_ptr(s.x[i * 4], "r", 4))
        if smooth:
            at = smaller(vector_at(chunk, i, tx), count - 1)
            T.call_extern(
                "handle", "tz_values_times", T.access_ptr(s.v, "rw", VECTOR),
                T.access_ptr(t.SM[at * VECTOR], "r", VECTOR),
            )  # fmt: skip

    @T.macro
    def emit(t, s, token, at):
        """Codes of vector number `at`."""
        T.call_extern(
            "handle", convert, T.access_ptr(t.XQ[token, at * VECTOR], "w", VECTOR), T.access_ptr(s.total, "rw"),
            T.access_ptr(s.v[0], "r", 1), T.access_ptr(s.v, "r", VECTOR), s.f[0],
        )  # fmt: skip

    def inverse(m):
        return T.if_then_else(m < T.float32(tiny), T.float32(0), T.float32(largest) / m)

    def scale(m):
        return T.if_then_else(m < T.float32(tiny), T.float32(1), m / T.float32(largest))

    @T.macro
    def whole_row(t, ring, s, w, row, token, turn, chunks, tx):
        """One scale for a row. Shared words of a turn are used again behind a barrier of the next one."""
        s.m[0] = 0.0
        for chunk in T.serial(chunks):
            load(t, s, w, row, chunk, tx)
            for i in each(HELD):
                values(t, s, chunk, i, tx)
                T.call_extern("handle", "tz_values_scan", T.access_ptr(s.m, "rw"), T.access_ptr(s.v, "r", VECTOR))
        T.call_extern(
            "handle", f"tz_row_reduce<{warps}, false>", T.access_ptr(s.m, "rw"),
            T.access_ptr(ring[turn * 2 * warps], "rw", warps),
        )  # fmt: skip
        s.f[0] = inverse(s.m[0])
        s.total[0] = 0
        for chunk in T.serial(chunks):
            if less(1, chunks):
                load(t, s, w, row, chunk, tx)
            for i in each(HELD):
                if less(vector_at(chunk, i, tx), count):
                    values(t, s, chunk, i, tx)
                    emit(t, s, token, vector_at(chunk, i, tx))
        if integer:
            s.total[0] = T.call_extern(
                "int32", f"tz_row_sum<{warps}>", s.total[0], T.access_ptr(ring[turn * 2 * warps + warps], "rw", warps)
            )
        if less(tx, 1):
            t.XS[token] = scale(s.m[0])
            if integer:
                t.XR[token] = s.total[0]

    @T.macro
    def blocks_of_row(t, s, w, row, token, chunks, tx):
        """A scale for each 128 columns."""
        for chunk in T.serial(chunks):
            load(t, s, w, row, chunk, tx)
            for i in each(HELD):
                at = vector_at(chunk, i, tx)
                values(t, s, chunk, i, tx)
                s.m[0] = T.call_extern("float32", "tz_block_largest", T.access_ptr(s.v, "r", VECTOR))
                s.f[0] = inverse(s.m[0])
                if less(at, count):
                    emit(t, s, token, at)
                    if less(at % (BLOCK // VECTOR), 1):
                        blocks = T.ceildiv(count, BLOCK // VECTOR)
                        if column_scales:
                            t.XS[at // (BLOCK // VECTOR) * T.truncdiv(t.XS.shape[0], blocks) + token] = scale(s.m[0])
                        else:
                            t.XS[token * blocks + at // (BLOCK // VECTOR)] = scale(s.m[0])

    @T.macro
    def finish(g, ring, s, w, tx):
        """The CTA is counted; the last one of its sequence makes codes of all its rows."""
        arrivals = w.kv_heads * T.ceildiv(w.rows[0], cols) * cluster
        counter = sizes.b * sizes.y * cluster + w.b
        if T.call_extern("bool", "tz_last_arrival", T.access_ptr(g.SEM[counter], "rw"), arrivals):
            chunks = T.ceildiv(count, HELD * threads)
            for t in T.serial(w.q_len):
                row = query_at(w, t)
                token = w.q_of * g.O.shape[1] + row
                if block:
                    blocks_of_row(g, s, w, row, token, chunks, tx)
                else:
                    whole_row(g, ring, s, w, row, token, t % 2, chunks, tx)

    return finish
