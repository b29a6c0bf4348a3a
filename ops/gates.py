"""Gates of feed-forward layers, act(gate) * up: their names, the oracle in plain torch, and what kernels compute.

silu        h = round(round(silu(g)) * u)
gelu_tanh   h = round(round(gelu(g, by tanh)) * u);  gelu: by erf
swiglu_oai  h = round(round(u + 1) * round(g * round(sigmoid(round(alpha g)))))
limit       before: g = min(g, limit), u = clamp(u, -limit, limit)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "swiglu_oai")
"""silu(g), gelu(g) by tanh, by erf, and gpt-oss's g sigmoid(alpha g) beside up + 1."""


def gated(
    g: torch.Tensor, u: torch.Tensor, activation: str, alpha: float, limit: float | None, rounds: torch.dtype | None
) -> torch.Tensor:
    """h in g's dtype (float32 or float64), rounded to `rounds` where models round it."""
    import torch

    round_ = (lambda t: t) if rounds is None else (lambda t: t.to(rounds).to(g.dtype))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return round_(round_(u + 1) * round_(g * round_(torch.sigmoid(round_(alpha * g)))))
    if activation == "silu":
        a = torch.nn.functional.silu(g)
    else:
        a = torch.nn.functional.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return round_(round_(a) * u)
