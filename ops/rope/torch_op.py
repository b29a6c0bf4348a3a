"""`torch.ops.terrazzo.apply_rope`: the operator as torch.compile, export and fake tensors see it."""

from __future__ import annotations

import torch
from terrazzo.ops import row_calls
from terrazzo.ops.rope import op
from terrazzo.ops.rope.reference import apply_rope as on_cpu

_SCHEMA = (
    "(Tensor qkv, Tensor cos, Tensor sin, Tensor? positions, Tensor? q_weight, Tensor? k_weight, SymInt heads, "
    "SymInt kv_heads, SymInt head_dim, SymInt rotary_dim, str layout, str norm, float eps, str numerics) "
    "-> (Tensor, Tensor)"
)
__all__ = ["call", "on_cpu"]


def call(given: op.Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator as one opaque node of a graph."""
    return torch.ops.terrazzo.apply_rope(*given[:-1])


@torch.library.custom_op("terrazzo::apply_rope", mutates_args=(), schema=_SCHEMA)
def apply_rope(*given):
    """q and k; on a CPU, by the reference."""
    made = op.Call(*given)
    q, k = row_calls.launched(op, made) if made.qkv.is_cuda else on_cpu(made)
    return q.contiguous(), k.contiguous()


@apply_rope.register_fake
def _(*given):
    made = op.Call(*given)
    m = made.qkv.shape[0]
    sizes = ((m, made.heads, made.head_dim), (m, made.kv_heads, made.head_dim))
    return made.qkv.new_empty(sizes[0]), made.qkv.new_empty(sizes[1])
