"""`torch.ops.terrazzo.rms_norm`: the operator as torch.compile, export and fake tensors see it."""

from typing import Any

import torch
from terrazzo.ops import quantized, row_calls
from terrazzo.ops.norm import op, reference

Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""y, codes, scales, row sums; what is not there has no elements. Not a list: operators that write to an operand return
none in graphs that are made functional."""
_GIVEN = (
    "Tensor weight, Tensor? post_weight, Tensor? smooth, float eps, float post_eps, str style, str quant, "
    "str numerics, bool also_plain, bool column_scales) -> (Tensor, Tensor, Tensor, Tensor)"
)


def call(given: op.Call) -> Any:
    """`rms_norm` or `fused_add_rms_norm` as one opaque node of a graph; on a CPU, by the reference."""
    x, residual, *rest = given._replace(quant=given.quant or "")[:-1]
    if residual is None:
        y, *parts = torch.ops.terrazzo.rms_norm(x, *rest)
    else:
        y, *parts = torch.ops.terrazzo.fused_add_rms_norm(x, residual, *rest)
    if given.quant is None:
        return y
    codes = quantized.of_tensors(parts, tuple(x.shape), given.quant, given.column_scales)
    return (codes, y) if given.also_plain else codes


def on_cpu(given: op.Call) -> Any:
    """The same at once, without the dispatcher."""
    if given.residual is not None:
        op.check_memory(given.x, given.residual)
    return row_calls.returned(*_referred(given))


def _referred(given: op.Call) -> tuple:
    y, codes, h = reference.rms_norm(given)
    if given.residual is not None:
        given.residual.copy_(h)
    return y, codes


def _run(x: torch.Tensor, residual: torch.Tensor | None, *rest: Any) -> Made:
    given = op.Call(x, residual, *rest)
    given = given._replace(quant=given.quant or None)
    return _four(x, *(row_calls.launched(op, given) if x.is_cuda else _referred(given)))


def _four(x: torch.Tensor, y: torch.Tensor | None, codes: Any) -> Made:
    parts = [] if codes is None else quantized.tensors(codes)
    parts += [x.new_empty(0) for _ in range(3 - len(parts))]
    return (x.new_empty(0) if y is None else y, *parts)


@torch.library.custom_op("terrazzo::rms_norm", mutates_args=(), schema=f"(Tensor x, {_GIVEN}")
def rms_norm(x, *rest):
    """y, codes, scales and row sums; see `Made`."""
    return _run(x, None, *rest)


@torch.library.custom_op(
    "terrazzo::fused_add_rms_norm", mutates_args=("residual",), schema=f"(Tensor x, Tensor(a1!) residual, {_GIVEN}"
)
def fused_add_rms_norm(x, residual, *rest):
    """The same of the residual, to which x is added in place."""
    return _run(row_calls.beside(x, residual), residual, *rest)


def _shapes(x, *rest):
    quant, _, *options = rest[-4:]
    return _four(x, *row_calls.allocate(x, tuple(x.shape), quant or None, *options))


rms_norm.register_fake(_shapes)
fused_add_rms_norm.register_fake(_shapes)
