"""`Attention` over a low-bit KV cache: one product for q, k and v, rotary positions, append, decode or prefill."""

from __future__ import annotations

from typing import Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import cpu, cpu_attention, glue, products
from terrazzo.nn.joined import QKVLinear
from terrazzo.nn.linear import Linear
from terrazzo.nn.parallel import TensorParallel
from terrazzo.ops import rope, weights
from terrazzo.ops.attention import torch_op
from terrazzo.ops.attention.decoding.reference import Options
from terrazzo.ops.attention.kv_cache import Batch
from terrazzo.ops.attention.writing import reference_writing
from torch import nn


class Attention(nn.Module):
    """Attention of the new tokens of some sequences over their cache, which stores them on the way.

    Args:
        qkv: joined projection, sizes (heads D, kv_heads D, kv_heads D). out: output projection.
        heads, kv_heads, head_dim: of the layer; head_dim 64, 128 or 256. layer: its number in the cache.
        norms: [2, D] weights of RMSNorm over each head of q and k, or None. norm_eps: theirs.
        scale: softmax scale, None for 1 / sqrt(D). softcap, window, sinks: see `ops.attention.decode`.
        ranks: those that share the heads, over which the result is summed; None for one.

    Raises:
        ArgumentError: sizes that do not fit.
    """

    def __init__(
        self,
        qkv: QKVLinear,
        out: Linear,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layer: int = 0,
        norms: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        ranks: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            weights.check_count(name, count, "pass the model's own", most=1 << 20)
        wanted = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        seen = getattr(qkv, "sizes", type(qkv).__name__)
        if seen != wanted:
            raise ArgumentError("qkv", seen, f"must have the sizes {wanted}", "QKVLinear.join(q, k, v)")
        seen = getattr(out, "in_features", type(out).__name__)
        if seen != wanted[0]:
            raise ArgumentError("out", seen, f"must take {wanted[0]} features", "pass o_proj")
        for name, given, shape in (("norms", norms, [2, head_dim]), ("sinks", sinks, [heads])):
            if given is not None and (not torch.is_tensor(given) or list(given.shape) != shape):
                constraint = f"must be a tensor {shape}"
                raise ArgumentError(name, weights.described(given), constraint, "pass the checkpoint's")
        self.qkv_proj, self.o_proj = qkv, out
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        self.register_buffer("norms", norms)
        self.register_buffer("sinks", sinks)
        self.norm_eps, self.scale, self.softcap, self.window = norm_eps, scale, softcap, window
        self.ranks = ranks

    def forward(
        self, x: products.Activations, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """[T, hidden] of the T new tokens of a batch's sequences, one sequence after another.

        Args:
            x: [T, hidden], or quantized for `qkv_proj`. cos, sin: float [T, D] of the tokens' positions.
            batch: of `KVCache.extend`, for T new tokens. Where each sequence has one, they are stored and decoded;
                else they attend to themselves as they are and to what the cache holds, and are stored then.
            out_dtype: float16 or bfloat16, x's before it was quantized.
        """
        qkv = self.qkv_proj.product(x, out_dtype)
        options = dict(scale=self.scale, softcap=self.softcap, window=self.window, sinks=self.sinks)
        if batch.new == [1] * len(qkv):
            y = decode(batch, self.append(qkv, cos, sin, batch), self.layer, **options)
        else:
            q, k = self.rotate(qkv, cos, sin)
            v = qkv[:, (self.heads + self.kv_heads) * self.head_dim :]
            v = v.unflatten(-1, (self.kv_heads, self.head_dim)).contiguous()
            y = prefill(batch, q, k, v, self.layer, **options)
            store(batch, k, v, self.layer)
        y = self.o_proj(y.view(len(qkv), -1))
        return y if self.ranks is None else self.ranks.all_reduce(y)

    def append(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Turn and store a token of each sequence; its query.

        Args:
            qkv: float16 or bfloat16 [B, (heads + 2 kv_heads) D], joined.
            cos, sin: float32 [B, D/2 or more], its angles.
            batch: whose caches take keys and values.

        Returns:
            q [B, 1, heads, D], of qkv's dtype.
        """
        norms = self.norms
        if (
            type(qkv) is torch.Tensor and qkv.is_cuda and not torch.compiler.is_compiling()
            and (norms is None or norms.dtype is qkv.dtype) and cos.dtype is torch.float32 and cos.is_contiguous()
            and products.in_rows(qkv) and not batch.slides
        ):  # fmt: skip
            facts = {} if norms is None else self._norms()
            return batch.rope_append(qkv, cos, sin, self.layer, heads=self.heads, **facts)
        q, k = self.rotate(qkv, cos, sin)
        v = qkv[:, (self.heads + self.kv_heads) * self.head_dim :].unflatten(-1, (self.kv_heads, self.head_dim))
        append(batch, k.unsqueeze(1), v.unsqueeze(1), self.layer)
        return q.unsqueeze(1)

    def rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm q and k where the layer does so, and turn them.

        Args:
            qkv: float16 or bfloat16 [T, (heads + 2 kv_heads) D], joined.
            cos, sin: float32 [T, D/2 or more], its angles.

        Returns:
            q [T, heads, D] and k [T, kv_heads, D], of qkv's dtype.
        """
        if not products.in_rows(qkv) or (self.norms is not None and self.norms.dtype != qkv.dtype):
            return glue.rotate(qkv, cos, sin, self.heads, self.kv_heads, self.norms, self.norm_eps)
        facts = {} if self.norms is None else self._norms()
        sizes = dict(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        return rope.apply_rope(qkv, cos, sin, **sizes, **facts)

    def _norms(self) -> dict[str, Any]:
        """The norms of heads as operators take them."""
        return dict(norm="llama", q_weight=self.norms[0], k_weight=self.norms[1], eps=self.norm_eps)

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}/{self.kv_heads}", f"head_dim={self.head_dim}", f"layer={self.layer}"]
        return ", ".join(parts + [f"{n}={getattr(self, n)}" for n in ("softcap", "window") if getattr(self, n)])


def _on_kernels(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or type(x) is not torch.Tensor


def append(batch: Batch, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
    """`Batch.append`, on a CPU by the reference."""
    if k.is_cuda or _on_kernels(k):
        batch.append(k, v, layer)
    else:
        reference_writing.append(batch.layer(layer), k, v)


def store(batch: Batch, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
    """`Batch.store`, on a CPU by the reference."""
    if k.is_cuda or _on_kernels(k):
        batch.store(k, v, layer)
    else:
        reference_writing.store(batch.layer(layer), k, v, batch.starts)


def decode(
    batch: Batch,
    q: torch.Tensor,
    layer: int,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Batch.decode`, on a CPU in float32."""
    if q.is_cuda or _on_kernels(q):
        return batch.decode(q, layer, scale=scale, softcap=softcap, window=window, sinks=sinks)
    if cpu.asked_for_oracle():
        return torch_op.call("decode", (q,), batch._view(layer), scale, softcap, window, sinks)[0]
    return cpu_attention.decode(q, batch._view(layer), Options(scale, softcap, window, sinks))


def prefill(
    batch: Batch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Batch.prefill` with the new tokens as they are, on a CPU in float32."""
    if q.is_cuda or _on_kernels(q):
        return batch.prefill(q, layer, k=k, v=v, scale=scale, softcap=softcap, window=window, sinks=sinks)
    most, options = max(batch.new, default=0), (scale, softcap, window, sinks)
    if not cpu.asked_for_oracle():
        return cpu_attention.prefill(q, batch._view(layer), batch.starts.tolist(), k, v, Options(*options))
    return torch_op.call("prefill", (q,), batch._view(layer), batch.starts, most, k, v, *options)[0]
