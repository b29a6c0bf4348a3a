"""Decode attention: validation, choice of schedule and splits, workspace, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Real
from typing import TYPE_CHECKING

from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.cache.launch import current_targets, multiples, semaphores, stand_ins
from terrazzo.ops.attention.decoding import decode_program, decode_warpgroup_program
from terrazzo.ops.attention.decoding.codes import Codes, Coding, coding_of
from terrazzo.ops.attention.device.warpgroup_macros import supports
from terrazzo.schedules import attention as schedules
from terrazzo.schedules import attention_balance, attention_space, records, spaces
from terrazzo.schedules.checks import check_fields

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.layout import CacheLayout

LOG2E = math.log2(math.e)
MAX_QUERY_TOKENS = 8
DTYPES = ("float16", "bfloat16")
NUMBERS = (float, int, Real)  # in this order: an abstract type takes a microsecond to ask
MOST = 1e38
"""Largest scale: times LOG2E, it is a float32."""
MOST_CAP = 1024
"""Largest softcap: tanh's error, times it, is below an ulp of a 16-bit weight."""
SCHEDULES = (schedules.Decode, schedules.WarpgroupDecode)
GRID = 65535
"""Most CTAs along the second and third dimension of a launch."""


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
    layout: CacheLayout,
    batch: int,
    kv_heads: int,
    rows: int,
    tokens: int,
    *,
    dtype: str,
    page: int,
    residual: int,
    softcap: bool,
    sinks: bool,
    target: Target,
    device: Target | None = None,
    schedule: schedules.Decode | None = None,
    splits: int = 0,
    balanced: bool | None = None,
    mean: int = 0,
    shares: int = 0,
    ragged: bool = False,
    coding: Coding | None = None,
) -> Plan:
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
    request = KernelRequest(
        "attention.decode", f"{program.__name__}:build", tuple(params.items()), target, program.PASS_CONFIGS,
        () if runs_on.arch == target.arch else ("ptx=compute_80",),
    )  # fmt: skip
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
    q_shape: tuple[int, ...],
    cache: PackedCache,
    *,
    dtype: str = "float16",
    softcap: bool = False,
    sinks: bool = False,
    window: int = 0,
    balanced: bool | None = None,
    ragged: bool = False,
    quant: str | None = None,
    smooth: bool = False,
    column_scales: bool = False,
    schedule: schedules.Decode | None = None,
    target: Target | str | None = None,
) -> list[KernelRequest]:
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
    check_kind(cache)
    cache.check()
    check_facts(dtype, softcap=softcap, sinks=sinks, ragged=ragged, smooth=smooth)
    coding = coding_of(quant, smooth, column_scales)
    check_fields(schedule, *SCHEDULES)
    check_balanced(balanced, None, schedule)
    kv_heads, head_dim = cache.kv_heads, cache.layout.head_dim
    fits = isinstance(q_shape, (tuple, list)) and len(q_shape) == 4 and all(type(n) is int and n > 0 for n in q_shape)
    if not fits or q_shape[1] > MAX_QUERY_TOKENS or q_shape[2] % kv_heads or q_shape[3] != head_dim:
        constraint = f"must be (B, 1..{MAX_QUERY_TOKENS} tokens, a multiple of {kv_heads} heads, {head_dim})"
        raise ArgumentError("q_shape", q_shape, constraint, "pass tuple(q.shape)")
    at, device = launching.requested_targets(target)
    batch, new, heads, _ = q_shape
    check_numbers(None, 0.0, window)
    longest, mean = seen(cache, window, new)
    return [
        plan(
            cache.layout, batch, cache.kv_heads, new * heads // cache.kv_heads, longest, dtype=dtype,
            page=cache.page_size, residual=cache.residual_tokens, softcap=softcap, sinks=sinks, target=at,
            device=device, schedule=schedule, balanced=balanced, mean=mean, ragged=ragged, coding=coding,
        ).request
    ]  # fmt: skip


def seen(cache: PackedCache, window: int, new: int) -> tuple[int, int]:
    """Tokens that the rows of a sequence see, of the longest one and on average (0: not known)."""
    most = window + new - 1 if window else launching.LARGEST
    return min(cache.max_length, most), min(cache.mean_length, most)


def check_facts(dtype: str, *, page: int = 0, residual: int = 0, **flags: bool) -> None:
    """Raise ArgumentError for another type than a kernel's parameter has: plans are kept by their arguments, and equal
    ones of other types (1 == True == 1.0) would get the kernel of whoever came first."""
    if type(dtype) is not str or dtype not in DTYPES:
        raise ArgumentError("dtype", dtype, f"must be one of {DTYPES}", "cast q, k and v")
    for name, value in (("page", page), ("residual", residual)):
        if type(value) is not int or value < 0:
            raise ArgumentError(name, value, "must be a number of tokens", "0 for none")
    launching.check_flags(**flags)


def run(
    q: torch.Tensor,
    cache: PackedCache,
    *,
    scale: float | None,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
    balanced: bool | None = None,
    schedule: schedules.Decode | None = None,
    target: Target | str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    most_new: int = 0,
    codes: Codes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `decode` for q [B, q_len, Hq, D], or with `cu_seqlens` [1, N, Hq, D]; lse as out without D; `codes`
    receives those of out."""
    import torch
    from terrazzo.lowering.kernels import get_kernel

    ragged = cu_seqlens is not None
    _check(q, cache, sinks, ragged)
    if ragged:
        check_starts(cu_seqlens, cache.lengths.numel(), q)
        check_most_rows(q, most_new, cache.lengths.numel())
    check_options(q, scale, softcap, window)
    if schedule is not None:
        check_fields(schedule, *SCHEDULES)
    (batch, new, heads, head_dim), kv_heads = q.shape, cache.kv_heads
    made = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if lse is None:
        lse = torch.empty(batch, new, heads, dtype=torch.float32, device=q.device)
    else:
        launching.check_out(lse, (batch, new, heads), torch.float32, q.device, "lse")
        launching.check_apart(lse, "lse", q=q if q.is_contiguous() else None, out=made, sinks=sinks)
    if q.numel() == 0:
        return made, lse
    if ragged:
        batch, new = cache.lengths.numel(), most_new
    if splits is not None and (type(splits) is not int or not 1 <= splits <= decode_program.MAX_SPLITS):
        raise ArgumentError("splits", splits, f"must be 1..{decode_program.MAX_SPLITS}", "leave it out")
    if balanced is not None:
        check_balanced(balanced, splits, schedule)
    at, device = current_targets(target, q.device)
    longest, mean = seen(cache, window, new)
    chosen = plan(
        cache.layout, batch, kv_heads, new * heads // kv_heads, longest,
        dtype=str(q.dtype).removeprefix("torch."), page=cache.page_size, residual=cache.residual_tokens,
        softcap=bool(softcap > 0), sinks=sinks is not None, target=at, device=device,
        schedule=schedule, splits=splits or 0, balanced=balanced, mean=mean, ragged=ragged,
        coding=None if codes is None else codes.coding,
    )  # fmt: skip
    kernel = get_kernel(chosen.request)
    captured = capturing(q.device)
    if captured and not kernel.warm_on(q.device):
        raise CaptureError(
            f"{chosen.request.name} for {batch} sequences of up to {longest} tokens was never launched on {q.device}, "
            "and a CUDA graph is being captured; call it once with this batch before the capture"
        )
    y, along = kv_heads * chosen.row_groups, 1 if chosen.places else batch
    check_grid(batch, y)
    partial = along * y * chosen.partials * chosen.rows * head_dim
    if partial >= launching.LARGEST:  # their offsets have 32 bits
        constraint = f"partial results must have less than {launching.LARGEST} values, they have {partial}"
        if chosen.places:
            raise ArgumentError("balanced", True, f"{constraint} ({batch} sequences)", "pass balanced=False")
        raise ArgumentError("splits", chosen.splits, constraint, "use fewer splits or smaller batches")
    sizes = (along, y, chosen.partials)
    logs = torch.empty(*sizes, chosen.cluster * chosen.rows, dtype=torch.float32, device=q.device)
    partial = torch.empty(*sizes, chosen.rows, head_dim, dtype=torch.float32, device=q.device)
    none = stand_ins(q.device)
    q = launching.aligned_copy(q) if not q.is_contiguous() or q.data_ptr() % 16 else q
    if out is not None:
        launching.check_apart(out, "out", q=q)
    written = aligned_out(made) if made.data_ptr() % 16 else made
    kernel(
        q, cache.pages,
        none["table"] if cache.block_table is None else cache.block_table, cache.lengths,
        none["residual"] if cache.residual is None else cache.residual,
        multiples(batch, 1, q.device) if cache.slots is None else cache.slots,
        none["static"] if cache.k_static is None else cache.k_static,
        none["static"] if cache.v_static is None else cache.v_static,
        none["sinks"] if sinks is None else sinks, partial, logs,
        semaphores(q.device, batch * (y * chosen.cluster + (codes is not None)), captured), written, lse,
        *(() if codes is None else codes.arguments()), *((cu_seqlens.contiguous(),) if ragged else ()),
        (1 / math.sqrt(head_dim) if scale is None else scale) * LOG2E, softcap * LOG2E, window,
        *((most_new,) if ragged else ()),
    )  # fmt: skip
    return made if written is made else made.copy_(written), lse


def aligned_out(out: torch.Tensor) -> torch.Tensor:
    """What a kernel writes to in the place of `out`: memory of its own where stores of several values would miss."""
    import torch

    return torch.empty_like(out) if out.data_ptr() % 16 else out


def check_kind(cache: PackedCache) -> None:
    """Raise ArgumentError unless it is a PackedCache; its tensors are checked by eager calls alone."""
    if not isinstance(cache, PackedCache):
        remedy = "a KVCache is read by its batches: cache.batch([sequence]).decode(q)"
        raise ArgumentError("cache", type(cache).__name__, "must be a PackedCache", remedy)


def check_kinds(**tensors: torch.Tensor | None) -> None:
    """What traced calls are asked of tensors; the rest is checked where the operator runs."""
    for name, x in tensors.items():
        if x is not None:
            launching.check_tensor(x, name, "see the operator's arguments")


def check_balanced(balanced: bool | None, splits: int | None, schedule: schedules.Decode | None) -> None:
    """Raise ArgumentError unless a batch can be, or not be, split by the lengths of its sequences."""
    if balanced is not None and type(balanced) is not bool:
        raise ArgumentError("balanced", balanced, "must be a bool or None", "None for what mean_length says")
    if balanced and splits:
        raise ArgumentError("splits", splits, "a balanced batch has those that the lengths ask for", "leave it out")
    if balanced and isinstance(schedule, schedules.WarpgroupDecode):
        raise ArgumentError("schedule", schedule, "warpgroups have no balanced kernel", "pass a Decode, or None")


def check_options(q: torch.Tensor, scale: float | None, softcap: float, window: int) -> None:
    """What decode and prefill ask of their options and, after all else, of the place of q."""
    check_numbers(scale, softcap, window)
    if not q.is_cuda:
        raise ArgumentError("q", str(q.device), "must be on a CUDA device, with the cache", "move both there")


def check_numbers(scale: float | None, softcap: float, window: int) -> None:
    """Raise ArgumentError unless the options of the softmax are numbers that a kernel takes."""
    if scale is not None and not (isinstance(scale, NUMBERS) and -MOST <= scale <= MOST):
        raise ArgumentError("scale", scale, f"must be finite, a number up to {MOST}", "leave it out for 1 / sqrt(D)")
    if not (isinstance(softcap, NUMBERS) and 0 <= softcap <= MOST_CAP):
        constraint = (
            f"must be 0 (none) or positive, up to {MOST_CAP}: the kernels' tanh errs by 2^-22, logits by that many"
        )
        raise ArgumentError("softcap", softcap, constraint, "pass 0.0")
    if type(window) is not int or not 0 <= window < launching.LARGEST:
        constraint = f"must be 0 (all tokens) or positive, below {launching.LARGEST}"
        raise ArgumentError("window", window, constraint, "pass 0")


def check_grid(batch: int, second: int) -> None:
    """Raise ArgumentError where a launch would have more CTAs along a dimension than CUDA takes."""
    if batch > GRID:
        raise ArgumentError("cache", batch, f"must have at most {GRID} sequences", "split the batch")
    if second > GRID:
        constraint = f"must have at most {GRID} tiles of rows for a sequence"
        raise ArgumentError("q", second, constraint, "pass fewer new tokens at a time")


def check_sinks(sinks: torch.Tensor | None, heads: int, q: torch.Tensor) -> None:
    """Raise ArgumentError unless sinks are f32 [Hq] beside q."""
    if sinks is None:
        return
    launching.check_tensor(sinks, "sinks", "float32 [{}]", heads)
    fits = tuple(sinks.shape) == (heads,) and str(sinks.dtype) == "torch.float32" and sinks.is_contiguous()
    if not fits or sinks.device != q.device:
        seen = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        raise ArgumentError("sinks", seen, f"must be contiguous float32 [{heads}] on {q.device}", "cast or move it")


def check_place(q: torch.Tensor, cache: PackedCache) -> None:
    if q.device != cache.pages.device:
        where = f"must be on a CUDA device, with the cache ({cache.pages.device})"
        raise ArgumentError("q", str(q.device), where, "move it")


def check_heads(q: torch.Tensor, heads: int, kv_heads: int) -> None:
    if heads < 1 or heads % kv_heads:
        raise ArgumentError("q", list(q.shape), f"Hq must be a multiple of the {kv_heads} kv heads", "repeat heads")


def check_starts(cu_seqlens: torch.Tensor, batch: int, q: torch.Tensor) -> None:
    """Raise ArgumentError unless it says where new tokens of `batch` sequences begin."""
    launching.check_tensor(cu_seqlens, "cu_seqlens", "int32 [{}]", batch + 1)
    fits = str(cu_seqlens.dtype) == "torch.int32" and tuple(cu_seqlens.shape) == (batch + 1,)
    if not fits or cu_seqlens.device != q.device:
        seen = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        raise ArgumentError("cu_seqlens", seen, f"must be int32 [{batch + 1}] on {q.device}", "cast it")


def check_most_rows(q: torch.Tensor, most_new: int, batch: int) -> None:
    """Raise ArgumentError unless decode takes so many new tokens of a sequence, and some sequence has those of q."""
    if type(most_new) is not int or not 1 <= most_new <= MAX_QUERY_TOKENS:
        constraint = f"must be 1..{MAX_QUERY_TOKENS}, the most new tokens of a sequence"
        raise ArgumentError("most_new", most_new, constraint, "use prefill for more new tokens")
    if q.shape[1] and not batch:
        raise ArgumentError("q", list(q.shape[1:]), "has new tokens of no sequence", "pass a cache with sequences")


def _check(q: torch.Tensor, cache: PackedCache, sinks: torch.Tensor | None, ragged: bool = False) -> None:
    cache.check()
    if q.dim() != 4 or q.shape[3] != cache.layout.head_dim or str(q.dtype)[6:] not in DTYPES:
        constraint = f"must be float16 or bfloat16 [B, q_len, Hq, {cache.layout.head_dim}]"
        raise ArgumentError("q", f"{q.dtype} {list(q.shape)}", constraint, "reshape or cast it")
    batch, new, heads, _ = q.shape
    if not ragged and not 1 <= new <= MAX_QUERY_TOKENS:
        raise ArgumentError(
            "q", list(q.shape), f"q_len must be 1..{MAX_QUERY_TOKENS}", "use prefill for more new tokens"
        )
    if heads < 1 or heads % cache.pages.shape[1]:
        check_heads(q, heads, cache.kv_heads)
    if not ragged and cache.lengths.shape != (batch,):
        raise ArgumentError(
            "q", list(q.shape), f"the cache has {cache.lengths.numel()} sequences", "pass one q for each"
        )
    if sinks is not None:
        check_sinks(sinks, heads, q)
    if q.device != cache.pages.device:
        check_place(q, cache)
