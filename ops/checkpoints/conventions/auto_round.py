"""auto-round: how its configs state layers, whose tensors are those of GPTQ and AWQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions.base import LayerConfig, Method
from terrazzo.ops.checkpoints.patterns import matches

if TYPE_CHECKING:
    from terrazzo.ops.checkpoints.fields import Stated

FORMATS = {"auto_round": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""What a caller may name -> the format that it is: GPTQ with zero points as they are, or what follows."""
_PACKINGS = {"": "gptq", "auto": "gptq", "auto_gptq": "gptq", "gptq": "gptq", "auto_round": "gptq_v2"}
_PACKINGS |= {"gptqmodel": "gptq_v2", "auto_awq": "awq", "awq": "awq"}
"""packing_format, without its "auto_round:" and the kernel named behind -> format."""
_KERNELS = ("exllamav2", "exllama", "tritonv2", "triton", "marlin", "gemm")
WRITTEN = """
act_data_type act_dynamic act_group_size act_sym amp autoround_version batch_size block_name_to_quantize dataset
enable_alg_ext enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input enable_torch_compile
gradient_accumulate_steps iters low_cpu_mem_usage low_gpu_mem_usage lr lr_scheduler meta minmax_lr model_free momentum
nblocks not_use_best_mse nsamples provider quant_block_list quant_lm_head sampler scale_dtype seed seqlen
static_attention_dtype static_attention_granularity static_kv_dtype static_kv_granularity supported_types
to_quant_block_names use_quant_input
"""
"""Written into its own format and into those of others. `act_bits` says whether act_* hold."""


def _own(raw: Stated, name: str) -> Stated:
    stated = raw.get("extra_config") or {}
    found = [stated[name]] if name in stated else []
    patterns = (key for key in stated if set(key) & set("*+?^$()[]{}|\\"))
    found += [stated[key] for key in patterns if matches(key, name, search=True)]
    return next((own for own in found if isinstance(own, dict)), {})


def _layer(raw: Stated, name: str) -> LayerConfig:
    facts = raw | _own(raw, name)
    stated = facts.get("packing_format") or facts.get("backend") or ""
    packing = stated if isinstance(stated, str) and (facts.get("packing_format") or "auto_round" in stated) else ""
    parts = [part for part in packing.lower().split(":") if part not in _KERNELS]
    short = ":".join(parts[1:] if len(parts) > 1 and parts[0] == "auto_round" else parts)
    bits, size = fields.whole(facts, "bits", 4), fields.whole(facts, "group_size")
    if short not in _PACKINGS:
        skip = f"packing_format {packing[:80]!r}: only auto_round, auto_round:auto_gptq and auto_round:auto_awq"
        return LayerConfig(None, bits, size, skip=f"{skip} are read")
    format = _PACKINGS[short]
    if format == "awq":
        return LayerConfig(format, bits, size, "gemm")
    return LayerConfig(format, bits, size, format, fields.flag(facts, "sym"))


METHOD = Method(
    "auto-round",
    _layer,
    read=f"{fields.SIZES} packing_format sym extra_config",
    neutral=f"{WRITTEN} damp_percent lm_head modules_to_not_convert true_sequential",
    aliases=("auto_round", "intel/auto-round"),
    own=_own,
)
