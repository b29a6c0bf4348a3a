"""Macros of persistent tile programs whose CTAs share tiles (ops/tiles/scheduler.py): how their sums are added.

Where some tiles are shared, a CTA leaves its sum in the workspace, and the one that holds the tile's head adds the
shares in order of k: the same bits in every run.

Where every tile is shared by as many CTAs (`exchange`), they part the sum instead: each leaves what the others add,
and adds and stores a slice of the tile's tokens. They wait for each other, which is free of deadlock only while all of
them run; so a warp that waited for too long leaves its slice to the one that comes last.

Each function returns macros for one program.
"""

from dataclasses import dataclass

from terrazzo.ops.tiles.calls import addcg4, call, copy16, has, opaque, quotient
from terrazzo.ops.tiles.cluster_shares import Peers
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.scheduler import Tiles
from terrazzo.ops.tiles.staged_rows import Out
from terrazzo.ops.tiles.types import Buffers, Call, Macro, scalars


def slice_state() -> Buffers:
    """What `give` and `take` of the share macros write: which `share` of its tile the CTA has, in order of k, of how
    many (`among`); the slice `at` and a bit for each of its `units`; slices left to add and how many they were, whether
    the other CTAs came in time; what the tile's `word` held when the warp turned away from it."""
    return scalars("share", "among", "units", "at", "todo", "rounds", "met", "word")


def spare_registers(warpgroups: int, sums: int, per_sm: int = 1) -> int:
    """Registers of a thread that ptxas has left beside its sums in CTAs of so many warpgroups and one of producers:
    setmaxnreg comes too late for it."""
    return min(65536 // (128 * (warpgroups + 1) * per_sm) // 8 * 8, 240) - 48 - -(-sums // 16) * 16


@dataclass(frozen=True)
class Shares:
    """Macros of `share_macros`."""

    leave_share: Macro
    add_shares: Macro
    give: Macro
    take: Macro
    close: Macro


def share_macros(*, vectors: int, row_blocks: int, flags: int, dtype: str, spare: int) -> Shares:
    """Macros `leave_share` and `add_shares`, or `give`, `take` and `close`: partial tiles through the workspace.

    A thread holds `row_blocks` * `vectors` groups of four 32-bit sums in `dtype`; WS [grid, blocks, vectors, 128, 4].
    `flags` semaphores belong to a CTA, one for each warpgroup (each warp, where tiles are parted). `spare`: registers
    of a thread for loads under way; from 16 on, several shares are loaded together.
    """
    total = row_blocks * vectors
    at_once = 4 if spare >= 64 else 2  # shares whose loads are in flight together
    depth = max(min(spare // (4 * at_once), 8, total), 1)  # vectors of each

    @T.macro
    def leave_share(WS, SEM, acc, cta, wg, wt):
        """The sum of a tile whose head another CTA holds goes to the workspace."""
        for r in T.unroll(row_blocks):
            for i in T.unroll(vectors):
                copy16(WS[cta, wg * row_blocks + r, i, wt, 0], acc[(r * vectors + i) * 4])
        call("signal", T.access_ptr(SEM[cta, wg], "rw", 1), wg + 1)

    @T.macro
    def load_vector(WS, coming, i, b, count, cta, wg, wt):
        """Vector i of shares b .. b + at_once - 1; zeros from those past the last."""
        for j in T.unroll(at_once):
            call(
                "load_share", T.access_ptr(coming[(i % depth * at_once + j) * 4], "w", 4),
                T.access_ptr(WS[cta, wg * row_blocks + i // vectors, i % vectors, wt, 0], "r", 4),
                WS.shape[1] * (vectors * 512), b + j + 1, count,
            )  # fmt: skip

    @T.macro
    def add_in_place(WS, acc, count, cta, wg, wt):
        """One share after the other joins acc, where it is loaded."""
        for b in T.serial(count):
            for i in T.unroll(total):
                addcg4(acc[i * 4], WS[cta - (b + 1), wg * row_blocks + i // vectors, i % vectors, wt, 0], dtype=dtype)

    @T.macro
    def add_together(WS, acc, count, cta, wg, wt):
        """`at_once` shares at a time, `depth` vectors of each on their way while others join acc."""
        coming = T.alloc_local((depth * at_once * 4,), dtype)
        for b in T.serial(T.ceildiv(count, at_once)):
            for i in T.unroll(total + depth - 1):
                if i < total:
                    load_vector(WS, coming, i, b * at_once, count, cta, wg, wt)
                if i >= depth - 1:
                    for j in T.unroll(at_once):
                        for e in T.unroll(4):
                            acc[(i - depth + 1) * 4 + e] = (
                                acc[(i - depth + 1) * 4 + e] + coming[((i - depth + 1) % depth * at_once + j) * 4 + e]
                            )

    @T.macro
    def add_shares(WS, SEM, acc, count, cta, wg, wt):
        """The head of a tile adds the `count` other shares in order of k."""
        call("await", T.access_ptr(SEM[cta - 1, wg], "rw", 1), count, -flags, wg + 1)
        if spare < 16:
            add_in_place(WS, acc, count, cta, wg, wt)
        else:
            add_together(WS, acc, count, cta, wg, wt)

    exchange = exchange_macros(vectors=vectors, row_blocks=row_blocks, dtype=dtype, spare=spare)
    return Shares(leave_share, add_shares, *exchange)


def exchange_macros(*, vectors: int, row_blocks: int, dtype: str, spare: int) -> tuple[Macro, Macro, Macro]:
    """Of `share_macros`: `give`, `take` and `close`, where the CTAs of a tile part its sum, a slice for each."""
    total = row_blocks * vectors
    parts = row_blocks * vectors // 2  # of 16 tokens: what a slice is made of
    others = 3  # shares whose loads are in flight together
    ahead = max(min((spare + 24) // (4 * others), 8, total), 1)  # vectors of each; a tile's end needs no operands

    def word(SEM, x, cta, wg, wt):
        return T.access_ptr(SEM[cta + x.share[0], wg * 4 + wt // 32], "rw", 1)

    @T.macro
    def write(WS, acc, units, cta, wg, wt):
        """The vectors of acc that belong to `units` (a bit for each), to the CTA's part of the workspace."""
        for i in T.unroll(total):
            call(
                "give", T.access_ptr(WS[cta, wg * row_blocks, 0, wt, 0], "w", 4), i * 2048,
                T.access_ptr(acc[i * 4], "r", 4), units, i // 2,
            )  # fmt: skip

    @T.macro
    def give(WS, SEM, acc, x, among, cta, grid, wg, wt):
        """All but this CTA's slice of its sums goes to the others. `x.rounds`: the slices that this warp adds, one if
        the others came in time; x.todo has their bits, none of them where the warp withdrew (one round of nothing)."""
        x.among[0] = among
        x.share[0] = grid - 1 - cta - quotient(grid - 1 - cta, among) * among
        x.units[0] = call("slice", x.share[0], x.among[0], parts, returns="int32")
        write(WS, acc, ~x.units[0], cta, wg, wt)
        x.met[0] = call("meet", word(SEM, x, cta, wg, wt), x.among[0], returns="int32")
        if x.met[0] == 0:  # the others do not run yet
            write(WS, acc, x.units[0], cta, wg, wt)
            x.met[0] = call("withdraw", word(SEM, x, cta, wg, wt), x.among[0], x.share[0], returns="int32")
        x.word[0] = call("turn_away", word(SEM, x, cta, wg, wt), returns="int32")
        x.todo[0] = T.if_then_else(x.met[0] > 0, T.int32(1) << x.share[0] | x.met[0] >> 1, 0)
        x.rounds[0] = T.max(T.call_extern("int32", "__popc", x.todo[0]), 1)

    @T.macro
    def load_part(WS, out, at, i, units, other, x, cta, wg, wt):
        """Vector i of share `other` of the tile to out[at .. at + 3], if it belongs to `units`; else zeros."""
        call(
            "load_part", T.access_ptr(out[at], "rw", 4), T.access_ptr(WS[cta, wg * row_blocks, 0, wt, 0], "r", 4),
            (x.share[0] - other) * (WS.shape[1] * (vectors * 512)), i * 2048, units, i // 2,
        )  # fmt: skip

    @T.macro
    def take(WS, acc, x, c, cta, wg, wt):
        """The next slice of x.todo: its own CTA's part, and the others in order of k."""
        coming = T.alloc_local((ahead * others * 4,), dtype)
        wanted = T.alloc_local((others,), "int32")
        opaque(c.first[0])  # addresses of y wait for their turn
        which = T.alloc_local((others,), "int32")
        x.at[0] = T.call_extern("int32", "__ffs", x.todo[0]) - 1
        x.units[0] = call("slice", T.max(x.at[0], 0), x.among[0], parts, returns="int32")
        if x.todo[0] == 0:
            x.units[0] = 0
        x.todo[0] = x.todo[0] & (x.todo[0] - 1)
        if x.at[0] != x.share[0]:
            for i in T.unroll(total):
                if has(x.units[0], i // 2):
                    load_part(WS, acc, i * 4, i, x.units[0], x.at[0], x, cta, wg, wt)
        for b in T.serial(T.truncdiv(x.among[0] + others - 2, others)):
            for j in T.unroll(others):  # zeros from those past the last
                wanted[j] = T.if_then_else(b * others + j < x.among[0] - 1, x.units[0], 0)
                which[j] = b * others + j + T.if_then_else(b * others + j >= x.at[0], 1, 0)
            for i in T.unroll(total + ahead - 1):
                if i < total:
                    for j in T.unroll(others):
                        at = (i % ahead * others + j) * 4
                        load_part(WS, coming, at, i, wanted[j], which[j], x, cta, wg, wt)
                if i >= ahead - 1:
                    for j in T.unroll(others):
                        for e in T.unroll(4):
                            acc[(i - ahead + 1) * 4 + e] = (
                                acc[(i - ahead + 1) * 4 + e] + coming[((i - ahead + 1) % ahead * others + j) * 4 + e]
                            )

    @T.macro
    def close(SEM, x, cta, wg, wt):
        """The last warp that turned away from the word of its tile clears it, for the next launch."""
        call("depart", word(SEM, x, cta, wg, wt), x.among[0], x.word[0])

    return give, take, close


def finish_macros(
    tiles: Tiles, shares: Shares, out: Out, *, leaves: Call = lambda c: c.leaves[0] > 0,
    adds: Call = lambda c: c.adds[0] > 0, exchange: bool = False, peers: Peers | None = None,
) -> tuple[Macro, Macro]:  # fmt: skip
    """Macros `finish` and `finish_alone`: what becomes of a segment's sums, `acc`.

    Args:
        leaves, adds: conditions that a segment leaves its sums to the tile's head, or adds the shares of others.
        exchange: as of `partition_macros`.
        peers: where a cluster may part the sum of a tile; `to` then has `ring`, `ready` and `sent` for its exchange.
    """

    @T.macro
    def finish_alone(WS, SEM, acc, to, c, cta, grid, sk, wg, wt):
        """The sums go to the tile's head; or they are stored, after the shares of others have joined them."""
        if leaves(c):
            shares.leave_share(WS, SEM, acc, cta, wg, wt)
        else:
            if adds(c):
                tiles.later_shares(c, cta, grid, sk)
                shares.add_shares(WS, SEM, acc, c.count[0], cta, wg, wt)
            out.store(to, acc, c, wg, wt)

    @T.macro
    def finish(WS, SEM, acc, to, p, c, x, cta, grid, sk, wg, wt):
        """`finish_alone`, unless the CTAs of a tile part its sum (then p.among > 0)."""
        if exchange:
            if p.among[0] > 0:
                if out.prepare is not None:
                    out.prepare(to, wg, wt)
                shares.give(WS, SEM, acc, x, p.among[0], cta, grid, wg, wt)
                for i in T.serial(x.rounds[0]):
                    shares.take(WS, acc, x, c, cta, wg, wt)
                    if i == 0:  # behind the loads, with which the word's last value has come; later it would be spilled
                        shares.close(SEM, x, cta, wg, wt)
                    out.store_slice(to, acc, c, x, wg, wt)
            else:
                finish_alone(WS, SEM, acc, to, c, cta, grid, sk, wg, wt)
        elif peers is not None:
            if p.among[0] > 0:
                if out.prepare is not None:
                    out.prepare(to, wg, wt)
                peers.exchange(to.ring, to.ready, to.sent, acc, x.share, cta, wg * 128 + wt)
                opaque(c.rows[0])  # addresses of bias and y are not made before, and spilled
                opaque(c.first[0])
                out.store_share(to, acc, c, x.share[0], peers.units, wg, wt)
            else:
                finish_alone(WS, SEM, acc, to, c, cta, grid, sk, wg, wt)
        else:
            finish_alone(WS, SEM, acc, to, c, cta, grid, sk, wg, wt)

    return finish, finish_alone
