"""`torch.ops.terrazzo.w4ax_gemm`, `w4ax_quantize`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from terrazzo.ops import launching, row_calls
from terrazzo.ops.call.nodes import Node, register
from terrazzo.ops.w4ax import reference
from terrazzo.ops.w4ax.activations import QuantizedActivations, default_granularity, sizes
from terrazzo.ops.w4ax.format import PackedWeight


def quantize(
    x: torch.Tensor,
    w: PackedWeight,
    rms_weight: torch.Tensor | None,
    eps: float,
    granularity: str,
    static_scales: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> QuantizedActivations:
    """`quantize_activations` as one opaque node of a graph."""
    given = (rms_weight, eps, granularity, static_scales, *_fields(w), w.permutation)
    if residual is None:
        q4, q8, scales = torch.ops.terrazzo.w4ax_quantize(x, *given, activation or "")
    else:
        q4, q8, scales = torch.ops.terrazzo.w4ax_add_quantize(x, residual, *given)
    return QuantizedActivations(q4, q8, scales, (*x.shape[:-1], w.k), w.blocks8, w.order, granularity)


class _Node(Node):
    """Of mixed W4A4 and W4A8."""

    def __init__(self) -> None:
        head = "q4 q8 scales m x_order granularity"
        facts = "bias? words channel_scales? n k blocks8 layout target order out_dtype"
        super().__init__("w4ax", "w4ax", f"{head} {facts}", f"{head} expert_offsets {facts}")

    def values(self, x: QuantizedActivations, w: PackedWeight, choices: None) -> dict[str, Any]:
        return dict(q4=x.q4, q8=x.q8, scales=x.scales, m=x.m, x_order=x.order, granularity=x.granularity)

    def weight(self, given: Any) -> PackedWeight:
        facts = given.n, given.k, given.blocks8, given.layout, given.target, given.order
        return PackedWeight(given.words, *facts, channel_scales=given.channel_scales)

    def activations(self, given: Any) -> QuantizedActivations:
        facts = (given.m, given.k), given.blocks8, given.x_order, given.granularity
        return QuantizedActivations(given.q4, given.q8, given.scales, *facts)

    def choices(self, given: Any) -> None:
        return None

    def reference(
        self, x: QuantizedActivations, w: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype,
        choices: None,
    ) -> torch.Tensor:  # fmt: skip
        return reference.gemm(x.codes(), x.token_scales(), w, bias).to(out_dtype)


NODE = _Node()


def call(
    x: torch.Tensor | QuantizedActivations, w: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None,
    choices: None, offsets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A node, or two, see `Linear.node`."""
    if not isinstance(x, QuantizedActivations):
        launching.check_last(x, w.k)
        out_dtype = out_dtype or x.dtype
        x = quantize(x, w, None, 0.0, default_granularity(w), None)
    return NODE.call(x, w, bias, out_dtype or torch.float16, None, offsets)


def _fields(w: PackedWeight) -> tuple:
    return w.words, w.channel_scales, w.n, w.k, w.blocks8, w.layout, w.target, w.order


Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q4, q8, scales of activations."""


def _quantized(given: Any) -> Made:
    """Of x [..., K], or [..., 2 K] with an activation, or of a residual to which x is added in place."""
    from terrazzo.ops import gates
    from terrazzo.ops.w4ax import activations, reference

    x, w, residual = given.x, _weight(given), getattr(given, "residual", None)
    x = x if residual is None else row_calls.beside(x, residual)
    options = given.rms_weight, given.eps, given.granularity, given.static_scales
    activation = getattr(given, "activation", None)
    if x.is_cuda:
        made = activations.run(x, w, *options, residual, activation or None)
        return made.q4, made.q8, made.scales
    rows = x.reshape(-1, x.shape[-1])
    if residual is not None:
        residual.add_(x)
        rows = residual.reshape(-1, residual.shape[-1])
    elif activation:
        gate, up = (half.double() for half in rows.chunk(2, dim=-1))
        rows = gates.gated(gate, up, activation, 0.0, None, None).to(x.dtype)
    own = dict(zip(("rms_weight", "eps", "granularity", "static_scales"), options))
    own |= dict(blocks8=w.blocks8, permutation=w.permutation, wide=not w.native)
    made = activations.from_codes(*reference.quantize_activations(rows, **own), w, given.granularity)
    return made.q4, made.q8, made.scales


def _weight(given: Any) -> PackedWeight:
    facts = given.n, given.k, given.blocks8, given.layout, given.target, given.order, given.permutation
    return PackedWeight(given.words, *facts, channel_scales=given.channel_scales)


def _shapes(given: Any) -> Made:
    w, x = _weight(given), given.x
    m, low, high = sizes(prod(x.shape[:-1]), w.k, w.blocks8, not w.native)
    make = lambda *shape, dtype: x.new_empty(shape, dtype=dtype)
    return (
        make(m, low, dtype=torch.uint8),
        make(m, high, dtype=torch.int8),
        make(w.blocks, (m + 3) // 4 * 4, dtype=torch.float32),
    )


_FACTS = "rms_weight? eps granularity static_scales? words channel_scales? n k blocks8 layout target order permutation?"
_MADE = "(Tensor, Tensor, Tensor)"
register("w4ax_quantize", f"x {_FACTS} activation", _quantized, _shapes, _MADE)
register("w4ax_add_quantize", f"x residual! {_FACTS}", _quantized, _shapes, _MADE)
