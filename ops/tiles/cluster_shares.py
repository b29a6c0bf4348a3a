"""The sum of a tile whose k is split among the CTAs of a cluster: each sends the others their slices of it.

The CTAs of a cluster run at once, so that nobody is waited for in vain, and what they send lands in shared memory,
where the receiver's ring was: no workspace, no fence and no trip to L2. A slice is so many of the tile's units of 16
tokens; its CTA adds the others' sums to its own in order of k, the same bits in every run, and stores it.

Room for the letters is a run of ring stages that the last products hardly ever read. The producer, which knows when a
stage was read, tells the other CTAs that theirs may come; mostly long before they are written.
"""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.tiles.calls import arrive_at, lds128, past, place, send16, wait_together
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.scheduler import Ring
from terrazzo.ops.tiles.types import Expr, Macro, Place
from terrazzo.schedules.clusters import inbox, inbox_bytes


@dataclass(frozen=True)
class Peers:
    """Macros of `cluster_macros`; `units` of 16 tokens are a slice."""

    open: Macro
    invite: Macro
    exchange: Macro
    units: int


def cluster_macros(
    *, size: int, warpgroups: int, row_blocks: int, block_tokens: int, dtype: str, units: Expr, stages: int, each: int,
    stage_bytes: int, rings: Ring,
) -> Peers:  # fmt: skip
    """Of the `size` CTAs of a cluster that share a tile of `units` units of k.

    A thread holds row_blocks * block_tokens / 2 sums in `dtype`. A unit of k fills `each` of the ring's `stages`, of
    which the buffer that the letters go to has `stage_bytes`; `rings` are its macros. The CTA of rank 0 has the last
    share of k.

    Raises:
        ArgumentError: sums that do not fall into slices alike, or a ring without room for those of others.
    """
    of_tokens = row_blocks * block_tokens // (16 * size)
    vectors = 2 * of_tokens  # of four sums, in a slice
    threads = warpgroups * 128
    nbytes = inbox_bytes(size, warpgroups, row_blocks, block_tokens)
    known = isinstance(units, int)
    count = -(-nbytes // stage_bytes)  # of stages
    fits = count <= stages
    if known:
        room = inbox(nbytes, stages, stage_bytes, units // size * each, -(-units // size) * each)
    if size > 1 and (not fits or row_blocks * block_tokens % (16 * size)):
        constraint = (
            f"tiles of {row_blocks} * {block_tokens} tokens and {stages} stages have no slices or no room for it"
        )
        raise ArgumentError("cluster", size, constraint, "take 1, or what schedules.clusters.refusal lets pass")

    @T.macro
    def settle(at):
        """Where k comes with the launch: the first stage that letters go to, what `inbox` finds unless the ring is too
        small for a good place. It is the same in all CTAs of a cluster, so that it is right wherever it lies."""
        at[0] = T.truncmod(T.max(T.truncdiv(units, size) * each - 3, 0), stages)  # from here on: what is read last
        if at[0] + (3 + each) > stages:
            at[0] = T.min(at[0] + (3 + each - stages), stages - count)
        else:
            at[0] = T.if_then_else(at[0] >= count, 0, T.min(at[0] + (3 + each), stages - count))

    def scratch() -> Expr:
        return None if known else T.alloc_local((1,), "int32")

    def start(at: Place) -> Expr:
        """The first of the stages that letters go to."""
        return room.start if known else at[0]

    def letter(first, sender, vector, thread):
        """Bytes from the ring's first one to where a vector of a slice arrives from the sender-th of the others."""
        return first * stage_bytes + ((sender * vectors + vector) * threads + thread) * 16

    @T.macro
    def open():
        """By all threads, once the barriers are made: the others may arrive at them."""
        T.cluster_arrive()

    @T.macro
    def invite(empty, ring, ready, cta, thread):
        """By the producer's warpgroup, behind the last fill of the `ring` whose stages `empty` gives back: the others'
        letters may come, says its first warp. All wait for the cluster: racecheck hangs where only some threads do."""
        T.cluster_wait()
        if thread < 32:
            first = scratch()
            if not known:
                settle(first)
            for _ in T.unroll(stages):
                if T.And(ring.stage[0] >= start(first), ring.stage[0] < start(first) + count):
                    rings.acquire(empty, ring)
                rings.advance(ring)
            if thread < size - 1:
                arrive_at(ready[0], T.truncmod(cta + 1 + thread, size))

    @T.macro
    def exchange(words, ready, sent, acc, share, cta, tx):
        """By a warp whose products are complete: acc of this CTA's slice, the `share`-th in order of k, becomes the sum
        over the cluster.

        words: the ring's buffer. ready: an mbarrier of size - 1 arrivals. sent: one of one arrival for each warp.
        """
        T.cluster_wait()
        first = scratch()
        if not known:
            settle(first)
        coming = T.alloc_local((4,), dtype)
        at = T.alloc_local((1,), "uint32")
        share[0] = size - 1 - T.truncmod(cta, size)
        if tx % 32 == 0:
            T.mbarrier_expect_tx(sent[tx // 32], (size - 1) * vectors * 512)
            T.barrier_arrive(sent[tx // 32])
        wait_together(place(ready[0], "rw"), 0)
        for to in T.unroll(size):
            if share[0] != to:
                for v in T.unroll(vectors):
                    there = past(words, letter(start(first), share[0] - T.if_then_else(share[0] > to, 1, 0), v, tx))
                    send16(there, size - 1 - to, acc[(to * vectors + v) * 4], sent[tx // 32])
        wait_together(place(sent[tx // 32], "rw"), 0)
        at[0] = place(words)
        for mine in T.unroll(size):
            if share[0] == mine:
                for sender in T.unroll(size - 1):
                    for v in T.unroll(vectors):
                        lds128(coming, at[0] + T.cast(letter(start(first), sender, v, tx), "uint32"))
                        for e in T.unroll(4):
                            acc[(mine * vectors + v) * 4 + e] = acc[(mine * vectors + v) * 4 + e] + coming[e]

    return Peers(open, invite, exchange, of_tokens)
