"""terrazzo.load of gpt-oss folders: transformers' own model, its experts written in MXFP4 as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ranks_in_threads import together  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402

E, HIDDEN, INNER, WINDOW = 4, 128, 96, 8
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
PROMPT = torch.arange(3, 32)[None] % 64


def config_of(**changed) -> transformers.GptOssConfig:
    facts = dict(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=64, num_local_experts=E, num_experts_per_tok=2, sliding_window=WINDOW,
        max_position_embeddings=256, initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    return transformers.GptOssConfig(**facts | changed)


def model_of(config) -> torch.nn.Module:
    """Every parameter random, the sinks and biases too; routers far from ties."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        scale = 1.0 if "sinks" in name or "router" in name else 0.3 if "bias" in name else 0.05
        parameter.data += scale * torch.randn_like(parameter)
        if "sinks" in name:
            parameter.data += 1.0
    return model


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks [..., K/32, 16], scales [..., K/32], what they mean) of float [..., K]: the largest of 32 below 8."""
    parts = weight.double().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scaled = parts / 2.0 ** exponent[..., None]
    codes = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    meant = levels[codes] * scaled.sign() * 2.0 ** exponent[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponent + 127).to(torch.uint8), meant.flatten(-2)


def published(folder: Path, config) -> tuple[Path, torch.nn.Module]:
    """A folder as gpt-oss is published, and the model in float32 that it means."""
    return written(folder, model_of(config), config)


def written(folder: Path, model: torch.nn.Module, config) -> tuple[Path, torch.nn.Module]:
    """The same of a model's own values, which become those that the folder means."""
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, meant = mxfp4(value.transpose(1, 2))
            value.copy_(meant.transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            value.copy_(value.to(torch.bfloat16))
            tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors")
    stated = config.to_dict() | {"quantization_config": QUANTIZATION, "dtype": "bfloat16"}
    stated["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(stated))
    return folder, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published(tmp_path_factory.mktemp("gpt_oss"), config_of())


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def logits(model, tokens=PROMPT) -> torch.Tensor:
    """Of the prompt, its last six tokens step by step over the cache."""
    head = model(tokens[:, :-6], use_cache=True)
    parts, held = [head.logits], head.past_key_values
    for at in range(tokens.shape[1] - 6, tokens.shape[1]):
        step = model(tokens[:, at : at + 1], past_key_values=held, use_cache=True)
        parts, held = [*parts, step.logits], step.past_key_values
    return torch.cat(parts, 1)


@torch.no_grad()
def test_logits_are_those_of_transformers(folder, tmp_path):
    """Prompt and steps, beyond the window; the folder that `save_pretrained` writes of it gives the same."""
    path, model = folder
    wanted = model(PROMPT).logits
    loaded = load(path, device="cpu", dtype=torch.float16)
    got = logits(loaded)
    assert apart(got, wanted) < 0.01
    assert type(loaded).__name__.endswith("GptOssForCausalLM")
    loaded.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, device="cpu", dtype=torch.float16)), got)


@torch.no_grad()
@pytest.mark.parametrize("part", ["sinks", "windows", "yarn", "biases", "router", "interleaved"])
def test_each_part_of_the_architecture_is_seen_in_the_logits(folder, part, tmp_path):
    """A folder with one part changed is loaded as transformers' model of it, far from the unchanged one. Rounding may
    turn a tie of the router for a token."""
    model = folder[1]
    wanted = model(PROMPT).logits
    config = config_of()
    if part == "windows":
        config.layer_types = ["full_attention"] * 2
    if part == "yarn":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1000.0}
    other = model_of(config)
    other.load_state_dict(model.state_dict())
    for name, parameter in other.named_parameters():
        if part == "sinks" and "sinks" in name:
            parameter.fill_(-1e4)
        if "bias" in name and {"biases": "experts", "router": "router"}.get(part, "none of them") in name:
            parameter.zero_()
        if part == "interleaved" and "gate_up_proj" in name:
            parameter.copy_(torch.cat([parameter[..., 0::2], parameter[..., 1::2]], -1))
    path, other = written(tmp_path, other, config)
    got, changed = load(path, device="cpu", dtype=torch.float16)(PROMPT).logits, other(PROMPT).logits
    off = torch.tensor([apart(one, other) for one, other in zip(got[0], changed[0])])
    assert off.quantile(0.9) < 0.01 and apart(changed, wanted) > 0.03


@torch.no_grad()
def test_float_experts_are_quantized_on_load(tmp_path):
    """As transformers saves the model; values that MXFP4 holds are quantized without an error."""
    model = published(tmp_path, config_of())[1]
    for file in tmp_path.iterdir():
        file.unlink()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="experts"):
        load(tmp_path, device="cpu")
    loaded = load(tmp_path, device="cpu", dtype=torch.float16, quantize="mxfp4")
    own = loaded.model.decoder.layers[1].mlp.experts
    experts = model.model.layers[1].mlp.experts
    for e in range(E):
        both = experts.gate_up_proj[e].T.double()
        assert torch.equal(own.gate_up_proj.packed[e].dequantize(), torch.cat([both[0::2], both[1::2]]))
        assert torch.equal(own.down_proj.packed[e].dequantize(), experts.down_proj[e].T.double())
    rows = own.gate_up_proj.packed[2].bias
    assert torch.equal(rows.float()[:INNER], experts.gate_up_proj_bias[2].float()[0::2])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["published", "float", "stored"])
def test_two_ranks_give_the_logits_of_one(tmp_path, kind):
    """Heads with their sinks, and gates and ups of each expert, are shared."""
    path, model = published(tmp_path, config_of(intermediate_size=128, num_hidden_layers=1))
    wanted, own = model(PROMPT).logits, {}
    if kind == "float":
        (tmp_path / "model.safetensors").unlink()
        model.to(torch.bfloat16).save_pretrained(tmp_path)
        own = {"quantize": "mxfp4"}
    if kind == "stored":
        path = tmp_path / "stored"
        load(tmp_path, device="cpu", dtype=torch.float16).save_pretrained(path)
    options = dict(device="cpu", dtype=torch.float16, **own)
    whole = load(path, **options)(PROMPT).logits
    parts = together(2, lambda ranks: load(path, **options, tensor_parallel=ranks)(PROMPT).logits)
    assert torch.equal(*parts) and apart(parts[0], whole) < 0.005
    assert kind == "float" or apart(whole, wanted) < 0.01


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("swiglu_limit", "swiglu_limit"),
        ("scales", "model.layers.0.mlp.experts.gate_up_proj_scales"),
        ("sinks", "model.layers.1.self_attn.sinks"),
        ("experts", "model.layers.0.mlp.router.weight"),
    ],
)
def test_folders_that_do_not_fit_are_refused_by_name(folder, tmp_path, change, named):
    from safetensors.torch import load_file

    path, _ = folder
    stated, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    if change == "swiglu_limit":
        stated["swiglu_limit"] = 5.0
    elif change == "experts":
        stated["num_local_experts"] = 8
    elif change == "scales":
        tensors[named][1, 2, 0] = 255
    else:
        tensors[named] = tensors[named][:2].clone()
    (tmp_path / "config.json").write_text(json.dumps(stated))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError) as refused:
        load(tmp_path, device="cpu")
    assert refused.value.argument == named
