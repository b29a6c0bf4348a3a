"""Files and folders: one layer, sharded models, configs of every kind, and a reason for each layer that is skipped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a16
from terrazzo.ops.checkpoints import Checkpoint, Config
from test_w4a16_importers import DATA, load


def folder(
    path: Path, layers: dict[str, str], *, config: dict | None = None, shards: int = 1, extra: dict | None = None
) -> Path:
    """A Hugging Face folder whose layer `name` is golden layer `layers[name]`, dealt out over the shards."""
    tensors = {f"{name}.{leaf}": t for name, golden in layers.items() for leaf, t in load(golden)[0].items()}
    tensors |= {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.ones(96, 64).half()} | (extra or {})
    path.mkdir(exist_ok=True)
    if config is None:
        config = load(next(iter(layers.values())))[2]
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for shard in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize(
    ("golden", "format"),
    [
        ("awq", None),
        ("gptq_sym", None),
        ("gptq_asym", "gptq"),
        ("gptq_v2_asym", "gptq_v2"),
        ("ct_asym", None),
        ("ct_act_order", None),
    ],
)
def test_one_layer_of_a_bare_file(golden, format):
    weight = w4a16.load_layer(DATA / f"{golden}.safetensors", "layer", format=format)
    assert torch.equal(weight.dequantize(), load(golden)[1]["weight"])


def test_a_bare_asymmetric_gptq_file_needs_its_version():
    with pytest.raises(ArgumentError, match="pass version='gptq' or 'gptq_v2'"):
        w4a16.load_layer(DATA / "gptq_asym.safetensors")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("golden", ["awq", "gptq_act_order", "gptq_v2_asym", "ct_sym", "ct_ragged"])
def test_whole_folder(tmp_path, golden, shards):
    names = [f"model.layers.{i}.mlp.down_proj" for i in (10, 2)]
    path = folder(tmp_path / "m", dict.fromkeys(names, golden), shards=shards)
    model = w4a16.load_model(path)
    assert list(model.layers) == names[::-1]  # natural order: 2 before 10
    for weight in model.layers.values():
        assert torch.equal(weight.dequantize(), load(golden)[1]["weight"])
    assert list(model.skipped) == ["lm_head", "model.norm"] and "F16 [96, 64]" in model.skipped["lm_head"]
    assert model.report().splitlines()[0] == "2 layers loaded, 2 skipped"
    assert "skipped  lm_head: stored as F16 [96, 64], not quantized" in model.report()
    one = w4a16.load_layer(path, names[0], target="sm_80")
    assert torch.equal(one.words, model.layers[names[0]].words) and one.target == "sm_80"


def test_layers_are_selected_and_canonical_on_request(tmp_path):
    path = folder(tmp_path / "m", {"a.q": "awq", "a.k": "awq", "b.q": "awq"})
    layers = list(w4a16.iter_layers(path, select=r"\.q$", packed=False))
    assert [layer.name for layer in layers] == ["a.q", "b.q"]
    assert all(isinstance(layer.weight, w4a16.QuantizedWeight) for layer in layers)


def test_unreadable_layers_are_reported_with_the_reason(tmp_path):
    three_bit = {"c.qweight": torch.zeros(24, 64, dtype=torch.int32), "c.qzeros": torch.zeros(2, 6, dtype=torch.int32)}
    three_bit |= {"c.scales": torch.ones(2, 64).half(), "c.g_idx": (torch.arange(256) // 128).int()}
    lost = {"d.qweight": torch.zeros(32, 64, dtype=torch.int32)}
    config = load("gptq_sym")[2] | {"dynamic": {"-:a.skip": {}, r"+:c": {"bits": 3}}}
    layers = {"a.skip": "gptq_sym", "b": "gptq_sym"}
    path = folder(tmp_path / "m", layers, config=config, extra=three_bit | lost)
    model = w4a16.load_model(path)
    assert list(model.layers) == ["b"]
    assert model.skipped["a.skip"] == "dynamic rule '-:a.skip' excludes it"
    assert (
        "bits = 3" in model.skipped["c"]
        and "scales = None: layer 'd' needs the tensor 'd.scales'" in model.skipped["d"]
    )
    with pytest.raises(ArgumentError, match="3 bits"):
        list(w4a16.iter_layers(path, strict=True))


def test_compressed_tensors_groups_and_ignore():
    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    config = Config(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head", "re:.*router"],
            "config_groups": {
                "a": {"targets": ["Linear"], "format": "pack-quantized", "weights": four},
                "b": {
                    "targets": ["re:.*down_proj$"],
                    "format": "pack-quantized",
                    "weights": four | {"strategy": "channel", "group_size": None},
                },
                "c": {"targets": ["re:.*o_proj"], "weights": four, "input_activations": {"num_bits": 8, "type": "int"}},
                "d": {"targets": ["re:.*fp"], "weights": four | {"type": "float"}},
            },
        }
    )
    assert config.layer("x.q_proj").group_size == 64 and config.layer("x.q_proj").version == "pack-quantized"
    assert config.layer("x.down_proj").group_size == -1
    assert config.layer("x.o_proj").skip == "activations are quantized too (8-bit int)"
    assert config.layer("x.fp").skip == "weights are of type float, not int"
    assert config.layer("x.router").skip == "ignore lists 're:.*router'" and "lm_head" in config.layer("lm_head").skip
    only = Config({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["x.q"], "weights": four}}})
    assert only.layer("y").skip == "no config group targets it"


def test_old_configs(tmp_path):
    old_awq = Config({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}).layer("x")
    assert (old_awq.format, old_awq.bits, old_awq.group_size, old_awq.version) == ("awq", 4, 64, "GEMM")
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": -1, "desc_act": False, "sym": True})
    )
    old_gptq = Config.of_folder(tmp_path).layer("x")
    assert (old_gptq.format, old_gptq.group_size, old_gptq.symmetric, old_gptq.desc_act) == ("gptq", -1, True, False)
    assert Config({"quant_method": "gptq", "is_marlin_format": True}).layer("x").version == "marlin"
    skipped = Config({"quant_method": "awq", "modules_to_not_convert": ["gate"]}).layer("m.gate")
    assert skipped.skip == "modules_to_not_convert names 'gate'"


@pytest.mark.parametrize(
    ("golden", "overrides", "reason"),
    [
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("awq", {"group_size": 64}, "group_size = 64"),
        ("awq", {"quant_method": "gptq"}, "qweight = 'int32"),
        ("gptq_act_order", {"desc_act": False}, "desc_act = False"),
        ("gptq_sym", {"checkpoint_format": "gptq_v2"}, "symmetric = True"),
        ("gptq_sym", {"checkpoint_format": "marlin"}, "version = 'marlin'"),
        ("gptq_sym", {"bits": 8}, "bits = 8"),
        ("ct_sym", {"format": "marlin-24"}, "format = 'marlin-24'"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_a_reason(tmp_path, golden, overrides, reason):
    path = folder(tmp_path / "m", {"x": golden}, config=load(golden)[2] | overrides)
    assert reason in w4a16.load_model(path).skipped["x"]


def test_bad_paths_and_names(tmp_path):
    def refused(words: str, *args, **options):
        with pytest.raises(ArgumentError, match=words):
            w4a16.load_layer(*args, **options)

    path = folder(tmp_path / "m", {"a": "awq", "b": "awq"}, shards=2)
    refused("2 quantized layers; name one: a, b", path)
    refused("is no quantized layer of this checkpoint; name one of its layers: a, b", path, "lm_head")
    refused("is no quantized layer of this checkpoint", path, ["a"])
    refused("must be one of", path, "a", format="gguf")
    refused("the tensors of 'a' are awq", path, "a", format="compressed_tensors")
    refused("holds no .safetensors file", tmp_path)
    refused("is no file or folder of this machine; download it first", "someone/a-model-AWQ", "a")
    save_file({"x.weight": torch.zeros(4, 4)}, tmp_path / "float.safetensors")
    refused("holds no quantized layer", tmp_path / "float.safetensors")
    refused("device = 'gpu'", path, "a", device="gpu")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    refused("quant_method = 'hqq': must be one of awq, gptq, compressed-tensors", path, "a")
    (path / "config.json").write_text("{")
    refused("must hold JSON", path, "a")
    (path / "config.json").unlink()
    next(path.glob("*-of-*")).unlink()
    refused("is not there: get it again, into the folder of its index", path, "a")
    shutil.copy(DATA / "awq.safetensors", tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((DATA / "awq.safetensors").read_bytes()[:1000])
    refused("must be a readable safetensors file", tmp_path / "cut.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(tmp_path, text):
    path = folder(tmp_path / "m", {"a": "awq", "b": "awq"}, shards=2)
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"model\.safetensors\.index\.json': must"):
        w4a16.load_model(path)


def test_the_index_of_another_packing_beside_it_is_ignored(tmp_path):
    path = folder(tmp_path / "m", {"a": "awq"}, shards=2)
    (path / "consolidated.safetensors.index.json").write_text('{"weight_map": {"z": "consolidated.safetensors"}}')
    assert list(w4a16.load_model(path).layers) == ["a"]


def test_the_config_of_a_model_of_several_modalities(tmp_path):
    path, config = folder(tmp_path / "m", {"a": "awq"}), load("awq")[2]
    (path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": config | {"group_size": 64}}}))
    assert "group_size = 64" in w4a16.load_model(path).skipped["a"]


def _group(**facts) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]} | facts}}


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("quantization_config = .*must be an object", ["awq"]),
        ("must hold a JSON object", None),
        ("bits = '4': must be an integer", {"quant_method": "awq", "bits": "4"}),
        ("group_size = '64': must be an integer", {"quant_method": "gptq", "group_size": "64"}),
        ("modules_to_not_convert = 5: must be a list", {"quant_method": "awq", "modules_to_not_convert": 5}),
        ("version = 3: must be a string", {"quant_method": "awq", "version": 3}),
        ("dynamic = .*must be an object", {"quant_method": "gptq", "dynamic": ["a"]}),
        ("must be a regular expression", {"quant_method": "gptq", "dynamic": {"+:(": {}}}),
        ("must be a regular expression", {"quant_method": "compressed-tensors", "ignore": ["re:("]}),
        ("config_groups = .*must be objects", {"quant_method": "compressed-tensors", "config_groups": {"a": 1}}),
        ("weights and input_act.* must be objects", _group(weights=5)),
        ("weights and input_act.* must be objects", _group(weights=[1])),
        ("weights and input_act.* must be objects", _group(weights={}, input_activations=5)),
        ("weights and input_act.* must be objects", _group(weights={}, input_activations=[1])),
        ("bits = nan: must be an integer", {"quant_method": "awq", "bits": float("nan")}),
        ("group_size = inf: must be an integer", {"quant_method": "gptq", "group_size": float("inf")}),
    ],
)
def test_a_config_that_says_nonsense_is_refused(tmp_path, words, config):
    path = folder(tmp_path / "m", {"a": "awq"})
    (path / "config.json").write_text("[]" if config is None else json.dumps({"quantization_config": config}))
    with pytest.raises(ArgumentError, match=words):
        w4a16.load_model(path)


def test_one_name_stands_for_a_list_of_it():
    config = Config({"quant_method": "awq", "modules_to_not_convert": "gate", "bits": 4.0}).layer
    assert config("m.gate").skip and not config("m.up").skip and config("m.up").bits == 4
    four = {"num_bits": 4, "type": "int", "group_size": 64, "strategy": "group"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": "Linear", "weights": four}}}
    assert Config(config).layer("x").group_size == 64


def test_zero_points_are_not_guessed_where_their_tensor_is_missing(tmp_path):
    lost = {f"a.{leaf}": t for leaf, t in load("gptq_asym")[0].items() if leaf != "qzeros"}
    save_file(lost, tmp_path / "lost.safetensors")
    with pytest.raises(ArgumentError, match="qzeros = None: .*call from_gptq with qzeros=None"):
        w4a16.load_layer(tmp_path / "lost.safetensors", "a", format="gptq")


@pytest.mark.parametrize("leaf", ["scales", "qweight"])
def test_a_tensor_without_dimensions_is_a_reason(tmp_path, leaf):
    layer = {f"a.{name}": t for name, t in load("awq")[0].items()}
    save_file(layer | {f"a.{leaf}": layer[f"a.{leaf}"].flatten()[0].clone()}, tmp_path / "w.safetensors")
    assert f"{leaf} = " in w4a16.load_model(tmp_path).skipped["a"]


def test_an_asymmetric_gate_is_loaded(tmp_path):
    gate = {"weight_packed": torch.zeros(8, 32).int(), "weight_scale": torch.ones(8, 2).half()}
    gate |= {"weight_zero_point": torch.zeros(1, 2).int(), "weight_shape": torch.tensor([8, 256])}
    save_file({f"gate.{leaf}": t for leaf, t in gate.items()}, tmp_path / "w.safetensors")
    assert not w4a16.load_model(tmp_path).layers["gate"].dequantize().any()


def test_every_tensor_is_reported(tmp_path):
    fused = {"experts.gate_up_proj": torch.zeros(2, 4, 8), "norm.weight": torch.ones(4), "b.bias": torch.ones(4)}
    model = w4a16.load_model(folder(tmp_path / "m", {"a": "awq"}, extra=fused))
    skipped = {"experts.gate_up_proj", "lm_head", "model.norm", "norm", "b.bias"}
    assert list(model.layers) == ["a"] and set(model.skipped) == skipped


def test_a_bad_pattern_of_names(tmp_path):
    with pytest.raises(ArgumentError, match="select = .*regular expression"):
        list(w4a16.iter_layers(folder(tmp_path / "m", {"a": "awq"}), select="("))


def test_nothing_is_loaded_before_it_is_needed(tmp_path):
    path = folder(tmp_path / "m", {"a": "awq", "b": "awq"})
    checkpoint = Checkpoint(path)
    checkpoint.tensor = None  # a load would fail
    assert checkpoint.layers() == {"a": "awq", "b": "awq"} and set(checkpoint.others()) == {"lm_head", "model.norm"}
