"""Attention of torch and of installed packages: q [B, q_len, Hq, D], k and v [B, Hkv, T, D]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.weights import missing_module


def times(
    q: Any, copies: Sequence[tuple[Any, Any]], exact: Any, budget_ms: float, suffix: str = ""
) -> dict[str, float]:
    """name and suffix -> us of each peer that is here, checked on the newest rows of the first head of the first
    sequence.

    Args:
        copies: keys and values, in turn. exact: float64 [rows, D].
    """
    from terrazzo.autotune import measure

    found: dict[str, float] = {}
    for peer in PEERS:
        if peer.missing():
            continue
        try:
            calls = [peer.load(q, *copy) for copy in copies]
            check(peer, calls[0]().reshape(q.shape)[0, -len(exact) :, 0], exact)
            found[peer.name + suffix] = round(measure.time_calls(calls, budget_ms).us, 2)
        except Exception as error:  # another package's error of any kind costs its column, not the run
            print(f"peer {peer.name}{suffix}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    return found


def check(peer: Any, y: Any, exact: Any) -> None:
    """Raise ValueError for an output [..., D] that is off the float64 one by more than a share of its largest entry:
    the peer's `tolerance`, of one that rounds its operands to fewer than 16 bits, or 0.01."""
    off = float((y.double() - exact).abs().max())
    if not off < getattr(peer, "tolerance", 0.01) * float(exact.abs().max()) + 1e-3:
        raise ValueError(f"its output is off by {off:.3g}")


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
    """FlashAttention 3 as vLLM ships it and calls it: a paged cache, the work shared out ahead of the clock.

    Args:
        dtype: of q, keys and values: "f16", "bf16" or "fp8" (e4m3; y is bfloat16 then). page: tokens of a page; vLLM's
            default is 16, and longer pages are read by TMA.
    """

    def __init__(self, dtype: str = "f16", page: int = 16) -> None:
        self.dtype, self.page = dtype, page
        self.name = f"flash_attn3_{dtype}" + (f"_page{page}" if page != 16 else "")
        self.tolerance = {"f16": 0.01, "bf16": 0.02, "fp8": 0.1}[dtype]

    def missing(self) -> str:
        return missing_module("vllm.vllm_flash_attn")

    def rounded(self, x: Any) -> Any:
        import torch

        return x.to({"f16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[self.dtype])

    def load(self, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        import torch
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

        batch, new, heads, head_dim = q.shape
        page, kv_heads, tokens = self.page, k.shape[1], k.shape[2]
        stored = [
            self.rounded(
                x.reshape(batch, kv_heads, -1, page, head_dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
            ).contiguous()
            for x in (k, v)
        ]
        i32 = dict(dtype=torch.int32, device=q.device)
        starts, lengths = torch.arange(batch + 1, **i32) * new, torch.full((batch,), tokens, **i32)
        rows = self.rounded(q.reshape(batch * new, heads, head_dim))
        shared = get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=new, max_seqlen_k=tokens, num_heads_q=heads, num_heads_kv=kv_heads,
            headdim=head_dim, cache_seqlens=lengths, qkv_dtype=rows.dtype, cu_seqlens_q=starts, page_size=page,
            causal=True,
        )  # fmt: skip
        facts = dict(
            cu_seqlens_q=starts, max_seqlen_q=new, max_seqlen_k=tokens, causal=True, seqused_k=lengths, fa_version=3,
            block_table=torch.arange(batch * tokens // page, **i32).reshape(batch, -1), scheduler_metadata=shared,
        )  # fmt: skip
        if self.dtype == "fp8":
            one = torch.ones(batch, kv_heads, device=q.device)
            facts |= dict(q_descale=one, k_descale=one, v_descale=one)
        return lambda: flash_attn_varlen_func(rows, *stored, **facts)


PEERS = (
    Sdpa("FLASH_ATTENTION"), Sdpa("CUDNN_ATTENTION"), FlashInfer(), FlashAttention3("f16"), FlashAttention3("f16", 128),
    FlashAttention3("fp8"), FlashAttention3("fp8", 128),
)  # fmt: skip
