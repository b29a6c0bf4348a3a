"""`torch.ops.terrazzo.act_and_mul`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from typing import Any

import torch
from terrazzo.ops import quantized, row_calls


def call(
    x: torch.Tensor, smooth: torch.Tensor | None, expert_offsets: torch.Tensor | None, activation: str, layout: str,
    alpha: float, limit: float | None, quant: str | None, numerics: str, column_scales: bool,
) -> Any:  # fmt: skip
    """`act_and_mul` as one opaque node of a graph; on a CPU, by the reference."""
    given = (smooth, expert_offsets, activation, layout, alpha, limit, quant or "", numerics, column_scales)
    found = torch.ops.terrazzo.act_and_mul(x, *given)
    if quant is None:
        return found[0]
    return quantized.of_tensors(found, (*x.shape[:-1], x.shape[-1] // 2), quant, column_scales)


@torch.library.custom_op("terrazzo::act_and_mul", mutates_args=())
def act_and_mul(
    x: torch.Tensor, smooth: torch.Tensor | None, expert_offsets: torch.Tensor | None, activation: str, layout: str,
    alpha: float, limit: float | None, quant: str, numerics: str, column_scales: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Codes, scales and row sums, or h."""
    from terrazzo.ops.activation import op, reference

    run = op.run if x.is_cuda else reference.act_and_mul
    given = (smooth, expert_offsets, activation, layout, alpha, limit, quant or None, numerics, column_scales)
    y, codes = run(x, *given)
    return [y] if codes is None else quantized.tensors(codes)


@act_and_mul.register_fake
def _(x, smooth, expert_offsets, activation, layout, alpha, limit, quant, numerics, column_scales):
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    y, codes = row_calls.allocate(x, shape, quant or None, False, column_scales)
    return [y] if codes is None else quantized.tensors(codes)
