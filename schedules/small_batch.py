"""Schedules of the small-batch program: one CTA on each SM, X resident, weights streamed by each warp for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules import stream_k
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.costs import COSTS
from terrazzo.schedules.problem import TOKENS_PER_TILE, Gemm

MAX_TOKENS = 16
"""With 16-bit x; `Form.small_tokens` of others."""
MAX_WARPS = 28
MOST_STAGES = 2  # of the choice; three took up to 10 % more in 22 of 33 comparisons, 1 to 8 % less in others (H200)
_LARGE = 90e6  # weights from which stream_k has enough tiles of 256 rows to win on more than 8 tokens (H200)
_START_US = 1.8  # what a cost leaves out, for 16 tokens: takes the faster one of 23 pairs recorded on an H200
_STREAM_K_US = (3.4, 0.175)  # stream_k on 16 tokens, and for each million weights (14 of up to 84 million, 5 % rms)
_USUAL_WARPS = {1: range(8, MAX_WARPS + 1), 2: range(5, 11)}  # token tiles -> warps that won on H200
_LARGE_BYTES = 40e6  # with 8-bit x: weights from which 9 to 16 tokens are faster on wgmma, and up to 8 may be (H200)
_MIDDLE_BYTES = 26e6  # weights from which wgmma is faster than more than two token tiles (measured on H200)
_LARGE_BLOCKS = 68e6  # of W4Ax: weights from which two token tiles are faster on wgmma (once W4A8's)
_START_BYTES_US = 2.5  # what a cost leaves out: mean of six measurements of 16 tokens
# of 32 tokens, and of each million weights: fitted to eight measurements on H200, 3 % rms
_STREAM_K_BYTES_US = (4.6, 0.135)
# up to 8 tokens: what the cost of small_batch leaves out, and what that of stream_k has too much
_FEW_START_US, _OVERRATED_US = 0.44, 0.94


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

    def x_bytes(self, problem: Gemm) -> int:
        """Of the resident rows of X."""
        return self.x_rows * (-(-problem.units // self.kc) * 128 * problem.x_bytes + 16)

    def ring_words(self, problem: Gemm) -> int:
        """Of a warp's ring."""
        params = self.chunk * problem.groups_per_128 * problem.record_bytes // 16
        return self.stages * (self.chunk * 16 * 128 * problem.bits // 32 + -(-params // 32) * 32)

    def held_bytes(self, problem: Gemm) -> int:
        """Of x and the ring, which are in use at the same time."""
        return self.x_bytes(problem) + 4 * self.warps * self.ring_words(problem)

    def smem_bytes(self, problem: Gemm) -> int:
        """Dynamic and static shared memory of one CTA."""
        form, ring, partial = problem.form, self.ring_words(problem), self.x_rows * (self.chunk * 16 + 4)
        # a single chunk leaves the ring to the partial sums; schedules up to two token tiles were fitted without that
        one = self.token_tiles > 2 and -(-problem.row_tiles // self.nc) <= self.chunk
        sums = 4 * self.warps * (max(ring, partial) if one else ring + partial)
        own = form.small_own(self, problem) + self.inbox_bytes(problem) + form.small_fixed + 128
        return self.x_bytes(problem) + sums + own

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

    def registers(self, problem: Gemm) -> int:
        """Estimate of the registers of a thread: accumulators, X fragments, one item in flight."""
        return 4 * self.chunk * self.token_tiles + problem.form.small_x * self.token_tiles + 56

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def serves(problem: Gemm, target: Target, m: int) -> bool:
    """Whether this program is the one for m tokens; on wgmma beyond 8 where its estimate is below that of stream_k."""
    if m > (problem.form.small_tokens if target.supports(f"wgmma.{problem.rate}") else MAX_TOKENS):
        return False
    return _SERVES[problem.activations](problem, target, m)


def _serves_16_bit(problem: Gemm, target: Target, m: int) -> bool:
    """Up to 8 tokens always, up to 16 without wgmma or where the estimate says so."""
    if m <= TOKENS_PER_TILE or not target.supports("wgmma.f16"):
        return True
    found = _cheapest(problem, target, m)
    if found is None or problem.n * problem.k >= _LARGE:
        return False
    start, per_million = _STREAM_K_US
    return _START_US + cost(found, problem, target) < start + per_million * problem.n * problem.k / 1e6


def _serves_bytes(problem: Gemm, target: Target, m: int) -> bool:
    """Up to 16 without wgmma or for small weights, up to 8 for larger and up to 32 for still smaller ones with k
    undivided, where the estimate says so; never where no CTA can hold its part of X."""
    wide, weights = m > MAX_TOKENS, problem.n * problem.k
    found = _cheapest(problem, target, _held(problem, m))
    if found is None:
        return False
    if not wide and (weights < _LARGE_BYTES or not target.supports("wgmma.s8")):
        return True
    if m <= TOKENS_PER_TILE:
        other = stream_k.us(stream_k.choose(problem, target, m), problem, target, m) - _OVERRATED_US
        return _FEW_START_US + cost(found, problem, target) < other
    if found.kc > 1 or weights > _MIDDLE_BYTES:
        return False
    start, per_million = _STREAM_K_BYTES_US
    return not wide or _START_BYTES_US + cost(found, problem, target) < start + per_million * weights / 1e6


def _serves_e4m3(problem: Gemm, target: Target, m: int) -> bool:
    """Wherever there is no wgmma: sm_90a has no mma.sync of e4m3 (it emulates it through f16)."""
    return not target.supports("wgmma.e4m3")


def _serves_blocks(problem: Gemm, target: Target, m: int) -> bool:
    """Up to 8 always, up to 16 for small weights or without wgmma."""
    return m <= TOKENS_PER_TILE or not target.supports("wgmma.s8") or problem.n * problem.k < _LARGE_BLOCKS


_SERVES = {"f16": _serves_16_bit, "s8": _serves_bytes, "e4m3": _serves_e4m3, "s4_s8": _serves_blocks}


def _held(problem: Gemm, m: int) -> int:
    """Tokens that the kernel for m is made for: from 17 on all that the program holds."""
    return m if m <= MAX_TOKENS else problem.form.small_tokens


@lru_cache(maxsize=256)  # asked by `serves` and by the choice, for every M
def _cheapest(problem: Gemm, target: Target, m: int) -> SmallBatch | None:
    made = every(problem, target, m)
    few = (s for s in made if not problem.form.small_pairs or s.token_tiles > 1 or s.stages <= MOST_STAGES)
    return cheapest(few, problem, target)


def tokens_for(m: int) -> int:
    """`tokens` of the kernel that serves m of them: 1, 2, 4, or 0 for whole tiles."""
    return 1 << (m - 1).bit_length() if m <= TOKENS_PER_TILE // 2 else 0


def choose(problem: Gemm, target: Target, m: int) -> SmallBatch:
    """The cheapest split of k and of the warps, by a cost that follows measurements on H200.

    Raises:
        ArgumentError: more tokens than the program holds, or a target whose shared memory cannot hold any slice of X.
    """
    most = problem.form.small_tokens
    if not 1 <= m <= most:
        raise ArgumentError("m", m, f"must be 1..{most} for the small-batch program", "use a tile program")
    found = _cheapest(problem, target, _held(problem, m))
    if found is None:
        raise ArgumentError("target", target.arch, f"has too little shared memory for K = {problem.k}", "split K")
    return found


def cheapest(schedules: Iterable[SmallBatch], problem: Gemm, target: Target) -> SmallBatch | None:
    """The cheapest schedule that fits, with the warps that usually win and an even split where there are such."""
    legal = [
        s
        for s in schedules
        if s.launch_bytes(problem, target) <= target.smem_per_block
        and s.registers(problem) * s.warps * 32 <= target.registers_per_sm
    ]
    streaming = [s for s in legal if s.stages > 1]
    usual = [s for s in streaming if s.warps in _USUAL_WARPS[min(s.token_tiles, 2)]]
    even = [s for s in usual if problem.units % (s.kc * s.warps) == 0]
    return min(even or usual or streaming or legal, key=lambda s: cost(s, problem, target), default=None)


def every(problem: Gemm, target: Target, m: int) -> Iterator[SmallBatch]:
    """`candidates` for m tokens; and, of forms that have such, those where pairs of CTAs along k are clusters."""
    tiles = -(-m // TOKENS_PER_TILE)
    made = [*candidates(problem, target, tiles)]
    if not problem.form.small_pairs:
        yield from made
        return
    if tiles == 1 and target.supports("cluster"):
        made += [replace(s, joined=True) for s in candidates(problem, target, 1, kcs=range(PAIR, 17, PAIR))]
    yield from (replace(s, tokens=tokens_for(m)) for s in made)


def candidates(problem: Gemm, target: Target, token_tiles: int, kcs: range = range(1, 17)) -> Iterator[SmallBatch]:
    """Splits of k over CTAs (`kcs`) and warps with some steps each; not all of them fit."""
    cluster = 2 if token_tiles > 1 and target.supports("cluster") else 1
    for kc in kcs[: problem.units]:
        nc = min(target.sms // kc, problem.row_tiles) // cluster * cluster
        for warps in range(min(MAX_WARPS, problem.units // kc) if nc else 0, 0, -1):
            rows = -(-problem.row_tiles // nc)
            # one token tile streams best with two chunks or more, two have the more work for each
            for chunk in (c for c in (1, 2, 3, 4) if c == 1 or c <= (rows // 2 if token_tiles == 1 else rows)):
                for stages in (1, 2) if token_tiles == 2 else (1, 2, 3):
                    yield SmallBatch(token_tiles, kc, nc, warps, chunk, stages, cluster)


def cost(s: SmallBatch, problem: Gemm, target: Target) -> float:
    """Microseconds up to a constant, to compare schedules of one problem.

    Costs are those measured for its resident rows; others count as the next more, or the most listed.
    """
    costs = COSTS[problem.form_name].small_batch
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
        + c.x * items * problem.x_bytes * s.x_rows / TOKENS_PER_TILE / s.cluster
        + c.joined * s.joined
        + (c.kc * shares + c.split) * (shares > 1)
        + c.items * steps * s.chunk * s.warps / 16
        + c.sums * chunks * s.chunk * s.x_rows / TOKENS_PER_TILE * s.warps / 128
    )
