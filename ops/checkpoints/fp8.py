"""FP8 weights as published: `weight` float8_e4m3fn [N, K], multiplied by `weight_scale` or `weight_scale_inv`.

compressed-tensors (float-quantized, naive-quantized) and per-tensor "fp8" files name the scales `weight_scale`: [] or
[1], [N, 1] or [N], or [ceil(N/128), ceil(K/128)]. Files with blocks of 128 x 128 (DeepSeek, Qwen) name them
`weight_scale_inv`, and mean a multiplier all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch


def unpack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    weight_scale_inv: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """A layer; arguments and errors as of `fp8.from_checkpoint`. input_scale, of x in 8 bits, is not read."""
    if getattr(weight, "ndim", 0) != 2 or weights.dtype_name(weight) not in ("float8_e4m3fn", "uint8"):
        seen = weights.described(weight)
        remedy = "other 8-bit floats (e4m3fnuz, e5m2) have no kernels"
        raise ArgumentError("weight", seen, "must be float8_e4m3fn [N, K]", remedy)
    name = "weight_scale" if weight_scale_inv is None else "weight_scale_inv"
    scales = weight_scale if weight_scale_inv is None else weight_scale_inv
    if scales is None or (weight_scale is not None and weight_scale_inv is not None):
        constraint = "exactly one of weight_scale and weight_scale_inv is needed"
        raise ArgumentError(name, weights.described(scales), constraint, "pass the layer's scales")
    if weights.dtype_name(scales) == "float8_e8m0fnu":
        import torch

        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.view(torch.uint8).int() - 127)
    (n, k), shape = weight.shape, tuple(scales.shape)
    if len(shape) == 2 and shape != (n, 1) and shape != (1, 1) and shape != (-(-n // 128), -(-k // 128)):
        blocks = [-(-n // 128), -(-k // 128)]
        constraint = f"must be [], [1], [{n}], [{n}, 1] or {blocks} for [{n}, {k}]"
        raise ArgumentError(name, weights.described(scales), constraint, "pass the layer's scales")
    group = 128 if len(shape) == 2 and shape not in ((n, 1), (1, 1)) else k
    with weights.renamed(codes="weight", scales=name):
        scales = scales.float() if scales.dtype.is_floating_point else scales  # exact, whatever the file's dtype
        return QuantizedWeight.canonical(weight, scales, weight="fp8", group_size=group, bias=bias)
