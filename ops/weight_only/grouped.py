"""Grouped GEMM: the tokens of many experts, each with a weight of its own, in one kernel: a persistent one on wgmma,
elsewhere a CTA for each tile on mma.sync."""

from __future__ import annotations

from functools import lru_cache

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
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
    common |= {"weight": weight} if of_codes(form).named else {}
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


records.on_change(plan.cache_clear)
