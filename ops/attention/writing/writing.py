"""Storing new tokens: `append` in decode, `store` after prefill; validation and launch of the write kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.writing import ring_write_program, write_program

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.ops.attention.cache.layout import CacheLayout

ONE_LAUNCH = 16
"""New tokens of a sequence up to which one launch may both pack a residual block and begin the next one: the ring of
residual tiles has room for them beside the block."""


@lru_cache(maxsize=1024)
def write_kernel(
    layout: CacheLayout, dtype: str, page: int, residual: int, target: Target, device: Target | None = None
) -> KernelRequest:
    """The kernel that stores keys and values of `dtype`; `device` runs it where that is newer than `target`."""
    params = {**layout.params(), "dtype": dtype, "page": page, "residual": residual}
    program = ring_write_program if slides(layout, residual) else write_program
    return launch.request("write", program, params, target, device)


def slides(layout: CacheLayout, residual: int) -> bool:
    """Whether the newest tokens lie in a ring that packs a tile at a time, not in a block of a channel group."""
    return bool(residual) and not layout.k.group


def write_request(cache: PackedCache, dtype: str, target: Target, device: Target | None = None) -> KernelRequest:
    """The kernel that stores keys and values of `dtype` ("float16", "bfloat16") in this cache.

    Raises:
        ArgumentError: another dtype.
    """
    if dtype not in checks.DTYPES:
        raise ArgumentError("k", dtype, "must be float16 or bfloat16", "cast it")
    return write_kernel(cache.layout, dtype, cache.page_size, cache._ring, target, device)


@lru_cache(maxsize=4096)
def grids(
    layout: CacheLayout, residual: int, pairs: int, most_new: int, sms: int
) -> list[tuple[int, int, int, int, int]]:
    """Five scalars of each launch that together store up to `most_new` tokens of each sequence: the first block, or the
    phase of a ring's; then blocks, groups of pairs, pairs of a CTA, and tiles of a pair."""
    if slides(layout, residual):
        found = ring_write_program.launches(most_new, residual, pairs, sms)
        return [(phase, blocks, -(-pairs // per), per, tiles) for phase, blocks, per, tiles in found]
    warps = write_program.chunk_warps(residual)
    per, touched = write_program.shares(pairs, most_new, warps, sms)
    return [(first, n, -(-pairs // per), per, touched) for first, n in launches(most_new, 16 * warps, residual)]


def launches(most_new: int, chunk: int, residual: int) -> list[tuple[int, int]]:
    """(first block, number of blocks) of each launch that together store up to `most_new` tokens of a sequence, whose
    first one may lie anywhere in its block of `chunk` tokens."""
    blocks = (most_new + chunk - 2) // chunk + 1
    if residual and most_new > ONE_LAUNCH and blocks > 1:
        return [(0, 1), (1, blocks - 1)]  # the block that reads residual tiles comes before the one that writes them
    return [(0, blocks)] if most_new else []


def run_append(cache: PackedCache, k: torch.Tensor, v: torch.Tensor, target: Target | str | None) -> None:
    """`append` of k and v [B, q_len, Hkv, D]."""
    sequences = len(launch.operands(cache).lengths)
    if k.dim() != 4 or len(k) != sequences:
        constraint = f"must be [{sequences}, q_len, {cache.pages.shape[1]}, {cache.layout.head_dim}]"
        raise ArgumentError("k", list(k.shape), constraint, "pass the new tokens of each sequence")
    check_rows(cache, k, v)
    new = k.shape[1]
    if sequences * new:
        _write(cache, k, v, launch.multiples(sequences + 1, new, k.device), new, target)


def run_store(
    cache: PackedCache, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, most_new: int,
    target: Target | str | None,
) -> None:  # fmt: skip
    """`store` of eager tensors."""
    sequences = len(launch.operands(cache).lengths)
    check_flat(cache, k)
    checks.check_starts(cu_seqlens, sequences, k)
    checks.check_most_new(most_new)
    checks.check_some_new("k", len(k), most_new, sequences)
    check_rows(cache, k, v)
    if len(k):
        _write(cache, k, v, cu_seqlens.contiguous(), min(most_new, len(k)), target)  # a generous bound costs no CTAs


def check_flat(cache: PackedCache, k: torch.Tensor) -> None:
    """Raise ArgumentError unless tokens of all sequences follow one another."""
    if k.dim() != 3:
        constraint = f"must be [tokens, {cache.pages.shape[1]}, {cache.layout.head_dim}]"
        raise ArgumentError("k", list(k.shape), constraint, "flatten batch and tokens")


def check_kinds(operator: str, cache: PackedCache, k: torch.Tensor, v: torch.Tensor, shape: str) -> None:
    """What traced calls are asked too; the cache's own tensors are checked by eager calls alone."""
    import torch

    checks.check_kind(cache)
    for name, x in (("k", k), ("v", v)):
        if type(x) is torch.Tensor and x.layout is torch.strided and not x.requires_grad:
            continue
        launching.check_tensor(x, name, shape)
        launching.check_no_grad(x, operator, name)


def check_rows(cache: PackedCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ArgumentError unless rows of new tokens fit each other and the cache."""
    size = (cache.pages.shape[1], cache.layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape[-2:]) != size or str(x.dtype)[6:] not in checks.DTYPES or x.dtype != k.dtype:
            constraint = f"must be float16 or bfloat16 [..., {size[0]}, {size[1]}], as k"
            raise ArgumentError(name, f"{x.dtype} {list(x.shape)}", constraint, "reshape or cast it")
        if x.shape != k.shape or x.device != cache.pages.device:
            seen, where = f"{list(x.shape)} on {x.device}", cache.pages.device
            raise ArgumentError(name, seen, f"must be {list(k.shape)} on {where}", "move it to the cache")
    if not k.is_cuda:
        raise ArgumentError("k", str(k.device), "must be on a CUDA device", "move it and the cache")


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(flat view of its memory, token pitch, head pitch) of x [..., Hkv, D], copied where rows are not 16-byte
    aligned or not evenly spaced, or heads so far apart that kernels cannot count it."""
    heads, dim = x.shape[-2:]
    tokens = x.shape[:-2].numel()
    pitch = x.stride(-3)
    even = x.dim() == 3 or len(x) == 1 or (x.stride(0) == x.shape[1] * pitch if x.shape[1] > 1 else True)
    if x.dim() == 4 and x.shape[1] == 1:
        pitch = x.stride(0)
    aligned = x.stride(-1) == 1 and not (pitch % 8 or x.stride(-2) % 8 or x.data_ptr() % 16)
    if not (even and aligned) or max(pitch, heads * x.stride(-2)) >= launching.LARGEST:
        x = launching.aligned_copy(x)
        pitch = heads * dim
    span = (tokens - 1) * pitch + (heads - 1) * x.stride(-2) + dim
    return x.as_strided((span,), (1,)), pitch, x.stride(-2)


def _write(cache: PackedCache, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, most_new: int, target) -> None:
    at, device = launch.current_targets(target, k.device)
    wanted = write_request(cache, str(k.dtype).removeprefix("torch."), at, device)
    kernel, _ = launch.warm(wanted, k.device, "up to {} new tokens of a sequence", most_new)
    (k_rows, *k_pitches), (v_rows, *v_pitches) = rows_of(k), rows_of(v)
    pages, table, lengths, *rest = launch.operands(cache)
    pairs = len(lengths) * pages.shape[1]
    for scalars in grids(cache.layout, cache._ring, pairs, most_new, device.sms):
        kernel(k_rows, v_rows, starts, lengths, pages, table, *rest, *k_pitches, *v_pitches, *scalars)
