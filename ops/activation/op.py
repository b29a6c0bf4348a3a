"""The kernel of gated activations for a call: schedule, checks, launch, and requests for ahead-of-time compilation."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, quantized, row_calls, weights
from terrazzo.ops.activation import program
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


@lru_cache(maxsize=1024)
def plan(
    m: int, k: int, *, dtype: str, activation: str, layout: str, clamps: bool, numerics: str, smooth: bool,
    by_expert: bool, experts: int, quant: str | None, column_scales: bool, target: Target, device: Target | None = None,
    schedule: rows.Rows | None = None,
) -> KernelRequest:  # fmt: skip
    """The kernel for m >= 1 rows of k values of h; `schedule` None is what `rows.choose` takes.

    Args:
        device: the GPU, where that is newer than `target`. The rest is as in program.build.
    """
    quantized.check_codes_on(target, quant)
    parts = rows.PARTS if quant not in ("int8", "e4m3") or target.supports("cluster") else 1
    schedule = schedule or rows.choose(k, device or target, m, parts)
    params = dict(
        k=k, dtype=dtype, activation=activation, layout=layout, clamps=clamps, numerics=numerics, smooth=smooth,
        by_expert=by_expert, experts=experts, output=quant or "none", column_scales=column_scales,
    )  # fmt: skip
    params |= schedule.params()
    flags = launching.ptx_flags(target, device)
    entry = f"{program.__name__}:build"
    return KernelRequest("activation.act_and_mul", entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


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
    at, device = launching.requested_targets(target)
    launching.check_flags(limited=limited, smooth=smooth, by_expert=by_expert)
    if by_expert and not (smooth and experts):
        constraint = "must be False without smooth vectors and experts"
        raise ArgumentError("by_expert", by_expert, constraint, "leave it out")
    check_choices(intermediate, dtype, activation, layout, quant, numerics, column_scales, smooth, experts)
    facts = dict(
        dtype=dtype, activation=activation, layout=layout, clamps=limited or activation == "swiglu_oai",
        numerics=numerics, smooth=smooth, by_expert=by_expert, experts=experts, quant=quant,
        column_scales=column_scales, target=at, device=device,
    )  # fmt: skip
    tokens = rows.tokens(device) if m is None else launching.tokens_of(m)
    return list(dict.fromkeys(plan(t, intermediate, **facts) for t in tokens))


def check_choices(
    k: int, dtype: str, activation: str, layout: str, quant: str | None, numerics: str, column_scales: bool,
    smooth: bool, experts: int,
) -> None:  # fmt: skip
    """Raise ArgumentError unless a kernel serves these choices."""
    row_calls.check_choice("x", dtype, row_calls.DTYPES)
    row_calls.check_choice("activation", activation, program.ACTIVATIONS)
    row_calls.check_choice("layout", layout, program.LAYOUTS)
    row_calls.check_choice("numerics", numerics, program.NUMERICS)
    quantized.check_quant(quant, column_scales)
    if smooth and quant is None and numerics == "model":
        constraint = "cannot follow an h that is rounded as models round it and not quantized"
        raise ArgumentError("smooth", "given", constraint, "leave it out, or use numerics='fused'")
    if type(experts) is not int or not 0 <= experts <= program.MOST_EXPERTS:
        constraint = f"must be of at most {program.MOST_EXPERTS} experts"
        raise ArgumentError("expert_offsets", experts, constraint, "split the experts")
    row_calls.check_columns(k)


def check_operands(
    x: Any, smooth: torch.Tensor | None, expert_offsets: torch.Tensor | None, alpha: float, limit: float | None
) -> None:
    """Raise ArgumentError unless tensors fit x [..., 2 F]."""
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
    for name, value in (("alpha", alpha), ("limit", 1.0 if limit is None else limit)):
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ArgumentError(name, value, "must be a positive number", f"leave {name} out")


def run(
    x: torch.Tensor,
    smooth: torch.Tensor | None,
    expert_offsets: torch.Tensor | None,
    activation: str,
    layout: str,
    alpha: float,
    limit: float | None,
    quant: str | None,
    numerics: str,
    column_scales: bool,
    target: str | None = None,
) -> tuple[torch.Tensor | None, QuantizedActivations | BlockQuantizedActivations | None]:
    """The eager path of a call whose operands and choices were checked: (h or None, codes or None)."""
    index, k = x.get_device(), x.shape[-1] // 2
    shape, m = (*x.shape[:-1], k), x.numel() // (2 * k)
    experts = 0 if expert_offsets is None else len(expert_offsets) - 1
    by_expert = smooth is not None and smooth.ndim == 2
    choices = (activation, layout, limit is not None, quant, numerics, column_scales)
    key = (row_calls.bucket(m, index), k, x.dtype, index, smooth is not None, by_expert, experts, *choices, target)
    y, codes = row_calls.allocate(x, shape, quant, False, column_scales)
    if m == 0:
        return y, codes
    found = _kernels.get(key) or _prepare(key, x, m, target)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = launching.aligned_copy(x)
    _, _, no_rows, no_codes, no_vector, no_integers = found
    q, scales, sums = no_codes, no_vector, None
    if codes is not None:
        q, scales, sums = quantized.kernel_arguments(codes)
    args = (
        x if x.ndim == 2 else x.view(m, 2 * k), no_vector if smooth is None else row_calls.inverse_of(smooth),
        no_integers if expert_offsets is None else row_calls.vector(expert_offsets),
        no_rows if y is None else y if y.ndim == 2 else y.view(m, k), q, scales, no_integers if sums is None else sums,
        alpha, 0.0 if limit is None else limit,
    )  # fmt: skip
    launching.launch(_kernels, key, found, args)
    return y, codes


_kernels: dict[tuple, tuple] = {}


def _prepare(key: tuple, x: torch.Tensor, m: int, target: str | None) -> tuple:
    """Kernel, its launcher and stand-ins for what is not there; kept."""
    import torch

    _, k, _, _, smooth, by_expert, experts, activation, layout, clamps, quant, numerics, column_scales, _ = key
    launching.check_tokens(m)
    at, device = launching.targets(target, x.device, "x")
    request = plan(
        m, k, dtype=weights.dtype_name(x), activation=activation, layout=layout, clamps=clamps, numerics=numerics,
        smooth=smooth, by_expert=by_expert, experts=experts, quant=quant, column_scales=column_scales, target=at,
        device=device,
    )  # fmt: skip
    stand_ins = (x.dtype, torch.int8), (torch.float32, torch.int32)
    found = _kernels[key] = row_calls.prepare(request, m, "activation.act_and_mul", x.device, *stand_ins)
    return found
