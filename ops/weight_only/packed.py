"""What packed weights of every format of `terrazzo.ops.products` are to the host code that multiplies them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.linear.operand import FACTOR_BYTES
from terrazzo.ops.products.codes import BLOCK_ROWS, SCALE_BYTES, Codes, get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.weight.base import Canonical, Fields, Form, Packed
from terrazzo.ops.weight_only import small_scales

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.packed import PackedLayout
    from terrazzo.layouts.rows import RowLayout

BLOCK_N, BLOCK_K = BLOCK_ROWS, 128
"""Rows and input channels that a packed weight is padded to."""


class WeightOnly(Packed[Form]):
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

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity(self.weight)

    def check_facts(self) -> None:
        """Raise ArgumentError unless n, k, group_size and scale_dtype are such as `pack` writes."""
        super().check_facts()
        if self.scale_dtype not in self.format.scales:
            constraint = f"must be one of {self.format.scales} in {self.weight}"
            raise ArgumentError("scale_dtype", self.scale_dtype, constraint, "pack the weight again")

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scales, zero points, factors of rows) as the bytes of the records hold them; empty ones are stored nowhere.

        [Np/64, G', 64] in the order of the layout; scales in their dtype, small ones as uint8.
        """
        import torch

        form, held = self.format, self.params.transpose(0, 1)
        stored = held.shape[1] - (FACTOR_BYTES // held.shape[2] if form.row_factors else 0)
        size = BLOCK_N * SCALE_BYTES[self.scale_dtype] * form.record_groups
        scales, zeros = held[:, :stored, :size], held[:, :stored, size:]
        if self.scale_dtype == "e4m3":
            scales = small_scales.bytes_of(scales)
        elif self.scale_dtype != "e8m0":
            scales = scales.contiguous().view(getattr(torch, self.scale_dtype))
        return scales, zeros, held[:, stored:].contiguous().view(torch.float32)

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(codes [N, K], scales [N, G], zero points [N, G], factors [N]) as they are stored, in plain rows."""
        layout, rows = layout_of(self.format), row_order(self.format)
        scales, zeros, factors = self._parts()
        codes = layout.unpack(self.words, self.n, self.words.shape[0] * layout.block_k)
        plain = lambda held: rows.unpack(held, self.n)[:, : -(-self.k // self.group_size)].contiguous()
        scales, zeros = (plain(held) if held.numel() else held for held in (scales, zeros))
        return codes[:, : self.k].contiguous(), scales, zeros, factors.flatten()[: self.n]


def records(
    weight: Canonical, scales: torch.Tensor | None, zeros: torch.Tensor | None, factors: torch.Tensor | None
) -> Fields:
    """`words` and `params` of a canonical weight of a format.

    Args:
        scales: [N, G] as they are stored, None where rows have factors alone. zeros: uint8 [N, G], or None.
        factors: float32 [N, 1], or None.
    """
    import torch

    form, (np_, kp) = weight.format, padded(weight.n, weight.k)
    layout, rows, small = layout_of(form), row_order(form), weight.scale_dtype == "e4m3"
    groups = 1 if form.one_group and weight.group_size >= weight.k else kp // weight.group_size
    filled = lambda values, columns: torch.nn.functional.pad(
        values, (0, columns - values.shape[1], 0, np_ - values.shape[0])
    )
    parts = []
    if scales is not None:
        held = rows.pack(filled(scales, groups)).contiguous()
        held = small_scales.words_of(held) if small else held.view(torch.uint8)
        parts.append(held if zeros is None else torch.cat([held, rows.pack(filled(zeros, groups))], dim=-1))
    if factors is not None:
        width = BLOCK_N * SCALE_BYTES[weight.scale_dtype] * form.record_groups
        parts.append(filled(factors, 1).contiguous().view(torch.uint8).view(np_ // BLOCK_N, -1, width))
    words = layout.pack(filled(weight.codes, kp)).contiguous()
    return {"words": words, "params": torch.cat([part.transpose(0, 1) for part in parts]).contiguous()}


def padded(n: int, k: int) -> tuple[int, int]:
    """(Np, Kp)."""
    return -(-n // BLOCK_N) * BLOCK_N, -(-k // BLOCK_K) * BLOCK_K


def layout_of(form: Codes) -> PackedLayout:
    """The layout of a format's codes."""
    from terrazzo.layouts.instances import get_instance

    return get_instance(of_codes(form).layout)


def row_order(form: Codes) -> RowLayout:
    """The order of its scales of 64 rows."""
    from terrazzo.layouts.rows import derive_rows

    layout = layout_of(form)
    return derive_rows(layout.fragment, layout.block_rows)


@cache
def layout_identity(weight: str) -> str:
    """Of the layout that the kernels of this version read."""
    return layout_of(get_codes(weight)).identity


def kind_of(weight: str) -> type[WeightOnly[Any]]:
    """The class of packed weights of a format."""
    return import_module(f"terrazzo.ops.{of_codes(weight).module}").PackedWeight


def facts_of(w: WeightOnly[Any]) -> dict[str, int | bool | str]:
    """What chooses a weight's kernels besides its sizes."""
    return dict(group_size=w.group_size, symmetric=w.symmetric, scale_dtype=w.scale_dtype, weight=w.weight)
