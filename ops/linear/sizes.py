"""Sizes of a packed weight as programs use them: numbers that the compiler knows, or what comes with a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.products.codes import BLOCK_ROWS
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Expr

UNIT_K = 128
"""k extent that padded weights are a multiple of: a unit of work."""


def shapeless(params: Mapping[str, Any], out_bytes: int = 2) -> dict[str, Any]:
    """Parameters of the kernel that serves every [n, k], with a bias or without, in place of one made for a shape.

    Args:
        params: of the latter. out_bytes: of an element of y; rows that are whole pieces of 16 bytes are told apart.
    """
    return {**params, "n": 0, "k": 0, "bias": False, "whole": params["n"] * out_bytes % 16 == 0}


@dataclass(frozen=True)
class Sizes:
    """Of the matrices [n, k] of a program; each an int, or an int32 expression of the shapes that a launch brings.

    Attributes:
        n, k: features, unpadded.
        units: of 128 k, padding included.
        blocks: row blocks of 64, padding included.
        word_blocks: packed blocks along k of all matrices, the first extent of W.
        records: of parameters of 64 rows, in P of a matrix.
        bias: extent of B.
        has_bias: whether B is added.
        whole: whether rows of y are whole 16-byte pieces.
    """

    n: Expr
    k: Expr
    units: Expr
    blocks: Expr
    word_blocks: Expr
    records: Expr
    bias: Expr
    has_bias: Expr
    whole: bool

    @property
    def known(self) -> bool:
        """Whether they are numbers."""
        return isinstance(self.units, int)


def sizes(op: Operand, n: int, k: int, *, bias: bool, whole: bool, matrices: int = 1) -> Sizes:
    """The sizes that a program is built for: those of [n, k] or, with n = k = 0, of whatever is launched.

    Args:
        bias: whether the kernel adds one; a generic kernel looks at the extent of B, which is n of every matrix or
            something else.
        whole: whether n is a multiple of 8, for generic kernels.
        matrices: experts, one matrix after the other, or 1.

    Raises:
        ArgumentError: only one of n and k is 0.
    """
    if (n == 0) != (k == 0):
        raise ArgumentError("n", n, f"and k = {k} are both 0 (a generic kernel) or neither", "pass both, or neither")
    if n:
        units, blocks = -(-k // UNIT_K), -(-n // BLOCK_ROWS)
        kp = units * UNIT_K
        words = matrices * op.format.blocks(kp)
        extent = matrices * n if bias else 1
        return Sizes(n, k, units, blocks, words, op.records(kp), extent, bias, n % 8 == 0)
    n, k, blocks, words, extent = (T.dynamic(name) for name in ("n", "k", "blocks", "words", "bias"))
    units = words // (op.format.blocks(UNIT_K) * matrices)
    records = op.records(units * UNIT_K)
    return Sizes(n, k, units, blocks, words, records, extent, extent == matrices * n, whole)
