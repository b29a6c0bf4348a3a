"""Prefill attention: many new tokens of each sequence over its low-bit cache; validation, plan, launch.

store(cache, k, v, cu_seqlens, most_new)              # then the cache holds the new tokens, quantized
y = prefill(q, cache, cu_seqlens, most_new)

y = prefill(q, cache, cu_seqlens, most_new, k=k, v=v)  # or: the new tokens as they are, the past from the cache
store(cache, k, v, cu_seqlens, most_new)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.attention.cache.cache import residual_of
from terrazzo.ops.attention.cache.launch import current_targets, own_slots, stand_ins
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.decoding.op import LOG2E
from terrazzo.ops.attention.prefilling import new_tokens_program, prefill_merge, prefill_mma, prefill_shared
from terrazzo.ops.attention.prefilling.prefill_stages import STAGE, Geometry, plain_layout
from terrazzo.ops.attention.writing import writing
from terrazzo.ops.launching import ptx_flags, warm_kernel
from terrazzo.schedules import attention_prefill as schedules
from terrazzo.schedules import records, spaces
from terrazzo.schedules.checks import check_fields
from terrazzo.schedules.prefill_space import Prefill

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache

LEAST_SCALE = 1e-30
"""What a kernel takes for a softmax scale of 0: scores that it masks are -inf, times 0 they would be NaN."""
PROGRAMS = {"mma": prefill_mma, "shared": prefill_shared}


@dataclass(frozen=True)
class Plan:
    """The kernel of a prefill, the rows of its CTAs, and the kernels that lay out new tokens for it and that add up the
    partial results of a split one, or None."""

    request: KernelRequest
    rows: int
    new_tokens: KernelRequest | None = None
    merge: KernelRequest | None = None


@lru_cache(maxsize=256)
def problem_of(layout: CacheLayout, page: int, residual: int, fresh: bool) -> schedules.PrefillProblem:
    """What schedules need to know of a cache.

    Raises:
        ArgumentError: a page size or a residual block that does not fit.
    """
    tiles, images = (Geometry(layout, page, residual, fresh, images) for images in (False, fresh))
    return schedules.PrefillProblem(layout.head_dim, tiles.stage_words, images.stage_words)


@lru_cache(maxsize=1024)
def plan(
    layout: CacheLayout,
    *,
    dtype: str,
    page: int,
    residual: int,
    fresh: bool,
    softcap: bool,
    sinks: bool,
    target: Target,
    device: Target | None = None,
    schedule: schedules.Prefill | None = None,
    rows: int = 0,
    split: bool = False,
) -> Plan:
    """The kernel for any number of sequences and tokens. `device` runs it where that is newer than `target`; `rows`, if
    not 0, are those of a CTA, for launches of few (`schedules.divide`). `split`: CTAs share the tokens.

    Raises:
        ArgumentError: a page size, a residual block or a schedule that does not fit.
    """
    problem = problem_of(layout, page, residual, fresh)
    if schedule is not None:
        schedules.check(schedule, problem, target)
    if schedule is None and (softcap or sinks):  # options need registers that a tuned or a wide schedule may not leave
        rows = min(rows or 128, 128)
    if schedule is None and rows:
        schedule = schedules.choose(problem, target, rows)
    if schedule is None:
        facts = tuning_facts(layout, dtype, page, residual, fresh)
        _, schedule = spaces.choose(Prefill(problem), "attention_prefill", facts, target, 1, device)
    program = PROGRAMS[schedule.program]
    params = schedule.params() | {
        **layout.params(), "dtype": dtype,
        "page": page, "residual": residual, "fresh": fresh, "softcap": softcap, "sinks": sinks and not split,
    }  # fmt: skip
    params |= {"split": True} if split else {}
    request = KernelRequest(
        f"attention.prefill_{schedule.program}", f"{program.__name__}:build", tuple(params.items()), target,
        program.PASS_CONFIGS, ptx_flags(target, device),
    )  # fmt: skip
    new_tokens = _new_tokens(schedule.program, layout, dtype, target, device) if fresh else None
    return Plan(request, schedule.rows, new_tokens, _merge(layout, dtype, sinks, target, device) if split else None)


def _merge(layout: CacheLayout, dtype: str, sinks: bool, target: Target, device: Target | None) -> KernelRequest:
    """The kernel that adds up partial results."""
    params = dict(head_dim=layout.head_dim, dtype=dtype, sinks=sinks)
    return KernelRequest(
        "attention.prefill_merge", f"{prefill_merge.__name__}:build", tuple(params.items()), target,
        prefill_merge.PASS_CONFIGS, ptx_flags(target, device),
    )  # fmt: skip


def _new_tokens(program: str, layout: CacheLayout, dtype: str, target: Target, device: Target | None) -> KernelRequest:
    """The kernel that lays out new tokens of `dtype` for a prefill program."""
    if program == "mma":
        return writing.write_kernel(plain_layout(layout), dtype, STAGE, 0, target, device)
    params = dict(head_dim=layout.head_dim, dtype=dtype, k_operand=layout.k.operand, v_operand=layout.v.operand)
    params |= {f"{n}_rotated": True for n, fmt in (("k", layout.k), ("v", layout.v)) if fmt.rotation}
    return KernelRequest(
        "attention.new_tokens", f"{new_tokens_program.__name__}:build", tuple(params.items()), target,
        new_tokens_program.PASS_CONFIGS, ptx_flags(target, device),
    )  # fmt: skip


def tuning_facts(layout: CacheLayout, dtype: str, page: int, residual: int, fresh: bool) -> dict[str, int | str | bool]:
    """What tells one tuned kind of cache from another."""
    facts = dict(k_format=layout.k_format, v_format=layout.v_format, head_dim=layout.head_dim)
    return facts | dict(dtype=dtype, page=page, residual=residual, fresh=fresh)


records.on_change(plan.cache_clear)


def prefill_requests(
    layout: CacheLayout,
    *,
    dtype: str = "float16",
    page: int = 0,
    residual: int | None = None,
    fresh: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    schedule: schedules.Prefill | None = None,
    target: Target | str | None = None,
) -> list[KernelRequest]:
    """The kernels that `prefill` launches on caches of this kind, to compile them up front.

    Args:
        layout: of the caches. softcap, sinks: whether the call has them. dtype: of q, k and v.
        page: tokens of a page, 0 for contiguous caches. residual: tokens of the residual block, None for the format's.
        fresh: whether k and v are given. schedule: see `prefill`. target: an architecture or a Target, None for this
            GPU's.

    Raises:
        ArgumentError: an argument of another type, or a size that does not fit.
    """
    if not isinstance(layout, CacheLayout):
        raise ArgumentError("layout", type(layout).__name__, "must be a CacheLayout", "CacheLayout('int4', ...)")
    residual = residual_of(layout, residual)
    op.check_facts(dtype, page=page, residual=residual, fresh=fresh, softcap=softcap, sinks=sinks)
    check_fields(schedule, schedules.Prefill)
    at, device = launching.requested_targets(target)
    kind = dict(page=page, residual=residual, fresh=fresh)
    facts = dict(dtype=dtype, softcap=softcap, sinks=sinks, schedule=schedule, target=at, device=device)
    widths = [0] if schedule is not None else schedules.widths(problem_of(layout, **kind), at)
    plans = [plan(layout, **kind, **facts, rows=rows) for rows in (0, *widths)]
    wanted = [it.request for it in plans] + [it.new_tokens for it in plans if it.new_tokens]
    parted = [plan(layout, **kind, **facts, rows=rows, split=True) for rows in (0, *widths)]
    wanted += [it.request for it in parted] + [it.merge for it in parted]
    return list(dict.fromkeys(wanted))


def run(
    q: torch.Tensor,
    cache: PackedCache,
    cu_seqlens: torch.Tensor,
    most_new: int,
    *,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
    schedule: schedules.Prefill | None = None,
    target: Target | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `prefill`."""
    import torch

    _check(q, cache, cu_seqlens, most_new, k, v, sinks)
    op.check_options(q, scale, softcap, window)
    check_fields(schedule, schedules.Prefill)
    if splits is not None and (type(splits) is not int or not 1 <= splits <= schedules.MOST_PARTS):
        raise ArgumentError("splits", splits, f"must be 1..{schedules.MOST_PARTS}", "leave it out")
    count, heads, head_dim = q.shape
    made = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out is not None:
        launching.check_out(out, q.shape, q.dtype, q.device)
    if lse is None:
        lse = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    else:
        launching.check_out(lse, (count, heads), torch.float32, q.device, "lse")
        launching.check_apart(lse, "lse", q=q if q.is_contiguous() else None, out=made, sinks=sinks)
    if count == 0:
        return made, lse
    most_new = min(most_new, count)  # a generous bound costs no CTAs
    at, device = current_targets(target, q.device)
    kind = dict(page=cache.page_size, residual=cache.residual_tokens, fresh=k is not None)
    rows, width, parts = most_new * (heads // cache.kv_heads), 0, splits or 1
    if schedule is None:
        problem, groups = problem_of(cache.layout, **kind), len(cache.lengths) * cache.kv_heads
        longest = op.seen(cache, window, most_new)[0]
        if splits is None:
            width, parts = schedules.divide(problem, at, device.sms, rows, groups, longest)
        else:
            width = schedules.narrower(problem, at, device.sms, rows, groups)
    chosen = plan(
        cache.layout, dtype=str(q.dtype).removeprefix("torch."), **kind, softcap=bool(softcap > 0),
        sinks=sinks is not None, target=at, device=device, schedule=schedule, rows=width, split=parts > 1,
    )  # fmt: skip
    tiles, stages = -(-rows // chosen.rows), -(-most_new // STAGE) if chosen.new_tokens else 0
    op.check_grid(len(cache.lengths), max(tiles * parts, stages))
    q = launching.aligned_copy(q) if not q.is_contiguous() or q.data_ptr() % 16 else q
    if out is not None:
        launching.check_apart(out, "out", q=q)
    written = op.aligned_out(made)
    kernel = warm_kernel(chosen.request, most_new, "prefill", q.device)
    cu_seqlens = cu_seqlens.contiguous()
    none = stand_ins(q.device)
    new = none["residual"]
    if k is not None and chosen.request.name == "attention.prefill_mma":
        fresh = fresh_cache(cache, cu_seqlens, count, most_new)
        writing.run_store(fresh, k, v, cu_seqlens, most_new, target)
        new = fresh.pages
    elif k is not None:
        new = fresh_pages(cache, count)
        (k_rows, *k_pitches), (v_rows, *v_pitches) = writing.rows_of(k), writing.rows_of(v)
        lay_out = warm_kernel(chosen.new_tokens, most_new, "prefill", q.device)
        lay_out(k_rows, v_rows, cu_seqlens, new, *k_pitches, *v_pitches, stages, len(cache.lengths))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale
    results, sink_logits = (written, lse), none["sinks"] if sinks is None else sinks
    if parts > 1:
        f32 = dict(dtype=torch.float32, device=q.device)
        results = torch.empty(parts, count, heads, head_dim, **f32), torch.empty(parts, count, heads, **f32)
    kernel(
        q, cache.pages, none["table"] if cache.block_table is None else cache.block_table, cache.lengths,
        cu_seqlens, none["residual"] if cache.residual is None else cache.residual,
        own_slots(len(cache.lengths), q.device) if cache.slots is None else cache.slots, new,
        none["static"] if cache.k_static is None else cache.k_static,
        none["static"] if cache.v_static is None else cache.v_static,
        none["sinks"] if parts > 1 else sink_logits, *results,
        max(scale * LOG2E, LEAST_SCALE), softcap * LOG2E, window, tiles * parts,
    )  # fmt: skip
    if parts > 1:
        merge = warm_kernel(chosen.merge, most_new, "prefill", q.device)
        blocks = -(-count * heads * (head_dim // 4) // prefill_merge.THREADS)
        merge(*results, cu_seqlens, sink_logits, written, lse, blocks)
    return made if written is made else made.copy_(written), lse


def fresh_pages(cache: PackedCache, count: int) -> torch.Tensor:
    """Pages of 64 tokens for `count` new tokens alone, unquantized: sequence b's begin at page cu[b] // 64 + b."""
    import torch

    words = plain_layout(cache.layout).words(STAGE)
    pages = count // STAGE + len(cache.lengths)
    return torch.empty(pages, cache.kv_heads, words, dtype=torch.int32, device=cache.pages.device)


def fresh_cache(cache: PackedCache, cu_seqlens: torch.Tensor, count: int, most_new: int) -> PackedCache:
    """New tokens as a cache of their own, for the program that reads their tiles."""
    import torch

    layout, batch = plain_layout(cache.layout), len(cache.lengths)
    i32 = dict(dtype=torch.int32, device=cache.pages.device)
    table = (cu_seqlens[:-1] // STAGE + torch.arange(batch, **i32))[:, None] + torch.arange(
        -(-most_new // STAGE), **i32
    )
    return replace(
        cache, layout=layout, pages=fresh_pages(cache, count), lengths=cu_seqlens.diff(), max_length=most_new,
        block_table=table, page_size=STAGE, residual=None, slots=None, k_static=None, v_static=None,
    )  # fmt: skip


def _check(q, cache: PackedCache, cu_seqlens, most_new: int, k, v, sinks) -> None:
    cache.check()
    head_dim, batch = cache.layout.head_dim, len(cache.lengths)
    if q.dim() != 3 or q.shape[2] != head_dim or str(q.dtype)[6:] not in op.DTYPES:
        constraint = f"must be float16 or bfloat16 [new tokens, Hq, {head_dim}]"
        raise ArgumentError("q", f"{q.dtype} {list(q.shape)}", constraint, "reshape or cast it")
    heads = q.shape[1]
    op.check_heads(q, heads, cache.kv_heads)
    op.check_starts(cu_seqlens, batch, q)
    writing.check_most_new(most_new)
    writing.check_some_new("q", len(q), most_new, batch)
    if (k is None) != (v is None):
        raise ArgumentError("v" if v is None else "k", None, "k and v come together", "pass both, or neither")
    for name, x in (("k", k), ("v", v)):
        if x is None:
            continue
        shape = (q.shape[0], cache.kv_heads, head_dim)
        launching.check_tensor(x, name, "{} {}", q.dtype, list(shape))
        if tuple(x.shape) != shape or x.dtype != q.dtype or x.device != q.device:
            seen = f"{x.dtype} {list(x.shape)} on {x.device}"
            raise ArgumentError(name, seen, f"must be {q.dtype} {list(shape)} on {q.device}", "cast or move it")
        launching.check_no_grad(x, "attention", name)
    op.check_sinks(sinks, heads, q)
    op.check_place(q, cache)
