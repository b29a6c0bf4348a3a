"""Heads of q and k in registers: RMSNorm over a head, and its rotary position; what programs that turn heads share.

A head lies in the 16-byte vectors of a few neighbouring lanes, two for each: a warp holds 2 to 8 heads. Pairs that turn
together are in one lane, whether they are halves of the head or neighbours.
"""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles.calls import call
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.row_outputs import VECTOR
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro

LAYOUTS = ("neox", "interleaved")
"""Which dims turn together: (i, i + R/2), or (2i, 2i + 1)."""
NORMS = ("none", "llama", "gemma")
NUMERICS = ("fused", "model")
MOST_DIMS = 512


def lanes_of(head_dim: int) -> int:
    """Lanes of a head: a power of two with 16 values for each, some of them idle."""
    return 1 << max(0, (head_dim // 16 - 1).bit_length())


def check(*, head_dim: int, rotary_dim: int, layout: str, dtype: str, norm: str, numerics: str) -> None:
    """Raise ArgumentError unless heads of this kind can be turned."""
    for name, value, known in (
        ("dtype", dtype, ("float16", "bfloat16")),
        ("layout", layout, LAYOUTS),
        ("norm", norm, NORMS),
        ("numerics", numerics, NUMERICS),
    ):
        if value not in known:
            raise ArgumentError(name, value, f"must be one of {known}", f"use {known[0]}")
    if head_dim % 16 or not 16 <= head_dim <= MOST_DIMS:
        raise ArgumentError("head_dim", head_dim, f"must be a multiple of 16 up to {MOST_DIMS}", "pad heads with zeros")
    if rotary_dim % 16 or not 0 < rotary_dim <= head_dim:
        raise ArgumentError("rotary_dim", rotary_dim, f"must be a multiple of 16 up to {head_dim}", "use head_dim")


@dataclass(frozen=True)
class Heads:
    """Shapes and macros of heads in lanes.

    Attributes:
        lanes, used: of a head, and those of them that hold values. bf16: "true" or "false".
        first, second: where the first and second vector of a head's lane j begin.
        state: registers x (4 words), v (16 values), c, s (8 angles), f (a factor).
        factor(h, eps): RMSNorm's of the heads in v, by all lanes. norm(h, W, j): v times it and the weights W.
        turn(h, COS, SIN, at, j): v turned by row `at` of the tables.
    """

    lanes: int
    used: int
    bf16: str
    first: Call
    second: Call
    state: Call
    factor: Macro
    norm: Macro
    turn: Macro


def heads(*, head_dim: int, rotary_dim: int, layout: str, dtype: str, norm: str, numerics: str) -> Heads:
    """Shapes and macros of heads in lanes."""
    lanes, pairs = lanes_of(head_dim), layout == "interleaved"
    model, bf16 = numerics == "model", str(dtype == "bfloat16").lower()
    rounds = (2 if norm == "llama" else 1) if model else 0
    half = rotary_dim // 2
    turned = f"tz_turn8<{bf16}, {str(pairs).lower()}, {str(model).lower()}>"
    normed = f"tz_head_norm8<{bf16}, {str(norm == 'gemma').lower()}, {rounds}>"

    def state() -> Buffers:
        sizes = {"v": 2 * VECTOR, "c": VECTOR, "s": VECTOR, "f": 1}
        return Buffers(**{name: (size, "float32") for name, size in sizes.items()}, x=(4, "uint32"))

    def first(j: Expr) -> Expr:
        if pairs:
            return 2 * j * VECTOR
        return T.if_then_else(j < half // VECTOR, j * VECTOR, rotary_dim + 2 * (j - half // VECTOR) * VECTOR)

    def second(j: Expr) -> Expr:
        if pairs:
            return 2 * j * VECTOR + VECTOR
        passed = rotary_dim + 2 * (j - half // VECTOR) * VECTOR + VECTOR
        return T.if_then_else(j < half // VECTOR, half + j * VECTOR, passed)

    @T.macro
    def factor(h, eps):
        h.f[0] = call(f"head_squares<{lanes}>", T.access_ptr(h.v, "r"), returns="float32")
        h.f[0] = T.rsqrt(h.f[0] / T.float32(head_dim) + eps)

    @T.macro
    def norm_vector(h, i, W, at):
        call("head_weights8", T.access_ptr(h.x, "w", 4), T.access_ptr(W[at], "r", VECTOR))
        T.call_extern("handle", normed, T.access_ptr(h.v[i], "rw", VECTOR), T.access_ptr(h.x, "r", 4), h.f[0])

    @T.macro
    def norm_head(h, W, j):
        norm_vector(h, 0, W, first(j))
        norm_vector(h, VECTOR, W, second(j))

    @T.macro
    def turn(h, COS, SIN, at, j):
        if j < half // VECTOR:
            call("load_floats8", T.access_ptr(h.c, "w"), T.access_ptr(COS[at, j * VECTOR], "r", 8))
            call("load_floats8", T.access_ptr(h.s, "w"), T.access_ptr(SIN[at, j * VECTOR], "r", 8))
            T.call_extern("handle", turned, T.access_ptr(h.v, "rw"), T.access_ptr(h.c, "r"), T.access_ptr(h.s, "r"))

    return Heads(lanes, head_dim // 16, bf16, first, second, state, factor, norm_head, turn)
