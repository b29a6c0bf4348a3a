"""What a config says beside its tensors: obeyed, or the layer is skipped with the reason, or known to be neutral."""

from __future__ import annotations

import pytest
import torch
from checkpoint_folders import AUTO_ROUND, AWQ, DYNAMIC, GPTQ, KINDS, LAYER, K, N, compressed, stored, tensors, write
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a8, w4a16
from terrazzo.ops.checkpoints import Checkpoint, Config
from terrazzo.ops.w4a8 import fp8

PUBLISHED = {
    "Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4, optimum": {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
        "dataset": None, "desc_act": False, "exllama_config": {"version": 2}, "group_size": 128,
        "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.down_proj"]], "pad_token_id": None,
        "quant_method": "gptq", "sym": False, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "Falcon, transformers of 2023": {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": "transformer.h", "damp_percent": 0.1, "dataset": "c4",
        "desc_act": False, "disable_exllama": True, "group_size": 128, "model_seqlen": 2048,
        "module_name_preceding_first_block": ["transformer.word_embeddings"], "quant_method": "gptq", "sym": False,
        "true_sequential": True, "use_cuda_fp16": True,
    },
    "TheBloke, AutoGPTQ": {
        "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": False, "true_sequential": True,
        "static_groups": False, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
        "is_marlin_format": False,
    },
    "GPTQModel 5.7": {
        "bits": 4, "dynamic": {"-:.*z_proj.*": {}}, "group_size": 128, "desc_act": False, "lm_head": False,
        "quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "sym": False, "meta": {
            "quantizer": ["gptqmodel:5.7.0"], "uri": "x", "damp_percent": 0.05, "static_groups": False, "mse": 0.0,
            "gptaq": None, "failsafe": {"strategy": "rtn", "smooth": {"type": "mad"}}, "hessian": {"chunk_size": None},
        },
    },
    "optimum 2.1 with gptqmodel 6": {
        "act_group_aware": True, "backend": "auto", "batch_size": 1, "bits": 4, "cache_block_outputs": True,
        "checkpoint_format": "gptq", "damp_percent": 0.1, "dataset": ["a"], "desc_act": False, "format": "gptq",
        "group_size": 128, "meta": {"quantizer": ["optimum:2.1.0"]}, "quant_method": "gptq", "sym": False,
        "true_sequential": True,
    },
    "auto-round, exported as GPTQ": {
        "bits": 4, "group_size": 128, "sym": False, "data_type": "int", "iters": 1000, "lr": 0.001, "nsamples": 512,
        "autoround_version": "0.5.1", "enable_quanted_input": True, "low_gpu_mem_usage": True, "damp_percent": 0.01,
        "desc_act": False, "lm_head": False, "true_sequential": False, "quant_method": "gptq", "provider": "auto-round",
        "block_name_to_quantize": "model.layers", "seqlen": 2048, "batch_size": 8, "scale_dtype": "torch.float16",
    },
    "Qwen3-AWQ, AutoAWQ": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "transformers 4, AwqConfig": {
        "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "backend": "autoawq", "do_fuse": False,
        "exllama_config": None, "fuse_max_seq_len": None, "modules_to_fuse": None, "quant_method": "awq",
        "modules_to_not_convert": ["lm_head"],
    },
    "GPTQModel 7, AWQ": {
        "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "method": "awq", "quant_method": "awq",
        "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32", "zero_point": True, "version": "gemm",
        "meta": {"scale_search_chunked_activations": True, "fallback": {"strategy": "rtn"}},
    },
    "auto-round, model free": {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128,
        "sym": True, "data_type": "int", "iters": 0, "model_free": True, "autoround_version": "0.14.2",
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "model.norm": {"bits": 16}},
    },
    "llm-compressor 0.12": compressed(),
    "llm-compressor, with groups of their own format": compressed() | {
        "config_groups": {"group_0": {
            "format": "pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": "static", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
                "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
                "symmetric": True, "type": "int", "zp_dtype": None,
            },
        }},
    },
}  # fmt: skip
"""quantization_config of published models, and of what their exporters write by default."""


def reason(config: dict, name: str = LAYER) -> str:
    return Config(config).layer(name).skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_exporters_write_is_neutral(name):
    assert reason(PUBLISHED[name]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_nobody_knows_is_refused_if_it_says_something(kind):
    config = KINDS[kind][1]
    for silent in (None, False, 0, "", [], {}):
        assert reason(config | {"whirl": silent}) == ""
    for says in (True, 3, "hadamard", [0], {"a": 1}):
        assert "field 'whirl'" in reason(config | {"whirl": says})


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("gptq", {"rotation": "hadamard"}, "rotation = 'hadamard': x must be multiplied by a Hadamard matrix"),
        ("awq", {"rotation": "random"}, "Hadamard matrix"),
        ("gptq", {"adapter": {"rank": 4, "path": "x"}}, "LoRA adapter"),
        ("gptq", {"pack_dtype": "int8"}, "packed into 'int8'"),
        ("awq", {"backend": "llm-awq"}, "another order"),
        ("auto_round", {"act_bits": 8}, "activations are quantized too"),
        ("auto_round", {"data_type": "mx_fp"}, "of type 'mx_fp', not int"),
        ("auto_round", {"rotation_config": {"hadamard_type": "random"}}, "rotation"),
        ("auto_round", {"spinquant_config": {"algorithm": "spinquant"}}, "SpinQuant"),
        ("auto_round", {"super_bits": 6}, "scales are quantized too"),
        ("pack", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "stored sparse"),
        ("pack", {"transform_config": {"config_groups": 5}}, "not such as compressed-tensors writes"),
    ],
)
def test_a_field_that_changes_the_layer_is_a_reason(tmp_path, kind, fields, words):
    """`load_layer` raises where `load_model` skips, with the same reason."""
    convention, config, family = KINDS[kind]
    folder = write(tmp_path, tensors(convention), config | fields)
    model = family.load_model(folder)
    assert not model.layers and words in model.skipped[LAYER]
    for format in (None, {"pack": "compressed_tensors", "auto_round": "gptq"}.get(kind, kind)):
        with pytest.raises(ArgumentError) as error:
            family.load_layer(folder, LAYER, format=format)
        assert words in str(error.value) and model.skipped[LAYER] in str(error.value)


def test_rotation_is_fused_into_other_layers(tmp_path):
    """GPTQModel rotates the residual stream offline: only what follows the activation function needs more."""
    names = [
        f"model.layers.0.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    model = w4a16.load_model(write(tmp_path, tensors("gptq", *names), GPTQ | {"rotation": "hadamard"}))
    assert list(model.layers) == sorted(names[:3], key=names.index) or set(model.layers) == set(names[:3])
    assert "Hadamard" in model.skipped[names[3]]


def test_a_field_of_another_config_file_counts_too(tmp_path):
    """A model that was saved again may keep `rotation` only in quantize_config.json."""
    folder = write(tmp_path, tensors("gptq"), GPTQ)
    (folder / "quantize_config.json").write_text('{"bits": 4, "desc_act": false, "rotation": "hadamard", "seed": 7}')
    assert "Hadamard" in w4a16.load_model(folder).skipped[LAYER]
    (folder / "quantize_config.json").write_text("{")
    assert LAYER in w4a16.load_model(folder).layers


def transforms(*places: dict) -> dict:
    return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": list(places)}}}}


@pytest.mark.parametrize("location", ["input", "output"])
@pytest.mark.parametrize("targets", [["re:.*down_proj$"], [LAYER], ["Linear"], "Linear"])
def test_transforms_at_run_time_are_a_reason_for_their_targets(location, targets):
    place = {"targets": targets, "location": location, "inverse": False, "ignore": []}
    assert f"applied at run time to its {location}" in reason(compressed() | transforms(place))
    assert reason(compressed() | transforms(place | {"ignore": [LAYER]})) == ""
    fused = place | {"location": "weight_input"}
    assert reason(compressed() | transforms(fused)) == ""
    assert "run time" in reason(compressed() | transforms(fused, place))


def test_transforms_elsewhere_are_none_of_a_layer():
    place = {"targets": ["re:.*o_proj$"], "location": "input"}
    assert reason(compressed() | transforms(place, {"targets": ["re:.*"], "location": "k_cache"})) == ""


@pytest.mark.parametrize(
    ("packing", "convention"),
    [
        ("auto_round:auto_gptq", "auto_round_sym"),
        ("auto_round:gptq", "gptq"),
        ("auto_round:auto_gptq:exllamav2", "gptq"),
        (None, "gptq"),
        ("auto_round", "gptq_v2"),
        ("auto_round:gptqmodel", "gptq_v2"),
        ("auto_round:exllamav2", "gptq_v2"),
        ("auto_round:auto_awq", "awq"),
    ],
)
def test_the_packings_of_auto_round(tmp_path, packing, convention):
    """Zero points are stored minus one by auto_gptq, as they are by auto_round."""
    held, weight = stored(convention)
    config = AUTO_ROUND | {"packing_format": packing, "sym": convention == "auto_round_sym"}
    folder = write(tmp_path, {f"{LAYER}.{leaf}": t for leaf, t in held.items()}, config)
    assert torch.equal(w4a16.load_model(folder).layers[LAYER].dequantize("post"), weight)


@pytest.mark.parametrize("packing", ["auto_round:llm_compressor", "auto_round:fp8", "mlx", "auto_round:fake"])
def test_other_packings_of_auto_round_are_refused_by_name(tmp_path, packing):
    folder = write(tmp_path, tensors("gptq_sym"), AUTO_ROUND | {"packing_format": packing})
    assert f"packing_format {packing!r}" in w4a16.load_model(folder).skipped[LAYER]


def test_auto_rounds_extra_config():
    layer = Config(AUTO_ROUND | {"extra_config": {"a.b": {"group_size": 32}, r".*\.c$": {"bits": 8}}}).layer
    assert layer("a.b").group_size == 32 and layer("x.c").bits == 8 and layer("x.d").group_size == 128


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"quant_method": "hqq", "nbits": 4},
        AUTO_ROUND | {"sym": False},
        GPTQ | {"checkpoint_format": "gptq_v2"},
        AWQ,
    ],
)
def test_the_format_that_a_caller_names_is_obeyed(tmp_path, config):
    held, weight = stored("gptq")
    folder = write(tmp_path, {f"{LAYER}.{leaf}": t for leaf, t in held.items()}, config)
    assert torch.equal(w4a16.load_layer(folder, LAYER, format="gptq").dequantize("post"), weight)
    (layer,) = w4a16.iter_layers(folder, format="gptq")
    assert torch.equal(layer.weight.dequantize("post"), weight)
    if config is not None and config["quant_method"] == "hqq":
        with pytest.raises(ArgumentError, match="quant_method = 'hqq'.*or pass format="):
            w4a16.load_model(folder)


@pytest.mark.parametrize(
    ("name", "convention"),
    [("auto_round", "gptq_v2"), ("auto_round:auto_gptq", "gptq"), ("auto_round:auto_awq", "awq")],
)
def test_auto_rounds_names_of_formats(tmp_path, name, convention):
    held, weight = stored(convention)
    folder = write(tmp_path, {f"{LAYER}.{leaf}": t for leaf, t in held.items()})
    assert torch.equal(w4a16.load_layer(folder, LAYER, format=name).dequantize("post"), weight)


@pytest.mark.parametrize(
    ("preset", "family", "symmetric"),
    [("W4A16", w4a16, True), ("w4a16_asym", w4a16, False), ("W4A8", w4a8, True), ("W4AFP8", fp8, True)],
)
def test_presets_stand_for_their_schemes(tmp_path, preset, family, symmetric):
    convention = "w4a8_pack" if family is w4a8 else "pack" if symmetric else "pack_asym"
    config = compressed() | {"config_groups": {preset: ["Linear"]}}
    folder = write(tmp_path, tensors(convention), config)
    assert list(family.load_model(folder).layers) == [LAYER]
    stated = Config(config).layer(LAYER)
    assert (stated.bits, stated.group_size, stated.symmetric) == (4, 128, symmetric)
    other = fp8 if family is w4a8 else w4a8
    if family is not w4a16:
        assert "activations are quantized" in other.load_model(folder).skipped[LAYER]
        assert "activations are quantized too (8-bit" in w4a16.load_model(folder).skipped[LAYER]


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("NVFP4A16", "of type float"),
        ("FP8_BLOCK", "bits = 8"),
        ("MXFP4", "of type float"),
        ("W8A16", "bits = 8"),
        ("W5", "no preset 'W5'"),
    ],
)
def test_presets_that_no_kernel_serves(tmp_path, preset, words):
    folder = write(tmp_path, tensors("pack"), compressed() | {"config_groups": {preset: ["Linear"]}})
    assert words in w4a16.load_model(folder).skipped[LAYER]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"actorder": "group"}, "weight_g_idx"),
        ({"actorder": "dynamic"}, "weight_g_idx"),
        ({"strategy": "tensor_group"}, "strategy tensor_group"),
        ({"dynamic": True}, "dynamically"),
        ({"whirl": 1}, "'whirl' is not known"),
        ({"num_bits": 8}, "bits = 8"),
    ],
)
def test_weights_of_compressed_tensors_that_are_stored_otherwise(tmp_path, change, words):
    folder = write(tmp_path, tensors("pack"), compressed(**change))
    assert words in w4a16.load_model(folder).skipped[LAYER]


@pytest.mark.parametrize(
    "x",
    [
        DYNAMIC | {"dynamic": False},
        DYNAMIC | {"strategy": "tensor"},
        DYNAMIC | {"symmetric": False},
        DYNAMIC | {"num_bits": 4},
        DYNAMIC | {"strategy": "group", "group_size": 128},
    ],
)
def test_activations_that_no_kernel_quantizes(tmp_path, x):
    folder = write(tmp_path, tensors("w4a8_pack"), compressed(x))
    for family in (w4a16, w4a8, fp8):
        assert "activations are quantized too" in family.load_model(folder).skipped[LAYER]


def test_quantized_outputs_are_a_reason():
    config = compressed()
    config["config_groups"]["group_0"]["output_activations"] = DYNAMIC
    assert "output is quantized" in reason(config)


def test_names_that_are_not_converted_are_whole_components():
    layer = Config(AWQ | {"modules_to_not_convert": ["model.layers.1", "gate", "visual."]}).layer
    for name in ("model.layers.1.mlp.up_proj", "model.layers.3.gate", "visual.blocks.0"):
        assert layer(name).skip and layer(name).excluded
    for name in ("model.layers.10.mlp.up_proj", "model.layers.3.gate_proj", "visualizer.a"):
        assert not layer(name).skip


def test_a_layer_that_is_quantized_all_the_same_is_read(tmp_path):
    folder = write(tmp_path, tensors("awq"), AWQ | {"modules_to_not_convert": ["down_proj"]})
    assert list(w4a16.load_model(folder).layers) == [LAYER] and w4a16.load_layer(folder).shape == (N, K)


def test_a_symmetric_awq_layer_without_zero_points(tmp_path):
    held = {name: t for name, t in tensors("awq").items() if not name.endswith("qzeros")}
    assert w4a16.load_layer(write(tmp_path / "a", held, AWQ | {"zero_point": False})).symmetric
    assert "qzeros" in w4a16.load_model(write(tmp_path / "b", held, AWQ)).skipped[LAYER]


@pytest.mark.parametrize("value", [10**4000, -(10**25), 1e300, float("nan"), True, "4", [4], {"a": 1}])
def test_numbers_that_no_layer_has(tmp_path, value):
    folder = write(tmp_path, tensors("awq"), AWQ | {"group_size": value})
    with pytest.raises(ArgumentError, match="group_size = "):
        w4a16.load_model(folder)


def test_a_name_counts_before_a_pattern_and_that_before_the_class(tmp_path):
    """As compressed-tensors resolves targets, whatever the order of the groups."""
    group = lambda target, size: {"targets": [target], "weights": {"num_bits": 4, "type": "int", "group_size": size}}
    stated = {"a": group("Linear", 32), "b": group("re:.*down_proj", 64), "c": group("re:.*.down_proj", 256)}
    config = Config({"quant_method": "compressed-tensors", "config_groups": stated})
    assert [config.layer(name).group_size for name in (LAYER, "model.up_proj")] == [256, 32]  # ".*." sorts first
    config = Config({"quant_method": "compressed-tensors", "config_groups": stated | {"d": group(LAYER, 128)}})
    assert config.layer(LAYER).group_size == 128


def test_decisions_without_a_family(tmp_path):
    """What another loader builds on: names, decisions and tensors of a folder."""
    checkpoint = Checkpoint(write(tmp_path, tensors("w4a8_pack") | {"norm.weight": torch.ones(4)}, compressed(DYNAMIC)))
    assert checkpoint.layers() == {LAYER: "compressed_tensors"} and checkpoint.others() == {"norm": "F32 [4]"}
    decision = checkpoint.layer(LAYER)
    assert (decision.format, decision.activations, decision.skip) == ("compressed_tensors", "int8", "")
    assert set(checkpoint.tensors(LAYER)) == {"weight_packed", "weight_scale", "weight_shape"}
    assert checkpoint.tensor("norm.weight").shape == (4,)
    with pytest.raises(ArgumentError, match="no file of the checkpoint holds it"):
        checkpoint.tensor("nothing")
