"""The attention backend of vLLM 0.32 and 0.33: it says what bytes a token has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from terrazzo.integrations.vllm import attention
from terrazzo.integrations.vllm.names import CACHES, OWN_CACHE
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

NAMES = {
    (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8): "int8_per_token_head",
    (KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8): "int4_per_token_head",
    (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.uint8): OWN_CACHE,
}
"""What vLLM keeps of a cache dtype's name. Its mode for plug-ins, CUSTOM, is another name of a backend's mode."""


class TerrazzoBackend(attention.Backend):
    """Pages of a layer lie one behind another, heads outermost in each."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*attention.Backend.supported_kv_cache_dtypes, OWN_CACHE]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        name = NAMES.get((spec.kv_quant_mode, spec.dtype))
        if spec.state_content_bytes is not None or name is None:
            return spec
        return replace(spec, state_content_bytes=CACHES.content(name, spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Decodes and prefills are told apart by what the host knows."""
        return False
