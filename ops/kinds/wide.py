"""Kinds whose activations keep 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.ops import launching
from terrazzo.ops.kinds.base import Facts, Kind, Serving
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.products.ways import choose_way
from terrazzo.ops.weight_only import grouped, op
from terrazzo.schedules import records

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.launching import Plan
    from terrazzo.ops.model_layers import Linear
    from terrazzo.schedules.problem import Gemm


class Wide(Kind):
    """16-bit activations, and a weight whose scales are folded into operands or multiply sums of groups."""

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        codes = self.product.codes
        scales = codes.scales[0] if codes.values else dtype
        own = (group or codes.groups[-1], symmetric or bool(codes.values), scales, dtype)
        one = op.tuning_facts(n, k, *own, codes.name)
        self._operand(one)  # raises where these do not go together
        if not experts:
            return one
        return grouped.tuning_facts(n, k, experts, *own, choose_way(codes, scales, dtype, False).name, codes.name)

    def _operand(self, facts: Facts, few: bool = False) -> Operand:
        """few: as the program for small batches reads it."""
        own = [facts[name] for name in ("group", "symmetric", "scale_dtype", "dtype")]
        numerics = choose_way(self.product.codes, facts["scale_dtype"], facts["dtype"], few).name
        return Operand(*own, numerics if few else facts.get("numerics", numerics), self.product.codes.name)

    def gemm(self, facts: Facts) -> Gemm:
        return op.problem_of(self._operand(facts), facts["n"], -(-facts["k"] // 8) * 8, facts.get("experts", 0))

    def plan(self, m: int, facts: Facts, target: Target) -> Plan:
        own = {name: facts[name] for name in ("symmetric", "scale_dtype", "dtype")}
        own |= dict(group_size=facts["group"] or facts["k"], bias=False, target=target, weight=self.product.codes.name)
        if "experts" not in facts:
            return op.plan.__wrapped__(m, facts["n"], facts["k"], **own, numerics="auto")
        made = grouped.plan.__wrapped__
        return made(m, facts["n"], facts["k"], facts["experts"], **own, numerics=facts["numerics"])

    def converter(self, facts: Facts) -> str:
        return self._operand(facts, few=True).converter

    def weight_bytes(self, facts: Facts) -> int:
        return self._operand(facts).weight_bytes(facts["n"], facts["k"])

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
        recorded = op.tuning_facts(layer.n, layer.k, **facts)
        known = records.tokens(self.product.record, recorded, serving.target)
        m = serving.tokens(launching.ALL_TOKENS, known)
        return op.kernel_requests(layer.n, layer.k, **facts, **self._launched(layer, serving), m=m)

    def experts_requests(self, layer: Linear, serving: Serving, top_k: int) -> list[KernelRequest]:
        facts = self._layer(layer, serving) | self._launched(layer, serving)
        m = serving.routed(layer.experts, top_k)
        return grouped.grouped_requests(layer.n, layer.k, layer.experts, **facts, m=m)
