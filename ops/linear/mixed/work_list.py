"""Macros of persistent programs that follow a plan made on the host (schedules/work_items.py).

ITEMS int32 [count, 8] holds rows of `schedules.work_items.DeviceTable` with the tile's place: token block, row tile, k
units [k0, k1), slot, shares, two unused; FIRST int32 [CTAs + 1] says which of them are a CTA's.
"""

from terrazzo.ops.tiles.calls import addcg4, call, copy16
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffers, Macro, scalars

ITEM_WORDS = 8


def item_state() -> Buffers:
    """What `load` writes: first token and row tile of the tile, k units [k0, k1), slot, shares."""
    return scalars("tokens", "rows", "k0", "k1", "slot", "shares")


def work_macros(*, block_tokens: int, sums: int) -> tuple[Macro, Macro, Macro]:
    """Macros `load`, `leave` and `gather` for tiles of `sums` f32 sums of a thread.

    WS is f32 [slots, sums / 4, threads, 4], SEM int32 [slots], zero between launches.
    """

    @T.macro
    def load(ITEMS, c, at):
        c.tokens[0] = ITEMS[at, 0] * block_tokens
        c.rows[0] = ITEMS[at, 1]
        c.k0[0] = ITEMS[at, 2]
        c.k1[0] = ITEMS[at, 3]
        c.slot[0] = ITEMS[at, 4]
        c.shares[0] = ITEMS[at, 5]

    @T.macro
    def leave(WS, SEM, acc, c, tx):
        """The sum of a tile whose head another CTA holds goes to the workspace."""
        for i in T.unroll(sums // 4):
            copy16(WS[c.slot[0], i, tx, 0], acc[i * 4])
        call("cta_signal", T.access_ptr(SEM[c.slot[0]], "rw", 1))

    @T.macro
    def gather(WS, SEM, acc, c, tx):
        """The head of a tile adds the other shares in order of k."""
        call("cta_await", T.access_ptr(SEM[c.slot[0]], "rw", 1), c.shares[0])
        for b in T.serial(c.shares[0]):
            for i in T.unroll(sums // 4):
                addcg4(acc[i * 4], WS[c.slot[0] + b, i, tx, 0])

    return load, leave, gather
