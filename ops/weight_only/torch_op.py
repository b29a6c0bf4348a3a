"""`torch.ops.terrazzo.<operator>_gemm` of each format: what torch.compile, torch.export and fake tensors see."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from terrazzo.ops.call.nodes import Node
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.weight_only import reference
from terrazzo.ops.weight_only.packed import WeightOnly, kind_of


class _Node(Node):
    """Of a format."""

    def __init__(self, weight: str, operator: str) -> None:
        self.of, self.kind = weight, kind_of(weight)
        self.own = [field.name for field in fields(self.kind) if field.name not in ("bias", "target")]
        facts = "bias? n k group_size scale_dtype symmetric layout target numerics"
        super().__init__(
            operator, "weight_only", f"x words params perm? {facts}", f"x words params expert_offsets {facts}"
        )

    def values(self, x: torch.Tensor, w: WeightOnly[Any], numerics: str) -> dict[str, Any]:
        return dict(x=x, numerics=numerics)

    def weight(self, given: Any) -> WeightOnly[Any]:
        own = [self.of if name == "weight" else getattr(given, name, None) for name in self.own]
        return self.kind(*own, target=given.target or None)

    def activations(self, given: Any) -> torch.Tensor:
        return given.x

    def choices(self, given: Any) -> str:
        return given.numerics

    def reference(
        self, x: torch.Tensor, w: WeightOnly[Any], bias: torch.Tensor | None, out_dtype: torch.dtype, numerics: str
    ) -> torch.Tensor:
        return reference.forward(x, w, bias, numerics)


NODES = {name: _Node(name, of_codes(codes).record) for name, codes in WIDE.items()}


def call(
    x: torch.Tensor, w: WeightOnly[Any], bias: torch.Tensor | None, out_dtype: torch.dtype | None, numerics: str,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A node, see `Linear.node`; y has the dtype of x."""
    if bias is None and w.bias is not None:
        bias = w.bias.to(x.dtype)
    return NODES[w.weight].call(x, w, bias, x.dtype, numerics, offsets)
