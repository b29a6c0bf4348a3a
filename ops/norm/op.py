"""RMSNorm's kernel for a call: schedule, checks, launch, and requests for ahead-of-time compilation."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, quantized, row_calls, weights
from terrazzo.ops.norm import program
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


@lru_cache(maxsize=1024)
def plan(
    m: int, k: int, *, dtype: str, weight: str, style: str, numerics: str, residual: bool, post: bool, smooth: bool,
    quant: str | None, plain: bool, column_scales: bool, target: Target, device: Target | None = None,
    schedule: rows.Rows | None = None,
) -> KernelRequest:  # fmt: skip
    """The kernel for m >= 1 rows of k values; `schedule` None is what `rows.choose` takes.

    Args:
        weight: dtype of the norm's weights. smooth: whether a smooth vector is given.
        device: the GPU, where that is newer than `target`. The rest is as in program.build.
    """
    quantized.check_codes_on(target, quant)
    schedule = schedule or rows.choose(k, device or target, m)
    if smooth and folds(numerics, plain, post):  # one vector in float32, gemma's 1 in it
        weight, style, smooth = "float32", "llama", False
    params = dict(
        k=k, dtype=dtype, weight=weight, style=style, numerics=numerics, residual=residual, post=post, smooth=smooth,
        output=quant or "none", plain=plain and quant is not None, column_scales=column_scales,
    )  # fmt: skip
    params |= schedule.params()
    flags = launching.ptx_flags(target, device)
    entry = f"{program.__name__}:build"
    return KernelRequest("norm.rms_norm", entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


def kernel_requests(
    hidden: int,
    *,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    weight_dtype: str | None = None,
    target: Target | str,
    style: str = "llama",
    numerics: str = "fused",
    residual: bool = True,
    post: bool = False,
    smooth: bool = False,
    quant: str | None = None,
    also_plain: bool = False,
    column_scales: bool = False,
) -> list[KernelRequest]:
    """The kernels of `rms_norm` (residual=False) or `fused_add_rms_norm` on rows of `hidden` values. Needs no GPU.

    Args:
        m: numbers of tokens; None: any. dtype: of x. weight_dtype: of the weight, None for x's.
        post, smooth: whether a `post_weight`, a smooth vector is given. style, numerics,
            quant, also_plain, column_scales: as in the calls.
        target: an architecture is the program's, which the GPU here runs if it can; a device, a Target stand for both.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    at, device = launching.requested_targets(target)
    launching.check_flags(residual=residual, post=post, smooth=smooth, also_plain=also_plain)
    weight = weight_dtype or dtype
    check_choices(hidden, dtype, weight, style, quant, numerics, also_plain, column_scales, post, smooth)
    facts = dict(
        dtype=dtype, weight=weight, style=style, numerics=numerics, residual=residual, post=post, smooth=smooth,
        quant=quant, plain=also_plain, column_scales=column_scales, target=at, device=device,
    )  # fmt: skip
    tokens = rows.tokens(device) if m is None else launching.tokens_of(m)
    return list(dict.fromkeys(plan(t, hidden, **facts) for t in tokens))


def folds(numerics: str, also_plain: bool, post: bool) -> bool:
    """Whether weight / smooth is one vector: y leaves with the smooth vector alone, and nothing is rounded before."""
    return numerics == "fused" and not also_plain and not post


def check_choices(
    k: int, dtype: str, weight: str, style: str, quant: str | None, numerics: str, also_plain: bool,
    column_scales: bool, post: bool, smooth: bool,
) -> None:  # fmt: skip
    """Raise ArgumentError unless a kernel serves these choices."""
    row_calls.check_choice("x", dtype, row_calls.DTYPES)
    row_calls.check_choice("style", style, program.STYLES)
    row_calls.check_choice("numerics", numerics, program.NUMERICS)
    wide = numerics == "fused" or style != "llama"
    if weight not in ((dtype, "float32") if wide else (dtype,)):
        constraint = f"must be {dtype}{' or float32' if wide else ', as x'}"
        raise ArgumentError("weight", weight, constraint, "cast it")
    quantized.check_quant(quant, column_scales)
    if also_plain and quant is None:
        raise ArgumentError("also_plain", True, "must be False where y is not quantized", "leave it out")
    if smooth and quant is None and not folds(numerics, also_plain, post):
        constraint = "cannot follow a y that is not quantized behind roundings or a sandwich"
        raise ArgumentError("smooth", "given", constraint, "leave it out, or use numerics='fused'")
    row_calls.check_columns(k)


def run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    post_weight: torch.Tensor | None,
    smooth: torch.Tensor | None,
    eps: float,
    post_eps: float,
    style: str,
    quant: str | None,
    numerics: str,
    also_plain: bool,
    column_scales: bool,
    target: str | None = None,
) -> tuple[torch.Tensor | None, QuantizedActivations | BlockQuantizedActivations | None]:
    """The eager path of calls whose operands and choices were checked: (y or None, codes or None); the residual is
    written."""
    shape, index = tuple(x.shape), x.get_device()
    k = shape[-1]
    m = x.numel() // k
    given = (residual is not None, post_weight is not None, smooth is not None)
    options = (style, quant, numerics, also_plain, column_scales)
    key = (row_calls.bucket(m, index), k, x.dtype, index, weight.dtype, *given, *options, target)
    y, codes = row_calls.allocate(x, shape, quant, also_plain, column_scales)
    if m == 0:
        return y, codes
    found = _kernels.get(key) or _prepare(key, x, m, weight, given, options, target)
    _, _, no_rows, no_codes, no_weight, no_scales, no_sums = found
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = launching.aligned_copy(x)
    q, scales, sums = no_codes, no_scales, None
    if codes is not None:
        q, scales, sums = quantized.kernel_arguments(codes)
    weight, inverse = vectors_of(weight, smooth, style, numerics, also_plain, post_weight is not None)
    if post_weight is None:  # a stand-in of the dtype that the kernel takes weights in
        post_weight = no_scales if "32" in str(weight.dtype) else no_weight
    else:
        post_weight = row_calls.vector(post_weight)
    args = (
        _flat(x, m, k, no_rows), _flat(residual, m, k, no_rows), weight, post_weight,
        no_scales if inverse is None else inverse, _flat(y, m, k, no_rows), q, scales,
        no_sums if sums is None else sums, eps, post_eps,
    )  # fmt: skip
    launching.launch(_kernels, key, found, args)
    return y, codes


_kernels: dict[tuple, tuple] = {}


def _flat(t: torch.Tensor | None, m: int, k: int, stand_in: object) -> object:
    return stand_in if t is None else t if t.ndim == 2 else t.view(m, k)


def _prepare(
    key: tuple, x: torch.Tensor, m: int, weight: torch.Tensor, given: tuple, options: tuple, target: str | None
) -> tuple:
    """Kernel, its launcher and stand-ins for what is not there; kept."""
    import torch

    (residual, post, smooth), (style, quant, numerics, also_plain, column_scales) = given, options
    launching.check_tokens(m)
    at, device = launching.targets(target, x.device, "x")
    request = plan(
        m, x.shape[-1], dtype=weights.dtype_name(x), weight=weights.dtype_name(weight), style=style, numerics=numerics,
        residual=residual, post=post, smooth=smooth, quant=quant, plain=also_plain, column_scales=column_scales,
        target=at, device=device,
    )  # fmt: skip
    stand_ins = (x.dtype, torch.int8), (weight.dtype, torch.float32, torch.int32)
    found = _kernels[key] = row_calls.prepare(request, m, "norm.rms_norm", x.device, *stand_ins)
    return found


def check_operands(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, post_weight: torch.Tensor | None,
    smooth: torch.Tensor | None, eps: float, post_eps: float,
) -> None:  # fmt: skip
    """Raise ArgumentError unless tensors fit x."""
    row_calls.check_rows(x, "rms_norm")
    launching.check_eps(eps)
    launching.check_eps(post_eps)
    for name, vector in (("weight", weight), ("post_weight", post_weight), ("smooth", smooth)):
        if vector is not None or name == "weight":
            row_calls.check_vector(vector, name, (x.shape[-1],), x.device)
    if post_weight is not None and post_weight.dtype != weight.dtype:
        constraint = f"must be {weights.dtype_name(weight)}, as weight"
        raise ArgumentError("post_weight", weights.dtype_name(post_weight), constraint, "cast one of them")
    if post_weight is not None and residual is None:
        raise ArgumentError("post_weight", "given", "needs a residual that is added", "pass one, or leave it out")
    if residual is None:
        return
    row_calls.check_rows(residual, "fused_add_rms_norm", "residual")
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        seen = f"{weights.described(residual)} on {residual.device}"
        constraint = f"must be {weights.described(x)} on {x.device}, as x"
        raise ArgumentError("residual", seen, constraint, "pass the residual of these tokens")


def check_memory(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raise ArgumentError unless a residual can be written beside x; a traced call cannot ask."""
    if not residual.is_contiguous() or residual.data_ptr() % 16:
        seen, constraint = f"strides {list(residual.stride())}", "is written: contiguous, at a multiple of 16 bytes"
        raise ArgumentError("residual", seen, constraint, "pass residual.contiguous(), and keep it")
    if x.is_contiguous():  # else a copy is read
        launching.check_apart(residual, "residual", x=x)


def vectors_of(
    weight: torch.Tensor, smooth: torch.Tensor | None, style: str, numerics: str, also_plain: bool, post: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the norm's weights, factors behind it or None) as the kernel reads them."""
    if smooth is None:
        return row_calls.vector(weight), None
    if not folds(numerics, also_plain, post):
        return row_calls.vector(weight), row_calls.inverse_of(smooth)
    offset = style == "gemma"
    make = lambda: (weight.float() + 1 if offset else weight.float()) / smooth.float()
    return row_calls.kept(weight, smooth, ("rows", "gain", offset), make), None
