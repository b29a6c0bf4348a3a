"""Clusters whose CTAs share each tile alike and part its sum through shared memory (ops/tiles/cluster_shares.py)."""

from __future__ import annotations

from terrazzo.lowering.targets import Target

PAIR = 2
"""The size that heuristics and search take: 66 clusters of two reach all 132 SMs of an H200, of three 39 (117 SMs), of
four 30, of eight 15 (cudaOccupancyMaxActiveClusters)."""

TALLEST_PAIR = 4
"""Row blocks of 64 of a tile that pairs may share."""


def inbox_bytes(size: int, warpgroups: int, row_blocks: int, block_tokens: int) -> int:
    """Bytes of shared memory for what the other CTAs of a cluster send."""
    return (size - 1) * row_blocks * block_tokens // size * warpgroups * 256


def inbox(nbytes: int, stages: int, stage_bytes: int, first: int, last: int) -> range:
    """The stages of a ring that hold `nbytes`, as few as possible of them read by the last products: of the stages that
    were filled, counted from 0, the last one is number `first` - 1 .. `last` - 1, and two before it count as well.
    Empty if the ring is too small."""
    late = [number % stages for number in range(max(first - 3, 0), last)]
    count = -(-nbytes // stage_bytes)
    runs = [range(start, start + count) for start in range(stages - count + 1)]
    return min(runs, key=lambda run: sum(late.count(stage) for stage in run), default=range(0))


def refusal(
    size: int, warpgroups: int, row_blocks: int, block_tokens: int, ring_bytes: int, units: int, target: Target
) -> str:
    """Why CTAs of a tile cannot be a cluster of `size`, or "".

    Args:
        ring_bytes: of the shared memory where their sums arrive, all stages. units: k units of a tile.
    """
    if size == 1:
        return ""
    if not 2 <= size <= 8 or not target.supports("cluster"):
        return (
            f"clusters of {size} CTAs; {target.arch} has {'those of 1 to 8' if target.supports('cluster') else 'none'}"
        )
    if row_blocks * block_tokens % (16 * size):
        return f"{row_blocks} * {block_tokens} tokens do not divide into units of 16 for each of {size} CTAs"
    if size > units:
        return f"{units} units of k for {size} CTAs"
    need = inbox_bytes(size, warpgroups, row_blocks, block_tokens)
    return f"the sums of others need {need} bytes, a ring has {ring_bytes}" if need > ring_bytes else ""
