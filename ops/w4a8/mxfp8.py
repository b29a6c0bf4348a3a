"""MXFP8 activations: e4m3 with a power of two for each 32 columns of a token (OCP Microscaling), what makes them, and
MXFP4 weights for them, with the bytes of `mxfp4_format`.

    e[m, g] = floor(log2(max_{k in g} |x[m, k]|)) - 8           8: the exponent of e4m3's largest number, 448
    q[m, k] = e4m3(x[m, k] * 2^-e[m, k // 32])                  half to even; 448 and more become 448

What is below 2^-117 in all of a group counts as 0, as in other quantizers. A NaN stays one, an infinity becomes one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, launching, weights
from terrazzo.ops.linear.bytes.fp8_problem import E2M1_MX
from terrazzo.ops.products.converted import MXFP4_MXFP8
from terrazzo.ops.quantized import CODES, LARGEST, QuantizedActivations, padded
from terrazzo.ops.w4a8 import activations, mxfp4_format
from terrazzo.ops.w4a8.w8a8 import activations as others

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product
    from terrazzo.ops.weight_only import format as small_floats

GROUP = 32
"""Columns of a scale."""
WORD = 4
"""Scales of a word, for 128 columns."""
FORM = MXFP4_MXFP8.x.quant
BIAS = 127
"""Of e8m0."""
_NAN = 255
_TINY = LARGEST["e4m3"][1]
_TOP = 8
"""Exponent of e4m3's largest number."""


@dataclass(frozen=True, eq=False, repr=False)
class MXActivations(QuantizedActivations):
    """Activations x ~= q * 2^(e - 127), with a byte e (e8m0) for each 32 columns of a token.

    Attributes:
        q: float8_e4m3fn [M, K16], -448..448; K16 = K rounded up to 16, columns from K on are 0.
        scales: int32 [W, M4], W = K / 128 rounded up, M4 = M rounded up to 4: the bytes of four groups, the first one
            lowest. Byte 0 counts as 0, not as 2^-127; columns from M on do not count. `of` makes them of plain rows.
        shape: of the activations, [..., K]; M is the product of the leading dimensions.
        row_sums, zeros: None.
    """

    @classmethod
    @dlpack.accepting
    def of(cls, q: SupportsDLPack, scales: SupportsDLPack) -> MXActivations:
        """Those of plain rows, as other libraries quantize them. Nothing waits for the GPU.

        Args:
            q: float8_e4m3fn [..., K]. scales: uint8 or float8_e8m0fnu [..., ceil(K / 32)]; 255 makes its columns NaN.

        Raises:
            ArgumentError: other shapes or dtypes.
        """
        import torch

        if not isinstance(q, torch.Tensor) or weights.dtype_name(q) != CODES["e4m3"] or not q.ndim or not q.shape[-1]:
            raise ArgumentError("q", weights.described(q), "must be float8_e4m3fn [..., K]", "pass codes of e4m3")
        shape, k = tuple(q.shape), q.shape[-1]
        wanted = (*shape[:-1], -(-k // GROUP))
        dtype = weights.dtype_name(scales) if isinstance(scales, torch.Tensor) else ""
        if dtype not in ("uint8", "float8_e8m0fnu") or tuple(scales.shape) != wanted:
            constraint = f"must be uint8 or float8_e8m0fnu {list(wanted)}"
            raise ArgumentError("scales", weights.described(scales), constraint, "pass a byte for each 32 columns")
        rows, held = q.reshape(-1, k).view(torch.uint8), scales.reshape(-1, wanted[-1]).view(torch.uint8)
        broken = (held == _NAN).repeat_interleave(GROUP, dim=1)[:, :k]
        rows = torch.nn.functional.pad(torch.where(broken, 127, rows), (0, padded(k) - k))
        return cls(rows.view(q.dtype), _words(torch.where(held == _NAN, BIAS, held)), None, shape)

    @property
    def codes(self) -> str:
        """Form of the activations, "mxfp8"."""
        return FORM

    def exponents(self) -> torch.Tensor:
        """uint8 [M, ceil(K / 32)]: e."""
        import torch

        words = self.scales.T[: len(self.q)].clone(memory_format=torch.contiguous_format)  # with strides of its own
        return words.view(torch.uint8)[:, : -(-self.k // GROUP)]

    def token_scales(self) -> torch.Tensor:
        """float32 [M, ceil(K / 32)]: the powers of two, 0 of byte 0."""
        import torch

        held = self.exponents().int()
        return torch.where(held > 0, torch.ldexp(torch.ones_like(held, dtype=torch.float32), held - BIAS), 0.0)

    def dequantize(self) -> torch.Tensor:
        """float32 [..., K]: q times its scales."""
        wide = self.token_scales().repeat_interleave(GROUP, dim=1)[:, : self.k]
        return (self.q[:, : self.k].float() * wide).view(self.shape)

    def check(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes of the attributes' description."""
        m, k = prod(self.shape[:-1]), self.k
        for name, shape, dtype in (("q", (m, padded(k)), CODES["e4m3"]), ("scales", _shape(m, k), "int32")):
            weights.check_tensor(self, name, shape, dtype, "quantize them with quantize_activations")

    def of_tokens(self, rows: torch.Tensor) -> MXActivations:
        """Those of some tokens, [P, K]: row rows[i] of each tensor becomes row i."""
        import torch

        self.check()
        words = torch.nn.functional.pad(self.scales.index_select(1, rows), (0, -len(rows) % 4))
        return replace(self, q=self.q.index_select(0, rows), scales=words, shape=(len(rows), self.k))

    def __repr__(self) -> str:
        return f"MXActivations({list(self.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(mxfp4_format.QuantizedWeight):
    """The canonical weight of MXFP4 (`ops.mxfp4.QuantizedWeight`), whose `pack` is this module's."""

    _product: ClassVar[Product] = MXFP4_MXFP8
    _shown: ClassVar[str] = "mxfp4_mxfp8."

    def pack(self, *, target: Target | str | None = None) -> PackedWeight:
        """See `pack`."""
        return PackedWeight._of(self, target)


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(mxfp4_format.PackedWeight, of=QuantizedWeight):
    """An MXFP4 weight for MXFP8 activations (sm_89, sm_90a): bytes and attributes are `mxfp4_fp8`'s."""

    VERSION = MXFP4_MXFP8.version
    ACTIVATIONS = FORM
    DEQUANTIZATION = E2M1_MX

    def unpack(self) -> QuantizedWeight:
        """Inverse of `pack`; scales of groups of zeros may be others."""
        return QuantizedWeight(**{"group_size": GROUP, "bias": self.bias} | self._rows())


def pack(weight: small_floats.QuantizedWeight, *, target: Target | str | None = None) -> PackedWeight:
    """As `mxfp4_format.pack`, for MXFP8 activations.

    Raises:
        ArgumentError: as there. TargetError: see `Target.parse`.
    """
    mxfp4_format.check(weight, MXFP4_MXFP8.module)
    return PackedWeight._of(weight, target)


def _shape(m: int, k: int) -> tuple[int, int]:
    """Of the words of m tokens."""
    return -(-k // (GROUP * WORD)), -(-m // 4) * 4


def _words(scales: torch.Tensor) -> torch.Tensor:
    """int32 [W, M4] of e8m0 bytes [M, G]; what pads them is 1."""
    import torch

    m, groups = scales.shape
    scales = torch.nn.functional.pad(scales, (0, -groups % WORD, 0, -m % 4), value=BIAS)
    return scales.clone(memory_format=torch.contiguous_format).view(torch.int32).T.contiguous()


def empty(shape: tuple[int, ...], device: torch.device) -> MXActivations:
    """Activations of this shape with nothing in them."""
    import torch

    m, k = prod(shape[:-1]), shape[-1]
    q = torch.empty((m, padded(k)), dtype=torch.float8_e4m3fn, device=device)
    return MXActivations(q, torch.empty(_shape(m, k), dtype=torch.int32, device=device), None, shape)


def reference(x: torch.Tensor) -> MXActivations:
    """What kernels make of float x [..., K], to the bit."""
    import torch

    shape, k = tuple(x.shape), x.shape[-1]
    groups = torch.nn.functional.pad(x.reshape(-1, k).float(), (0, -k % GROUP))
    groups = groups.view(len(groups), -(-k // GROUP), GROUP)
    largest = groups.abs().amax(-1)  # a NaN among them is the largest
    zero, broken = largest < _TINY, ~largest.isfinite()
    exponent = torch.frexp(torch.where(zero | broken, 1.0, largest)).exponent - 1 - _TOP
    held = torch.where(zero, BIAS, torch.where(broken, _NAN, exponent + BIAS)).to(torch.uint8)
    inverse = torch.where(zero | broken, 0.0, torch.ldexp(torch.ones_like(largest), -exponent))
    q = (groups * inverse[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)[:, :k]
    q = torch.nn.functional.pad(q.view(torch.uint8), (0, padded(k) - k)).view(torch.float8_e4m3fn)
    return MXActivations(q, _words(held), None, shape)


def run(x: torch.Tensor, out: MXActivations | None = None, target: str | None = None) -> MXActivations:
    """The eager path of `quantize_activations`."""
    launching.check_no_grad(x, "quantize_activations")
    activations.check_dtype(x)
    if not x.shape or not x.shape[-1]:
        raise ArgumentError("x", list(x.shape), "must be [..., K] with K >= 1", "pass activations")
    if not x.is_cuda:
        raise ArgumentError("x", str(x.device), "must be on a CUDA device", "move it, or use the torch reference")
    if out is None:
        out = empty(tuple(x.shape), x.device)
    else:
        activations.check_out(out, tuple(x.shape), x.device, FORM)
        for part in (out.q, out.scales):
            if x.is_contiguous():  # else a copy is read
                launching.check_apart(part, "out", x=x)
    launching.check_tokens(out.q.shape[0])
    if out.q.shape[0]:
        others.launch(x, out, FORM, target)
    return out


def check_plain(smooth: torch.Tensor | None, rms_weight: torch.Tensor | None) -> None:
    """Raise ArgumentError for what stands in front of other quantizers."""
    for name, vector in (("smooth", smooth), ("rms_weight", rms_weight)):
        if vector is not None:
            raise ArgumentError(name, "a tensor", "must be None of MXFP8 activations", "apply it to x, then quantize")


def quantizer(
    m: int, k: int, *, dtype: str, gain: bool, norm: bool, target: Target, device: Target | None = None, codes: str
) -> KernelRequest:
    """The kernel that quantizes m rows of k values, for weights of any product of this package."""
    if codes == FORM:
        return others.plan(m, k, dtype=dtype, gain=False, form=FORM, target=target, device=device)
    return activations.plan(m, k, dtype=dtype, gain=gain, norm=norm, target=target, device=device, codes=codes)
