"""`RMSNorm`, alone or in front of a product, where the quantizer of its activations takes it in."""

from __future__ import annotations

import torch
from terrazzo.nn import glue, products
from terrazzo.nn.dense import Dense
from terrazzo.nn.module import PackedModule
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight along the last dimension, in float32, rounded once.

    Args:
        weight: [hidden], or the number of channels for ones. eps: added to the mean square.
        offset: added to the weight: 1 where a checkpoint stores the weight less one (Gemma).
    """

    def __init__(self, weight: torch.Tensor | int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        weight = torch.ones(weight) if isinstance(weight, int) else weight.detach()
        self.register_buffer("weight", weight + offset if offset else weight)
        self.eps = eps

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return glue.rms_norm(x, self.weight, self.eps)

    def before(
        self,
        layer: PackedModule | Dense,
        h: torch.Tensor,
        delta: torch.Tensor | None = None,
        post: RMSNorm | None = None,
    ) -> tuple[products.Activations, torch.Tensor]:
        """(what `layer` multiplies, the new residual): h + delta, then this norm.

        Args:
            h: residual [T, hidden]. delta: what is added to it first, or None. post: norm of delta itself.

        W4A8 and W4Ax take sum and norm in two kernels, the second of which quantizes; others in one.
        """
        if layer.takes_norm:
            if delta is not None:
                h = h + delta if post is None else glue.norm_add(delta, h, post.weight, post.eps)
            return products.quantize(h, layer.packed, self.weight, self.eps), h
        return self.plain(h, delta, post)

    def plain(
        self, h: torch.Tensor, delta: torch.Tensor | None = None, post: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this norm of the new residual, the new residual); see `before`."""
        if delta is None:
            return self(h), h
        if post is None:
            return glue.add_norm(delta, h, self.weight, self.eps)
        return glue.norm_add_norm(delta, h, post.weight, self.weight, self.eps)
