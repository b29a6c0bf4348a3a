"""from_pretrained through terrazzo.integrations.transformers, on tiny folders, by the reference path on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from terrazzo.integrations import transformers as ours  # noqa: E402
from terrazzo.integrations.transformers import TerrazzoConfig, config_of, register, take_over  # noqa: E402
from terrazzo.lowering.errors import ArgumentError, ToolchainError  # noqa: E402
from terrazzo.ops import w4a16  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # noqa: E402

SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=64, head_dim=64, max_position_embeddings=256, initializer_range=0.2,
)  # fmt: skip
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=2),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, query_pre_attn_scalar=32, sliding_window=4),
}
TOKENS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
QUICK = ("qwen2", "mixtral")


def write_float(folder, name: str):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float16).save_pretrained(folder)
    return folder


def write_awq(folder):
    """A Llama whose linear layers are AWQ's, as AutoAWQ writes them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    state = AutoModelForCausalLM.from_config(config, dtype=torch.float16).state_dict()
    order, tensors = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4, {}
    words = lambda codes: (codes.long().view(len(codes), -1, 8) << order).sum(-1).to(torch.int32).contiguous()
    for name, value in state.items():
        if "_proj" not in name:
            tensors[name] = value
            continue
        made, name = w4a16.quantize_weight(value, group_size=64), name.removesuffix(".weight")
        tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"] = words(made.codes.T), words(made.zeros.T)
        tensors[f"{name}.scales"] = made.scales.T.contiguous().half()
    config.quantization_config = {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"
    }  # fmt: skip
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same(model, wanted) -> bool:
    with torch.no_grad():
        return (
            type(model) is type(wanted)
            and model.model.formats == wanted.model.formats
            and torch.equal(model(TOKENS).logits, wanted(TOKENS).logits)
        )


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CONFIGS])
def test_a_float_folder_and_what_is_saved_of_it_are_the_models_of_load(name, tmp_path, caplog):
    folder, form = write_float(tmp_path / "float", name), "w4a16-g64"
    config = TerrazzoConfig(quantize=form, kv=("int4_channel64", "int8"))
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=None)
    wanted = terrazzo.load(folder, quantize=form, kv=("int4_channel64", "int8"))
    assert same(model, wanted) and model.is_quantized and model.config.quantization_config is not None
    assert "UNEXPECTED" not in caplog.text and "MISSING" not in caplog.text
    model.save_pretrained(tmp_path / "packed")
    assert model.config.quantization_config is not None  # saving leaves the model as it was
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert same(again, wanted) and same(terrazzo.load(tmp_path / "packed"), wanted)
    stated = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert stated == {"quant_method": "terrazzo", "version": 1, "kv": ["int4_channel64", "int8"]}


def test_published_folders_are_loaded_where_they_are_asked_for(tmp_path, monkeypatch):
    folder = write_awq(tmp_path / "awq")
    wanted = terrazzo.load(folder, kv="int8")
    options = dict(config=config_of(folder), quantization_config=TerrazzoConfig(kv="int8"))
    assert same(AutoModelForCausalLM.from_pretrained(folder, **options), wanted)
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "awq", AUTO_QUANTIZATION_CONFIG_MAPPING["awq"])
    take_over("awq", kv="int8")
    take_over("awq", kv="int8")
    assert same(AutoModelForCausalLM.from_pretrained(folder), wanted)


def test_generate_takes_prompts_of_different_lengths(tmp_path):
    folder = write_float(tmp_path, "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=TerrazzoConfig())
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    greedy = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    made = model.generate(TOKENS, attention_mask=mask, **greedy)
    assert made.tolist() == exact.generate(TOKENS, attention_mask=mask, **greedy).tolist()
    alone = TOKENS[:1, 4:]
    assert made[0, 4:].tolist() == model.generate(alone, attention_mask=torch.ones_like(alone), **greedy)[0].tolist()
    options = dict(max_new_tokens=5, do_sample=True, temperature=2.0, top_k=40, eos_token_id=None, pad_token_id=0)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.generate(TOKENS, attention_mask=mask, **options).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_registering_again_changes_nothing_and_others_are_not_replaced(monkeypatch):
    register()
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["terrazzo"] is TerrazzoConfig
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "terrazzo", dict)
    with pytest.raises(ToolchainError, match="registered"):
        register()


@pytest.mark.parametrize(
    ("release", "fine"), [("4.57.1", False), ("5.4.0", False), ("5.5.0", True), ("6.0.dev0", True)]
)
def test_older_releases_are_refused_by_name(release, fine):
    if fine:
        ours._check(release)
    else:
        with pytest.raises(ToolchainError, match=f"{release} is older than 5.5"):
            ours._check(release)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="bits"):
        TerrazzoConfig(bits=4)
    with pytest.raises(ArgumentError, match="methods"):
        take_over("bitsandbytes")
    with pytest.raises(ArgumentError, match="nothing"):
        take_over("awq", nothing=1)
    quantizer = ours.TerrazzoQuantizer(TerrazzoConfig(), pre_quantized=False)
    with pytest.raises(ArgumentError, match="device_map"):
        quantizer.update_device_map({"model": 0, "lm_head": "cpu"})
    quantizer.update_device_map({"": 1})
    assert quantizer.device == torch.device("cuda:1") and quantizer.update_dtype(torch.float32) == torch.float16
    folder = write_float(tmp_path, "qwen2")
    with pytest.raises(ArgumentError, match="format"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=TerrazzoConfig(quantize="w3a16"))
    config, state = CONFIGS["qwen2"](), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with pytest.raises(ArgumentError, match="state_dict"):
        transformers.Qwen2ForCausalLM.from_pretrained(
            None, config=config, state_dict=state, quantization_config=TerrazzoConfig()
        )
