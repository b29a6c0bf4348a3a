"""`torch.ops.terrazzo.w4a8_gemm` and its like: the operators as torch.compile, export and fake tensors see them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from terrazzo.ops import launching
from terrazzo.ops.call.nodes import Node
from terrazzo.ops.w4a8 import activations, fp8_format, fp8_reference, mxfp4_format, mxfp8, reference
from terrazzo.ops.w4a8.activations import QuantizedActivations, padded
from terrazzo.ops.w4a8.format import PackedWeight

Weight = PackedWeight | fp8_format.PackedWeight


def quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, eps: float, target: object,
    codes: str = "int8",
) -> QuantizedActivations:  # fmt: skip
    """`quantize_activations` as one opaque node of a graph."""
    arch = "" if target is None else str(getattr(target, "arch", target))
    if codes == mxfp8.FORM:
        q, scales = torch.ops.terrazzo.w4a8_mxfp8_quantize(x)
        return mxfp8.MXActivations(q, scales, None, tuple(x.shape))
    if codes == "e4m3":
        q, scales = torch.ops.terrazzo.w4a8_fp8_quantize(x, smooth, rms_weight, eps, arch)
        return QuantizedActivations(q, scales, None, tuple(x.shape))
    q, scales, sums = torch.ops.terrazzo.w4a8_quantize(x, smooth, rms_weight, eps, arch)
    return QuantizedActivations(q, scales, sums, tuple(x.shape))


class _Node(Node):
    """Of int8 activations, or of e4m3 ones, which have neither row sums nor a choice of dequantization."""

    def __init__(self, name: str, sums: str, dequantization: str) -> None:
        self.sums = bool(sums)
        head, facts = f"q scales {sums} words channel_scales", "n k group_size layout target out_dtype"
        gemm, experts = (
            f"{head} bias? {facts} {dequantization}",
            f"{head} expert_offsets bias? {facts} {dequantization}",
        )
        super().__init__(name, "w4a8", f"{gemm} pipeline", experts)

    def values(self, x: QuantizedActivations, w: Weight, choices: tuple[str, str]) -> dict[str, Any]:
        own = dict(q=x.q, scales=x.scales, row_sums=x.row_sums)
        return own | dict(dequantization=choices[0], pipeline=choices[1])

    def weight(self, given: Any) -> Weight:
        kind = PackedWeight if self.sums else mxfp4_format.of_e4m3(given.layout)
        sizes = given.n, given.k, given.group_size
        return kind(given.words, given.channel_scales, *sizes, given.layout, None, None, given.target or None)

    def activations(self, given: Any) -> QuantizedActivations:
        sums = given.row_sums if self.sums else None
        return QuantizedActivations(given.q, given.scales, sums, (given.q.shape[0], given.k))

    def choices(self, given: Any) -> tuple[str, str]:
        return getattr(given, "dequantization", "auto"), getattr(given, "pipeline", "imfp")

    def reference(
        self, x: QuantizedActivations, w: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype,
        choices: tuple[str, str],
    ) -> torch.Tensor:  # fmt: skip
        q = x.q[:, : w.k]
        if w.ACTIVATIONS != "int8":
            scales = x.token_scales() if isinstance(x, mxfp8.MXActivations) else x.scales
            return fp8_reference.gemm(q, scales, w, bias).to(out_dtype)
        return reference.forward(q, x.scales, w, bias, out_dtype)


class _GroupsNode(_Node):
    """The same of MXFP8 activations."""

    def weight(self, given: Any) -> Weight:
        sizes = given.n, given.k, given.group_size
        held = given.words, given.channel_scales
        return mxfp8.PackedWeight(*held, *sizes, given.layout, None, None, given.target or None)

    def activations(self, given: Any) -> mxfp8.MXActivations:
        return mxfp8.MXActivations(given.q, given.scales, None, (given.q.shape[0], given.k))


NODES = {
    "int8": _Node("w4a8", "row_sums", "dequantization"), "e4m3": _Node("w4a8_fp8", "", ""),
    mxfp8.FORM: _GroupsNode("w4a8_mxfp8", "", ""),
}  # fmt: skip


def call(
    x: torch.Tensor | QuantizedActivations, w: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype | None,
    choices: tuple[str, str], offsets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A node, or two, see `Linear.node`."""
    if not isinstance(x, QuantizedActivations):
        launching.check_last(x, w.k)
        out_dtype = out_dtype or x.dtype
        at = "sm_80" if offsets is None and w.target == "sm_80" else None
        x = quantize(x, w.smooth, None, 0.0, at, w.ACTIVATIONS)
    return NODES[w.ACTIVATIONS].call(x, w, bias, out_dtype or torch.float16, choices, offsets)


@torch.library.custom_op("terrazzo::w4a8_quantize", mutates_args=())
def w4a8_quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, eps: float, target: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [M, K16], scales [M], row sums [M] of x [..., K]."""
    from terrazzo.ops.w4a8 import activations, reference

    if not x.is_cuda:
        activations.check_dtype(x)
        activations.check_vectors(smooth, rms_weight, x.shape[-1], x.device)
        q, scales, sums = reference.quantize_activations(x.reshape(-1, x.shape[-1]), smooth, rms_weight, eps)
        return torch.nn.functional.pad(q, (0, padded(x.shape[-1]) - x.shape[-1])), scales, sums
    made = activations.run(x, smooth, rms_weight, eps, None, target or None)
    return made.q, made.scales, made.row_sums


@w4a8_quantize.register_fake
def _(x, smooth, rms_weight, eps, target):
    m = prod(x.shape[:-1])
    make = lambda *shape, dtype: x.new_empty(shape, dtype=dtype)
    return make(m, padded(x.shape[-1]), dtype=torch.int8), make(m, dtype=torch.float32), make(m, dtype=torch.int32)


@torch.library.custom_op("terrazzo::w4a8_fp8_quantize", mutates_args=())
def w4a8_fp8_quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, eps: float, target: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q float8_e4m3fn [M, K16], scales [M] of x [..., K]."""
    from terrazzo.ops.w4a8 import activations, fp8_reference

    if not x.is_cuda:
        activations.check_dtype(x)
        activations.check_vectors(smooth, rms_weight, x.shape[-1], x.device)
        q, scales = fp8_reference.quantize_activations(x.reshape(-1, x.shape[-1]), smooth, rms_weight, eps)
        rest = q.new_zeros(len(q), padded(x.shape[-1]) - x.shape[-1])
        return torch.cat([q, rest], dim=1), scales
    made = activations.run(x, smooth, rms_weight, eps, None, target or None, "e4m3")
    return made.q, made.scales


@w4a8_fp8_quantize.register_fake
def _(x, smooth, rms_weight, eps, target):
    m = prod(x.shape[:-1])
    q = x.new_empty((m, padded(x.shape[-1])), dtype=torch.float8_e4m3fn)
    return q, x.new_empty(m, dtype=torch.float32)


@torch.library.custom_op("terrazzo::w4a8_mxfp8_quantize", mutates_args=())
def w4a8_mxfp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q float8_e4m3fn [M, K16], scales int32 [W, M4] of x [..., K]."""
    if not x.is_cuda:
        activations.check_dtype(x)
    made = mxfp8.run(x) if x.is_cuda else mxfp8.reference(x)
    return made.q, made.scales


@w4a8_mxfp8_quantize.register_fake
def _(x):
    made = mxfp8.empty((prod(x.shape[:-1]), x.shape[-1]), x.device)
    return made.q, made.scales
