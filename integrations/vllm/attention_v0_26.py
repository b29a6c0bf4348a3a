"""The attention backend of vLLM 0.26 and 0.27: it says what shape pages have."""

from __future__ import annotations

from terrazzo.integrations.vllm import attention
from terrazzo.integrations.vllm.names import CACHES


class TerrazzoBackend(attention.Backend):
    """Heads outermost in a page. No order of strides is stated: pages lie as their shape says."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, CACHES.content(cache_dtype_str, head_size)
