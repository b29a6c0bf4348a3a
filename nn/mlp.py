"""Feed-forward layers: `MLP`, and `SparseMLP` with a router in front of `Experts`."""

from __future__ import annotations

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.nn.experts import Experts, known_activation
from terrazzo.nn.joined import GateUpLinear
from terrazzo.nn.linear import Linear
from terrazzo.nn.parallel import TensorParallel
from terrazzo.ops import weights
from torch import nn


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)).

    Args:
        gate_up: joined projections. down: the projection back. activation: key of `glue.ACTIVATIONS`.
        ranks: those that share its features, over which the result is summed; None for one.
    """

    def __init__(
        self, gate_up: GateUpLinear, down: Linear, activation: str = "silu", ranks: TensorParallel | None = None
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate_up_proj, self.down_proj, self.activation = gate_up, down, known_activation(activation)

    def forward(self, x: products.Activations, out_dtype: torch.dtype) -> torch.Tensor:
        """[T, hidden] in out_dtype of x, float16 or bfloat16 [T, hidden], or quantized for `gate_up_proj`."""
        h = self.gate_up_proj.product(x, out_dtype)
        y = self.down_proj(products.gated(h, self.activation, self.down_proj), out_dtype)
        return y if self.ranks is None else self.ranks.all_reduce(y)


class SparseMLP(nn.Module):
    """A router in float, and the experts that it chooses.

    Args:
        router: weight [E, hidden]. experts: the feed-forward layers. top_k: experts of a token.
        normalize: whether the chosen gates are divided by their sum.
        ranks: those that share every expert's features; each routes alike.
        router_bias: [E], added to the router's logits, or None.
    """

    def __init__(
        self,
        router: torch.Tensor,
        experts: Experts,
        top_k: int,
        normalize: bool,
        ranks: TensorParallel | None = None,
        router_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if not torch.is_tensor(router) or router.dim() != 2:
            raise ArgumentError("router", weights.described(router), "must be [E, hidden]", "pass the gate's weight")
        weights.check_count("top_k", top_k, "pass the experts of a token", most=len(router))
        if router_bias is not None and (not torch.is_tensor(router_bias) or router_bias.shape != router.shape[:1]):
            seen = weights.described(router_bias)
            raise ArgumentError("router_bias", seen, f"must be [{len(router)}]", "pass one for each expert, or None")
        self.ranks = ranks
        self.register_buffer("router", router)
        self.register_buffer("router_bias", router_bias)
        self.experts, self.top_k, self.normalize = experts, top_k, normalize

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """[T, hidden] in out_dtype of x, float16 or bfloat16 [T, hidden]: of each token's experts, by its gates."""
        bias = None if self.router_bias is None else self.router_bias.to(x.dtype)
        logits = nn.functional.linear(x, self.router.to(x.dtype), bias)
        gates, ids = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        if self.normalize:
            gates = gates / gates.sum(-1, keepdim=True)
        y = self.experts(x, ids, gates)
        return y if self.ranks is None else self.ranks.all_reduce(y)
