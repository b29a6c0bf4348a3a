"""`RMSNorm`, alone or in front of a product, where the quantizer of its activations takes it in."""

from __future__ import annotations

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import glue, products
from terrazzo.nn.dense import Dense
from terrazzo.nn.module import PackedModule
from terrazzo.ops import norm as rows
from terrazzo.ops import weights
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight along the last dimension, in float32, rounded once.

    Args:
        weight: [hidden], or the number of channels for ones. eps: added to the mean square.
        offset: added to the weight: 1 where a checkpoint stores the weight less one (Gemma).
    """

    def __init__(self, weight: torch.Tensor | int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        if torch.is_tensor(weight):
            if weight.dim() != 1 or not weight.is_floating_point():
                raise ArgumentError("weight", weights.described(weight), "must be float [hidden]", "pass the norm's")
        else:
            weights.check_count("weight", weight, "pass the norm's weight, or its number of channels")
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
        """(what `layer` multiplies, the new residual): h + delta, then this norm; h is written where it can be.

        Args:
            h: float16 or bfloat16 [T, hidden], the residual. delta: what is added to it first, alike, or None.
            post: norm of delta itself.

        Sum, norm and what the layer multiplies are one kernel. W4Ax takes two after a norm of delta itself.
        """
        form = {} if getattr(layer, "wide", True) else products.rows_form(layer)
        if form is not None and (made := self._in_one(h, delta, post, form)) is not None:
            return made, h
        if layer.takes_norm:
            if delta is not None and post is None and products.adds(layer, h):
                return products.quantize(delta, layer.packed, self.weight, self.eps, h), h
            if delta is not None:
                h = h + delta if post is None else glue.norm_add(delta, h, post.weight, post.eps)
            return products.quantize(h, layer.packed, self.weight, self.eps), h
        return self.plain(h, delta, post)

    def plain(
        self, h: torch.Tensor, delta: torch.Tensor | None = None, post: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this norm of the new residual, the new residual), [T, hidden] both; h, delta, post: see `before`."""
        if (made := self._in_one(h, delta, post, {})) is not None:
            return made, h
        if delta is None:
            return self(h), h
        if post is None:
            return glue.add_norm(delta, h, self.weight, self.eps)
        return glue.norm_add_norm(delta, h, post.weight, self.weight, self.eps)

    def _in_one(
        self, h: torch.Tensor, delta: torch.Tensor | None, post: RMSNorm | None, form: products.Form
    ) -> products.Activations | None:
        """Sum and norm by the operator, in the form of `products.rows_form`; None where it does not take these rows."""
        weight = self.weight
        alike = weight.dtype in (h.dtype, torch.float32) and (post is None or post.weight.dtype == weight.dtype)
        if not alike or not products.in_rows(h):
            return None
        if delta is None:
            return rows.rms_norm(h, weight, eps=self.eps, **form)
        if post is None:
            return rows.fused_add_rms_norm(delta, h, weight, eps=self.eps, **form)
        more = dict(post_weight=post.weight, post_eps=post.eps)
        return rows.fused_add_rms_norm(delta, h, weight, eps=self.eps, **more, **form)
