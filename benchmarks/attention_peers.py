"""f16 decode attention of torch and of installed packages: q [B, q_len, Hq, D], k and v [B, Hkv, T, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import missing_module


class Sdpa:
    """torch's scaled_dot_product_attention with one of its backends; the new tokens are the newest of the cache."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"sdpa_{backend.split('_')[0].lower()}_f16"

    def missing(self) -> str:
        return missing_module("torch.nn.attention")

    def load(self, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        new, tokens = q.shape[1], k.shape[2]
        rows = q.transpose(1, 2)
        mask = causal_lower_right(new, tokens) if new > 1 else None
        backend = getattr(SDPBackend, self.backend)

        def call() -> Any:
            with sdpa_kernel(backend):
                y = torch.nn.functional.scaled_dot_product_attention(
                    rows, k, v, attn_mask=mask, enable_gqa=q.shape[2] != k.shape[1]
                )
            return y.transpose(1, 2)

        return call


class FlashInfer:
    """Batch decode with paged f16 caches through tensor cores; q_len 1."""

    name = "flashinfer_f16"

    def missing(self) -> str:
        return missing_module("flashinfer")

    def load(self, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import flashinfer
        import torch

        batch, new, heads, head_dim = q.shape
        if new > 1:
            raise ValueError("decode takes one new token")
        page, kv_heads, tokens = 64, k.shape[1], k.shape[2]
        pages = batch * tokens // page
        stored = torch.stack(
            [x.reshape(batch, kv_heads, -1, page, head_dim).transpose(1, 2).flatten(0, 1) for x in (k, v)], 1
        ).contiguous()  # [pages, 2, Hkv, page, D]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device=q.device), "HND", use_tensor_cores=True
        )
        i32 = dict(dtype=torch.int32, device=q.device)
        wrapper.plan(
            torch.arange(batch + 1, **i32) * (tokens // page), torch.arange(pages, **i32),
            torch.full((batch,), page, **i32), heads, kv_heads, head_dim, page, q_data_type=q.dtype,
        )  # fmt: skip
        rows = q[:, 0].contiguous()
        return lambda: wrapper.run(rows, stored)


class FlashAttention3:
    """FlashAttention 3 as vLLM ships it, over a paged cache."""

    name = "flash_attn3_f16"

    def missing(self) -> str:
        return missing_module("vllm.vllm_flash_attn")

    def load(self, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        batch, new, heads, head_dim = q.shape
        page, kv_heads, tokens = 16, k.shape[1], k.shape[2]
        stored = [
            x.reshape(batch, kv_heads, -1, page, head_dim).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()
            for x in (k, v)
        ]
        i32 = dict(dtype=torch.int32, device=q.device)
        facts = dict(
            cu_seqlens_q=torch.arange(batch + 1, **i32) * new, max_seqlen_q=new, max_seqlen_k=tokens, causal=True,
            seqused_k=torch.full((batch,), tokens, **i32), fa_version=3,
            block_table=torch.arange(batch * tokens // page, **i32).reshape(batch, -1),
        )  # fmt: skip
        rows = q.reshape(batch * new, heads, head_dim)
        return lambda: flash_attn_varlen_func(rows, *stored, **facts)


PEERS = (Sdpa("FLASH_ATTENTION"), Sdpa("CUDNN_ATTENTION"), FlashInfer(), FlashAttention3())
