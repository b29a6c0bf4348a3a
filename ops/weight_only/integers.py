"""The two forms of an integer weight: canonical (`QuantizedWeight`, a byte for each code) and packed (`PackedWeight`).

Every importer and the quantizer end in the canonical form; `pack` turns it into the one packed form that every kernel
of the format reads. These classes are those of W4A16; ops/weight_only/byte_integers.py has those of 8 bits. Both mean

    w[n, perm[j]] = (codes[n, j] - zeros[n, j // g]) * scales[n, j // g]        (perm[j] = j without act-order)

"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.grouped_codes import GROUPS as GROUPS
from terrazzo.ops.grouped_codes import MOST_ZERO, check_perm, check_scales, check_zeros, expand_groups
from terrazzo.ops.products.codes import Codes, get_codes
from terrazzo.ops.products.wide import W4A16
from terrazzo.ops.weight.base import Fields, Plain
from terrazzo.ops.weight_only.decoding import decode
from terrazzo.ops.weight_only.packed import BLOCK_K as BLOCK_K
from terrazzo.ops.weight_only.packed import BLOCK_N, WeightOnly, records, row_order

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product

LAYOUT = "w4a16"
WEIGHT = "u4"


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(Plain["PackedWeight"]):
    """A 4-bit weight [N, K] in plain rows, of 8 bits in w8a16. Build it with `canonical`, which checks it.

    Attributes:
        codes: uint8 [N, K], 0..15 or 0..255.
        scales: f16, bf16 or f32 [N, G], G = ceil(K / group_size).
        zeros: uint8 [N, G], 0..16 (16 occurs in GPTQ v1 checkpoints) or 0..255; None means 8, or 128, everywhere
            (symmetric).
        group_size: 32, 64, 128 or K.
        perm: int32 [K] | None; column j of `codes` is input channel perm[j] (act-order).
        bias: [N] | None.
    """

    _product: ClassVar[Product] = W4A16
    weight: ClassVar[str] = WEIGHT
    bits: ClassVar[int] = 4

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    @dlpack.accepting
    def canonical(
        cls,
        codes: SupportsDLPack,
        scales: SupportsDLPack,
        zeros: SupportsDLPack | None = None,
        *,
        group_size: int | None = None,
        perm: SupportsDLPack | None = None,
        bias: SupportsDLPack | None = None,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values, and bring the weight to canonical form.

        Args:
            codes: integers [N, K], 0..15; of 8 bits 0..255.
            scales: f16, bf16 or f32 [N, G]; finite.
            zeros: integers [N, G], 0..16, or None for 8. All 8 becomes None. Of 8 bits 0..255, and 128.
            group_size: input channels for each scale; None or -1 derives it from K and G. A multiple of 32 is
                expanded to 128, 64 or 32 (its scales are repeated), a group that holds all of K becomes K.
            perm: integers [K], a permutation; the identity becomes None.
            bias: f16, bf16 or f32 [N].

        Raises:
            ArgumentError: for anything that does not fit; the message names the argument and the remedy.
        """
        import torch

        codes, scales, zeros, perm, bias = weights.as_tensors(
            codes=codes, scales=scales, zeros=zeros, perm=perm, bias=bias
        )
        other = "; weights of 8 bits are those of w8a16" if cls.bits == 4 else ""
        last, remedy = (1 << cls.bits) - 1, f"add {1 << cls.bits - 1} to signed codes{other}"
        n, k = weights.check_codes(codes, 0, last, remedy)
        group_size = check_scales(scales, n, k, group_size)
        zeros = check_zeros(zeros, scales, cls.bits)
        if group_size not in (k, *GROUPS):
            group_size, source = expand_groups(group_size, k, scales.device)
            scales, zeros = scales[:, source], None if zeros is None else zeros[:, source]
        if perm is not None:
            perm = check_perm(perm, k)
        return cls(
            codes=codes.to(torch.uint8).contiguous(),
            scales=scales.contiguous(),
            group_size=group_size,
            zeros=None if zeros is None else zeros.contiguous(),
            perm=perm,
            bias=weights.bias_of(bias, n),
        )

    @property
    def format(self) -> Codes:
        """What its codes are, a value of `terrazzo.ops.products.codes`."""
        return get_codes(self.weight)

    @property
    def scale_dtype(self) -> str:
        """ "float16", "bfloat16" or "float32"."""
        return weights.dtype_name(self.scales)

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 8 (of 8 bits: 128) and not stored."""
        return self.zeros is None

    def dequantize(self, numerics: str = "exact", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Float weight [N, K] in input-channel order; see `reference.dequantize`."""
        return decode(self, numerics, dtype)

    def _summary(self) -> str:
        """Its facts, for people."""
        group = "K" if self.group_size >= self.k else self.group_size
        parts = [f"group={group}", "symmetric" if self.symmetric else "zeros", f"scales={self.scale_dtype}"]
        return ", ".join(parts + ["act-order"] * (self.perm is not None) + ["bias"] * (self.bias is not None))


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(WeightOnly[QuantizedWeight], of=QuantizedWeight):
    """A 4-bit weight in the derived layout that every W4A16 kernel of every target reads. Np, Kp, Gp: padded sizes.

    Attributes:
        words: int32 [Kp/64, Np/64, 512]; 8 codes to a word, in the order of layout `w4a16`.
        params: uint8 [Gp, Np/64, R]; R = 64 scales (order: warp, g, pair), then, unless symmetric, 64 zeros in the
            same order.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128, Gp = 1 when one group holds all of K, else
            Kp/group_size. Padded codes, scales and zeros are 0.
        group_size: 32, 64, 128 or k.
        scale_dtype: "float16", "bfloat16" or "float32".
        symmetric: True when there is no zeros plane and every zero point is 8.
        layout: identity of the layout that packed `words`; a kernel built for another one refuses the weight by name.
        perm: int32 [k] | None; y = x[..., perm] @ unpermuted^T (act-order).
        bias: [n] | None.
        target: architecture it was packed for, None for any (today one layout serves all targets).
    """

    VERSION = W4A16.version
    weight: ClassVar[str] = WEIGHT

    words: torch.Tensor
    params: torch.Tensor
    n: int
    k: int
    group_size: int
    scale_dtype: str
    symmetric: bool
    layout: str
    perm: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    target: str | None = None

    @property
    def groups(self) -> int:
        """Stored groups Gp."""
        return self.params.shape[0]

    @classmethod
    def _planes(cls, weight: QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        return records(weight, weight.scales, weight.zeros, None)

    def _rows(self) -> Fields:
        """See `Packed`."""
        codes, scales, zeros, _ = self._stored()
        return {"codes": codes, "scales": scales, "zeros": None if self.symmetric else zeros}

    def dequantize(self, numerics: str = "exact", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Float weight [N, K] in input-channel order, read back from the packed bytes.

        numerics, dtype: see `reference.dequantize`.
        """
        return self.unpack().dequantize(numerics, dtype)

    def check_values(self) -> None:
        """Raise ArgumentError for scales that are not finite, zero points out of range, a perm that is none."""
        scales, zeros, _ = self._parts()
        weights.check_finite("params", scales, "the file is damaged: get it again, or pack the weight again")
        most = MOST_ZERO[self.format.bits]
        if (value := weights.out_of_range(zeros, 0, most)) is not None:
            raise ArgumentError("params", value, f"its zero points must be in 0..{most}", "pack the weight again")
        if self.perm is not None:
            check_perm(self.perm, self.k)

    def with_zero_points(self) -> PackedWeight:
        """The same weight with a plane of zero points, all the same, where it is symmetric."""
        import torch

        if not self.symmetric:
            return self
        groups = -(-self.k // self.group_size)
        same = self.params.new_full((self.n, groups), self.format.zero)
        rows, columns = self.params.shape[1] * BLOCK_N - self.n, self.groups - groups
        plane = row_order(self.format).pack(torch.nn.functional.pad(same, (0, columns, 0, rows))).transpose(0, 1)
        return replace(self, params=torch.cat([self.params, plane], dim=-1).contiguous(), symmetric=False)

    @classmethod
    def alike(cls, experts: list[PackedWeight]) -> list[PackedWeight]:
        """Experts that are stored alike: if one has zero points, all get a plane of them."""
        if len({expert.symmetric for expert in experts}) < 2:
            return experts
        return [expert.with_zero_points() for expert in experts]

    _summary = QuantizedWeight._summary


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    zeros: SupportsDLPack | None = None,
    *,
    group_size: int | None = None,
    perm: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack a 4-bit weight for the kernels, on the device where its codes are.

    Args:
        codes: integers [N, K] 0..15, or a QuantizedWeight (then the other tensors must be left out).
        scales: float [N, G]. zeros: integers [N, G] 0..16, or None for 8. perm: int [K]. bias: float [N].
        group_size: input channels for each scale. All of them: see `QuantizedWeight.canonical`.
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Any N >= 1 and K >= 1: rows are padded to 64 and input channels to 128 with code 0 and scale 0.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`; a PackedWeight. TargetError: see `Target.parse`.
    """
    return made(QuantizedWeight, codes, scales, zeros, group_size, perm, bias).pack(target=target)


def made(
    kind: type[QuantizedWeight],
    codes: torch.Tensor | QuantizedWeight,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    group_size: int | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> QuantizedWeight:
    """The canonical weight of what `pack` of a format takes: tensors, or one that is canonical already."""
    if hasattr(codes, "words"):
        raise ArgumentError("codes", repr(codes), "is packed already", "call unpack() first to pack it again")
    if isinstance(codes, QuantizedWeight):
        if type(codes) is not kind:
            raise ArgumentError("codes", weights.kind(codes), "is of another format", "call its own pack()")
        given = {"scales": scales, "zeros": zeros, "group_size": group_size, "perm": perm, "bias": bias}
        for name in (name for name, value in given.items() if value is not None):
            raise ArgumentError(
                name, "given", "must be left out when codes is a QuantizedWeight", "put it into the QuantizedWeight"
            )
        return codes
    return kind.canonical(codes, scales, zeros, group_size=group_size, perm=perm, bias=bias)
