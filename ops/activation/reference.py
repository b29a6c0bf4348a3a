"""The oracle of gated activations: act(gate) * up, smooth vectors and codes, in plain torch.

h is that of ops/gates.py. With "model" functions are float32's, as torch calls them. With "fused" all is float64, and h
is rounded alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.gates import gated
from terrazzo.ops.quantized import encode, rounding_error

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.activation.op import Call
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


def gate_and_up(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate, up [..., F] of x [..., 2 F]."""
    if layout == "interleaved":
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return (first, second) if layout == "gate_up" else (second, first)


def act_and_mul(call: Call) -> tuple[torch.Tensor | None, QuantizedActivations | BlockQuantizedActivations | None]:
    """(h or None, codes or None) of x [..., 2 F]; of rows of no expert as of others."""
    x, smooth, expert_offsets, activation, layout, alpha, limit, quant, numerics, column_scales, _ = call
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    g, u = gate_and_up(x.reshape(-1, x.shape[-1]), layout)
    if numerics == "model":
        h = gated(g.float(), u.float(), activation, alpha, limit, x.dtype)
    else:
        h = gated(g.double(), u.double(), activation, alpha, limit, None).float()
    if smooth is not None:
        inverse = 1 / smooth.float()
        h = h * (inverse if smooth.ndim == 1 else inverse[experts_of(expert_offsets, len(h))])
    if quant is None:
        return h.to(x.dtype).view(shape), None
    return None, encode(h, None, shape, quant, column_scales)


def experts_of(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row; the nearest one for rows of none."""
    import torch

    at = torch.arange(rows, device=offsets.device)
    return (torch.searchsorted(offsets.long(), at, right=True) - 1).clamp(0, len(offsets) - 2)


def error_bound(g: torch.Tensor, u: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest |h - ref| that a correct kernel can show for ref in float64 of gate and up ("fused", no codes).

    __expf is within 2 + 1.16 |z| units in the last place of 2^-23 for z its argument, the division within 2, tanh and
    erf and products some more: relative to |g u|, which bounds h's sensitivity, not to h, which cancels. h is rounded.
    """
    off = 2.0**-20 * ref.abs() + 2.0**-22 * (g * u).abs().clamp(max=2.0**60) + 2.0**-120
    return off + rounding_error(ref.abs() + off, dtype)
