"""What the codes of an integer weight mean, for each numerics: specs.md B.3, and reference.py in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.products.ways import numerics_of

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.weight_only.integers import QuantizedWeight

NUMERICS = ("auto", "exact", "fused", "post")
ACTIVATION_DTYPES = ("float16", "bfloat16")


def check_numerics(numerics: str, dtype: str, scale_dtype: str) -> None:
    """Raise ArgumentError unless `numerics` (or "auto") is defined for activations of `dtype` and these scales."""
    if numerics not in NUMERICS:
        raise ArgumentError("numerics", numerics, f"must be one of {NUMERICS}", "use 'auto'")
    if dtype not in ACTIVATION_DTYPES:
        raise ArgumentError("dtype", dtype, f"activations must be one of {ACTIVATION_DTYPES}", "convert x")
    if numerics in ("exact", "fused") and scale_dtype != dtype:
        raise ArgumentError(
            "numerics",
            numerics,
            f"needs scales of the activation dtype {dtype}, they are {scale_dtype}",
            "use numerics='post' (or 'auto'), which takes any scale dtype, or convert the scales before packing",
        )


def decode(weight: QuantizedWeight, numerics: str, dtype: torch.dtype | None) -> torch.Tensor:
    """`reference.dequantize` of a weight that is not packed."""
    import torch

    scales = weight.scales
    if numerics not in (known := numerics_of(weight.format)):
        raise ArgumentError(
            "numerics", numerics, f"must be one of {known}", "name the numerics: 'auto' depends on the problem"
        )
    if numerics != "post":
        dtype = dtype or (torch.float16 if scales.dtype == torch.float32 else scales.dtype)
        check_numerics(numerics, str(dtype).removeprefix("torch."), str(scales.dtype).removeprefix("torch."))
    zeros = torch.full_like(scales, weight.format.zero, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    s, z = per_column(scales, weight), per_column(zeros, weight)
    q = weight.codes.double()
    if numerics == "exact":  # 9-bit integer times 11-bit significand: exact in float64, so .to() is the only rounding
        out = ((q - z) * s.double()).to(dtype)
    elif numerics == "fused":  # q * s + m needs at most 16 significant bits: exact in float64 again
        out = (q * s.double() + (-z.double() * s.double()).to(dtype).double()).to(dtype)
    else:
        out = (q - z) * s.double()
    if weight.perm is None:
        return out
    return torch.empty_like(out).index_copy_(1, weight.perm.long(), out)


def per_column(values: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[N, G] -> [N, K]: the value that belongs to each column of codes."""
    return values.repeat_interleave(weight.group_size, dim=1)[:, : weight.k]
