"""y = x w^T of a packed weight on whatever device it is: kernels on a GPU, the operators' reference elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import glue
from terrazzo.ops import activation, launching, weights
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.linear.quantize.quantize_blocks import GATES
from terrazzo.ops.quantized import QUANTS, BlockQuantizedActivations
from terrazzo.ops.w4a8 import entry as w4a8
from terrazzo.ops.w4a8.activations import QuantizedActivations as Bytes
from terrazzo.ops.w4a8.w8a8 import activations as w8a8_activations
from terrazzo.ops.w4a8.w8a8 import entry as w8a8
from terrazzo.ops.w4a8.w8a8.format import PackedWeight as W8A8
from terrazzo.ops.w4ax import entry as w4ax
from terrazzo.ops.w4ax.activations import QuantizedActivations as Mixed
from terrazzo.ops.w4ax.format import PackedWeight as W4Ax
from terrazzo.ops.weight_only import entry as weight_only
from terrazzo.ops.weight_only.packed import WeightOnly
from terrazzo.schedules.rows import MAX_COLUMNS

if TYPE_CHECKING:
    from types import ModuleType

    from terrazzo.ops.weight.base import AnyPacked as Packed
    from torch import nn

Activations = torch.Tensor | Bytes | BlockQuantizedActivations | Mixed
"""What a product takes: float16 or bfloat16 [..., K], or activations that `quantize` made for the weight."""
Form = Mapping[str, Any]
"""Options of operators on rows."""
OPERATOR_GATES = {name: own for name, own in glue.OPERATOR_NAMES.items() if own in GATES}
"""Activations that W4Ax's quantizer takes in."""


def gemm(x: Activations, w: Packed, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """y [..., N] of x [..., K], or activations quantized for `w`; w's own bias is added.

    Args:
        out_dtype: of y where x is quantized.

    Raises:
        ArgumentError: see the operator's `gemm`.
    """
    operator = _operator(w)
    if on_kernels(x):
        return operator.gemm(x, w) if isinstance(x, torch.Tensor) else operator.gemm(x, w, out_dtype=out_dtype)
    check_activations(x, w.k)
    return operator.CALLS.node(x, w, None, out_dtype, operator.CALLS.usual)


def quantize(
    x: torch.Tensor,
    w: Packed | GroupedWeight,
    rms_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> Activations:
    """x as `gemm` of `w` multiplies it, with RMSNorm in front where `rms_weight` is given: one kernel on a GPU.

    W4A16, MXFP4 and FP8 multiply x itself: then rms_weight must be None.

    Args:
        residual: of W4Ax, where `adds` says so: x is added to it in place in the same kernel, and the sum is quantized.
    """
    if isinstance(w, GroupedWeight):
        w = w.stacked
    operator = _operator(w)
    if operator is weight_only:
        return x
    if operator is w4ax:
        if on_kernels(x):
            return w4ax.quantize_activations(x, w, rms_weight=rms_weight, eps=eps, residual=residual)
        check_activations(x, w.k)
        granularity = "two_level" if w.two_level else "block"
        return import_module("terrazzo.ops.w4ax.torch_op").quantize(x, w, rms_weight, eps, granularity, None, residual)
    if operator is w8a8:
        x = x if rms_weight is None else glue.rms_norm(x, rms_weight, eps)
        if on_kernels(x):
            return w8a8.quantize_activations(x, w)
        return import_module("terrazzo.ops.w4a8.w8a8.torch_op").quantize(x, w)
    if w.ACTIVATIONS not in QUANTS and rms_weight is not None:
        x, rms_weight = glue.rms_norm(x, rms_weight, eps), None
    facts = dict(smooth=w.smooth, rms_weight=rms_weight, eps=eps)
    if on_kernels(x):
        at = "sm_80" if w.target == "sm_80" else None
        return w4a8.quantize_activations(x, **facts, target=at, codes=w.ACTIVATIONS)
    check_activations(x, w.k)
    return import_module("terrazzo.ops.w4a8.torch_op").quantize(x, *facts.values(), None, w.ACTIVATIONS)


def grouped_gemm(
    x: Activations, w: GroupedWeight, offsets: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y [M, N] of rows x [M, K] sorted by expert; see the operator's `grouped_gemm`."""
    operator = _operator(w.stacked)
    options = {} if isinstance(x, torch.Tensor) else {"out_dtype": out_dtype}
    if on_kernels(x):
        return operator.grouped_gemm(x, w, offsets, **options)
    check_activations(x, w.k)
    return operator.CALLS.node(x, w.stacked, None, out_dtype, operator.CALLS.usual, offsets)


def autocast(x: Activations) -> Activations:
    """x in the dtype that `torch.autocast` asks for around this call, as `torch.nn.functional.linear` takes it."""
    if not isinstance(x, torch.Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if x.is_floating_point() and x.dtype != torch.float64 else x


def in_rows(x: torch.Tensor, parts: int = 1) -> bool:
    """Whether kernels take rows of x, or equal parts of them: 16-bit values of which nobody wants a gradient, in whole
    vectors."""
    width, odd = divmod(x.shape[-1], parts)
    if x.dtype not in (torch.float16, torch.bfloat16) or odd or width % 8 or not 0 < width <= MAX_COLUMNS:
        return False
    return not x.requires_grad or not torch.is_grad_enabled()


def rows_form(layer: nn.Module) -> Form | None:
    """`quant`, `smooth` and `target` with which kernels on rows make what a layer multiplies; None for W4Ax. What they
    do not make, static codes and zero points of W8A8 and MXFP8, the layer makes of 16 bits."""
    if getattr(layer, "wide", True):
        return {}
    w = layer.packed
    w = w.stacked if isinstance(w, GroupedWeight) else w
    if isinstance(w, W4Ax):
        return None
    if not isinstance(w, W8A8) and w.ACTIVATIONS not in QUANTS:
        return {}
    form = dict(quant=w.ACTIVATIONS, smooth=w.smooth, target="sm_80" if w.target == "sm_80" else None)
    if isinstance(w, W8A8):
        own = {"e4m3_block128": {"column_scales": True}, "": {}}.get(w8a8_activations.form_of(w))
        return {} if own is None else form | own
    return form


def mixed(layer: nn.Module) -> W4Ax | None:
    """The weight of a W4Ax layer, stacked where it is of experts: its quantizer takes in what stands in front of it."""
    w = getattr(layer, "packed", None)
    w = w.stacked if isinstance(w, GroupedWeight) else w
    return w if isinstance(w, W4Ax) else None


def adds(layer: nn.Module, h: torch.Tensor) -> bool:
    """Whether the quantizer of a layer's activations adds to the residual h, too."""
    return mixed(layer) is not None and in_rows(h) and h.is_contiguous() and h.data_ptr() % 16 == 0


def gated(gate_up: torch.Tensor, name: str, layer: nn.Module) -> Activations:
    """act(gate) * up of joined [..., 2 F], as `layer` multiplies it, or as a tensor.

    Args:
        name: key of `glue.ACTIVATIONS`.
    """
    form, in_one = {} if getattr(layer, "wide", True) else rows_form(layer), in_rows(gate_up, 2)
    if form is None:
        blocks, own = mixed(layer), OPERATOR_GATES.get(name)
        if own and gate_up.is_cuda and gate_up.shape[-1] == 2 * blocks.k and in_one:
            return w4ax.quantize_activations(gate_up, blocks, activation=own)
    if name not in glue.OPERATOR_NAMES or not in_one:
        return glue.ACTIVATIONS[name](gate_up)
    return activation.act_and_mul(gate_up, activation=glue.OPERATOR_NAMES[name], **form or {})


def _operator(w: Packed) -> ModuleType:
    if isinstance(w, W8A8):
        return w8a8
    return weight_only if isinstance(w, WeightOnly) else w4ax if isinstance(w, W4Ax) else w4a8


def _held(x: Activations) -> torch.Tensor:
    held = x if isinstance(x, torch.Tensor) else getattr(x, "q8" if isinstance(x, Mixed) else "q", None)
    if held is None:
        constraint = "must be a tensor, or activations of quantize_activations"
        raise ArgumentError("x", type(x).__name__, constraint, "pass a float16 or bfloat16 tensor")
    return held


def on_kernels(x: Activations) -> bool:
    """Whether the operator itself is called: on a GPU, and where the call is traced."""
    held = x if type(x) is torch.Tensor else _held(x)
    return held.is_cuda or torch.compiler.is_compiling() or type(held) is not torch.Tensor


def check_activations(x: Activations, k: int) -> None:
    """What kernels ask of x, where the reference runs."""
    if not isinstance(x, torch.Tensor):
        return
    launching.check_last(x, k)
    launching.check_no_grad(x, "gemm")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ArgumentError("x", weights.dtype_name(x), "must be float16 or bfloat16", "cast the activations")
