"""Schedules of the program that quantizes activations: how many warps hold a row."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target

VECTOR = 8  # values of one 16-byte load
MAX_WARPS = 32
MAX_VECTORS = 8
LARGEST_K = MAX_WARPS * 32 * MAX_VECTORS * VECTOR
_VECTORS = 4  # loads in flight for each thread where rows are many: enough bytes, few registers
_SMALL_ROWS = 4  # rows of a CTA where a warp holds a whole one
_RESIDENT = 1024  # threads of an SM that have 64 registers each
_RESIDENT_GAIN = 1152  # with gains in 56; with 48, loads wait for one another


@dataclass(frozen=True)
class QuantizeRows:
    """`rows` rows of `warps` warps in a CTA; a thread holds `vectors` vectors of 8 values. rows > 1 needs warps = 1.

    Attributes:
        resident: threads that an SM is to hold; limits their registers.
        ahead: CTAs of the first wave fetch their rows into L2 before the kernel ahead of them has ended.
        waves: how many waves of CTAs before its turn a row is fetched into L2; 0 for not at all. Above 1 only with
            `ahead`, which fetches the rows of the first waves.
        persistent: no more CTAs than fit at a time, each with many rows and its gains in registers.
    """

    warps: int
    rows: int
    vectors: int
    resident: int = _RESIDENT
    ahead: bool = False
    waves: int = 0
    persistent: bool = False

    def params(self) -> dict[str, int]:
        """Arguments of the program's `build`."""
        return asdict(self)


def many(target: Target, m: int) -> bool:
    """Whether m rows fill the device: then bandwidth counts, below it the time of one row. The two buckets of M."""
    return m > 2 * target.sms


def choose(k: int, target: Target, m: int, gain: bool = False) -> QuantizeRows:
    """Few rows: as many warps as a row has vectors for. Many rows: about four vectors for each thread, little waste.

    Raises:
        ArgumentError: k above LARGEST_K, whose rows no CTA holds.
    """
    total = -(-k // 16) * 2  # vectors of a row, padding included
    if k > LARGEST_K:
        raise ArgumentError("K", k, f"must be at most {LARGEST_K}: a row is held in the registers of a CTA", "split K")
    if not many(target, m):
        vectors = -(-total // (32 * MAX_WARPS))
        warps = -(-total // (32 * vectors))
        return QuantizeRows(warps, 1, vectors, _resident(target, 32 * warps, vectors, gain, _RESIDENT))
    pdl = target.supports("pdl")
    if total <= 32 * _VECTORS:
        warps, rows, vectors = 1, _SMALL_ROWS, -(-total // 32)
    else:
        vectors = max(_VECTORS, -(-total // (32 * 16)))
        vectors = vectors if vectors <= MAX_VECTORS else -(-total // (32 * MAX_WARPS))
        warps, rows = -(-total // (32 * vectors)), 1
    # H200, 1024 rows of 8192 to 28672: rows in L2 a wave before their turn are 1 to 10 % faster, with the first wave's
    # fetched before the kernel ahead ends; long rows with a gain, which is then read once for each CTA, 27 %
    if pdl and gain and vectors > _VECTORS and total <= 32 * MAX_WARPS * _VECTORS:
        return _staying(total, _VECTORS)
    resident = _RESIDENT_GAIN if pdl and gain and vectors <= _VECTORS else _RESIDENT
    resident = _resident(target, 32 * warps * rows, vectors, gain, resident)
    return QuantizeRows(warps, rows, vectors, resident, ahead=pdl, waves=int(pdl))


def _staying(total: int, vectors: int, waves: int = 1) -> QuantizeRows:
    """CTAs that keep their gains over many rows."""
    threads = 32 * -(-total // (32 * vectors))
    room = 65536 // (72 if vectors == _VECTORS else 128)  # gains, words and what they become, in registers
    return QuantizeRows(threads // 32, 1, vectors, room // threads * threads, True, waves, True)


def _resident(target: Target, threads: int, vectors: int, gain: bool, most: int) -> int:
    """`most`, or one CTA where more makes ptxas spill: long rows with a gain, before sm_90."""
    return threads if gain and vectors > _VECTORS and not target.supports("pdl") else max(most, threads)


def candidates(k: int, target: Target, m: int, gain: bool = False) -> list[QuantizeRows]:
    """What `choose` takes first, then what may be faster for many rows: rows fetched early, CTAs that stay."""
    first = choose(k, target, m, gain)
    found = [first]
    if not many(target, m) or not target.supports("pdl"):
        return found
    total = -(-k // 16) * 2
    plain = replace(first, persistent=False)
    found += [
        replace(plain, ahead=ahead, waves=waves) for waves, ahead in ((0, True), (0, False), (1, False), (1, True))
    ]
    for vectors in (_VECTORS, MAX_VECTORS) if gain else ():
        threads = 32 * -(-total // (32 * vectors))
        if 256 <= threads <= min(1024, 65536 // (72 if vectors == _VECTORS else 128)):
            found += [_staying(total, vectors), _staying(total, vectors, waves=2)]
    return list(dict.fromkeys(found))
