"""Kinds of bytes by bytes: W8A8, of rows or, of e4m3, of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.ops import launching
from terrazzo.ops.kinds.base import Facts, Kind, Serving
from terrazzo.ops.products import ways
from terrazzo.ops.w4a8.w8a8 import op
from terrazzo.schedules import records

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.model_layers import Linear


class Direct(Kind):
    """W8A8. How its activations are quantized is told by the layer."""

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        form = op.form_of(group or k, k, self.product.codes.name)
        numerics = op.numerics_of(**form, zeros=False, accumulate="auto")
        return op.Facts(n, k, numerics=numerics, out_dtype=dtype, experts=experts).tuned()

    def planned(self, facts: Facts) -> op.Facts:
        own = dict(numerics=facts["dequantization"], out_dtype=facts["out_dtype"], experts=facts.get("experts", 0))
        return op.Facts(facts["n"], facts["k"], **own)

    def converter(self, facts: Facts) -> str:
        return self.product.ways[0].converter()

    def in_blocks(self, facts: Facts) -> bool:
        """Whether scales are those of blocks."""
        return ways.get_way(self.product.codes, facts["dequantization"]).rule == ways.BLOCK

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        own = dict(codes=self.product.codes.name, block=self.in_blocks(facts))
        return op.quantizers(facts["k"], m=[m], dtype=facts["out_dtype"], target=target, **own)

    def _form(self, layer: Linear) -> dict[str, Any]:
        """`codes` and `block` of a layer."""
        form = op.form_of(layer.group_size, layer.k, self.product.codes.name)
        return form | dict(block=layer.block or form["block"])

    def quant(self, layer: Linear) -> dict[str, Any]:
        if layer.static or layer.zeros or layer.ue8m0:
            return dict(quant=None)
        if self._form(layer)["block"]:
            return dict(quant=ways.E4M3_BLOCKS.quant, column_scales=True)
        return super().quant(layer)

    def requests(self, layer: Linear, serving: Serving) -> list[KernelRequest]:
        (n, k), form, at = (layer.n, layer.k), self._form(layer), serving.target
        numerics = op.numerics_of(**form, zeros=layer.zeros, accumulate="auto")
        recorded = op.Facts(n, k, numerics=numerics, out_dtype=serving.dtype).tuned()
        known = records.tokens(self.product.record, recorded, at)
        facts = dict(m=serving.tokens(launching.ALL_TOKENS, known), dtype=serving.dtype, target=at, bias=layer.bias)
        facts |= form | dict(static=layer.static, zeros=layer.zeros, ue8m0=layer.ue8m0)
        return [it for smooth in serving.smooths for it in op.kernel_requests(n, k, **facts, smooth=smooth)]

    def experts_requests(self, layer: Linear, serving: Serving, top_k: int) -> list[KernelRequest]:
        form, at = self._form(layer), serving.target
        own = dict(m=serving.rows(layer.experts, top_k), dtype=serving.dtype, target=at)
        own |= form | dict(static=layer.static, zeros=layer.zeros, ue8m0=layer.ue8m0)
        before = [op.quantizers(layer.k, **own, smooth=smooth) for smooth in serving.smooths]
        facts = form | dict(zeros=layer.zeros, out_dtype=serving.dtype, bias=layer.bias, target=at)
        m = serving.routed(layer.experts, top_k)
        found = op.grouped_requests(layer.n, layer.k, layer.experts, **facts, m=m)
        return [*found, *(it for made in before for it in made)]
