"""Decode attention through shared memory and wgmma, the schedule that `decode` is compared with (BitDecoding v3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from terrazzo.ablation import decode_shared_program as program
from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention.launch import current_targets, semaphores
from terrazzo.ops.attention.op import LOG2E
from terrazzo.ops.launching import warm_kernel

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.attention.cache import PackedCache

BLOCKS = (64, 128)


def request(target: Target, block: int = 64, stages: int = 2) -> KernelRequest:
    """The kernel for blocks of `block` tokens, `stages` of them in flight or in use.

    Raises:
        ArgumentError: no sm_90a, or sizes that the program does not have.
    """
    if target.arch != "sm_90a":
        raise ArgumentError("target", target.arch, "must be sm_90a: wgmma", "use decode")
    if block not in BLOCKS:
        raise ArgumentError("block", block, f"must be one of {BLOCKS}", "use 64")
    if stages < 2:
        raise ArgumentError("stages", stages, "must be at least 2", "use 2")
    params = (("block", block), ("stages", stages))
    return KernelRequest(
        "attention.decode_shared", f"{program.__name__}:build", params, target, program.PASS_CONFIGS
    )  # fmt: skip


def decode_shared(
    q: torch.Tensor,
    cache: PackedCache,
    *,
    out: torch.Tensor | None = None,
    block: int = 64,
    stages: int = 2,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `decode` for float16 q [B, q_len, Hq, 128] over a contiguous int4 cache without residual block.

    Args:
        out: contiguous, shape and dtype of q. block, stages: see `request`. splits: CTAs along each sequence.

    Raises:
        ArgumentError: a cache or a q that the program does not take. CaptureError: a kernel never launched before, in
            graph capture.
    """
    import torch

    layout = cache.layout
    if (layout.k_format, layout.v_format, layout.head_dim) != ("int4", "int4", program.HEAD_DIM):
        raise ArgumentError("cache", layout.identity, "must hold int4 tokens of head_dim 128", "use decode")
    if cache.page_size or cache.residual is not None:
        raise ArgumentError("cache", cache.page_size, "must be contiguous, without residual block", "use decode")
    if q.dim() != 4 or q.dtype != torch.float16 or q.shape[3] != program.HEAD_DIM or len(q) != len(cache.lengths):
        raise ArgumentError("q", f"{q.dtype} {list(q.shape)}", "must be float16 [B, q_len, Hq, 128]", "cast it")
    batch, new, heads, head_dim = q.shape
    if heads % cache.kv_heads or new * heads // cache.kv_heads > program.ROWS:
        raise ArgumentError("q", list(q.shape), f"must have at most {program.ROWS} rows for each kv head", "use decode")
    target = current_targets(None)[0]
    if splits is None:
        ctas = 3 if block == BLOCKS[0] else 1  # on an SM, by shared memory and registers
        room = target.sms * ctas // (batch * cache.kv_heads)
        splits = max(1, min(room, -(-cache.max_length // (2 * block)), 128))
    kernel = warm_kernel(request(target, block, stages), splits, "decode_shared", q.device)
    y = torch.empty_like(q) if out is None else out
    f32 = dict(dtype=torch.float32, device=q.device)
    partial = torch.empty(batch, cache.kv_heads, splits, program.ROWS, head_dim, **f32)
    logs, lse = torch.empty(partial.shape[:4], **f32), torch.empty(batch, new, heads, **f32)
    counters = semaphores(q.device, batch * cache.kv_heads, capturing(q.device))
    kernel(q.contiguous(), cache.pages, cache.lengths, partial, logs, counters, y, lse, LOG2E / math.sqrt(head_dim))
    return y, lse
