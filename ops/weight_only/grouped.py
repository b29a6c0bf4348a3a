"""Grouped GEMM: the tokens of many experts, each with a weight of its own, in one kernel: a persistent one on wgmma,
elsewhere a CTA for each tile on mma.sync."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, grouped, launching, weights
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear import multistage as multistage_program
from terrazzo.ops.linear import stream_k as stream_k_program
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.products.codes import get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way
from terrazzo.ops.weight_only import op
from terrazzo.ops.weight_only.packed import facts_of
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
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    dtype: str,
    bias: bool,
    numerics: str,
    target: Target,
    device: Target | None = None,
    weight: str = "u4",
) -> Plan:
    """Kernel and launch sizes for m >= 1 tokens of all experts together. `device`: see `op.plan`."""
    form = get_codes(weight)
    _check_request(n, k, experts, group_size, weight)
    op.check_numerics(numerics, weight)
    group, k8 = op.group_of(group_size, k, weight), -(-k // 8) * 8
    numerics = choose_way(form, scale_dtype, dtype, False).name if numerics == "auto" else numerics
    operand = Operand(group, symmetric, scale_dtype, dtype, numerics, weight)
    problem = op.problem_of(operand, n, k8, experts)
    space = linear_spaces.of(problem)
    facts = tuning_facts(n, k, experts, group_size, symmetric, scale_dtype, dtype, numerics, weight)
    name, s = spaces.choose(space, f"{of_codes(form).record}_grouped", facts, target, m, device)
    common = dict(n=n, k=k8, group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, bias=bias)
    common |= {} if weight == "u4" else {"weight": weight}
    params = common | s.params() | {"numerics": numerics, "experts": experts}
    program = multistage_program if name == "multistage" else stream_k_program
    facts = (f"{program.__name__}:build", tuple(params.items()), target, program.PASS_CONFIGS)
    request = KernelRequest(f"{of_codes(form).record}.grouped", *facts, launching.ptx_flags(target, device))
    if name == "multistage":
        return Plan(request, *multistage.launch_sizes(s, problem, m), ())
    return Plan(request, (target.sms, s.cta_blocks, s.block_tokens // 8, 128, 4), (target.sms, s.flags), ())


def tuning_facts(
    n: int,
    k: int,
    experts: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    dtype: str,
    numerics: str,
    weight: str = "u4",
) -> dict[str, int | str | bool]:
    """What tells one tuned stack of experts from another, besides M; numerics "exact", "fused" or "post"."""
    one = op.tuning_facts(n, k, group_size, symmetric, scale_dtype, dtype, weight)
    return one | {"experts": experts, "numerics": numerics}


def _check_request(n: int, k: int, experts: int, group_size: int, weight: str) -> None:
    launching.check_shape(n, k)
    grouped.check_experts(experts)
    op.check_group(group_size, k, weight)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    m: int | tuple[int, ...] | None = None,
    dtype: str = "float16",
    numerics: str = "auto",
    bias: bool = False,
    target: Target | str = "sm_90a",
    weight: str = "u4",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them.
        group_size: of the format's, or k for one group. scale_dtype: of scales. symmetric: without zero points.
        m: tokens of all experts together.
        dtype: of activations and output, "float16" or "bfloat16".
        numerics: see `grouped_gemm`. bias: whether one is added. weight: name of the format.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    _check_request(n, k, experts, group_size, weight)
    launching.check_flags(symmetric=symmetric, bias=bias)
    tokens = grouped.all_tokens(experts) if m is None else launching.tokens_of(m)
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, weight=weight)
    at, form = Target.parse(target), get_codes(weight)
    if m is None:
        tile = choose_way(form, scale_dtype, dtype, False).name if numerics == "auto" else numerics
        recorded = tuning_facts(n, k, experts, **facts, numerics=tile)
        tokens = (*tokens, *records.tokens(f"{of_codes(form).record}_grouped", recorded, at))
    return launching.requests_of(
        plan(t, n, k, experts, **facts, numerics=numerics, bias=bias, target=at) for t in tokens
    )


def weight_requests(
    w: GroupedWeight, m: int | tuple[int, ...], dtype: str, numerics: str = "auto", bias: bool | None = None
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        m: tokens of all experts together. dtype: of x, "float16" or "bfloat16". numerics: see `grouped_gemm`.
        bias: whether one is added; None: w's own.

    Raises:
        ArgumentError: w on no GPU, or m, dtype or numerics that no kernel serves.
        TargetError: w was packed for another GPU.
    """
    target, device = launching.targets(w.stacked.target, w.device)
    facts = facts_of(w.stacked) | dict(dtype=dtype, numerics=numerics, target=target, device=device)
    facts |= dict(bias=w.stacked.bias is not None if bias is None else bias)
    return launching.requests_of(plan(t, w.n, w.k, len(w), **facts) for t in launching.tokens_of(m))


def run(
    x: torch.Tensor,
    w: GroupedWeight,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    numerics: str,
) -> torch.Tensor:
    """The eager path of `grouped_gemm`."""
    import torch

    check(x, w, expert_offsets, bias, numerics)
    experts, m, n, s = len(w), x.shape[0], w.n, w.stacked
    read = not w.k % 8 and x.is_contiguous() and not x.data_ptr() % 16  # else a copy of it
    if out is not None:
        launching.check_out(out, (m, n), x.dtype, x.device)
        grouped.check_apart(out, x=x if read else None, expert_offsets=expert_offsets, bias=bias)
    if not x.is_cuda or x.device != w.device:
        raise launching.elsewhere(x, w.device)
    if bias is None and s.bias is not None:
        bias = derived.cast_once(s, "bias", x.dtype)
    format = (s.target, *facts_of(s).items())
    key = (experts, n, w.k, format, m, x.dtype, x.device, launching.current_stream(x), numerics, bias is None)
    found = _launchers.get(key) or _prepare(key, x)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device) if out is None else out
    if m == 0:
        return y
    if w.k % 8:
        x = torch.nn.functional.pad(x, (0, -w.k % 8))
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    kernel, workspace, semaphores, no_bias = found
    written = grouped.written_to(y)
    kernel(
        x, s.words.flatten(0, 1), s.params.flatten(0, 1), no_bias if bias is None else bias.view(-1), workspace,
        semaphores, written, expert_offsets,
    )  # fmt: skip
    return y if written is y else y.copy_(written)


def check(
    x: torch.Tensor, w: GroupedWeight, expert_offsets: torch.Tensor, bias: torch.Tensor | None, numerics: str
) -> None:
    """What a call is asked on every device."""
    grouped.check_once(w)
    grouped.check_rows(x.shape, w.k)
    launching.check_no_grad(x, "grouped_gemm")
    grouped.check_dtype(x)
    grouped.check_offsets(expert_offsets, len(w), x.device)
    if bias is not None:
        grouped.check_bias(bias, len(w), w.n, x.dtype, x.device)
    op.check_numerics(numerics, w.stacked.weight)
    launching.check_tokens(x.shape[0])


_launchers: dict[tuple, tuple] = {}
records.on_change(plan.cache_clear)
records.on_change(_launchers.clear)


def _prepare(key: tuple, x: torch.Tensor) -> tuple:
    """Kernel, workspace, semaphores and a stand-in for no bias, kept."""
    experts, n, k, (packed_for, *format), m, _, device, stream, numerics, no_bias = key
    dtype = weights.dtype_name(x)
    if m == 0:
        return ()
    target, runs_on = launching.targets(packed_for, device)
    facts = dict(format) | dict(dtype=dtype, numerics=numerics, bias=not no_bias, target=target, device=runs_on)
    chosen = plan(m, n, k, experts, **facts)
    kernel, workspace, semaphores, _ = launching.ready(chosen, m, device, stream, f"{chosen.request.name}_gemm")
    found = _launchers[key] = (kernel, workspace, semaphores, *launching.stand_ins(device, x.dtype))
    return found
