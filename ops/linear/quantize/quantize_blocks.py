"""Tile program that quantizes activations: permutation, RMSNorm, scales of blocks of 128 channels, two planes.

A CTA takes a row. It is read once, into shared memory; a warp then gathers the 128 values of a block, four for each
lane, finds their largest magnitude, and writes codes and scale. RMSNorm's factor is the same for the whole row: it only
enters the scales, unless they are static. With one scale for a token and precision, or two-level scales, the largest
magnitudes of all blocks come first and the values are gathered a second time (ops/w4ax/reference.py has the formulas).

What stands in front of a layer may come with it. A residual is read beside the row, and their sum, rounded, leaves in
its place. Or gate and up are read, and act(gate) * up, rounded, is the row. What is rounded is what the kernels of
ops/norm and ops/activation round, so that codes and scales are those of their output.
"""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import gates
from terrazzo.ops.linear.mixed.scales import GRANULARITIES, LARGEST_FACTOR, TINY, UNIFORM, UNITS
from terrazzo.ops.tiles.calls import call
from terrazzo.ops.tiles.cuda.blocks import ROW_BLOCKS
from terrazzo.ops.tiles.cuda.rows import GATED, ROW_OUTPUTS, ROW_SUMS
from terrazzo.ops.tiles.cuda.text import prelude
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Expr, Macro, Scalar

PASS_CONFIGS = (  # the barriers are the program's own
    ("tl.disable_thread_storage_sync", True),
    ("tl.disable_warp_specialized", True),
)
BLOCK = 128
VECTOR = 8  # values of one 16-byte load
GATES = ("silu", "gelu_tanh", "gelu")
FRONTS = ("none", "residual", *GATES)
"""What a row is: x; round(x + residual), which leaves as the residual; or act(gate) * up of x's halves, gate first."""
MOST_STAGED = 4  # vectors of a thread that are loaded together, where a row is made of two
MOST_AHEAD = 32  # registers of a thread for order and gains that are loaded together with the row


def shared_bytes(k: int, warps: int) -> int:
    """Shared memory of a CTA, bytes."""
    return -(-k // BLOCK) * BLOCK * 2 + (warps + -(-k // BLOCK)) * 4 + 1024


@dataclass(frozen=True)
class Quantizer:
    """Parameters of `build`.

    Raises:
        ArgumentError: a value outside of what it says.
    """

    k: int
    blocks8: int
    dtype: str
    permuted: bool
    gain: bool
    granularity: str
    wide: bool
    warps: int
    front: str = "none"

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ArgumentError("dtype", self.dtype, "must be float16 or bfloat16", "cast the activations")
        if self.granularity not in GRANULARITIES:
            raise ArgumentError("granularity", self.granularity, f"must be one of {GRANULARITIES}", "use 'block'")
        if not 0 <= self.blocks8 <= self.blocks:
            raise ArgumentError("blocks8", self.blocks8, f"must be 0..{self.blocks}", "use the weight's")
        if self.front not in FRONTS or (self.front != "none" and self.k % VECTOR):
            raise ArgumentError(
                "front", self.front, f"must be one of {FRONTS}, with rows of a multiple of 8", "use none"
            )
        if not 1 <= self.warps <= 32:
            raise ArgumentError("warps", self.warps, "must be 1..32", "choose() them")

    @property
    def blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def blocks4(self) -> int:
        """INT4 blocks, the first ones."""
        return self.blocks - self.blocks8

    @property
    def padded(self) -> int:
        """Columns of the blocks."""
        return self.blocks * BLOCK

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of a row of each plane, 0 without one."""
        return (0, self.padded) if self.wide else (self.blocks4 * BLOCK // 2, self.blocks8 * BLOCK)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def flags(self) -> tuple[str, str]:
        """Of primitives: whether values are bfloat16, and whether squares join the sum."""
        return str(self.dtype == "bfloat16").lower(), str(self.gain).lower()


def emit_macro(q: Quantizer, rows: Expr, pitch: Expr) -> Macro:
    """Macro `emit`: what a warp writes of a block. rows, pitch: M, and the extent of a row of the scales."""
    granularity, gain, wide, warps = q.granularity, q.gain, q.wide, q.warps
    blocks4, (width4, width8) = q.blocks4, q.widths
    static, two_level = granularity == "static", granularity == "two_level"
    clamp, times = (str(flag).lower() for flag in (static, two_level and wide))

    @T.macro
    def two_level_scale(f, own):
        """Of an INT4 block whose largest magnitude is `own`: the unit into f[4], its factor into f[5], f[3] anew."""
        f[4] = T.reinterpret(
            T.bitwise_and(T.reinterpret(f[0] / T.float32(UNITS), "uint32"), T.uint32(0xFFFFFF00)), "float32"
        )
        f[5] = T.min(T.max(T.ceil(own / (f[4] * T.float32(7))), T.float32(1)), T.float32(LARGEST_FACTOR))
        f[3] = T.float32(1) / (f[4] * f[5])

    @T.macro
    def emit(Q4, Q8, XS, S, Ss, v, f, row, block, lane):
        """Codes and scale of a block whose largest magnitude, or that of all of its kind, is f[0]; f[1] is RMSNorm's
        factor, f[2] qmax."""
        f[5] = 1.0
        f[2] = T.if_then_else(block < blocks4, T.float32(7), T.float32(127))
        if static:
            f[4] = S[block]
            f[3] = T.float32(1) / f[4]
            if gain:
                for i in T.unroll(4):
                    v[i] = v[i] * f[1]
        else:
            f[3] = f[2] / f[0]
            f[4] = f[0] / f[2]
            if two_level and blocks4:
                if block < blocks4:
                    two_level_scale(f, Ss[warps + block])
            f[3] = T.if_then_else(f[0] < T.float32(TINY), T.float32(0), f[3])
            if gain:
                f[4] = f[4] * f[1]
            if two_level and not wide:
                f[4] = f[4] * f[5]
            f[4] = T.if_then_else(f[0] < T.float32(TINY), T.float32(1), f[4])
        if width4:
            if block < blocks4:
                call(
                    f"store_codes<true, {clamp}, false>",
                    T.access_ptr(Q4[row, block * (BLOCK // 2) + lane * 2], "w", 2), T.access_ptr(v, "r"), f[3], f[2],
                    T.float32(1),
                )  # fmt: skip
        if width8:
            if T.bool(wide) or block >= blocks4:
                call(
                    f"store_codes<false, {clamp}, {times}>",
                    T.access_ptr(Q8[row, (block - (0 if wide else blocks4)) * BLOCK + lane * 4], "w", 4),
                    T.access_ptr(v, "r"), f[3], f[2], f[5],
                )  # fmt: skip
        # the last row also fills the padding behind it
        if T.And(lane < 4, T.Or(lane == 0, T.And(row == rows - 1, row + lane < pitch))):
            XS[block, row + lane] = f[4]

    return emit


def stage_macro(q: Quantizer) -> Macro:
    """Macro `stage`: a row of x comes to shared memory, and its squares join the sum."""
    columns, padded, threads, (bf16, norm) = -(-q.k // VECTOR) * VECTOR, q.padded, q.threads, q.flags

    @T.macro
    def stage(X, R, Rs, x, total, row, tx):
        for e in T.serial(-(-padded // (threads * VECTOR))):
            at = (e * threads + tx) * VECTOR
            if at < padded:
                for i in T.unroll(4):
                    x[i] = T.uint32(0)
                if at < columns:
                    call("stream16", T.access_ptr(x, "w"), T.access_ptr(X[row, at], "r", VECTOR))
                call(
                    f"row_stage<{bf16}, {norm}>", T.access_ptr(Rs[at], "w", VECTOR), T.access_ptr(total, "rw"),
                    T.access_ptr(x, "r"),
                )  # fmt: skip

    return stage


def front_macro(q: Quantizer) -> Macro:
    """Macro `stage` of rows that are made of two: they come to shared memory as the quantizer wants them."""
    k, padded, threads, halves, (bf16, norm) = q.k, q.padded, q.threads, q.front != "residual", q.flags
    vectors = -(-padded // (threads * VECTOR))  # of a thread
    together = min(vectors, MOST_STAGED)
    if halves:
        flags = (q.dtype == "bfloat16", gates.ACTIVATIONS.index(q.front), False, False, False)
        gated = f"tz_gated8<{', '.join(str(flag).lower() for flag in flags)}>"

    @T.macro
    def join(R, v, x, r, i, row, at):
        """The row's values into x[4 i ..]; a sum to memory, too."""
        if halves:
            T.call_extern(
                "handle", gated, T.access_ptr(v, "w"), T.access_ptr(x[i * 4], "r", 4), T.access_ptr(r[i * 4], "r", 4),
                T.float32(0), T.float32(0),
            )  # fmt: skip
            call(f"narrow8<{bf16}>", T.access_ptr(x[i * 4], "w", 4), T.access_ptr(v, "r"))
        else:
            call(f"add8<{bf16}>", T.access_ptr(x[i * 4], "rw", 4), T.access_ptr(r[i * 4], "r", 4))
            if at < k:
                call("store4", T.access_ptr(R[row, at], "w", VECTOR), T.access_ptr(x[i * 4], "r", 4))

    @T.macro
    def stage(X, R, Rs, spare, total, row, tx):
        x = T.alloc_local((4 * together,), "uint32")
        r = T.alloc_local((4 * together,), "uint32")
        v = T.alloc_local((VECTOR,), "float32")
        for g in T.serial(-(-vectors // together)):
            first = (g * together * threads + tx) * VECTOR
            for i in T.unroll(together):
                for e in T.unroll(4):
                    x[i * 4 + e] = T.uint32(0)
                    r[i * 4 + e] = T.uint32(0)
                if first + i * threads * VECTOR < k:
                    call(
                        "stream16",
                        T.access_ptr(x[i * 4], "w", 4),
                        T.access_ptr(X[row, first + i * threads * VECTOR], "r", VECTOR),
                    )
                    call(
                        "stream16",
                        T.access_ptr(r[i * 4], "w", 4),
                        T.access_ptr(
                            X[row, k + first + i * threads * VECTOR]
                            if halves
                            else R[row, first + i * threads * VECTOR],
                            "r",
                            VECTOR,
                        ),
                    )
            for i in T.unroll(together):
                at = first + i * threads * VECTOR
                if at < padded:
                    join(R, v, x, r, i, row, at)
                    call(
                        f"row_stage<{bf16}, {norm}>", T.access_ptr(Rs[at], "w", VECTOR), T.access_ptr(total, "rw"),
                        T.access_ptr(x[i * 4], "r", 4),
                    )  # fmt: skip

    return stage


def gather_macros(q: Quantizer, ahead: bool) -> tuple[Macro, Macro]:
    """Macros `load_lists` and `gather`: the four values of a block that each thread takes in a turn, times their gains.
    `ahead`: order and gains of all turns are loaded before."""
    permuted, gain, padded, warps = q.permuted, q.gain, q.padded, q.warps
    flags = ", ".join((q.flags[0], str(permuted).lower(), str(gain).lower()))

    @T.macro
    def load_lists(P, G, order, gains, turn, slot, tx):
        """Order and gains of the values that a thread gathers in a turn."""
        at = (turn * warps + tx // 32) * BLOCK + tx % 32 * 4
        if at < padded:
            if permuted:
                call("ldg16", T.access_ptr(order[slot * 4], "w", 4), T.access_ptr(P[at], "r", 4))
            if gain:
                call("ldg16", T.access_ptr(gains[slot * 4], "w", 4), T.access_ptr(G[at], "r", 4))

    @T.macro
    def gather(v, Rs, P, G, order, gains, turn, tx):
        if not ahead:
            load_lists(P, G, order, gains, turn, 0, tx)
        call(
            f"gather4<{flags}>", T.access_ptr(v, "w"), T.access_ptr(Rs[0], "r", padded),
            (turn * warps + tx // 32) * BLOCK + tx % 32 * 4,
            T.access_ptr(order[turn * 4 if ahead and permuted else 0], "r", 1),
            T.access_ptr(gains[turn * 4 if ahead and gain else 0], "r", 1),
        )  # fmt: skip

    return load_lists, gather


def build(target, **params: Scalar):
    """The prim_func `main(X, P, G, S, Q4, Q8, XS, eps)`; with front "residual" `main(X, R, P, ...)`.

    Shapes: X [M, k8] in `dtype` ("float16" or "bfloat16"), k8 = k rounded up to 8, zeros from k on; P int32 [Kp], -1
    for padding (one element unless `permuted`); G f32 [Kp], RMSNorm's weight in the output's order (one element unless
    `gain`); S f32 [Kp/128] static scales (one element otherwise); Q4 uint8 [M, K4/2], two channels in a byte, the even
    one low (one element where no block is INT4, or `wide`); Q8 int8 [M, 128 * blocks8], with `wide` [M, Kp] and all
    blocks (one element where there is none); XS f32 [Kp/128, MP], MP = M rounded up to 4; eps f32, RMSNorm's.
    `front`, of FRONTS, wants k a multiple of 8: R [M, k] in `dtype` becomes round(R + X), or X is [M, 2 k].
    """
    q = Quantizer(**params)
    k, dtype, permuted, gain, warps, front = q.k, q.dtype, q.permuted, q.gain, q.warps, q.front
    blocks, blocks4, padded, threads, granularity = q.blocks, q.blocks4, q.padded, q.threads, q.granularity
    columns, (width4, width8) = -(-k // VECTOR) * VECTOR, q.widths
    static, uniform = granularity == "static", granularity in UNIFORM
    pdl = target.supports("pdl")
    turns = -(-blocks // warps)  # blocks of a warp
    lists = permuted + gain
    ahead = lists and turns * lists * 4 <= MOST_AHEAD
    turns_of = T.unroll if ahead else T.serial  # registers have no runtime index
    halves = front not in ("none", "residual")
    own = {"none": (), "residual": (ROW_OUTPUTS, ROW_SUMS)}
    source = prelude("pack", "rows", extra=(*own.get(front, (ROW_OUTPUTS, GATED)), ROW_BLOCKS))
    stage = stage_macro(q) if front == "none" else front_macro(q)
    M, MP = T.dynamic("m"), T.dynamic("mp")

    load_lists, gather = gather_macros(q, ahead)
    emit = emit_macro(q, M, MP)

    @T.macro
    def quantize(X, R, P, G, S, Q4, Q8, XS, eps, row):
        """A row, from its buffers on."""
        Rs = T.alloc_shared((padded,), dtype)
        Ss = T.alloc_shared((warps + blocks,), "float32")
        x = T.alloc_local((4,), "uint32")
        v = T.alloc_local((4,), "float32")
        f = T.alloc_local((6,), "float32")
        total = T.alloc_local((1,), "float32")
        order = T.alloc_local((4 * turns if ahead and permuted else 4,), "int32")
        gains = T.alloc_local((4 * turns if ahead and gain else 4,), "float32")
        tx = T.get_thread_binding()
        warp = tx // 32
        lane = tx % 32
        if pdl:
            T.pdl_trigger()
            T.pdl_sync()
        if ahead:
            for e in T.unroll(turns):
                load_lists(P, G, order, gains, e, e, tx)
        total[0] = 0.0
        stage(X, R, Rs, x, total, row, tx)
        total[0] = call(f"cta_sum<{warps}>", total[0], T.access_ptr(Ss[0], "rw", warps), returns="float32")
        f[1] = T.rsqrt(total[0] / T.float32(k) + eps)
        for e in turns_of(turns):
            block = e * warps + warp
            if block < blocks:
                gather(v, Rs, P, G, order, gains, e, tx)
                f[0] = call("warp_largest", T.access_ptr(v, "r"), returns="float32")
                if uniform:
                    if lane == 0:
                        Ss[warps + block] = f[0]
                else:
                    emit(Q4, Q8, XS, S, Ss, v, f, row, block, lane)
        if uniform:
            T.sync_threads()
            for e in turns_of(turns):
                block = e * warps + warp
                if block < blocks:
                    f[0] = call(
                        "largest_of", T.access_ptr(Ss[warps], "r", blocks), T.if_then_else(block < blocks4, 0, blocks4),
                        T.if_then_else(block < blocks4, blocks4, blocks), returns="float32",
                    )  # fmt: skip
                    gather(v, Rs, P, G, order, gains, e, tx)
                    emit(Q4, Q8, XS, S, Ss, v, f, row, block, lane)

    if front == "residual":

        @T.prim_func
        def main(
            X: T.Tensor((M, columns), dtype),
            R: T.Tensor((M, columns), dtype),
            P: T.Tensor((padded if permuted else 1,), "int32"),
            G: T.Tensor((padded if gain else 1,), "float32"),
            S: T.Tensor((blocks if static else 1,), "float32"),
            Q4: T.Tensor((M, width4) if width4 else (1, 1), "uint8"),
            Q8: T.Tensor((M, width8) if width8 else (1, 1), "int8"),
            XS: T.Tensor((blocks, MP), "float32"),
            eps: T.float32,
        ):
            with T.Kernel(M, threads=threads, prelude=source) as row:
                quantize(X, R, P, G, S, Q4, Q8, XS, eps, row)

        return main

    @T.prim_func
    def main(
        X: T.Tensor((M, columns * 2 if halves else columns), dtype),
        P: T.Tensor((padded if permuted else 1,), "int32"),
        G: T.Tensor((padded if gain else 1,), "float32"),
        S: T.Tensor((blocks if static else 1,), "float32"),
        Q4: T.Tensor((M, width4) if width4 else (1, 1), "uint8"),
        Q8: T.Tensor((M, width8) if width8 else (1, 1), "int8"),
        XS: T.Tensor((blocks, MP), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(M, threads=threads, prelude=source) as row:
            quantize(X, None, P, G, S, Q4, Q8, XS, eps, row)

    return main
