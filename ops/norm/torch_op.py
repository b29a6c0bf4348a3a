"""`torch.ops.terrazzo.rms_norm`: the operator as torch.compile, export and fake tensors see it."""

from typing import Any

import torch
from terrazzo.ops import quantized, row_calls
from terrazzo.ops.norm import reference

Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""y, codes, scales, row sums; what is not there has no elements. Not a list: operators that write to an operand return
none in graphs that are made functional."""


def call(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, post_weight: torch.Tensor | None,
    smooth: torch.Tensor | None, eps: float, post_eps: float, style: str, quant: str | None, numerics: str,
    also_plain: bool, column_scales: bool,
) -> Any:  # fmt: skip
    """`rms_norm` or `fused_add_rms_norm` as one opaque node of a graph; on a CPU, by the reference."""
    options = (style, quant or "", numerics, also_plain, column_scales)
    vectors = (weight, post_weight, smooth, eps, post_eps)
    if residual is None:
        y, *parts = torch.ops.terrazzo.rms_norm(x, *vectors, *options)
    else:
        y, *parts = torch.ops.terrazzo.fused_add_rms_norm(x, residual, *vectors, *options)
    codes = None if quant is None else quantized.of_tensors(parts, tuple(x.shape), quant, column_scales)
    return row_calls.returned(y if quant is None or also_plain else None, codes)


def on_cpu(x: torch.Tensor, residual: torch.Tensor | None, *rest: Any) -> Any:
    """The same at once, without the dispatcher."""
    y, codes, h = reference.rms_norm(x, residual, *rest)
    if residual is not None:
        residual.copy_(h)
    return row_calls.returned(y, codes)


def _run(x: torch.Tensor, residual: torch.Tensor | None, *vectors_and_options: Any) -> Made:
    from terrazzo.ops.norm import op

    *vectors, style, quant, numerics, also_plain, column_scales = vectors_and_options
    given = (*vectors, style, quant or None, numerics, also_plain, column_scales)
    if x.is_cuda:
        y, codes = op.run(x, residual, *given)
    else:
        y, codes, h = reference.rms_norm(x, residual, *given)
        if residual is not None:
            residual.copy_(h)
    return _four(x, y, codes)


def _four(x: torch.Tensor, y: torch.Tensor | None, codes: Any) -> Made:
    parts = [] if codes is None else quantized.tensors(codes)
    parts += [x.new_empty(0) for _ in range(3 - len(parts))]
    return (x.new_empty(0) if y is None else y, *parts)


@torch.library.custom_op("terrazzo::rms_norm", mutates_args=())
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, post_weight: torch.Tensor | None, smooth: torch.Tensor | None, eps: float,
    post_eps: float, style: str, quant: str, numerics: str, also_plain: bool, column_scales: bool,
) -> Made:  # fmt: skip
    """y, codes, scales and row sums; see `Made`."""
    options = (style, quant, numerics, also_plain, column_scales)
    return _run(x, None, weight, post_weight, smooth, eps, post_eps, *options)


@torch.library.custom_op("terrazzo::fused_add_rms_norm", mutates_args=("residual",))
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, post_weight: torch.Tensor | None,
    smooth: torch.Tensor | None, eps: float, post_eps: float, style: str, quant: str, numerics: str, also_plain: bool,
    column_scales: bool,
) -> Made:  # fmt: skip
    """The same of the residual, to which x is added in place."""
    options = (style, quant, numerics, also_plain, column_scales)
    return _run(x, residual, weight, post_weight, smooth, eps, post_eps, *options)


def _shapes(x: torch.Tensor, quant: str, also_plain: bool, column_scales: bool) -> Made:
    return _four(x, *row_calls.allocate(x, tuple(x.shape), quant or None, also_plain, column_scales))


@rms_norm.register_fake
def _(x, weight, post_weight, smooth, eps, post_eps, style, quant, numerics, also_plain, column_scales):
    return _shapes(x, quant, also_plain, column_scales)


@fused_add_rms_norm.register_fake
def _(x, residual, weight, post_weight, smooth, eps, post_eps, style, quant, numerics, also_plain, column_scales):
    return _shapes(x, quant, also_plain, column_scales)
