"""`torch.ops.terrazzo.apply_rope`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

import torch


@torch.library.custom_op("terrazzo::apply_rope", mutates_args=())
def apply_rope(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, heads: int, kv_heads: int, head_dim: int,
    rotary_dim: int, layout: str, norm: str, eps: float, numerics: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q and k; on a CPU, by the reference."""
    from terrazzo.ops.rope import op, reference

    run = op.run if qkv.is_cuda else reference.apply_rope
    tensors = (qkv, cos, sin, positions, q_weight, k_weight)
    q, k = run(*tensors, heads, kv_heads, head_dim, rotary_dim, layout, norm, eps, numerics)
    return q.contiguous(), k.contiguous()


@apply_rope.register_fake
def _(qkv, cos, sin, positions, q_weight, k_weight, heads, kv_heads, head_dim, rotary_dim, *rest):
    m = qkv.shape[0]
    return qkv.new_empty((m, heads, head_dim)), qkv.new_empty((m, kv_heads, head_dim))
