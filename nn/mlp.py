"""Feed-forward layers: `MLP`, and `SparseMLP` with a router in front of `Experts`."""

from __future__ import annotations

import torch
from terrazzo.nn import products
from terrazzo.nn.experts import Experts, known_activation
from terrazzo.nn.joined import GateUpLinear
from terrazzo.nn.linear import Linear
from torch import nn


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)).

    Args:
        gate_up: joined projections. down: the projection back. activation: key of `glue.ACTIVATIONS`.
    """

    def __init__(self, gate_up: GateUpLinear, down: Linear, activation: str = "silu") -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.activation = gate_up, down, known_activation(activation)

    def forward(self, x: products.Activations, out_dtype: torch.dtype) -> torch.Tensor:
        """[T, hidden] of x [T, hidden], or quantized for `gate_up_proj`."""
        h = self.gate_up_proj.product(x, out_dtype)
        return self.down_proj(products.gated(h, self.activation, self.down_proj), out_dtype)


class SparseMLP(nn.Module):
    """A router in float, and the experts that it chooses.

    Args:
        router: weight [E, hidden]. experts: the feed-forward layers. top_k: experts of a token.
        normalize: whether the chosen gates are divided by their sum.
    """

    def __init__(self, router: torch.Tensor, experts: Experts, top_k: int, normalize: bool) -> None:
        super().__init__()
        self.register_buffer("router", router)
        self.experts, self.top_k, self.normalize = experts, top_k, normalize

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """[T, hidden] of x [T, hidden]."""
        logits = nn.functional.linear(x, self.router.to(x.dtype))
        gates, ids = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        if self.normalize:
            gates = gates / gates.sum(-1, keepdim=True)
        return self.experts(x, ids, gates)
