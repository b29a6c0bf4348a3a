"""Schedules of the program that quantizes activations: how many warps hold a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules.rows import MAX_WARPS, RESIDENT, SMALL_ROWS, VECTOR, Held

MAX_VECTORS = 8
LARGEST_K = MAX_WARPS * 32 * MAX_VECTORS * VECTOR
_VECTORS = 4  # loads in flight for each thread where rows are many: enough bytes, few registers
_SHORT_VECTORS = 2  # the same for rows of up to 8192 without gains, on all threads that an SM can hold
_RESIDENT_SHORT = 2048  # 32 each
_SHORT_K = 8192
_EARLY_K = 2048  # such rows are too few bytes to hide the time that gains take behind them: 9 to 29 % (RMSNorm)
# Sixteenths of (the first wave's rows, a later row). H200, 1024 and 4096 rows of up to 8192 without gains: half takes 2
# to 8 % less time than all and 5 to 11 % less than none. Long rows with gains want all
_SHARES_SHORT, _SHARES, _SHARES_EARLY, _SHARES_GAIN, _SHARES_LONG_GAIN = (8, 8), (10, 8), (12, 8), (8, 8), (16, 16)


@dataclass(frozen=True)
class QuantizeRows(Held):
    """Rows with gains.

    Attributes:
        persistent: no more CTAs than fit at a time, each with many rows and its gains in registers.
        early: gains are read before the kernel ahead has ended, not after the row.
    """

    persistent: bool = False
    early: bool = False


def many(target: Target, m: int) -> bool:
    """Whether m rows fill the device: then bandwidth counts, below it the time of one row. The two buckets of M."""
    return m > 2 * target.sms


def choose(k: int, target: Target, m: int, gain: bool = False) -> QuantizeRows:
    """Few rows: as many warps as a row has vectors for. Many rows: about four vectors for each thread, little waste, or
    two where rows are short and have no gains.

    Raises:
        ArgumentError: k above LARGEST_K, whose rows no CTA holds.
    """
    total = -(-k // 16) * 2  # vectors of a row, padding included
    if k > LARGEST_K:
        raise ArgumentError("K", k, f"must be at most {LARGEST_K}: a row is held in the registers of a CTA", "split K")
    if not many(target, m):
        vectors = -(-total // (32 * MAX_WARPS))
        warps = -(-total // (32 * vectors))
        return QuantizeRows(warps, 1, vectors, _resident(target, 32 * warps, vectors, gain, RESIDENT))
    pdl = target.supports("pdl")
    short = pdl and not gain and 32 * _VECTORS < total and k <= _SHORT_K
    if total <= 32 * _VECTORS:
        warps, rows, vectors = 1, SMALL_ROWS, -(-total // 32)
    else:
        vectors = _SHORT_VECTORS if short else max(_VECTORS, -(-total // (32 * 16)))
        vectors = vectors if vectors <= MAX_VECTORS else -(-total // (32 * MAX_WARPS))
        warps, rows = -(-total // (32 * vectors)), 1
    # long rows with a gain, which is then read once for each CTA: 27 % less time
    if pdl and gain and vectors > _VECTORS and total <= 32 * MAX_WARPS * _VECTORS:
        return _staying(total, _VECTORS)
    threads = 32 * warps * rows
    if short or gain:
        most = (_RESIDENT_SHORT if short else RESIDENT) // threads * threads
    else:
        most = max(1, round(RESIDENT / threads)) * threads
    resident = _resident(target, threads, vectors, gain, most)
    if not pdl:
        return QuantizeRows(warps, rows, vectors, resident)
    if not gain:
        return QuantizeRows(warps, rows, vectors, resident, *(_SHARES_SHORT if short else _SHARES))
    early = k <= _EARLY_K
    shares = _SHARES_EARLY if early else _SHARES_GAIN if k <= _SHORT_K else _SHARES_LONG_GAIN
    return QuantizeRows(warps, rows, vectors, resident, *shares, early=early)


def _staying(total: int, vectors: int) -> QuantizeRows:
    """CTAs that keep their gains over many rows."""
    threads = 32 * -(-total // (32 * vectors))
    room = 65536 // (72 if vectors == _VECTORS else 128)  # gains, words and what they become, in registers
    return QuantizeRows(threads // 32, 1, vectors, room // threads * threads, 16, 16, True)


def _resident(target: Target, threads: int, vectors: int, gain: bool, most: int) -> int:
    """`most`, or one CTA where more makes ptxas spill: long rows with a gain, before sm_90."""
    return threads if gain and vectors > _VECTORS and not target.supports("pdl") else most


def candidates(k: int, target: Target, m: int, gain: bool = False) -> list[QuantizeRows]:
    """What `choose` takes first, then what may be faster for many rows: other shapes and shares fetched early."""
    first = choose(k, target, m, gain)
    found = [first]
    if not many(target, m) or not target.supports("pdl"):
        return found
    total = -(-k // 16) * 2
    plain = replace(first, persistent=False)
    found += [replace(plain, early=not plain.early)] if gain else []
    found += [replace(plain, ahead=ahead, later=later) for ahead, later in ((0, 0), (8, 0), (8, 8), (12, 8), (16, 16))]
    for vectors in (_VECTORS, MAX_VECTORS) if gain else ():
        threads = 32 * -(-total // (32 * vectors))
        if 256 <= threads <= min(1024, 65536 // (72 if vectors == _VECTORS else 128)):
            found.append(_staying(total, vectors))
    return list(dict.fromkeys(found))
