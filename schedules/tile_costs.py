"""How the tiles of a stream-K program are cut among the SMs, and what that costs: a model of the busiest CTA.

A CTA's time is its units of k, the tiles that it stores, and, where tiles are shared along k, the trip of partial sums
through the workspace. That trip costs 3 to 5 microseconds, so whole tiles on fewer SMs, or every tile on the same
number of CTAs, often beat an equal share of all units for everyone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from terrazzo.lowering.targets import Target
from terrazzo.schedules.partition import MOST_SHARED, Partition

Tile = tuple[int, int, int]
"""(tokens, warpgroups, row blocks of each)."""
_AREA = 16384  # a tile of 128 rows by 128 tokens, the unit of an area
_NARROW, _MIDDLE = 64, 96  # tokens below which a tile is never one of several, up to 256 of them and beyond
_FEW = 512  # tokens up to which launches are too short to meet the power limit
_PADDED = 1.2  # tokens of the tiles of a column, as a multiple of the fewest that some tile makes
_SHARP = 6  # how sharply the longer of loads and products hides the shorter
_SUMS_TO_PART = {1: 32, 2: 64, 3: 32, 4: 8}
"""Warpgroups -> sums of a thread beside which ptxas finds registers for the shares that it adds."""


def parts_sums(warpgroups: int, sums: int) -> bool:
    """Whether CTAs that share a tile alike part its sum (`exchange` of scheduler.py); else its head adds all."""
    return sums <= _SUMS_TO_PART[warpgroups]


def raster(token_blocks: int, row_blocks: int, target: Target) -> int:
    """How many of the blocks of tokens walk together over the rows of a weight of so many blocks of 64.

    One where a wave of CTAs holds all rows of several token blocks anyway: each block of X is then read once.
    docs/designs.md has what was measured: W4A16 of weights above 65 MB, of which records hold the usual ones, is up to
    6 % faster with 8 at 1024 tokens; on e4m3 and in W4Ax 8 is nearly always as fast or faster.
    """
    return 1 if token_blocks > 2 and row_blocks <= target.sms else 8


MOST_SLICES = 15
"""CTAs that may part a tile: each has a bit of a word's upper half, which must not become negative (tz_withdraw)."""


@dataclass(frozen=True)
class TileCosts:
    """Microseconds of the parts of a launch, on all SMs of an H200; an area is in tiles of 128 x 128 sums.

    Attributes:
        start: begin and end of a grid. store: an area's epilogue.
        share: the trip of partial sums. add: each further share of an area.
        uneven, uneven_area: more where CTAs hold parts of two tiles.
        part, part_area, part_each: the trip and the epilogue where CTAs part the sum: in all, of an area, for each
            other CTA.
        pair, pair_area: the trip and the epilogue where the two CTAs of a cluster part the sum; of an area.
        traffic: time of the bytes, as a multiple of what 88.5 % of the datasheet's bandwidth takes.
        busy: how much faster a unit is where hardly any other SM works.
        units: tile -> 128 k of it, of tiles that were measured.
        scattered: time of a unit of shared tiles, as a multiple, where a CTA has less than two whole ones besides:
            each walks elsewhere along k. None: as in a later wave.
    """

    start: float
    store: float
    share: float
    add: float
    uneven: float
    uneven_area: float
    part: float
    part_area: float
    part_each: float
    pair: float
    pair_area: float
    traffic: float
    busy: float
    units: Mapping[Tile, float]
    scattered: float | None = None

    def unit(self, tile: Tile) -> float:
        """128 k of a tile; one that was not measured costs what its neighbours do, by rows and by tokens."""
        if tile in self.units:
            return self.units[tile]
        tokens, warpgroups, row_blocks = tile
        near = min(self.units, key=lambda it: (abs(it[0] - tokens), abs(it[1] * it[2] - warpgroups * row_blocks)))
        return self.units[near] * warpgroups * row_blocks / (near[1] * near[2]) * (0.5 + 0.5 * tokens / near[0])

    def us(
        self,
        tile: Tile,
        tiles: int,
        units: int,
        part: Partition,
        dram_us: float,
        slots: int,
        parted: bool,
        slow: float,
        cluster: int = 1,
    ) -> float:
        """A launch of `tiles` of `units` each, divided by `part` over at most `slots` CTAs at once.

        Args:
            dram_us: see the function of that name. parted: whether the program can part sums (`parts_sums`).
            slow: time of a unit of a shared tile in a later wave, as a multiple: all of k is read at once.
            cluster: CTAs of a cluster, which part the sums of the tiles that they share.
        """
        tokens, warpgroups, row_blocks = tile
        area = 64 * warpgroups * row_blocks * tokens / _AREA
        shared, grid = part.shared, part.grid
        whole = -(-(tiles - shared) // grid)
        apart = slow if whole else 1
        if self.scattered and whole < 2 and tiles > grid:
            apart = self.scattered
        busiest = -(-shared * units // grid) * apart + whole * units
        loop = busiest * self.unit(tile) * (1 + self.busy * (min(grid / slots, 1) - 1))
        if cluster > 1 and part == Partition(tiles * cluster, tiles):
            tail = self.pair + self.pair_area * area
        elif parted and parts_alike(tiles, units, part):
            tail = self.part + self.part_area * area + self.part_each * (grid // shared - 1)
        else:
            tail = self.store * area * (whole + (shared > 0))
            others = -(-grid // shared) - 1 if 0 < shared < grid else int(shared > 0)
            if others and shared % grid:
                tail += self.share + self.add * others * area
                tail += (self.uneven + self.uneven_area * area) * (grid % shared > 0)
        return self.start + (loop**_SHARP + (dram_us * self.traffic) ** _SHARP) ** (1 / _SHARP) + tail

    def divide(
        self,
        tile: Tile,
        tiles: int,
        units: int,
        dram_us: float,
        slots: int,
        parted: bool,
        slow: float = 1,
        cluster: int = 1,
    ) -> tuple[float, Partition]:
        """Microseconds of the cheapest partition, and the partition; arguments as of `us`."""
        every = (
            (self.us(tile, tiles, units, part, dram_us, slots, parted, slow, cluster), part)
            for part in partitions(tiles, units, slots, cluster)
        )
        return min(every, key=lambda it: it[0])


def parts_alike(tiles: int, units: int, part: Partition) -> bool:
    """Whether the CTAs of each tile part its sum, in a program that can."""
    among, rest = divmod(part.grid, max(part.shared, 1))
    return part.shared == tiles and not rest and 1 < among <= min(MOST_SLICES, units)


def partitions(tiles: int, units: int, slots: int, cluster: int = 1) -> Iterator[Partition]:
    """Ways to divide tiles over CTAs, no share without a unit of k: whole tiles first. Clusters of several CTAs: those
    with as many CTAs for each tile, and whole tiles, for which some CTAs of a cluster may be too many."""
    if cluster > 1:
        yield Partition(-(-min(tiles, slots) // cluster) * cluster, 0)
        if tiles * cluster <= slots and cluster <= units and 2 * slots * units <= MOST_SHARED:
            yield Partition(tiles * cluster, tiles)
        return
    yield Partition(min(tiles, slots), 0)
    if 2 * slots * units > MOST_SHARED:
        return
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


def bucket(m: int) -> int:
    """The M that tiles are chosen for, so that no M between two of them needs another kernel: multiples of 16 up to
    128, of 32 up to 512, and four for each power of two up to 4096, which serves all above."""
    top = max(16, 1 << (m - 1).bit_length())
    step = max(16, top // 8) if top != _FEW else 32
    return min(-(-m // step) * step, 4096)


def widths(m: int, block_tokens: Iterable[int]) -> list[int]:
    """Tokens of the tiles worth considering for all M of the bucket of m: those that pad it little, and up to 256
    tokens also the next one that pairs of CTAs can divide. Of more than 512 tokens the clock follows the power, and
    other tiles than those of 128 and 256 lose, unless they fit exactly."""
    top = bucket(m)
    least = top if top <= 32 else _NARROW if top <= 256 else _MIDDLE if top <= _FEW else 128
    padded = {tokens: -(-top // tokens) * tokens for tokens in block_tokens if tokens >= min(top, least)}
    narrow = [_NARROW] if _NARROW < top <= 128 and _NARROW in padded else []  # pairs, and two tiles, for small weights
    if top > _FEW:
        exact = lambda tokens: top <= 2 * _FEW and tokens >= 160 and top % tokens == 0
        padded = {tokens: total for tokens, total in padded.items() if tokens in (128, 256) or exact(tokens)}
    most = _PADDED * min(padded.values())
    if 32 < top <= max(padded):
        most = max(most, min(tokens for tokens in padded if tokens >= top and tokens % 32 == 0))
    return [tokens for tokens, total in padded.items() if total <= most or tokens in narrow]


def dram_us(target: Target, nbytes: int) -> float:
    """Microseconds of a GEMM's bytes at 88.5 % of the datasheet's bandwidth, what a copy reaches on H200."""
    return nbytes / (0.885e3 * target.dram_gb_s)


def later_wave(target: Target, m: int, k: int, x_bytes: int) -> float:
    """`slow` of `TileCosts.us`: tiles that are shared in a later wave read all of x at once, which may exceed L2."""
    return 1.2 if m * k * x_bytes > 0.9 * target.l2_bytes else 1.0
