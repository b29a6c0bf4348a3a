"""The kernel of gated activations for a call: choices, checks, launch, and requests for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, quantized, row_calls, weights
from terrazzo.ops.activation import program
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


class Call(NamedTuple):
    """Arguments of `act_and_mul`."""

    x: torch.Tensor
    smooth: torch.Tensor | None
    expert_offsets: torch.Tensor | None
    activation: str
    layout: str
    alpha: float
    limit: float | None
    quant: str | None
    numerics: str
    column_scales: bool
    target: str | None = None

    @property
    def choices(self) -> Choices:
        """Of its kernel."""
        by_expert = self.smooth is not None and self.smooth.ndim == 2
        return Choices(
            self.x.shape[-1] // 2, weights.dtype_name(self.x), self.activation, self.layout, self.limit is not None,
            self.numerics, self.smooth is not None, by_expert,
            0 if self.expert_offsets is None else len(self.expert_offsets) - 1, self.quant, self.column_scales,
        )  # fmt: skip


@dataclass(frozen=True)
class Choices(row_calls.Choices):
    """What chooses a kernel; as in program.build."""

    NAME: ClassVar[str] = "activation.act_and_mul"
    PROGRAM: ClassVar[ModuleType] = program
    k: int
    dtype: str
    activation: str = "silu"
    layout: str = "gate_up"
    clamps: bool = False
    numerics: str = "fused"
    smooth: bool = False
    by_expert: bool = False
    experts: int = 0
    quant: str | None = None
    column_scales: bool = False

    def schedule(self, m: int, target: Target, device: Target) -> rows.Rows:
        parts = rows.PARTS if self.quant not in ("int8", "e4m3") or target.supports("cluster") else 1
        return rows.choose(self.k, device, m, parts)

    def check(self) -> None:
        """Raise ArgumentError unless a kernel serves these choices."""
        row_calls.check_choice("x", self.dtype, row_calls.DTYPES)
        row_calls.check_choice("activation", self.activation, program.ACTIVATIONS)
        row_calls.check_choice("layout", self.layout, program.LAYOUTS)
        row_calls.check_choice("numerics", self.numerics, program.NUMERICS)
        quantized.check_quant(self.quant, self.column_scales)
        if self.smooth and self.quant is None and self.numerics == "model":
            constraint = "cannot follow an h that is rounded as models round it and not quantized"
            raise ArgumentError("smooth", "given", constraint, "leave it out, or use numerics='fused'")
        if type(self.experts) is not int or not 0 <= self.experts <= program.MOST_EXPERTS:
            constraint = f"must be of at most {program.MOST_EXPERTS} experts"
            raise ArgumentError("expert_offsets", self.experts, constraint, "split the experts")
        row_calls.check_columns(self.k)


def kernel_requests(
    intermediate: int,
    *,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    target: Target | str,
    activation: str = "silu",
    layout: str = "gate_up",
    limited: bool = False,
    numerics: str = "fused",
    smooth: bool = False,
    experts: int = 0,
    by_expert: bool = False,
    quant: str | None = None,
    column_scales: bool = False,
) -> list[KernelRequest]:
    """The kernels of `act_and_mul` that make rows of `intermediate` values. Needs no GPU.

    Args:
        m: numbers of rows; None: any. dtype: of x. limited: whether a `limit` is given, as swiglu_oai's default is.
        smooth: whether a smooth vector is given; by_expert: one for each expert. experts: number of those whose offsets
            are given, 0 for none. activation, layout, numerics, quant, column_scales: as in the call.
        target: an architecture is the program's, which the GPU here runs if it can; a device, a Target stand for both.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    launching.check_flags(limited=limited, smooth=smooth, by_expert=by_expert)
    if by_expert and not (smooth and experts):
        constraint = "must be False without smooth vectors and experts"
        raise ArgumentError("by_expert", by_expert, constraint, "leave it out")
    clamps = limited or activation == "swiglu_oai"
    given = (dtype, activation, layout, clamps, numerics, smooth, by_expert, experts, quant, column_scales)
    return Choices(intermediate, *given).requests(m, target)


def check(call: Call) -> None:
    """Raise ArgumentError unless tensors fit x [..., 2 F], and a kernel serves the choices."""
    x, smooth, expert_offsets = call[:3]
    row_calls.check_rows(x, "act_and_mul", what="[..., 2 F]")
    if x.shape[-1] % 2:
        raise ArgumentError("x", list(x.shape), "must be [..., 2 F]: gate and up", "join gate and up")
    k, experts = x.shape[-1] // 2, 0
    if expert_offsets is not None:
        launching.check_tensor(expert_offsets, "expert_offsets", "int32 [E + 1]")
        if expert_offsets.ndim != 1 or len(expert_offsets) < 2 or weights.dtype_name(expert_offsets) != "int32":
            seen = weights.described(expert_offsets)
            raise ArgumentError("expert_offsets", seen, "must be int32 [E + 1]", "pass those of moe.route")
        if expert_offsets.device != x.device or x.ndim != 2:
            seen = f"on {expert_offsets.device}, x {list(x.shape)} on {x.device}"
            constraint = "must be on the device of x [P, 2 F]"
            raise ArgumentError("expert_offsets", seen, constraint, "move it, and flatten x")
        experts = len(expert_offsets) - 1
    if smooth is not None:
        shape = (experts, k) if getattr(smooth, "ndim", 1) == 2 and experts else (k,)
        row_calls.check_vector(smooth, "smooth", shape, x.device)
    for name, value in (("alpha", call.alpha), ("limit", 1.0 if call.limit is None else call.limit)):
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ArgumentError(name, value, "must be a positive number", f"leave {name} out")
    call.choices.check()


def run(
    call: Call, new: bool = False
) -> tuple[torch.Tensor | None, QuantizedActivations | BlockQuantizedActivations | None] | None:
    """(h or None, codes or None); None for a call whose equal was not launched before.

    Args:
        new: whether the call was checked, so that it is launched in any case.
    """
    import torch

    x, smooth, offsets, _, _, alpha, limit, quant, _, column_scales, _ = call
    try:
        grad = x.requires_grad
        if not new and (type(x) is not torch.Tensor or not x.is_cuda or grad or torch.compiler.is_compiling()):
            return None
        shape, index = x.shape, x.get_device()
        k = shape[-1] // 2
        m = x.numel() // shape[-1]
        key = (
            Call, x.dtype, x.layout, index, rows.bucket(launching.detect(index), m), len(shape), shape[-1],
            smooth is not None and row_calls.seen(smooth), offsets is not None and row_calls.seen(offsets),
            type(column_scales), type(alpha), type(limit), *call[3:],
        )  # fmt: skip
        found = row_calls.ready.get(key)
    except row_calls.UNFIT:
        if new:
            raise
        return None
    if found is None and not new:
        return None
    y, codes = row_calls.allocate(x, (*shape[:-1], k), quant, False, column_scales)
    if m == 0:
        return y, codes
    if found is None:
        found = row_calls.prepare(key, m, call.choices, x, call.target, torch.float32, torch.int32)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = launching.aligned_copy(x)
    _, _, no_rows, no_codes, no_vector, no_integers = found
    q, scales, sums = no_codes, no_vector, None
    if codes is not None:
        q, scales, sums = quantized.kernel_arguments(codes)
    args = (
        x if x.ndim == 2 else x.view(m, 2 * k), no_vector if smooth is None else row_calls.inverse_of(smooth),
        no_integers if offsets is None else row_calls.vector(offsets),
        no_rows if y is None else y if y.ndim == 2 else y.view(m, k), q, scales, no_integers if sums is None else sums,
        alpha, 0.0 if limit is None else limit,
    )  # fmt: skip
    launching.launch(row_calls.ready, key, found, args)
    return y, codes
