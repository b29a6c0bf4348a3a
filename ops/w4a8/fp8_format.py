"""The two forms of a W4A8 weight for e4m3 activations: canonical (`QuantizedWeight`) and packed (`PackedWeight`).

    w[n, k] = codes[n, k] * scales[n, k // g] * channel_scales[n]         codes -8..7, the weight of x[k] / smooth[k]

A code becomes an e4m3 operand exactly (layouts/converters/e4m3.py), so nothing is rounded after quantization: the
factor of a group is float16, the scale of its row float32, and kernels apply both to float32 sums. Scales that are
float16 or bfloat16, as checkpoints have them, split into both without rounding. Int8 activations need integer group
scales instead (`format`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import dlpack, weights
from terrazzo.ops.linear.bytes.fp8_problem import E4M3
from terrazzo.ops.products.converted import W4A8_FP8
from terrazzo.ops.w4a8.format import FLOATS, GROUPS, UNIT_K
from terrazzo.ops.weight.base import Fields, Plain
from terrazzo.ops.weight.units import UnitWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product

LAYOUT = "w4a8_fp8"
LARGEST_CHANNEL_SCALE = 2.0**100


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(Plain["PackedWeight"]):
    """A W4A8 weight [N, K] in plain rows. Build it with `canonical`, which checks it.

    Attributes:
        codes: int8 [N, K], -8..7.
        scales: float16 [N, G], finite, of any sign; G = ceil(K / group_size).
        channel_scales: float32 [N], finite.
        group_size: 32, 64 or 128.
        smooth: float32 [K] | None; activations are divided by it before they are quantized.
        bias: [N] | None.
    """

    _product: ClassVar[Product] = W4A8_FP8
    _shown: ClassVar[str] = "fp8."

    codes: torch.Tensor
    scales: torch.Tensor
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
        channel_scales: SupportsDLPack | None = None,
        *,
        group_size: int,
        smooth: SupportsDLPack | None = None,
        bias: SupportsDLPack | None = None,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values; see the attributes.

        Args:
            codes: integers [N, K] of -8..7.
            scales: float [N, G]. Without `channel_scales`, they are the whole scales: each row is split into a power of
                two and float16 factors, exactly.
            group_size: 32, 64, 128, or K: one scale for a row, kept as groups of 128 with the same factor.
            smooth: positive float [K]. bias: float [N].

        Raises:
            ArgumentError: for anything that does not fit; scales that float16 factors cannot hold exactly.
        """
        import torch

        codes, scales, channel_scales, smooth, bias = weights.as_tensors(
            codes=codes, scales=scales, channel_scales=channel_scales, smooth=smooth, bias=bias
        )
        n, k = weights.check_codes(codes, -8, 7, "take 8 off unsigned codes")
        if type(group_size) is not int or group_size not in (*GROUPS, k):
            raise ArgumentError("group_size", group_size, f"must be one of {GROUPS}, or K = {k}", "repeat the scales")
        _check_floats("scales", scales, (n, -(-k // group_size)))
        if group_size not in GROUPS:
            scales, group_size = scales.expand(n, -(-k // UNIT_K)), UNIT_K
        if channel_scales is None:
            with weights.renamed(weight="scales"):
                factors, channel_scales = split_scales(scales)
            exact = factors.double() * channel_scales.double()[:, None] == scales.double()
            if not bool(exact.all()):
                raise ArgumentError(
                    "scales", float(scales[~exact][0]), "must be a float16 times the power of two of its row",
                    "round the scales to float16 or bfloat16, or quantize the float weight",
                )  # fmt: skip
            scales = factors
        _check_floats("channel_scales", channel_scales, (n,))
        if bool((channel_scales.abs() > LARGEST_CHANNEL_SCALE).any()):
            raise ArgumentError(
                "channel_scales", float(channel_scales.abs().max()), f"must be at most {LARGEST_CHANNEL_SCALE:.3g}",
                "scale the weight down",
            )  # fmt: skip
        if weights.dtype_name(scales) != "float16":
            raise ArgumentError(
                "scales", weights.dtype_name(scales), "must be float16 beside channel_scales", "cast them"
            )
        return cls(
            codes=codes.to(torch.int8).contiguous(),
            scales=scales.contiguous(),
            channel_scales=channel_scales.float().contiguous(),
            group_size=group_size,
            smooth=weights.smooth_of(smooth, k),
            bias=weights.bias_of(bias, n),
        )

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], exact: the weight of x / smooth."""
        factors = self.scales.double().repeat_interleave(self.group_size, dim=1)[:, : self.k]
        return self.codes.double() * factors * self.channel_scales.double()[:, None]

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float64 (values of the codes [N, K], factors of groups [N, G], scales of rows [N]): the weight's factors."""
        return self.codes.double(), self.scales.double(), self.channel_scales.double()


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(UnitWeight[QuantizedWeight], of=QuantizedWeight):
    """A W4A8 weight in the derived layout that the e4m3 kernels read (sm_89, sm_90a). Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/128, Np/64, 1024 + 32 * (128 / group_size)]; a unit holds 64 rows x 128 input channels of
            zigzag codes, then the float16 factors of its groups.
        channel_scales: float32 [Np], times 2^8, 0 in the padding.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128.
        group_size: 32, 64 or 128.
        layout: identity of the layout and converter of `words`; a kernel built for another one refuses the weight.
        smooth: float32 [k] | None; activations are divided by it before they are quantized.
        bias: [n] | None.
        target: architecture it was packed for, None for any that has e4m3 (today one layout serves all).
    """

    VERSION = W4A8_FP8.version
    LAYOUT = LAYOUT
    ACTIVATIONS = "e4m3"
    DEQUANTIZATION = E4M3
    OPERAND_EXP2 = 8

    @classmethod
    def _planes(cls, weight: QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        import torch
        from terrazzo.layouts.converters.e4m3 import zigzag

        if arch is not None:
            W4A8_FP8.check(Target.parse(arch))
        codes = zigzag(weight.codes).to(torch.uint8)
        return cls._units(codes, bytes_of(weight.scales), weight.channel_scales, weight.group_size)

    def _rows(self) -> Fields:
        """See `Packed`."""
        import torch
        from terrazzo.layouts.converters.e4m3 import unzigzag

        codes, records, channel_scales = self._stored()
        codes = unzigzag(codes.to(torch.int8)).contiguous()
        return dict(codes=codes, scales=records.view(torch.float16)[..., 0], channel_scales=channel_scales)

    @classmethod
    def _layout_identity(cls, group_size: int) -> str:
        """The bytes lie as on int8; what they mean is the converter's."""
        from terrazzo.layouts.instances import INSTANCES

        return f"{INSTANCES[cls.LAYOUT].converter}:{super()._layout_identity(group_size)}"

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `QuantizedWeight.operands`."""
        return self.unpack().operands()

    def check_values(self) -> None:
        """Raise ArgumentError for scales of groups and channels that no weight has."""
        import torch

        super().check_values()
        factors = self._records().contiguous().view(torch.float16)
        weights.check_finite("words", factors, "its group scales: the file is damaged, pack the weight again")


unit_layout, layout_identity = PackedWeight._unit_layout, PackedWeight._layout_identity


def bytes_of(factors: torch.Tensor) -> torch.Tensor:
    """uint8 [N, G, 2] of float16 factors [N, G]."""
    return weights.as_bytes(factors).view(*factors.shape, 2)


def split_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors float16 [N, G], channel scales f32 [N]) of scales [N, G]: rows' powers of two and what is left, rounded.

    The largest factor of a row is in [2^14, 2^15], so that factors down to 2^-28 of it keep eleven bits.

    Raises:
        ArgumentError: naming `weight`, where factors of the largest channel scale leave float16.
    """
    import torch

    largest = scales.double().abs().amax(dim=1)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 15, 0).clamp(-110, 100)
    channel = torch.ldexp(torch.ones_like(largest), exponent)
    most = LARGEST_CHANNEL_SCALE * torch.finfo(torch.float16).max
    if bool((largest > most).any()):
        seen = f"scales up to {float(largest.max()):.3g}"
        raise ArgumentError("weight", seen, f"scales must be at most {most:.3g}", "scale the weight down")
    return (scales.double() / channel[:, None]).half(), channel.float()


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are; any N >= 1 and K >= 1.

    Rows are padded to 64 and input channels to 128 with code 0.

    Args:
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: not a QuantizedWeight of this module, or a target without e4m3. TargetError: see `Target.parse`.
    """
    if not isinstance(weight, QuantizedWeight):
        raise ArgumentError(
            "weight", type(weight).__module__ + "." + type(weight).__name__, "must be an fp8.QuantizedWeight",
            "use fp8.quantize() for a float weight; W4A8 weights with integer group scales go with int8 activations",
        )  # fmt: skip
    return PackedWeight._of(weight, target)


def _check_floats(name: str, values: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if values is None or tuple(values.shape) != shape or weights.dtype_name(values) not in FLOATS:
        seen = None if values is None else f"{weights.dtype_name(values)} {list(values.shape)}"
        raise ArgumentError(name, seen, f"must be floats {list(shape)}", f"pass one of {FLOATS}")
    weights.check_finite(name, values, "repair the checkpoint")
