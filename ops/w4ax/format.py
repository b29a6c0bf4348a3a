"""The two forms of a W4Ax weight: canonical (`QuantizedWeight`, a byte for each code) and packed (`PackedWeight`).

    w[n, order[j]] = codes[n, j] * scales[n, j // 128]          order: the plan's permutation of input channels

Blocks of 128 input channels are INT4 or INT8 by the activations that meet them; weights have 4 bits in both. A packed
weight is made for one kind of tensor core. With native s4 (sm_80, sm_86, sm_89) INT4 blocks lie in the fragment order
of mma.m16n8k64 and go to the tensor core as they are. INT8 blocks, and all blocks of sm_90a, which has no s4, lie in
the order of an 8-bit fragment; the fast conversion leaves 16 times the code (specs.md E.2), and their stored scale is
a 16th.

Scales are one bfloat16 for each block of a row ("block", the paper's form), or two-level, as LiquidGEMM and QServe have
them: scales[n, b] = channel_scales[n] * multiplier[n, b], an integer 1..16. Codes times multipliers are bytes, so that
sums over many blocks stay integers. Packed for native s4, the multiplier stands where the block's scale stands; for
the other tensor cores a block's record is that of W4A8 with groups of 128: s = multiplier, a = 128 - 8 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import dlpack, weights
from terrazzo.ops.products.mixed import W4AX
from terrazzo.ops.w4ax.fmpq import BLOCK, check_permutation
from terrazzo.ops.weight import files
from terrazzo.ops.weight.base import Canonical, Fields, Packed

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.units import UnitLayout
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product

LAYOUT, LAYOUT4 = "w4a8_wgmma", "w4a4_mma"
"""Of blocks that are converted to bytes, and of blocks that native s4 takes as they are."""
ROWS = 64
"""Rows that a packed weight is padded to."""
UNIT_WORDS = 1056
"""int32 of 64 rows by 128 channels: codes, and 64 scales in bfloat16."""
LARGEST_BLOCKS = 512
"""So that nothing counted in k overflows; K up to 65536."""
FILE_VERSION, TWO_LEVEL_VERSION = "terrazzo.w4ax/1", "terrazzo.w4ax/2"
SCALES = ("two_level", "block")
"""Forms of a weight's scales; the first is the quantizer's default."""
LARGEST_MULTIPLIER = 16
"""-8 times it is still a byte."""
FLOATS = weights.FLOATS


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(Canonical["PackedWeight"]):
    """A W4Ax weight in plain rows, columns in the plan's order. Build it with `canonical`, which checks it.

    Attributes:
        codes: int8 [N, Kp], -8..7; 0 in the padding.
        scales: float32 [N, Kp/128], positive; exact in bfloat16 unless two-level.
        k: input features; Kp is k rounded up to 128.
        blocks8: INT8 blocks, the last ones.
        permutation: int32 [Kp] | None: the input channel at each place, -1 for padding; None for their own order.
        bias: [N] | None.
        channel_scales: float32 [N], exact in bfloat16: scales are 1 to 16 times these (two-level); None for others.
    """

    _product: ClassVar[Product] = W4AX

    codes: torch.Tensor
    scales: torch.Tensor
    k: int
    blocks8: int
    permutation: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    channel_scales: torch.Tensor | None = None

    @classmethod
    @dlpack.accepting
    def canonical(
        cls,
        codes: SupportsDLPack,
        scales: SupportsDLPack,
        *,
        k: int | None = None,
        blocks8: int = 0,
        permutation: SupportsDLPack | None = None,
        bias: SupportsDLPack | None = None,
        channel_scales: SupportsDLPack | None = None,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values.

        Args:
            codes, scales, blocks8, permutation, bias, channel_scales: see the attributes. k: None takes Kp.

        Raises:
            ArgumentError: for anything that does not fit.
        """
        import torch

        codes, scales, permutation, bias, channel_scales = weights.as_tensors(
            codes=codes, scales=scales, permutation=permutation, bias=bias, channel_scales=channel_scales
        )
        if codes.ndim != 2 or 0 in codes.shape or codes.shape[1] % BLOCK or not weights.is_integer(codes):
            raise _refuse("codes", codes, "must be integers [N, Kp], Kp a multiple of 128", "use quantize_weight")
        n, padded = codes.shape
        blocks, k = padded // BLOCK, padded if k is None else k
        if blocks > LARGEST_BLOCKS:
            raise _refuse("codes", codes, f"K must be at most {LARGEST_BLOCKS * BLOCK}", "split K")
        if type(k) is not int or not padded - BLOCK < k <= padded:
            raise ArgumentError(
                "k", k, f"must be in {padded - BLOCK + 1}..{padded}", "pad K to the next multiple of 128"
            )
        if type(blocks8) is not int or not 0 <= blocks8 <= blocks:
            raise ArgumentError("blocks8", blocks8, f"must be 0..{blocks}, the blocks of 128", "use plan_blocks")
        if (value := weights.out_of_range(codes, -8, 7)) is not None:
            raise ArgumentError("codes", value, "must be in -8..7", "take 8 off unsigned codes")
        if scales is None or tuple(scales.shape) != (n, blocks) or weights.dtype_name(scales) not in FLOATS:
            raise _refuse("scales", scales, f"must be float [{n}, {blocks}]", "pass one for each block of a row")
        if channel_scales is None:
            _check_positive("scales", scales, scales)
        else:
            _check_two_level(scales, channel_scales)
        if permutation is not None:
            check_permutation(permutation, k, padded)
        _check_padding(codes, permutation, k)
        return cls(
            codes=codes.to(torch.int8).contiguous(),
            scales=scales.float().contiguous(),
            k=k,
            blocks8=blocks8,
            permutation=None if permutation is None else permutation.to(torch.int32).contiguous(),
            bias=weights.bias_of(bias, n),
            channel_scales=None if channel_scales is None else channel_scales.float().contiguous(),
        )

    @property
    def blocks(self) -> int:
        """Blocks of 128 input channels, padding included."""
        return self.scales.shape[1]

    @property
    def two_level(self) -> bool:
        """Whether scales are multiples of the channel's."""
        return self.channel_scales is not None

    def multipliers(self) -> torch.Tensor:
        """float32 [N, Kp/128], 1..16: the scales in units of the channel's; two-level only."""
        return (self.scales / self.channel_scales[:, None]).round()

    def values(self) -> torch.Tensor:
        """float64 [N, Kp], exact: codes times scales, columns in the plan's order."""
        return self.codes.double() * self.scales.double().repeat_interleave(BLOCK, dim=1)

    def dequantize(self) -> torch.Tensor:
        """float64 [N, k], exact, columns in the order of the input."""
        values = self.values()
        if self.permutation is None:
            return values[:, : self.k]
        out, order = values.new_zeros(self.n, self.k), self.permutation.long()
        out[:, order[order >= 0]] = values[:, order >= 0]
        return out

    def _summary(self) -> str:
        """Its facts, for people."""
        parts = [f"{self.blocks - self.blocks8} INT4 and {self.blocks8} INT8 blocks"]
        parts += ["two-level scales"] if self.two_level else []
        return ", ".join(parts + [name for name in ("permutation", "bias") if getattr(self, name) is not None])


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(Packed[QuantizedWeight], of=QuantizedWeight):
    """A W4Ax weight in the derived layouts that the kernels of its target read. Np: N rounded up to 64.

    Attributes:
        words: int32 [Kp/128, Np/64, 1056]: codes of 64 rows by 128 channels, then their scales (bfloat16), or
            multipliers where scales are two-level.
        n, k: true sizes.
        blocks8: INT8 blocks, the last ones.
        layout: identity of the layouts that packed `words`; a kernel built for others refuses the weight by name.
        target: architecture it was packed for.
        order: name of the permutation, "" for none; activations quantized for another order are refused by it.
        permutation: int32 [Kp] | None, see `QuantizedWeight`.
        bias: [N] | None.
        channel_scales: float32 [Np] of two-level scales, 1 in the padding; None for others.
    """

    words: torch.Tensor
    n: int
    k: int
    blocks8: int
    layout: str
    target: str
    order: str = ""
    permutation: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    channel_scales: torch.Tensor | None = None

    VERSION: ClassVar[str] = TWO_LEVEL_VERSION
    """Of files of experts, too, whose scales are two-level."""
    OTHER_VERSIONS: ClassVar[tuple[str, ...]] = (FILE_VERSION,)

    @property
    def blocks(self) -> int:
        """Blocks of 128 input channels, the last one padded."""
        return -(-self.k // BLOCK)

    @property
    def native(self) -> bool:
        """Whether INT4 blocks run on s4 tensor cores; else they are emulated on int8."""
        return self.layout == identity(True, self.two_level)

    @property
    def two_level(self) -> bool:
        """Whether scales are multiples of the channel's."""
        return self.channel_scales is not None

    @classmethod
    def alike(cls, experts: list[PackedWeight]) -> list[PackedWeight]:
        """See `Packed`; raises ArgumentError for weights that no kernel of experts reads."""
        for expert in experts:
            if not expert.two_level or expert.native:
                form = "two-level scales" if expert.two_level else "a scale for each block"
                constraint = "experts must have two-level scales and be packed for warpgroup instructions (sm_90a)"
                remedy = "quantize with scales='two_level' and target='sm_90a', or use experts of w4a8"
                raise ArgumentError("experts", f"{form}, packed for {expert.target}", constraint, remedy)
        return experts

    @classmethod
    def _of(cls, weight: QuantizedWeight, target: Target | str | None = None) -> PackedWeight:
        """See `Packed`; there is no weight for any target."""
        device = weight.codes.device
        at = Target.detect(device) if target is None and device.type == "cuda" else Target.parse(target)
        return super()._of(weight, at)

    @classmethod
    def _planes(cls, weight: QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        import torch
        from torch.nn.functional import pad

        rows, on_s4 = -weight.n % ROWS, native(Target.parse(arch))
        codes = pad(weight.codes, (0, 0, 0, rows)).bitwise_and(15).to(torch.uint8)
        scales = pad(weight.multipliers() if weight.two_level else weight.scales, (0, 0, 0, rows), value=1.0)
        parts = []
        for bits, span in spans(weight.blocks, weight.blocks8, on_s4):
            if weight.two_level and not on_s4:
                held = (scales[:, span].to(torch.uint8), (128 - 8 * scales[:, span]).to(torch.uint8))
            else:
                stored = weights.as_bytes((scales[:, span] * (1 if bits == 4 else 0.0625)).bfloat16())
                held = (stored[:, 0::2].contiguous(), stored[:, 1::2].contiguous())
            words = unit_layout(bits).pack(codes[:, span.start * BLOCK : span.stop * BLOCK].contiguous(), *held)
            parts.append(words.reshape(words.shape[0], len(codes) // ROWS, UNIT_WORDS))
        channel = pad(weight.channel_scales, (0, rows), value=1.0) if weight.two_level else None
        return dict(words=torch.cat(parts).contiguous(), order=order_name(weight.permutation), channel_scales=channel)

    def _units(self) -> Iterator[tuple[int, UnitLayout, torch.Tensor]]:
        """(bits on the tensor core, layout, words of its units) of the blocks of 4 bits, then of those of 8."""
        for bits, span in spans(self.blocks, self.blocks8, self.native):
            unit, depth = unit_layout(bits), span.stop - span.start
            yield bits, unit, self.words[span].reshape(depth, self.words.shape[1] * ROWS // unit.block.block_rows, -1)

    def _rows(self) -> Fields:
        """See `Packed`; block scales below 2^-122 lost bits."""
        import torch

        self.check_layout(identity(self.native, self.two_level))
        codes, scales = [], []
        for bits, unit, words in self._units():
            c, low, high = unit.unpack(words, self.words.shape[1] * ROWS, words.shape[0] * BLOCK)
            codes.append((c[: self.n] ^ 8).to(torch.int8) - 8)
            if self.two_level and not self.native:
                scales.append(low[: self.n].float())
            else:
                raw = low[: self.n].to(torch.int16) | high[: self.n].to(torch.int16) << 8
                scales.append(raw.view(torch.bfloat16).float() * (1 if bits == 4 else 16))
        channel = self.channel_scales[: self.n].clone() if self.two_level else None
        joined = torch.cat(scales, dim=1) * (1 if channel is None else channel[:, None])
        return dict(codes=torch.cat(codes, dim=1), scales=joined, channel_scales=channel)

    def save(self, path: str | Path) -> None:
        """See `Packed`."""
        files.save(self, path, TWO_LEVEL_VERSION if self.two_level else FILE_VERSION)

    def expected_layout(self) -> str:
        """Identity of the layout that its target's kernels read."""
        return identity(native(Target.parse(self.target)), self.two_level)

    def check_facts(self) -> None:
        """Raise ArgumentError unless n, k and blocks8 are numbers that a weight can have."""
        for name, least in (("n", 1), ("k", 1), ("blocks8", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ArgumentError(name, value, f"must be an integer, {least} at least", "pack the weight again")
        if self.blocks8 > self.blocks:
            raise ArgumentError("blocks8", self.blocks8, f"must be 0..{self.blocks}", "pack the weight again")

    def check_values(self) -> None:
        """Raise ArgumentError for scales or an order that no weight has; read where they come from a file."""
        import torch

        if self.permutation is not None:
            check_permutation(self.permutation, self.k, self.blocks * BLOCK)
        if self.two_level:
            _check_positive("channel_scales", self.channel_scales, self.channel_scales)
        for _, unit, words in self._units():
            _, records = unit.split(words)
            if self.two_level and not self.native:
                value = weights.out_of_range(records[..., 0], 1, LARGEST_MULTIPLIER)
            else:
                scales = records.contiguous().view(torch.bfloat16).float()
                wrong = ~(scales.isfinite() & (scales > 0))
                value = float(scales[wrong][0]) if bool(wrong.any()) else None
            if value is not None:
                constraint = "its block scales must be positive and finite, multipliers in 1..16"
                raise ArgumentError("words", value, constraint, "the file is damaged: pack the weight again")
        if self.order != order_name(self.permutation):
            raise ArgumentError("order", self.order, "is not the name of its permutation", "save the weight again")

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `Packed`."""
        rows = -(-self.n // ROWS) * ROWS
        return super()._shapes() | ({"channel_scales": ((rows,), "float32")} if self.two_level else {})

    def check_sizes(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes that n, k and blocks8 ask for."""
        self.check_facts()
        super().check_sizes()
        if self.permutation is not None:
            weights.check_tensor(self, "permutation", (self.blocks * BLOCK,), "int32")

    def _summary(self) -> str:
        """Its facts, for people."""
        return f"{QuantizedWeight._summary(self)}, {self.target}"


def native(target: Target) -> bool:
    """Whether the target's tensor cores multiply s4 by s4; others widen it to s8, and need warpgroup instructions.

    Raises:
        ArgumentError: a target that can do neither.
    """
    if not (found := target.supports("mma.s4")) and not target.supports("wgmma.s8"):
        constraint = "has neither s4 tensor-core instructions (sm_80, sm_86, sm_89) nor warpgroup ones (sm_90a)"
        raise ArgumentError("target", target.arch, constraint, "use terrazzo.ops.w4a8.quantize and gemm there")
    return found


def unit_layout(bits: int) -> UnitLayout:
    """Layout of 128 channels that go to the tensor core as 4 or as 8 bits: of 16 rows (4) or 64 (8), then scales."""
    from terrazzo.layouts.units import derive_unit

    return derive_unit(LAYOUT4 if bits == 4 else LAYOUT, 2, 1, 2)


@lru_cache(maxsize=4)
def identity(native: bool, two_level: bool = False) -> str:
    """Of the byte order of a packed weight, and of what its records hold."""
    byte = unit_layout(8).identity
    return (f"{unit_layout(4).identity}|{byte}" if native else byte) + ("|two_level" if two_level else "")


def order_name(permutation: torch.Tensor | None) -> str:
    """Equal names mean equal permutations."""
    if permutation is None:
        return ""
    return hashlib.sha256(permutation.to("cpu").numpy().tobytes()).hexdigest()[:12]


def spans(blocks: int, blocks8: int, native: bool) -> list[tuple[int, slice]]:
    """(bits on the tensor core, blocks) of a packed weight, in order; empty ones left out."""
    first8 = blocks - blocks8 if native else 0
    return [
        (bits, span) for bits, span in ((4, slice(0, first8)), (8, slice(first8, blocks))) if span.start < span.stop
    ]


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels of a target, on the device where its codes are; any N >= 1.

    Args:
        target: None takes the GPU of the codes' device, or the current one.

    Raises:
        ArgumentError: not a QuantizedWeight. TargetError: see `Target.parse`.
    """
    if not isinstance(weight, QuantizedWeight):
        raise ArgumentError(
            "weight", weights.kind(weight), "must be a w4ax QuantizedWeight", "use quantize() for a float weight"
        )
    return PackedWeight._of(weight, target)


def _refuse(name: str, tensor: torch.Tensor | None, constraint: str, remedy: str) -> ArgumentError:
    seen = None if tensor is None else f"{weights.dtype_name(tensor)} {list(tensor.shape)}"
    return ArgumentError(name, seen, constraint, remedy)


def _check_positive(name: str, values: torch.Tensor, exact: torch.Tensor) -> None:
    """Positive, and `exact` no wider than bfloat16."""
    import torch

    if not bool((values.isfinite() & (values > 0)).all()):
        raise ArgumentError(name, "zero, negative or not finite", "must be positive", "use 1 for rows of zeros")
    if not torch.equal(exact.float(), exact.bfloat16().float()):
        raise ArgumentError(name, "more than 8 bits", "must be exact in bfloat16", "round with .bfloat16()")


def _check_two_level(scales: torch.Tensor, channel: torch.Tensor) -> None:
    """Scales are 1 to 16 times those of the channels."""
    if tuple(channel.shape) != scales.shape[:1] or weights.dtype_name(channel) not in FLOATS:
        raise _refuse("channel_scales", channel, f"must be a float vector [{len(scales)}]", "one for each row")
    _check_positive("channel_scales", channel, channel)
    multiple = (scales.float() / channel.float()[:, None]).round()
    wrong = (multiple * channel.float()[:, None] != scales.float()) | (multiple < 1) | (multiple > LARGEST_MULTIPLIER)
    if bool(wrong.any()):
        constraint = f"must be 1..{LARGEST_MULTIPLIER} times the channel's"
        raise ArgumentError("scales", float(scales[wrong][0]), constraint, "quantize with scales='two_level'")


def _check_padding(codes: torch.Tensor, permutation: torch.Tensor | None, k: int) -> None:
    idle = codes[:, k:] if permutation is None else codes[:, permutation.long() < 0]
    if bool(idle.any()):
        raise ArgumentError("codes", "not 0 in the padding", "padding channels have code 0", "use quantize_weight")
