"""Storing new tokens: `append` in decode, `store` after prefill; validation and launch of the write kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import write_program
from terrazzo.ops.launching import ptx_flags

if TYPE_CHECKING:
    from terrazzo.ops.attention.cache import PackedCache
    from terrazzo.ops.attention.layout import CacheLayout

ONE_LAUNCH = 16
"""New tokens of a sequence up to which one launch may both pack a residual block and begin the next one: the ring of
residual tiles has room for them beside the block."""


@lru_cache(maxsize=1024)
def _request(
    layout: CacheLayout, dtype: str, page: int, residual: int, target: Target, device: Target | None
) -> KernelRequest:
    params = {
        "k_format": layout.k_format, "v_format": layout.v_format, "head_dim": layout.head_dim, "dtype": dtype,
        "page": page, "residual": residual,
    }  # fmt: skip
    return KernelRequest(
        "attention.write", f"{write_program.__name__}:build", tuple(params.items()), target,
        write_program.PASS_CONFIGS, ptx_flags(target, device),
    )  # fmt: skip


def write_request(cache: PackedCache, dtype: str, target: Target, device: Target | None = None) -> KernelRequest:
    """The kernel that stores keys and values of `dtype` ("float16", "bfloat16") in this cache."""
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError("k", dtype, "must be float16 or bfloat16", "cast it")
    return _request(cache.layout, dtype, cache.page_size, cache.residual_tokens, target, device)


def launches(most_new: int, chunk: int, residual: int) -> list[tuple[int, int]]:
    """(first block, number of blocks) of each launch that together store up to `most_new` tokens of a sequence, whose
    first one may lie anywhere in its block of `chunk` tokens."""
    blocks = (most_new + chunk - 2) // chunk + 1
    if residual and most_new > ONE_LAUNCH and blocks > 1:
        return [(0, 1), (1, blocks - 1)]  # the block that reads residual tiles comes before the one that writes them
    return [(0, blocks)] if most_new else []
