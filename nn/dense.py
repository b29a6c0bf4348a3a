"""`Dense`: what a model keeps in 16 bits, with the interface of packed layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import cpu
from torch import nn


class Dense(nn.Module):
    """y = x w^T + bias in torch, without gradients: a head, or a layer that a checkpoint has in 16 bits.

    Args:
        weight: float [N, K]. bias: float [N] or None. sizes: output features of the parts that are joined in it.
    """

    takes_norm, wide = False, True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, sizes: Sequence[int] = ()) -> None:
        super().__init__()
        if weight.dim() != 2 or not weight.is_floating_point():
            seen = f"{weight.dtype} {list(weight.shape)}"
            raise ArgumentError("weight", seen, "must be float [N, K]", "use Linear for packed weights")
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.sizes = tuple(sizes) or (len(weight),)

    @property
    def in_features(self) -> int:
        """K, as in `torch.nn.Linear`."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N, as in `torch.nn.Linear`."""
        return self.weight.shape[0]

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[..., N] of x, float [..., K], in out_dtype or x's dtype: all parts side by side."""
        if x.is_cuda or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return nn.functional.linear(x, self.weight, self.bias)
        return cpu.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.product(x)

    def extra_repr(self) -> str:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return f"in_features={self.in_features}, out_features={self.out_features}, {dtype}"
