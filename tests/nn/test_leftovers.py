"""What a checkpoint holds beside the tensors that a model reads, and folders that are no causal model."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.loading import load
from terrazzo.nn.quantizing import quantize_folder
from test_loading import TOKENS, float_model

AT = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    "name",
    [f"{AT}.q_norm.weight", f"{AT}.q_proj.lora_A.weight", f"{AT}.q_proj.weight_scale", f"{AT}.sinks", "score.weight",
     "model.layers.1.mlp.act.scales", "model.embed_positions.weight", "model.layers.2.input_layernorm.weight"],
)  # fmt: skip
def test_a_tensor_that_no_part_reads_is_refused_by_name(tmp_path, name):
    model = float_model("llama")
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict() | {name: torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match="read by no part of a llama.*may change what the model computes") as caught:
        load(tmp_path, device="cpu")
    assert caught.value.value == name


@torch.no_grad()
def test_tensors_that_change_nothing_are_left():
    model = float_model("llama")
    left = [f"{AT}.rotary_emb.inv_freq", f"{AT}.k_scale", f"{AT}.k_proj.output_scale", f"{AT}.attn.v_zero_point"]
    state = model.state_dict() | dict.fromkeys([*left, "mtp.layers.0.mlp.up_proj.weight"], torch.ones(1))
    given = dict(config=model.config, device="cpu")
    assert torch.equal(load(state, **given)(TOKENS).logits, load(model.state_dict(), **given)(TOKENS).logits)


def test_a_config_that_the_caller_passes_may_have_fewer_layers(tmp_path):
    model = float_model("llama")
    model.half().save_pretrained(tmp_path)
    model.config.num_hidden_layers, model.config.dtype = 1, "bfloat16"  # a name, as configs hold it too
    loaded = load(tmp_path, config=model.config, device="cpu")
    assert len(loaded.decoder.layers) == 1 and loaded.dtype == torch.bfloat16


def test_the_whole_model_once_more_in_other_names_is_not_read(tmp_path):
    model = float_model("llama")
    model.half().save_pretrained(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    assert len(load(tmp_path, device="cpu").decoder.layers) == 2


def test_a_head_that_is_missing_is_not_taken_from_the_embedding():
    model = float_model("llama")
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ArgumentError, match="lm_head.weight.*tie_word_embeddings is false"):
        load(state, config=model.config, device="cpu")


def test_a_head_of_codes_under_a_config_that_ties_it_is_refused():
    model = float_model("qwen2")
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ArgumentError, match="tie_word_embeddings.*codes of its own"):
        load(state | {"lm_head.qweight": torch.ones(16, 64).int()}, config=model.config, device="cpu")


def test_models_that_look_ahead_are_refused():
    model = float_model("llama")
    model.config.is_causal = False  # transformers then masks nothing
    with pytest.raises(ArgumentError, match="is_causal"):
        load(model.state_dict(), config=model.config, device="cpu")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_generation_config_is_named_before_layers_are_read(tmp_path, content):
    float_model("llama").half().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ArgumentError, match="generation_config.json.*remove it"):
        load(tmp_path, device="cpu", progress=lambda done, total: pytest.fail("a layer was read"))


def test_what_load_would_refuse_is_not_quantized(tmp_path):
    source, out = tmp_path / "float", tmp_path / "packed"
    float_model("llama").half().save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match="rope_type"):
        quantize_folder(source, out, "w4a16-g64", device="cpu")
    assert not out.exists()
