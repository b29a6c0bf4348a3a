"""The two forms of a W4A8 weight: canonical (`QuantizedWeight`, a byte for each code) and packed (`PackedWeight`).

Level 1 makes signed bytes with one scale for each output channel, level 2 makes 4-bit codes of them with a small
integer scale s and an offset a for each group along K (specs.md D, equation 12). Both forms mean

    v[n, k] = ((codes[n, k] * s[n, k // g] + a[n, k // g]) ^ 0x80) as int8     the byte that the tensor core multiplies
    w[n, k] = v[n, k] * channel_scales[n]                                      the weight of x[k] / smooth[k]

No lane of codes * s + a may leave its byte: a word of four codes is converted by one 32-bit multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.products.converted import W4A8
from terrazzo.ops.weight.base import Fields, Plain
from terrazzo.ops.weight.units import UNIT_K as UNIT_K
from terrazzo.ops.weight.units import UnitWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product

GROUPS = (32, 64, 128)
LAYOUT = "w4a8_wgmma"
LARGEST_SCALE = 16
"""Of a group: what 16 levels need for a range of 2 * 119 (specs.md D, brute force)."""
LARGEST_K = 131072
"""Longest row whose sums of int8 products stay in int32: 128 * 127 * K < 2^31."""
FLOATS = weights.FLOATS
PAD_OFFSET = 128
"""Offset of padding: code 0, scale 1 and this offset are the weight 0."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(Plain["PackedWeight"]):
    """A W4A8 weight [N, K] in plain rows. Build it with `canonical`, which checks it.

    Attributes:
        codes: uint8 [N, K], 0..15.
        scales: uint8 [N, G], 1..16; G = ceil(K / group_size).
        offsets: uint8 [N, G]: 128 + the int8 value of code 0.
        channel_scales: float32 [N], finite, level 1.
        group_size: 32, 64 or 128.
        smooth: float32 [K] | None; activations are divided by it before they are quantized.
        bias: [N] | None.
    """

    _product: ClassVar[Product] = W4A8

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    channel_scales: torch.Tensor
    group_size: int
    smooth: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    @dlpack.accepting
    def canonical(
        cls,
        codes: SupportsDLPack,
        scales: SupportsDLPack,
        offsets: SupportsDLPack,
        channel_scales: SupportsDLPack,
        *,
        group_size: int,
        smooth: SupportsDLPack | None = None,
        bias: SupportsDLPack | None = None,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values.

        Args:
            codes, scales, offsets, channel_scales, group_size: see the attributes.
            smooth: positive float [K]. bias: float16, bfloat16 or float32 [N].

        Raises:
            ArgumentError: for anything that does not fit, a byte that overflows included.
        """
        import torch

        codes, scales, offsets, channel_scales, smooth, bias = weights.as_tensors(
            codes=codes, scales=scales, offsets=offsets, channel_scales=channel_scales, smooth=smooth, bias=bias
        )
        n, k = weights.check_codes(codes, 0, 15, "add 8 to signed codes and take it off the offsets")
        if k > LARGEST_K:
            raise ArgumentError("codes", list(codes.shape), f"K must be at most {LARGEST_K}: int32 sums", "split K")
        if type(group_size) is not int or group_size not in GROUPS:
            raise ArgumentError(
                "group_size", group_size, f"must be one of {GROUPS}", "repeat the scales of a larger group"
            )
        groups = -(-k // group_size)
        for name, values, low, high in (("scales", scales, 1, LARGEST_SCALE), ("offsets", offsets, 0, 255)):
            if values is None or not weights.is_integer(values) or tuple(values.shape) != (n, groups):
                constraint, remedy = f"must be integers [{n}, {groups}]", "pass one for each group of a row"
                raise ArgumentError(name, weights.described(values), constraint, remedy)
            if (value := weights.out_of_range(values, low, high)) is not None:
                raise ArgumentError(name, value, f"must be in {low}..{high}", "requantize with quantize_weight")
        _check_bytes(codes, scales, offsets, group_size)
        weights.check_vector("channel_scales", channel_scales, n)
        return cls(
            codes=codes.to(torch.uint8).contiguous(),
            scales=scales.to(torch.uint8).contiguous(),
            offsets=offsets.to(torch.uint8).contiguous(),
            channel_scales=channel_scales.float().contiguous(),
            group_size=group_size,
            smooth=weights.smooth_of(smooth, k),
            bias=weights.bias_of(bias, n),
        )

    def bytes(self) -> torch.Tensor:
        """int8 [N, K]: what the tensor core multiplies, v of the module's docstring."""
        import torch

        per_column = lambda values: values.repeat_interleave(self.group_size, dim=1)[:, : self.k]
        return (self.codes * per_column(self.scales) + per_column(self.offsets)).bitwise_xor_(0x80).view(torch.int8)

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], exact: the weight of x / smooth. See `reference.dequantize`."""
        return self.bytes().double() * self.channel_scales.double()[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(UnitWeight[QuantizedWeight], of=QuantizedWeight):
    """A W4A8 weight in the derived layout that every W4A8 kernel of every target reads. Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/128, Np/64, 1024 + 32 * (128 / group_size)]; a unit holds 64 rows x 128 input channels, then
            the scales and offsets of its groups.
        channel_scales: float32 [Np], 0 in the padding.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128.
        group_size: 32, 64 or 128.
        layout: identity of the layout that packed `words`; a kernel built for another one refuses the weight by name.
        smooth: float32 [k] | None; activations are divided by it before they are quantized.
        bias: [n] | None.
        target: architecture it was packed for, None for any (today one layout serves all targets).
    """

    VERSION = W4A8.version
    LAYOUT = LAYOUT
    ACTIVATIONS = "int8"
    PADDING = (1, PAD_OFFSET)

    @classmethod
    def _planes(cls, weight: QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        import torch

        records = torch.stack([weight.scales, weight.offsets], dim=-1)
        return cls._units(weight.codes, records, weight.channel_scales, weight.group_size)

    def _rows(self) -> Fields:
        """See `Packed`."""
        codes, records, channel_scales = self._stored()
        scales, offsets = (plane.contiguous() for plane in records.unbind(-1))
        return dict(codes=codes, scales=scales, offsets=offsets, channel_scales=channel_scales)

    def check_values(self) -> None:
        """Raise ArgumentError for scales of groups and channels that no weight has."""
        super().check_values()
        if (value := weights.out_of_range(self._records()[..., 0], 1, LARGEST_SCALE)) is not None:
            constraint = f"its group scales must be in 1..{LARGEST_SCALE}"
            raise ArgumentError("words", value, constraint, "the file is damaged: pack the weight again")


unit_layout = PackedWeight._unit_layout


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are; any N >= 1 and K >= 1.

    Rows are padded to 64 and input channels to 128 with the weight 0 (code 0, scale 1, offset 128).

    Args:
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: not a QuantizedWeight. TargetError: see `Target.parse`.
    """
    if not isinstance(weight, QuantizedWeight):
        raise ArgumentError(
            "weight", weights.kind(weight), "must be a w4a8 QuantizedWeight", "use quantize() for a float weight"
        )
    return PackedWeight._of(weight, target)


def _check_bytes(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, group: int) -> None:
    """No code * scale + offset leaves its byte: the largest code of each group decides."""
    from torch.nn.functional import pad

    n, groups = scales.shape
    largest = pad(codes, (0, groups * group - codes.shape[1])).view(n, groups, group).amax(-1).int()
    worst = (largest * scales.int() + offsets.int()).max()
    if int(worst) > 255:
        raise ArgumentError(
            "offsets", int(worst), "code * scale + offset must fit a byte (255)", "requantize with quantize_weight"
        )
