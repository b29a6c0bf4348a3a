"""The oracle of RMSNorm: residual sum, norm, smooth vector and codes, in plain torch.

r'    = round(r + x), or round(r + norm_post(x))
s     = rsqrt(mean(r'^2) + eps)                          in float32
model   llama: y = round(w * round(r' * s)); gpt_oss: y = round(w * (r' * s)); gemma: y = round((r' * s) * (1 + w))
fused   y = r' * w s, gemma r' * (1 + w) s: rounded where y itself is asked for, else not before the codes
codes   of y / smooth; fused: s is a factor of scales alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.quantized import encode, rounding_error

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.norm.op import Call
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


def factor(x: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [M, 1]: 1 / sqrt(mean(x^2) + eps) of rows of x."""
    import torch

    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, style: str, numerics: str) -> torch.Tensor:
    """float32 [M, K]: x's norm; "model": rounded to x's dtype where models round it."""
    w = weight.float() + 1 if style == "gemma" else weight.float()
    s = factor(x, eps)
    if numerics == "fused":
        return x.float() * w * s
    if style == "llama":
        return ((x.float() * s).to(x.dtype).float() * w).to(x.dtype).float()
    return ((x.float() * s) * w).to(x.dtype).float()


def rms_norm(
    call: Call,
) -> tuple[torch.Tensor | None, QuantizedActivations | BlockQuantizedActivations | None, torch.Tensor]:
    """(y or None, codes or None, the new residual) of x [..., K]."""
    x, residual, weight, post_weight, smooth, eps, post_eps, style, quant, numerics, also_plain, column_scales, _ = call
    shape = tuple(x.shape)
    h = x.reshape(-1, shape[-1])
    if residual is not None:
        delta = h if post_weight is None else normed(h, post_weight, post_eps, style, numerics)
        h = (residual.reshape(h.shape).float() + delta.float()).to(x.dtype)
    y = normed(h, weight, eps, style, numerics)
    inverse = None if smooth is None else 1 / smooth.float()
    plain = None
    if quant is None or also_plain:
        wanted = y * inverse if quant is None and inverse is not None else y
        plain = wanted.to(x.dtype).view(shape)
    if quant is None:
        return plain, None, h.view(shape)
    s = None
    if numerics == "fused":
        w = weight.float() + 1 if style == "gemma" else weight.float()
        folded = inverse is not None and not also_plain
        y, s = h.float() * (w / smooth.float() if folded else w), factor(h, eps)[:, 0]
        inverse = None if folded else inverse
    codes = encode(y if inverse is None else y * inverse, s, shape, quant, column_scales)
    return plain, codes, h.view(shape)


def error_bound(x: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest |y - ref| that a correct kernel can show, for each element of ref = y in float64 from the residual h = x
    [M, K] ("fused", no codes).

    The mean of K squares in float32 is off by at most (K / 2 + 2) u relative in the worst order of sums of partial sums
    of 32 and more; rsqrt halves that and adds 2 u; the two products round once each. Then y is rounded.
    """
    off = ref.abs() * 2.0**-24 * (x.shape[-1] / 64 + 12) + 2.0**-130
    return off + rounding_error(ref.abs() + off, dtype)
