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

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.units import UnitLayout
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack

GROUPS = (32, 64, 128)
LAYOUT = "w4a8_wgmma"
BLOCK_N, UNIT_K = 64, 128
"""Rows and input channels that a packed weight is padded to."""
LARGEST_SCALE = 16
"""Of a group: what 16 levels need for a range of 2 * 119 (specs.md D, brute force)."""
LARGEST_K = 131072
"""Longest row whose sums of int8 products stay in int32: 128 * 127 * K < 2^31."""
FLOATS = weights.FLOATS
FILE_VERSION = "terrazzo.w4a8/1"
PAD_OFFSET = 128
"""Offset of padding: code 0, scale 1 and this offset are the weight 0."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight(weights.Canonical):
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

        codes = weights.as_tensor("codes", codes)
        given = dict(scales=scales, offsets=offsets, channel_scales=channel_scales, smooth=smooth, bias=bias)
        scales, offsets, channel_scales, smooth, bias = (
            None if t is None else weights.as_tensor(name, t, codes.device) for name, t in given.items()
        )
        n, k = _check_codes(codes)
        if type(group_size) is not int or group_size not in GROUPS:
            raise ArgumentError(
                "group_size", group_size, f"must be one of {GROUPS}", "repeat the scales of a larger group"
            )
        groups = -(-k // group_size)
        for name, values, low, high in (("scales", scales, 1, LARGEST_SCALE), ("offsets", offsets, 0, 255)):
            if values is None or not weights.is_integer(values) or tuple(values.shape) != (n, groups):
                raise _refuse(name, values, f"must be integers [{n}, {groups}]", "pass one for each group of a row")
            if (value := weights.out_of_range(values, low, high)) is not None:
                raise ArgumentError(name, value, f"must be in {low}..{high}", "requantize with quantize_weight")
        _check_bytes(codes, scales, offsets, group_size)
        _check_vector("channel_scales", channel_scales, n, "one for each output feature")
        if smooth is not None:
            _check_vector("smooth", smooth, k, "one for each input channel")
            if not bool((smooth > 0).all()):
                raise ArgumentError("smooth", float(smooth.min()), "must be positive", "clamp it before folding it")
        if bias is not None:
            _check_vector("bias", bias, n, "one for each output feature")
        return cls(
            codes=codes.to(torch.uint8).contiguous(),
            scales=scales.to(torch.uint8).contiguous(),
            offsets=offsets.to(torch.uint8).contiguous(),
            channel_scales=channel_scales.float().contiguous(),
            group_size=group_size,
            smooth=None if smooth is None else smooth.float().contiguous(),
            bias=None if bias is None else bias.contiguous(),
        )

    def pack(self, *, target: Target | str | None = None) -> PackedWeight:
        """See `pack`."""
        return pack(self, target=target)

    def bytes(self) -> torch.Tensor:
        """int8 [N, K]: what the tensor core multiplies, v of the module's docstring."""
        import torch

        per_column = lambda values: values.repeat_interleave(self.group_size, dim=1)[:, : self.k]
        return (self.codes * per_column(self.scales) + per_column(self.offsets)).bitwise_xor_(0x80).view(torch.int8)

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], exact: the weight of x / smooth. See `reference.dequantize`."""
        return self.bytes().double() * self.channel_scales.double()[:, None]

    def __repr__(self) -> str:
        return f"QuantizedWeight(N={self.n}, K={self.k}, {_summary(self)})"


@dataclass(frozen=True, eq=False)
class PackedWeight(weights.Packed):
    """A W4A8 weight in the derived layout that every W4A8 kernel of every target reads. Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/128, Np/64, 1024 + 32 * (128 / group_size)]; a unit holds 64 rows x 128 input channels, then
            the scales and offsets of its groups (`unit_layout`).
        channel_scales: float32 [Np], 0 in the padding.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128.
        group_size: 32, 64 or 128.
        layout: identity of the layout that packed `words`; a kernel built for another one refuses the weight by name.
        smooth: float32 [k] | None; activations are divided by it before they are quantized.
        bias: [n] | None.
        target: architecture it was packed for, None for any (today one layout serves all targets).
    """

    VERSION = FILE_VERSION
    ACTIVATIONS: ClassVar[str] = "int8"
    DEQUANTIZATION: ClassVar[str] = ""

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
        """Bytes that a kernel streams: words with their parameters and channel scales, padding included."""
        return self.words.numel() * 4 + self.channel_scales.numel() * 4

    def unpack(self) -> QuantizedWeight:
        """Exact inverse of `pack`."""
        codes, scales, offsets = unit_layout(self.group_size).unpack(self.words, self.n, self.k)
        groups = -(-self.k // self.group_size)
        return QuantizedWeight(
            codes=codes[:, : self.k].contiguous(),
            scales=scales[:, :groups].contiguous(),
            offsets=offsets[:, :groups].contiguous(),
            channel_scales=self.channel_scales[: self.n].clone(),
            group_size=self.group_size,
            smooth=self.smooth,
            bias=self.bias,
        )

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], read back from the packed bytes; see `reference.dequantize`."""
        return self.unpack().dequantize()

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity(self)

    def check_sizes(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes that n, k and group_size ask for."""
        unit = unit_layout(self.group_size)
        weights.check_tensor(self, "words", unit.shape(self.n, self.k), "int32")
        weights.check_tensor(self, "channel_scales", unit.padded(self.n, self.k)[:1], "float32")

    def check_values(self) -> None:
        """Raise ArgumentError for scales of groups and channels that no weight has."""
        super().check_values()
        _, records = unit_layout(self.group_size).split(self.words)
        if (value := weights.out_of_range(records[..., 0], 1, LARGEST_SCALE)) is not None:
            constraint = f"its group scales must be in 1..{LARGEST_SCALE}"
            raise ArgumentError("words", value, constraint, "the file is damaged: pack the weight again")

    def __repr__(self) -> str:
        return f"PackedWeight(N={self.n}, K={self.k}, {_summary(self)})"


def unit_layout(group_size: int) -> UnitLayout:
    """Layout of a packed unit: two 64 x 64 blocks of `LAYOUT`, then for each group (scale, offset) of each row."""
    from terrazzo.layouts.units import derive_unit

    return derive_unit(LAYOUT, 2, UNIT_K // group_size, 2)


def layout_identity(weight: PackedWeight) -> str:
    """Of the layout that the kernels of this version read."""
    return unit_layout(weight.group_size).identity


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are; any N >= 1 and K >= 1.

    Rows are padded to 64 and input channels to 128 with the weight 0 (code 0, scale 1, offset 128).

    Args:
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: not a QuantizedWeight. TargetError: see `Target.parse`.
    """
    from torch.nn.functional import pad

    if not isinstance(weight, QuantizedWeight):
        raise ArgumentError(
            "weight", weights.kind(weight), "must be a w4a8 QuantizedWeight", "use quantize() for a float weight"
        )
    unit = unit_layout(weight.group_size)
    np_, kp = unit.padded(weight.n, weight.k)
    rows, groups = np_ - weight.n, kp // weight.group_size - weight.scales.shape[1]
    return PackedWeight(
        words=unit.pack(
            pad(weight.codes, (0, kp - weight.k, 0, rows)),
            pad(weight.scales, (0, groups, 0, rows), value=1),
            pad(weight.offsets, (0, groups, 0, rows), value=PAD_OFFSET),
        ),
        channel_scales=pad(weight.channel_scales, (0, rows)),
        n=weight.n,
        k=weight.k,
        group_size=weight.group_size,
        layout=unit.identity,
        smooth=weight.smooth,
        bias=weight.bias,
        target=weights.arch_of(target, weight.codes.device),
    )


def _summary(weight: QuantizedWeight | PackedWeight) -> str:
    parts = [f"group={weight.group_size}"]
    parts += [name for name in ("smooth", "bias") if getattr(weight, name) is not None]
    return ", ".join(parts)


def _refuse(name: str, tensor: torch.Tensor | None, constraint: str, remedy: str) -> ArgumentError:
    seen = None if tensor is None else f"{weights.dtype_name(tensor)} {list(tensor.shape)}"
    return ArgumentError(name, seen, constraint, remedy)


def _check_codes(codes: torch.Tensor) -> tuple[int, int]:
    if codes.ndim != 2 or 0 in codes.shape or not weights.is_integer(codes):
        raise _refuse("codes", codes, "must be integers [N, K] with N, K >= 1", "use quantize() for a float weight")
    if (value := weights.out_of_range(codes, 0, 15)) is not None:
        raise ArgumentError("codes", value, "must be in 0..15", "add 8 to signed codes and take it off the offsets")
    if codes.shape[1] > LARGEST_K:
        raise ArgumentError("codes", list(codes.shape), f"K must be at most {LARGEST_K}: int32 sums", "split K")
    return tuple(codes.shape)


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


def _check_vector(name: str, values: torch.Tensor | None, size: int, what: str) -> None:
    if values is None or tuple(values.shape) != (size,) or weights.dtype_name(values) not in FLOATS:
        raise _refuse(name, values, f"must be a float vector [{size}] of {' or '.join(FLOATS)}", f"pass {what}")
    weights.check_finite(name, values, "repair the checkpoint")
