"""The main loop of the program for scales of each block (stream_k.py): four forms of it, by the registers there are.

`whole`: the wgmmas that run while a warpgroup scales are those of the others. `kept`: the sums of a block are copied as
f32 and scaled behind the wgmmas of the next one. `halves`: a block is multiplied with half of the tokens at a time.
`blocks`: two sets of s32 sums alternate.
"""

from dataclasses import dataclass

from terrazzo.ops.linear.bytes.stages import Consumer
from terrazzo.ops.linear.mixed.problem import BLOCK_WORDS, SCALES, UNIT_K, row_scales, scaled
from terrazzo.ops.tiles.calls import lds32, lds64, lds128, syncwarp, turn_pass, turn_wait, wgmma
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.scheduler import Ring
from terrazzo.ops.tiles.types import Macro
from terrazzo.schedules import forms
from terrazzo.schedules.stream_k import StreamK


@dataclass(frozen=True)
class Held:
    """`width`, tokens of a wgmma; `parts`, s32 sums of a thread; `copies`, of them as f32; `operands`."""

    width: int
    parts: int
    copies: int
    operands: int


def registers_of(schedule: StreamK) -> Held:
    """What a thread holds."""
    bm, form = schedule.block_tokens, forms.held(schedule)
    width = bm // 2 if form == "halves" else bm
    return Held(
        width=width, parts=bm if form == "blocks" else width // 2, copies=bm // 2 if form in ("blocks", "kept") else 1,
        operands=32 if form == "blocks" else 16,
    )  # fmt: skip


def product_macros(schedule: StreamK) -> tuple[Macro, Macro, Macro, Macro, Macro]:
    """Macros of a block's products and sums: `multiply` and `multiply_in_turn`, `done`, `keep`, `scale`."""
    wgs, turns, width = schedule.warpgroups, schedule.turns, registers_of(schedule).width

    @T.macro
    def multiply(a, part, x, set, at, first):
        """A block's products with `width` tokens from `first` on, operands in a[set ..], sums in part[at ..]."""
        T.warpgroup_fence_operand(a, set, 16)
        T.warpgroup_fence_operand(part, at, width // 2)
        T.warpgroup_arrive()
        for e in T.unroll(4):
            offset = first * (UNIT_K // 16) + e * 2
            wgmma(width, ("int8", "int8"), part, at, a, set + e * 4, x, offset, e > 0)  # the first starts the sums
        T.warpgroup_commit_batch()

    @T.macro
    def multiply_in_turn(a, part, x, first, wg):
        """The same from a[0 ..] into part[0 ..], not before the warpgroup ahead has issued its own."""
        if turns:
            turn_wait(wg)
        multiply(a, part, x, 0, 0, first)
        if turns:
            turn_pass(T.if_then_else(wg == wgs - 1, 0, wg + 1))

    @T.macro
    def done(part):
        """The only set of sums is complete."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(part, 0, width // 2)

    @T.macro
    def keep(part, sums, at):
        """Sums part[at ..], as float32, in registers of their own: ptxas waits for every wgmma before it reads those of
        another turn of a loop."""
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(part, at, width // 2)
        for i in T.unroll(width // 2):
            sums[i] = T.cast(part[at + i], "float32")
        T.warpgroup_fence_operand(sums, num_regs=width // 2)

    @T.macro
    def scale(acc, sums, Fs, f, s, stage, lane, first):
        """Sums of a block and `width` tokens from `first` on, s32 or already f32, join the tile's sums."""
        for j in T.unroll(width // 8):
            lds64(f, Fs[stage, first + j * 8 + lane % 4 * 2])
            for i in T.unroll(4):
                acc[first // 2 + j * 4 + i] = scaled(acc[first // 2 + j * 4 + i], sums[j * 4 + i], f[i % 2], s[i // 2])

    return multiply, multiply_in_turn, done, keep, scale


def block_macros(rings: Ring, convert_words: Macro) -> tuple[Macro, Macro, Macro, Macro]:
    """Macros that begin and end a block: `fetch`, `convert`, `begin` (both) and `end`."""

    @T.macro
    def load_unit(Ws, w, u, stage, block, wt):
        """A thread's words of both 64 channels of a row block, and the scales of its rows g and g + 8. Addresses are
        made anew: a thread has no registers for `steps.find_units`."""
        for h in T.unroll(2):
            lds128(w[h * 4], Ws[stage, block, h * BLOCK_WORDS + wt * 4])
        u[0] = lds32(Ws[stage, block, SCALES + wt // 4])

    @T.macro
    def fetch(Ws, w, u, ring, local, wg, wt, old):
        """Words of the next block; the stage before the one before goes back where the tile has had an `old` one."""
        syncwarp()  # the other lanes' reads of its scales come before the arrive, too
        if T.And(wt % 32 == 0, old):
            rings.give_back(ring, local.late[0])
        rings.wait(ring)
        load_unit(Ws, w, u, ring.stage[0], wg, wt)

    @T.macro
    def convert(w, a, codes, set):
        """The words of a block into a[set .. set + 15]: A fragments of four k32."""
        for h in T.unroll(2):
            convert_words(w, h * 4, a, set + h * 8, codes)

    @T.macro
    def begin(Ws, w, u, a, codes, ring, local, wg, wt, set, old):
        """Operands of the next block."""
        fetch(Ws, w, u, ring, local, wg, wt, old)
        convert(w, a, codes, set)

    @T.macro
    def end(local, ring):
        """The step of a block is done: the ring goes on."""
        local.late[0] = ring.before[0]
        rings.advance(ring)

    return fetch, convert, begin, end


def loop_macro(schedule: StreamK, rings: Ring, steps: Consumer, convert_words: Macro) -> Macro:
    """Macro `loop(io, c, ring, wg, wt, lane)`: the blocks of segment c, whose sums join io.acc.

    convert_words: of `convert_macros`. `io` holds Ws, Fs, w, u, a, codes, acc, part, sums, f, s, at and local.
    """
    form, width, nacc = forms.held(schedule), registers_of(schedule).width, schedule.block_tokens // 2
    fetch, convert, begin, end = block_macros(rings, convert_words)
    multiply, multiply_in_turn, done, keep, scale = product_macros(schedule)

    @T.macro
    def by_blocks(io, c, ring, wg, wt, lane):
        """One set of sums, as they are or kept."""
        count = c.k1[0] - c.k0[0]
        for kb in T.serial(count):
            fetch(io.Ws, io.w, io.u, ring, io.local, wg, wt, kb > 1)
            if form == "kept":
                keep(io.part, io.sums, 0)
                convert(io.w, io.a, io.codes, 0)
                multiply_in_turn(io.a, io.part, steps.tokens(io.at, ring.stage[0]), 0, wg)
                scale(io.acc, io.sums, io.Fs, io.f, io.s, ring.before[0], lane, 0)
            else:
                done(io.part)
                convert(io.w, io.a, io.codes, 0)
                scale(io.acc, io.part, io.Fs, io.f, io.s, ring.before[0], lane, 0)
                multiply_in_turn(io.a, io.part, steps.tokens(io.at, ring.stage[0]), 0, wg)
            row_scales(io.s, io.u[0])
            end(io.local, ring)
        done(io.part)
        scale(io.acc, io.part, io.Fs, io.f, io.s, ring.before[0], lane, 0)

    @T.macro
    def by_halves(io, c, ring, wg, wt, lane):
        """One set of sums, of half of the tokens."""
        count = c.k1[0] - c.k0[0]
        for kb in T.serial(count):
            begin(io.Ws, io.w, io.u, io.a, io.codes, ring, io.local, wg, wt, 0, kb > 1)
            row_scales(io.s, io.u[0])
            for q in T.unroll(2):
                multiply_in_turn(io.a, io.part, steps.tokens(io.at, ring.stage[0]), q * width, wg)
                done(io.part)
                scale(io.acc, io.part, io.Fs, io.f, io.s, ring.stage[0], lane, q * width)
            end(io.local, ring)

    @T.macro
    def by_pairs(io, c, ring, wg, wt, lane):
        """Two sets of sums. Their wgmmas must not run across the end of a loop's body: ptxas would serialize all."""
        count = c.k1[0] - c.k0[0]
        if count % 2 == 1:
            begin(io.Ws, io.w, io.u, io.a, io.codes, ring, io.local, wg, wt, 16, False)
            multiply(io.a, io.part, steps.tokens(io.at, ring.stage[0]), 16, nacc, 0)
            row_scales(io.s, io.u[0])
            end(io.local, ring)
            keep(io.part, io.sums, nacc)
        for kb in T.serial(count // 2):
            begin(io.Ws, io.w, io.u, io.a, io.codes, ring, io.local, wg, wt, 0, kb * 2 + count % 2 > 1)
            multiply(io.a, io.part, steps.tokens(io.at, ring.stage[0]), 0, 0, 0)
            scale(io.acc, io.sums, io.Fs, io.f, io.s, ring.before[0], lane, 0)
            row_scales(io.s, io.u[0])
            end(io.local, ring)
            begin(io.Ws, io.w, io.u, io.a, io.codes, ring, io.local, wg, wt, 16, kb + count % 2 > 0)
            multiply(io.a, io.part, steps.tokens(io.at, ring.stage[0]), 16, nacc, 0)
            T.warpgroup_wait(1)
            T.warpgroup_fence_operand(io.part, 0, nacc)
            scale(io.acc, io.part, io.Fs, io.f, io.s, ring.before[0], lane, 0)
            row_scales(io.s, io.u[0])
            end(io.local, ring)
            keep(io.part, io.sums, nacc)
        scale(io.acc, io.sums, io.Fs, io.f, io.s, ring.before[0], lane, 0)

    return {"whole": by_blocks, "kept": by_blocks, "halves": by_halves, "blocks": by_pairs}[form]
