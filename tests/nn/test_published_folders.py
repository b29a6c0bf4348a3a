"""Folders of compressed-tensors that `terrazzo quantize` writes, what `pack` makes of them, and W4A8 from 4 bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from terrazzo.cli import main
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.quantizing import quantize_folder
from terrazzo.ops.checkpoints.conventions.table import WRITERS
from terrazzo.ops.products.table import BY_WORD
from tiny_text import VOCABULARY, write_folder

TOKENS = torch.arange(40, 60)[None]
CPU = {"device": "cpu"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("published") / "float")


def logits(folder, **options) -> torch.Tensor:
    return terrazzo.load(folder, **CPU, **options)(TOKENS).logits


def method(folder) -> str:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]


def write_sizes(folder, **sizes):
    """A Llama of one layer with other sizes."""
    config = transformers.LlamaConfig(**{
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": VOCABULARY, "initializer_range": 0.2,
    } | sizes)  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


def names(folder) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


@pytest.mark.parametrize(
    ("form", "published", "leaves"),
    [
        ("w4a16-g64", "pack-quantized", {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}),
        ("w4a8-e4m3-g64", "pack-quantized", {"weight_packed", "weight_scale", "weight_shape"}),
        ("w8a8", "int-quantized", {"weight", "weight_scale"}),
        ("fp8-g128", "float-quantized", {"weight", "weight_scale"}),
        ("mxfp4", "mxfp4-pack-quantized", {"weight_packed", "weight_scale"}),
        ("nvfp4", "nvfp4-pack-quantized", {"weight_packed", "weight_scale", "weight_global_scale"}),
    ],
)
def test_a_published_format_is_written_as_such(source, tmp_path, form, published, leaves):
    out, packed, direct = (tmp_path / name for name in ("out", "packed", "direct"))
    errors = quantize_folder(source, out, form, **CPU)
    assert set(errors) == {f"decoder.layers.0.{part}" for part in ("self_attn.qkv_proj", "self_attn.o_proj",
                                                                   "mlp.gate_up_proj", "mlp.down_proj")}  # fmt: skip
    assert all(0 < error < 0.2 for error in errors.values())
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["format"] == published and config["architectures"] == ["LlamaForCausalLM"]
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
    layers = [f"model.layers.0.{part}" for part in (*projections, "mlp.up_proj", "mlp.down_proj")]
    others = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    others |= {f"model.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")}
    assert names(out) == others | {f"{layer}.{leaf}" for layer in layers for leaf in leaves}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).is_file(), name
    # the same logits from the cache of it, and from what is packed of the float model at once
    assert quantize_folder(out, packed, None, **CPU) == dict.fromkeys(errors, 0.0)
    assert json.loads((packed / "config.json").read_text())["quantization_config"]["quant_method"] == "terrazzo"
    wanted = logits(out)
    assert torch.equal(logits(packed), wanted)
    quantize_folder(source, direct, form, **CPU, write="packed")
    near = torch.allclose if form == "nvfp4" else torch.equal  # whose factor is stored as its reciprocal
    assert near(logits(direct), wanted)


def test_a_stopped_run_goes_on_and_equal_runs_write_equal_bytes(source, tmp_path):
    config = transformers.LlamaConfig.from_pretrained(source)
    config.num_hidden_layers = 3
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).half().save_pretrained(tmp_path / "three")

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(tmp_path / "three", tmp_path / "a", "w4a16-g64", progress=stop, **CPU)
    kept = (tmp_path / "a" / "model-layer-00001.safetensors").stat().st_mtime_ns
    for name in "ab":
        assert len(quantize_folder(tmp_path / "three", tmp_path / name, "w4a16-g64", **CPU)) == 12
    assert (tmp_path / "a" / "model-layer-00001.safetensors").stat().st_mtime_ns == kept
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b and logits(tmp_path / "a").isfinite().all()
    with pytest.raises(ArgumentError, match="write was 'pack-quantized' and is None"):
        quantize_folder(tmp_path / "three", tmp_path / "a", "w4a16-g64", write="packed", **CPU)


def test_experts_are_written_one_by_one_and_routers_are_ignored(tmp_path):
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, vocab_size=VOCABULARY, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "float")
    quantize_folder(tmp_path / "float", tmp_path / "out", "w4a16-g32-sym", **CPU)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["ignore"] == ["model.layers.0.mlp.gate", "lm_head"]
    for e, part in ((0, "gate_proj"), (3, "up_proj"), (2, "down_proj")):
        assert f"model.layers.0.mlp.experts.{e}.{part}.weight_packed" in names(tmp_path / "out")
    assert not [name for name in names(tmp_path / "out") if "gate_up" in name]
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "float", quantize="w4a16-g32-sym"))


def test_stacked_experts_are_taken_apart(tmp_path):
    """As transformers holds them in memory: two tensors of all experts."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=VOCABULARY, num_experts=2, num_experts_per_tok=1, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "float")
    state, at = load_file(tmp_path / "float" / "model.safetensors"), "model.layers.0.mlp.experts"
    take = lambda part: [state.pop(f"{at}.{e}.{part}_proj.weight") for e in range(2)]
    if f"{at}.gate_up_proj" not in state:
        both = [torch.cat(pair) for pair in zip(take("gate"), take("up"))]
        state |= {f"{at}.gate_up_proj": torch.stack(both), f"{at}.down_proj": torch.stack(take("down"))}
    save_file(state, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    quantize_folder(tmp_path / "float", tmp_path / "out", "w4a16-g32-sym", **CPU)
    assert f"{at}.1.up_proj.weight_scale" in names(tmp_path / "out")
    assert not any(name.startswith(f"{at}.gate_up") for name in names(tmp_path / "out"))
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "float", quantize="w4a16-g32-sym"))


def test_what_no_published_folder_holds_is_packed_or_refused(source, tmp_path):
    quantize_folder(source, tmp_path / "kv", "w4a16-g64", kv="int8", **CPU)
    quantize_folder(source, tmp_path / "w4a8", "w4a8-g64", **CPU)
    assert method(tmp_path / "kv") == method(tmp_path / "w4a8") == "terrazzo"
    for format, options, said in [
        ("w4a16-g64", {"kv": "int8"}, "names no kv"), ("w4a16-g64", {"target": "sm_90a"}, "names no target"),
        ("w4a8-g64", {}, "has no form for w4a8-g64"), ("mxfp4-e4m3", {}, "has no form"),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError, match=f"write = 'compressed-tensors': {said}"):
            quantize_folder(source, tmp_path / "x", format, write="compressed-tensors", **CPU, **options)
    with pytest.raises(ArgumentError, match="write = 'gguf': must be one of"):
        quantize_folder(source, tmp_path / "x", "w4a16-g64", write="gguf", **CPU)
    with pytest.raises(ArgumentError, match="format = None: the layers of .* are float"):
        quantize_folder(source, tmp_path / "x", None, **CPU)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("acts", [None, "int8"])
def test_w4a8_is_made_of_4_bit_codes_with_its_error(source, tmp_path, acts):
    """Of a folder with free scales, as GPTQ leaves them, whatever it says of activations."""
    four, eight = tmp_path / "four", tmp_path / "eight"
    quantize_folder(source, four, "w4a16-g64-sym", **CPU)
    if acts is not None:
        config = json.loads((four / "config.json").read_text())
        x = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = x
        (four / "config.json").write_text(json.dumps(config))
        with pytest.raises(ArgumentError, match="requantize=True"):
            terrazzo.load(four, **CPU)
    errors = quantize_folder(four, eight, "w4a8", **CPU)
    assert all(0.001 < error < 0.06 for error in errors.values()) and len(errors) == 4
    assert errors["decoder.layers.0.mlp.down_proj"] == pytest.approx(_error_of(four, eight), rel=1e-6)
    assert logits(eight).isfinite().all()
    with pytest.raises(ArgumentError, match="has quantized layers already.*of 4-bit integers w4a8 can be made"):
        quantize_folder(four, tmp_path / "x", "w4a16-g64", **CPU)
    with pytest.raises(ArgumentError, match="calibration"):
        quantize_folder(four, tmp_path / "x", "w4a8", calibration=TOKENS, **CPU)


def _error_of(four, eight) -> float:
    """Of the last layer's down projection, between what both folders hold."""
    from terrazzo.ops.checkpoints import Checkpoint
    from terrazzo.ops.w4a8.importers import SOURCES

    name = "model.layers.0.mlp.down_proj"
    before = SOURCES.read(Checkpoint(four), name, torch.device("cpu")).dequantize("post")
    after = terrazzo.load(eight, **CPU).decoder.layers[0].mlp.down_proj.packed.dequantize()
    return float((after - before).norm() / before.norm())


def test_act_order_is_refused_by_name(source, tmp_path):
    four = tmp_path / "four"
    quantize_folder(source, four, "w4a16-g64-sym", **CPU)
    path = four / "model-layer-00000.safetensors"
    state, name = load_file(path), "model.layers.0.self_attn.o_proj"
    state[f"{name}.weight_g_idx"] = torch.arange(128).flip(0).int() // 64
    save_file(state, path, metadata={"format": "pt"})
    index = json.loads((four / "model.safetensors.index.json").read_text())
    index["weight_map"][f"{name}.weight_g_idx"] = path.name
    (four / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArgumentError, match="o_proj.*W4A8 has not|only W4A16 serves"):
        quantize_folder(four, tmp_path / "x", "w4a8", **CPU)


def test_the_command_writes_packs_and_says_so(source, tmp_path, capsys):
    out, packed = tmp_path / "out", tmp_path / "packed"
    assert main(["quantize", str(source), "-o", str(out), "--format", "w4a16-g64", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "compressed-tensors" in said and (out / "config.json").is_file()
    assert main(["pack", str(out), "-o", str(packed), "--kv", "int8", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "packed" in said and "4 layers" in said
    assert terrazzo.load(packed, **CPU).model.formats == ("int8", "int8")
    assert torch.equal(logits(packed), logits(out, kv="int8"))
    again = shutil.copytree(source, tmp_path / "copy")
    assert main(["pack", str(again), "-o", str(tmp_path / "no"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "layers of" in said and "quantize them: terrazzo quantize" in said
    assert main(["pack", str(out), "-o", str(tmp_path / "no"), "--device", "cpu", "--kv", "fp8"]) == 2
    said = capsys.readouterr().err
    assert "name int8" in said and "--calibration" not in said  # which pack has not
    assert main(["quantize", str(source), "-o", str(tmp_path / "no"), "--device", "cpu", "--kv", "fp8"]) == 2
    assert "to the command --calibration FILE" in capsys.readouterr().err


def test_help_and_page_name_every_format_and_how_its_folder_is_written(capsys):
    assert main(["quantize", "--help"]) == 0
    said = capsys.readouterr().out
    page = (
        (Path(__file__).parents[2] / "docs" / "quantize.md").read_text(encoding="utf-8").partition("## Which folder")[2]
    )
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    written = {word: how.strip() for formats, how in rows for word in re.findall("`(.*?)`", formats)}
    assert set(written) == set(BY_WORD)
    for word, product in BY_WORD.items():
        assert re.search(rf"[\s,]{word}[-,.\s]", said), word
        published = WRITERS[product.record].published if product.record in WRITERS else "packed"
        assert published in written[word].split(", "), word


# -- models whose sizes end inside of a group --------------------------------------------------------------------------
UNEVEN = [
    ("w4a16-g128", {"intermediate_size": 192}, r"K = 192 of model.layers.0.mlp.down_proj.weight is no multiple"),
    ("mxfp4", {"intermediate_size": 144}, "K = 144"),
    ("fp8-g128", {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3}, "the 192 of keys"),
]


@pytest.mark.parametrize(("form", "sizes", "said"), UNEVEN)
def test_a_model_that_no_published_folder_holds_is_packed(tmp_path, form, sizes, said):
    source, out = write_sizes(tmp_path / "float", **sizes), tmp_path / "out"
    assert main(["quantize", str(source), "-o", str(out), "--format", form, "--device", "cpu"]) == 0
    assert method(out) == "terrazzo" and torch.equal(logits(out), logits(source, quantize=form))
    with pytest.raises(ArgumentError, match=rf"write = 'compressed-tensors': has whole .*{said}.*\(--write packed\)"):
        quantize_folder(source, tmp_path / "x", form, write="compressed-tensors", **CPU)
    assert not (tmp_path / "x").exists()


def test_rows_that_end_inside_of_a_block_are_published_where_values_have_one(tmp_path):
    """As those of one head of 64: keys and values lie in one block."""
    quantize_folder(write_sizes(tmp_path / "float"), tmp_path / "out", "fp8-g128", **CPU)
    assert method(tmp_path / "out") == "compressed-tensors"


def test_stacked_experts_of_another_size_are_packed(tmp_path):
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, moe_intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=VOCABULARY, num_experts=2, num_experts_per_tok=1, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "float")
    state, at = load_file(tmp_path / "float" / "model.safetensors"), "model.layers.0.mlp.experts"
    if f"{at}.gate_up_proj" not in state:
        take = lambda part: [state.pop(f"{at}.{e}.{part}_proj.weight") for e in range(2)]
        both = [torch.cat(pair) for pair in zip(take("gate"), take("up"))]
        state |= {f"{at}.gate_up_proj": torch.stack(both), f"{at}.down_proj": torch.stack(take("down"))}
        save_file(state, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    quantize_folder(tmp_path / "float", tmp_path / "out", "w4a16-g64", **CPU)
    assert method(tmp_path / "out") == "terrazzo"
    state[f"{at}.down_proj"][1, 3, 5] = float("nan")
    save_file(state, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=rf"^{at}.down_proj\[1\] = 'NaN or infinity'"):
        quantize_folder(tmp_path / "float", tmp_path / "nan", "w4a16-g64", **CPU)


@pytest.mark.parametrize(
    ("form", "leaf", "joined"),
    [
        ("w4a16-g64", "mlp.down_proj", ""),
        ("mxfp4", "self_attn.o_proj", ""),
        ("w4a8", "mlp.up_proj", ".*gate_proj.* or "),
    ],
)
def test_a_weight_that_is_no_number_is_named(source, tmp_path, form, leaf, joined):
    folder, name = shutil.copytree(source, tmp_path / "float"), f"model.layers.0.{leaf}.weight"
    state = load_file(folder / "model.safetensors")
    state[name][3, 5] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=f"^{joined}{name} = 'NaN or infinity': must be finite"):
        quantize_folder(folder, tmp_path / "out", form, **CPU)


def test_a_packed_folder_of_a_version_that_wrote_no_other_goes_on_where_that_is_asked_for(source, tmp_path):
    out = tmp_path / "out"
    quantize_folder(source, out, "w4a16-g64", write="packed", **CPU)
    noted = json.loads((out / "terrazzo_quantize.json").read_text())
    del noted["settings"]["write"], noted["settings"]["method"]
    (out / "terrazzo_quantize.json").write_text(json.dumps(noted))
    before = (out / "model-layer-00000.safetensors").stat().st_mtime_ns
    with pytest.raises(
        ArgumentError, match=r"write was None.*write 'packed' \(--write packed\), which goes on with it"
    ):
        quantize_folder(source, out, "w4a16-g64", **CPU)
    with pytest.raises(ArgumentError, match="format was.*or ask for the same"):
        quantize_folder(source, out, "w4a16-g32", **CPU)
    quantize_folder(source, out, "w4a16-g64", write="packed", **CPU)
    assert (out / "model-layer-00000.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(("activations", "form"), [("mxfp8", "mxfp4-mxfp8"), ("e4m3", "mxfp4-e4m3")])
def test_activations_of_a_float_folder_are_a_format(source, activations, form):
    with pytest.raises(ArgumentError, match=f'the source has none; leave it out; for float ones quantize="{form}"'):
        terrazzo.load(source, **CPU, activations=activations)
    with pytest.raises(ArgumentError, match=r"activations = \['mxfp8'\]: must be None or"):
        terrazzo.load(source, **CPU, activations=["mxfp8"])
