"""What each field of a `quantization_config` does to a layer's arithmetic.

A field is read (`Config` obeys it), neutral (it records how the weights were found), or it changes what a layer means
in a way that no kernel here follows: then the layers that it touches are skipped with the reason. A field that nobody
here knows is refused unless it says nothing: null, false, zero or empty.

Sources: the writers of AutoAWQ 0.2.7, AutoGPTQ 0.7, GPTQModel 7, optimum and transformers 5 (GPTQConfig, AwqConfig),
llm-compressor 0.14 with compressed-tensors 0.20, modelopt, auto-round 0.16, omniserve, and published config.json files.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ops.checkpoints.patterns import matches

_AUTO_ROUND = """
act_data_type act_dynamic act_group_size act_sym amp autoround_version batch_size block_name_to_quantize dataset
enable_alg_ext enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input enable_torch_compile
gradient_accumulate_steps iters low_cpu_mem_usage low_gpu_mem_usage lr lr_scheduler meta minmax_lr model_free momentum
nblocks not_use_best_mse nsamples provider quant_block_list quant_lm_head sampler scale_dtype seed seqlen
static_attention_dtype static_attention_granularity static_kv_dtype static_kv_granularity supported_types
to_quant_block_names use_quant_input
"""
"""Written by auto-round into its own format and into those of others. `act_bits` says whether act_* hold."""
_GPTQ = """
act_group_aware auto_forward_data_parallel buffered_fwd cache_block_outputs calibration_data_device damp_auto_increment
damp_percent dense_vram_strategy dense_vram_strategy_devices device disable_exllama exllama_config fail_safe failsafe
fallback foem format_version gc_mode gptaq gptaq_alpha gptaq_memory_device hessian hessian_chunk_size hyb_act lm_head
max_input_length mock_quantization model_file_base_name model_name_or_path model_seqlen moe moe_vram_strategy
moe_vram_strategy_devices module_name_preceding_first_block modules_in_block_to_quantize mse offload_to_disk
offload_to_disk_path pack_impl pad_token_id shard_strategy static_groups tokenizer true_sequential use_cuda_fp16
use_exllama use_marlin v2 v2_alpha v2_memory_device vram_strategy wait_for_submodule_finalizers
weight_only_quant_threads
"""
_AWQ = "do_fuse fuse_max_seq_len modules_to_fuse ignore modules_to_not_convert sym duo_scaling n_grid apply_clip"
_COMPRESSED = """
compression_ratio dequantize global_compression_ratio kv_cache_scheme moe_sparsity_config quantization_status
producer run_compressed use_optimized_inference version
"""
_FP8 = """
activation_scheme activation_scale_ub fmt ignored_layers modules_to_not_convert scale_fmt weight_block_size
"""
_READ = "quant_method method bits w_bit wbits weight_bits group_size q_group_size"

NEUTRAL: dict[str, frozenset[str]] = {
    "awq": frozenset(f"{_AUTO_ROUND} {_GPTQ} {_AWQ}".split()),
    "gptq": frozenset(f"{_AUTO_ROUND} {_GPTQ} modules_to_not_convert version zero_point".split()),
    "compressed-tensors": frozenset(f"{_AUTO_ROUND} {_COMPRESSED}".split()),
    "qserve": frozenset("version zero_point modules_to_not_convert".split()),
    "auto-round": frozenset(f"{_AUTO_ROUND} damp_percent lm_head modules_to_not_convert true_sequential".split()),
    "modelopt": frozenset("producer kv_cache_quant_algo kv_cache_scheme config_groups has_zero_point version".split()),
    "fp8": frozenset("kv_cache_scheme kv_cache_quant_method".split()),
    "mxfp4": frozenset("dequantize".split()),
}
"""Convention -> fields that change nothing, whatever they hold."""
READ: dict[str, frozenset[str]] = {
    "awq": frozenset(f"{_READ} version format checkpoint_format zero_point".split()),
    "gptq": frozenset(f"{_READ} format checkpoint_format is_marlin_format dynamic sym desc_act".split()),
    "compressed-tensors": frozenset("quant_method config_groups format ignore".split()),
    "qserve": frozenset(_READ.split()),
    "auto-round": frozenset(f"{_READ} packing_format sym extra_config".split()),
    "modelopt": frozenset("quant_method quant_algo group_size exclude_modules ignore quantized_layers".split()),
    "fp8": frozenset(f"quant_method {_FP8}".split()),
    "mxfp4": frozenset("quant_method modules_to_not_convert".split()),
}
"""Convention -> fields that `Config` obeys."""
FUSED_ROTATION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj", "lm_head")
"""Layers that GPTQModel's `rotation` changes offline only: the residual stream and the heads are rotated alike."""


def unknown(convention: str, raw: dict[str, Any]) -> str:
    """Reason to refuse a config: a field that nobody here knows and that says something; else ""."""
    known = READ[convention] | NEUTRAL[convention] | set(CHANGING)
    for name, value in raw.items():
        if value and name not in known:
            return f"the config's field {_short(name)} = {_short(value)} is not known here: it may change the layer"
    return ""


def changed(raw: dict[str, Any], layer: str, stored: str = "codes") -> str:
    """Reason to skip one layer: a field that changes its arithmetic in a way that no kernel here follows; else "".

    Of a layer that is stored as "float", only fields about its input and output count.
    """
    for name, reason in CHANGING.items():
        if stored == "float" and name not in AROUND:
            continue
        if raw.get(name) and (found := reason(raw[name], layer)):
            return found
    return ""


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _always(what: str):
    return lambda value, layer: f"{what} ({_short(value)})"


def _rotation(value: Any, layer: str) -> str:
    if layer.rpartition(".")[2] in FUSED_ROTATION and value in ("hadamard", "random"):
        return ""
    return f"rotation = {_short(value)}: x must be multiplied by a Hadamard matrix before this layer"


def _activations(value: Any, layer: str) -> str:
    return "" if type(value) is int and value >= 16 else f"activations are quantized too ({_short(value)}-bit)"


def _data_type(value: Any, layer: str) -> str:
    return "" if isinstance(value, str) and value.startswith("int") else f"weights are of type {_short(value)}, not int"


def _pack_dtype(value: Any, layer: str) -> str:
    return "" if value in ("int32", "torch.int32") else f"codes are packed into {_short(value)}, not int32"


def _backend(value: Any, layer: str) -> str:
    return "llm-awq packs codes in another order" if value == "llm-awq" else ""


def _sparsity(value: Any, layer: str) -> str:
    form = value.get("format") if isinstance(value, dict) else value
    return "" if form in (None, "dense") else f"sparsity_config: the weight is stored sparse ({_short(form)})"


def _transforms(value: Any, layer: str) -> str:
    """compressed-tensors' transform_config: places "weight_*" were applied to the weight, others happen at run time."""
    groups = value.get("config_groups", {}) if isinstance(value, dict) else None
    if not isinstance(groups, dict):
        return "transform_config is not such as compressed-tensors writes"
    for name, scheme in groups.items():
        places = scheme.get("apply", []) if isinstance(scheme, dict) else None
        if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
            return f"transform_config of {_short(name)} is not such as compressed-tensors writes"
        for place in places:
            where = place.get("location")
            if where in ("weight_input", "weight_output", "k_cache", "q_attn"):
                continue  # fused into the weight, or between layers, in attention
            if _targets(place.get("targets"), layer) and not _targets(place.get("ignore"), layer):
                kind = _short(scheme.get("type"))
                return f"transform_config: {kind} transform {_short(name)} is applied at run time to its {where}"
    return ""


def _targets(entries: Any, layer: str) -> bool:
    entries = [entries] if isinstance(entries, str) else entries or []
    if not isinstance(entries, list):
        return True
    return any(not isinstance(entry, str) or entry == "Linear" or names(entry, layer) for entry in entries)


def names(entry: str, layer: str) -> bool:
    """compressed-tensors' rule: "re:<pattern>" matches from the start, anything else is the whole name."""
    return matches(entry[3:], layer) if entry.startswith("re:") else entry == layer


CHANGING = {
    "rotation": _rotation,
    "adapter": _always("a LoRA adapter is added to the layers"),
    "rotation_config": _always("auto-round's rotation is applied at run time"),
    "rotation_configs": _always("auto-round's rotation is applied at run time"),
    "spinquant_config": _always("SpinQuant's rotation is applied at run time"),
    "hadamard_config": _always("a Hadamard transform is applied at run time"),
    "act_bits": _activations,
    "data_type": _data_type,
    "super_bits": _always("scales are quantized too"),
    "super_group_size": _always("scales are quantized too"),
    "pack_dtype": _pack_dtype,
    "backend": _backend,
    "sparsity_config": _sparsity,
    "transform_config": _transforms,
}
"""Field -> (its value, a layer's name) -> reason why the layer is not what its tensors say, or ""."""
AROUND = frozenset(
    "rotation adapter rotation_config rotation_configs spinquant_config hadamard_config transform_config".split()
)
"""Fields of CHANGING that say what happens around a layer, however its weight is stored."""
