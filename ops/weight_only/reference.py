"""The oracle of products with a weight of few bits: what a kernel must compute, in plain torch, for every format.

A weight's `dequantize(numerics, dtype)` says what its numerics multiply. Products are accumulated in f32 on the tensor
core; the row's factor and the bias enter in f32, and the result is rounded once to x's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.ops.products.ways import choose_way
from terrazzo.ops.quantized import rounding_error

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.weight_only.format import QuantizedWeight
    from terrazzo.ops.weight_only.packed import WeightOnly

STEP_K, STEP_UNITS = 16, 20


def gemm(
    x: torch.Tensor, weight: QuantizedWeight | WeightOnly[Any], numerics: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 [..., N], unrounded: x [..., K] times the dequantized weight, plus `bias` (else the weight's own).

    Args:
        numerics: as in `dequantize` of the weight; x.dtype is the activation dtype.
    """
    w = weight.dequantize(numerics, x.dtype)
    bias = weight.bias if bias is None else bias
    y = x.double() @ w.double().T
    return y if bias is None else y + bias.double()


def forward(
    x: torch.Tensor, weight: QuantizedWeight | WeightOnly[Any], bias: torch.Tensor | None = None, numerics: str = "auto"
) -> torch.Tensor:
    """y [..., N] in x's dtype, `gemm` rounded once: what the operator returns, in torch on x's device.

    Args:
        numerics: "auto" is what the operator takes for many tokens.
    """
    if numerics == "auto":
        numerics = choose_way(weight.format, weight.scale_dtype, str(x.dtype)[6:], False).name
    return gemm(x, weight, numerics, bias).to(x.dtype)


def forward_error_bound(
    x: torch.Tensor,
    weight: QuantizedWeight | WeightOnly[Any],
    numerics: str,
    bias: torch.Tensor | None = None,
    *,
    splits: int = 64,
) -> torch.Tensor:
    """Largest |y - gemm(x, weight, numerics, bias)| that a correct kernel can show, for each element: float64 [..., N].

    Of formats whose codes are numbers as they are. With S = sum |x||w| + |bias| and the derivation of
    `w4a16.reference.forward_error_bound`: T = ceil(K / 16) steps of the tensor core in a row, or those of a group where
    the sums of groups are scaled; A = splits + 2 additions and products in f32, and two more for each group.

    Args:
        splits: most partial sums of one output element that are added in f32 (warps of a block times split-K).
    """
    k, groups = weight.k, -(-weight.k // weight.group_size)
    ref = gemm(x, weight, numerics, bias)
    total = x.double().abs() @ weight.dequantize(numerics, x.dtype).double().abs().T
    bias = weight.bias if bias is None else bias
    total = total if bias is None else total + bias.double().abs()
    scaled = numerics == "post" and groups > 1
    steps = -(-(weight.group_size if scaled else k) // STEP_K)
    additions = splits + 2 + (2 * groups if scaled else 0)
    error = 1.01 * (STEP_UNITS * steps + additions) * 2.0**-24 * total
    return error + rounding_error(ref.abs() + error, x.dtype)
