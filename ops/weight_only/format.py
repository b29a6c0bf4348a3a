"""The two forms of a weight whose codes are small floats: canonical (`QuantizedWeight`) and packed (`PackedWeight`).

    w[n, k] = value(codes[n, k]) * scales[n, k // g]

What a code is worth, its bits and the scales' form are those of a format of `terrazzo.ops.products`. Every importer and
quantizer ends in the canonical form; `pack` turns it into the one packed form that the kernels of the format read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.products.codes import HALVES, SMALL_SCALES, Codes, get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.wide import FP8
from terrazzo.ops.weight.base import Canonical, Fields, Packed, Plain
from terrazzo.ops.weight_only import small_scales
from terrazzo.ops.weight_only.packed import WeightOnly, records

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.products.product import Product

MOST_STEPS = 127
"""A scale further below the row's largest counts as 2^-127 of it: a float32 sum would not show it."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(Plain["PackedWeight"]):
    """A weight [N, K] in plain rows. Build it with `canonical`, which checks it.

    Attributes:
        codes: uint8 [N, K], the bits of each small float.
        scales: [N, G], G = ceil(K / group_size): uint8 e8m0 (2^(scale - 127)), uint8 e4m3 above 0, or float32; of
            groups of FP8 and NF4 also bfloat16 or float16. Those of NF4 may be below 0.
        group_size: of the format's, or K.
        weight: name of the format, "mxfp4", "nvfp4", "fp8" or "nf4".
        bias: [N] | None.
        factors: of NVFP4, float32 [N]: what each row is multiplied by besides its scales; None of others.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    weight: str
    bias: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @classmethod
    def canonical(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        weight: str,
        group_size: int,
        bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values.

        Args:
            codes: uint8 [N, K] of the format's bits, or float8_e4m3fn.
            scales: [N, G], e4m3 ones as float8_e4m3fn or its bytes, or float32 to be expanded: [] or [1] for all rows,
                [N] or [N, 1] for each, [ceil(N / 128), ceil(K / 128)] for blocks.
            weight: name of the format. group_size: k of a scale.
            bias: f16, bf16 or f32 [N].
            factors: of formats with e4m3 scales, float32 [], [1] or [N], above 0; None for 1.

        Codes of a group whose e4m3 scale is negative change their signs; where it is 0, they become 0.

        Raises:
            ArgumentError: for anything that does not fit, and for codes and scales that are NaN or, of float32 scales,
                infinite or negative.
        """
        form = get_codes(weight)
        codes = _codes(weights.as_tensor("codes", codes), form)
        n, k = codes.shape
        scales = weights.as_tensor("scales", scales, codes.device)
        if form.scales == ("e4m3",):
            codes, scales = small_scales.signless(codes, scales, group_size, form)
            factors = small_scales.factors_of(factors, n, codes.device)
        else:
            scales = _scales(scales, n, k, group_size, form)
            if factors is not None:
                constraint = f"are of formats with e4m3 scales, not of {form.name}"
                raise ArgumentError("factors", weights.described(factors), constraint, "put them into the scales")
        bias = None if bias is None else weights.bias_of(weights.as_tensor("bias", bias, codes.device), n)
        return cls(codes, scales, min(group_size, k) if form.one_group else group_size, form.name, bias, factors)

    @property
    def _product(self) -> Product:
        """See `Canonical`."""
        return of_codes(self.weight)

    @property
    def format(self) -> Codes:
        """What its codes are, a value of `terrazzo.ops.products.codes`."""
        return get_codes(self.weight)

    @property
    def scale_dtype(self) -> str:
        """ "e8m0", "e4m3", "float32" or, of groups, "bfloat16" or "float16"."""
        own = self.format.scales[0]
        return own if own in SMALL_SCALES else weights.dtype_name(self.scales)

    @property
    def symmetric(self) -> bool:
        """True: codes are numbers as they are."""
        return True

    def dequantize(self, numerics: str = "exact", dtype: torch.dtype | None = None) -> torch.Tensor:
        """float64 [N, K], exactly what codes and scales mean, but what an operand keeps of them where scales are folded
        into it (products/codes.py): in float16 as `dtype`, and of FP8 with 16-bit scales."""
        import torch

        form = self.format
        folded = numerics != "post" and self.scale_dtype in HALVES
        table = torch.tensor(form.values, dtype=torch.float64, device=self.codes.device)
        if (kept := self.scales.dtype if folded else dtype) is not None:
            table = table.to(kept).double()  # exact, of values that are floats of few bits
        values = table[self.codes.long()]
        if self.factors is not None:
            scales = self.scales.view(torch.float8_e4m3fn).double()
            return values * _per_column(scales, self) * self.factors.double()[:, None]
        if form.scales != ("e8m0",):
            values = values * _per_column(self.scales, self).double()
            return values.to(self.scales.dtype).double() if folded else values
        largest = largest_scales(self)
        steps = _per_column(largest - self.scales.int(), self)
        values = torch.ldexp(values, -steps.clamp(max=1000))
        if dtype == torch.float16 and numerics != "post":
            values = values.half().double()
        return torch.ldexp(values, largest - 127)

    def _summary(self) -> str:
        """Its facts, for people."""
        group = "K" if self.group_size >= self.k and self.format.one_group else self.group_size
        return f"{self.weight}, group={group}" + ", bias" * (self.bias is not None)


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(WeightOnly[QuantizedWeight], of=QuantizedWeight):
    """A weight in the derived layout that every kernel of its format and of every target reads. Np, Kp: padded sizes.

    Attributes:
        words: int32 [Kp/KB, Np/64, 512]; codes in the order of the format's layout, KB k in a block.
        params: uint8 [records, Np/64, R]: for each group of k the scales of 64 rows (order: warp, g, pair), e8m0 ones
            as the power of two that lacks to the row's largest; e4m3 ones of four groups in the words and bytes of
            products/codes.py; then, in records of R bytes, 64 float32 factors of
            rows, in their order: the row's largest power of two, or its scale or factor.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128. Padded codes, scales and factors are 0.
        group_size: of the format's, or k. weight: name of the format. scale_dtype: of the scales of groups.
        layout: identity of the layout that packed `words`; a kernel built for another one refuses the weight by name.
        bias: [n] | None.
        target: architecture it was packed for, None for any (today one layout serves all targets).
    """

    VERSION = FP8.version
    symmetric: ClassVar[bool] = True
    perm: ClassVar[None] = None

    words: torch.Tensor
    params: torch.Tensor
    n: int
    k: int
    group_size: int
    weight: str
    scale_dtype: str
    layout: str
    bias: torch.Tensor | None = None
    target: str | None = None

    @property
    def GROUPS(self) -> tuple[int, ...]:
        """Group sizes of the format, besides K."""
        return self.format.groups

    @classmethod
    def _planes(cls, weight: QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        import torch

        form = weight.format
        if form.scales == ("e8m0",):
            largest = largest_scales(weight)
            factors = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), largest - 127).float()
            scales = (largest - weight.scales.int()).clamp(0, MOST_STEPS).to(torch.uint8)
        elif weight.factors is not None:
            scales, factors = small_scales.stored(weight.scales), weight.factors[:, None]
        elif form.one_group and weight.group_size >= weight.k:
            scales, factors = None, weight.scales.float()
        else:
            scales, factors = _relative(weight.scales, form)
        return records(weight, scales, None, factors)

    def _rows(self) -> Fields:
        """See `Packed`."""
        import torch

        codes, scales, _, factors = self._stored()
        if self.scale_dtype == "e4m3":
            return {"codes": codes, "scales": small_scales.loaded(scales), "factors": factors.clone()}
        if self.scale_dtype == "e8m0":
            largest = torch.frexp(factors).exponent[:, None] - 1 + 127
            scales = (largest - scales.int()).clamp(0, 254).to(torch.uint8)
        elif scales.numel():
            exact = torch.ldexp(scales.double(), torch.tensor(-self.format.lacks.get(self.scale_dtype, 0)))
            scales = (exact * factors[:, None].double()).to(scales.dtype)
        else:
            scales = factors[:, None]
        return {"codes": codes, "scales": scales.contiguous()}

    def dequantize(self, numerics: str = "exact", dtype: torch.dtype | None = None) -> torch.Tensor:
        """float64 [N, K], read back from the packed bytes; see `QuantizedWeight.dequantize`."""
        return self.unpack().dequantize(numerics, dtype)

    def check_facts(self) -> None:
        """Raise ArgumentError unless the format is known and n, k and group_size are such as `pack` writes."""
        super().check_facts()
        if self.group_size not in self.format.groups and not self.format.one_group:
            constraint = f"must be one of {self.format.groups}"
            raise ArgumentError("group_size", self.group_size, constraint, "pack the weight again")

    def check_values(self) -> None:
        """Raise ArgumentError for values that `pack` does not write; read where they come from a file."""
        scales, _, factors = self._parts()
        remedy = "the file is damaged: get it again, or pack the weight again"
        weights.check_finite("params", factors, remedy, least=0)
        most = {"e8m0": MOST_STEPS, "e4m3": small_scales.LAST}.get(self.scale_dtype)
        if most is None:
            weights.check_finite("params", scales, remedy, least=None if self.format.signed else 0)
        elif bool((scales > most).any()):
            raise ArgumentError("params", int(scales.max()), f"must be at most {most}", remedy)

    _summary = QuantizedWeight._summary


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Any N >= 1 and K >= 1: rows are padded to 64 and input channels to 128 with code 0 and scale 0.

    Raises:
        ArgumentError: no `QuantizedWeight` of these formats. TargetError: see `Target.parse`.
    """
    if not isinstance(weight, QuantizedWeight):
        remedy = "call unpack() first to pack it again" if hasattr(weight, "words") else "make one with canonical()"
        raise ArgumentError("weight", weights.kind(weight), "must be a QuantizedWeight", remedy)
    return PackedWeight._of(weight, target)


def made(
    codes: torch.Tensor | QuantizedWeight,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: str,
    group_size: int | None,
    factors: torch.Tensor | None = None,
) -> QuantizedWeight:
    """The canonical weight of what a family's `pack` takes: tensors, or one that is canonical already."""
    if isinstance(codes, QuantizedWeight) and codes.weight == weight:
        given = {"scales": scales, "bias": bias, "factors": factors}
        for name in (name for name, value in given.items() if value is not None):
            constraint = "must be left out when codes is a QuantizedWeight"
            raise ArgumentError(name, "given", constraint, "put it into the QuantizedWeight")
        return codes
    if isinstance(codes, Canonical | Packed):
        remedy = "call unpack() first to pack it again" if hasattr(codes, "words") else "call its own pack()"
        raise ArgumentError("codes", weights.kind(codes), f"must be codes or a {weight}.QuantizedWeight", remedy)
    if scales is None or group_size is None:
        name, value = ("scales", None) if scales is None else ("group_size", group_size)
        raise ArgumentError(name, value, "is needed beside codes [N, K]", "pass the scales of the layer")
    facts = dict(weight=weight, group_size=group_size, bias=bias, factors=factors)
    return QuantizedWeight.canonical(codes, scales, **facts)


def _relative(scales: torch.Tensor, form: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of groups as they are stored, and float32 factors of rows: of 16-bit scales a power of two of the row."""
    import torch

    if scales.dtype == torch.float32:
        return scales, torch.ones_like(scales[:, :1])
    largest = torch.frexp(scales.float().abs().amax(1, keepdim=True)).exponent - 1
    lacks = form.lacks.get(weights.dtype_name(scales), 0)
    stored = torch.ldexp(scales.double(), lacks - largest).to(scales.dtype)
    return stored, torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest)


def used_groups(weight: QuantizedWeight) -> torch.Tensor:
    """bool [N, G]: groups that are not all zeros."""
    import torch

    (n, groups), size = weight.scales.shape, weight.group_size
    codes = torch.nn.functional.pad(weight.codes, (0, groups * size - weight.k))
    sign = 1 << (weight.format.bits - 1)
    return (codes.view(n, groups, size) & (sign - 1) != 0).any(-1)


def largest_scales(weight: QuantizedWeight) -> torch.Tensor:
    """int32 [N, 1]: the largest e8m0 scale of each row, of groups that are not all zeros; 127 of rows that are."""
    import torch

    largest = torch.where(used_groups(weight), weight.scales.int(), -1).amax(1, keepdim=True)
    return torch.where(largest < 0, 127, largest)


def _codes(codes: torch.Tensor, form: Codes) -> torch.Tensor:
    import torch

    if form.bits == 8 and weights.dtype_name(codes) == "float8_e4m3fn":
        codes = codes.contiguous().view(torch.uint8)
    if codes.dtype != torch.uint8 or codes.ndim != 2 or 0 in codes.shape:
        seen = f"{weights.dtype_name(codes)} {list(codes.shape)}"
        dtypes = "uint8 or float8_e4m3fn" if form.bits == 8 else "uint8"
        raise ArgumentError("codes", seen, f"must be {dtypes} [N, K] with N, K >= 1", "pass one code for each weight")
    if form.bits < 8 and (value := weights.out_of_range(codes, 0, (1 << form.bits) - 1)) is not None:
        raise ArgumentError("codes", value, f"must have {form.bits} bits", "unpack them: one code for each byte")
    if form.bits == 8 and bool(((codes & 127) == 127).any()):
        raise ArgumentError("codes", "NaN", "must be numbers", "the checkpoint is damaged: get it again")
    return codes.contiguous()


def _scales(scales: torch.Tensor, n: int, k: int, group_size: int, form: Codes) -> torch.Tensor:
    """[N, G] of what `canonical` takes."""
    import torch

    known = group_size in form.groups or (form.one_group and group_size == k)
    if type(group_size) is not int or not known:
        choices = f"{form.groups}" + (f" or K = {k}" if form.one_group else "")
        raise ArgumentError("group_size", group_size, f"must be one of {choices}", "pass the k of a scale")
    groups = -(-k // group_size)
    seen = f"{weights.dtype_name(scales)} {list(scales.shape)}"
    if form.scales == ("e8m0",):
        if weights.dtype_name(scales) == "float8_e8m0fnu":
            scales = scales.view(torch.uint8)
        if scales.dtype != torch.uint8 or tuple(scales.shape) != (n, groups):
            constraint = f"must be uint8 [{n}, {groups}], e8m0 for each {group_size} k"
            raise ArgumentError("scales", seen, constraint, "pass the exponents' bytes")
        if bool((scales == 255).any()):
            raise ArgumentError("scales", 255, "e8m0 255 is NaN", "the checkpoint is damaged: get it again")
        return scales.contiguous()
    if not scales.dtype.is_floating_point:
        raise ArgumentError("scales", seen, "must be floats", "pass float32 scales")
    shape = tuple(scales.shape)
    own = group_size in form.groups and (groups > 1 or not form.one_group)
    scales = scales if own and weights.dtype_name(scales) in form.scales else scales.float()
    if not bool(torch.isfinite(scales).all()) or (not form.signed and bool((scales < 0).any())):
        constraint = "must be finite" + " and not negative" * (not form.signed)
        raise ArgumentError("scales", float(scales.min()), constraint, "get the checkpoint again")
    if form.one_group and group_size == k and scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1).contiguous()
    if group_size == k and shape in ((n,), (n, 1)):
        return scales.reshape(n, 1).contiguous()
    blocks = (-(-n // 128), -(-k // 128))
    if group_size == 128 and shape == blocks and shape != (n, groups):
        return scales.repeat_interleave(128, dim=0)[:n].contiguous()
    if shape == (n, groups):
        return scales.contiguous()
    one = f"[], [{n}] or [{n}, 1] or " if form.one_group and group_size == k else f"{list(blocks)} or " * form.one_group
    raise ArgumentError("scales", seen, f"must be float {one}[{n}, {groups}]", "pass the scales of the layer")


def _per_column(values: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[N, G] -> [N, K]: the value that belongs to each column of codes."""
    return values.repeat_interleave(weight.group_size, dim=1)[:, : weight.k]
