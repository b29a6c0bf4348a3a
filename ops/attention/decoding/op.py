"""Decode attention: validation, choice of schedule and splits, workspace, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.launch import LOG2E, Choice
from terrazzo.ops.attention.checks import Options
from terrazzo.ops.attention.decoding import decode_program, decode_warpgroup_program
from terrazzo.ops.attention.decoding.codes import Codes, Coding, coding_of
from terrazzo.ops.attention.device.warpgroup_macros import supports
from terrazzo.schedules import attention as schedules
from terrazzo.schedules import attention_balance, attention_space, records, spaces
from terrazzo.schedules.checks import check_fields

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.ops.attention.cache.layout import CacheLayout

MAX_QUERY_TOKENS = 8
SCHEDULES = (schedules.Decode, schedules.WarpgroupDecode)


def problem_of(
    layout: CacheLayout, batch: int, kv_heads: int, rows: int, tokens: int, page: int, residual: int = 0
) -> schedules.DecodeProblem:
    """The schedule's question for a batch."""
    return schedules.DecodeProblem(
        pairs=max(1, batch * kv_heads), rows=rows, tokens=max(1, tokens), head_dim=layout.head_dim,
        tile_words=layout.tile_words, channel_words=layout.channel_words, group=layout.k.group, page=page,
        residual=residual, parted=supports(layout), paired=layout.k_layout.block_k >= 32,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a decode step launches: CTAs are splits x (kv heads * row_groups) x sequences, each for `rows` rows; where
    it is balanced, `places` x (kv heads * row_groups), of which each sequence has as many as its tokens ask for."""

    request: KernelRequest
    splits: int
    row_groups: int
    rows: int
    cluster: int
    places: int = 0

    @cached_property
    def partials(self) -> int:
        """Results of a row that are added up in memory; of rows of all sequences in a balanced kernel."""
        return self.places or self.splits // self.cluster


@lru_cache(maxsize=4096)
def plan(
    layout: CacheLayout, batch: int, kv_heads: int, rows: int, tokens: int, *, dtype: str, page: int, residual: int,
    softcap: bool, sinks: bool, target: Target, device: Target | None = None, schedule: schedules.Decode | None = None,
    splits: int = 0, balanced: bool | None = None, mean: int = 0, shares: int = 0, ragged: bool = False,
    coding: Coding | None = None,
) -> Plan:  # fmt: skip
    """Kernel and sizes of one decode step. `device` runs it where that is newer than `target`; `splits` of each
    sequence, 0 for what fills the GPU. `balanced`: they follow the lengths; None: if they should by `mean`, the average
    length (0: not known). `shares`: pieces of all tokens then, 0 for what fills the GPU. `ragged`: sequences have up to
    `rows` rows, each its own number. `coding`: how codes are made of the output, None where none are."""
    problem, runs_on = problem_of(layout, batch, kv_heads, rows, tokens, page, residual), device or target
    if schedule is not None:
        schedules.check(schedule, problem, target)
    if balanced is None and not (splits or shares or schedule):
        shares = attention_balance.shares(problem, batch, mean, runs_on)
    if balanced or shares:
        schedule = schedule or attention_balance.schedule_of(problem, target)
        shares = shares or attention_balance.pieces(attention_balance.room(problem, schedule, batch, runs_on), batch)
    if schedule is None and (softcap or sinks):  # they need registers that a tuned schedule may not have left
        schedule = schedules.choose(problem, target)
    if schedule is None:
        facts = tuning_facts(layout, rows, tokens, dtype, page, residual)
        _, schedule = spaces.choose(attention_space.Decode(problem), "attention", facts, target, problem.pairs, device)
    division = schedules.Division(1) if shares else schedules.divide(problem, schedule, target, device, splits)
    params = schedule.params() | {
        "parts": division.parts, "cluster": division.cluster, **layout.params(), "dtype": dtype,
        "page": page, "residual": residual, "softcap": softcap, "sinks": sinks,
    }  # fmt: skip
    params |= ({"balanced": True} if shares else {}) | ({"ragged": True} if ragged else {})
    params |= {} if coding is None else coding.params(target)
    program = decode_warpgroup_program if isinstance(schedule, schedules.WarpgroupDecode) else decode_program
    request = launch.request("decode", program, params, target, device)
    rows_of, places = 8 * schedule.row_tiles, shares + batch if shares else 0
    return Plan(request, division.splits, -(-rows // rows_of), rows_of, division.cluster, places)


def tuning_facts(
    layout: CacheLayout, rows: int, tokens: int, dtype: str, page: int, residual: int
) -> dict[str, int | str]:
    """What tells one tuned batch from another, besides its (sequence, kv head) pairs; `tokens` counts as its bucket."""
    at = attention_space.bucket(tokens)
    facts = dict(k_format=layout.k_format, v_format=layout.v_format, head_dim=layout.head_dim, rows=rows, tokens=at)
    return facts | dict(dtype=dtype, page=page, residual=residual)


records.on_change(plan.cache_clear)


def decode_requests(
    q_shape: tuple[int, ...], cache: PackedCache, *, dtype: str = "float16", softcap: bool = False, sinks: bool = False,
    window: int = 0, balanced: bool | None = None, ragged: bool = False, quant: str | None = None, smooth: bool = False,
    column_scales: bool = False, schedule: schedules.Decode | None = None, target: Target | str | None = None,
) -> list[KernelRequest]:  # fmt: skip
    """The kernels that `decode` of q [B, q_len, Hq, D] launches, to compile them up front.

    Args:
        q_shape: (B, q_len, Hq, D), q_len 1..8, Hq a multiple of the cache's kv heads.
        cache: as `decode` gets it; `max_length` and `mean_length` count, the lengths on the device do not. It may lie
            on the CPU.
        dtype: of q, "float16" or "bfloat16". softcap, sinks: whether `decode` gets one.
        window, balanced: see `decode`. ragged: it gets `cu_seqlens`, and q_len is `most_new`. schedule: the
            kernel's; None for a tuned record's or the heuristic's.
        quant, column_scales: see `decode`. smooth: whether it gets one.
        target: see `decode`; where there is no GPU, the one to compile for.

    Raises:
        ArgumentError: an argument that does not fit. TargetError: an unknown target, or None where there is no GPU.
    """
    checks.check_kind(cache)
    cache.check()
    checks.check_facts(dtype, softcap=softcap, sinks=sinks, ragged=ragged, smooth=smooth)
    coding = coding_of(quant, smooth, column_scales)
    check_fields(schedule, *SCHEDULES)
    check_balanced(balanced, None, schedule)
    kv_heads, head_dim = cache.pages.shape[1], cache.layout.head_dim
    fits = isinstance(q_shape, (tuple, list)) and len(q_shape) == 4 and all(type(n) is int and n > 0 for n in q_shape)
    if not fits or q_shape[1] > MAX_QUERY_TOKENS or q_shape[2] % kv_heads or q_shape[3] != head_dim:
        constraint = f"must be (B, 1..{MAX_QUERY_TOKENS} tokens, a multiple of {kv_heads} heads, {head_dim})"
        raise ArgumentError("q_shape", q_shape, constraint, "pass tuple(q.shape)")
    at, device = launching.requested_targets(target)
    batch, new, heads, _ = q_shape
    Options(window=window).check()
    longest, mean = seen(cache, window, new)
    return [
        plan(
            cache.layout, batch, cache.pages.shape[1], new * heads // cache.pages.shape[1], longest, dtype=dtype,
            page=cache.page_size, residual=cache._ring, softcap=softcap, sinks=sinks, target=at,
            device=device, schedule=schedule, balanced=balanced, mean=mean, ragged=ragged, coding=coding,
        ).request
    ]  # fmt: skip


def seen(cache: PackedCache, window: int, new: int) -> tuple[int, int]:
    """Tokens that the rows of a sequence see, of the longest one and on average (0: not known)."""
    most = window + new - 1 if window else launching.LARGEST
    return min(cache.max_length, most), min(cache.mean_length, most)


def run(
    q: torch.Tensor, cache: PackedCache, options: Options, choice: Choice, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None, most_new: int = 0,
    codes: Codes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of `decode` for q [B, q_len, Hq, D], or with `cu_seqlens` [1, N, Hq, D]; lse as out without D; `codes`
    receives those of out."""
    import torch

    operands, ragged = launch.operands(cache), cu_seqlens is not None
    _check(q, cache, options.sinks, ragged)
    if ragged:
        checks.check_starts(cu_seqlens, cache.lengths.numel(), q)
        check_most_rows(q, most_new, cache.lengths.numel())
    options.check()
    if not q.is_cuda:
        checks.check_on_gpu(q)
    schedule, splits, balanced = choice.schedule, choice.splits, choice.balanced
    if schedule is not None:
        check_fields(schedule, *SCHEDULES)
    made, lse = launch.results(q, out, lse, options.sinks)
    if q.numel() == 0:
        return made, lse
    (batch, new, heads, head_dim), kv_heads = q.shape, cache.pages.shape[1]
    if ragged:
        batch, new = cache.lengths.numel(), most_new
    if splits is not None:
        checks.check_splits(splits, decode_program.MAX_SPLITS)
    if balanced is not None:
        check_balanced(balanced, splits, schedule)
    at, device = launch.current_targets(choice.target, q.device)
    longest, mean = seen(cache, options.window, new)
    chosen = plan(
        cache.layout, batch, kv_heads, new * heads // kv_heads, longest,
        dtype=str(q.dtype).removeprefix("torch."), page=cache.page_size, residual=cache._ring,
        softcap=bool(options.softcap > 0), sinks=options.sinks is not None, target=at, device=device,
        schedule=schedule, splits=splits or 0, balanced=balanced, mean=mean, ragged=ragged,
        coding=None if codes is None else codes.coding,
    )  # fmt: skip
    kernel, captured = launch.warm(chosen.request, q.device, "{} sequences of up to {} tokens", batch, longest)
    y, along = kv_heads * chosen.row_groups, 1 if chosen.places else batch
    checks.check_grid(batch, y)
    partial = along * y * chosen.partials * chosen.rows * head_dim
    if partial >= launching.LARGEST:  # their offsets have 32 bits
        constraint = f"partial results must have less than {launching.LARGEST} values, they have {partial}"
        if chosen.places:
            raise ArgumentError("balanced", True, f"{constraint} ({batch} sequences)", "pass balanced=False")
        raise ArgumentError("splits", chosen.splits, constraint, "use fewer splits or smaller batches")
    sizes = (along, y, chosen.partials)
    logs = torch.empty(*sizes, chosen.cluster * chosen.rows, dtype=torch.float32, device=q.device)
    partial = torch.empty(*sizes, chosen.rows, head_dim, dtype=torch.float32, device=q.device)
    q, written = launch.aligned(q, out, made)
    kernel(
        q, *operands, launch.stand_ins(q.device)["sinks"] if options.sinks is None else options.sinks, partial, logs,
        launch.semaphores(q.device, batch * (y * chosen.cluster + (codes is not None)), captured), written, lse,
        *(() if codes is None else codes.arguments()), *((cu_seqlens.contiguous(),) if ragged else ()),
        (1 / math.sqrt(head_dim) if options.scale is None else options.scale) * LOG2E, options.softcap * LOG2E,
        options.window, *((most_new,) if ragged else ()),
    )  # fmt: skip
    return made if written is made else made.copy_(written), lse


def check_balanced(balanced: bool | None, splits: int | None, schedule: schedules.Decode | None) -> None:
    """Raise ArgumentError unless a batch can be, or not be, split by the lengths of its sequences."""
    if balanced is not None and type(balanced) is not bool:
        raise ArgumentError("balanced", balanced, "must be a bool or None", "None for what mean_length says")
    if balanced and splits:
        raise ArgumentError("splits", splits, "a balanced batch has those that the lengths ask for", "leave it out")
    if balanced and isinstance(schedule, schedules.WarpgroupDecode):
        raise ArgumentError("schedule", schedule, "warpgroups have no balanced kernel", "pass a Decode, or None")


def check_most_rows(q: torch.Tensor, most_new: int, batch: int) -> None:
    """Raise ArgumentError unless decode takes so many new tokens of a sequence, and some sequence has those of q."""
    if type(most_new) is not int or not 1 <= most_new <= MAX_QUERY_TOKENS:
        constraint = f"must be 1..{MAX_QUERY_TOKENS}, the most new tokens of a sequence"
        raise ArgumentError("most_new", most_new, constraint, "use prefill for more new tokens")
    if q.shape[1] and not batch:
        raise ArgumentError("q", list(q.shape[1:]), "has new tokens of no sequence", "pass a cache with sequences")


def _check(q: torch.Tensor, cache: PackedCache, sinks: torch.Tensor | None, ragged: bool) -> None:
    if q.dim() != 4 or q.shape[3] != cache.layout.head_dim or str(q.dtype)[6:] not in checks.DTYPES:
        constraint = f"must be float16 or bfloat16 [B, q_len, Hq, {cache.layout.head_dim}]"
        raise ArgumentError("q", f"{q.dtype} {list(q.shape)}", constraint, "reshape or cast it")
    batch, new = q.shape[:2]
    if not ragged and not 1 <= new <= MAX_QUERY_TOKENS:
        raise ArgumentError(
            "q", list(q.shape), f"q_len must be 1..{MAX_QUERY_TOKENS}", "use prefill for more new tokens"
        )
    if not ragged and cache.lengths.shape != (batch,):
        raise ArgumentError(
            "q", list(q.shape), f"the cache has {cache.lengths.numel()} sequences", "pass one q for each"
        )
    if sinks is not None or q.shape[2] < 1 or q.shape[2] % cache.pages.shape[1] or q.device != cache.pages.device:
        checks.check_queries(q, cache, sinks)
