"""Products whose operands both come from shared memory (W8A8): nothing is converted, codes of the weight are operands.

A unit of a weight is a tile of 64 rows by 128 k as a wgmma descriptor reads it (`Fragment.wgmma_shared`). How scales
enter is one of `NUMERICS`:

`s8`: int32 sums of a tile, scaled once. `s8_zeros`: the same of tokens with zero points, which times the sum of a row's
codes are taken off its sums, in int32.

`fast`: e4m3, float32 sums of a tile in the tensor cores, which keep 13 bits behind the point while they add.

`promoted`: each 128 k of e4m3 are summed on their own, and join float32 sums outside of the tensor cores.

`block`: the same, times the scale of a token's 128 k and that of 16 rows' 128 k.
"""

from dataclasses import dataclass

from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.bytes import problem
from terrazzo.ops.linear.bytes.problem import UNIT_K
from terrazzo.ops.linear.bytes.stages import Consumer, Form
from terrazzo.ops.tiles.calls import bulk, fma, lds64, matrix, uniform
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Call, Expr, Macro

NUMERICS = ("s8", "s8_zeros", "fast", "promoted", "block")
ROW_GROUP = 16
"""Rows of a weight that share a scale of each 128 k, with `block`: those of a warp."""
GROUPS = 64 // ROW_GROUP
MORE = 4
"""Scales of tokens in a stage beyond those of a tile, where this may begin at any token: copies are of 16 bytes."""
_TILE = 64 * UNIT_K  # bytes of a unit


@dataclass(frozen=True)
class Gemm(problem.Gemm):
    """y[M, n] = x[M, k] w[n, k]^T as `problem.Gemm`, both of bytes; `dequantization` is one of `NUMERICS`."""

    converts = False

    def __post_init__(self):
        if self.dequantization not in NUMERICS:
            raise ArgumentError("dequantization", self.dequantization, f"must be one of {NUMERICS}", "use 's8'")
        if self.group != UNIT_K:
            raise ArgumentError("group", self.group, f"must be {UNIT_K}: units have no parameters", "use it")
        if self.float_sums and self.out_dtype == "int32":
            constraint = "must be float16 or bfloat16: sums are floats"
            raise ArgumentError("out_dtype", self.out_dtype, constraint, "cast y")
        problem.Gemm(self.n, self.k, self.group, self.out_dtype, "xor", self.bias)  # the checks that all share

    @property
    def float_sums(self) -> bool:
        return not self.dequantization.startswith("s8")

    @property
    def zeros(self) -> bool:
        return self.dequantization == "s8_zeros"

    @property
    def blocks(self) -> bool:
        return self.dequantization == "block"

    @property
    def row_values(self) -> bool:
        return self.zeros

    @property
    def converter(self) -> Converter:
        return get_converter("e4m3_e4m3" if self.float_sums else "s8_s8")

    @property
    def channels(self) -> int:
        """float32 of a row: its scale and, of int8, the sum of its codes, an integer that float32 holds exactly."""
        return 1 if self.float_sums else 2

    @property
    def unit_words(self) -> int:
        return _TILE // 4

    @property
    def schedule_form(self) -> str:
        return {"s8": "s8 direct", "s8_zeros": "s8 direct"}.get(self.dequantization, f"e4m3 {self.dequantization}")


def consumer_macros(*, block_tokens: int, cta_blocks: int) -> Consumer:
    """Of units that are operands."""

    def places() -> Buffers:
        return Buffers(**dict.fromkeys(("x", "all", "w"), (1, "uint64")))

    @T.macro
    def find(to, desc, Bs, stage):
        T.initialize_wgmma_descriptor(desc, T.access_ptr(Bs[stage, 0, 0], "r"), 1, 1, 64)
        to[0] = matrix(desc)

    @T.macro
    def find_units(at, block):
        """A warpgroup's row blocks, from this one of the tile on."""
        at.w[0] = at.all[0] + T.cast(T.cast(uniform(block), "uint32") * T.uint32(_TILE // 16), "uint64")

    def tokens(at: Buffers, stage: Expr) -> Expr:
        return at.x[0] + T.cast(T.cast(stage, "uint32") * T.uint32(block_tokens * UNIT_K // 16), "uint64")

    def rows(at: Buffers, stage: Expr, r: int) -> Expr:
        first = T.cast(stage, "uint32") * T.uint32(cta_blocks * _TILE // 16) + T.uint32(r * (_TILE // 16))
        return at.w[0] + T.cast(first, "uint64")

    return Consumer(places, find, find_units, rows, tokens)


def scale_macros(
    *, block_tokens: int, cta_blocks: int, row_blocks: Expr, unit: Call,
    anywhere: bool = False,
) -> tuple[Macro, Macro]:  # fmt: skip
    """Macros `fill_tokens(io, c, kb)` and `fill_rows(io, c, kb)`, by one thread each: the scales of a stage, to Ts
    [stages, tokens] and Ss [stages, 4 * row blocks of a tile]; arguments and `io` as of `stages.fill_macros`.
    `anywhere`: whether a tile may begin at any token, not only at multiples of 4; the copy then begins at the multiple
    before, and has four more."""

    def begin(c):
        return c.first[0] // 4 * 4 if anywhere else c.first[0]

    @T.macro
    def fill_tokens(io, c, kb):
        count = T.min(block_tokens + MORE if anywhere else block_tokens, io.XS.shape[1] - begin(c))
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * 4)
        bulk(io.Ts[io.ring.stage[0], 0], io.XS[kb, begin(c)], count * 4, io.full[io.ring.stage[0]])

    @T.macro
    def fill_rows(io, c, kb):
        first = c.rows[0] * cta_blocks
        count = T.max(T.min(cta_blocks, row_blocks - first), 0) * GROUPS
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * 4)
        if count > 0:
            bulk(io.Ss[io.ring.stage[0], 0], io.S[unit(c, kb), first * GROUPS], count * 4, io.full[io.ring.stage[0]])

    return fill_tokens, fill_rows


def form_of(gemm: Gemm, *, block_tokens: int, row_blocks: int, pieces: int, anywhere: bool = False) -> Form:
    """As `forms.form_of`, `anywhere` as of `scale_macros`."""
    nacc, dtype = block_tokens // 2, "float32" if gemm.float_sums else "int32"
    settles = gemm.dequantization in ("promoted", "block")
    at_once = block_tokens // pieces if settles else block_tokens
    nsum, kind = at_once // 2, "e4m3" if gemm.float_sums else "int8"
    shape = f"m64n{at_once}k32"

    @T.macro
    def multiply(sums, at, w, x, anew):
        """128 k, as one group, on the sums at `at`; these start anew if `anew` is 1."""
        T.warpgroup_fence_operand(sums, at, nsum)
        T.warpgroup_arrive()
        for e in T.unroll(UNIT_K // 32):
            T.ptx_wgmma_ss(
                dtype, shape, True, True, kind, kind, dtype, getattr(w, "data", w), e * 2, getattr(x, "data", x), e * 2,
                sums.data, at, T.bool(e + 1 - anew > 0), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(sums, at, nsum)

    @T.macro
    def add_on(io, w, x, place, r, free):
        """Sums of a tile: the products of the stage before are complete while these run."""
        multiply(io.acc, r * nacc, w, x, 0)
        if r == 0:
            T.warpgroup_wait(1)
            place.release(0, free)

    def of_piece(x, piece):
        return x + T.uint64(piece * at_once * UNIT_K // 16)

    @T.macro
    def settle(io, place, r, piece):
        """Sums of 128 k join those of row block r and a piece of the tokens."""
        first = r * nacc + piece * nsum
        if gemm.blocks:
            io.f[2] = io.Ss[place.stage(0), (io.wg * row_blocks + r) * 4 + io.wt // 32]
            for j in T.unroll(nsum // 4):
                if anywhere:
                    for i in T.unroll(2):
                        io.f[i] = io.Ts[place.stage(0), io.past[0] + (piece * at_once + j * 8 + io.lane % 4 * 2 + i)]
                else:
                    lds64(io.f, io.Ts[place.stage(0), piece * at_once + j * 8 + io.lane % 4 * 2])
                for i in T.unroll(2):
                    io.f[i] = io.f[i] * io.f[2]
                for i in T.unroll(4):
                    at = first + j * 4 + i
                    io.acc[at] = fma(io.part[j * 4 + i], io.f[i % 2], io.acc[at])
        else:
            for i in T.unroll(nsum):
                io.acc[first + i] = io.acc[first + i] + io.part[i]
        T.warpgroup_fence_operand(io.acc, first, nsum)

    @T.macro
    def sum_up(io, w, x, place, r, free):
        for piece in T.unroll(pieces):
            multiply(io.part, 0, w, of_piece(x, piece), 1)
            T.warpgroup_wait(0)
            T.warpgroup_fence_operand(io.part, num_regs=nsum)
            if not gemm.blocks:  # else the stage has the tokens' scales
                if r * pieces + piece == row_blocks * pieces - 1:
                    place.give_back(0, io.lane == 0)
            settle(io, place, r, piece)
            if gemm.blocks:
                if r * pieces + piece == row_blocks * pieces - 1:
                    place.give_back(0, io.lane == 0)

    return Form(dtype, sum_up, group_sums=nsum, pieces=pieces, settles=True) if settles else Form(dtype, add_on)
