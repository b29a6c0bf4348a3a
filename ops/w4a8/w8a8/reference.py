"""The oracle of W8A8: what a kernel must compute, in plain torch, and how far rounding may take it from that.

    y[m, n] = round_d((sum_k q[m, k] v[n, k] - z[m] * sum_k v[n, k]) * scales[n] * sx[m] + bias[n])   int8, exact sums
    y[m, n] = round_d((sum_k q[m, k] v[n, k]) * scales[n] * sx[m] + bias[n])                           e4m3
    y[m, n] = round_d(sum_b (sum_{k in b} q[m, k] v[n, k]) * (sx[b, m] * scales[n, b]) + bias[n])   e4m3 blocks

Sums of e4m3 are the tensor core's, which keeps 13 bits behind the point while it adds 32 products and the sum so far:
for the whole row with `accumulate` "fast", for 128 k with "promoted" and in blocks; these join in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.quantized import LARGEST, BlockQuantizedActivations, QuantizedActivations, padded
from terrazzo.ops.w4a8 import reference
from terrazzo.ops.w4a8.w8a8.format import BLOCK, PackedWeight, QuantizedWeight

if TYPE_CHECKING:
    import torch

FRACTION_BITS = 13
"""Of the tensor core's own sums of e4m3 (Hopper and Ada)."""
_U = 2.0**-24
_STEP = 32
Activations = QuantizedActivations | BlockQuantizedActivations


def quantize_static(
    x: torch.Tensor, scale: float, zero: int, codes: str, smooth: torch.Tensor | None = None
) -> torch.Tensor:
    """int8 or float8_e4m3fn [M, K] of x [M, K]: x (times the reciprocal of smooth) times the float32 of 1 / scale, plus
    the zero point, half to even, inside -128..127 (NaN: -128) or -448..448."""
    import torch

    x = x.float() if smooth is None else x.float() * (1 / smooth.float())
    inverse = _inverse(x, scale)
    if codes == "e4m3":
        return (x * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    q = (x.double() * inverse.double() + zero).round()
    return q.nan_to_num(-128.0, 127, -128).clamp(-128, 127).to(torch.int8)


def quantize_asymmetric(
    x: torch.Tensor, smooth: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q int8 [M, K], scales f32 [M], zero points int32 [M]) of x [M, K], dynamic: scale (max - min) / 255 of a token's
    values and 0, zero point round(-min / scale) - 128; each operation rounds once in float32."""
    import torch

    x = x.float() if smooth is None else x.float() * (1 / smooth.float())
    high, low = x.amax(1).clamp(min=0), (-x).amax(1).clamp(min=0)
    scales = (high + low) / x.new_full((), 255.0)
    scales = torch.where(scales < 2.0**-119, 1.0, scales)
    zeros = ((low / scales).round() - 128).clamp(-128, 127)
    inverse = x.new_ones(()) / scales
    q = (x.double() * inverse.double()[:, None] + zeros.double()[:, None]).round()
    return q.nan_to_num(-128.0, 127, -128).clamp(-128, 127).to(torch.int8), scales, zeros.int()


def power_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below each positive float32; what is not finite stays."""
    import torch

    fraction, exponent = torch.frexp(x)
    powers = torch.ldexp(torch.ones_like(x), torch.where(fraction > 0.5, exponent, exponent - 1))
    return torch.where(x.isfinite(), powers, x)


def quantize_powers(values: torch.Tensor, shape: tuple[int, ...]) -> BlockQuantizedActivations:
    """float32 values [M, K] in blocks of 128 columns whose scales are powers of two: the least one that is not below
    the largest magnitude / 448, as float32 has that quotient (`scale_fmt` "ue8m0"). Codes are e4m3 of v / scale.

    Blocks of magnitudes below 2^-117 become codes 0 and the scale 1, as elsewhere. Other quantizers take the largest
    magnitude for 1e-4 or more (DeepGEMM), or the scale for 1e-10 or more (vLLM).
    """
    import torch

    (m, k), count = values.shape, -(-values.shape[1] // BLOCK)
    parts = torch.nn.functional.pad(values, (0, count * BLOCK - k)).view(m, count, BLOCK)
    largest = parts.abs().amax(-1)
    quotient = largest / largest.new_full((), 448.0)
    zero = largest < LARGEST["e4m3"][1]
    scales = torch.where(zero, 1.0, power_above(quotient))
    q = (parts * torch.where(zero, 0.0, 1 / scales)[..., None]).to(torch.float8_e4m3fn).flatten(1)[:, :k]
    q = torch.nn.functional.pad(q.view(torch.int8), (0, padded(k) - k)).view(torch.float8_e4m3fn).contiguous()
    scales = torch.nn.functional.pad(scales.T, (0, -m % 4)).contiguous()
    return BlockQuantizedActivations(q, scales, shape, True)


def _inverse(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_ones(()) / x.new_full((), scale)


def values(x: Activations) -> torch.Tensor:
    """float64 [M, K]: what codes are worth."""
    q = x.q[:, : x.k].double()
    if isinstance(x, BlockQuantizedActivations):
        scales = x.scales.T[: len(q)] if x.column_scales else x.scales
        return q * scales.double().repeat_interleave(BLOCK, 1)[:, : x.k]
    q = q if x.zeros is None else q - x.zeros.double()[:, None]
    return q * x.scales.double()[:, None]


def accumulate(x: QuantizedActivations, weight: QuantizedWeight | PackedWeight) -> torch.Tensor:
    """int32 [M, N], exact: sums of products of int8, zero points taken off."""
    import torch

    weight = weight.unpack() if isinstance(weight, PackedWeight) else weight
    return _sums(x, weight).round().to(torch.int32)


def _sums(x: QuantizedActivations, weight: QuantizedWeight) -> torch.Tensor:
    """float64 [M, N]: sums of products of codes, zero points taken off; of int8 every partial sum is an integer."""
    q = x.q[:, : x.k].double()
    q = q if x.zeros is None else q - x.zeros.double()[:, None]
    return q @ weight.codes.double().T


def gemm(x: Activations, weight: QuantizedWeight | PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [M, N], unrounded: the product of the quantized operands, plus `bias` (else the weight's own).

    Codes without blocks are summed before they are scaled: where int8 products cancel, a sum is 0 and not what float64
    left of scaled values, which is more than `forward_error_bound` allows there.
    """
    weight = weight.unpack() if isinstance(weight, PackedWeight) else weight
    if weight.block:
        y = values(x) @ weight.dequantize().T
    else:
        y = _sums(x, weight) * weight.scales.double() * x.scales.double()[:, None]
    bias = weight.bias if bias is None else bias
    return y if bias is None else y + bias.double()


def forward(
    x: Activations, weight: QuantizedWeight | PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """y [M, N]: what the operator returns for quantized activations, in torch on their device; int32 sums are raw."""
    import torch

    return accumulate(x, weight) if out_dtype == torch.int32 else gemm(x, weight, bias).to(out_dtype)


def forward_error_bound(
    x: Activations,
    weight: QuantizedWeight | PackedWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    accumulate: str = "promoted",
    fraction_bits: int = FRACTION_BITS,
) -> torch.Tensor:
    """Largest |y - gemm(...)| that a correct kernel can show, for each element: float64 [M, N].

    int8: sums are exact, see `reference.forward_error_bound`. e4m3: with S the sum of |q| |v| over what the tensor core
    adds, no exponent is above that of S (nor of the largest product, at most S), and a step of 32 k cuts 33 terms to
    2^-fraction_bits of the largest, so that k / 32 * 33 * 2^-fraction_bits * S is lost at most; each float32 operation
    after it rounds once.
    """
    import torch

    weight = weight.unpack() if isinstance(weight, PackedWeight) else weight
    ref = gemm(x, weight, bias)
    bias = weight.bias if bias is None else bias
    rest = reference.forward_error_bound(ref, dtype, bias)
    if weight.form == "int8":
        return rest
    magnitude, dense = values(x).abs(), weight.dequantize().abs()
    total, lost, blocks = torch.zeros_like(ref), torch.zeros_like(ref), -(-weight.k // BLOCK)
    for first in range(0, weight.k, BLOCK):
        part = slice(first, first + BLOCK)
        total += magnitude[:, part] @ dense[:, part].T
    steps = BLOCK // _STEP if accumulate != "fast" else -(-weight.k // _STEP)
    lost = 2 * steps * (_STEP + 1) * 2.0**-fraction_bits * total  # 2: S rounded up to a power of two
    return 1.01 * (lost + (2 * blocks + 4) * _U * (total + lost)) + rest
