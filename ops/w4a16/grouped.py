"""Grouped W4A16 GEMM: the tokens of many experts, each with a weight of its own, in one persistent kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, grouped, launching, weights
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.launching import Plan
from terrazzo.ops.linear import stream_k as program
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.w4a16 import op
from terrazzo.ops.w4a16.format import GROUPS
from terrazzo.schedules import linear_spaces, records, spaces
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
    symmetric: bool,
    scale_dtype: str,
    dtype: str,
    bias: bool,
    numerics: str,
    target: Target,
) -> Plan:
    """Kernel and launch sizes for m >= 1 tokens of all experts together."""
    grouped.check_request(n, k, experts, group_size, GROUPS)
    op.check_numerics(numerics)
    grouped.check_target(target, "wgmma.f16")
    group, k8 = (0 if group_size >= k else group_size), -(-k // 8) * 8
    numerics = ("exact" if scale_dtype == dtype else "post") if numerics == "auto" else numerics
    operand = Operand(group, symmetric, scale_dtype, dtype, numerics)
    scales = "post" if numerics == "post" else "fold"
    own = dict(scales=scales, symmetric=symmetric, experts=experts)
    space = linear_spaces.of(Gemm(n, k8, operand.groups_per(128), operand.record_bytes, **own))
    facts = tuning_facts(n, k, experts, group_size, symmetric, scale_dtype, dtype, numerics)
    _, s = spaces.choose(space, "w4a16_grouped", facts, target, m)
    common = dict(n=n, k=k8, group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, bias=bias)
    params = common | s.params() | {"numerics": numerics, "experts": experts}
    entry = f"{program.__name__}:build"
    return Plan(
        KernelRequest("w4a16.grouped", entry, tuple(params.items()), target, program.PASS_CONFIGS),
        (target.sms, s.cta_blocks, s.block_tokens // 8, 128, 4),
        (target.sms, s.flags),
        (),
    )


def tuning_facts(
    n: int, k: int, experts: int, group_size: int, symmetric: bool, scale_dtype: str, dtype: str, numerics: str
) -> dict[str, int | str | bool]:
    """What tells one tuned stack of experts from another, besides M; numerics "exact", "fused" or "post"."""
    return op.tuning_facts(n, k, group_size, symmetric, scale_dtype, dtype) | {"experts": experts, "numerics": numerics}


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
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them.
        group_size: 32, 64, 128, or k for one group. scale_dtype: "float16", "bfloat16" or "float32".
        m: tokens of all experts together.
        dtype: of activations and output, "float16" or "bfloat16".
        numerics: see `grouped_gemm`. bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves, or a target without warpgroup instructions.
        TargetError: an unknown target.
    """
    grouped.check_request(n, k, experts, group_size, GROUPS)
    launching.check_flags(symmetric=symmetric, bias=bias)
    tokens = grouped.all_tokens(experts) if m is None else launching.tokens_of(m)
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype)
    at = Target.parse(target)
    if m is None:
        tile = ("exact" if scale_dtype == dtype else "post") if numerics == "auto" else numerics
        recorded = tuning_facts(n, k, experts, **facts, numerics=tile)
        tokens = (*tokens, *records.tokens("w4a16_grouped", recorded, at))
    return launching.requests_of(
        plan(t, n, k, experts, **facts, numerics=numerics, bias=bias, target=at) for t in tokens
    )


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

    grouped.check_once(w)
    grouped.check_rows(x.shape, w.k)
    launching.check_no_grad(x, "grouped_gemm")
    grouped.check_dtype(x)
    experts, m, n, s = len(w), x.shape[0], w.n, w.stacked
    grouped.check_offsets(expert_offsets, experts, x.device)
    if bias is not None:
        grouped.check_bias(bias, experts, n, x.dtype, x.device)
    read = not w.k % 8 and x.is_contiguous() and not x.data_ptr() % 16  # else a copy of it
    if out is not None:
        launching.check_out(out, (m, n), x.dtype, x.device)
        if read and not out.data_ptr() % 16:
            launching.check_apart(out, "out", x=x)
    op.check_numerics(numerics)
    launching.check_tokens(m)
    if not x.is_cuda or x.device != w.device:
        raise launching.elsewhere(x, w.device)
    if bias is None and s.bias is not None:
        bias = derived.cast_once(s, "bias", x.dtype)
    format = (s.group_size, s.symmetric, s.scale_dtype, s.target)
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
    written = y if y.data_ptr() % 16 == 0 else torch.empty_like(y)
    kernel(
        x, s.words.flatten(0, 1), s.params.flatten(0, 1), no_bias if bias is None else bias.view(-1), workspace,
        semaphores, written, expert_offsets,
    )  # fmt: skip
    return y if written is y else y.copy_(written)


_launchers: dict[tuple, tuple] = {}
records.on_change(plan.cache_clear)
records.on_change(_launchers.clear)


def _prepare(key: tuple, x: torch.Tensor) -> tuple:
    """Kernel, workspace, semaphores and a stand-in for no bias, kept."""
    experts, n, k, (group_size, symmetric, scale_dtype, packed_for), m, _, device, stream, numerics, no_bias = key
    dtype = weights.dtype_name(x)
    if m == 0:
        return ()
    target, _ = launching.targets(packed_for, device)
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, numerics=numerics)
    chosen = plan(m, n, k, experts, **facts, bias=not no_bias, target=target)
    kernel, workspace, semaphores, _ = launching.ready(chosen, m, device, stream, "w4a16.grouped_gemm")
    found = _launchers[key] = (kernel, workspace, semaphores, *launching.stand_ins(device, x.dtype))
    return found
