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

import pytest

VARIABLE = "TERRAZZO_TEST_VLLM_SOURCES"
LAYERS, LINEAR = "vllm/model_executor/layers", "vllm/model_executor/kernels/linear"
MOE = f"{LAYERS}/fused_moe"
USED: dict[str, dict[str, str]] = {
    "vllm/config/vllm.py": {
        "get_current_vllm_config_or_none": "",
        "VllmConfig": "additional_config compilation_config scheduler_config",
    },
    "vllm/config/compilation.py": {"CompilationConfig": "cudagraph_capture_sizes"},
    "vllm/config/scheduler.py": {"SchedulerConfig": "max_num_batched_tokens"},
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
    "vllm/plugins/__init__.py": {"load_general_plugins": ""},
}
"""File -> name of a function or class (or "Class.method") -> arguments, or fields and methods, that must be there."""
RELEASES = ("0.26.0", "0.33.0")


def sources() -> Iterator[tuple[str, dict[str, str]]]:
    """(release, file -> text) of what the folder has."""
    folder = Path(os.environ[VARIABLE])
    for release in RELEASES:
        for wheel in folder.glob(f"**/vllm-{release}-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                yield release, {name: archive.read(name).decode() for name in USED}
                break
        else:
            for info in folder.glob(f"**/vllm-{release}.dist-info"):
                yield release, {name: (info.parent / name).read_text() for name in USED}
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


def lacking(texts: dict[str, str]) -> list[str]:
    """What of USED some sources do not have."""
    found = []
    for file, names in USED.items():
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
