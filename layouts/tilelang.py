"""TileLang's own objects of what is derived here: a Layout of a packed operand, a Fragment of one in registers.

A map over bits is written with //, % and + of TileLang's index expressions. Nothing here names a format:
whatever `derive` makes has a Layout, and whatever a Fragment describes has TileLang's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.linear import LinearMap
from terrazzo.layouts.packed import PackedLayout
from terrazzo.layouts.units import UnitLayout
from terrazzo.lowering.errors import LayoutError
from terrazzo.lowering.toolchain import import_tilelang

if TYPE_CHECKING:
    from tilelang import language

__all__ = ["expressions", "fragment", "layout"]


def __dir__() -> list[str]:
    return __all__


def expressions(bits: LinearMap, **at: Any) -> dict[str, Any]:
    """The map `bits` at TileLang expressions, ints or arrays, ``at`` each input: name of an output -> expression.

    Bits that stay neighbours are one // and one %. A XOR of bits is their sum modulo 2, as in TileLang's own layouts:
    its simplifier knows sums.

    Raises:
        LayoutError: an input is missing, or is none of the map's.
    """
    missing = {name for name, _ in bits.ins} ^ set(at)
    if missing:
        raise LayoutError("at", tuple(sorted(missing)), "must name every input once", f"pass {dict(bits.ins)}")
    inputs = [(at[name], bit) for name, width in bits.ins for bit in range(width)]
    made, first = {}, 0
    for name, width in bits.outs:
        rows = [[i for i, column in enumerate(bits.columns) if column >> first + bit & 1] for bit in range(width)]
        made[name], bit, first = 0, 0, first + width
        while bit < width:
            run = 1
            while len(rows[bit]) == 1 and bit + run < width and _follows(inputs, rows[bit], rows[bit + run], run):
                run += 1
            part = sum(inputs[i][0] // 2 ** inputs[i][1] % 2**run for i in rows[bit])
            made[name] += (part % 2 if len(rows[bit]) > 1 else part) * 2**bit
            bit += run
    return made


def _follows(inputs: list[tuple[Any, int]], one: list[int], other: list[int], after: int) -> bool:
    """Whether a row of one bit is that many bits after another, in the same input."""
    return other == [one[0] + after] and inputs[other[0]][1] == inputs[one[0]][1] + after


def fragment(atom: Fragment, rows: int, cols: int) -> language.Fragment:
    """Where T.gemm finds an operand, or leaves sums, of [rows, cols]: (row, col) -> (thread, index in its registers).

    `atom` is the instruction's. Further rows are other warps', or warpgroups'; further columns are further registers of
    the same threads. Warps that hold the same elements follow by ``.replicate``, a method of the result.

    Raises:
        LayoutError: sizes that are not whole atoms.
        ToolchainError: TileLang is not installed.
    """
    _whole("rows", rows, atom.rows)
    _whole("cols", cols, atom.cols)
    back = atom.map.inverse()

    def forward(row: Any, col: Any) -> tuple[Any, Any]:
        to = expressions(back, row=row % atom.rows, col=col % atom.cols)
        return row // atom.rows * atom.threads + to["thread"], col // atom.cols * atom.values + to["value"]

    import_tilelang()
    from tilelang import language

    return language.Fragment((rows, cols), forward_fn=forward)


def layout(packed: PackedLayout | UnitLayout, n: int, k: int) -> language.Layout:
    """Where `pack` puts a code of an operand [n, k]: (row, k) -> (index of a block or unit ..., word of it, field).

    A field is ``storage_bits`` of a word as a converter sees it; `bit_map` says where formats store its bits.

    Raises:
        LayoutError: sizes that are not whole blocks.
        ToolchainError: TileLang is not installed.
    """
    block = packed.block if isinstance(packed, UnitLayout) else packed
    depth = packed.unit_k if isinstance(packed, UnitLayout) else packed.block_k
    _whole("n", n, block.block_rows)
    _whole("k", k, depth)
    address = (LinearMap.identity({"field": block.map.ins[0][1]}) * block.memory) @ block.map.inverse()

    def forward(row: Any, col: Any) -> list[Any]:
        to = expressions(address, row=row % block.block_rows, k=col % block.block_k)
        rows, blocks = row // block.block_rows, col // depth
        if isinstance(packed, UnitLayout):
            word = col % depth // block.block_k * block.words_per_block + to["address"]
            return [blocks, rows, word, to["field"]]
        return [*((rows, blocks) if block.block_order == "rk" else (blocks, rows)), to["address"], to["field"]]

    import_tilelang()
    from tilelang import language

    return language.Layout((n, k), forward)


def _whole(name: str, size: int, of: int) -> None:
    if type(size) is not int or size < 1 or size % of:
        raise LayoutError(name, size, f"must be a positive multiple of {of}", "pad the operand")
