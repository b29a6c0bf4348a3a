"""Storing new tokens by slot mapping, as engines that own the page table say where they go: checks and launches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import weights
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.cache import LARGEST
from terrazzo.ops.attention.writing import slot_write_program, writing

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.writing.rope_writing import Heads


@lru_cache(maxsize=1024)
def request(
    layout: CacheLayout, dtype: str, page: int, slots: str, *, target: Target, device: Target | None = None,
    **turned: str | int,
) -> KernelRequest:  # fmt: skip
    """The kernel that stores new tokens of `dtype` by a slot mapping of dtype `slots`, "int32" or "int64", into pages
    of `page` tokens; `device` runs it where that is newer than `target`.

    Args:
        turned: rotary_dim, rope, norm, numerics and positions of slot_write_program.build, where it turns keys.

    Raises:
        ArgumentError: channel-wise keys, or another dtype.
    """
    for name, value, known in (("k", dtype, checks.DTYPES), ("slot_mapping", slots, ("int32", "int64"))):
        if value not in known:
            raise ArgumentError(name, value, f"must be {' or '.join(known)}", "cast it")
    if layout.k.group:
        constraint = "keys must not share scales with other tokens"
        raise ArgumentError("cache", f"{layout.k_format} keys", constraint, "use token-wise keys")
    params = dict(k_format=layout.k_format, v_format=layout.v_format, head_dim=layout.head_dim, dtype=dtype, page=page)
    params |= dict(slots=slots) | turned
    return launch.request("rope_store_slots" if turned else "store_slots", slot_write_program, params, target, device)


def check(cache: PackedCache, slot_mapping: torch.Tensor, tokens: int) -> None:
    """Raise ArgumentError unless the cache has slots, and the mapping is one of so many tokens; values are not read."""
    if not cache.page_size or cache.residual is not None:
        seen = f"a ring of {cache._ring} tokens" if cache.page_size else "contiguous storage"
        constraint = "must be paged, without f16 tokens beside the pages"
        raise ArgumentError("cache", seen, constraint, "use append or store, or residual=0")
    if len(cache.pages) * cache.page_size >= LARGEST:
        seen = f"{len(cache.pages)} pages of {cache.page_size} tokens"
        raise ArgumentError("cache", seen, f"must have less than {LARGEST} slots", "allocate fewer pages")
    remedy = "pass a slot, or -1, for each row of k"
    checks.check_integers("slot_mapping", slot_mapping, tokens, cache.pages.device, remedy)


def run(
    cache: PackedCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, target: Target | str | None
) -> None:
    """`store_slots` of eager tensors."""
    launch.operands(cache)
    writing.check_flat(cache, k)
    check(cache, slot_mapping, len(k))
    writing.check_rows(cache, k, v)
    if len(k):
        _store(cache, k, slot_mapping, (writing.rows_of(k), writing.rows_of(v)), target)


def run_turned(
    cache: PackedCache, rows: Heads, slot_mapping: torch.Tensor, target: Target | str | None
) -> torch.Tensor:  # fmt: skip
    """q [T, heads, D] turned; keys and values are stored. The eager path of `rope_append` with a slot mapping."""
    launch.operands(cache)
    rows.check(cache)
    qkv, tokens, positions = rows.qkv, len(rows.qkv), rows.positions
    check(cache, slot_mapping, tokens)
    q = qkv.new_empty((tokens, rows.heads, cache.layout.head_dim))
    if tokens:
        x, *tables = rows.queries(q)
        front = (x, launch.stand_ins(qkv.device)["table"].view(-1) if positions is None else positions, *tables)
        back = (qkv.shape[1], rows.heads, tokens * rows.heads, rows.eps)
        kind = rows.kind() | dict(positions="none" if positions is None else weights.dtype_name(positions))
        _store(cache, qkv, slot_mapping, rows.parts(cache), target, front, back, **kind)
    return q


def _store(
    cache: PackedCache, x: torch.Tensor, slot_mapping: torch.Tensor, parts: tuple, target: Target | str | None,
    front: tuple = (), back: tuple = (), **turned: str | int,
) -> None:  # fmt: skip
    """The launch for tokens x: keys and values in `parts`; front, back, turned: of a kernel that turns them."""
    tokens, pages = len(x), cache.pages
    at, device = launch.current_targets(target, x.device)
    kind = str(x.dtype)[6:], cache.page_size, weights.dtype_name(slot_mapping)
    wanted = request(cache.layout, *kind, target=at, device=device, **turned)
    kernel, _ = launch.warm(wanted, x.device, "{} tokens", tokens)
    (k_rows, *k_pitches), (v_rows, *v_pitches) = parts
    ctas, per = slot_write_program.launch(tokens, pages.shape[1], device.sms)
    kernel(
        *front, k_rows, v_rows, slot_mapping, pages, *launch.operands(cache)[-2:], *k_pitches, *v_pitches,
        tokens, ctas, per, len(pages) * cache.page_size, *back,
    )  # fmt: skip
