"""The two forms of a W8A8 weight: canonical (`QuantizedWeight`) and packed (`PackedWeight`).

    w[n, k] = codes[n, k] * scales[n]                        int8 codes, or e4m3
    w[n, k] = codes[n, k] * scales[n, k // 128]              e4m3 in blocks, alike in 16 rows or more

Activations are int8 codes for int8 weights, e4m3 ones for e4m3, with a scale for each token, or for 128 k of it in
blocks; `input_scale` makes them static.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import dlpack, weights
from terrazzo.ops.products.direct import W8A8, W8A8_FP8
from terrazzo.ops.weight.base import Fields, Packed, Plain

if TYPE_CHECKING:
    import torch
    from terrazzo.layouts.packed import PackedLayout
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product

LAYOUT = "w8a8"
BLOCK = 128
ROW_GROUP = 16
"""Rows that share a scale of 128 k in a packed weight; a published block has 128."""
CODES = {"int8": "int8", "float8_e4m3fn": "e4m3"}
PRODUCTS = {"int8": W8A8, "e4m3": W8A8_FP8}
LARGEST_K = 132104
"""Longest row whose sums of s8 x s8 products stay in int32."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(Plain["PackedWeight"]):
    """A W8A8 weight [N, K] in plain rows. Build it with `canonical`, which checks it.

    Attributes:
        codes: int8 or float8_e4m3fn [N, K].
        scales: float32 [N], or [N, ceil(K / 128)] of e4m3 in blocks, alike in rows 16 i .. 16 i + 15; not negative.
            Blocks have K > 128: of a shorter row they are scales for each row.
        input_scale: of all activations; None: each token has its own.
        input_zero: zero point of all activations, with input_scale and int8.
        asymmetric: whether activations have zero points, int8 without input_scale.
        smooth: float32 [K] | None; activations are divided by it before they are quantized.
        bias: [N] | None.
        ue8m0: whether scales of activations are rounded up to powers of two, with blocks or K of at most 128.
    """

    _shown: ClassVar[str] = "w8a8."

    codes: torch.Tensor
    scales: torch.Tensor
    input_scale: float | None = None
    input_zero: int = 0
    asymmetric: bool = False
    smooth: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    ue8m0: bool = False

    @classmethod
    @dlpack.accepting
    def canonical(
        cls,
        codes: SupportsDLPack,
        scales: SupportsDLPack,
        *,
        input_scale: SupportsDLPack | float | None = None,
        input_zero: SupportsDLPack | int | None = None,
        asymmetric: bool = False,
        smooth: SupportsDLPack | None = None,
        bias: SupportsDLPack | None = None,
        ue8m0: bool = False,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values; see the attributes.

        Args:
            codes: int8 or float8_e4m3fn [N, K]. asymmetric: see the attributes.
            scales: float [] or [1] for all rows, [N] or [N, 1] for each, [ceil(N / 128), ceil(K / 128)] for blocks of
                e4m3, or what the attribute says.
            input_scale: float or one element. input_zero: an integer -128..127, or one element.
            smooth: positive float [K]. bias: float [N]. ue8m0: see the attributes.

        Raises:
            ArgumentError: for anything that does not fit; e4m3 codes that are NaN; scales that are not finite, or
                negative.
        """
        import torch

        codes = weights.as_tensor("codes", codes)
        if codes.ndim != 2 or 0 in codes.shape or weights.dtype_name(codes) not in CODES:
            seen = f"{weights.dtype_name(codes)} {list(codes.shape)}"
            constraint = "must be int8 or float8_e4m3fn [N, K], N, K >= 1"
            raise ArgumentError("codes", seen, constraint, "use quantize() for a float weight")
        (n, k), e4m3 = codes.shape, codes.dtype == torch.float8_e4m3fn
        if e4m3 and bool((codes.view(torch.uint8) & 127 == 127).any()):
            raise ArgumentError("codes", "NaN", "must be numbers", "repair the checkpoint")
        if k > LARGEST_K and not e4m3:
            raise ArgumentError("codes", list(codes.shape), f"K > {LARGEST_K}: sums may leave int32", "split along K")
        scales = _scales(scales, n, k, e4m3, codes.device)
        scale = _number("input_scale", input_scale)
        zero = 0 if input_zero is None else _number("input_zero", input_zero)
        _check_input_scale(scale)
        if not -128 <= zero <= 127 or zero != int(zero):
            raise ArgumentError("input_zero", zero, "must be an integer -128..127", "repair the checkpoint")
        if zero and (e4m3 or scale is None):
            raise ArgumentError("input_zero", zero, "needs int8 codes and input_scale", "pass both, or no zero point")
        if type(asymmetric) is not bool or (asymmetric and (e4m3 or scale is not None)):
            constraint = "zero points of each token need int8 codes, and no input_scale"
            raise ArgumentError("asymmetric", asymmetric, constraint, "leave it False")
        if scale is not None and scales.ndim == 2:
            constraint = "must be None: activations of blocks have a scale for each 128 k"
            raise ArgumentError("input_scale", scale, constraint, "leave it out")
        _check_ue8m0(ue8m0, e4m3, scale, scales.ndim == 2, k)
        if smooth is not None:
            smooth = weights.as_tensor("smooth", smooth, codes.device)
            _check_vector("smooth", smooth, k)
            if not bool((smooth > 0).all()):
                raise ArgumentError("smooth", float(smooth.min()), "must be positive", "clamp it before folding it")
            smooth = smooth.float().contiguous()
        if bias is not None:
            bias = weights.as_tensor("bias", bias, codes.device).contiguous()
            _check_vector("bias", bias, n)
        return cls(codes.contiguous(), scales, scale, int(zero), asymmetric, smooth, bias, ue8m0)

    @property
    def _product(self) -> Product:
        """See `Canonical`."""
        return PRODUCTS[self.form]

    @property
    def form(self) -> str:
        """Of the codes, "int8" or "e4m3"."""
        return CODES[weights.dtype_name(self.codes)]

    @property
    def block(self) -> bool:
        """Whether scales belong to blocks."""
        return self.scales.ndim == 2

    @property
    def group_size(self) -> int:
        """Input channels of a scale."""
        return BLOCK if self.block else self.k

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], exact: the weight of x / smooth."""
        if not self.block:
            return self.codes.double() * self.scales.double()[:, None]
        return self.codes.double() * self.scales.double().repeat_interleave(BLOCK, 1)[:, : self.k]

    def _summary(self) -> str:
        """Its facts, for people."""
        parts = [
            self._product.codes.name,
            *(["blocks"] if self.block else []),
            *(["static"] if self.input_scale is not None else []),
        ]
        parts += ["asymmetric"] if self.asymmetric or self.input_zero else []
        parts += ["ue8m0"] if self.ue8m0 else []
        return ", ".join(parts + [name for name in ("smooth", "bias") if getattr(self, name) is not None])


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(Packed[QuantizedWeight], of=QuantizedWeight):
    """A W8A8 weight in the derived layout that kernels of every target read. Np, Kp: padded to 64 and 128.

    Attributes:
        words: int32 [Kp/128, Np/64, 2048], tiles of 64 rows x 128 input channels as wgmma reads them.
        scales: float32 [2, Np] of int8, scales and sums of the codes of rows; [1, Np] of e4m3; [Kp/128, Np/16]
            of blocks. 0 in the padding.
        n, k: true sizes.
        codes: "int8" or "e4m3". block: whether scales belong to blocks.
        layout: identity of the layout and the codes; a kernel built for another one refuses the weight.
        input_scale, input_zero, asymmetric, smooth, bias, ue8m0: as of `QuantizedWeight`.
        target: architecture it was packed for, None for any that multiplies such codes (one layout serves all).
    """

    VERSION = W8A8.version
    GROUPS: ClassVar[tuple[int, ...]] = (BLOCK,)

    words: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    codes: str
    block: bool
    layout: str
    input_scale: float | None = None
    input_zero: int = 0
    asymmetric: bool = False
    smooth: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    target: str | None = None
    ue8m0: bool = False

    @property
    def group_size(self) -> int:
        """Input channels of a scale."""
        return BLOCK if self.block else self.k

    @property
    def ACTIVATIONS(self) -> str:
        """What activations become: "int8", "e4m3" or "e4m3_block128"."""
        return f"{self.codes}_block{BLOCK}" if self.block else self.codes

    @property
    def _product(self) -> Product:
        """See `Packed`."""
        return PRODUCTS[self.codes]

    @classmethod
    def _planes(cls, weight: QuantizedWeight, arch: str | None) -> Fields:
        """See `Packed`."""
        import torch
        from torch.nn.functional import pad

        if arch is not None:
            PRODUCTS[weight.form].check(Target.parse(arch))
        rows = -(-weight.n // 64) * 64
        if weight.block:
            scales = _of_groups(weight.scales).T
            scales = pad(scales, (0, rows // ROW_GROUP - scales.shape[1]))
        else:
            sums = [] if weight.form == "e4m3" else [weight.codes.sum(1, dtype=torch.int32).float()]
            scales = pad(torch.stack([weight.scales, *sums]), (0, rows - weight.n))
        words = layout_of().pack(weight.codes.view(torch.int8))
        return dict(words=words, scales=scales.contiguous(), codes=weight.form)

    def _rows(self) -> Fields:
        """See `Packed`."""
        import torch

        codes = layout_of().unpack(self.words, self.n, self.k).view(getattr(torch, _dtype(self.codes)))
        if self.block:
            return dict(codes=codes, scales=self.scales.T.repeat_interleave(ROW_GROUP, 0)[: self.n].contiguous())
        return dict(codes=codes, scales=self.scales[0, : self.n].contiguous())

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity(self.codes)

    def check_facts(self) -> None:
        """Raise ArgumentError unless the plain fields are such as `pack` makes."""
        super().check_facts()
        if self.codes not in CODES.values():
            raise ArgumentError("codes", self.codes, f"must be one of {tuple(CODES.values())}", "pack the weight again")
        _check_input_scale(_number("input_scale", self.input_scale))
        _check_ue8m0(self.ue8m0, self.codes == "e4m3", self.input_scale, self.block, self.k)

    def check_values(self) -> None:
        """Raise ArgumentError for values that no weight has."""
        import torch

        super().check_values()
        weights.check_finite("scales", self.scales, "save the weight again")
        scales = self.scales if self.block else self.scales[:1]  # what stands below is sums of codes
        weights.check_finite("scales", scales, "save the weight again", least=0)
        if self.codes == "e4m3":  # bytes as they are: 0x7F and 0xFF are NaN, the largest of each way to read them
            largest = [int(self.words.view(kind).max()) for kind in (torch.int8, torch.uint8)]
            if 127 in largest[:1] or 255 in largest[1:]:
                raise ArgumentError("words", "NaN", "its codes must be numbers", "the file is damaged: get it again")

    _summary = QuantizedWeight._summary


def layout_of() -> PackedLayout:
    """The layout of packed codes."""
    from terrazzo.layouts.instances import get_instance

    return get_instance(LAYOUT)


def layout_identity(codes: str) -> str:
    """The bytes lie alike; what they mean is in front."""
    return f"{codes}:{layout_of().identity}"


def pack(weight: QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are; any N >= 1 and K >= 1.

    Args:
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: not a QuantizedWeight of this module, or e4m3 for a target without it. TargetError: see
            `Target.parse`.
    """
    if not isinstance(weight, QuantizedWeight):
        raise ArgumentError("weight", weights.kind(weight), "must be a w8a8.QuantizedWeight", "use quantize()")
    return PackedWeight._of(weight, target)


def _of_groups(scales: torch.Tensor) -> torch.Tensor:
    """float32 [ceil(N / 16), ceil(K / 128)] of scales [N, ceil(K / 128)].

    Raises:
        ArgumentError: naming `scales`, where 16 rows have not the same: a block begins inside of them.
    """
    import torch

    first = scales[::ROW_GROUP]
    if not torch.equal(first.repeat_interleave(ROW_GROUP, 0)[: len(scales)], scales):
        constraint = f"must be alike in rows {ROW_GROUP} i .. {ROW_GROUP} i + {ROW_GROUP - 1}, which a warp multiplies"
        remedy = f"cut and join layers of blocks at multiples of {ROW_GROUP} rows"
        raise ArgumentError("scales", "other ones", constraint, remedy)
    return first


def _dtype(codes: str) -> str:
    return {form: dtype for dtype, form in CODES.items()}[codes]


def _scales(scales: object, n: int, k: int, e4m3: bool, device: torch.device) -> torch.Tensor:
    """float32 [N], or [N, ceil(K / 128)], of what a caller passed."""
    given = weights.as_tensor("scales", scales, device)
    shape, depth = tuple(given.shape), -(-k // BLOCK)
    whole, blocks = (n, depth), (-(-n // BLOCK), depth)
    known = [(), (1,), (n,), (n, 1), (1, 1), *([whole, blocks] if e4m3 else [])]
    if shape not in known or not given.dtype.is_floating_point:
        wanted = f"floats [], [1], [{n}] or [{n}, 1]" + (f", or {list(blocks)} of blocks" if e4m3 else "")
        raise ArgumentError("scales", weights.described(given), f"must be {wanted}", "pass one for each row")
    given = given.float()
    if not bool(given.isfinite().all()) or bool((given < 0).any()):
        bad = given[~(given.isfinite() & (given >= 0))][0]
        raise ArgumentError("scales", float(bad), "must be finite and not negative", "repair the checkpoint")
    if len(shape) < 2 or shape == (n, 1) or (shape == (1, 1) and not (e4m3 and shape == blocks and depth > 1)):
        return given.reshape(-1).expand(n).contiguous() if given.numel() == 1 else given.reshape(n).contiguous()
    scales = given if shape == whole else given.repeat_interleave(BLOCK, 0)[:n]
    return (scales if depth > 1 else scales[:, 0]).contiguous()  # a block that holds all of K is a scale for each row


def _check_ue8m0(ue8m0: bool, e4m3: bool, input_scale: float | None, block: bool, k: int) -> None:
    """Raise ArgumentError unless a quantizer rounds the scales of such activations to powers of two."""
    if type(ue8m0) is not bool:
        raise ArgumentError("ue8m0", ue8m0, "must be True or False", "leave it False")
    if ue8m0 and (not e4m3 or input_scale is not None or not (block or k <= BLOCK)):
        constraint = "rounds scales of 128 columns of dynamic e4m3 activations, which weights with blocks have"
        raise ArgumentError("ue8m0", True, constraint, "leave it False, or pass the scales of blocks")


def _check_input_scale(scale: float | None) -> None:
    """Raise ArgumentError unless kernels can divide by it: its float32 value and the reciprocal of that are finite."""
    import torch

    if scale is None:
        return
    near = torch.tensor(min(scale, 3.5e38), dtype=torch.float32)
    if not (near > 0 and near.isfinite() and near.reciprocal().isfinite()):
        constraint = "must be positive and finite in float32, and so must its reciprocal"
        raise ArgumentError("input_scale", scale, constraint, "repair the checkpoint")


def _number(name: str, value: object) -> float | None:
    if value is None or type(value) in (int, float):
        return value
    if isinstance(value, bool):
        raise ArgumentError(name, value, "must be a number, not a bool", "pass it as a float")
    given = weights.as_tensor(name, value)
    if weights.dtype_name(given) == "bool":
        raise ArgumentError(name, weights.described(given), "must be a number, not a bool", "pass it as a float")
    if given.numel() != 1:
        constraint = "must be one number for all tokens"
        raise ArgumentError(name, weights.described(given), constraint, "take the largest of joined layers")
    return float(given.float())


def _check_vector(name: str, values: torch.Tensor, size: int) -> None:
    if tuple(values.shape) != (size,) or not values.dtype.is_floating_point:
        raise ArgumentError(name, weights.described(values), f"must be floats [{size}]", "pass a value for each")
    weights.check_finite(name, values, "repair the checkpoint")
