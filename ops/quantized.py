"""Quantized activations as products read them, whichever kernel makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

CODES = {"int8": "int8", "e4m3": "float8_e4m3fn"}
"""Form of quantized activations -> dtype of their codes."""
ALIGNMENT = 16
"""Columns that rows of q are padded to: rows of 16 bytes."""


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Activations x ~= (q - zeros) * scales (times the smooth vector that they were divided by), per token.

    Attributes:
        q: int8 [M, K16], -127..127 (with zero points from -128 on), or float8_e4m3fn, -448..448; K16 = K rounded up to
            16, columns from K on are 0.
        scales: float32 [M].
        row_sums: int32 [M], sum of q over a row; 128 times it is what an unsigned weight adds to a product. e4m3: None.
        shape: of the activations, [..., K]; M is the product of the leading dimensions.
        zeros: int32 [M], zero points of the tokens, which W8A8 alone takes; None for 0. What W8A8 quantizes otherwise
            than dynamically and symmetrically has no row_sums.
    """

    q: torch.Tensor
    scales: torch.Tensor
    row_sums: torch.Tensor | None
    shape: tuple[int, ...]
    zeros: torch.Tensor | None = None

    @property
    def k(self) -> int:
        """Input features K."""
        return self.shape[-1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device

    @property
    def codes(self) -> str:
        """Form of q: "int8" or "e4m3"."""
        return "e4m3" if self.q.dtype.is_floating_point else "int8"

    def dequantize(self) -> torch.Tensor:
        """float32 [..., K]: q * scales, zero points taken off."""
        values = self.q[:, : self.k].float()
        values = values if self.zeros is None else values - self.zeros[:, None]
        return (values * self.scales[:, None]).view(self.shape)

    def check(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes of the attributes' description."""
        m, k = prod(self.shape[:-1]), padded(self.k)
        expected = [("q", (m, k), CODES[self.codes]), ("scales", (m,), "float32")]
        if self.row_sums is not None:
            expected.append(("row_sums", (m,), "int32"))
        if self.zeros is not None:
            expected.append(("zeros", (m,), "int32"))
        for name, shape, dtype in expected:
            weights.check_tensor(self, name, shape, dtype, "quantize them with quantize_activations")

    def of_tokens(self, rows: torch.Tensor) -> QuantizedActivations:
        """Those of some tokens, [P, K]: row rows[i] of each tensor becomes row i."""
        self.check()
        held = ("q", "scales", *(name for name in ("row_sums", "zeros") if getattr(self, name) is not None))
        own = {name: getattr(self, name).index_select(0, rows) for name in held}
        return replace(self, **own, shape=(len(rows), self.k))

    def __repr__(self) -> str:
        return f"QuantizedActivations({list(self.shape)})"


def padded(k: int) -> int:
    """K16: columns of q for K input channels."""
    return -(-k // ALIGNMENT) * ALIGNMENT


def empty(shape: tuple[int, ...], device: torch.device, codes: str) -> QuantizedActivations:
    """Activations of this shape with nothing in them."""
    import torch

    m, columns = prod(shape[:-1]), -(-shape[-1] // ALIGNMENT) * ALIGNMENT
    q = torch.empty((m, columns), dtype=getattr(torch, CODES[codes]), device=device)
    sums = torch.empty(m, dtype=torch.int32, device=device) if codes == "int8" else None
    return QuantizedActivations(q, torch.empty(m, dtype=torch.float32, device=device), sums, shape)


@dataclass(frozen=True, eq=False)
class BlockQuantizedActivations:
    """Activations x ~= q * scales, with a scale for each block of 128 columns of a token, symmetric.

    Attributes:
        q: int8 [M, K16], -127..127, or float8_e4m3fn, -448..448; K16 = K rounded up to 16, columns from K on are 0.
        scales: float32 [M, B], B = K / 128 rounded up; or (`column_scales`) [B, M4], M4 = M rounded up to 4, columns
            from M on do not count.
        shape: of the activations, [..., K]; M is the product of the leading dimensions.
        column_scales: whether the scales of a block lie side by side.
    """

    q: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    column_scales: bool = False

    @property
    def k(self) -> int:
        """Input features K."""
        return self.shape[-1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device

    @property
    def codes(self) -> str:
        """Form of q: "int8" or "e4m3"."""
        return "e4m3" if self.q.dtype.is_floating_point else "int8"

    def dequantize(self) -> torch.Tensor:
        """float32 [..., K]: q * scales."""
        scales = self.scales.T[: len(self.q)] if self.column_scales else self.scales
        wide = scales.repeat_interleave(BLOCK, dim=1)[:, : self.k]
        return (self.q[:, : self.k].float() * wide).view(self.shape)

    def of_tokens(self, rows: torch.Tensor) -> BlockQuantizedActivations:
        """Those of some tokens, [P, K]: row rows[i] becomes row i."""
        import torch

        count, scales = len(rows), self.scales.index_select(int(self.column_scales), rows)
        if self.column_scales and count % 4:
            scales = torch.nn.functional.pad(scales, (0, -count % 4))
        return replace(self, q=self.q.index_select(0, rows), scales=scales, shape=(count, self.k))

    def __repr__(self) -> str:
        return f"BlockQuantizedActivations({list(self.shape)})"


QUANTS = ("int8", "e4m3", "int8_block128", "e4m3_block128")
"""Forms of activations that operators on rows make: codes with a scale for each token, or for 128 columns of it."""
LARGEST = {"int8": (127.0, 2.0**-119), "e4m3": (448.0, 2.0**-117)}
"""Form of codes -> the largest, and the largest magnitude below which values count as zeros."""
BLOCK = 128
E4M3_INSTRUCTIONS = ("wgmma.e4m3", "mma.e4m3")


def check_quant(quant: str | None, column_scales: bool) -> None:
    """Raise ArgumentError unless activations have this form, or None, and scales for columns only in blocks."""
    if quant is not None and quant not in QUANTS:
        raise ArgumentError("quant", quant, f"must be None or one of {QUANTS}", "use int8")
    if type(column_scales) is not bool:
        raise ArgumentError("column_scales", column_scales, "must be True or False", "leave it out")
    if column_scales and not str(quant).endswith("block128"):
        constraint = "must be False where there are no scales of blocks"
        raise ArgumentError("column_scales", column_scales, constraint, "leave it out, or quantize by blocks of 128")


def check_codes_on(target: Target, quant: str | None) -> None:
    """Raise ArgumentError unless the target converts to codes of this form."""
    if quant is not None and quant.startswith("e4m3") and not any(map(target.supports, E4M3_INSTRUCTIONS)):
        constraint = f"{target.arch} has no e4m3 tensor-core instruction (sm_89, sm_90a and sm_120a do)"
        raise ArgumentError("quant", quant, constraint, "use int8 there")


def allocate(
    x: torch.Tensor, shape: tuple[int, ...], quant: str, column_scales: bool
) -> QuantizedActivations | BlockQuantizedActivations:
    """Activations of this shape and form, on x's device, with nothing in them."""
    if "_" not in quant:
        return empty(shape, x.device, quant)
    import torch

    m, k = prod(shape[:-1]), shape[-1]
    q = torch.empty((m, padded(k)), dtype=getattr(torch, CODES[quant.partition("_")[0]]), device=x.device)
    blocks = -(-k // BLOCK)
    size = (blocks, -(-m // 4) * 4) if column_scales else (m, blocks)
    scales = torch.empty(size, dtype=torch.float32, device=x.device)
    return BlockQuantizedActivations(q, scales, shape, column_scales)


def encode(
    values: torch.Tensor, factor: torch.Tensor | None, shape: tuple[int, ...], quant: str, column_scales: bool
) -> QuantizedActivations | BlockQuantizedActivations:
    """The oracle: codes and scales of float32 values [M, K]; `factor` [M] of a row enters its scales alone.

    q = round(v * (largest code / largest |v|)), each operation in float32 but the product of int8, which is exact, then
    half to even; where the largest magnitude is tiny, codes are 0 and the scale 1.
    """
    import torch

    codes, _, block = quant.partition("_")
    (most, tiny), (m, k) = LARGEST[codes], values.shape
    width, count = (BLOCK, -(-k // BLOCK)) if block else (k, 1)
    parts = torch.nn.functional.pad(values, (0, count * width - k)).view(m, count, width)
    largest = parts.abs().amax(-1) if k else values.new_zeros(m, 1)
    zero = largest < tiny
    inverse = torch.where(zero, 0.0, largest.new_full((), most) / largest)
    if codes == "int8":
        q = (parts.double() * inverse.double()[..., None]).round().nan_to_num(0, 0, 0).to(torch.int8)
    else:
        q = (parts * inverse[..., None]).to(torch.float8_e4m3fn)
    scales = largest / largest.new_full((), most)
    scales = torch.where(zero, 1.0, scales if factor is None else scales * factor[:, None])
    q = q.flatten(1)[:, :k].view(torch.int8)
    q = torch.nn.functional.pad(q, (0, padded(k) - k)).view(getattr(torch, CODES[codes])).contiguous()
    if not block:
        sums = q.sum(dim=1, dtype=torch.int32) if codes == "int8" else None
        return QuantizedActivations(q, scales[:, 0].contiguous(), sums, shape)
    if column_scales:
        scales = torch.nn.functional.pad(scales.T, (0, -m % 4)).contiguous()
    return BlockQuantizedActivations(q, scales, shape, column_scales)


def tensors(made: QuantizedActivations | BlockQuantizedActivations) -> list[torch.Tensor]:
    """q, scales and, where there are such, row sums: what nodes of graphs hand on."""
    sums = getattr(made, "row_sums", None)
    return [made.q, made.scales, *([] if sums is None else [sums])]


def of_tensors(
    found: list[torch.Tensor], shape: tuple[int, ...], quant: str, column_scales: bool
) -> QuantizedActivations | BlockQuantizedActivations:
    """The activations whose `tensors` these are."""
    if "_" in quant:
        return BlockQuantizedActivations(found[0], found[1], shape, column_scales)
    return QuantizedActivations(found[0], found[1], found[2] if quant == "int8" else None, shape)


def kernel_arguments(made: QuantizedActivations | BlockQuantizedActivations) -> tuple:
    """(Q, XS, RS or None) as kernels take them."""
    import torch

    q = made.q.view(torch.int8) if made.q.is_floating_point() else made.q
    return q, made.scales, getattr(made, "row_sums", None)


def rounding_error(magnitudes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Most that rounding to `dtype` takes float32 values of these magnitudes away."""
    import torch

    units = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-134), torch.float32: (0.0, 0.0)}
    unit, subnormal = units[dtype]
    return torch.clamp(unit * magnitudes, min=subnormal)
