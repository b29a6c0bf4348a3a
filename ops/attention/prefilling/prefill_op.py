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
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.cache import residual_of
from terrazzo.ops.attention.cache.launch import LOG2E, Choice
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.checks import Options
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.prefilling import new_tokens_program, prefill_merge, prefill_mma, prefill_shared
from terrazzo.ops.attention.prefilling.prefill_stages import STAGE, Geometry, plain_layout
from terrazzo.ops.attention.writing import writing
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
    layout: CacheLayout, *, dtype: str, page: int, residual: int, fresh: bool, softcap: bool, sinks: bool,
    target: Target, device: Target | None = None, schedule: schedules.Prefill | None = None, rows: int = 0,
    split: bool = False,
) -> Plan:  # fmt: skip
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
    request = launch.request(f"prefill_{schedule.program}", program, params, target, device)
    new_tokens = _new_tokens(schedule.program, layout, dtype, target, device) if fresh else None
    merge = dict(head_dim=layout.head_dim, dtype=dtype, sinks=sinks)
    merge = launch.request("prefill_merge", prefill_merge, merge, target, device) if split else None
    return Plan(request, schedule.rows, new_tokens, merge)


def _new_tokens(program: str, layout: CacheLayout, dtype: str, target: Target, device: Target | None) -> KernelRequest:
    """The kernel that lays out new tokens of `dtype` for a prefill program."""
    if program == "mma":
        return writing.write_kernel(plain_layout(layout), dtype, STAGE, 0, target, device)
    params = dict(head_dim=layout.head_dim, dtype=dtype, k_operand=layout.k.operand, v_operand=layout.v.operand)
    params |= {f"{n}_rotated": True for n, fmt in (("k", layout.k), ("v", layout.v)) if fmt.rotation}
    return launch.request("new_tokens", new_tokens_program, params, target, device)


def tuning_facts(layout: CacheLayout, dtype: str, page: int, residual: int, fresh: bool) -> dict[str, int | str | bool]:
    """What tells one tuned kind of cache from another."""
    facts = dict(k_format=layout.k_format, v_format=layout.v_format, head_dim=layout.head_dim)
    return facts | dict(dtype=dtype, page=page, residual=residual, fresh=fresh)


records.on_change(plan.cache_clear)


def prefill_requests(
    layout: CacheLayout, *, dtype: str = "float16", page: int = 0, residual: int | None = None, fresh: bool = False,
    softcap: bool = False, sinks: bool = False, schedule: schedules.Prefill | None = None,
    target: Target | str | None = None,
) -> list[KernelRequest]:  # fmt: skip
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
    checks.check_facts(dtype, page=page, residual=residual, fresh=fresh, softcap=softcap, sinks=sinks)
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
    q: torch.Tensor, cache: PackedCache, cu_seqlens: torch.Tensor, most_new: int, options: Options, choice: Choice, *,
    new: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of `prefill`; new: k and v."""
    import torch

    operands, (k, v), sinks, schedule = launch.operands(cache), new, options.sinks, choice.schedule
    _check(q, cache, cu_seqlens, most_new, k, v)
    checks.check_queries(q, cache, sinks)
    options.check()
    checks.check_on_gpu(q)
    check_fields(schedule, schedules.Prefill)
    checks.check_splits(choice.splits, schedules.MOST_PARTS)
    count, heads, head_dim = q.shape
    if out is not None:
        launching.check_out(out, q.shape, q.dtype, q.device)
    made, lse = launch.results(q, out, lse, sinks)
    if count == 0:
        return made, lse
    most_new = min(most_new, count)  # a generous bound costs no CTAs
    batch, kv_heads = len(cache.lengths), cache.pages.shape[1]
    at, device = launch.current_targets(choice.target, q.device)
    kind = dict(page=cache.page_size, residual=cache._ring, fresh=k is not None)
    rows, width, parts = most_new * (heads // kv_heads), 0, choice.splits or 1
    if schedule is None:
        problem = problem_of(cache.layout, **kind)
        longest = op.seen(cache, options.window, most_new)[0]
        if choice.splits is None:
            width, parts = schedules.divide(problem, at, device.sms, rows, batch * kv_heads, longest)
        else:
            width = schedules.narrower(problem, at, device.sms, rows, batch * kv_heads)
    chosen = plan(
        cache.layout, dtype=str(q.dtype).removeprefix("torch."), **kind, softcap=bool(options.softcap > 0),
        sinks=sinks is not None, target=at, device=device, schedule=schedule, rows=width, split=parts > 1,
    )  # fmt: skip
    tiles, stages = -(-rows // chosen.rows), -(-most_new // STAGE) if chosen.new_tokens else 0
    checks.check_grid(batch, max(tiles * parts, stages))
    q, written = launch.aligned(q, out, made)
    warm = lambda request: launch.warm(request, q.device, "up to {} new tokens of a sequence", most_new)[0]
    kernel, cu_seqlens, none = warm(chosen.request), cu_seqlens.contiguous(), launch.stand_ins(q.device)
    laid_out = none["residual"]
    if k is not None and chosen.request.name == "attention.prefill_mma":
        fresh = fresh_cache(cache, cu_seqlens, count, most_new)
        writing.run_store(fresh, k, v, cu_seqlens, most_new, choice.target)
        laid_out = fresh.pages
    elif k is not None:
        laid_out = fresh_pages(cache, count)
        (k_rows, *k_pitches), (v_rows, *v_pitches) = writing.rows_of(k), writing.rows_of(v)
        warm(chosen.new_tokens)(k_rows, v_rows, cu_seqlens, laid_out, *k_pitches, *v_pitches, stages, batch)
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    if scale < 0:
        q, scale = -q, -scale
    outputs, sink_logits = (written, lse), none["sinks"] if sinks is None else sinks
    if parts > 1:
        f32 = dict(dtype=torch.float32, device=q.device)
        outputs = torch.empty(parts, count, heads, head_dim, **f32), torch.empty(parts, count, heads, **f32)
    kernel(
        q, operands.pages, operands.table, operands.lengths, cu_seqlens, operands.residual, operands.slots, laid_out,
        operands.k_static, operands.v_static, none["sinks"] if parts > 1 else sink_logits, *outputs,
        max(scale * LOG2E, LEAST_SCALE), options.softcap * LOG2E, options.window, tiles * parts,
    )  # fmt: skip
    if parts > 1:
        blocks = -(-count * heads * (head_dim // 4) // prefill_merge.THREADS)
        warm(chosen.merge)(*outputs, cu_seqlens, sink_logits, written, lse, blocks)
    return made if written is made else made.copy_(written), lse


def fresh_pages(cache: PackedCache, count: int) -> torch.Tensor:
    """Pages of 64 tokens for `count` new tokens alone, unquantized: sequence b's begin at page cu[b] // 64 + b."""
    import torch

    words = plain_layout(cache.layout).words(STAGE)
    pages = count // STAGE + len(cache.lengths)
    return torch.empty(pages, cache.pages.shape[1], words, dtype=torch.int32, device=cache.pages.device)


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


def _check(q, cache: PackedCache, cu_seqlens, most_new: int, k, v) -> None:
    head_dim, batch = cache.layout.head_dim, len(cache.lengths)
    if q.dim() != 3 or q.shape[2] != head_dim or str(q.dtype)[6:] not in checks.DTYPES:
        constraint = f"must be float16 or bfloat16 [new tokens, Hq, {head_dim}]"
        raise ArgumentError("q", f"{q.dtype} {list(q.shape)}", constraint, "reshape or cast it")
    checks.check_starts(cu_seqlens, batch, q)
    checks.check_most_new(most_new)
    checks.check_some_new("q", len(q), most_new, batch)
    if (k is None) != (v is None):
        raise ArgumentError("v" if v is None else "k", None, "k and v come together", "pass both, or neither")
    for name, x in (("k", k), ("v", v)):
        if x is None:
            continue
        shape = (q.shape[0], cache.pages.shape[1], head_dim)
        launching.check_tensor(x, name, "{} {}", q.dtype, list(shape))
        if tuple(x.shape) != shape or x.dtype != q.dtype or x.device != q.device:
            seen = f"{x.dtype} {list(x.shape)} on {x.device}"
            raise ArgumentError(name, seen, f"must be {q.dtype} {list(shape)} on {q.device}", "cast or move it")
        launching.check_no_grad(x, "attention", name)
