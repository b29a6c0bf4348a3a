"""Kinds whose activations keep 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from terrazzo.ops import launching
from terrazzo.ops.kinds.base import Facts, Kind, Serving
from terrazzo.ops.weight_only import op
from terrazzo.schedules import records

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.ops.model_layers import Linear


class Wide(Kind):
    """16-bit activations, and a weight whose scales are folded into operands or multiply sums of groups."""

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        codes = self.product.codes
        scales = codes.scales[0] if codes.values else dtype
        own = dict(group_size=group or codes.groups[-1], symmetric=symmetric or bool(codes.values), dtype=dtype)
        product = op.Facts(n, k, **own, scale_dtype=scales, weight=codes.name, experts=experts)
        product.operand()  # raises where these do not go together
        return product.tuned()

    def planned(self, facts: Facts) -> op.Facts:
        own = {name: facts[name] for name in ("symmetric", "scale_dtype", "dtype")}
        own |= dict(group_size=facts["group"] or facts["k"], weight=self.product.codes.name)
        experts, numerics = facts.get("experts", 0), facts.get("numerics", "auto")
        return op.Facts(facts["n"], facts["k"], **own, experts=experts, numerics=numerics)

    def converter(self, facts: Facts) -> str:
        return replace(self.planned(facts), numerics="auto").operand(few=True).converter

    def weight_bytes(self, facts: Facts) -> int:
        return self.planned(facts).operand().weight_bytes(facts["n"], facts["k"])

    def _layer(self, layer: Linear, serving: Serving) -> dict[str, Any]:
        """What tells kernels of a layer apart, besides sizes."""
        codes = self.product.codes
        own = (True, codes.scales[0]) if codes.row_factors else (layer.symmetric, layer.scale_dtype)
        facts = dict(zip(("symmetric", "scale_dtype"), own), group_size=layer.group_size, weight=codes.name)
        return facts | dict(dtype=serving.dtype)

    def _launched(self, layer: Linear, serving: Serving) -> dict[str, Any]:
        numerics = "auto" if self.product.codes.row_factors else serving.numerics
        return dict(bias=layer.bias, target=serving.target, numerics=numerics)

    def requests(self, layer: Linear, serving: Serving) -> list[KernelRequest]:
        facts = self._layer(layer, serving)
        recorded = op.Facts(layer.n, layer.k, **facts).tuned()
        known = records.tokens(self.product.record, recorded, serving.target)
        m = serving.tokens(launching.ALL_TOKENS, known)
        return op.kernel_requests(layer.n, layer.k, **facts, **self._launched(layer, serving), m=m)

    def experts_requests(self, layer: Linear, serving: Serving, top_k: int) -> list[KernelRequest]:
        facts = self._layer(layer, serving) | self._launched(layer, serving)
        m = serving.routed(layer.experts, top_k)
        return op.grouped_requests(layer.n, layer.k, layer.experts, **facts, m=m)
