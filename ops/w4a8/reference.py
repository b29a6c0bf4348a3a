"""The oracle of W4A8: what a kernel must compute, in plain torch, and how far rounding may take it from that.

    q[m, k]   = round(x'[m, k] * 127 / max_k |x'[m]|), x' = x / smooth              int8, half to even; 0 for a row of 0
    acc[m, n] = sum_k q[m, k] * v[n, k]                                             int32, exact for every split of K
    y[m, n]   = round_d(acc[m, n] * channel_scales[n] * scales[m] + bias[n])        f32, then one rounding

Both dequantizations give the same acc: "xor" multiplies v, "unsigned" multiplies v + 128 and takes 128 * row sum off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.quantized import rounding_error
from terrazzo.ops.w4a8.format import PackedWeight, QuantizedWeight, unit_layout
from terrazzo.ops.weight.base import Canonical, Packed

if TYPE_CHECKING:
    import torch

DEQUANTIZATIONS = ("auto", "xor", "unsigned")
OUT_DTYPES = ("float16", "bfloat16", "int32")
_U = 2.0**-24
TINY = 2.0**-119
"""Activations up to here count as 0: the float32 of 127 / max would be infinite."""


def dequantize(weight: QuantizedWeight | PackedWeight, smoothed: bool = True) -> torch.Tensor:
    """The float64 weight [N, K] that is multiplied with x / smooth, or (smoothed=False) with x itself.

    Raises:
        ArgumentError: no weight of W4A8.
    """
    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    if not isinstance(weight, (Canonical, Packed)) or not hasattr(weight, "smooth"):
        remedy = "quantize or load one; other families have a dequantize of their own"
        raise ArgumentError("weight", weights.kind(weight), "must be a W4A8 weight, packed or not", remedy)
    w = weight.dequantize()
    return w if smoothed or weight.smooth is None else w / weight.smooth.double()


def quantize_activations(
    x: torch.Tensor,
    smooth: torch.Tensor | None = None,
    rms_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q int8 [M, K], scales f32 [M], row sums int32 [M]) of x [M, K], per token, dynamic, symmetric.

    The gain rms_weight / smooth (each 1 where absent) is rounded to float32 once, x * gain again; q is then the exact
    product with the float32 of 127 / max, rounded half to even, so that a kernel can be held to the bit. RMSNorm's own
    factor 1 / sqrt(mean x^2 + eps) is the same for a whole row: it changes the scale, not q. A row whose largest
    magnitude is below TINY counts as zeros: scale 1, q 0. A row with NaN or infinity has a NaN or infinite scale.
    """
    import torch

    x = x.float()
    gain = activation_gain(smooth, rms_weight)
    scaled = x if gain is None else x * gain
    largest = scaled.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
    zero = largest < TINY
    inverse = torch.where(zero, 0.0, largest.new_full((), 127.0) / largest)  # a Python number would round twice
    q = (scaled.double() * inverse.double()[:, None]).round()
    scales = largest / largest.new_full((), 127.0)
    if rms_weight is not None:
        scales = scales * torch.rsqrt(x.square().mean(dim=1) + eps)
    scales = torch.where(zero, 1.0, scales)
    q = q.nan_to_num(0, 0, 0).to(torch.int8)
    return q, scales, q.sum(dim=1, dtype=torch.int32)


def activation_gain(smooth: torch.Tensor | None, rms_weight: torch.Tensor | None) -> torch.Tensor | None:
    """float32 [K]: what activations are multiplied with before they are quantized, or None for 1."""
    if smooth is None:
        return None if rms_weight is None else rms_weight.float()
    smooth = smooth.float()
    return (smooth.new_ones(()) if rms_weight is None else rms_weight.float()) / smooth


def accumulate(q: torch.Tensor, weight: QuantizedWeight | PackedWeight) -> torch.Tensor:
    """int32 [M, N], exact: q int8 [M, K] times the weight's bytes."""
    import torch

    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    acc = q.double() @ weight.bytes().double().T  # every partial sum is an integer below 2^53
    return acc.round().to(torch.int32)


def accumulate_packed(q: torch.Tensor, weight: PackedWeight, dequantization: str = "xor") -> torch.Tensor:
    """The same from the packed bytes, through `layouts.emulate`: words, converter, fragment and records on the CPU."""
    import torch
    from terrazzo.layouts.emulate import emulate_w4a8

    unit = unit_layout(weight.group_size)
    acc = emulate_w4a8(q.cpu().numpy(), weight.words.cpu().numpy(), unit, n=weight.n, dequantization=dequantization)
    return torch.from_numpy(acc).to(q.device)


def gemm(
    q: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [M, N], unrounded: the product of the quantized operands, plus `bias` (else the weight's own)."""
    y = accumulate(q, weight).double() * weight.channel_scales[: weight.n].double() * scales.double()[:, None]
    bias = weight.bias if bias is None else bias
    return y if bias is None else y + bias.double()


def forward(
    q: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y [M, N]: what the operator returns for quantized activations, in torch on their device; int32 sums are raw."""
    import torch

    return accumulate(q, weight) if out_dtype == torch.int32 else gemm(q, scales, weight, bias).to(out_dtype)


def forward_error_bound(ref: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Largest |y - ref| that a correct kernel can show, for each element of ref = `gemm(...)`: float64 [M, N].

    The sum is exact. Its conversion to float32, the products with both scales and the sum with the bias round once
    each: at most 3 u |ref - bias| + u (|ref| + what these left), u = 2^-24; then the result is rounded to `dtype`.
    """
    product = (ref if bias is None else ref - bias.double()).abs()
    error = 1.01 * _U * (3 * product + ref.abs()) + 2.0**-125  # the last for products of subnormal float32
    return error + rounding_error(ref.abs() + error, dtype)
