"""Attention over our pages as a backend of vLLM: `--attention-backend CUSTOM`, what all releases share.

vLLM's classes around `engines.attention`. A backend says what is taken and how many bytes a page has, an implementation
belongs to a layer, and a builder makes the metadata of a step for layers that share pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from terrazzo.integrations.engines import attention as core
from terrazzo.integrations.engines.attention import Kind, Layer, Step
from terrazzo.integrations.engines.kernels import lacking
from terrazzo.integrations.vllm.engine import VLLM
from terrazzo.integrations.vllm.names import CACHES
from terrazzo.lowering.errors import ArgumentError
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheSpec


def speculated() -> int:
    """Tokens that the engine speculates for a sequence in a step."""
    config = getattr(get_current_vllm_config_or_none(), "speculative_config", None)
    return getattr(config, "num_speculative_tokens", None) or 0


def page_of(config: VllmConfig | None) -> int:
    """Tokens of a page as far as is known before pages are there: what the user said, or what we ask for."""
    cache = getattr(config, "cache_config", None)
    return cache.block_size if getattr(cache, "user_specified_block_size", False) else core.PAGE


class Backend(AttentionBackend):
    """What is taken, and the bytes of a page."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "float16", "bfloat16", "int8_per_token_head", "int4_per_token_head",
    ]  # fmt: skip
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(core.PAGE, default_block_size // 16 * 16)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(core.HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return VLLM.declined_here(VLLM.settings()) is None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """The reason in words, also where no kernel could be had."""
        how = VLLM.settings()
        reason = VLLM.declined_here(how)
        if reason is not None:
            return reason
        name = str(dtype).removeprefix("torch.")
        at = VLLM.target()
        reason = CACHES.refusal(kv_cache_dtype, name, head_size, block_size, sinks=has_sink, target=at)
        if reason is None and at is not None and not how.strict:
            layout = CACHES.layout_of(kv_cache_dtype or "auto", name, head_size)
            VLLM.compiling(how)  # its bundle is loaded
            reason = lacking(Kind(layout, 1, 1, block_size or core.PAGE, name, sinks=has_sink).requests(at))
        return reason


class Implementation(AttentionImpl):
    """One layer.

    Raises:
        ArgumentError: ALiBi, attention that is not causal, or a further option that is set.
    """

    supports_dcp: bool = False
    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **more: object,
    ) -> None:
        remedy = "leave out --attention-backend CUSTOM"
        for name, value in more.items():
            if value not in (None, False, -1):
                raise ArgumentError(name, value, "is nothing that kernels know", remedy)
        if alibi_slopes is not None:
            raise ArgumentError("alibi_slopes", len(alibi_slopes), "kernels have no ALiBi", remedy)
        if attn_type != AttentionType.DECODER:
            raise ArgumentError("attn_type", str(attn_type), "must be causal attention of a decoder", remedy)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.kv_cache_dtype, self.attn_type = sliding_window, kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name, self.sinks = kv_sharing_target_layer_name, sinks
        config, dtype = get_current_vllm_config_or_none(), str(torch.get_default_dtype()).removeprefix("torch.")
        self.how = VLLM.settings()
        self.kind = Kind(
            CACHES.layout_of(kv_cache_dtype, dtype, head_size), num_heads, self.num_kv_heads, page_of(config), dtype,
            window=sliding_window or 0, softcap=float(logits_soft_cap or 0.0), sinks=sinks is not None,
            most_length=config.model_config.max_model_len, most_rows=min(1 + speculated(), core.MOST_ROWS),
        )  # fmt: skip
        self.layer = Layer(self.kind, self.scale)
        if (at := VLLM.target()) is not None:
            VLLM.compiling(self.how).want(self.kind.requests(at))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks are loaded only now."""
        if self.sinks is not None:
            self.layer.sinks = self.sinks.detach().float().contiguous()

    def paged(self, page: int) -> Kind:
        """The layer's kind on pages of the size that it was given."""
        if page != self.kind.page:
            self.kind = replace(self.kind, page=page)
            self.layer = Layer(self.kind, self.scale, self.layer.sinks)
        return self.kind

    @property
    def _k_scale_cache(self) -> None:
        """What vLLM sets to None once it has measured memory with a cache of its own: then no page may be held."""
        return None

    @_k_scale_cache.setter
    def _k_scale_cache(self, nothing: None) -> None:
        self.layer.forget()

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantize new tokens into their slots; a run without a cache measures memory alone."""
        if kv_cache.numel():
            self.layer.write(kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [N, Hq, D] into output [N, Hq, D].

        Raises:
            ArgumentError: an output that is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ArgumentError("output_scale", "given", "outputs are not quantized", "switch off fuse_attn_quant")
        if attn_metadata is None:  # memory is measured
            return output.fill_(0)
        self.layer.attend(attn_metadata, query, kv_cache, output)
        return output


class Builder(AttentionMetadataBuilder[Step]):
    """Metadata of layers whose pages one table names; makes their kernels ready when the engine makes it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Graphs of speculated rows, too, as far as kernels decode that many."""
        config = vllm_config.speculative_config
        rows = 1 + (getattr(config, "num_speculative_tokens", None) or 0)
        return cls._cudagraph_support if rows <= core.MOST_ROWS else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.reorder_batch_threshold = min(self.reorder_batch_threshold or 1, core.MOST_ROWS)
        layers = vllm_config.compilation_config.static_forward_context
        kinds = {layers[name].impl.paged(kv_cache_spec.block_size): None for name in layer_names}
        self.kind = next(iter(kinds))
        if device.type == "cuda":
            for kind in kinds:
                how = layers[layer_names[0]].impl.how
                VLLM.hold_attention(kind, how, vllm_config.scheduler_config.max_num_seqs, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        found = common_attn_metadata
        return core.step_of(
            self.kind, found.query_start_loc, found.query_start_loc_cpu.tolist(), found.seq_lens,
            found.block_table_tensor, found.max_seq_len, found.num_actual_tokens,
        )  # fmt: skip
