"""The oracle of rotary positions: RMSNorm over heads, then pairs of dims turned by their position's angle.

neox          y1 = x1 c - x2 s, y2 = x2 c + x1 s,  x1 = dims [0, R/2), x2 = [R/2, R) of the rotary dims R <= D
interleaved   the same of dims 2i and 2i + 1
model         c, s, each product and each sum are rounded to x's dtype, and RMSNorm as in ops/norm/reference.py
fused         float32 throughout, rounded once
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.quantized import rounding_error

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.rope.op import Call


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, rounds: torch.dtype | None
) -> torch.Tensor:
    """x [T, H, D] in its dtype of arithmetic, its first 2 R' dims turned by cos and sin [T, R']."""
    import torch

    half = cos.shape[-1]
    round_ = (lambda t: t) if rounds is None else (lambda t: t.to(rounds).to(x.dtype))
    c, s = (round_(t)[:, None, :] for t in (cos, sin))
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (part[..., ::2], part[..., 1::2]) if layout == "interleaved" else part.chunk(2, dim=-1)
    first, second = round_(round_(a * c) - round_(b * s)), round_(round_(b * c) + round_(a * s))
    if layout == "interleaved":
        both = torch.stack([first, second], dim=-1).flatten(-2)
    else:
        both = torch.cat([first, second], dim=-1)
    return torch.cat([both, rest], dim=-1)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, norm: str, rounds: torch.dtype | None) -> torch.Tensor:
    """RMSNorm of x [T, H, D] over D, in x's dtype of arithmetic."""
    import torch

    w = weight.to(x.dtype) + (norm == "gemma")
    s = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if rounds is None:
        return x * s * w
    scaled = (x * s).to(rounds).to(x.dtype) if norm == "llama" else x * s
    return (scaled * w).to(rounds).to(x.dtype)


def apply_rope(call: Call, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, heads, D], k [T, kv_heads, D] in qkv's dtype; `exact`: float64, not rounded ("fused")."""
    import torch

    qkv, cos, sin, positions, q_weight, k_weight, heads, kv_heads, head_dim, rotary_dim, layout, *rest = call
    norm, eps, numerics, _ = rest
    wide = torch.float64 if exact else torch.float32
    rounds = qkv.dtype if numerics == "model" else None
    table = [t[:, : rotary_dim // 2].to(wide) for t in (cos, sin)]
    table = [t[: len(qkv)] if positions is None else t[positions.long()] for t in table]
    found = []
    for first, count, weight in ((0, heads, q_weight), (heads, kv_heads, k_weight)):
        x = qkv[:, first * head_dim : (first + count) * head_dim].unflatten(-1, (count, head_dim)).to(wide)
        if norm != "none":
            x = normed(x, weight, eps, norm, rounds)
        x = turned(x, *table, layout, rounds)
        found.append(x if exact else x.to(qkv.dtype))
    return found[0], found[1]


def error_bound(x: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest |y - ref| of a correct kernel for ref in float64 ("fused"); x: the head before it is turned, [..., D].

    A mean of D squares and four products and sums in float32 are off by at most 32 u of the largest magnitude of a
    head; then y is rounded.
    """
    off = x.abs().amax(-1, keepdim=True) * 2.0**-19
    return off + rounding_error(ref.abs() + off, dtype)
