"""The warpgroup of converters of prefill_shared: stages of packed tokens become operands in shared memory.

Keys and values lie as [token, dim], in tiles of 128-byte rows as wgmma reads them.
"""

from typing import NamedTuple

from terrazzo.ops.attention.device.calls import at8, at_page
from terrazzo.ops.attention.device.tile_macros import each, less, smaller
from terrazzo.ops.attention.prefilling.prefill_operands import Operands
from terrazzo.ops.attention.prefilling.prefill_stages import STAGE, Prefill, Stream
from terrazzo.ops.tiles.calls import bulk, fence, stmatrix4, stmatrix4_trans, syncwarp, wg_sync
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Buffers, Call, Expr, Macro


def piece(lane: Expr, row: Expr, chunk: Expr) -> Expr:
    """Byte, in a tile of 128-byte rows as wgmma reads it, of the row that a lane stores of a 16 x 16 atom whose first
    row and 16-byte chunk are given: lanes 8i .. 8i + 7 name the rows of register i."""
    at = row + lane // 8 % 2 * 8 + lane % 8
    return at * 128 + T.bitwise_xor(chunk + lane // 16, at % 8) * 16


def make_store_macro() -> Macro:
    """Macro `store_atom`."""

    @T.macro
    def store_atom(space, byte, a, first):
        """Four registers of an atom to shared memory."""
        stmatrix4(at8(space[0], byte, "w"), a[first])

    return store_atom


class Shared(NamedTuple):
    """Where things begin in shared memory: bytes of keys and of values; words of static scales of keys, and of the
    ring; words in all."""

    of: Prefill
    keys_at: int
    values_at: int
    table: int
    ring_at: int
    total: int

    @property
    def wgs(self) -> int:
        """Warpgroups that multiply."""
        return self.of.warps // 4

    @property
    def stage_bytes(self) -> int:
        """Of keys, and of values."""
        return STAGE * self.of.head_dim * 2


def apart(w: Buffers, fresh: bool) -> Expr:
    """Stages that pass by the ring; they are the first."""
    return w.nc[0] if fresh else 0


def make_buffer_macros(buffers: int) -> tuple[Call, Macro]:
    """`following`, the number of the next of the operands' buffers, and macro `advance` to it."""

    def following(w):
        """The next buffer of operands."""
        return T.if_then_else(w.to[0] == buffers - 1, 0, w.to[0] + 1)

    @T.macro
    def advance(w):
        """To the next buffer of operands."""
        w.to[0] = following(w)
        if w.to[0] == 0:
            w.turn[0] = w.turn[0] ^ 1

    return following, advance


class Bars(NamedTuple):
    """Barriers of the ring's stages and of the operands' buffers."""

    full: Buffer
    keys: Buffer
    values: Buffer
    keys_free: Buffer
    values_free: Buffer


def make_converter_macro(f: Shared, tile: Operands, spare: Operands | None, stream: Stream) -> Macro:
    """Macro `produce`: what the warpgroup of converters does; warp r has the stage's tile r."""
    store_atom = make_store_macro()
    p, g, plain, fresh, stages = f.of, f.of.g, f.of.g.plain, f.of.fresh, f.of.stages
    slices, wgs, ct, advance = p.slices, f.wgs, f.of.warps * 32, make_buffer_macros(p.buffers)[1]
    stage_bytes, keys_at, values_at, table, ring_at = f.stage_bytes, f.keys_at, f.values_at, f.table, f.ring_at

    def piece_across(lane, token, chunk):
        """The same of a 16 x 16 atom [dim, token] that is stored as [token, dim], each matrix transposed."""
        at = token + lane // 16 * 8 + lane % 8
        return chunk // 8 * (STAGE * 128) + at * 128 + T.bitwise_xor(chunk % 8 + lane // 8 % 2, at % 8) * 16

    def word(of, w):
        """Address of the warp's tile of the stage in the ring."""
        at = g.tile_at(w.warp) if of is tile else w.warp * plain.tile_words
        return T.access_ptr(w.space[ring_at + w.slot[0] * g.stage_words + at], "r", 1)

    def channels_of(of, w):
        """Address of the channel parameters of the warp's tile."""
        at = ring_at + w.slot[0] * g.stage_words + (g.channel_at(w.warp) if of is tile else 0)
        return T.access_ptr(w.space[table if of.layout.k.static else at], "r", 1)

    @T.macro
    def convert_keys(of, space, st, w, lane):
        of.key_params(st, word(of, w), lane)
        for j in each(of.k_loads):
            of.keys(st, word(of, w), channels_of(of, w), j, lane)
            for i in each(of.k_atoms):
                at = j * of.k_atoms + i
                store_atom(
                    space, keys_at + w.to[0] * stage_bytes + at // 4 * (STAGE * 128)
                    + piece(lane, w.warp * 16, at % 4 * 2), st.a, i * 4,
                )  # fmt: skip

    @T.macro
    def convert_values(of, space, st, w, lane):
        of.value_params(st, word(of, w), lane)
        if w.edge[0] > 0:
            of.guard(st, w.token[0] + w.warp * 16, w.end[0], lane)
        for j in each(of.v_loads):
            of.values(st, word(of, w), (j * 32 + lane) * of.v_words, j, w.edge[0])
            for i in each(of.v_atoms):
                byte = values_at + w.to[0] * stage_bytes + piece_across(lane, w.warp * 16, (j * of.v_atoms + i) * 2)
                stmatrix4_trans(at8(space[0], byte, "w"), *(st.a[i * 4 + r] for r in range(4)))

    @T.macro
    def of_source(convert, space, st, w, i, lane):
        """Operands of stage i, whose tiles are packed or not."""
        if spare is not None:
            if less(i, w.nb[0] + w.nc[0]):
                convert(spare, space, st, w, lane)
            else:
                convert(tile, space, st, w, lane)
        else:
            convert(tile, space, st, w, lane)

    @T.macro
    def hand_over(ready, w, lane):
        """The warp's part of an operand is written; wgmma reads it through the asynchronous proxy."""
        T.fence_proxy_async()
        syncwarp()
        if lane == 0:
            T.barrier_arrive(ready[w.to[0]])

    @T.macro
    def convert(space, bars, st, w, i, lane):
        """Stage i, from the ring to the operands."""
        T.barrier_wait(bars.full[w.slot[0]], w.parity[0])
        T.barrier_wait(bars.keys_free[w.to[0]], w.turn[0] ^ 1)
        fence()
        stream.locate(w, i)
        w.edge[0] = T.cast(less(w.end[0], w.token[0] + STAGE), "int32")
        of_source(convert_keys, space, st, w, i, lane)
        hand_over(bars.keys, w, lane)
        T.barrier_wait(bars.values_free[w.to[0]], w.turn[0] ^ 1)
        fence()
        of_source(convert_values, space, st, w, i, lane)
        hand_over(bars.values, w, lane)

    @T.macro
    def bring(NEW, space, bars, w, i, lane):
        """Stage i of new tokens, as it is, to the operands; every warp waits, so that none arrives twice."""
        for part, ready, free in ((0, bars.keys, bars.keys_free), (1, bars.values, bars.values_free)):
            T.barrier_wait(free[w.to[0]], w.turn[0] ^ 1)
            if T.And(w.warp == 0, lane == 0):
                T.mbarrier_expect_tx(ready[w.to[0]], stage_bytes)
                bulk(
                    space[(values_at if part else keys_at) // 4 + w.to[0] * (stage_bytes // 4)],
                    at_page(NEW, stream.new_page(w, i), w.h * NEW.shape[2] + part * (stage_bytes // 4)),
                    stage_bytes, ready[w.to[0]],
                )  # fmt: skip
            if lane == 0:
                T.barrier_arrive(ready[w.to[0]])

    @T.macro
    def produce(x, space, bars, st, w, tx, lane):
        """All stages, from memory to the operands, by the warpgroup of converters."""
        if less(w.row0[0], w.rows[0]):
            if tx == ct:
                for i in T.serial(smaller(stages, w.count[0] - apart(w, fresh))):
                    stream.fetch(x, space, w, apart(w, fresh) + i, ring_at + i * g.stage_words, (bars.full, w.slot))
                    T.barrier_arrive(bars.full[w.slot[0]])
                    w.slot[0] = w.slot[0] + 1
                w.slot[0] = 0
            if tile.layout.k.static:
                tile.share_static(x.SK, space, table, w.h, tx - ct, 128)
                wg_sync(wgs)
            if tile.layout.v.static:
                tile.load_static(x.SV, st.sv, 0, slices, w.h, lane)
            if fresh:  # a loop of its own: beside a branch, ptxas keeps state out of uniform registers
                for i in T.serial(apart(w, fresh)):
                    bring(x.NEW, space, bars, w, i, lane)
                    advance(w)
            for i in T.serial(w.count[0] - apart(w, fresh)):
                convert(space, bars, st, w, apart(w, fresh) + i, lane)
                wg_sync(wgs)  # the slot has been read
                if tx == ct:
                    if less(i + stages, w.count[0] - apart(w, fresh)):
                        at = ring_at + w.slot[0] * g.stage_words
                        stream.fetch(x, space, w, apart(w, fresh) + i + stages, at, (bars.full, w.slot))
                        T.barrier_arrive(bars.full[w.slot[0]])
                w.slot[0] = w.slot[0] + 1
                if w.slot[0] == stages:
                    w.slot[0] = 0
                    w.parity[0] = w.parity[0] ^ 1
                advance(w)

    return produce
