"""Packed order of per-row parameters (scales, zero points) beside a packed operand (specs.md B.3).

A thread of an A fragment touches the rows {g, g + 8} of its warp: packed as (warp, g, pair) its parameters are
adjacent, so one load fetches both. The order is derived: value bits that move the row come first, then thread bits,
then atoms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.linear import LinearMap, bits_of
from terrazzo.lowering.errors import LayoutError


@dataclass(frozen=True)
class RowLayout:
    """Order of the parameters of a block's rows.

    Attributes:
        block_rows: R, rows of a block.
        pair: parameters that one thread finds adjacent (2 for A fragments: rows g and g + 8).
        map: LinearMap (slot) -> (row).
        lanes: LinearMap (thread) -> (slot), the slot of a thread's first parameter (its atom 0).
    """

    block_rows: int
    pair: int
    map: LinearMap
    lanes: LinearMap

    @cached_property
    def index(self) -> np.ndarray:
        """Row of every slot, int64 [R]."""
        return self.map.table()

    def slot(self, thread):
        """First slot of a thread's parameters: slots slot .. slot + pair - 1 are its rows in register order."""
        return self.lanes(thread=thread)["slot"]

    def pack(self, values):
        """[N, G] per-row, per-group values (numpy or torch) to [ceil(N / R), G, R]; rows added at the end are 0."""
        values, torch = _two_dimensional(values)
        n, groups = values.shape
        blocks = -(-n // self.block_rows)
        if blocks * self.block_rows != n:
            whole = values.new_zeros if torch else lambda shape: np.zeros(shape, values.dtype)
            padded = whole((blocks * self.block_rows, groups))
            padded[:n] = values
            values = padded
        tiles = values.reshape(blocks, self.block_rows, groups)[:, self.index]
        return tiles.permute(0, 2, 1).contiguous() if torch else np.ascontiguousarray(tiles.transpose(0, 2, 1))

    def unpack(self, packed, n: int):
        """[blocks, G, R] back to [n, G]."""
        blocks, groups, rows = packed.shape
        if rows != self.block_rows or not 0 <= n <= blocks * rows:
            constraint = f"must be [ceil({n} / {self.block_rows}), G, {self.block_rows}]"
            raise LayoutError("packed", tuple(packed.shape), constraint, "pack with this layout")
        back = np.argsort(self.index)
        return packed[:, :, back].swapaxes(1, 2).reshape(blocks * rows, groups)[:n]


def _two_dimensional(values):
    torch = type(values).__module__.split(".")[0] == "torch"
    values = values if torch else np.asarray(values)
    if len(values.shape) != 2:
        raise LayoutError("values", tuple(values.shape), "must be [N, G]", "one column for each group along K")
    return values, torch


def derive_rows(fragment: Fragment, block_rows: int) -> RowLayout:
    """The parameter order of a packed block over this fragment.

    Args:
        fragment: the operand tile whose rows carry parameters.
        block_rows: rows of the packed block, a multiple of the fragment's; further atoms follow one after another.
    Raises:
        LayoutError: block_rows is no power-of-two multiple of the fragment's rows.
    """
    atoms = bits_of(block_rows // fragment.rows if block_rows % fragment.rows == 0 else 0, "block_rows")
    rows = fragment.map.restrict(outs={"row": bits_of(fragment.rows)})
    widths = dict(rows.ins)
    columns, lanes, at = [], [0] * widths["thread"], 0
    for name in ("value", "thread"):
        first = 0 if rows.ins[0][0] == name else rows.ins[0][1]
        for bit, column in enumerate(rows.columns[first : first + widths[name]]):
            if not column:
                continue
            if name == "thread":
                lanes[bit] = 1 << at
            columns.append(column)
            at += 1
        if name == "value":
            pair = 1 << at
    columns += [fragment.rows << bit for bit in range(atoms)]
    width = bits_of(block_rows)
    order = LinearMap((("slot", width),), (("row", width),), tuple(columns))
    if not order.is_bijective:
        raise LayoutError("fragment", fragment.name, "does not reach each row once", "use an operand or accumulator")
    return RowLayout(
        block_rows, pair, order, LinearMap((("thread", widths["thread"]),), (("slot", width),), tuple(lanes))
    )
