"""The head-dimension permutation P_X that lets a low-bit key row go through ldmatrix (specs.md B.5 has its formula).

ldmatrix hands out b16 units. A unit of a low-bit row holds X = 16 / bits dimensions, so a thread receives 2X
neighbouring dimensions where the MMA's A fragment expects two. Sending its pairs to X consecutive k16 slices makes
every register right, and the price is a fixed order of the head dimensions in which Q is read and O is written. Here
that order is the composition of two maps: what ldmatrix delivers, after what the fragment asks for, inverted.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.linear import LinearMap, bits_of
from terrazzo.lowering.errors import LayoutError

A_TILE = {"row": 4, "col": 4}


def a_tile_addresses() -> LinearMap:
    """(lane) -> (row, col): canonical ldmatrix.x4 addresses of a 16 x 16 tile of b16 units, row-major."""
    return LinearMap.from_function(lambda lane: {"row": lane % 16, "col": 8 * (lane // 16)}, {"lane": 5}, A_TILE)


def head_map(bits: int) -> LinearMap:
    """P_X on one span of 16 * X dimensions: (k) -> (dim), operand position to real head dimension.

    Args:
        bits: width of a packed key element (16, 8, 4, 2); X = 16 / bits.
    Raises:
        LayoutError: another width.
    """
    if bits not in (2, 4, 8, 16):
        raise LayoutError("bits", bits, "keys have 2, 4, 8 or 16 bits", "use one of these")
    x = bits_of(16 // bits)
    delivered = Fragment.ldmatrix(4).through(a_tile_addresses(), bits)  # (value, thread) -> (row, dim)
    slices = LinearMap.reshape({"slice": x}, {"col": x})
    asked = Fragment.mma_a(16).map * slices  # (value, thread, slice) -> (row, k)
    # a thread's dimensions, in order: element, slice, register
    split = LinearMap.reshape({"value": 3 + x}, {"element": 1, "slice": x, "register": 2})
    merge = LinearMap.reshape({"element": 1, "register": 2}, {"pair": 3}) * LinearMap.identity({"slice": x})
    threads = LinearMap.identity({"thread": 5})
    route = ((merge @ split.order([], ["element", "register"])).rename(pair="held")) * threads
    wanted = asked.rename(value="held") @ route  # (value, thread) -> (row, k) over the same register contents
    whole = delivered.rename(col="dim") @ wanted.rename(col="k").inverse()
    return whole.restrict({"k": 4 + x}, {"dim": 4 + x})


def head_permutation(bits: int, head_dim: int) -> np.ndarray:
    """P_X over a whole head, int64 [head_dim]: operand column j holds head dimension P_X[j].

    Q is read as Q[..., P_X]; the rows of O^T come out in the same order, so O[..., P_X] = rows. For bits = 16 it is the
    identity. head_dim must be a multiple of 16 * X (LayoutError).
    """
    span = head_map(bits).table()
    if head_dim % len(span) or head_dim < 1:
        raise LayoutError(
            "head_dim", head_dim, f"must be a multiple of {len(span)} for {bits}-bit keys", "pad the head"
        )
    return (np.arange(0, head_dim, len(span))[:, None] + span).reshape(-1)
