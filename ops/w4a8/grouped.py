"""Grouped W4A8 GEMM: the tokens of many experts, each with a weight of its own, in one kernel: a persistent one on
wgmma, elsewhere a CTA for each tile on mma.sync.

The weights say which form: of this package for int8 activations, or of `fp8` for e4m3.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, grouped, launching
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.linear.bytes.fp8_problem import CONVERTERS, E4M3
from terrazzo.ops.w4a8 import activations, fp8_format, op
from terrazzo.ops.w4a8.activations import QuantizedActivations
from terrazzo.ops.w4a8.format import GROUPS, UNIT_K
from terrazzo.schedules import linear_spaces, multistage, records, spaces
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1024)
def plan(
    m: int,
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int,
    out_dtype: str,
    dequantization: str,
    bias: bool,
    target: Target,
    device: Target | None = None,
) -> Plan:
    """Kernel and launch sizes for m >= 1 tokens of all experts together; `dequantization` "e4m3" for `fp8` weights,
    "e2m1" for those of `mxfp4_fp8`. `device`: see `op.plan`."""
    grouped.check_request(n, k, experts, group_size, GROUPS)
    op.check_choices(k, out_dtype, dequantization, "imfp")
    e4m3 = dequantization in CONVERTERS
    if e4m3:
        fp8_format.check_target(target)
    k16, raw = activations.padded(k), out_dtype == "int32"
    dequantization = op.AUTO if dequantization == "auto" else dequantization
    common = dict(
        n=n, k=k16, group=group_size, out_dtype=out_dtype, dequantization=dequantization, bias=bias and not raw
    )
    fp8_problem.of(**common)
    gemm = Gemm.of_bytes(n, k16, group_size, 4 if raw else 2, "e4m3" if e4m3 else "s8", experts=experts)
    facts = tuning_facts(n, k, experts, group_size, out_dtype, dequantization)
    name, s = spaces.choose(linear_spaces.of(gemm), operator_of(dequantization), facts, target, m, device)
    params = common | s.params() | {"experts": experts}
    program = multistage_program if name == "multistage" else stream_k_program
    facts = (f"{program.__name__}:build", tuple(params.items()), target, program.PASS_CONFIGS)
    request = KernelRequest("w4a8.grouped", *facts, launching.ptx_flags(target, device))
    if name == "multistage":
        return Plan(request, *multistage.launch_sizes(s, gemm, m), ())
    return Plan(request, (target.sms, s.cta_blocks, s.block_tokens // 8, 128, 4), (target.sms, s.flags), ())


def operator_of(dequantization: str) -> str:
    """The name under which records are kept."""
    return f"{op.operator_of(dequantization)}_grouped"


def tuning_facts(
    n: int, k: int, experts: int, group_size: int, out_dtype: str, dequantization: str
) -> dict[str, int | str]:
    """What tells one tuned stack of experts from another, besides M."""
    return op.tuning_facts(n, k, group_size, out_dtype, dequantization) | {"experts": experts}


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    group_size: int = 64,
    out_dtype: str = "float16",
    dequantization: str = "auto",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size: 32, 64 or 128; with "e4m3", K too; with "e2m1", 32.
        out_dtype: "float16", "bfloat16" or "int32" (not with "e4m3" and "e2m1").
        dequantization: see `gemm`; "e4m3" for the weights and activations of `fp8`, "e2m1" for those of `mxfp4_fp8`.
        bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves, or e4m3 activations on a target without them.
        TargetError: an unknown target.
    """
    grouped.check_request(n, k, experts, group_size, GROUPS)
    launching.check_flags(bias=bias)
    if dequantization == E4M3 and group_size == k and k not in GROUPS:
        group_size = UNIT_K  # as fp8.QuantizedWeight keeps it
    tokens = grouped.all_tokens(experts) if m is None else launching.tokens_of(m)
    facts, at = dict(group_size=group_size, out_dtype=out_dtype, dequantization=dequantization), Target.parse(target)
    if m is None:
        tokens = (*tokens, *records.tokens(operator_of(dequantization), tuning_facts(n, k, experts, **facts), at))
    return launching.requests_of(plan(t, n, k, experts, **facts, bias=bias, target=at) for t in tokens)


def run(
    x: QuantizedActivations,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    dequantization: str,
) -> torch.Tensor:
    """The eager path of `grouped_gemm` on quantized activations."""
    launching.check_no_grad(x.q, "grouped_gemm")
    op.check_codes(x, w.stacked)
    op.check_sums(x, w.stacked)
    check(x.shape, x.device, w, expert_offsets, bias, out, out_dtype, dequantization)
    if x.q.shape[0] != x.shape[0]:
        x.check()
    return multiply(x, w, expert_offsets, bias, out, out_dtype, dequantization)


def check(
    shape: tuple[int, ...],
    device: torch.device,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    dequantization: str,
) -> None:
    """What a call is asked before x [M, K] is quantized."""
    choices = lambda: check_choices(w, bias, out_dtype, dequantization)
    grouped.check_call(shape, device, w, expert_offsets, bias, out, out_dtype, choices)


def check_choices(w: GroupedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype, dequantization: str) -> None:
    """What a call is asked that needs no look at tensors."""
    op.check_types(out_dtype, dequantization=dequantization)
    raw = str(out_dtype).removeprefix("torch.")
    op.check_choices(w.k, raw, dequantization, "imfp")
    if op.dequantization_of(w.stacked, dequantization) in CONVERTERS:
        fp8_problem.check_out_dtype(raw)
    if bias is not None:
        launching.check_sums_bias(out_dtype)


def multiply(
    x: QuantizedActivations,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    dequantization: str,
) -> torch.Tensor:
    """The launch on what `_check` has passed."""
    import torch

    experts, m, n, s, q = len(w), x.q.shape[0], w.n, w.stacked, x.q
    dequantization = op.dequantization_of(s, dequantization)
    grouped.check_apart(out, x=x.q, scales=x.scales)
    stream = launching.current_stream(x.q)
    no_bias = bias is None and (s.bias is None or out_dtype == torch.int32)
    key = (experts, n, w.k, s.group_size, s.target, m, x.device, stream, out_dtype, dequantization, no_bias)
    found = _launchers.get(key) or _prepare(key, x, w)
    if not x.q.is_cuda or x.device != w.device:
        raise launching.elsewhere(x.q, w.device)
    if bias is not None:
        bias = bias.float()
    elif not no_bias:
        bias = derived.cast_once(s, "bias", torch.float32)
    y = torch.empty((m, n), dtype=out_dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    kernel, workspace, semaphores, none, no_sums = found
    written = grouped.written_to(y)
    sums = x.row_sums
    if no_sums is not None:
        q, sums = q.view(torch.int8), no_sums
    kernel(
        q, s.words.flatten(0, 1), s.channel_scales.view(-1), x.scales, sums,
        none if bias is None else bias.view(-1), workspace, semaphores, written, expert_offsets,
    )  # fmt: skip
    return y if written is y else y.copy_(written)


_launchers: dict[tuple, tuple] = {}
records.on_change(plan.cache_clear)
records.on_change(_launchers.clear)


def _prepare(key: tuple, x: QuantizedActivations, w: GroupedWeight) -> tuple:
    """Kernel, workspace, semaphores, and stand-ins for no bias and (with e4m3, else None) no row sums; kept."""
    import torch

    experts, n, k, group_size, packed_for, m, device, stream, out_dtype, dequantization, no_bias = key
    out = str(out_dtype).removeprefix("torch.")
    x.check()
    if not x.q.is_cuda or x.device != w.device:
        raise launching.elsewhere(x.q, w.device)
    if m == 0:
        return ()
    target, runs_on = launching.targets(packed_for, device)
    facts = dict(group_size=group_size, out_dtype=out, dequantization=dequantization, bias=not no_bias)
    facts |= dict(target=target, device=runs_on)
    chosen = plan(m, n, k, experts, **facts)
    e4m3 = dequantization in CONVERTERS
    sums = "float32" if e4m3 else "int32"
    kernel, workspace, semaphores, _ = launching.ready(chosen, m, device, stream, "w4a8.grouped_gemm", sums)
    none, no_sums = launching.stand_ins(device, torch.float32, torch.int32)
    found = _launchers[key] = (kernel, workspace, semaphores, none, no_sums if e4m3 else None)
    return found
