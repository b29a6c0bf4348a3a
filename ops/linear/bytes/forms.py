"""How scales enter a product on wgmma: two forms of one step, 64 k of a row block. A program asks for one, `form_of`.

`integer`: int8 operands hold the integer scales of their groups, and all products of a tile add up in int32; while two
wgmma run on one set of operand registers, the other set is converted.

`post`: e4m3 operands are bare codes. The tensor core's own sums keep about 14 bits, so they run over one group of k
only: they start at zero, and while the next 64 k are converted the tensor core finishes them; then they are multiplied
with the factors of the group's rows and added to the float32 sums of the tile. One group of wgmma is in flight for each
warpgroup; the other warpgroups' groups fill the tensor core meanwhile. A tile of more than 128 tokens is multiplied in
two pieces whose sums of a group take turns in the same registers: it converts half as often. Where each token has a
scale for a group, too, the stage has it, and factors are those of a row and a token: the last group of a stage joins
the sums when the first one of the next is multiplied, and only then the stage goes back.
"""

from terrazzo.ops.linear.bytes import direct, fp8_problem
from terrazzo.ops.linear.bytes.operand import operand_macros
from terrazzo.ops.linear.bytes.problem import UNIT_K, Gemm
from terrazzo.ops.linear.bytes.stages import Form
from terrazzo.ops.tiles.calls import fma, lds64, wgmma
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Macro


def form_of(gemm: Gemm, *, block_tokens: int, row_blocks: int, pieces: int = 1, experts: int = 0) -> Form:
    """The form of a problem's dequantization."""
    if not gemm.converts:
        own = dict(block_tokens=block_tokens, row_blocks=row_blocks, pieces=pieces)
        return direct.form_of(gemm, **own, anywhere=experts > 0)
    if gemm.float_sums:
        own = dict(block_tokens=block_tokens, row_blocks=row_blocks, pieces=pieces)
        return post_form(gemm, **own, anywhere=experts > 0)
    return integer_form(gemm, block_tokens=block_tokens)


def product_macro(kinds: tuple[str, str], tokens: int) -> Macro:
    """Macro `multiply`: wgmma of a set of operands with `tokens` tokens, as one group."""
    sums_of = tokens // 2

    @T.macro
    def multiply(a, sums, at, x, h, first, count, before):
        """k32 steps first .. first + count - 1 of half h, on the sums at `at`; these start anew if `before` is 0."""
        T.warpgroup_fence_operand(a, h * 8, 8)
        T.warpgroup_fence_operand(sums, at, sums_of)
        T.warpgroup_arrive()
        for e in T.unroll(count):
            wgmma(tokens, kinds, sums, at, a, h * 8 + (first + e) * 4, x, (h * 2 + first + e) * 2, before + e > 0)
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(sums, at, sums_of)

    return multiply


def integer_form(gemm: Gemm, *, block_tokens: int) -> Form:
    """`form_of` on int8 activations."""
    operand = operand_macros(gemm)
    multiply = product_macro(("uint8" if gemm.unsigned else "int8", "int8"), block_tokens)

    @T.macro
    def step(io, x, place, r, h, free):
        operand.convert(io.w, h * 4, io.u, io.a, h * 8, io.codes, h)
        multiply(io.a, io.acc, r * (block_tokens // 2), x, h, 0, 2, 1)
        T.warpgroup_wait(1)
        if r == 0 and h == 0:  # the wgmmas on the stage before are complete
            place.release(0, free)

    return Form("int32", step, operand.registers)


def post_form(
    gemm: fp8_problem.Gemm, *, block_tokens: int, row_blocks: int, pieces: int, anywhere: bool = False
) -> Form:
    """`form_of` on e4m3 activations; `pieces`: into which a tile's tokens are parted; `anywhere` as of `direct`."""
    groups, nacc, rb = gemm.groups, block_tokens // 2, row_blocks
    at_once = block_tokens // pieces  # tokens of a product
    nsum = at_once // 2
    splits = max(groups // 2, 1)  # parts of 64 k with sums of their own
    operand = fp8_problem.operand_macros(gemm)
    multiply = product_macro(("e4m3", "e4m3"), at_once)

    def of_piece(x, piece):
        """The tile of X, from a piece of its tokens on."""
        return x + T.uint64(piece * at_once * UNIT_K // 16)

    @T.macro
    def add_groups(io, first, piece, stage, group, ahead):
        """The sums of a group of k, times the factors of rows and tokens. `ahead`: maybe of no stage, whose bytes are
        any: times sums of nothing they must not be NaN."""
        for j in T.unroll(nsum // 4):
            at = piece * at_once + j * 8 + io.lane % 4 * 2
            if anywhere:
                for i in T.unroll(2):
                    io.words[i] = io.Ts[stage, io.past[0] + at + i]
            else:
                lds64(io.words, io.Ts[stage, at])
            for i in T.unroll(2):
                io.powers[i] = fp8_problem.power_of(io.words[i], group)
                if ahead:
                    io.powers[i] = T.min(io.powers[i], T.float32(2.0**127))
            for i in T.unroll(4):
                to = first + j * 4 + i
                io.acc[to] = fma(io.part[j * 4 + i], io.f[i // 2] * io.powers[i % 2], io.acc[to])

    @T.macro
    def settle(io, r, piece, stage, group, ahead=False):
        """The sums of a group of k, times the factors of the rows, join those of a piece of the tokens of row block
        r. Of tokens with scales of groups: `group` of this stage."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(io.part, num_regs=nsum)
        first = r * nacc + piece * nsum
        if gemm.grouped_tokens:
            add_groups(io, first, piece, stage, group, ahead)
        else:
            for i in T.unroll(nsum):
                io.acc[first + i] = fma(io.part[i], io.f[i % 4 // 2], io.acc[first + i])
        T.warpgroup_fence_operand(io.acc, first, nsum)  # before the next wgmma: moved behind it, ptxas serializes all

    def holder(io, place, r, h, e):
        """The stage of the group before group e of half h of row block r."""
        stage, stages = place.stage(0), io.Ts.shape[0]
        return T.if_then_else(r + h + e == 0, (stage + (stages - 1)) % stages, stage)

    @T.macro
    def start(io):
        """The first group of k is preceded by one of nothing."""
        for i in T.unroll(nsum):
            io.part[i] = 0
        for i in T.unroll(2):
            io.f[i] = 0

    @T.macro
    def step(io, x, place, r, h, free):
        """At each beginning of a group of k, the group before joins the sums."""
        T.warpgroup_wait(1)  # the set of operands that is written next is free
        operand.convert(io.w, h * 4, io.u, io.a, h * 8, io.codes, h)
        for e in T.unroll(splits):
            if groups > 1 or h == 0:
                settle(
                    io, (r + rb - 1 + T.min(h + e, 1)) % rb, pieces - 1,
                    holder(io, place, r, h, e) if gemm.grouped_tokens else None, (h * 2 + e + 3) % 4, r + h + e == 0,
                )  # fmt: skip
                operand.factors(io.f, 0, io.u[(h * 2 + e) * groups // 4])
                if r == 0 and h == 0 and e == 0:
                    place.release(0, free)
            multiply(io.a, io.part, 0, x, h, e, 2 // splits, h * 2 if groups == 1 else 0)
            if groups > 1:
                for piece in T.unroll(pieces - 1):
                    settle(io, r, piece, place.stage(0) if gemm.grouped_tokens else None, h * 2 + e)
                    multiply(io.a, io.part, 0, of_piece(x, piece + 1), h, e, 2 // splits, 0)
        if groups == 1 and h == 1:
            for piece in T.unroll(pieces - 1):
                settle(io, r, piece, None, 0)
                for half in T.unroll(2):
                    multiply(io.a, io.part, 0, of_piece(x, piece + 1), half, 0, 2, half * 2)

    @T.macro
    def settle_last(io, stage):
        """The last group, of this stage, joins the sums of the tile."""
        settle(io, rb - 1, pieces - 1, stage, 3)

    return Form("float32", step, operand.registers, nsum, pieces, start, settle_last)
