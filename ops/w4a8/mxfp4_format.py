"""MXFP4 weights for e4m3 activations: the canonical weight of MXFP4, packed as those of `fp8_format` are.

    w[n, k] = value(codes[n, k]) * 2^(scales[n, k // 32] - 127)

An e2m1 code becomes an e4m3 operand exactly (layouts/converters/e4m3.py). The power of two of a group is the product of
a float16 factor and a float32 power of two of its row, both of which kernels apply to float32 sums. So no weight is
rounded; a row whose scales lie too far apart for a float16 is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import weights
from terrazzo.ops.linear.bytes.fp8_problem import E2M1
from terrazzo.ops.products.codes import MXFP4
from terrazzo.ops.products.converted import MXFP4_FP8
from terrazzo.ops.w4a8 import fp8_format
from terrazzo.ops.weight.base import Fields
from terrazzo.ops.weight_only import format as small_floats

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.products.product import Product

LAYOUT = "mxfp4_fp8"
GROUP = 32
FACTORS = (-24, 15)
"""Exponents of float16 that are powers of two."""
LEAST_CHANNEL = -110
MOST_SCALE = 240
"""Largest e8m0 scale: beyond it, products of the float32 scales of a row and of a token may overflow."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(small_floats.QuantizedWeight):
    """The canonical weight of MXFP4 (`ops.mxfp4.QuantizedWeight`), whose `pack` is this module's."""

    _product: ClassVar[Product] = MXFP4_FP8
    _shown: ClassVar[str] = "mxfp4_fp8."

    def pack(self, *, target: Target | str | None = None) -> PackedWeight:
        """See `pack`."""
        return PackedWeight._of(self, target)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `fp8.QuantizedWeight.operands`."""
        import torch

        factors, channel = split_scales(self)
        table = torch.tensor(MXFP4.values, dtype=torch.float64, device=self.codes.device)
        return table[self.codes.long()], factors.double(), channel.double()


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(fp8_format.PackedWeight, of=QuantizedWeight):
    """An MXFP4 weight in the derived layout that the e4m3 kernels read (sm_89, sm_90a). Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/128, Np/64, 1152]; a unit holds 64 rows x 128 input channels of e2m1 codes, then the float16
            factors of its groups.
        channel_scales: float32 [Np], powers of two, times 2^6; 0 in the padding.
        n, k, layout, smooth, bias, target: see `fp8.PackedWeight`. group_size: 32.
    """

    VERSION = MXFP4_FP8.version
    GROUPS: ClassVar[tuple[int, ...]] = (GROUP,)
    LAYOUT = LAYOUT
    DEQUANTIZATION = E2M1
    OPERAND_EXP2 = 6

    def unpack(self) -> QuantizedWeight:
        """Inverse of `pack`; scales of groups of zeros may be others."""
        return QuantizedWeight(**{"group_size": GROUP, "bias": self.bias} | self._rows())

    @classmethod
    def _planes(cls, weight: small_floats.QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        factors, channel = split_scales(weight)
        if arch is not None:
            MXFP4_FP8.check(Target.parse(arch))
        return cls._units(weight.codes, fp8_format.bytes_of(factors), channel, GROUP)

    def _rows(self) -> Fields:
        """See `Packed`; scales of groups of zeros may be others."""
        import torch

        codes, records, channel = self._stored()
        scales = records.view(torch.float16)[..., 0].double() * channel[:, None].double()
        scales = (torch.frexp(scales).exponent + 126).clamp(0, 254).to(torch.uint8)
        return dict(codes=codes, scales=scales, weight=MXFP4.name)


layout_identity = PackedWeight._layout_identity


def of_e4m3(layout: str) -> type[fp8_format.PackedWeight]:
    """The class of packed weights for e4m3 activations whose layout has this identity."""
    return PackedWeight if layout == PackedWeight._layout_identity(GROUP) else fp8_format.PackedWeight


def pack(weight: small_floats.QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a canonical MXFP4 weight for the kernels, on the device where its codes are.

    Args:
        weight: of `ops.mxfp4` or of this module. target: GPU target to record, see `fp8.pack`.

    Raises:
        ArgumentError: another weight, a target without e4m3, scales above 2^113, or a row whose scales lie too far
            apart: factors of float16 span 39 binades. TargetError: see `Target.parse`.
    """
    check(weight, MXFP4_FP8.module)
    return PackedWeight._of(weight, target)


def check(weight: small_floats.QuantizedWeight, module: str) -> None:
    """Raise ArgumentError unless a weight is a canonical one of MXFP4, which this module of terrazzo.ops packs."""
    if not isinstance(weight, small_floats.QuantizedWeight) or weight.weight != MXFP4.name:
        remedy = f"use {module}.quantize, or pack(codes, scales)"
        raise ArgumentError("weight", weights.kind(weight), "must be a canonical weight of MXFP4", remedy)


def split_scales(weight: small_floats.QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors float16 [N, G], channel scales f32 [N]), powers of two whose products are the scales of groups.

    Those of groups of zeros are what fits best.

    Raises:
        ArgumentError: naming `scales`: too large ones, or a row whose scales lie too far apart.
    """
    import torch

    low, high = FACTORS
    largest = small_floats.largest_scales(weight)  # [N, 1], of groups that are not all zeros
    if bool((largest > MOST_SCALE).any()):
        seen, constraint = int(largest.max()), f"must be at most {MOST_SCALE}, 2^{MOST_SCALE - 127}"
        raise ArgumentError("scales", seen, constraint, "use ops.mxfp4: bfloat16 activations")
    channel = (largest - 127 - high).clamp(min=LEAST_CHANNEL)
    exponents = weight.scales.int() - 127 - channel
    lost = (exponents < low) & small_floats.used_groups(weight)
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        constraint = f"those of a row must lie within {high - low} binades (row {row}, group {group})"
        raise ArgumentError("scales", int(weight.scales[row, group]), constraint, "use ops.mxfp4: bfloat16 activations")
    power = lambda e: torch.ldexp(torch.ones_like(e, dtype=torch.float32), e)
    return power(exponents.clamp(low, high)).half(), power(channel[:, 0])
