"""Schedules of the programs that make a row in one pass, RMSNorm and gated activations: how many warps hold it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

VECTOR = 8  # values of one 16-byte load
MAX_WARPS = 32
MAX_VECTORS = 4  # of a thread: 32 values in float32
MAX_COLUMNS = MAX_WARPS * 32 * MAX_VECTORS * VECTOR
_SHORT_VECTORS, _LONG_VECTORS = 2, 4
FEW, PARTS = 16, 8
"""Rows so few that eight CTAs for each fit the device at once, and those CTAs: a portable cluster."""
SMALL_ROWS = 4  # rows of a CTA where a warp holds a whole one
RESIDENT = 1024  # threads of an SM that have 64 registers each


@dataclass(frozen=True)
class Held:
    """`rows` rows of `warps` warps in a CTA; a thread holds `vectors` vectors of 8 values. rows > 1 needs warps = 1.

    Attributes:
        resident: threads that an SM is to hold; limits their registers.
        ahead: sixteenths of their rows that CTAs of the first wave fetch into L2 before the kernel ahead has ended.
        later: sixteenths of a row that are fetched into L2 a wave of CTAs before its turn.
    """

    warps: int
    rows: int
    vectors: int
    resident: int = RESIDENT
    ahead: int = 0
    later: int = 0

    def params(self) -> dict[str, int]:
        """Arguments of a program's `build`."""
        return asdict(self)


@dataclass(frozen=True)
class Rows(Held):
    """With `parts` CTAs that share a row."""

    parts: int = 1


def bucket(target: Target, m: int) -> int:
    """0: rows so few that SMs are left for parts of them; 1: few; 2: as many as fill the device, where bandwidth
    counts, below it the time of one row."""
    return (m > FEW) + (m > 2 * target.sms)


def tokens(target: Target) -> tuple[int, ...]:
    """An M of each bucket."""
    return (1, FEW + 1, 2 * target.sms + 1)


def choose(k: int, target: Target, m: int, parts: int = 1) -> Rows:
    """Few rows: as many warps as a row has vectors for. Many rows: two or four vectors for each thread.

    Args:
        parts: CTAs that may share a row, where rows are few.

    Raises:
        ArgumentError: k above MAX_COLUMNS, whose rows no CTA holds.
    """
    total = -(-k // 16) * 2  # vectors of a row, padding included
    if k > MAX_COLUMNS:
        constraint = f"must be at most {MAX_COLUMNS}: a row is held in the registers of a CTA"
        raise ArgumentError("k", k, constraint, "split the rows")
    if bucket(target, m) == 0 and parts > 1 and total > 32 * MAX_WARPS:
        return Rows(-(-total // (32 * parts)), 1, 1, 32 * -(-total // (32 * parts)), parts=parts)
    if bucket(target, m) < 2:  # 8192 values on 16 warps take 4 to 10 % less time than on 32 (H100)
        most = MAX_WARPS // 2 if total <= 32 * MAX_WARPS else MAX_WARPS
        vectors = -(-total // (32 * most))
        warps = -(-total // (32 * vectors))
        return Rows(warps, 1, vectors, 32 * warps)
    if total <= 32 * _LONG_VECTORS:
        return Rows(1, SMALL_ROWS, -(-total // 32), RESIDENT)
    vectors = _SHORT_VECTORS if k <= 32 * 16 * _SHORT_VECTORS * VECTOR else _LONG_VECTORS
    warps = -(-total // (32 * vectors))
    shares = (8, 8) if target.supports("pdl") else (0, 0)
    return Rows(warps, 1, vectors, max(1, RESIDENT // (32 * warps)) * 32 * warps, *shares)
