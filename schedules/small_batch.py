"""Schedules of the small-batch program: one CTA on each SM, X resident, weights streamed by each warp for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TypeVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.problem import Gemm

TOKENS_PER_TILE = 8
MAX_TOKENS = 16
MAX_WARPS = 28
MOST_STAGES = 2  # of the choice; three took up to 10 % more in 22 of 33 comparisons, 1 to 8 % less in others (H200)
_LARGE = 90e6  # weights from which stream_k has enough tiles of 256 rows to win on more than 8 tokens (H200)
_START_US = 1.8  # what a cost leaves out, for 16 tokens: takes the faster one of 23 pairs recorded on an H200
_STREAM_K_US = (3.4, 0.175)  # stream_k on 16 tokens, and for each million weights (14 of up to 84 million, 5 % rms)
_USUAL_WARPS = {1: range(8, MAX_WARPS + 1), 2: range(5, 11)}  # token tiles -> warps that won on H200
_RESERVED = 1280  # static shared memory: barriers, flags, alignment


@dataclass(frozen=True)
class SmallBatch:
    """kc x nc CTAs split k and the row tiles; a ring step holds `chunk` row tiles of 16 x 128 k.

    Args:
        token_tiles: groups of 8 tokens that the kernel serves.
        kc, nc: CTAs along k and along the rows.
        warps: warps of a CTA; they split its k range.
        chunk: row tiles of one ring step; their partial sums are added across the warps together.
        stages: ring steps in flight for each warp.
        cluster: CTAs that share the load of X by multicast (1 or 2).
        joined: pairs of CTAs along k are clusters, and add their sums through shared memory.
        tokens: most tokens of a launch, 0 for those of all token tiles; so many rows of X are resident.
    """

    token_tiles: int
    kc: int
    nc: int
    warps: int
    chunk: int
    stages: int
    cluster: int = 1
    joined: bool = False
    tokens: int = 0

    @property
    def x_rows(self) -> int:
        """Resident rows of X."""
        return self.tokens or self.token_tiles * TOKENS_PER_TILE

    def smem_bytes(self, problem: Gemm) -> int:
        """Dynamic and static shared memory of one CTA."""
        partial = self.x_rows * (self.chunk * 16 + 4)
        sums = -(-problem.units // self.kc) * problem.groups_per_128 * self.x_rows
        own = 128 + 4 * (self.warps * partial + sums) + self.inbox_bytes(problem) + _RESERVED
        return self.held_bytes(problem) + own

    def held_bytes(self, problem: Gemm) -> int:
        """Of x and the ring, which are in use at the same time."""
        params = self.chunk * problem.groups_per_128 * problem.record_bytes // 16
        step = self.chunk * 16 * 128 * problem.bits // 32 + -(-params // 32) * 32
        x = self.x_rows * (-(-problem.units // self.kc) * 128 + 8) * 2
        return x + 4 * self.warps * self.stages * step

    def launch_bytes(self, problem: Gemm, target: Target) -> int:
        """`smem_bytes`, and what gives a CTA an SM for itself where launches overlap (`x_bytes` of resident.py)."""
        missing = target.smem_per_sm // 2 + 128 - self.held_bytes(problem)
        return self.smem_bytes(problem) + (max(0, missing) if target.supports("pdl") else 0)

    def inbox_bytes(self, problem: Gemm) -> int:
        """Shared memory for the sums that a cluster's CTAs send each other."""
        chunks = -(-problem.row_tiles // self.nc // self.chunk) + 1
        quads = -(-chunks * self.chunk * 4 // PAIR)
        return quads * PAIR * self.x_rows * 16 if self.joined else 0

    def workspace(self, rows: int) -> tuple[tuple[int, int, int], tuple[int]]:
        """Shapes of the sums and of the counters of CTAs along k, for a weight of `rows` rows."""
        if self.joined:
            return (self.kc // PAIR, self.x_rows, rows), (self.nc * PAIR,)
        return (self.kc, self.x_rows, rows), (self.nc,)

    def registers(self) -> int:
        """Estimate of the registers of a thread: accumulators, X fragments, one item in flight."""
        return 4 * self.chunk * self.token_tiles + 24 * self.token_tiles + 56

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


S = TypeVar("S", bound=SmallBatch)


@dataclass(frozen=True)
class Cost:
    """Microseconds of a schedule for each: microsecond of streaming, of padding, of latency, of the last chunk; chunk;
    KB of X; share of a sum of CTAs, and whether there are several; 16 items; 64 KB of partial sums of warps; pairs.
    flight: items under way that hide the latency."""

    stream: float
    padding: float
    latency: float
    tail: float
    chunk: float
    x: float
    kc: float
    split: float
    items: float
    sums: float = 0.0
    joined: float = 0.72
    flight: int = 32


COSTS = {  # resident rows -> fitted to measurements on H200: 231 of 17 weights up to 8 tokens, 6 % rms, the choice 2 %
    # from the best that was timed (tests/data/tuning/small_batch_h200.json); some 90 of 16
    4: Cost(0.596, 0.632, 0.27, 0.684, 0.209, 0.0, 0.134, 0.78, 0.166, 0.0, joined=0.513, flight=48),
    8: Cost(1.01, 0.808, 0.176, 0.264, 0.138, 0.014, 0.237, 1.357, 0.0, 0.0, joined=0.907, flight=48),
    16: Cost(1.31, 1.50, 1.09, 0.33, 0.493, 0.01, 0.219, 0.0, 0.0),
}


def serves(problem: Gemm, target: Target, m: int) -> bool:
    """Whether this program is the one for m tokens: up to 8 always, up to 16 without wgmma or where its estimate is
    below that of stream_k."""
    if m <= TOKENS_PER_TILE or m > MAX_TOKENS or not target.supports("wgmma.f16"):
        return m <= MAX_TOKENS
    found = _cheapest(problem, target, m)
    if found is None or problem.n * problem.k >= _LARGE:
        return False
    start, per_million = _STREAM_K_US
    return _START_US + cost(found, problem, target, COSTS, 2) < start + per_million * problem.n * problem.k / 1e6


@lru_cache(maxsize=256)  # asked by `serves` and by the choice, for every M
def _cheapest(problem: Gemm, target: Target, m: int) -> SmallBatch | None:
    made = every(problem, target, m)
    return cheapest((s for s in made if s.stages <= MOST_STAGES), problem, target, COSTS)


def tokens_for(m: int) -> int:
    """`tokens` of the kernel that serves m of them: 1, 2, 4, or 0 for whole tiles."""
    return 1 << (m - 1).bit_length() if m <= TOKENS_PER_TILE // 2 else 0


def choose(problem: Gemm, target: Target, m: int) -> SmallBatch:
    """The cheapest split of k and of the warps, by a cost that follows measurements on H200.

    Raises:
        ArgumentError: more than MAX_TOKENS tokens, or a target whose shared memory cannot hold any slice of X.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise ArgumentError("m", m, f"must be 1..{MAX_TOKENS} for the small-batch program", "use a tile program")
    found = _cheapest(problem, target, m)
    if found is None:
        raise ArgumentError("target", target.arch, f"has too little shared memory for K = {problem.k}", "split K")
    return found


def cheapest(
    schedules: Iterable[S], problem: Gemm, target: Target, costs: Mapping[int, Cost], x_bytes: int = 2
) -> S | None:
    """The cheapest schedule that fits, with the warps that usually win and an even split where there are such.

    Args:
        costs: see `cost`.
        x_bytes: of an element of x.
    """
    legal = [
        s
        for s in schedules
        if s.launch_bytes(problem, target) <= target.smem_per_block
        and s.registers() * s.warps * 32 <= target.registers_per_sm
    ]
    streaming = [s for s in legal if s.stages > 1]
    usual = [s for s in streaming if s.warps in _USUAL_WARPS[min(s.token_tiles, 2)]]
    even = [s for s in usual if problem.units % (s.kc * s.warps) == 0]

    return min(
        even or usual or streaming or legal, key=lambda s: cost(s, problem, target, costs, x_bytes), default=None
    )


def every(problem: Gemm, target: Target, m: int, kind: type[S] = SmallBatch) -> Iterator[S]:
    """`candidates` for m tokens, and those where pairs of CTAs along k are clusters."""
    tiles = -(-m // TOKENS_PER_TILE)
    made = [*candidates(problem, target, tiles, kind)]
    if tiles == 1 and target.supports("cluster"):
        made += [replace(s, joined=True) for s in candidates(problem, target, 1, kind, kcs=range(PAIR, 17, PAIR))]
    yield from (replace(s, tokens=tokens_for(m)) for s in made)


def candidates(
    problem: Gemm, target: Target, token_tiles: int, kind: type[S] = SmallBatch, kcs: range = range(1, 17)
) -> Iterator[S]:
    """Splits of k over CTAs (`kcs`) and warps with some steps each; not all of them fit."""
    cluster = 2 if token_tiles > 1 and target.supports("cluster") else 1
    for kc in kcs[: problem.units]:
        nc = min(target.sms // kc, problem.row_tiles) // cluster * cluster
        for warps in range(min(MAX_WARPS, problem.units // kc) if nc else 0, 0, -1):
            rows = -(-problem.row_tiles // nc)
            # one token tile streams best with two chunks or more, two have the more work for each
            for chunk in (c for c in (1, 2, 3, 4) if c == 1 or c <= (rows // 2 if token_tiles == 1 else rows)):
                for stages in (1, 2) if token_tiles == 2 else (1, 2, 3):
                    yield kind(token_tiles, kc, nc, warps, chunk, stages, cluster)


def cost(s: SmallBatch, problem: Gemm, target: Target, costs: Mapping[int, Cost], x_bytes: int) -> float:
    """Microseconds up to a constant, to compare schedules of one problem.

    Args:
        costs: resident rows -> what was measured for them; others count as the next more, or the most listed.
        x_bytes: of an element of x.
    """
    c = costs[min((rows for rows in costs if rows >= s.x_rows), default=max(costs))]
    rows = -(-problem.row_tiles // s.nc)
    chunks = -(-rows // s.chunk)
    items = -(-problem.units // s.kc)
    steps = chunks * -(-items // s.warps)  # of a warp
    shares = s.kc // PAIR if s.joined else s.kc
    item_bytes = 256 * problem.bits + problem.groups_per_128 * problem.record_bytes / 4
    stream = problem.row_tiles * problem.units * item_bytes / (target.dram_gb_s * 900)
    padding = steps * s.chunk * s.warps * s.nc * s.kc / (problem.row_tiles * problem.units) - 1  # steps not full
    in_flight = s.warps * s.stages * s.chunk  # items
    return (
        stream
        * (c.stream + c.padding * padding + c.latency * max(0, c.flight / in_flight - 1) + c.tail * s.chunk / rows)
        + c.chunk * chunks
        + c.x * items * x_bytes * s.x_rows / TOKENS_PER_TILE / s.cluster
        + c.joined * s.joined
        + (c.kc * shares + c.split) * (shares > 1)
        + c.items * steps * s.chunk * s.warps / 16
        + c.sums * chunks * s.chunk * s.x_rows / TOKENS_PER_TILE * s.warps / 128
    )
