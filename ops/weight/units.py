"""Packed weights whose scales travel with their codes, in units of 64 rows by 128 k, with a float of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.ops.weight.base import Fields, Form, Packed

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.units import UnitLayout

UNIT_K = 128
"""Input channels of a unit."""


@dataclass(frozen=True, eq=False, repr=False)
class UnitWeight(Packed[Form]):
    """A packed weight in units. Np, Kp: padded sizes.

    Attributes:
        LAYOUT: instance of terrazzo.layouts that packs codes. ACTIVATIONS: what x becomes, "int8" or "e4m3".
        DEQUANTIZATION: form of the operands, "" where a caller chooses.
        OPERAND_EXP2: operands are codes times 2 to minus it; channel scales make up for it.
        PADDING: of what belongs to the groups of padded rows and input channels, with code 0.
        words: int32 [Kp/128, Np/64, 1024 + 32 * (128 / group_size)]; a unit holds 64 rows x 128 input channels, then
            what belongs to its groups, two bytes of each row.
        channel_scales: float32 [Np], 0 in the padding.
    """

    LAYOUT: ClassVar[str]
    ACTIVATIONS: ClassVar[str]
    DEQUANTIZATION: ClassVar[str] = ""
    OPERAND_EXP2: ClassVar[int] = 0
    PADDING: ClassVar[tuple[int, int]] = (0, 0)

    words: torch.Tensor
    channel_scales: torch.Tensor
    n: int
    k: int
    group_size: int
    layout: str
    smooth: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    target: str | None = None

    @classmethod
    def _unit_layout(cls, group_size: int) -> UnitLayout:
        """Layout of a packed unit: two 64 x 64 blocks of `LAYOUT`, then two bytes for each group and row."""
        from terrazzo.layouts.units import derive_unit

        return derive_unit(cls.LAYOUT, 2, UNIT_K // group_size, 2)

    @classmethod
    def _layout_identity(cls, group_size: int) -> str:
        """Of the layout that the kernels of this version read, and of what its codes mean."""
        return cls._unit_layout(group_size).identity

    @classmethod
    def _units(
        cls, codes: torch.Tensor, records: torch.Tensor, channel_scales: torch.Tensor, group_size: int
    ) -> Fields:
        """`words` and `channel_scales`, padded.

        Args:
            codes: uint8 [N, K]. records: uint8 [N, G, 2], what belongs to the groups. channel_scales: float32 [N].
        """
        from torch.nn.functional import pad

        (n, k), unit = codes.shape, cls._unit_layout(group_size)
        np_, kp = unit.padded(n, k)
        more = (0, kp // group_size - records.shape[1], 0, np_ - n)
        planes = (pad(records[..., at], more, value=value).contiguous() for at, value in enumerate(cls.PADDING))
        words = unit.pack(pad(codes, (0, kp - k, 0, np_ - n)), *planes)
        return {"words": words, "channel_scales": pad(channel_scales * 2.0**cls.OPERAND_EXP2, (0, np_ - n))}

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `_units` takes."""
        import torch

        codes, *planes = self._unit_layout(self.group_size).unpack(self.words, self.n, self.k)
        records = torch.stack(planes, dim=-1)[:, : -(-self.k // self.group_size)].contiguous()
        return codes[:, : self.k].contiguous(), records, self.channel_scales[: self.n] * 2.0**-self.OPERAND_EXP2

    def _records(self) -> torch.Tensor:
        """uint8 [Np/64, G', 64, 2]: what belongs to groups, rows in the order of the layout."""
        return self._unit_layout(self.group_size).split(self.words)[1]

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return self._layout_identity(self.group_size)
