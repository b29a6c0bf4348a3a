"""Grouped W8A8 GEMM: the tokens of many experts, each with a weight of its own, in one launch."""

from __future__ import annotations

from functools import lru_cache

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching, quantized
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.w4a8.w8a8 import op
from terrazzo.ops.w4a8.w8a8.format import BLOCK, CODES, check_target
from terrazzo.schedules import linear_spaces, multistage, records, spaces


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


records.on_change(plan.cache_clear)
