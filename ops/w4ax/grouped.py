"""Grouped W4Ax GEMM: the tokens of many experts, each with a weight of its own, in one persistent kernel on wgmma.

The experts share the plan of their input: its order and which blocks are INT8. So tokens are quantized once for all of
them. Their weights have two-level scales, whose sums run over all blocks of a precision.
"""

from __future__ import annotations

from functools import lru_cache

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import grouped, launching
from terrazzo.ops.grouped import GroupedWeight as GroupedWeight
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear.mixed import integer as program
from terrazzo.ops.linear.mixed import problem
from terrazzo.ops.linear.mixed.scales import OUT_DTYPES
from terrazzo.ops.w4ax import op
from terrazzo.ops.w4ax.activations import DTYPES
from terrazzo.ops.w4ax.fmpq import BLOCK
from terrazzo.ops.w4ax.format import native
from terrazzo.schedules import linear_spaces, records, spaces
from terrazzo.schedules.problem import Gemm

OPERATOR = "w4ax_grouped"
"""The name under which records are kept."""


@lru_cache(maxsize=1024)
def plan(
    m: int, n: int, k: int, experts: int, blocks8: int, *, out_dtype: str, bias: bool, target: Target
) -> Plan:  # fmt: skip
    """Kernel and launch sizes for m >= 1 tokens of all experts together."""
    check_shape(n, k, experts, blocks8)
    if out_dtype not in OUT_DTYPES:
        raise ArgumentError("out_dtype", out_dtype, f"must be one of {OUT_DTYPES}", "leave out_dtype out")
    check_target(target)
    depth = -(-k // BLOCK) * BLOCK
    common = dict(n=n, k=depth, blocks8=blocks8, out_dtype=out_dtype, bias=bias, two_level=True)
    gemm = Gemm.of_blocks(n, depth, blocks8, problem.Gemm(**common).out_bytes, True, experts=experts)
    facts = tuning_facts(n, k, experts, blocks8, out_dtype)
    _, s = spaces.choose(linear_spaces.of(gemm), OPERATOR, facts, target, m)
    params = common | s.params() | {"experts": experts}
    entry = f"{program.__name__}:build"
    request = KernelRequest("w4ax.grouped", entry, tuple(params.items()), target, program.PASS_CONFIGS)
    space = (target.sms, s.warpgroups, s.block_tokens // 8, 128, 4)
    return Plan(request, space, (target.sms, s.flags), ())


def check_shape(n: int, k: int, experts: int, blocks8: int) -> None:
    """Raise ArgumentError for sizes that no experts have."""
    grouped.check_request(n, k, experts, BLOCK, (BLOCK,))
    if type(blocks8) is not int or not 0 <= blocks8 <= -(-k // BLOCK):
        raise ArgumentError("blocks8", blocks8, f"must be 0..{-(-k // BLOCK)}", "count blocks of 128")


def check_target(target: Target) -> None:
    """Raise ArgumentError for targets whose experts have no kernel."""
    if native(target):
        constraint = f"experts of W4Ax are multiplied by warpgroup instructions, which {target.arch} does not have"
        raise ArgumentError("target", target.arch, constraint, "call gemm for each expert, or use experts of w4a8")


def tuning_facts(n: int, k: int, experts: int, blocks8: int, out_dtype: str) -> dict[str, int | str]:
    """What tells one tuned stack of experts from another, besides M."""
    return op.tuning_facts(n, k, blocks8, out_dtype, True) | {"experts": experts}


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    m: int | tuple[int, ...] | None = None,
    blocks8: int | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    bias: bool = False,
    permuted: bool = True,
    norm: bool = False,
    front: str = "none",
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        blocks8: INT8 blocks; None takes a quarter of them.
        dtype: of activations that are quantized, "float16" or "bfloat16"; None leaves their kernel out.
        out_dtype: "float16", "bfloat16" or "float32"; None takes dtype, or "float16".
        bias: whether one is added. permuted, norm, front: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves, or a target without warpgroup instructions.
        TargetError: an unknown target.
    """
    high = round(0.25 * -(-k // BLOCK)) if blocks8 is None and type(k) is int else blocks8
    check_shape(n, k, experts, high)
    launching.check_flags(bias=bias, permuted=permuted, norm=norm)
    if dtype not in (None, *DTYPES):
        raise ArgumentError("dtype", dtype, f"must be one of {DTYPES}", "cast the activations")
    tokens = grouped.all_tokens(experts) if m is None else launching.tokens_of(m)
    out, at = out_dtype or dtype or "float16", Target.parse(target)
    if m is None:
        tokens = (*tokens, *records.tokens(OPERATOR, tuning_facts(n, k, experts, high, out), at))
    plans = [plan(t, n, k, experts, high, out_dtype=out, bias=bias, target=at) for t in tokens]
    op.activations.check_front(front, k)
    facts = dict(permuted=permuted, norm=norm, granularity="two_level", wide=True, front=front, target=at)
    before = [op.activations.plan(t, k, high, dtype=dtype, **facts) for t in tokens if dtype]
    return list(dict.fromkeys([*launching.requests_of(plans), *before]))


records.on_change(plan.cache_clear)
