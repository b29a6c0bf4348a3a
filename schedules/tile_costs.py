"""How the tiles of a stream-K program are cut among the SMs, and what that costs: a model of the busiest CTA.

A CTA's time is its units of k, the tiles that it stores, and, where tiles are shared along k, the trip of partial sums
through the workspace. That trip costs 3 to 5 microseconds, so whole tiles on fewer SMs, or every tile on the same
number of CTAs, often beat an equal share of all units for everyone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from terrazzo.lowering.targets import Target
from terrazzo.schedules.partition import Partition

Tile = tuple[int, int, int]
"""(tokens, warpgroups, row blocks of each)."""
_AREA = 16384  # a tile of 128 rows by 128 tokens, the unit of an area
_SHARP = 6  # how sharply the longer of loads and products hides the shorter


_SUMS_TO_PART = {1: 32, 2: 64, 3: 32, 4: 16}
"""Warpgroups -> sums of a thread beside which ptxas finds registers for the shares that it adds."""


def parts_sums(warpgroups: int, sums: int) -> bool:
    """Whether CTAs that share a tile alike part its sum (ops/tile_scheduler.py, `exchange`); else its head adds all."""
    return sums <= _SUMS_TO_PART[warpgroups]


@dataclass(frozen=True)
class TileCosts:
    """Microseconds of the parts of a launch, on all SMs of an H200; an area is in tiles of 128 x 128 sums.

    Attributes:
        start: begin and end of a grid. store: an area's epilogue.
        share, share_area: the trip of partial sums, and of an area. add: each further share of an area.
        uneven, uneven_area: more where CTAs hold parts of two tiles.
        traffic: time of the bytes, as a multiple of what 88.5 % of the datasheet's bandwidth takes.
        busy: how much faster a unit is where hardly any other SM works.
        units: tile -> 128 k of it. convert, product, latency, sharp: the same of a tile that is not in `units`, from
            64 rows of weights, 64 rows by 128 tokens, and what more warpgroups hide.
    """

    start: float
    store: float
    share: float
    share_area: float
    add: float
    uneven: float
    uneven_area: float
    traffic: float
    busy: float
    convert: float
    product: float
    latency: float
    sharp: float
    units: Mapping[Tile, float] = field(default_factory=dict)

    def unit(self, tile: Tile) -> float:
        """128 k of a tile."""
        tokens, warpgroups, row_blocks = tile
        if tile in self.units:
            return self.units[tile]
        both = (self.convert**self.sharp + (self.product * tokens / 128) ** self.sharp) ** (1 / self.sharp)
        return warpgroups * row_blocks * both + self.latency / warpgroups

    def us(self, tile: Tile, tiles: int, units: int, part: Partition, dram_us: float, slots: int) -> float:
        """Of `tiles` of `units` each, divided by `part` over at most `slots` CTAs at once, that read for `dram_us`."""
        tokens, warpgroups, row_blocks = tile
        area = 64 * warpgroups * row_blocks * tokens / _AREA
        shared, grid = part.shared, part.grid
        whole = -(-(tiles - shared) // grid)
        busiest = -(-shared * units // grid) + whole * units
        loop = busiest * self.unit(tile) * (1 + self.busy * (min(grid / slots, 1) - 1))
        tail = self.store * area * (whole + (shared > 0))
        others = -(-grid // shared) - 1 if 0 < shared < grid else int(shared > 0)
        if others and shared % grid:
            tail += self.share + (self.share_area + self.add * others) * area
            tail += (self.uneven + self.uneven_area * area) * (grid % shared > 0)
        return self.start + (loop**_SHARP + (dram_us * self.traffic) ** _SHARP) ** (1 / _SHARP) + tail

    def divide(self, tile: Tile, tiles: int, units: int, dram_us: float, slots: int) -> tuple[float, Partition]:
        """The cheapest partition and its microseconds."""
        every = ((self.us(tile, tiles, units, part, dram_us, slots), part) for part in partitions(tiles, units, slots))
        return min(every, key=lambda it: it[0])


def partitions(tiles: int, units: int, slots: int) -> Iterator[Partition]:
    """Ways to divide tiles over CTAs, no share without a unit of k: whole tiles first."""
    yield Partition(min(tiles, slots), 0)
    if tiles <= slots:
        for each in range(2, min(slots // tiles, units) + 1):  # the same number of CTAs for every tile
            yield Partition(tiles * each, tiles)
        share = -(-tiles * units // slots)  # k units of the busiest CTA: no more CTAs than that needs
        yield Partition(-(-tiles * units // share), tiles)
        return
    rest = tiles % slots
    for shared in (rest, rest + slots) if rest else ():  # a last wave, alone or with one before it
        if slots <= shared * units:
            yield Partition(slots, shared)


def dram_us(target: Target, weight_bytes: int, x_bytes: int, y_bytes: int) -> float:
    """Microseconds of a GEMM's bytes at 88.5 % of the datasheet's bandwidth, what a copy reaches on H200."""
    return (weight_bytes + x_bytes + y_bytes) / (0.885e3 * target.dram_gb_s)
