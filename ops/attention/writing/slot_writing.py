"""Storing new tokens by slot mapping, as engines that own the page table say where they go: checks and launches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, weights
from terrazzo.ops.attention.cache.cache import LARGEST
from terrazzo.ops.attention.cache.launch import current_targets, stand_ins
from terrazzo.ops.attention.writing import rope_writing, slot_write_program, writing

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.ops.attention.cache.layout import CacheLayout


@lru_cache(maxsize=1024)
def request(
    layout: CacheLayout, dtype: str, page: int, slots: str, *, target: Target, device: Target | None = None,
    **turned: Any,
) -> KernelRequest:  # fmt: skip
    """The kernel that stores new tokens of `dtype` by a slot mapping of dtype `slots`, "int32" or "int64", into pages
    of `page` tokens; `device` runs it where that is newer than `target`.

    Args:
        turned: rotary_dim, rope, norm, numerics and positions of slot_write_program.build, where it turns keys.

    Raises:
        ArgumentError: channel-wise keys, or another dtype.
    """
    for name, value, known in (("k", dtype, ("float16", "bfloat16")), ("slot_mapping", slots, ("int32", "int64"))):
        if value not in known:
            raise ArgumentError(name, value, f"must be {' or '.join(known)}", "cast it")
    if layout.k.group:
        constraint = "keys must not share scales with other tokens"
        raise ArgumentError("cache", f"{layout.k_format} keys", constraint, "use token-wise keys")
    params = dict(k_format=layout.k_format, v_format=layout.v_format, head_dim=layout.head_dim, dtype=dtype, page=page)
    params |= dict(slots=slots) | turned
    program, name = slot_write_program, "attention.rope_store_slots" if turned else "attention.store_slots"
    flags = launching.ptx_flags(target, device)
    return KernelRequest(
        name, f"{program.__name__}:build", tuple(params.items()), target, program.PASS_CONFIGS, flags
    )  # fmt: skip


def check(cache: PackedCache, slot_mapping: torch.Tensor, tokens: int) -> None:
    """Raise ArgumentError unless the cache has slots, and the mapping is one of so many tokens; values are not read."""
    launching.check_tensor(slot_mapping, "slot_mapping", "int32 or int64 [tokens]")
    if not cache.page_size or cache.residual is not None:
        seen = f"a ring of {cache.residual_tokens} tokens" if cache.page_size else "contiguous storage"
        constraint = "must be paged, without f16 tokens beside the pages"
        raise ArgumentError("cache", seen, constraint, "use append or store, or residual=0")
    if len(cache.pages) * cache.page_size >= LARGEST:
        seen = f"{len(cache.pages)} pages of {cache.page_size} tokens"
        raise ArgumentError("cache", seen, f"must have less than {LARGEST} slots", "allocate fewer pages")
    kind, where = weights.dtype_name(slot_mapping), cache.pages.device
    fits = tuple(slot_mapping.shape) == (tokens,) and slot_mapping.is_contiguous()
    if not fits or kind not in ("int32", "int64") or slot_mapping.device != where:
        seen = f"{weights.described(slot_mapping)} on {slot_mapping.device}"
        constraint = f"must be contiguous int32 or int64 [{tokens}] on {where}"
        raise ArgumentError("slot_mapping", seen, constraint, "pass a slot, or -1, for each row of k")


def run(
    cache: PackedCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, target: Target | str | None
) -> None:
    """`store_slots` of eager tensors."""
    cache.check()
    if k.dim() != 3:
        constraint = f"must be [tokens, {cache.kv_heads}, {cache.layout.head_dim}]"
        raise ArgumentError("k", list(k.shape), constraint, "flatten batch and tokens")
    check(cache, slot_mapping, len(k))
    writing.check_rows(cache, k, v)
    tokens = len(k)
    if tokens == 0:
        return
    at, device = current_targets(target, k.device)
    kind = weights.dtype_name(k), cache.page_size, weights.dtype_name(slot_mapping)
    wanted = request(cache.layout, *kind, target=at, device=device)
    kernel = launching.warm_kernel(wanted, tokens, "store_slots", k.device)
    (k_rows, *k_pitches), (v_rows, *v_pitches) = writing.rows_of(k), writing.rows_of(v)
    ctas, per = slot_write_program.launch(tokens, cache.kv_heads, device.sms)
    kernel(
        k_rows, v_rows, slot_mapping, cache.pages, *_scales(cache), *k_pitches, *v_pitches,
        tokens, ctas, per, len(cache.pages) * cache.page_size,
    )  # fmt: skip


def run_turned(
    cache: PackedCache,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    heads: int,
    rotary_dim: int,
    rope: str,
    norm: str,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    numerics: str,
    target: Target | str | None = None,
) -> torch.Tensor:
    """q [T, heads, D] turned; keys and values are stored. The eager path of `rope_append` with a slot mapping."""
    cache.check()
    rows = rope_writing.check(cache, qkv, cos, sin, heads, rotary_dim, norm, q_weight, k_weight, positions)
    check(cache, slot_mapping, rows)
    dim, kv = cache.layout.head_dim, cache.kv_heads
    q = qkv.new_empty((rows, heads, dim))
    if rows == 0:
        return q
    at, device = current_targets(target, qkv.device)
    angles = "none" if positions is None else weights.dtype_name(positions)
    turned = dict(rotary_dim=rotary_dim, rope=rope, norm=norm, numerics=numerics, positions=angles)
    kind = weights.dtype_name(qkv), cache.page_size, weights.dtype_name(slot_mapping)
    wanted = request(cache.layout, *kind, target=at, device=device, **turned)
    kernel = launching.warm_kernel(wanted, rows, "rope_append", qkv.device)
    no_weight, none = qkv.view(-1)[:1], stand_ins(qkv.device)["table"].view(-1)
    parts = qkv.unflatten(-1, (heads + 2 * kv, dim))
    (k_rows, *k_pitches), (v_rows, *v_pitches) = (
        writing.rows_of(parts[:, first : first + kv]) for first in (heads, heads + kv)
    )
    ctas, per = slot_write_program.launch(rows, kv, device.sms)
    kernel(
        qkv.view(-1), none if positions is None else positions, cos, sin, no_weight if q_weight is None else q_weight,
        no_weight if k_weight is None else k_weight, q.view(-1, dim), k_rows, v_rows, slot_mapping, cache.pages,
        *_scales(cache), *k_pitches, *v_pitches, rows, ctas, per, len(cache.pages) * cache.page_size, qkv.shape[1],
        heads, rows * heads, eps,
    )  # fmt: skip
    return q


def _scales(cache: PackedCache) -> list[torch.Tensor]:
    """Static scales of keys and values, or what stands in for them."""
    none = stand_ins(cache.pages.device)["static"]
    return [none if s is None else s for s in (cache.k_static, cache.v_static)]
