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
from terrazzo.ops import dlpack, weights
from terrazzo.ops.linear.bytes.fp8_problem import E4M3
from terrazzo.ops.w4a8.format import FLOATS, GROUPS, UNIT_K

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.units import UnitLayout
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

LAYOUT = "w4a8_fp8"
FILE_VERSION = "terrazzo.w4a8_fp8/1"
OPERAND_EXP2 = 8
"""The converter's operands are the codes times 2^-8; packed channel scales make up for it."""
LARGEST_CHANNEL_SCALE = 2.0**100
INSTRUCTIONS = ("wgmma.e4m3", "mma.e4m3")


@dataclass(frozen=True, eq=False)
class QuantizedWeight(weights.Canonical):
    """A W4A8 weight [N, K] in plain rows. Build it with `canonical`, which checks it.

    Attributes:
        codes: int8 [N, K], -8..7.
        scales: float16 [N, G], finite, of any sign; G = ceil(K / group_size).
        channel_scales: float32 [N], finite.
        group_size: 32, 64 or 128.
        smooth: float32 [K] | None; activations are divided by it before they are quantized.
        bias: [N] | None.
    """

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

        codes = weights.as_tensor("codes", codes)
        given = dict(scales=scales, channel_scales=channel_scales, smooth=smooth, bias=bias)
        scales, channel_scales, smooth, bias = (
            None if t is None else weights.as_tensor(name, t, codes.device) for name, t in given.items()
        )
        if codes.ndim != 2 or 0 in codes.shape or not weights.is_integer(codes):
            raise ArgumentError(
                "codes", f"{weights.dtype_name(codes)} {list(codes.shape)}", "must be integers [N, K], N, K >= 1",
                "use quantize() for a float weight",
            )  # fmt: skip
        if (value := weights.out_of_range(codes, -8, 7)) is not None:
            raise ArgumentError("codes", value, "must be in -8..7", "take 8 off unsigned codes")
        n, k = codes.shape
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
        if smooth is not None:
            _check_floats("smooth", smooth, (k,))
            if not bool((smooth > 0).all()):
                raise ArgumentError("smooth", float(smooth.min()), "must be positive", "clamp it before folding it")
        if bias is not None:
            _check_floats("bias", bias, (n,))
        return cls(
            codes=codes.to(torch.int8).contiguous(),
            scales=scales.contiguous(),
            channel_scales=channel_scales.float().contiguous(),
            group_size=group_size,
            smooth=None if smooth is None else smooth.float().contiguous(),
            bias=None if bias is None else bias.contiguous(),
        )

    def pack(self, *, target: Target | str | None = None) -> PackedWeight:
        """See `pack`."""
        return pack(self, target=target)

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], exact: the weight of x / smooth."""
        factors = self.scales.double().repeat_interleave(self.group_size, dim=1)[:, : self.k]
        return self.codes.double() * factors * self.channel_scales.double()[:, None]

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float64 (values of the codes [N, K], factors of groups [N, G], scales of rows [N]): the weight's factors."""
        return self.codes.double(), self.scales.double(), self.channel_scales.double()

    def __repr__(self) -> str:
        return f"fp8.QuantizedWeight(N={self.n}, K={self.k}, {_summary(self)})"


@dataclass(frozen=True, eq=False)
class PackedWeight(weights.Packed):
    """A W4A8 weight in the derived layout that the e4m3 kernels read (sm_89, sm_90a). Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/128, Np/64, 1024 + 32 * (128 / group_size)]; a unit holds 64 rows x 128 input channels of
            zigzag codes, then the float16 factors of its groups (`unit_layout`).
        channel_scales: float32 [Np], times 2^8, 0 in the padding.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128.
        group_size: 32, 64 or 128.
        layout: identity of the layout and converter of `words`; a kernel built for another one refuses the weight.
        smooth: float32 [k] | None; activations are divided by it before they are quantized.
        bias: [n] | None.
        target: architecture it was packed for, None for any that has e4m3 (today one layout serves all).
    """

    VERSION = FILE_VERSION
    ACTIVATIONS: ClassVar[str] = "e4m3"
    DEQUANTIZATION: ClassVar[str] = E4M3

    words: torch.Tensor
    channel_scales: torch.Tensor
    n: int
    k: int
    group_size: int
    layout: str
    smooth: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    target: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel streams: words with their factors and channel scales, padding included."""
        return self.words.numel() * 4 + self.channel_scales.numel() * 4

    def unpack(self) -> QuantizedWeight:
        """Exact inverse of `pack`."""
        import torch
        from terrazzo.layouts.converters.e4m3 import unzigzag

        codes, *planes = unit_layout(self.group_size).unpack(self.words, self.n, self.k)
        groups = -(-self.k // self.group_size)
        scales = torch.stack(planes, dim=-1).contiguous().view(torch.float16)[..., 0]
        return QuantizedWeight(
            codes=unzigzag(codes[:, : self.k].to(torch.int8)).contiguous(),
            scales=scales[:, :groups].contiguous(),
            channel_scales=self.channel_scales[: self.n] * 2.0**-OPERAND_EXP2,
            group_size=self.group_size,
            smooth=self.smooth,
            bias=self.bias,
        )

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], read back from the packed bytes."""
        return self.unpack().dequantize()

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `QuantizedWeight.operands`."""
        return self.unpack().operands()

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity(self.group_size)

    def check_sizes(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes that n, k and group_size ask for."""
        unit = unit_layout(self.group_size)  # alike in shape for all codes
        weights.check_tensor(self, "words", unit.shape(self.n, self.k), "int32")
        weights.check_tensor(self, "channel_scales", unit.padded(self.n, self.k)[:1], "float32")

    def check_values(self) -> None:
        """Raise ArgumentError for scales of groups and channels that no weight has."""
        import torch

        super().check_values()
        _, records = unit_layout(self.group_size).split(self.words)
        factors = records.contiguous().view(torch.float16)
        weights.check_finite("words", factors, "its group scales: the file is damaged, pack the weight again")

    def __repr__(self) -> str:
        return f"fp8.PackedWeight(N={self.n}, K={self.k}, {_summary(self)})"


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


def unit_layout(group_size: int, layout: str = LAYOUT) -> UnitLayout:
    """Layout of a packed unit: two 64 x 64 blocks of `layout`, then for each group the float16 factor of each row."""
    from terrazzo.layouts.units import derive_unit

    return derive_unit(layout, 2, UNIT_K // group_size, 2)


def layout_identity(group_size: int, layout: str = LAYOUT) -> str:
    """The bytes lie as on int8; what they mean is the converter's."""
    from terrazzo.layouts.instances import INSTANCES

    return f"{INSTANCES[layout].converter}:{unit_layout(group_size, layout).identity}"


def check_target(target: Target) -> None:
    """Raise ArgumentError unless the target multiplies e4m3 natively."""
    if not any(target.supports(name) for name in INSTRUCTIONS):
        raise ArgumentError(
            "target", target.arch, "has no e4m3 tensor-core instruction (sm_89, sm_90a and sm_120a do)",
            "use int8 activations there: terrazzo.ops.w4a8.quantize and gemm",
        )  # fmt: skip


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are; any N >= 1 and K >= 1.

    Rows are padded to 64 and input channels to 128 with code 0.

    Args:
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: not a QuantizedWeight of this module, or a target without e4m3. TargetError: see `Target.parse`.
    """
    import torch
    from terrazzo.layouts.converters.e4m3 import zigzag

    if not isinstance(weight, QuantizedWeight):
        raise ArgumentError(
            "weight", type(weight).__module__ + "." + type(weight).__name__, "must be an fp8.QuantizedWeight",
            "use fp8.quantize() for a float weight; W4A8 weights with integer group scales go with int8 activations",
        )  # fmt: skip
    arch, codes = weights.arch_of(target, weight.codes.device), zigzag(weight.codes).to(torch.uint8)
    unit = unit_layout(weight.group_size)
    words, scales = packed_parts(codes, weight.scales, weight.channel_scales, unit, OPERAND_EXP2, arch)
    return PackedWeight(
        words=words,
        channel_scales=scales,
        n=weight.n,
        k=weight.k,
        group_size=weight.group_size,
        layout=layout_identity(weight.group_size),
        smooth=weight.smooth,
        bias=weight.bias,
        target=arch,
    )


def packed_parts(
    codes: torch.Tensor,
    scales: torch.Tensor,
    channel_scales: torch.Tensor,
    unit: UnitLayout,
    operand_exp2: int,
    arch: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, channel scales) of a packed weight, padded with zeros.

    Args:
        codes: uint8 [N, K], 0 for a zero. scales: float16 [N, G]. channel_scales: float32 [N].
        operand_exp2: operands are codes times 2 to minus it. arch: that must have e4m3, None for any.

    Raises:
        ArgumentError: a target without e4m3.
    """
    from terrazzo.lowering.targets import Target
    from torch.nn.functional import pad

    if arch is not None:
        check_target(Target.parse(arch))
    n, k = codes.shape
    np_, kp = unit.padded(n, k)
    rows, groups = np_ - n, kp // (unit.unit_k // unit.groups) - scales.shape[1]
    factors = weights.as_bytes(pad(scales, (0, groups, 0, rows))).view(np_, -1, 2)
    words = unit.pack(pad(codes, (0, kp - k, 0, rows)), factors[..., 0], factors[..., 1])
    return words, pad(channel_scales * 2.0**operand_exp2, (0, rows))


def _summary(weight: QuantizedWeight | PackedWeight) -> str:
    parts = [f"group={weight.group_size}"]
    parts += [name for name in ("smooth", "bias") if getattr(weight, name) is not None]
    return ", ".join(parts)


def _check_floats(name: str, values: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if values is None or tuple(values.shape) != shape or weights.dtype_name(values) not in FLOATS:
        seen = None if values is None else f"{weights.dtype_name(values)} {list(values.shape)}"
        raise ArgumentError(name, seen, f"must be floats {list(shape)}", f"pass one of {FLOATS}")
    weights.check_finite(name, values, "repair the checkpoint")
