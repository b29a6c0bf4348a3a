"""`torch.ops.terrazzo.rms_norm`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from typing import Any

import torch
from terrazzo.ops import quantized, row_calls


def call(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, post_weight: torch.Tensor | None,
    smooth: torch.Tensor | None, eps: float, post_eps: float, style: str, quant: str | None, numerics: str,
    also_plain: bool, column_scales: bool,
) -> Any:  # fmt: skip
    """`rms_norm` or `fused_add_rms_norm` as one opaque node of a graph; on a CPU, by the reference."""
    options = (style, quant or "", numerics, also_plain, column_scales)
    vectors = (weight, post_weight, smooth, eps, post_eps)
    if residual is None:
        found = torch.ops.terrazzo.rms_norm(x, *vectors, *options)
    else:
        found = torch.ops.terrazzo.fused_add_rms_norm(x, residual, *vectors, *options)
    y = found.pop() if quant is None or also_plain else None
    codes = None if quant is None else quantized.of_tensors(found, tuple(x.shape), quant, column_scales)
    return row_calls.returned(y, codes)


def _run(x: torch.Tensor, residual: torch.Tensor | None, *vectors_and_options: Any) -> list[torch.Tensor]:
    """Codes' tensors, then y."""
    from terrazzo.ops.norm import op, reference

    *vectors, style, quant, numerics, also_plain, column_scales = vectors_and_options
    given = (*vectors, style, quant or None, numerics, also_plain, column_scales)
    if x.is_cuda:
        y, codes = op.run(x, residual, *given)
    else:
        y, codes, h = reference.rms_norm(x, residual, *given)
        if residual is not None:
            residual.copy_(h)
    return [*([] if codes is None else quantized.tensors(codes)), *([] if y is None else [y])]


@torch.library.custom_op("terrazzo::rms_norm", mutates_args=())
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, post_weight: torch.Tensor | None, smooth: torch.Tensor | None, eps: float,
    post_eps: float, style: str, quant: str, numerics: str, also_plain: bool, column_scales: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Codes, scales and row sums where there are such, then y if it is asked for."""
    options = (style, quant, numerics, also_plain, column_scales)
    return _run(x, None, weight, post_weight, smooth, eps, post_eps, *options)


@torch.library.custom_op("terrazzo::fused_add_rms_norm", mutates_args=("residual",))
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, post_weight: torch.Tensor | None,
    smooth: torch.Tensor | None, eps: float, post_eps: float, style: str, quant: str, numerics: str, also_plain: bool,
    column_scales: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The same of the residual, to which x is added in place."""
    options = (style, quant, numerics, also_plain, column_scales)
    return _run(x, residual, weight, post_weight, smooth, eps, post_eps, *options)


def _shapes(x: torch.Tensor, quant: str, also_plain: bool, column_scales: bool) -> list[torch.Tensor]:
    y, codes = row_calls.allocate(x, tuple(x.shape), quant or None, also_plain, column_scales)
    return [*([] if codes is None else quantized.tensors(codes)), *([] if y is None else [y])]


@rms_norm.register_fake
def _(x, weight, post_weight, smooth, eps, post_eps, style, quant, numerics, also_plain, column_scales):
    return _shapes(x, quant, also_plain, column_scales)


@fused_add_rms_norm.register_fake
def _(x, residual, weight, post_weight, smooth, eps, post_eps, style, quant, numerics, also_plain, column_scales):
    return _shapes(x, quant, also_plain, column_scales)
