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
from terrazzo.ops import weights
from terrazzo.ops.linear.bytes.fp8_problem import E2M1
from terrazzo.ops.products.codes import MXFP4
from terrazzo.ops.w4a8 import fp8_format
from terrazzo.ops.weight_only import format as small_floats

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.units import UnitLayout
    from terrazzo.lowering.targets import Target

LAYOUT = "mxfp4_fp8"
FILE_VERSION = "terrazzo.mxfp4_fp8/1"
GROUP = 32
OPERAND_EXP2 = 6
"""Operands are the values of codes times 2^-6; packed channel scales make up for it."""
FACTORS = (-24, 15)
"""Exponents of float16 that are powers of two."""
LEAST_CHANNEL = -110
MOST_SCALE = 240
"""Largest e8m0 scale: beyond it, products of the float32 scales of a row and of a token may overflow."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(small_floats.QuantizedWeight):
    """The canonical weight of MXFP4 (`ops.mxfp4.QuantizedWeight`), whose `pack` is this module's."""

    def pack(self, *, target: Target | str | None = None) -> PackedWeight:
        """See `pack`."""
        return pack(self, target=target)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `fp8.QuantizedWeight.operands`."""
        import torch

        factors, channel = split_scales(self)
        table = torch.tensor(MXFP4.values, dtype=torch.float64, device=self.codes.device)
        return table[self.codes.long()], factors.double(), channel.double()

    def __repr__(self) -> str:
        return f"mxfp4_fp8.QuantizedWeight(N={self.n}, K={self.k}{', bias' * (self.bias is not None)})"


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(fp8_format.PackedWeight):
    """An MXFP4 weight in the derived layout that the e4m3 kernels read (sm_89, sm_90a). Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/128, Np/64, 1152]; a unit holds 64 rows x 128 input channels of e2m1 codes, then the float16
            factors of its groups (`unit_layout`).
        channel_scales: float32 [Np], powers of two, times 2^6; 0 in the padding.
        n, k, layout, smooth, bias, target: see `fp8.PackedWeight`. group_size: 32.
    """

    VERSION = FILE_VERSION
    GROUPS: ClassVar[tuple[int, ...]] = (GROUP,)
    DEQUANTIZATION: ClassVar[str] = E2M1

    def unpack(self) -> QuantizedWeight:
        """Inverse of `pack`; scales of groups of zeros may be others."""
        import torch

        codes, *planes = unit_layout().unpack(self.words, self.n, self.k)
        factors = torch.stack(planes, dim=-1).contiguous().view(torch.float16)[..., 0]
        scales = factors.double() * self.channel_scales[: self.n, None].double() * 2.0**-OPERAND_EXP2
        scales = (torch.frexp(scales[:, : -(-self.k // GROUP)]).exponent + 126).clamp(0, 254).to(torch.uint8)
        codes = codes[:, : self.k].contiguous()
        return QuantizedWeight.canonical(codes, scales, weight=MXFP4.name, group_size=GROUP, bias=self.bias)

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity()

    def __repr__(self) -> str:
        return f"mxfp4_fp8.PackedWeight(N={self.n}, K={self.k}{', bias' * (self.bias is not None)})"


def unit_layout() -> UnitLayout:
    """Layout of a packed unit: two 64 x 64 blocks of `LAYOUT`, then for each group the float16 factor of each row."""
    return fp8_format.unit_layout(GROUP, LAYOUT)


def layout_identity(group_size: int = GROUP) -> str:
    """Of the only layout, which names the converter."""
    return fp8_format.layout_identity(group_size, LAYOUT)


def of_e4m3(layout: str) -> type[fp8_format.PackedWeight]:
    """The class of packed weights for e4m3 activations whose layout has this identity."""
    return PackedWeight if layout == layout_identity() else fp8_format.PackedWeight


def pack(weight: small_floats.QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a canonical MXFP4 weight for the kernels, on the device where its codes are.

    Args:
        weight: of `ops.mxfp4` or of this module. target: GPU target to record, see `fp8.pack`.

    Raises:
        ArgumentError: another weight, a target without e4m3, scales above 2^113, or a row whose scales lie too far
            apart: factors of float16 span 39 binades. TargetError: see `Target.parse`.
    """
    if not isinstance(weight, small_floats.QuantizedWeight) or weight.weight != MXFP4.name:
        constraint = "must be a canonical weight of MXFP4"
        raise ArgumentError(
            "weight", weights.kind(weight), constraint, "use mxfp4_fp8.quantize, or pack(codes, scales)"
        )
    arch = weights.arch_of(target, weight.codes.device)
    factors, channel = split_scales(weight)
    words, scales = fp8_format.packed_parts(weight.codes, factors, channel, unit_layout(), OPERAND_EXP2, arch)
    return PackedWeight(words, scales, weight.n, weight.k, GROUP, layout_identity(), bias=weight.bias, target=arch)


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
