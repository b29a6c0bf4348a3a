"""Grouped W8A8 GEMM: the tokens of many experts, each with a weight of its own, in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, grouped, launching, quantized
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.w4a8.w8a8 import op
from terrazzo.ops.w4a8.w8a8.format import BLOCK, CODES, check_target
from terrazzo.schedules import linear_spaces, multistage, records, spaces

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1024)
def plan(
    m: int,
    n: int,
    k: int,
    experts: int,
    *,
    numerics: str,
    out_dtype: str,
    bias: bool,
    target: Target,
    device: Target | None = None,
) -> Plan:
    """Kernel and launch sizes for m >= 1 tokens of all experts together; `numerics`, `device` as of `op.plan`."""
    grouped.check_experts(experts)
    raw, k16 = out_dtype == "int32", quantized.padded(k)
    common = dict(n=n, k=k16, group=BLOCK, out_dtype=out_dtype, dequantization=numerics, bias=bias and not raw)
    fp8_problem.of(**common)
    check_target(target, "int8" if numerics.startswith("s8") else "e4m3")
    gemm = op.problem(n, k, numerics, out_dtype, experts)
    facts = tuning_facts(n, k, experts, out_dtype, numerics)
    name, s = spaces.choose(linear_spaces.of(gemm), operator_of(numerics), facts, target, m, device)
    params = common | s.params() | {"experts": experts}
    program = multistage_program if name == "multistage" else stream_k_program
    facts = (f"{program.__name__}:build", tuple(params.items()), target, program.PASS_CONFIGS)
    request = KernelRequest("w8a8.grouped", *facts, launching.ptx_flags(target, device))
    if name == "multistage":
        return Plan(request, *multistage.launch_sizes(s, gemm, m), ())
    return Plan(request, (target.sms, s.cta_blocks, s.block_tokens // 8, 128, 4), (target.sms, s.flags), ())


def operator_of(numerics: str) -> str:
    """The name under which records are kept."""
    return f"{op.OPERATORS[numerics]}_grouped"


def tuning_facts(n: int, k: int, experts: int, out_dtype: str, numerics: str) -> dict[str, int | str]:
    """What tells one tuned stack of experts from another, besides M."""
    return op.tuning_facts(n, k, out_dtype, numerics) | {"experts": experts}


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    codes: str = "int8",
    block: bool = False,
    zeros: bool = False,
    accumulate: str = "auto",
    out_dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        codes, block, zeros, accumulate, out_dtype: see `kernel_requests`. bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves, or e4m3 on a target without it.
        TargetError: an unknown target.
    """
    launching.check_shape(n, k)
    grouped.check_experts(experts)
    launching.check_flags(bias=bias, block=block, zeros=zeros)
    if codes not in CODES.values():
        raise ArgumentError("codes", codes, f"must be one of {tuple(CODES.values())}", "use int8")
    op.check_flags(codes, block, zeros)
    op.check_out_dtype(out_dtype, codes)
    numerics, at = op.numerics_of(codes, block, zeros, accumulate), Target.parse(target)
    tokens = grouped.all_tokens(experts) if m is None else launching.tokens_of(m)
    if m is None:
        tokens = (*tokens, *records.tokens(operator_of(numerics), tuning_facts(n, k, experts, out_dtype, numerics), at))
    facts = dict(numerics=numerics, out_dtype=out_dtype, bias=bias, target=at)
    return launching.requests_of(plan(t, n, k, experts, **facts) for t in tokens)


def check(
    shape: tuple[int, ...],
    device: torch.device,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> None:
    """What a call is asked before x [M, K] is quantized."""
    choices = lambda: check_choices(w, bias, out_dtype, accumulate)
    grouped.check_call(shape, device, w, expert_offsets, bias, out, out_dtype, choices)


def check_choices(w: GroupedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str) -> None:
    """What a call is asked that needs no look at tensors."""
    import torch

    if type(out_dtype) is not torch.dtype:
        raise ArgumentError("out_dtype", out_dtype, "must be a torch.dtype", "write torch.float16")
    raw = str(out_dtype).removeprefix("torch.")
    op.check_out_dtype(raw, w.stacked.codes)
    op.numerics_of(w.stacked.codes, w.stacked.block, False, accumulate)
    if bias is not None:
        launching.check_sums_bias(out_dtype)


def multiply(
    x: op.Activations,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """The launch on what `check` has passed."""
    import torch

    s, m, zeros = w.stacked, x.q.shape[0], getattr(x, "zeros", None)
    op.check_activations(x, s)
    grouped.check_apart(out, x=x.q, scales=x.scales)
    no_bias = bias is None and (s.bias is None or out_dtype == torch.int32)
    stream = launching.current_stream(x.q)
    numerics = op.numerics_of(s.codes, s.block, zeros is not None, accumulate)
    key = (len(w), w.n, w.k, s.target, m, x.device, stream, out_dtype, numerics, no_bias)
    found = _launchers.get(key) or _prepare(key, x, w)
    if not x.q.is_cuda or x.device != w.device:
        raise launching.elsewhere(x.q, w.device)
    y = torch.empty((m, w.n), dtype=out_dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    if bias is not None:
        bias = bias.float()
    elif not no_bias:
        bias = derived.cast_once(s, "bias", torch.float32)
    kernel, workspace, semaphores, none, no_zeros = found
    written = grouped.written_to(y)
    q = x.q if x.q.dtype == torch.int8 else x.q.view(torch.int8)
    kernel(
        q, s.words.flatten(0, 1), s.scales.flatten(0, 1) if s.block else s.scales.view(-1), x.scales,
        no_zeros if zeros is None else zeros, none if bias is None else bias.view(-1), workspace, semaphores, written,
        expert_offsets,
    )  # fmt: skip
    return y if written is y else y.copy_(written)


_launchers: dict[tuple, tuple] = {}
records.on_change(plan.cache_clear)
records.on_change(_launchers.clear)


def _prepare(key: tuple, x: op.Activations, w: GroupedWeight) -> tuple:
    """Kernel, workspace, semaphores, and stand-ins for no bias and no zero points; kept."""
    import torch

    experts, n, k, packed_for, m, device, stream, out_dtype, numerics, no_bias = key
    op.check_tensors(x)
    if not x.q.is_cuda or x.device != w.device:
        raise launching.elsewhere(x.q, w.device)
    if m == 0:
        return ()
    target, runs_on = launching.targets(packed_for, device)
    out = str(out_dtype).removeprefix("torch.")
    facts = dict(numerics=numerics, out_dtype=out, bias=not no_bias, target=target, device=runs_on)
    chosen = plan(m, n, k, experts, **facts)
    sums = "int32" if numerics.startswith("s8") else "float32"
    kernel, workspace, semaphores, _ = launching.ready(chosen, m, device, stream, "w8a8.grouped_gemm", sums)
    found = _launchers[key] = (kernel, workspace, semaphores, *launching.stand_ins(device, torch.float32, torch.int32))
    return found
