"""The sum of a tile whose k is split among the CTAs of a cluster: each sends the others their slices of it.

The CTAs of a cluster run at once, so that nobody is waited for in vain, and what they send lands in shared memory, where
their rings were: no workspace, no fence and no trip to L2. A slice is so many of the tile's units of 16 tokens; its CTA
adds the others' sums to its own in order of k, the same bits in every run, and stores it.
"""

from types import SimpleNamespace

from terrazzo.ops.calls import lds128, past, place, send16


def divides(size: int, row_blocks: int, block_tokens: int) -> bool:
    """Whether the sums of a thread fall into slices alike for the CTAs of a cluster."""
    return row_blocks * block_tokens % (16 * size) == 0


def inbox_bytes(size: int, warpgroups: int, row_blocks: int, block_tokens: int) -> int:
    """Bytes of shared memory for what the other CTAs of a cluster send."""
    return (size - 1) * row_blocks * block_tokens // size * warpgroups * 256


def cluster_macros(*, size: int, warpgroups: int, row_blocks: int, block_tokens: int, dtype: str) -> SimpleNamespace:
    """Macro `exchange` among the `size` CTAs of a cluster, and `units`, those of 16 tokens in a slice; a thread holds
    row_blocks * block_tokens / 2 sums, a warp has a barrier of one arrival."""
    import tilelang.language as T

    units = row_blocks * block_tokens // (16 * size)
    vectors = 2 * units  # of four sums, in a slice
    threads = warpgroups * 128

    def letter(sender, vector, thread):
        """Bytes from the ring's first one to where a vector of a slice arrives from the sender-th of the others."""
        return ((sender * vectors + vector) * threads + thread) * 16

    @T.macro
    def exchange(ring, sent, acc, share, cta, tx):
        """acc of this CTA's slice, the `share`-th, becomes the sum over the cluster; share is in order of k.

        ring: a buffer of shared memory that nothing is read from any more, `inbox_bytes` at least. sent:
        mbarriers, one for each warp.
        """
        coming = T.alloc_local((4,), dtype)
        inbox = T.alloc_local((1,), "uint32")
        T.cluster_arrive()
        share[0] = size - 1 - T.truncmod(cta, size)
        if tx % 32 == 0:
            T.mbarrier_expect_tx(sent[tx // 32], (size - 1) * vectors * 512)
            T.barrier_arrive(sent[tx // 32])
        T.cluster_wait()  # the others' products are complete, and with them their rings free
        for to in T.unroll(size):
            if share[0] != to:
                for v in T.unroll(vectors):
                    at = past(ring, letter(share[0] - T.if_then_else(share[0] > to, 1, 0), v, tx))
                    send16(at, size - 1 - to, acc[(to * vectors + v) * 4], sent[tx // 32])
        T.barrier_wait(sent[tx // 32], 0)
        inbox[0] = place(ring)
        for mine in T.unroll(size):
            if share[0] == mine:
                for sender in T.unroll(size - 1):
                    for v in T.unroll(vectors):
                        lds128(coming, inbox[0] + T.cast(letter(sender, v, tx), "uint32"))
                        for e in T.unroll(4):
                            acc[(mine * vectors + v) * 4 + e] = acc[(mine * vectors + v) * 4 + e] + coming[e]

    return SimpleNamespace(exchange=exchange, units=units)
