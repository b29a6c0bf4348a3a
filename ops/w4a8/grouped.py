"""Grouped W4A8 GEMM: the tokens of many experts, each with a weight of its own, in one kernel: a persistent one on
wgmma, elsewhere a CTA for each tile on mma.sync.

The weights say which form: of this package for int8 activations, or of `fp8` for e4m3.
"""

from __future__ import annotations

from functools import lru_cache

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
from terrazzo.ops.grouped import GroupedWeight as GroupedWeight
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.bytes import fp8_problem
from terrazzo.ops.linear.bytes import multistage as multistage_program
from terrazzo.ops.linear.bytes import stream_k as stream_k_program
from terrazzo.ops.linear.bytes.fp8_problem import CONVERTERS, E4M3
from terrazzo.ops.w4a8 import activations, fp8_format, op
from terrazzo.ops.w4a8.format import GROUPS, UNIT_K
from terrazzo.schedules import linear_spaces, multistage, records, spaces
from terrazzo.schedules.problem import Gemm


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


records.on_change(plan.cache_clear)
