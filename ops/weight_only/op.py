"""y = x w^T: validation, choice of kernel and schedule, workspace, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.launching import Plan, ptx_flags, requests_of, tokens_of
from terrazzo.ops.linear import multistage as multistage_program
from terrazzo.ops.linear import small_batch as small_batch_program
from terrazzo.ops.linear import stream_k as stream_k_program
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.products.codes import get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import choose_way, numerics_of
from terrazzo.ops.weight_only.packed import WeightOnly, facts_of
from terrazzo.schedules import linear_spaces, multistage, records, spaces, stream_k
from terrazzo.schedules.problem import Gemm

if TYPE_CHECKING:
    import torch


_SHAPED = 16
"""Tokens of a tile of stream_k whose kernels keep their shape: without one they took 2 %, up to 5 % (H100). Those
without a shape stand in until they are compiled."""


def has_shape(weight: str, schedule: stream_k.StreamK) -> bool:
    """Whether stream_k's kernel for a format and a schedule is made for one [n, k]."""
    shaped = of_codes(weight).shaped
    return shaped is None or schedule.block_tokens <= _SHAPED or schedule.warpgroups in shaped


@lru_cache(maxsize=1024)
def plan(
    m: int,
    n: int,
    k: int,
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
    """Kernel and launch sizes for M = m >= 1. `device` is the GPU that runs it where that is newer than `target`."""
    form = get_codes(weight)
    group = group_of(group_size, k, weight)
    k8 = -(-k // 8) * 8  # x rows must be multiples of 16 bytes
    common = dict(n=n, k=k8, group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, bias=bias)
    common |= {"weight": weight} if of_codes(form).named else {}
    chosen_numerics = lambda few: choose_way(form, scale_dtype, dtype, few).name if numerics == "auto" else numerics
    operand = Operand(group, symmetric, scale_dtype, dtype, chosen_numerics(False), weight)
    problem = problem_of(operand, n, k8)
    runs_on = device or target
    flags = ptx_flags(target, device)

    def request(program: ModuleType, schedule: Any, numerics: str) -> KernelRequest:
        Operand(group, symmetric, scale_dtype, dtype, numerics, weight)  # raises where these do not go together
        params = common | schedule.params() | {"numerics": numerics}
        if program is stream_k_program and not has_shape(weight, schedule):
            params = shapeless(params)
        name = f"{of_codes(form).record}.{program.__name__.rpartition('.')[2]}"
        entry = f"{program.__name__}:build"
        return KernelRequest(name, entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)

    space = linear_spaces.of(problem)
    if numerics == "auto":
        facts = tuning_facts(n, k, group_size, symmetric, scale_dtype, dtype, weight)
        program, s = spaces.choose(space, of_codes(form).record, facts, target, m, device)
    else:
        program, s = space.heuristic(target, m)
    if program == "small_batch":
        chosen = request(small_batch_program, s, chosen_numerics(True))
        return Plan(chosen, *s.workspace(problem.row_blocks * 64), (), stand_in(chosen))
    if program == "stream_k":
        part = stream_k.partition(s, problem, runs_on, m)
        own = request(stream_k_program, s, operand.numerics)
        workspace = (part.grid, s.cta_blocks, s.block_tokens // 8, 128, 4)
        return Plan(own, workspace, (part.grid, s.flags), (part.shared,), stand_in(own))
    return Plan(request(multistage_program, s, operand.numerics), *multistage.launch_sizes(s, problem, m), ())


def stand_in(request: KernelRequest) -> KernelRequest | None:
    """The kernel that serves other weights, too, and gives the bits of one that knows its shape: of stream_k any, of
    small_batch those of the same k. None where there is no such kernel."""
    params = dict(request.params)
    if not params.get("n") or params.get("experts") or params.get("joined"):
        return None
    any_of = {stream_k_program: shapeless, small_batch_program: small_batch_program.of_any_rows}
    program = next((it for it in any_of if request.entry == f"{it.__name__}:build"), None)
    return program and replace(request, params=tuple(any_of[program](params).items()))


def group_of(group_size: int, k: int, weight: str) -> int:
    """What programs call a group: 0 where one scale serves the whole row."""
    return 0 if group_size >= k and get_codes(weight).one_group else group_size


def problem_of(operand: Operand, n: int, k: int, experts: int = 0) -> Gemm:
    """What schedules know of a product."""
    return Gemm(
        n, k, operand.records_per(128), operand.group_bytes, bits=operand.format.bits, weight=operand.weight,
        scales="post" if operand.scales_sums else "fold", symmetric=operand.symmetric, experts=experts,
    )  # fmt: skip


def tuning_facts(
    n: int, k: int, group_size: int, symmetric: bool, scale_dtype: str, dtype: str, weight: str = "u4"
) -> dict[str, int | str | bool]:
    """What tells one tuned weight from another, besides M."""
    group = group_of(group_size, k, weight)
    return dict(n=n, k=k, group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    target: Target | str,
    numerics: str = "auto",
    bias: bool = False,
    weight: str = "u4",
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        m: numbers of tokens. group_size: of the format's, or k for one group. scale_dtype: of scales.
        symmetric: without zero points. bias: whether the weight has one.
        dtype: of activations and output, "float16" or "bfloat16".
        numerics: see `gemm`. weight: name of the format.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    launching.check_shape(n, k)
    check_group(group_size, k, weight)
    launching.check_flags(symmetric=symmetric, bias=bias)
    check_numerics(numerics, weight)
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype)
    at = Target.parse(target)
    recorded = tuning_facts(n, k, **facts, weight=weight)
    operator = of_codes(get_codes(weight)).record
    tokens = (*tokens_of(m), *(records.tokens(operator, recorded, at) if m is None else ()))
    facts |= dict(bias=bias, numerics=numerics, target=at, weight=weight)
    return requests_of(plan(t, n, k, **facts) for t in tokens)


def weight_requests(
    w: WeightOnly, m: int | Sequence[int], dtype: torch.dtype, numerics: str = "auto", bias: bool | None = None
) -> list[KernelRequest]:
    """The kernels that `gemm` will use for `w` and these M on the current GPU, to compile them up front.

    Args:
        w: packed weight on a GPU. m: numbers of tokens.
        dtype: of x, torch.float16 or torch.bfloat16. numerics: see `gemm`.
        bias: whether one is added; None: w's own.

    Raises:
        ArgumentError: w on no GPU, or m, dtype or numerics that no kernel serves.
        TargetError: w was packed for another GPU.
    """
    check_numerics(numerics, w.weight)
    at = launching.targets(w.target, w.device)
    has_bias = w.bias is not None if bias is None else bias
    return requests_of(_plan_for(w, t, str(dtype)[6:], has_bias, numerics, *at) for t in tokens_of(m))


records.on_change(plan.cache_clear)


def _plan_for(w: WeightOnly, m: int, dtype: str, bias: bool, numerics: str, target: Target, device: Target) -> Plan:
    more = dict(dtype=dtype, bias=bias, numerics=numerics, target=target, device=device)
    return plan(m, w.n, w.k, **facts_of(w), **more)


def check_numerics(numerics: str, weight: str = "u4") -> None:
    known = ("auto", *numerics_of(get_codes(weight)))
    if numerics not in known:
        raise ArgumentError("numerics", numerics, f"must be one of {known}", "leave it 'auto'")


def check_group(group_size: int, k: int, weight: str) -> None:
    """Raise ArgumentError unless kernels of the format read groups of this size."""
    form = get_codes(weight)
    if form.one_group or group_size not in form.groups:
        launching.check_group(group_size, k, form.groups)
    if not form.one_group and group_size not in form.groups:
        raise ArgumentError("group_size", group_size, f"must be one of {form.groups} in {weight}", "leave it out")
