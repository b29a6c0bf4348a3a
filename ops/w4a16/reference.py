"""The oracle of W4A16: what a kernel must compute, in plain torch, and how far rounding may take it from that.

Numerics (specs.md B.3), with d the activation dtype, q the code, z the zero point, s the scale:

    exact   w = round_d((q - z) * s)                    one correct rounding; needs scales of dtype d
    fused   w = round_d(q * s + round_d(-z * s))        one fma; bit-compatible with TurboMind; needs scales of dtype d
    post    y += s_g * (sum_k x (b + q) - (b + z_g) * sum_k x), over groups g, in f32; b = 0 for f16, 128 for bf16
            (bf16 operands are decoded as 128 + q); weights are never rounded; any scale dtype

Of weights of 8 bits b = -128. All three accumulate products in f32 on the tensor core, add the bias in f32, and round
once to d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.products.ways import get_way
from terrazzo.ops.quantized import rounding_error
from terrazzo.ops.weight_only.decoding import decode, per_column
from terrazzo.ops.weight_only.integers import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.reference import STEP_K, STEP_UNITS, gemm
from terrazzo.ops.weight_only.reference import forward as forward

if TYPE_CHECKING:
    import torch

POST_BIAS = {"float16": 0, "bfloat16": 128}
"""What `post` operands add to a code: f16 ones are q * 2^-24 or q * 2^-20 (exact powers of two), bf16 ones 128 + q."""


def dequantize(
    weight: QuantizedWeight | PackedWeight, numerics: str = "exact", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The float weight [N, K] that the numerics define, columns in input-channel order (act-order undone).

    Args:
        numerics: "exact" or "fused" give a tensor of `dtype`, bit for bit what the kernel multiplies; "post" gives
            float64 (q - z) * s, since no weight is rounded.
        dtype: activation dtype; None takes the scales' dtype (f32 scales have only "post").

    Raises:
        ArgumentError: unknown numerics, or scales of another dtype than `dtype` for exact and fused.
    """
    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    if not isinstance(weight, QuantizedWeight):
        remedy = "quantize or load one; other families have a dequantize of their own"
        raise ArgumentError("weight", weights.kind(weight), "must be a W4A16 weight, packed or not", remedy)
    return decode(weight, numerics, dtype)


def forward_error_bound(
    x: torch.Tensor,
    weight: QuantizedWeight | PackedWeight,
    numerics: str,
    bias: torch.Tensor | None = None,
    *,
    splits: int = 64,
) -> torch.Tensor:
    """Largest |y - gemm(x, weight, numerics, bias)| that a correct kernel can show, for each element: float64 [..., N].

    Derivation. Write u = 2^-24, u_d for the unit roundoff of x.dtype, S for the sum of the magnitudes that are added.

    1. Products of two 16-bit floats are exact. A k16 tensor-core step aligns its addends to the largest one and
       truncates: two blocks of 8 products plus the accumulator, every product losing less than u and the result less
       than 2u of the largest addend [Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores",
       PeerJ CS 2021], so 20 u in all; later parts keep more bits. No addend exceeds S, so T steps in a row lose at
       most 20 T u S, in whatever order k is walked.
    2. f32 additions round to nearest: each of A additions of partial sums (split-K, warps, groups, bias) loses at most
       u S.
    3. The result is rounded once: u_d |y| <= u_d (|ref| + e), plus half the smallest subnormal.

    exact, fused: S = sum |x||w| + |bias|, T = ceil(K / 16), A = splits + 1.
    post: S = sum_g |s_g| sum_k |x| (|b + q| + |b + z_g|) + |bias|, because the zero point is subtracted after the sum
       (b: see POST_BIAS); T = ceil(group / 16) since each group is scaled before groups meet; the sum of x over a
       group costs no more than its products, by tensor core or by f32 additions; A = 2 G + splits + 5 for G partial
       sums (one for each group, at least one for each 128 k), scaling and zero point included.
    e = 1.01 (20 T + A) u S covers the terms of second order while (20 T + A) u < 0.01, that is K < 130000.

    Args:
        splits: most partial sums of one output element that are added in f32 (warps of a block times split-K).
    """
    if isinstance(weight, PackedWeight):
        weight = weight.unpack()
    import torch

    name, k, a = str(x.dtype).removeprefix("torch."), weight.k, x.double().abs()
    own_zero = weight.format.zero
    ref = gemm(x, weight, numerics, bias)
    if numerics == "post":
        b = get_converter(get_way(weight.format, numerics).converter(name)).bias[0]
        zeros = torch.full_like(weight.codes[:, :1], own_zero)
        zeros = zeros if weight.zeros is None else per_column(weight.zeros, weight)
        magnitude = (weight.codes.double() + b).abs() + (zeros.double() + b).abs()
        magnitude = magnitude * per_column(weight.scales, weight).double().abs()
        a = a if weight.perm is None else a[..., weight.perm.long()]
        steps, additions = -(-weight.group_size // STEP_K), 2 * -(-k // min(weight.group_size, 128)) + splits + 5
    else:
        magnitude = dequantize(weight, numerics, x.dtype).double().abs()
        steps, additions = -(-k // STEP_K), splits + 1
    total = a @ magnitude.T
    bias = weight.bias if bias is None else bias
    total = total if bias is None else total + bias.double().abs()
    error = 1.01 * (STEP_UNITS * steps + additions) * 2.0**-24 * total
    return error + rounding_error(ref.abs() + error, x.dtype)
