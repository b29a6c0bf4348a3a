"""Storing the keys of new tokens as the product left them: turned to their positions on the way, and queries with them.

One kernel does what `ops.rope.apply_rope` and `append` do, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, weights
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.writing import writing
from terrazzo.ops.tiles import heads as tiles

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.ops.attention.cache.layout import CacheLayout

KIND = ("rotary_dim", "rope", "norm", "numerics")
"""What a program must know of the heads that it turns."""


@lru_cache(maxsize=256)
def request(
    cache_layout: CacheLayout, dtype: str, page: int, residual: int, *, target: Target, device: Target | None = None,
    **kind: str | int,
) -> KernelRequest:  # fmt: skip
    """The kernel that turns and stores new tokens of `dtype`; kind: the arguments `KIND` of write_program.build."""
    kind = {name: kind[name] for name in KIND}
    turned = {"layout" if name == "rope" else name: value for name, value in kind.items()}
    tiles.check(head_dim=cache_layout.head_dim, dtype=dtype, **turned)
    plain = writing.write_kernel(cache_layout, dtype, page, residual, target, device)
    parts = (plain.entry, (*plain.params, *kind.items()), target, plain.pass_configs, plain.flags)
    return KernelRequest("attention.rope_append", *parts)


@dataclass(frozen=True, eq=False)
class Heads:
    """Rows of new tokens as their product left them, and how their heads are normed and turned: see
    `entry.rope_append`. positions: rows of the tables."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
    rotary_dim: int
    rope: str
    norm: str
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    numerics: str
    positions: torch.Tensor | None = None

    def kind(self) -> dict[str, str | int]:
        """What the kernel must know of it."""
        return {"rotary_dim": self.rotary_dim, "rope": self.rope, "norm": self.norm, "numerics": self.numerics}

    def check(self, cache: PackedCache) -> None:
        """Raise ArgumentError unless rows, tables and weights fit each other and the cache."""
        import torch

        qkv, heads, kv_heads, dim = self.qkv, self.heads, cache.pages.shape[1], cache.layout.head_dim
        if type(qkv) is not torch.Tensor or qkv.layout is not torch.strided or qkv.requires_grad:
            launching.check_tensor(qkv, "qkv", "[B * q_len, (heads + 2 kv_heads) * head_dim]")
            launching.check_no_grad(qkv, "rope_append", "qkv")
        if type(heads) is not int or heads < 1 or heads % kv_heads:
            constraint = f"must be a multiple of the cache's {kv_heads} heads"
            raise ArgumentError("heads", heads, constraint, "pass the model's number of query heads")
        width = (heads + 2 * kv_heads) * dim
        if qkv.ndim != 2 or qkv.shape[1] != width or not qkv.is_contiguous():
            constraint = f"must be contiguous [new tokens, {width}]"
            raise ArgumentError("qkv", list(qkv.shape), constraint, "join q, k and v of the sequences' new tokens")
        if str(qkv.dtype)[6:] not in checks.DTYPES or qkv.device != cache.pages.device:
            seen = f"{weights.described(qkv)} on {qkv.device}"
            constraint = f"must be float16 or bfloat16 on {cache.pages.device}"
            raise ArgumentError("qkv", seen, constraint, "cast it, and move it to the cache")
        if self.positions is not None:
            remedy = "pass a position for each row of qkv"
            checks.check_integers("positions", self.positions, len(qkv), qkv.device, remedy)
        self._check_tables()
        for name, vector in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            if (vector is None) != (self.norm == "none"):
                seen, remedy = None if vector is None else "given", "pass norm and both weights, or none"
                raise ArgumentError(name, seen, f"does not go with norm={self.norm!r}", remedy)
            if vector is not None and (tuple(vector.shape) != (dim,) or vector.dtype != qkv.dtype):
                constraint = f"must be {weights.dtype_name(qkv)} [{dim}]"
                raise ArgumentError(name, weights.described(vector), constraint, "pass a weight for each dim")

    def _check_tables(self) -> None:
        import torch

        rows, half, device = 1 if self.positions is not None else len(self.qkv), self.rotary_dim // 2, self.qkv.device
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if type(table) is not torch.Tensor or table.layout is not torch.strided:
                launching.check_tensor(table, name, "float32 [rows, rotary_dim / 2 or more]")
            fits = table.ndim == 2 and len(table) >= rows and table.shape[1] >= half and table.shape == self.cos.shape
            if not fits or str(table.dtype) != "torch.float32" or table.device != device:
                constraint = f"must be float32 [{rows} or more, {half} or more] on {device}, cos as sin"
                raise ArgumentError(name, weights.described(table), constraint, "pass the angles of these tokens")
            if not table.is_contiguous() or table.shape[1] % 4 or table.data_ptr() % 16:
                constraint = "must be contiguous, rows at multiples of 16 bytes"
                raise ArgumentError(name, f"strides {list(table.stride())}", constraint, "pass a copy")

    def parts(self, cache: PackedCache) -> tuple[tuple[torch.Tensor, int, int], tuple[torch.Tensor, int, int]]:
        """(memory, token pitch, head pitch) of the keys, and of the values; see `writing.rows_of`."""
        qkv, heads, kv, dim = self.qkv, self.heads, cache.pages.shape[1], cache.layout.head_dim
        if qkv.data_ptr() % 16:
            rows = qkv.unflatten(-1, (-1, dim))
            return writing.rows_of(rows[:, heads : heads + kv]), writing.rows_of(rows[:, heads + kv :])
        flat, width, first = qkv.view(-1), qkv.shape[1], heads * dim
        span = (len(qkv) - 1) * width + kv * dim
        k, v = (flat[first : first + span], flat[first + kv * dim : first + kv * dim + span])
        return (k, width, dim), (v, width, dim)

    def queries(self, q: torch.Tensor) -> tuple:
        """What a program turns, and to where: X, COS, SIN, QW, KW and Q."""
        x, q_weight, k_weight = self.qkv.view(-1), self.q_weight, self.k_weight
        if q_weight is None:
            q_weight = k_weight = x[:1]
        return x, self.cos, self.sin, q_weight, k_weight, q.view(-1, q.shape[-1])


def check_kept(cache: PackedCache) -> None:
    """ArgumentError unless the program that turns tokens stores them where the cache keeps its newest ones."""
    checks.check_kind(cache)
    if writing.slides(cache.layout, cache._ring):
        constraint = "must not keep its newest tokens in a sliding ring"
        raise ArgumentError("cache", f"a ring of {cache._ring}", constraint, "use apply_rope and append")


def run(cache: PackedCache, rows: Heads, target: Target | str | None) -> torch.Tensor:
    """q [B, q_len, heads, D] turned; keys and values are stored. The eager path of `rope_append`."""
    pages, table, lengths, *rest = launch.operands(cache)
    if cache.residual is not None:
        check_kept(cache)
    rows.check(cache)
    batch, qkv = len(lengths), rows.qkv
    if not batch or len(qkv) % batch:
        constraint = f"must have q_len rows for each of {batch} sequences"
        raise ArgumentError("qkv", f"{len(qkv)} rows", constraint, "join q, k and v of the sequences' new tokens")
    new = len(qkv) // batch
    q = qkv.new_empty((batch, new, rows.heads, cache.layout.head_dim))
    if new == 0:
        return q
    at, device = launch.current_targets(target, qkv.device)
    kind, residual = rows.kind(), cache._ring
    wanted = request(cache.layout, str(qkv.dtype)[6:], cache.page_size, residual, target=at, device=device, **kind)
    kernel, _ = launch.warm(wanted, qkv.device, "{} new tokens of each sequence", new)
    (k_rows, *k_pitches), (v_rows, *v_pitches) = rows.parts(cache)
    starts, queries, made = launch.multiples(batch + 1, new, qkv.device), rows.queries(q), len(qkv) * rows.heads
    for scalars in writing.grids(cache.layout, residual, batch * pages.shape[1], new, device.sms):
        kernel(
            *queries, k_rows, v_rows, starts, lengths, pages, table, *rest, *k_pitches, *v_pitches, *scalars,
            qkv.shape[1], rows.heads, made, rows.eps,
        )  # fmt: skip
        made = 0  # the first launch turns all queries
    return q
