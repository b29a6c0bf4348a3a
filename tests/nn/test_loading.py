"""terrazzo.load on tiny random models of each architecture, by the reference path on the CPU."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.lowering.errors import ArgumentError, TargetError  # noqa: E402
from terrazzo.nn import generation  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402

SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, head_dim=64, max_position_embeddings=256,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama3": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
                                      high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


def float_model(name: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for parameter in model.parameters():  # norms, biases and routers that do something
        parameter.data += torch.randn_like(parameter) * 0.05
    return model


def with_dequantized(model, loaded):
    """The float model with the numbers that the loaded one's codes stand for."""
    state = {}
    for index, layer in enumerate(loaded.decoder.layers):
        at, root = layer.self_attn, f"model.layers.{index}"
        rows = at.qkv_proj.packed.dequantize().float().split(at.qkv_proj.sizes)
        state |= {f"{root}.self_attn.{p}_proj.weight": w for p, w in zip("qkv", rows)}
        state[f"{root}.self_attn.o_proj.weight"] = at.o_proj.packed.dequantize().float()
        if hasattr(layer.mlp, "experts"):
            both, down = layer.mlp.experts.gate_up_proj.packed, layer.mlp.experts.down_proj.packed
            for name, packed in (("gate_up_proj", both), ("down_proj", down)):
                found = torch.stack([packed[e].dequantize().float() for e in range(len(packed))])
                state[f"{root}.mlp.experts.{name}"] = found
        else:
            gate, up = layer.mlp.gate_up_proj.packed.dequantize().float().chunk(2)
            state |= {f"{root}.mlp.gate_proj.weight": gate, f"{root}.mlp.up_proj.weight": up}
            state[f"{root}.mlp.down_proj.weight"] = layer.mlp.down_proj.packed.dequantize().float()
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    assert not unexpected
    return model


TOKENS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))


QUICK = ("llama", "mixtral", "gemma3")
every = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", every)
@torch.no_grad()
def test_logits_are_those_of_the_float_model_with_dequantized_weights(name):
    """16-bit rounding is all that is between them: of activations, some ten times a layer, 2^-11 each."""
    model = float_model(name)
    loaded = load(model.state_dict(), config=model.config, device="cpu", quantize="w4a16-g64", kv="float16")
    exact = with_dequantized(model, loaded)(TOKENS).logits
    got = loaded(TOKENS).logits.float()
    off = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(off.max()) < 2 * 10 * 2**-11 * 4, float(off.max())
    steps = loaded(TOKENS[:, :7], use_cache=True)
    parts = [steps.logits]
    for t in range(7, 11):
        steps = loaded(TOKENS[:, t : t + 1], past_key_values=steps.past_key_values, use_cache=True)
        parts.append(steps.logits)
    torch.testing.assert_close(torch.cat(parts, 1).float(), got, rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_a_float_model_is_loaded_in_16_bits():
    model = float_model("llama")
    loaded = load(model.state_dict(), config=model.config, device="cpu", dtype=torch.bfloat16)
    exact, got = model(TOKENS).logits, loaded(TOKENS).logits
    assert got.dtype == torch.bfloat16 and (got.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("stated", [None, "float16", torch.float16, torch.float32, torch.bfloat16])
def test_gemma_is_bfloat16_whatever_its_config_says(stated):
    from terrazzo.nn.reading import dtype_of

    config = transformers.Gemma3TextConfig(**SIZES)
    config.dtype = stated
    assert dtype_of(config, None) == torch.bfloat16
    with pytest.raises(ArgumentError, match="^dtype = 'float16'.*65504.*gemma3_text.*pass torch.bfloat16"):
        dtype_of(config, torch.float16)
    assert dtype_of(transformers.LlamaConfig(**SIZES), None) == torch.float16


@pytest.mark.parametrize(
    ("form", "name"), [("w4a8", "qwen3"), ("w4a8-e4m3", "qwen3"), ("w4ax", "qwen3"), ("w4ax", "mixtral")]
)
@torch.no_grad()
def test_formats_with_quantized_activations_stay_near_the_float_model(form, name):
    model = float_model(name)
    target = "sm_90a" if form == "w4ax" else None
    loaded = load(model.state_dict(), config=model.config, device="cpu", quantize=form, target=target, kv="int8")
    exact = with_dequantized(model, loaded)(TOKENS).logits
    assert (loaded(TOKENS).logits.float() - exact).norm() < (0.5 if form == "w4ax" else 0.1) * exact.norm()


saved = [pytest.param(name, marks=() if name == "mixtral" else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", saved)
@torch.no_grad()
def test_a_folder_is_loaded_saved_and_loaded_again(tmp_path, name):
    model = float_model(name, torch.float16)
    model.save_pretrained(tmp_path / "float")
    done: list[tuple[int, int]] = []
    note = partial(lambda to, *step: to.append(step), done)
    loaded = load(tmp_path / "float", device="cpu", quantize="w4a16-g32", kv="int4", progress=note)
    assert done == [(1, 2), (2, 2)] and loaded.dtype == (torch.bfloat16 if name == "gemma3" else torch.float16)
    y = loaded(TOKENS[:, :4]).logits
    loaded.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    again = load(tmp_path / "packed", device="cpu")
    assert again.model.formats == ("int4_hadamard", "int4") and type(again) is type(loaded)
    assert torch.equal(again(TOKENS[:, :4]).logits, y)
    assert type(again).from_pretrained(tmp_path / "packed", device="cpu", kv="int8").model.formats == ("int8", "int8")


@torch.no_grad()
def test_generate_of_transformers_runs_with_unequal_prompts():
    model = float_model("llama")
    loaded = load(model.state_dict(), config=model.config, device="cpu", quantize="w4a16-g64", kv="float16")
    loaded.generation_config.pad_token_id = 0
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    options = dict(max_new_tokens=3, do_sample=False, eos_token_id=None)
    made = loaded.generate(TOKENS, attention_mask=mask, **options)
    for row, first in enumerate((0, 4)):
        prompt = TOKENS[row : row + 1, first:]  # transformers takes its token 0 for padding, unless a mask says not
        alone = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert made[row, first:].tolist() == alone[0].tolist()


def test_what_cannot_be_loaded_is_refused(tmp_path):
    model = float_model("mixtral")
    state, config = model.state_dict(), model.config
    for bad, says in (
        (dict(kv="int3"), "^kv = 'int3'.*for keys"),
        (dict(kv=("int4", "int4_channel64")), "^kv = 'int4_channel64'.*for values"),
        (dict(kv="fp8", quantize="w4a16"), "^kv = 'fp8'.*calibrated"), (dict(dtype=torch.float32), "dtype"),
        (dict(quantize="w4a4"), "format"), ({}, "experts of .* are float"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            load(state, config=config, device="cpu", **bad)
    with pytest.raises(ArgumentError, match="config"):
        load(state)
    with pytest.raises(ArgumentError, match=r"config.json"):
        load(tmp_path)
    with pytest.raises(ArgumentError, match="model_type"):
        load(state, config=transformers.GPT2Config())
    state.pop("model.layers.1.self_attn.o_proj.weight")
    with pytest.raises(ArgumentError, match="o_proj"):
        load(state, config=config, device="cpu", quantize="w4a16")


@pytest.mark.parametrize(
    "bad, argument",
    [
        (dict(dtype="float16"), "dtype"), (dict(max_tokens=0), "max_tokens"), (dict(max_tokens="x"), "max_tokens"),
        (dict(options={"clip_steps": 1}), "options"), (dict(options=3, quantize="w4a16-g32"), "options"),
        (dict(options={"nope": 1}, quantize="w4a16-g32"), "options"), (dict(target="sm_91"), "target"),
        (dict(config={}), "config"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_whether_or_not_it_is_needed(bad, argument):
    model = float_model("llama")
    with pytest.raises((ArgumentError, TargetError), match=f"^{argument} = "):
        load(model.state_dict(), **{"config": model.config, "device": "cpu"} | bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="index 0 is a device here")
def test_index_0_is_a_gpu_and_not_the_default_device():
    model = float_model("llama")
    with pytest.raises(ArgumentError, match="cuda:0"):
        load(model.state_dict(), config=model.config, device=0)


def short(w):
    return w[:-16]


def transposed(w):
    return w.T.contiguous()


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("model.embed_tokens.weight", short, "must be"), ("lm_head.weight", short, "must be"),
        ("model.norm.weight", short, "must be"), ("model.layers.1.input_layernorm.weight", short, "must be"),
        ("model.layers.1.self_attn.k_proj.weight", short, "must have 128"),
        ("model.layers.1.self_attn.o_proj.weight", transposed, "must be"),
        ("model.layers.1.self_attn.q_norm.weight", short, "."),
        ("model.layers.1.mlp.up_proj.weight", transposed, "must have 256"),
        ("model.layers.1.mlp.down_proj.weight", short, "must be"),
        ("model.layers.1.mlp.down_proj.weight", lambda w: w.to(torch.int8), "int8.*float of 16"),
        ("model.layers.1.mlp.down_proj.weight", lambda w: w.to(torch.float8_e4m3fn), "float8_e4m3fn.*float of 16"),
        ("model.layers.1.mlp.down_proj.weight", lambda w: w * 1e7, "beyond its range; pass dtype=torch.bfloat16"),
    ],
)  # fmt: skip
def test_a_tensor_that_its_config_does_not_describe_is_refused(name, change, says):
    model = float_model("qwen3")
    state = model.state_dict()
    state[name] = change(state[name])
    with pytest.raises(ArgumentError, match=says) as caught:
        load(state, config=model.config, device="cpu", dtype=torch.float16)
    assert name.rsplit(".", 2)[-2] in str(caught.value)


def test_a_head_of_its_own_under_a_config_that_ties_it_is_refused():
    model = float_model("llama")
    state = model.state_dict()
    model.config.tie_word_embeddings = True
    with pytest.raises(ArgumentError, match="tie_word_embeddings"):
        load(state, config=model.config, device="cpu")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    assert load(state, config=model.config, device="cpu").lm_head.out_features == 64


def test_soft_caps_of_gemma_are_refused():
    model = float_model("gemma3")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ArgumentError, match="final_logit_softcapping"):
        load(model.state_dict(), config=model.config, device="cpu")


@pytest.mark.parametrize(
    "field, value",
    [("rotation", "hadamard"), ("spinquant_config", {"r4": True}), ("hadamard_config", {"block": 64})],
)
def test_float_layers_of_a_rotated_model_are_refused(tmp_path, field, value):
    float_model("llama").half().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=r"proj' ?: cannot be read"):
        load(tmp_path, device="cpu")


@torch.no_grad()
def test_beams_guesses_and_masks_that_are_too_narrow_are_refused(monkeypatch):
    model = float_model("llama")
    loaded, ids = load(model.state_dict(), config=model.config, device="cpu"), torch.arange(12).view(2, 6)
    ran: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(type(loaded), "forward", lambda *args, **kwargs: ran.append(args))
        for option in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
            with pytest.raises(ArgumentError, match=next(iter(option))):
                loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0, **option)
    assert not ran
    for wrong in (64, -1):
        with pytest.raises(ArgumentError, match=rf"input_ids = {wrong}: tokens must be 0\.\.63"):
            loaded(torch.tensor([[0, wrong]]))
    padded = torch.tensor([[-1, 5]])  # what is no token of the text is not looked up
    assert loaded(padded, attention_mask=torch.tensor([[0, 1]])).logits.isfinite().all()
    for mask in (torch.zeros(2, 5), torch.zeros(1, 6)):
        with pytest.raises(ArgumentError, match="attention_mask"):
            loaded(ids, attention_mask=mask)


@pytest.mark.parametrize("damage", ["[]", '{"model_type": "llama", "num_attention_heads": 0}', '{"dtype": "nope"}'])
def test_a_damaged_config_is_refused(tmp_path, damage):
    (tmp_path / "config.json").write_text(damage)
    with pytest.raises(ArgumentError, match="config.json"):
        load(tmp_path, device="cpu")


def test_unknown_rotary_positions_are_refused():
    model = float_model("llama")
    model.config.rope_parameters = {"rope_type": "nope", "rope_theta": 1e4}
    with pytest.raises(ArgumentError, match="config"):
        load(model.state_dict(), config=model.config, device="cpu")


@torch.no_grad()
def test_a_folder_is_quantized_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    from terrazzo.nn import quantizing

    source, out = tmp_path / "float", tmp_path / "packed"
    float_model("qwen3", torch.float16).save_pretrained(source)
    wanted = load(source, device="cpu", quantize="w4a16-g64", kv="int8")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantizing.quantize_folder(source, out, "w4a16-g64", kv="int8", device="cpu", progress=stop)
    first = (out / "model-layer-00000.safetensors").stat()
    assert not (out / "model-layer-00001.safetensors").exists() and not (out / "config.json").exists()
    with pytest.raises(ArgumentError, match="other settings"):
        quantizing.quantize_folder(source, out, "w4a8", device="cpu")
    errors = quantizing.quantize_folder(source, out, "w4a16-g64", kv="int8", device="cpu")
    assert (out / "model-layer-00000.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    assert len(errors) == 8 and all(0.01 < error < 0.15 for error in errors.values())
    again = load(out, device="cpu")
    assert again.model.formats == ("int8", "int8")
    assert torch.equal(again(TOKENS).logits, wanted(TOKENS).logits)
    with pytest.raises(ArgumentError, match="packed already"):
        quantizing.quantize_folder(out, tmp_path / "twice", "w4a8")
    with pytest.raises(ArgumentError, match="not empty"):
        quantizing.quantize_folder(source, source, "w4a8")
    with pytest.raises(ArgumentError, match="needs to see activations"):
        quantizing.quantize_folder(source, tmp_path / "mixed", "w4ax")


def test_the_command_quantizes_a_folder(tmp_path, capsys):
    from terrazzo import cli

    float_model("llama", torch.float16).save_pretrained(tmp_path / "float")
    command = ["quantize", str(tmp_path / "float"), "-o", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--format", "w4a8-g64"]
    assert cli.main([*command, "--kv", "int4_channel64/int4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["errors"]) == 8
    assert cli.main([*command, "--kv", "int4_channel64/int4"]) == 0
    assert "8 layers" in capsys.readouterr().out
    assert cli.main([*command[:-1], "w3"]) == 2
    assert load(tmp_path / "out", device="cpu").model.formats == ("int4_channel64", "int4")


@torch.no_grad()
def test_a_folder_of_4_bit_layers_is_loaded_as_it_is(tmp_path):
    """compressed-tensors, written here: signed codes plus 8, eight to a word along K. One projection stays in float."""
    from safetensors.torch import save_file
    from terrazzo.nn import Dense, Linear
    from terrazzo.ops import w4a16

    model = float_model("qwen2", torch.float16)
    wanted = load(model.state_dict(), config=model.config, device="cpu", quantize="w4a16-g64-sym")
    kept, tensors = "model.layers.1.mlp.down_proj", {}
    for name, weight in model.state_dict().items():
        prefix = name.removesuffix(".weight")
        if ".layers." not in name or "norm" in name or prefix == kept or name.endswith(".bias"):
            tensors[name] = weight.clone()
            continue
        made = w4a16.quantize_weight(weight, symmetric=True, group_size=64)
        words = (made.codes.view(made.n, -1, 8).long() << 4 * torch.arange(8)).sum(-1).to(torch.int32)
        shape = torch.tensor([made.n, made.k])
        tensors |= {f"{prefix}.weight_packed": words, f"{prefix}.weight_scale": made.scales}
        tensors[f"{prefix}.weight_shape"] = shape
    save_file({name: t for name, t in tensors.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors")
    stated = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    group = {"targets": ["Linear"], "weights": stated}
    config = model.config.to_dict() | {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head", kept],
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path, device="cpu")
    assert isinstance(loaded.decoder.layers[1].mlp.down_proj, Dense)
    assert isinstance(loaded.decoder.layers[0].mlp.down_proj, Linear)
    wanted.decoder.layers[1].mlp.down_proj = loaded.decoder.layers[1].mlp.down_proj
    assert torch.equal(loaded(TOKENS[:, :3]).logits, wanted(TOKENS[:, :3]).logits)


@pytest.mark.parametrize(
    ("form", "share"), [("w4ax", 0.5), ("w4a8-g64", 0.2), pytest.param("w4a16-g64", 0.2, marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_calibrated_formats_take_what_the_layers_read(tmp_path, form, share):
    """A channel of large activations: its order, or its smooth vector, comes from the text."""
    from terrazzo.nn.quantizing import quantize_folder

    model = float_model("llama", torch.float16)
    model.model.layers[0].input_layernorm.weight.data[5] *= 30
    model.save_pretrained(tmp_path / "float")
    text = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(7))
    options = dict(device="cpu", calibration=text, target="sm_90a")
    errors = quantize_folder(tmp_path / "float", tmp_path / "out", form, **options)
    assert len(errors) == 8 and all(0.01 < error < 0.3 for error in errors.values())
    loaded = load(tmp_path / "out", device="cpu")
    packed = loaded.decoder.layers[0].self_attn.qkv_proj.packed
    if form == "w4ax":
        assert packed.blocks8 == 1
    elif form == "w4a8-g64":
        assert float(packed.smooth[5]) == float(packed.smooth.max()) > 1.5 * float(packed.smooth.median())
    plain = load(tmp_path / "float", device="cpu", quantize=form, target="sm_90a")
    exact = model(TOKENS).logits.float()
    off, without = ((it(TOKENS).logits.float() - exact).norm() / exact.norm() for it in (loaded, plain))
    assert off < share and off < without
    with pytest.raises(ArgumentError, match="experts"):
        float_model("mixtral", torch.float16).save_pretrained(tmp_path / "sparse")
        quantize_folder(tmp_path / "sparse", tmp_path / "more", form, **options)


@torch.no_grad()
def test_positions_of_the_caller_turn_queries_and_keys():
    """Beside transformers' float model with the same positions, in a prefill, behind it, and of padded rows."""
    model = float_model("qwen3")
    loaded = load(model.state_dict(), config=model.config, device="cpu", dtype=torch.bfloat16)
    positions = torch.arange(11) * 7 + 3
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    near = lambda got, exact: bool((got.float() - exact).norm() < 0.03 * exact.norm())
    wanted = model(TOKENS, position_ids=positions[None].expand(2, -1), attention_mask=mask).logits
    got = loaded(TOKENS, position_ids=positions[None], attention_mask=mask).logits
    assert near(got[mask.bool()], wanted[mask.bool()])
    assert not near(loaded(TOKENS, attention_mask=mask).logits[mask.bool()], wanted[mask.bool()])
    steps = loaded(TOKENS[:, :8], position_ids=positions[None, :8], attention_mask=mask[:, :8], use_cache=True)
    for at in range(8, 11):
        options = dict(position_ids=positions[None, at : at + 1], past_key_values=steps.past_key_values)
        steps = loaded(TOKENS[:, at : at + 1], **options, use_cache=True)
        assert near(steps.logits[:, 0], wanted[:, at])
    for bad in (positions, positions[None, :5], positions[None].float()):
        with pytest.raises(ArgumentError, match="position_ids"):
            loaded(TOKENS, position_ids=bad)


def test_outputs_that_are_not_kept_are_refused_by_name():
    model = float_model("mixtral")
    loaded = load(model.state_dict(), config=model.config, device="cpu", quantize="w4a16-g64")
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        with pytest.raises(ArgumentError, match=f"^{name} = True"):
            loaded(TOKENS, **{name: True})
    with pytest.raises(ArgumentError, match="output_hidden_states"):
        loaded.generate(TOKENS, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)


@torch.no_grad()
def test_steps_take_pages_ahead_and_are_those_of_single_calls(monkeypatch):
    """Across the end of the pages taken ahead, between steps of several tokens, and beyond the cache's first room."""
    from terrazzo.nn import transformers_cache as made

    model = float_model("llama")
    loaded = load(model.state_dict(), config=model.config, device="cpu", max_tokens=11)
    wanted = loaded(TOKENS, use_cache=False).logits
    monkeypatch.setattr(made, "STEPS", 3)
    begun: list = []
    monkeypatch.setattr(made, "DecodeStep", lambda *a, **k: begun.append(a) or generation.DecodeStep(*a, **k))
    steps, at, found = loaded(TOKENS[:, :2], use_cache=True), 2, []
    for width in (1, 1, 1, 1, 1, 2, 1, 1):
        cache = steps.past_key_values
        steps = loaded(TOKENS[:, at : at + width], past_key_values=cache, use_cache=True)
        found.append(steps.logits)
        at += width
    torch.testing.assert_close(torch.cat(found, 1), wanted[:, 2:], rtol=2**-7, atol=2**-7)
    assert [len(a[1].sequences) for a in begun] == [2, 2, 2] and cache.get_seq_length() == 11
    further = loaded(TOKENS[:, :1], past_key_values=cache, use_cache=True).logits
    whole = loaded(torch.cat([TOKENS, TOKENS[:, :1]], 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(further, whole, rtol=2**-7, atol=2**-7)


@torch.no_grad()
def test_static_scales_of_keys_and_values_go_through_quantize_load_and_save(tmp_path):
    """A head dimension of large keys gets a scale of its own; the cache then costs little."""
    from terrazzo.nn.quantizing import quantize_folder

    model = float_model("qwen3", torch.float16)
    model.model.layers[1].self_attn.k_norm.weight.data[7] *= 20
    model.save_pretrained(tmp_path / "float")
    text = torch.cat([TOKENS, TOKENS.flip(1)])
    source, out = tmp_path / "float", tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"calibration.*kv='fp8' needs to see keys"):
        quantize_folder(source, out, "w4a16-g64", kv="fp8", device="cpu")
    quantize_folder(source, out, "w4a16-g64", kv=("int8_static", "fp8"), device="cpu", calibration=text)
    loaded = load(out, device="cpu")
    assert loaded.model.formats == ("int8_static", "fp8")
    k, v = loaded.model.static
    assert k.shape == v.shape == (2, 2, 64) and k.dtype == torch.float32
    assert float(k[1, :, 7].min()) > 3 * float(k[1].median())
    cache = loaded.new_cache(1, 16)
    assert torch.equal(cache.static[0], k) and torch.equal(cache.static[1], v)
    loaded.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", device="cpu")
    assert torch.equal(again.model.static[0], k) and again.model.formats == loaded.model.formats
    exact = load(out, device="cpu", kv="float16")
    assert exact.model.static == (None, None)
    step = lambda it: it(TOKENS[:, 8:9], past_key_values=it(TOKENS[:, :8], use_cache=True).past_key_values).logits
    got, wanted = step(loaded).float(), step(exact).float()
    assert 0 < (got - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("own", ["{0}_scale", "{0}_proj.{0}_scale", "attn.{0}_scale"])
@torch.no_grad()
def test_published_scales_of_a_cache_are_read(tmp_path, own):
    from safetensors.torch import load_file, save_file

    model = float_model("llama", torch.float16)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    for index in range(2):
        for part, scale in (("k", 0.01), ("v", 0.02)):
            name = f"model.layers.{index}.self_attn.{own.format(part)}"
            held[name] = torch.tensor([scale * (index + 1)])
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    static = load(tmp_path, device="cpu", kv="fp8").new_cache(1, 16).static
    for part, scale in zip(static, (0.01, 0.02)):
        assert torch.allclose(part, torch.tensor([scale, 2 * scale])[:, None, None].expand(2, 2, 64))


@torch.no_grad()
def test_a_head_in_4_bits_is_loaded_saved_and_loaded_again(tmp_path):
    """Of a head of its own, and of one that is tied to the embedding, which stays in 16 bits."""
    for name in ("llama", "qwen2"):
        model = float_model(name)
        given = dict(config=model.config, device="cpu", quantize="w4a16-g64")
        loaded = load(model.state_dict(), lm_head="w4a16-g64", **given)
        assert str(loaded.lm_head.format) == "w4a16-g64" and loaded.decoder.embed_tokens.weight.dtype == torch.float16
        plain = load(model.state_dict(), **given)(TOKENS).logits
        made = loaded(TOKENS).logits
        assert 0 < float((made - plain).norm() / plain.norm()) < 0.2
        loaded.save_pretrained(tmp_path / name)
        assert torch.equal(load(tmp_path / name, device="cpu")(TOKENS).logits, made)
    with pytest.raises(ArgumentError, match="format"):
        load(model.state_dict(), config=model.config, device="cpu", lm_head="w5")
