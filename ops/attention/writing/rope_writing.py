"""Storing the keys of new tokens as the product left them: turned to their positions on the way, and queries with them.

One kernel does what `ops.rope.apply_rope` and `append` do, with the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, weights
from terrazzo.ops.attention.cache.launch import current_targets, multiples, own_slots, stand_ins
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.writing import write_program, writing
from terrazzo.ops.tiles import heads as tiles

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.ops.attention.cache.layout import CacheLayout


@lru_cache(maxsize=256)
def request(
    cache_layout: CacheLayout, dtype: str, page: int, residual: int, *, rotary_dim: int, rope: str, norm: str,
    numerics: str, target: Target, device: Target | None = None,
) -> KernelRequest:  # fmt: skip
    """The kernel that turns and stores new tokens of `dtype`; see write_program.build."""
    tiles.check(
        head_dim=cache_layout.head_dim, rotary_dim=rotary_dim, layout=rope, dtype=dtype, norm=norm, numerics=numerics
    )  # fmt: skip
    plain = writing.write_kernel(cache_layout, dtype, page, residual, target, device)
    params = dict(plain.params) | dict(rotary_dim=rotary_dim, rope=rope, norm=norm, numerics=numerics)
    parts = (plain.entry, tuple(params.items()), target, plain.pass_configs, plain.flags)
    return KernelRequest("attention.rope_append", *parts)


def check(
    cache: PackedCache, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, rotary_dim: int,
    norm: str, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, positions: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Rows of qkv; ArgumentError unless operands fit each other and the cache. positions: rows of the tables."""
    op.check_kind(cache)
    launching.check_tensor(qkv, "qkv", "[B * q_len, (heads + 2 kv_heads) * head_dim]")
    launching.check_no_grad(qkv, "rope_append", "qkv")
    dim = cache.layout.head_dim
    if type(heads) is not int or heads < 1 or heads % cache.kv_heads:
        constraint = f"must be a multiple of the cache's {cache.kv_heads} heads"
        raise ArgumentError("heads", heads, constraint, "pass the model's number of query heads")
    width = (heads + 2 * cache.kv_heads) * dim
    if qkv.ndim != 2 or qkv.shape[1] != width or not qkv.is_contiguous():
        constraint = f"must be contiguous [new tokens, {width}]"
        raise ArgumentError("qkv", list(qkv.shape), constraint, "join q, k and v of the sequences' new tokens")
    if weights.dtype_name(qkv) not in ("float16", "bfloat16") or qkv.device != cache.pages.device:
        seen = f"{weights.described(qkv)} on {qkv.device}"
        constraint = f"must be float16 or bfloat16 on {cache.pages.device}"
        raise ArgumentError("qkv", seen, constraint, "cast it, and move it to the cache")
    if positions is not None:
        launching.check_tensor(positions, "positions", "int32 or int64 [new tokens]")
        kind, fits = weights.dtype_name(positions), positions.shape == qkv.shape[:1] and positions.is_contiguous()
        if not fits or kind not in ("int32", "int64") or positions.device != qkv.device:
            seen = f"{weights.described(positions)} on {positions.device}"
            constraint = f"must be contiguous int32 or int64 [{len(qkv)}] on {qkv.device}"
            raise ArgumentError("positions", seen, constraint, "pass a position for each row of qkv")
    rows = 1 if positions is not None else len(qkv)
    for name, table in (("cos", cos), ("sin", sin)):
        launching.check_tensor(table, name, "float32 [rows, rotary_dim / 2 or more]")
        fits = table.ndim == 2 and len(table) >= rows and table.shape[1] >= rotary_dim // 2
        if not fits or table.shape != cos.shape or weights.dtype_name(table) != "float32" or table.device != qkv.device:
            constraint = f"must be float32 [{rows} or more, {rotary_dim // 2} or more] on {qkv.device}, cos as sin"
            raise ArgumentError(name, weights.described(table), constraint, "pass the angles of these tokens")
        if not table.is_contiguous() or table.shape[1] % 4 or table.data_ptr() % 16:
            constraint = "must be contiguous, rows at multiples of 16 bytes"
            raise ArgumentError(name, f"strides {list(table.stride())}", constraint, "pass a copy")
    for name, vector in (("q_weight", q_weight), ("k_weight", k_weight)):
        if (vector is None) != (norm == "none"):
            seen = None if vector is None else "given"
            raise ArgumentError(name, seen, f"does not go with norm={norm!r}", "pass norm and both weights, or none")
        if vector is not None and (tuple(vector.shape) != (dim,) or vector.dtype != qkv.dtype):
            constraint = f"must be {weights.dtype_name(qkv)} [{dim}]"
            raise ArgumentError(name, weights.described(vector), constraint, "pass a weight for each dim")
    return len(qkv)


def check_kept(cache: PackedCache) -> None:
    """ArgumentError unless the program that turns tokens stores them where the cache keeps its newest ones."""
    op.check_kind(cache)
    if writing.slides(cache.layout, cache.residual_tokens):
        constraint = "must not keep its newest tokens in a sliding ring"
        raise ArgumentError("cache", f"a ring of {cache.residual_tokens}", constraint, "use apply_rope and append")


def check_batch(cache: PackedCache, rows: int) -> int:
    """New tokens of each sequence; ArgumentError unless so many rows are as many for each."""
    batch = len(cache.lengths)
    if not batch or rows % batch:
        constraint = f"must have q_len rows for each of {batch} sequences"
        raise ArgumentError("qkv", f"{rows} rows", constraint, "join q, k and v of the sequences' new tokens")
    return rows // batch


def run(
    cache: PackedCache,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
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
    """q [B, q_len, heads, D] turned; keys and values are stored. The eager path of `rope_append`."""
    cache.check()
    check_kept(cache)
    new = check_batch(cache, check(cache, qkv, cos, sin, heads, rotary_dim, norm, q_weight, k_weight))
    batch, dim, kv = len(cache.lengths), cache.layout.head_dim, cache.kv_heads
    q = qkv.new_empty((batch, new, heads, dim))
    if new == 0:
        return q
    at, device = current_targets(target, qkv.device)
    kind = dict(rotary_dim=rotary_dim, rope=rope, norm=norm, numerics=numerics, target=at, device=device)
    dtype = weights.dtype_name(qkv)
    wanted = request(cache.layout, dtype, cache.page_size, cache.residual_tokens, **kind)
    kernel = launching.warm_kernel(wanted, new, "rope_append", qkv.device)
    none, no_weight = stand_ins(qkv.device), qkv.view(-1)[:1]
    rows = qkv.unflatten(-1, (heads + 2 * kv, dim))
    (k_rows, *k_pitches), (v_rows, *v_pitches) = (
        writing.rows_of(rows[:, first : first + kv]) for first in (heads, heads + kv)
    )
    warps, pairs = write_program.chunk_warps(cache.residual_tokens), batch * kv
    per, touched = write_program.shares(pairs, new, warps, device.sms)
    launches = writing.launches(new, 16 * warps, cache.residual_tokens)
    for index, (first, blocks) in enumerate(launches):
        kernel(
            qkv.view(-1), cos, sin, no_weight if q_weight is None else q_weight,
            no_weight if k_weight is None else k_weight, q.view(-1, dim), k_rows, v_rows,
            multiples(batch + 1, new, qkv.device), cache.lengths, cache.pages,
            none["table"] if cache.block_table is None else cache.block_table,
            none["residual"] if cache.residual is None else cache.residual,
            own_slots(batch, qkv.device) if cache.slots is None else cache.slots,
            none["static"] if cache.k_static is None else cache.k_static,
            none["static"] if cache.v_static is None else cache.v_static,
            *k_pitches, *v_pitches, first, blocks, -(-pairs // per), per, touched, qkv.shape[1], heads,
            0 if index else batch * new * heads, eps,
        )  # fmt: skip
    return q
