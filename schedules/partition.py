"""Work partition of persistent programs: whole tiles in waves, the rest shared along k (stream-K)."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.lowering.targets import Target

_SHARE_UNITS = 12  # k units of a share below which adding it up costs more than it saves
MOST_SHARED = 3 << 20
"""k units of all shared tiles: the programs count up to 2^22 (`tz_quotient`), with a quarter for heads."""


@dataclass(frozen=True)
class Partition:
    """`grid` CTAs; the first `shared` tiles are cut along k into equal shares, the others are whole tiles."""

    grid: int
    shared: int


def share_tiles(tiles: int, units: int, slots: int) -> Partition:
    """`tiles` of `units` k units each over `slots` SMs (or clusters, which then count as CTAs).

    Shares only where whole waves would leave more than a few percent of the slots idle.
    """
    rest = tiles % slots
    if rest == 0 or -(-tiles // slots) * slots < 1.06 * tiles or 2 * slots * units > MOST_SHARED:
        return Partition(min(tiles, slots), 0)
    if tiles < slots:
        share = -(-tiles * units // slots)  # k units of the busiest slot: no more slots than that needs
        return Partition(-(-tiles * units // share), tiles)
    # a few tiles over many slots would be cut too thin: then share one full wave with them. A wave that is shared walks
    # over all of k at once and loses the L2, so only where it must be.
    thin = rest * units < _SHARE_UNITS * slots
    return Partition(slots, rest + slots if thin and rest <= slots // 2 else rest)


def memory_refusal(need: int, target: Target) -> str:
    """Why a launch with `need` bytes of shared memory does not fit a CTA of the target, or ""."""
    return "" if need <= target.smem_per_block else f"needs {need} bytes of shared memory, {target.arch} has less"
