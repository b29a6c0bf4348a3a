"""The kind of W4Ax, whose activations are int4 in some blocks of 128 channels and int8 in the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import launching, w4ax
from terrazzo.ops.kinds.base import Facts, Kind, Serving
from terrazzo.ops.w4ax import activations, op
from terrazzo.ops.w4ax.format import native
from terrazzo.schedules.w4ax import BLOCK

if TYPE_CHECKING:
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.model_layers import Linear


class Mixed(Kind):
    """W4Ax with two-level scales, and a quarter of the blocks in 8 bits, as the paper's kernel measurements."""

    def facts(self, n: int, k: int, experts: int, *, dtype: str, group: int | None, symmetric: bool) -> dict[str, Any]:
        if (group or BLOCK) != BLOCK:
            raise ArgumentError("group", group, f"must be {BLOCK}, the block", "leave it out")
        return op.Facts(n, k, blocks8=self._high(k), out_dtype=dtype, two_level=True, experts=experts).tuned()

    @staticmethod
    def _high(k: int) -> int:
        return round(0.25 * -(-k // BLOCK))

    def planned(self, facts: Facts) -> op.Facts:
        own = dict(blocks8=facts["blocks8"], out_dtype=facts["out_dtype"], experts=facts.get("experts", 0))
        return op.Facts(facts["n"], facts["k"], **own, two_level="scales" in facts)

    def converter(self, facts: Facts) -> str:
        return self.product.ways["scales" not in facts].converter()

    def beside(self, m: int, facts: Facts, target: Target) -> list[KernelRequest]:
        own = dict(dtype=facts["out_dtype"], permuted=True, norm=False, wide=not native(target))
        own["granularity"] = facts.get("scales", "block")
        return [activations.plan(m, facts["k"], facts["blocks8"], **own, target=target)]

    def skipped(self, layer: Linear, target: Target) -> str:
        if not layer.experts or not native(target):
            return ""
        return f"experts of W4Ax are one launch on sm_90a alone; {target.arch} calls each by itself"

    def _quantizers(self, layer: Linear, serving: Serving, rows: Sequence[int]) -> list[KernelRequest]:
        """What makes its activations: of 16 bits, of gates, and of norms with a residual or without."""
        facts = dict(dtype=serving.dtype, permuted=True, granularity="two_level", target=serving.target)
        facts["wide"] = not native(serving.target)
        own = {False: ("none", "silu"), True: ("none", "residual")} if layer.k % 8 == 0 else {}
        forms = [(norm, front) for norm in serving.norms for front in own.get(norm, ("none",))]
        plan, high = activations.plan, self._high(layer.k)
        return list(dict.fromkeys(plan(m, layer.k, high, **facts, norm=n, front=f) for m in rows for n, f in forms))

    def requests(self, layer: Linear, serving: Serving) -> list[KernelRequest]:
        m = serving.tokens(launching.ALL_TOKENS)
        facts = dict(m=m, target=serving.target, bias=layer.bias, dtype=None, out_dtype=serving.dtype)
        found = w4ax.kernel_requests(layer.n, layer.k, **facts, granularity="two_level")
        return found + self._quantizers(layer, serving, m or launching.ALL_TOKENS)

    def experts_requests(self, layer: Linear, serving: Serving, top_k: int) -> list[KernelRequest]:
        facts = dict(m=serving.routed(layer.experts, top_k), bias=layer.bias, target=serving.target)
        found = w4ax.grouped_requests(layer.n, layer.k, layer.experts, **facts, out_dtype=serving.dtype)
        return found + self._quantizers(layer, serving, serving.rows(layer.experts, top_k))
