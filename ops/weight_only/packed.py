"""What packed weights of every format of `terrazzo.ops.products` are to the host code that multiplies them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from terrazzo.ops import weights
from terrazzo.ops.products.codes import BLOCK_ROWS, BLOCK_WORDS, HALVES, Codes, get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.packed import PackedLayout
    from terrazzo.layouts.rows import RowLayout

BLOCK_N, BLOCK_K = BLOCK_ROWS, 128
"""Rows and input channels that a packed weight is padded to."""


class WeightOnly(weights.Packed):
    """A packed weight in the derived layout that every kernel of its format reads. Np, Kp: padded sizes.

    Attributes:
        weight: name of the format.
        words: int32 [Kp/KB, Np/64, 512], blocks of KB k of the format.
        params: uint8 [records, Np/64, bytes of a record].
        group_size: k of a scale, or K. scale_dtype: of scales. symmetric: whether no zero points are stored.
        perm: int32 [K] | None (act-order). bias: [N] | None.
        target: architecture it was packed for, None for any (today one layout serves all targets).
    """

    weight: str
    params: torch.Tensor
    group_size: int
    scale_dtype: str
    symmetric: bool
    perm: torch.Tensor | None
    bias: torch.Tensor | None
    target: str | None

    @property
    def format(self) -> Codes:
        """What its codes are, a value of `terrazzo.ops.products.codes`."""
        return get_codes(self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel streams: words and params, padding included."""
        return self.words.numel() * 4 + self.params.numel()

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity(self.weight)

    def check_sizes(self) -> None:
        """Raise ArgumentError unless words and params have the shapes and dtypes that n, k and group_size ask for."""
        words, params = packed_shapes(
            self.n, self.k, group_size=self.group_size, scale_dtype=self.scale_dtype, symmetric=self.symmetric,
            weight=self.weight,
        )  # fmt: skip
        weights.check_tensor(self, "words", words, "int32")
        weights.check_tensor(self, "params", params, "uint8")


def padded(n: int, k: int) -> tuple[int, int]:
    """(Np, Kp)."""
    return -(-n // BLOCK_N) * BLOCK_N, -(-k // BLOCK_K) * BLOCK_K


def packed_shapes(
    n: int, k: int, *, group_size: int, scale_dtype: str, symmetric: bool, weight: str
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of words and params."""
    from terrazzo.ops.linear.operand import Operand

    codes, (np_, kp) = get_codes(weight), padded(n, k)
    dtype = scale_dtype if scale_dtype in HALVES else HALVES[0]
    group = 0 if group_size >= k and codes.one_group else group_size
    numerics = choose_way(codes, scale_dtype, dtype, False).name
    operand = Operand(group, symmetric, scale_dtype, dtype, numerics, weight)
    words = (codes.blocks(kp), np_ // BLOCK_N, BLOCK_WORDS)
    return words, (operand.records(kp), np_ // BLOCK_N, operand.record_bytes)


def layout_of(codes: Codes) -> PackedLayout:
    """The layout of a format's codes."""
    from terrazzo.layouts.instances import get_instance

    return get_instance(of_codes(codes).layout)


def row_order(codes: Codes) -> RowLayout:
    """The order of its scales of 64 rows."""
    from terrazzo.layouts.rows import derive_rows

    layout = layout_of(codes)
    return derive_rows(layout.fragment, layout.block_rows)


@cache
def layout_identity(weight: str) -> str:
    """Of the layout that the kernels of this version read."""
    return layout_of(get_codes(weight)).identity


def kind_of(weight: str) -> type[WeightOnly]:
    """The class of packed weights of a format."""
    return import_module(f"terrazzo.ops.{of_codes(get_codes(weight)).module}").PackedWeight


def facts_of(w: WeightOnly) -> dict[str, Any]:
    """What chooses a weight's kernels besides its sizes."""
    return dict(group_size=w.group_size, symmetric=w.symmetric, scale_dtype=w.scale_dtype, weight=w.weight)
