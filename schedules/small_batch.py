"""Schedules of the small-batch program: one CTA on each SM, X resident, weights streamed by each warp for itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import WeightOnlyGemm

TOKENS_PER_TILE = 8
MAX_TOKENS = 16
_LARGE = 60e6  # weights from which two token tiles are faster on wgmma (measured on H200)
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
    """

    token_tiles: int
    kc: int
    nc: int
    warps: int
    chunk: int
    stages: int
    cluster: int = 1

    def smem_bytes(self, problem: WeightOnlyGemm) -> int:
        """Dynamic and static shared memory of one CTA."""
        items = -(-problem.units // self.kc)
        x = (self.token_tiles * 8 * (items * 128 + 8) + 64) * 2
        params = self.chunk * problem.groups_per_128 * problem.record_bytes // 16
        step = self.chunk * 256 + -(-params // 32) * 32
        partial = self.token_tiles * 8 * (self.chunk * 16 + 4)
        sums = items * problem.groups_per_128 * self.token_tiles * 8
        return x + 4 * (self.warps * self.stages * step + self.warps * partial + sums) + _RESERVED

    def registers(self) -> int:
        """Estimate of the registers of a thread: accumulators, X fragments, one item in flight."""
        return 4 * self.chunk * self.token_tiles + 24 * self.token_tiles + 56

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def serves(problem: WeightOnlyGemm, target: Target, m: int) -> bool:
    """Whether this program is the one for m tokens: up to 8 always, up to 16 for small weights or without wgmma."""
    if m > TOKENS_PER_TILE and target.supports("wgmma.f16"):
        return m <= MAX_TOKENS and problem.n * problem.k < _LARGE
    return m <= MAX_TOKENS


def choose(problem: WeightOnlyGemm, target: Target, m: int) -> SmallBatch:
    """The cheapest split of k and of the warps, by a cost that follows measurements on H200.

    Raises:
        ArgumentError: more than MAX_TOKENS tokens, or a target whose shared memory cannot hold any slice of X.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise ArgumentError("m", m, f"must be 1..{MAX_TOKENS} for the small-batch program", "use a tile program")
    tiles = -(-m // TOKENS_PER_TILE)
    cluster = 2 if tiles > 1 and target.supports("cluster") else 1
    best, best_cost = None, float("inf")
    for kc in range(1, min(16, problem.units) + 1):
        nc = min(target.sms // kc, problem.row_tiles) // cluster * cluster
        for warps in range(min(16, problem.units // kc) if nc else 0, 0, -1):
            for chunk, stages in _steps(warps, -(-problem.row_tiles // nc)):
                schedule = SmallBatch(tiles, kc, nc, warps, chunk, stages, cluster)
                if schedule.smem_bytes(problem) <= target.smem_per_block and (
                    schedule.registers() * warps * 32 <= target.registers_per_sm
                ):
                    cost = _cost(schedule, problem, target)
                    if cost < best_cost:
                        best, best_cost = schedule, cost
                    break
    if best is None:
        raise ArgumentError("target", target.arch, f"has too little shared memory for K = {problem.k}", "split K")
    return best


def _steps(warps: int, rows: int) -> list[tuple[int, int]]:
    """(chunk, stages) in order of preference: many warps take small steps, few take what fills their rows best."""
    if warps >= 15:
        return [(1, 2), (1, 1)]
    if warps >= 11:
        return [(min(4 if rows >= 16 else 2, rows), 2), (1, 2), (1, 1)]
    chunks = sorted((c for c in (4, 3, 2) if c <= rows), key=lambda c: (-(-rows // c) * c, -c))
    return [(c, 2) for c in chunks] + [(1, 2), (1, 1)]


def _cost(s: SmallBatch, problem: WeightOnlyGemm, target: Target) -> float:
    """Microseconds, to compare schedules of one problem: the busiest warp's stream, the loads of X, the reductions."""
    rows = -(-problem.row_tiles // s.nc)
    chunks = -(-rows // s.chunk)
    items = -(-problem.units // s.kc)
    padding = chunks * s.chunk * -(-items // s.warps) * s.warps / (rows * items)  # steps that hold less than they could
    item_bytes = 1024 + problem.groups_per_128 * problem.record_bytes / 4
    stream = rows * items * item_bytes * target.sms / (target.dram_gb_s * 800) * (0.65 + 0.35 * padding)
    x = items * 128 * s.token_tiles * 16 / 1024 / s.cluster  # KB, loaded by every CTA
    fewer = 16 - s.warps
    split = 1.6 + 0.1 * s.kc if s.kc > 1 else 0.0
    uneven = 0.6 if problem.units % (s.kc * s.warps) else 0.0
    return stream * (1 + 0.004 * fewer) + 0.09 * fewer + 0.013 * x + 0.17 * chunks + split + uneven
