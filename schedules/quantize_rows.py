"""Schedules of the program that quantizes activations: how many warps hold a row."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

VECTOR = 8  # values of one 16-byte load
MAX_WARPS = 32
MAX_VECTORS = 8
LARGEST_K = MAX_WARPS * 32 * MAX_VECTORS * VECTOR
_VECTORS = 4  # loads in flight for each thread where rows are many: enough bytes, few registers
_SMALL_ROWS = 4  # rows of a CTA where a warp holds a whole one


@dataclass(frozen=True)
class QuantizeRows:
    """`rows` rows of `warps` warps in a CTA; a thread holds `vectors` vectors of 8 values. rows > 1 needs warps = 1."""

    warps: int
    rows: int
    vectors: int

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def many(target: Target, m: int) -> bool:
    """Whether m rows fill the device: then bandwidth counts, below it the time of one row. The two buckets of M."""
    return m > 2 * target.sms


def choose(k: int, target: Target, m: int) -> QuantizeRows:
    """Few rows: as many warps as a row has vectors for. Many rows: about four vectors for each thread, little waste.

    Raises:
        ArgumentError: k above LARGEST_K, whose rows no CTA holds.
    """
    total = -(-k // 16) * 2  # vectors of a row, padding included
    if k > LARGEST_K:
        raise ArgumentError("K", k, f"must be at most {LARGEST_K}: a row is held in the registers of a CTA", "split K")
    aim = _VECTORS if many(target, m) else 1
    if total <= 32 * aim:
        return QuantizeRows(1, _SMALL_ROWS if many(target, m) else 1, -(-total // 32))
    most = 16 if many(target, m) else MAX_WARPS
    vectors = max(aim, -(-total // (32 * most)))
    vectors = vectors if vectors <= MAX_VECTORS else -(-total // (32 * MAX_WARPS))
    return QuantizeRows(-(-total // (32 * vectors)), 1, vectors)
