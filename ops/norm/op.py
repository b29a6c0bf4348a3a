"""RMSNorm's kernel for a call: choices, checks, launch, and requests for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, quantized, row_calls, weights
from terrazzo.ops.norm import program
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


class Call(NamedTuple):
    """Arguments of `fused_add_rms_norm`, or of `rms_norm`, which has no residual."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    post_weight: torch.Tensor | None
    smooth: torch.Tensor | None
    eps: float
    post_eps: float
    style: str
    quant: str | None
    numerics: str
    also_plain: bool
    column_scales: bool
    target: str | None = None

    @property
    def choices(self) -> Choices:
        """Of its kernel."""
        return Choices(
            self.x.shape[-1], weights.dtype_name(self.x), weights.dtype_name(self.weight), self.style, self.numerics,
            self.residual is not None, self.post_weight is not None, self.smooth is not None, self.quant,
            bool(self.also_plain), self.column_scales,
        )  # fmt: skip


@dataclass(frozen=True)
class Choices(row_calls.Choices):
    """What chooses a kernel: weight: dtype of the norm's weights; smooth: whether a smooth vector is given; plain:
    `also_plain`. The rest is as in program.build."""

    NAME: ClassVar[str] = "norm.rms_norm"
    PROGRAM: ClassVar[ModuleType] = program
    k: int
    dtype: str
    weight: str
    style: str = "llama"
    numerics: str = "fused"
    residual: bool = True
    post: bool = False
    smooth: bool = False
    quant: str | None = None
    plain: bool = False
    column_scales: bool = False

    def params(self) -> dict[str, Any]:
        one = self.smooth and folds(self.numerics, self.plain, self.post)  # vector in float32, gemma's 1 in it
        return super().params() | (dict(weight="float32", style="llama", smooth=False) if one else {})

    def schedule(self, m: int, target: Target, device: Target) -> rows.Rows:
        return rows.choose(self.k, device, m)

    def check(self) -> None:
        """Raise ArgumentError unless a kernel serves these choices."""
        row_calls.check_choice("x", self.dtype, row_calls.DTYPES)
        row_calls.check_choice("style", self.style, program.STYLES)
        row_calls.check_choice("numerics", self.numerics, program.NUMERICS)
        wide = self.numerics == "fused" or self.style != "llama"
        if self.weight not in ((self.dtype, "float32") if wide else (self.dtype,)):
            constraint = f"must be {self.dtype}{' or float32' if wide else ', as x'}"
            raise ArgumentError("weight", self.weight, constraint, "cast it")
        quantized.check_quant(self.quant, self.column_scales)
        if self.plain and self.quant is None:
            raise ArgumentError("also_plain", True, "must be False where y is not quantized", "leave it out")
        if self.smooth and self.quant is None and not folds(self.numerics, self.plain, self.post):
            constraint = "cannot follow a y that is not quantized behind roundings or a sandwich"
            raise ArgumentError("smooth", "given", constraint, "leave it out, or use numerics='fused'")
        row_calls.check_columns(self.k)


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
    launching.check_flags(residual=residual, post=post, smooth=smooth, also_plain=also_plain)
    choices = Choices(
        hidden, dtype, weight_dtype or dtype, style, numerics, residual, post, smooth, quant, also_plain, column_scales
    )
    return choices.requests(m, target)


def folds(numerics: str, plain: bool, post: bool) -> bool:
    """Whether weight / smooth is one vector: y leaves with the smooth vector alone, and nothing is rounded before."""
    return numerics == "fused" and not plain and not post


def run(
    call: Call, new: bool = False
) -> tuple[torch.Tensor | None, QuantizedActivations | BlockQuantizedActivations | None] | None:
    """(y or None, codes or None), and the residual is written; None for a call whose equal was not launched before.

    Args:
        new: whether the call was checked, so that it is launched in any case.
    """
    import torch

    x, residual, weight, post, smooth, eps, post_eps, _, quant, _, also_plain, column_scales, _ = call
    try:
        grad = x.requires_grad or (residual is not None and residual.requires_grad)
        if not new and (type(x) is not torch.Tensor or not x.is_cuda or grad or torch.compiler.is_compiling()):
            return None
        shape, index = x.shape, x.get_device()
        k = shape[-1]
        m = x.numel() // k
        key = (
            Call, x.dtype, x.layout, index, rows.bucket(launching.detect(index), m), k,
            row_calls.seen(weight), post is not None and row_calls.seen(post),
            smooth is not None and row_calls.seen(smooth), type(column_scales), type(eps), type(post_eps), *call[5:],
            residual is not None and row_calls.seen(residual, residual.shape == shape),
        )  # fmt: skip
        found = row_calls.ready.get(key)
    except row_calls.UNFIT:
        if new:
            raise
        return None
    if found is None and not new:
        return None
    if residual is not None:
        check_memory(x, residual)
    y, codes = row_calls.allocate(x, shape, quant, also_plain, column_scales)
    if m == 0:
        return y, codes
    if found is None:
        found = row_calls.prepare(key, m, call.choices, x, call.target, weight.dtype, torch.float32, torch.int32)
    _, _, no_rows, no_codes, no_weight, no_scales, no_sums = found
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = launching.aligned_copy(x)
    q, scales, sums = no_codes, no_scales, None
    if codes is not None:
        q, scales, sums = quantized.kernel_arguments(codes)
    as_it_is = smooth is None and weight.is_contiguous() and not weight.data_ptr() % 16
    gain, inverse = (weight, None) if as_it_is else vectors_of(call)
    if post is None:  # a stand-in of the dtype that the kernel takes weights in
        post = no_scales if gain.dtype is torch.float32 else no_weight
    else:
        post = row_calls.vector(post)
    flat = len(shape) == 2
    args = (
        x if flat else x.view(m, k), no_rows if residual is None else residual if flat else residual.view(m, k), gain,
        post, no_scales if inverse is None else inverse, no_rows if y is None else y if flat else y.view(m, k), q,
        scales, no_sums if sums is None else sums, eps, post_eps,
    )  # fmt: skip
    launching.launch(row_calls.ready, key, found, args)
    return y, codes


def check(call: Call) -> None:
    """Raise ArgumentError unless tensors fit x, and a kernel serves the choices."""
    x, residual, weight, post_weight, smooth, eps, post_eps = call[:7]
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
    if residual is not None:
        row_calls.check_rows(residual, "fused_add_rms_norm", "residual")
        if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
            seen = f"{weights.described(residual)} on {residual.device}"
            constraint = f"must be {weights.described(x)} on {x.device}, as x"
            raise ArgumentError("residual", seen, constraint, "pass the residual of these tokens")
    call.choices.check()


def check_memory(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raise ArgumentError unless a residual can be written beside x; a traced call cannot ask."""
    if not residual.is_contiguous() or residual.data_ptr() % 16:
        seen, constraint = f"strides {list(residual.stride())}", "is written: contiguous, at a multiple of 16 bytes"
        raise ArgumentError("residual", seen, constraint, "pass residual.contiguous(), and keep it")
    if x.is_contiguous():  # else a copy is read
        launching.check_apart(residual, "residual", x=x)


def vectors_of(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the norm's weights, factors after it or None) as the kernel reads them."""
    weight, smooth = call.weight, call.smooth
    if smooth is None:
        return row_calls.vector(weight), None
    if not folds(call.numerics, call.also_plain, call.post_weight is not None):
        return row_calls.vector(weight), row_calls.inverse_of(smooth)
    offset = call.style == "gemma"
    make = lambda: (weight.float() + 1 if offset else weight.float()) / smooth.float()
    return row_calls.kept(weight, smooth, ("rows", "gain", offset), make), None
