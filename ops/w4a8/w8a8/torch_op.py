"""`torch.ops.terrazzo.w8a8_gemm` and its like: W8A8 as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from terrazzo.ops import launching, quantized
from terrazzo.ops.call.nodes import Node, register
from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations
from terrazzo.ops.w4a8.w8a8 import activations as w8_activations
from terrazzo.ops.w4a8.w8a8 import op as w8_op
from terrazzo.ops.w4a8.w8a8 import reference as w8_reference
from terrazzo.ops.w4a8.w8a8.format import BLOCK, PackedWeight

Activations = QuantizedActivations | BlockQuantizedActivations


def quantize(x: torch.Tensor, w: PackedWeight) -> Activations:
    """`quantize_activations` as one opaque node of a graph."""
    launching.check_last(x, w.k)
    facts = (w.k, w.codes, w.block, w.input_scale, w.input_zero, w.asymmetric, w.target or "", w.ue8m0)
    q, scales, more = torch.ops.terrazzo.w8a8_quantize(x, w.smooth, *facts)
    return _made(q, scales, more, tuple(x.shape), w)


def _made(q: torch.Tensor, scales: torch.Tensor, more: torch.Tensor, shape: tuple[int, ...], w: Any) -> Activations:
    if w.block:
        return BlockQuantizedActivations(q, scales, shape, True)
    zeros = w8_activations.has_zeros(w)
    sums = more if not zeros and not w8_activations.form_of(w) and w.codes == "int8" else None
    return QuantizedActivations(q, scales, sums, shape, more if zeros else None)


class _Node(Node):
    """Of bytes by bytes."""

    def __init__(self) -> None:
        head, facts = "q scales zeros? words channel_scales", "bias? n k codes block layout target out_dtype accumulate"
        super().__init__("w8a8", "w4a8.w8a8", f"{head} {facts}", f"{head} expert_offsets {facts}")

    def values(self, x: Activations, w: PackedWeight, accumulate: str) -> dict[str, Any]:
        own = dict(q=x.q, scales=x.scales, zeros=getattr(x, "zeros", None))
        return own | dict(channel_scales=w.scales, accumulate=accumulate)

    def weight(self, given: Any) -> PackedWeight:
        facts = given.n, given.k, given.codes, given.block, given.layout
        return PackedWeight(given.words, given.channel_scales, *facts, target=given.target or None)

    def activations(self, given: Any) -> Activations:
        shape = (given.q.shape[0], given.k)
        if given.block:
            return BlockQuantizedActivations(given.q, given.scales, shape, True)
        return QuantizedActivations(given.q, given.scales, None, shape, given.zeros)

    def choices(self, given: Any) -> str:
        return given.accumulate

    def reference(
        self, x: Activations, w: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
    ) -> torch.Tensor:
        w8_op.numerics_of(w.codes, w.block, getattr(x, "zeros", None) is not None, accumulate)
        return w8_reference.forward(x, w, bias, out_dtype)


NODE = _Node()


def call(
    x: torch.Tensor | Activations, w: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None,
    accumulate: str, offsets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A node, or two, see `Linear.node`."""
    if isinstance(x, torch.Tensor):
        out_dtype = out_dtype or x.dtype
        x = quantize(x, w)
    w8_op.check_activations(x, w)
    return NODE.call(x, w, bias, out_dtype or torch.float16, accumulate, offsets)


def _quantized(given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [M, K16], scales [M] or [ceil(K / 128), M4], and row sums or zero points int32 [M] ([0]: neither)."""
    none = given.x.new_empty(0, dtype=torch.int32)
    own = given.input_scale, given.input_zero, given.asymmetric, given.smooth, None, given.target or None, given.ue8m0
    made = w8_activations.run(given.x, PackedWeight(none, none, 1, given.k, given.codes, given.block, "", *own))
    more = getattr(made, "zeros", None)
    more = getattr(made, "row_sums", None) if more is None else more
    return made.q, made.scales, none if more is None else more


def _shapes(given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, k, static = prod(given.x.shape[:-1]), given.k, given.input_scale is not None
    scales = (-(-k // BLOCK), (m + 3) // 4 * 4) if given.block else (m,)
    several = given.codes == "int8" and (given.asymmetric or given.input_zero != 0 or not static)
    make = lambda *shape, dtype: given.x.new_empty(shape, dtype=dtype)
    return (
        make(m, quantized.padded(k), dtype=getattr(torch, quantized.CODES[given.codes])),
        make(*scales, dtype=torch.float32),
        make(m if several else 0, dtype=torch.int32),
    )


_FACTS = "x smooth? k codes block input_scale input_zero asymmetric target ue8m0=False"
register("w8a8_quantize", _FACTS, _quantized, _shapes, "(Tensor, Tensor, Tensor)")
