"""Schedules of the small-batch program: one CTA on each SM, X resident, weights streamed by each warp for itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules.problem import WeightOnlyGemm

TOKENS_PER_TILE = 8
MAX_TOKENS = 16
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


def choose(problem: WeightOnlyGemm, target: Target, m: int) -> SmallBatch:
    """The measured best pattern that fits: few splits of k, warps that divide it evenly, rings of 30 to 70 KB.

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
        if nc < 1:
            break
        rows = -(-problem.row_tiles // nc)
        items = -(-problem.units // kc)
        for warps in (w for w in (16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1) if w <= problem.units // kc):
            for chunk, stages in ((4, 2), (3, 2), (2, 2), (2, 1), (1, 2)):
                schedule = SmallBatch(tiles, kc, nc, warps, min(chunk, rows), stages, cluster)
                if (
                    schedule.smem_bytes(problem) > target.smem_per_block
                    or schedule.registers() * warps * 32 > target.registers_per_sm
                ):
                    continue
                cost = _cost(schedule, rows, items)
                if cost < best_cost:
                    best, best_cost = schedule, cost
    if best is None:
        raise ArgumentError("target", target.arch, f"has too little shared memory for K = {problem.k}", "split K")
    return best


def _cost(s: SmallBatch, rows: int, items: int) -> float:
    """Relative time: item steps of the busiest warp, weighted with what was measured around them."""
    depth = -(-items // s.warps)  # items of the busiest warp along k
    work = rows * depth * s.warps / 16  # a warp's share of the SM's bandwidth grows as warps shrink
    in_flight = s.warps * s.stages * s.chunk  # KB
    work *= (1 + 0.5 * max(0.0, 32 - in_flight) / 32) * (1 + 0.02 * (16 - s.warps))
    reductions = 0.225 * rows / s.chunk
    split = 6.0 + 0.6 * s.kc if s.kc > 1 else 0.6
    return work + reductions + split
