"""`torch.ops.terrazzo.act_and_mul`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from typing import Any

import torch
from terrazzo.ops import quantized, row_calls
from terrazzo.ops.activation import op, reference

_SCHEMA = (
    "(Tensor x, Tensor? smooth, Tensor? expert_offsets, str activation, str layout, float alpha, float? limit, "
    "str quant, str numerics, bool column_scales) -> Tensor[]"
)


def call(given: op.Call) -> Any:
    """`act_and_mul` as one opaque node of a graph; on a CPU, by the reference."""
    found = torch.ops.terrazzo.act_and_mul(*given._replace(quant=given.quant or "")[:-1])
    if given.quant is None:
        return found[0]
    shape = (*given.x.shape[:-1], given.x.shape[-1] // 2)
    return quantized.of_tensors(found, shape, given.quant, given.column_scales)


def on_cpu(given: op.Call) -> Any:
    """The same at once, without the dispatcher."""
    return row_calls.returned(*reference.act_and_mul(given))


@torch.library.custom_op("terrazzo::act_and_mul", mutates_args=(), schema=_SCHEMA)
def act_and_mul(*given):
    """Codes, scales and row sums, or h."""
    made = op.Call(*given)
    made = made._replace(quant=made.quant or None)
    return _tensors(*(row_calls.launched(op, made) if made.x.is_cuda else reference.act_and_mul(made)))


@act_and_mul.register_fake
def _(*given):
    made = op.Call(*given)
    shape = (*made.x.shape[:-1], made.x.shape[-1] // 2)
    return _tensors(*row_calls.allocate(made.x, shape, made.quant or None, False, made.column_scales))


def _tensors(y, codes):
    return [y] if codes is None else quantized.tensors(codes)
