"""Every name of vLLM that the plug-in uses, with its arguments, held against the sources of two releases.

`TERRAZZO_TEST_VLLM_SOURCES` names a folder with wheels of vLLM, or with what is unpacked of them:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d FOLDER vllm==0.26.0 (and 0.33.0)
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from terrazzo.integrations.engines import attention as core
from terrazzo.integrations.vllm.names import CACHES
from terrazzo.ops.attention.cache.cache import page_words

VARIABLE = "TERRAZZO_TEST_VLLM_SOURCES"
LAYERS, LINEAR = "vllm/model_executor/layers", "vllm/model_executor/kernels/linear"
MOE = f"{LAYERS}/fused_moe"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
BACKEND, SPECS = "vllm/v1/attention/backend.py", "vllm/v1/kv_cache_interface.py"
USED: dict[str, dict[str, str]] = {
    "vllm/config/vllm.py": {
        "get_current_vllm_config_or_none": "",
        "VllmConfig": "additional_config cache_config compilation_config model_config scheduler_config "
        "speculative_config",
    },
    "vllm/config/cache.py": {"CacheConfig": "block_size user_specified_block_size"},
    "vllm/config/compilation.py": {"CompilationConfig": "cudagraph_capture_sizes static_forward_context"},
    "vllm/config/model.py": {"ModelConfig": "max_model_len"},
    "vllm/config/scheduler.py": {"SchedulerConfig": "max_num_batched_tokens max_num_seqs"},
    "vllm/config/speculative.py": {"SpeculativeConfig": "num_speculative_tokens"},
    BACKEND: {
        "AttentionBackend": "supported_dtypes supported_kv_cache_dtypes forward_includes_kv_cache_update get_name "
        "get_impl_cls get_builder_cls get_supported_kernel_block_sizes get_preferred_block_size "
        "get_supported_head_sizes supports_sink supports_sliding_window supports_compute_capability "
        "supports_combination",
        "AttentionBackend.get_preferred_block_size": "default_block_size",
        "AttentionBackend.supports_combination": "head_size dtype kv_cache_dtype block_size use_mla has_sink "
        "use_sparse use_mm_prefix device_capability",
        "AttentionImplBase": "supports_dcp can_return_lse_for_decode process_weights_after_loading",
        "AttentionImplBase.process_weights_after_loading": "act_dtype",
        "AttentionImpl.__init__": "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
        "logits_soft_cap attn_type kv_sharing_target_layer_name",
        "AttentionImpl.forward": "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        "AttentionMetadataBuilder": "_cudagraph_support reorder_batch_threshold",
        "AttentionMetadataBuilder.__init__": "kv_cache_spec layer_names vllm_config device",
        "AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
        "AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
        "AttentionMetadataBuilder._init_reorder_batch_threshold": "reorder_batch_threshold supports_spec_as_decode",
        "AttentionCGSupport": "UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE",
        "AttentionType": "DECODER",
        "CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens block_table_tensor max_seq_len "
        "num_actual_tokens",
        "MultipleOf": "base",
    },
    "vllm/v1/attention/backends/registry.py": {
        "AttentionBackendEnum": "CUSTOM is_overridden get_path",
        "register_backend": "backend class_path",
    },
    f"{LAYERS}/attention/attention.py": {"unified_kv_cache_update": "key value layer_name"},
    f"{LINEAR}/__init__.py": {
        "_POSSIBLE_MXFP4_KERNELS": "",
        "_POSSIBLE_WFP8A16_KERNELS": "",
        "init_mxfp4_linear_kernel": "",
        "init_wfp8_a16_linear_kernel": "",
        "choose_mp_linear_kernel": "config compute_capability",
        "_POSSIBLE_KERNELS": "",
    },
    f"{LINEAR}/mixed_precision/MPLinearKernel.py": {
        "MPLinearLayerConfig": "full_weight_shape partition_weight_shape weight_type act_type group_size zero_points "
        "out_type",
        "MPLinearKernel": "get_min_capability can_implement process_weights_after_loading apply_weights",
        "MPLinearKernel.__init__": "c w_q_param_name w_s_param_name w_zp_param_name",
        "MPLinearKernel.apply_weights": "layer x bias",
        "MPLinearKernel.can_implement": "c",
        "MPLinearKernel.process_weights_after_loading": "layer",
    },
    f"{LINEAR}/mxfp4/base.py": {
        "MxFp4LinearKernel": "is_supported can_implement process_weights_after_loading apply_weights",
        "MxFp4LinearKernel.apply_weights": "layer x bias",
    },
    f"{LINEAR}/scaled_mm/ScaledMMLinearKernel.py": {
        "ScaledMMLinearKernel": "is_supported can_implement process_weights_after_loading apply_weights",
        "ScaledMMLinearKernel.apply_weights": "layer x bias",
        "FP8ScaledMMLinearKernel": "apply_scaled_mm",
    },
    f"{LAYERS}/quantization/compressed_tensors/schemes/compressed_tensors_w8a16_fp8.py": {
        "CompressedTensorsW8A16Fp8": "orig_dtype process_weights_after_loading",
    },
    f"{LAYERS}/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py": {
        "CompressedTensorsW4A4Mxfp4": "params_dtype process_weights_after_loading",
    },
    "vllm/platforms/interface.py": {
        "PlatformEnum": "CUDA CPU",
        "Platform": "device_name is_cuda is_cpu",
    },
    f"{LAYERS}/quantization/__init__.py": {
        "get_quantization_config": "quantization",
        "register_quantization_config": "quantization",
        "QUANTIZATION_METHODS": "",
    },
    f"{LAYERS}/quantization/auto_awq.py": {
        "AutoAWQConfig": "get_quant_method",
        "AutoAWQConfig.__init__": "weight_bits group_size zero_point modules_to_not_convert",
        "AutoAWQConfig.get_quant_method": "layer prefix",
    },
    f"{LAYERS}/quantization/auto_gptq.py": {
        "AutoGPTQConfig.__init__": "weight_bits group_size desc_act is_sym dynamic",
        "AutoGPTQConfig.get_quant_method": "layer prefix",
    },
    f"{LAYERS}/quantization/compressed_tensors/compressed_tensors.py": {
        "CompressedTensorsConfig.__init__": "quant_format",
        "CompressedTensorsConfig.get_quant_method": "layer prefix",
        "CompressedTensorsConfig.get_scheme_dict": "layer layer_name",
        "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map": "",
        "CompressedTensorsConfig._is_fp8_w4a8": "weight_quant input_quant",
    },
    f"{MOE}/moe_permute_unpermute.py": {
        "moe_permute": "hidden_states a1q_scale topk_ids n_expert",
        "moe_unpermute": "out permuted_hidden_states topk_weights inv_permuted_idx expert_first_token_offset",
        "moe_permute_unpermute_supported": "",
    },
    f"{MOE}/fused_moe_method_base.py": {
        "FusedMoEMethodBase": "create_weights get_fused_moe_quant_config apply",
        "FusedMoEMethodBase.__init__": "moe",
        "FusedMoEMethodBase.apply": "layer x topk_weights topk_ids shared_experts shared_experts_input",
        "FusedMoEMethodBase.create_weights": "layer num_experts hidden_size intermediate_size_per_partition "
        "params_dtype",
    },
    f"{MOE}/routed_experts.py": {
        "RoutedExperts.__init__": "moe_config quant_config apply_router_weight_on_input",
        "FusedMoeWeightScaleSupported": "CHANNEL GROUP",
    },
    f"{MOE}/config.py": {
        "FusedMoEConfig": "hidden_dim intermediate_size intermediate_size_per_partition num_local_experts in_dtype "
        "experts_per_token has_bias is_lora_enabled activation moe_parallel_config swiglu_limit swiglu_alpha "
        "swiglu_beta",
        "FusedMoEParallelConfig": "use_ep dp_size tp_size",
    },
    f"{MOE}/activation.py": {"MoEActivation": "SILU GELU_TANH"},
    "vllm/model_executor/utils.py": {"set_weight_attrs": "weight weight_attrs"},
    f"{LAYERS}/quantization/compressed_tensors/schemes/compressed_tensors_wNa8.py": {
        "CompressedTensorsWNA8Int._build_input_quant_config": "",
    },
    RUNNER: {"GPUModelRunner": ""},
    "vllm/plugins/__init__.py": {"load_general_plugins": ""},
}
"""File -> name of a function or class (or "Class.method") -> arguments, or fields and methods, that must be there."""
MODES = {"KVQuantMode": "INT8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"}
OF_RELEASE: dict[str, dict[str, dict[str, str]]] = {
    "0.26.0": {
        BACKEND: {
            "AttentionBackend.get_kv_cache_shape": "num_blocks block_size num_kv_heads head_size cache_dtype_str"
        },
        SPECS: MODES | {"AttentionSpec": "unpadded_page_size_bytes real_page_size_bytes"},
    },
    "0.33.0": {
        BACKEND: {
            "AttentionBackend": "supported_kv_cache_layouts supports_device_cpu_query_lens_mismatch",
            "AttentionBackend.customize_spec": "spec",
            "AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
        },
        SPECS: MODES | {"AttentionSpec": "kv_quant_mode dtype head_size state_content_bytes unpadded_page_size_bytes"},
        "vllm/v1/kv_cache_layout.py": {"KVCacheLayout": "LBHNC"},
        "vllm/config/cache.py": {
            "register_kv_cache_dtype": "name", "KV_CACHE_DTYPES": "", "KVCacheDTypeHandler": "torch_dtype quant_mode",
        },
    },
}  # fmt: skip
"""The same of what releases differ in."""
RELEASES = tuple(OF_RELEASE)


def sources() -> Iterator[tuple[str, dict[str, str]]]:
    """(release, file -> text) of what the folder has."""
    folder = Path(os.environ[VARIABLE])
    for release in RELEASES:
        for wheel in folder.glob(f"**/vllm-{release}-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                yield release, {name: archive.read(name).decode() for name in USED | OF_RELEASE[release]}
                break
        else:
            for info in folder.glob(f"**/vllm-{release}.dist-info"):
                yield release, {name: (info.parent / name).read_text() for name in USED | OF_RELEASE[release]}
                break


def named(tree: ast.Module, name: str) -> ast.AST | None:
    """What a module, or a class of it, defines under a name."""
    body: list[ast.stmt] = tree.body
    found: ast.AST | None = None
    for part in name.split("."):
        found = None
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if getattr(node, "name", None) == part or any(getattr(t, "id", None) == part for t in targets):
                found = node  # the last one counts: overloads stand before what they describe
        body = getattr(found, "body", [])
    return found


def members(node: ast.AST) -> set[str]:
    """Arguments of a function; fields, methods, and attributes that are set on self, of a class."""
    if isinstance(node, ast.FunctionDef):
        return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.AnnAssign | ast.Assign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            found |= {getattr(target, "id", getattr(target, "attr", "")) for target in targets}
        elif isinstance(inner, ast.FunctionDef):
            found.add(inner.name)
    return found


def lacking(texts: dict[str, str], used: dict[str, dict[str, str]] = USED) -> list[str]:
    """What of `used` some sources do not have."""
    found = []
    for file, names in used.items():
        tree = ast.parse(texts[file])
        for name, wanted in names.items():
            node = named(tree, name)
            if node is None:
                found.append(f"{file}: {name}")
                continue
            found += [f"{file}: {name} has no {each}" for each in set(wanted.split()) - members(node)]
    return found


def test_what_is_lacking_is_found():
    tree = ast.parse(
        "X: int = 1\nclass A:\n    b: int\n    def __init__(self, c): self.d = c\n    def e(self, *, f): 1"
    )
    assert members(named(tree, "A")) >= {"b", "d", "e"} and members(named(tree, "A.e")) == {"self", "f"}
    assert named(tree, "X") is not None and named(tree, "A.g") is None and named(tree, "B") is None
    assert len(lacking(dict.fromkeys(USED, ""))) == sum(map(len, USED.values()))


@pytest.mark.slow
@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder with vLLM's wheels (see CONTRIBUTING.md)"
)
def test_both_releases_have_every_name_that_is_used():
    found = dict(sources())
    assert set(found) == set(RELEASES), f"{os.environ[VARIABLE]} has {sorted(found)}"
    for release, texts in found.items():
        assert lacking(texts) == [], release
        assert lacking(texts, OF_RELEASE[release]) == [], release
        assert "layer.impl._k_scale_cache = None" in texts[RUNNER], "who says that a cache is gone?"


def value(texts: dict[str, str], file: str, name: str, it: Any, **known: Any) -> Any:
    """What a property of a class in the sources returns for `it`."""
    node = named(ast.parse(texts[file]), name)
    node.decorator_list = []
    held: dict[str, Any] = dict(known)
    exec(compile(ast.Module([node], []), file, "exec"), held)
    return held[node.name](it)


@pytest.mark.slow
@pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder with vLLM's wheels (see CONTRIBUTING.md)"
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cache", ["int8_per_token_head", "int4_per_token_head", "float16"])
def test_pages_have_the_bytes_that_the_engine_counts(dim, cache):
    layout = CACHES.layout_of(cache, "float16", dim)
    quantized, page, heads = cache != "float16", 64, 8
    for release, texts in sources():
        mode = SimpleNamespace(is_nvfp4=False, is_per_token_head=quantized)
        it = SimpleNamespace(kv_quant_mode=mode, block_size=page, num_kv_heads=heads, head_size=dim, dtype=cache)
        known = dict(get_dtype_size=lambda dtype: {"float16": 2, "f32": 4}.get(dtype, 1))
        known["torch"] = SimpleNamespace(float32="f32")
        known["KVQuantMode"] = SimpleNamespace(INT4_PER_TOKEN_HEAD=mode if cache.startswith("int4") else None)
        if release == "0.26.0":
            it.real_page_size_bytes = value(texts, SPECS, "AttentionSpec.real_page_size_bytes", it, **known)
        else:
            it.state_content_bytes = core.token_bytes(layout) if quantized else None
            it.head_size_v, it.num_heads, it.num_states = dim, heads, page
            it.state_content_size_bytes = value(texts, SPECS, "AttentionSpec.state_content_size_bytes", it, **known)
        counted = value(texts, SPECS, "AttentionSpec.unpadded_page_size_bytes", it, **known)
        assert counted == heads * page_words(layout, page) * 4, release
