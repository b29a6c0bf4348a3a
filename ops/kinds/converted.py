"""Kinds of 4-bit weights that become bytes, and of activations in int8 or e4m3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import launching, w4a8
from terrazzo.ops.kinds.base import Facts, Kind, Serving
from terrazzo.ops.w4a8 import mxfp8, op
from terrazzo.schedules import records

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.model_layers import Linear


class Converted(Kind):
    """W4A8: scales in two levels, or a factor for each group, or MXFP4."""

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        codes = self.product.codes
        if symmetric and codes.zero:
            raise ArgumentError("symmetric", True, f"{self.product.record} weights always have offsets", "leave it out")
        size = group or codes.usual
        if size not in codes.groups:
            constraint = f"must be {' or '.join(map(str, codes.groups))}"
            raise ArgumentError("group", group, constraint, f"leave it out for {codes.usual}")
        own = dict(group_size=size, out_dtype=dtype, dequantization=self.product.ways[0].name)
        return op.Facts(n, k, **own, experts=experts).tuned()

    def planned(self, facts: Facts) -> op.Facts:
        own = dict(group_size=facts["group"], out_dtype=facts["out_dtype"], experts=facts.get("experts", 0))
        return op.Facts(facts["n"], facts["k"], **own, dequantization=self.product.ways[0].name)

    def converter(self, facts: Facts) -> str:
        known = {way.name: way.converter() for way in self.product.ways}
        if (name := facts["dequantization"]) not in known:
            raise ArgumentError("dequantization", name, f"must be one of {', '.join(known)}", "name one of them")
        return known[name]

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        own = dict(dtype=facts["out_dtype"], gain=False, norm=False, codes=self.product.x.quant)
        return [mxfp8.quantizer(m, facts["k"], **own, target=target)]

    def _layer(self, layer: Linear, serving: Serving) -> dict[str, Any]:
        """What tells kernels of a layer apart, besides sizes; the dequantization is asked for where there are two."""
        own = self.product.numerics
        form = serving.dequantization if len(own) > 1 else own[0]
        return dict(group_size=layer.group_size, dequantization=form)

    def _quantizers(self, layer: Linear, serving: Serving, rows: Sequence[int]) -> list[KernelRequest]:
        facts = dict(dtype=serving.dtype, target=serving.target, codes=self.product.x.quant)
        forms = [(norm, gain) for norm in serving.norms for gain in ((True,) if norm else serving.smooths)]
        made = (mxfp8.quantizer(m, layer.k, **facts, norm=norm, gain=gain) for m in rows for norm, gain in forms)
        return list(dict.fromkeys(made))

    def requests(self, layer: Linear, serving: Serving) -> list[KernelRequest]:
        (n, k), facts, at = (layer.n, layer.k), self._layer(layer, serving), serving.target
        recorded = op.Facts(n, k, **facts, out_dtype=serving.dtype).tuned()
        m = serving.tokens(launching.ALL_TOKENS, records.tokens(self.product.record, recorded, at))
        found = w4a8.kernel_requests(n, k, m=m, target=at, bias=layer.bias, dtype=serving.dtype, **facts)
        return found + self._quantizers(layer, serving, m or launching.ALL_TOKENS)

    def experts_requests(self, layer: Linear, serving: Serving, top_k: int) -> list[KernelRequest]:
        facts = self._layer(layer, serving) | dict(bias=layer.bias, target=serving.target, out_dtype=serving.dtype)
        m = serving.routed(layer.experts, top_k)
        found = w4a8.grouped_requests(layer.n, layer.k, layer.experts, **facts, m=m)
        return found + self._quantizers(layer, serving, serving.rows(layer.experts, top_k))
