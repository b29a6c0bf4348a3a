"""The oracle of W4A8 on e4m3 activations, and how far a kernel may be from it.

    q[m, k]   = e4m3(x'[m, k] * 448 / max_k |x'[m]|), x' = x / smooth       half to even; 0 for a row of zeros
    y[m, n]   = round_d(channel_scales[n] * scales[m] * sum_g factor[n, g] * (sum_{k in g} q[m, k] * codes[n, k])
                        + bias[n])

Operands are exact: codes are e4m3 numbers, times 2^-8. The tensor core is not: it aligns 32 products and the sum so far
to the largest exponent among them and keeps about 14 bits (FP22: 13 of the fraction; Hopper and Ada). A kernel
therefore lets it sum one group of k only (128 at most on wgmma, 32 on mma.sync), starting at zero, and adds
factor * sum in float32. Sums of small integers, up to 2^13, are exact for every schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.w4a8 import reference
from terrazzo.ops.w4a8.fp8_format import PackedWeight, QuantizedWeight

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""Of e4m3."""
TINY = 2.0**-117
"""Activations up to here count as 0: the float32 of max / 448 would be subnormal."""
FRACTION_BITS = 13
"""Of the tensor core's own sums."""
_U = 2.0**-24
_STEP = 32
"""k of one instruction."""


def quantize_activations(
    x: torch.Tensor,
    smooth: torch.Tensor | None = None,
    rms_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q float8_e4m3fn [M, K], scales f32 [M]) of x [M, K], per token, dynamic.

    As `reference.quantize_activations`, with 448 in place of 127: the gain is rounded to float32 once, x * gain again,
    the product with the float32 of 448 / max a third time, then to e4m3. NaN or infinity in a row makes its scale NaN
    or infinite.
    """
    import torch

    x = x.float()
    gain = reference.activation_gain(smooth, rms_weight)
    scaled = x if gain is None else x * gain
    largest = scaled.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
    zero = largest < TINY
    inverse = torch.where(zero, 0.0, largest.new_full((), LARGEST) / largest)
    q = (scaled * inverse[:, None]).to(torch.float8_e4m3fn)
    scales = largest / largest.new_full((), LARGEST)
    if rms_weight is not None:
        scales = scales * torch.rsqrt(x.square().mean(dim=1) + eps)
    return q, torch.where(zero, 1.0, scales)


def gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [M, N], unrounded: the product of the quantized operands, plus `bias` (else the weight's own).

    scales: [M], or [M, G] of the weight's groups of k (MXFP8).
    """
    if scales.ndim == 2:
        wide = scales.double().repeat_interleave(weight.group_size, dim=1)[:, : weight.k]
        y = (q.double() * wide) @ weight.dequantize().T
    else:
        y = (q.double() @ weight.dequantize().T) * scales.double()[:, None]
    bias = weight.bias if bias is None else bias
    return y if bias is None else y + bias.double()


def forward_error_bound(
    q: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fraction_bits: int = FRACTION_BITS,
) -> torch.Tensor:
    """Largest |y - gemm(...)| that a correct kernel can show, for each element: float64 [M, N].

    Codes are at most 8. With S the sum of |q| |code| over a group and X its largest |q|, no product's exponent is above
    that of 8 X (small codes are subnormal and count as 4, small q as 2^-6) and no partial sum's above that of S. A step
    of 32 k cuts 33 terms to 2^-fraction_bits of the largest, so a group of g loses at most

        g / 32 * 33 * 2^-fraction_bits * max(8 max(X, 2^-6), S).

    Where `scales` are those of groups, powers of two, they are part of the factors, exactly.

    The float32 sums over G groups, in any split along k, round at most 2 G times: 2 G u sum |factor| S, u = 2^-24. Then
    as on int8: the products with both scales, the bias and the result round once each.
    """
    import torch

    group, k = weight.group_size, weight.k
    values, factors, channel_scales = (each.abs() for each in weight.operands())
    magnitude = q.double().abs()
    total = q.new_zeros((q.shape[0], weight.n), dtype=torch.float64)
    lost = torch.zeros_like(total)
    for index, start in enumerate(range(0, k, group)):
        part, factor = slice(start, min(start + group, k)), factors[:, index]
        sums = magnitude[:, part] @ values[:, part].T
        peak = 8 * magnitude[:, part].amax(dim=1, keepdim=True).clamp(min=2.0**-6)
        steps = group // _STEP
        factor = factor * scales.double()[:, index : index + 1] if scales.ndim == 2 else factor
        total += factor * sums
        lost += factor * steps * (_STEP + 1) * 2.0**-fraction_bits * torch.maximum(sums, peak)
    unit = channel_scales * (1 if scales.ndim == 2 else scales.double()[:, None].abs())
    error = 1.01 * unit * (lost + 2 * (index + 1) * _U * (total + lost))
    ref = gemm(q, scales, weight, bias)
    bias = weight.bias if bias is None else bias
    return 1.01 * error + reference.forward_error_bound(ref, dtype, bias)  # the rest: what y's own rounding adds to it
