"""terrazzo.load of gpt-oss folders: transformers' own model, its experts written in MXFP4 as they are published."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from gpt_oss_folder import INNER, PROMPT, E, apart, config_of, logits, model_of, published, written  # noqa: E402
from ranks_in_threads import together  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.ops.w4a8.mxfp4_format import PackedWeight as OnE4m3  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published(tmp_path_factory.mktemp("gpt_oss"), config_of())


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


@torch.no_grad()
def test_activations_of_mxfp4_experts_are_e4m3_where_that_is_asked_for(folder, tmp_path):
    """The same weights bit for bit; a folder that was saved with it keeps it."""
    path, model = folder
    wanted, usual = model(PROMPT).logits, load(path, device="cpu", dtype=torch.float16)
    asked = load(path, device="cpu", dtype=torch.float16, activations="e4m3")
    for own, other in zip(asked.model.decoder.layers, usual.model.decoder.layers):
        for leaf in ("gate_up_proj", "down_proj"):
            made, same = (getattr(layer.mlp.experts, leaf).packed for layer in (own, other))
            assert isinstance(made.stacked, OnE4m3) and not isinstance(same.stacked, OnE4m3)
            assert torch.equal(made[1].dequantize(), same[1].dequantize())
            assert torch.equal(made.stacked.bias, same.stacked.bias)
    got = logits(asked)
    off = torch.tensor([apart(one, other) for one, other in zip(got[0], wanted[0])])
    assert 0.005 < off.median() < 0.06  # e4m3 has four bits
    asked.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, device="cpu", dtype=torch.float16)), got)
    with pytest.raises(ArgumentError, match="activations = 'e4m3': the folder's weights are packed"):
        load(tmp_path, device="cpu", activations="e4m3")


@torch.no_grad()
def test_two_ranks_share_experts_on_e4m3(tmp_path):
    """Each quantizes what it keeps of the tokens between gate, up and down by itself."""
    path, model = published(tmp_path, config_of(intermediate_size=128, num_hidden_layers=1))
    options = dict(device="cpu", dtype=torch.float16, activations="e4m3")
    parts = together(2, lambda ranks: load(path, **options, tensor_parallel=ranks)(PROMPT).logits)
    off = torch.tensor([apart(one, other) for one, other in zip(parts[0][0], model(PROMPT).logits[0])])
    assert torch.equal(*parts) and off.median() < 0.06


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"activations": "int8"}, "activations = 'int8': must be None or \"e4m3\""),
        ({"activations": "fp8"}, "activations = 'fp8': must be None or \"e4m3\""),
        ({"activations": "e4m3", "weight_only": True}, "weight_only = True: keeps activations in 16 bits"),
        ({"activations": "e4m3", "target": "sm_80"}, "target = 'sm_80': "),
    ],
)
def test_activations_that_cannot_be_are_refused_by_name(folder, asked, words):
    with pytest.raises(ArgumentError) as refused:
        load(folder[0], device="cpu", **asked)
    assert words in str(refused.value)


LAYER = "model.layers.0"
PARTS = [
    *(f"{LAYER}.mlp.experts.{leaf}_proj_{of}" for leaf in ("gate_up", "down") for of in ("blocks", "scales", "bias")),
    *(f"{LAYER}.self_attn.{part}_proj.{leaf}" for part in "qo" for leaf in ("weight", "bias")),
    f"{LAYER}.mlp.router.weight", f"{LAYER}.mlp.router.bias", f"{LAYER}.self_attn.sinks",
    f"{LAYER}.input_layernorm.weight", "lm_head.weight",
]  # fmt: skip


def test_folders_with_a_part_missing_are_refused_by_its_name(folder, tmp_path):
    """A bias, too: without it a folder would be read as another model's."""
    tensors = load_file(folder[0] / "model.safetensors")
    (tmp_path / "config.json").write_text((folder[0] / "config.json").read_text())
    for name in PARTS:
        save_file({other: t for other, t in tensors.items() if other != name}, tmp_path / "model.safetensors")
        with pytest.raises(ArgumentError) as refused:
            load(tmp_path, device="cpu")
        assert (refused.value.argument, refused.value.value) == ("name", name)


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
