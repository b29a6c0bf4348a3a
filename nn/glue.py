"""What stands between a decoder's products: norms, residual sums, rotary positions, gates.

Each function is plain torch in float32, rounded once. On a GPU each is compiled to one kernel by torch.compile, unless
`fuse(False)` says otherwise; inside of a compiled caller it is part of the caller's graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_fusing = True


def fuse(on: bool) -> None:
    """Whether glue on a GPU is compiled (the default): seconds once for each function, then one kernel each."""
    global _fusing
    _fusing = bool(on)


def _fused(function: Callable) -> Callable:
    """`function`, compiled where its first argument lies on a GPU and nobody else compiles."""
    compiled: Callable | None = None

    @functools.wraps(function)
    def call(x: torch.Tensor, *rest: Any) -> Any:
        nonlocal compiled
        if not _fusing or not x.is_cuda or torch.compiler.is_compiling() or type(x) is not torch.Tensor:
            return function(x, *rest)
        if compiled is None:
            compiled = torch.compile(function)
        return compiled(x, *rest)

    return call


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32: x / sqrt(mean(x^2) + eps) * weight, along the last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@_fused
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    return _normed(x, weight, eps).to(x.dtype)


@_fused
def add_norm(
    delta: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm of the sum, the sum h + delta), the sum rounded to h's dtype before."""
    h = h + delta
    return _normed(h, weight, eps).to(h.dtype), h


@_fused
def norm_add(delta: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """h + rms_norm of delta, rounded once."""
    return (h.float() + _normed(delta, weight, eps)).to(h.dtype)


@_fused
def norm_add_norm(
    delta: torch.Tensor, h: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm by `weight` of the sum, the sum), the sum h + rms_norm by `post` of delta."""
    h = (h.float() + _normed(delta, post, eps)).to(h.dtype)
    return _normed(h, weight, eps).to(h.dtype), h


@_fused
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of joined [..., 2 N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


@_fused
def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of joined [..., 2 N], gelu by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate_up.dtype)


@_fused
def swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate sigmoid(1.702 gate) (up + 1) of joined [..., 2 N], gate at most 7, up within it."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(gate_up.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul, "swish": silu_mul, "gelu_pytorch_tanh": gelu_mul, "gelu_tanh": gelu_mul,
    "swiglu_oai": swiglu_oai,
}  # fmt: skip
"""Name of an activation, as transformers' configs have it -> the gated form."""
OPERATOR_NAMES = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh",
    "swiglu_oai": "swiglu_oai",
}  # fmt: skip
"""The same -> what `ops.activation` calls it."""


@_fused
def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    norms: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, heads, D] and k [T, kv_heads, D], contiguous, of joined qkv [T, (heads + 2 kv_heads) D], turned.

    Args:
        cos, sin: float [T, D], both halves alike (rotation of pairs (d, d + D / 2)).
        norms: [2, D] weights of RMSNorm over each head of q and of k, before the rotation; or None. eps: theirs.

    All rows of q come before all rows of k in one tensor, so that one kernel makes both.
    """
    tokens, dim = qkv.shape[0], cos.shape[-1]
    rows = qkv.view(tokens * (heads + 2 * kv_heads), dim)
    at = torch.arange(tokens * (heads + kv_heads), device=qkv.device)
    of_q, rest = at < tokens * heads, at - tokens * heads
    token = torch.where(of_q, at // heads, rest // kv_heads)
    head = torch.where(of_q, at % heads, heads + rest % kv_heads)
    source = token * (heads + 2 * kv_heads) + head
    d = torch.arange(dim, device=qkv.device)
    pair = (d + dim // 2) % dim  # gathered: a concatenation would be a kernel of its own
    x, turned = rows[source].float(), rows[source[:, None], pair].float()
    if norms is not None:
        gain = torch.where(of_q[:, None], norms[0].float(), norms[1].float())
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x, turned = x * factor * gain, turned * factor * gain[:, pair]
    turned = torch.where(d < dim // 2, -turned, turned)
    out = (x * cos[token].float() + turned * sin[token].float()).to(qkv.dtype)
    first = out[: tokens * heads].view(tokens, heads, dim)
    return first, out[tokens * heads :].view(tokens, kv_heads, dim)
