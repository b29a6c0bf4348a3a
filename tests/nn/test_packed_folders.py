"""What a packed folder holds beside its weights: all that its user needs, and what stops transformers without us."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
import transformers
from safetensors.torch import load_file, save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.folders import carry
from terrazzo.nn.quantizing import quantize_folder
from tiny_text import write_folder
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

OTHERS = {
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "tokenizer.model": "\x00\x01pieces",
    "merges.txt": "#version: 0.2\n",
    "vocab.json": "{}",
    "preprocessor_config.json": "{}",
    "LICENSE": "terms",
    "additional_chat_templates/tools.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [256, 7], "do_sample": false, "temperature": 0.6}',
}
"""Files that publishers add; such a temperature is what transformers' own save_pretrained refuses to write."""
WEIGHTS = {"notes.txt", "train.py", "pytorch_model.bin.index.json", "README.md"}
"""Files that stay where they are."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A float folder, and what `quantize_folder` and `save_pretrained` make of it."""
    root = tmp_path_factory.mktemp("packed")
    source = write_folder(root / "float")
    (source / "additional_chat_templates").mkdir()
    for name in WEIGHTS:
        (source / name).write_text("{}")
    (source / "tokenizer.model.v3").mkdir()  # a folder of that name is no file
    for name, text in OTHERS.items():
        (source / name).write_text(text)
    (root / "blob").write_bytes((source / "tokenizer.json").read_bytes())
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("../blob")  # as caches of downloads have it
    quantize_folder(source, root / "quantized", "w4a16-g64", device="cpu", write="packed")
    model = terrazzo.load(source, quantize="w4a16-g64", device="cpu")
    model.save_pretrained(root / "saved")
    terrazzo.load(root / "saved", device="cpu").save_pretrained(root / "again")
    return root, terrazzo.generate(model, "Hi", chat=True, max_new_tokens=4)


@pytest.mark.parametrize("made", ["quantized", "saved", "again"])
def test_a_packed_folder_gives_text_by_itself(folders, made):
    root, said = folders
    carried = {*OTHERS, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} - {"generation_config.json"}
    for name in carried:
        assert (root / made / name).read_bytes() == (root / "float" / name).read_bytes()
        assert not (root / made / name).is_symlink()
    assert not WEIGHTS & {path.name for path in (root / made).iterdir()}
    generation = json.loads((root / made / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [256, 7] and generation["temperature"] == 0.6
    load = {"device": "cpu"}
    assert terrazzo.generate(root / made, "Hi", chat=True, max_new_tokens=4, load=load) == said


@pytest.mark.parametrize("made", ["quantized", "saved"])
def test_transformers_alone_refuses_it(folders, made, monkeypatch):
    """Without our quantizer it would warn, and fill the model with random numbers."""
    for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(mapping, "terrazzo", raising=False)
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoModel):
        with pytest.raises(RuntimeError, match="mismatch"):
            kind.from_pretrained(folders[0] / made)
    stated = json.loads((folders[0] / made / "config.json").read_text())
    assert stated["architectures"] == ["TerrazzoLlamaForCausalLM"]


def test_folders_that_were_packed_before_still_load(folders, tmp_path):
    """They have the float model's architecture, and no tensor that stops transformers."""
    saved = folders[0] / "saved"
    state = load_file(saved / "model.safetensors")
    assert state.pop("model.norm.weight").numel() == 0
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((saved / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(5)[None]
    old, new = (terrazzo.load(folder, device="cpu") for folder in (tmp_path, saved))
    assert torch.equal(old(tokens).logits, new(tokens).logits)


def test_what_cannot_be_copied_is_named(folders, tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ArgumentError, match=r"folder = .*tokenizer\.json.*cannot be written"):
        carry(folders[0] / "float", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert carry(None, tmp_path) == carry(tmp_path / "nothing", tmp_path) == carry(tmp_path, tmp_path) == []


def test_the_folder_is_known_whoever_made_the_config(folders):
    source = folders[0] / "float"
    config = transformers.LlamaConfig.from_pretrained(source)
    config.name_or_path = ""
    model = terrazzo.load(source, config=config, device="cpu")
    assert terrazzo.generate(model, "Hi", max_new_tokens=1) and model.name_or_path == str(source)


def test_what_would_change_nothing_is_refused(folders, tmp_path):
    """Arguments of load that a kind of folder has no use for."""
    from tests.integrations.test_transformers import write_awq

    awq, root = write_awq(tmp_path / "awq"), folders[0]
    packed = root / "quantized"
    with_head = terrazzo.load(root / "float", lm_head="w4a16-g64", device="cpu")
    with_head.save_pretrained(tmp_path / "head")
    for folder, options in [
        (awq, {"quantize": "w4a8"}), (awq, {"quantize": "w4a16-g128"}), (packed, {"quantize": "w4a8"}),
        (packed, {"format": "awq"}), (packed, {"target": "sm_80"}), (packed, {"weight_only": True}),
        (packed, {"activations": "e4m3"}), (packed, {"report": lambda *_: None}),
        (tmp_path / "head", {"lm_head": "w4a16-g64"}), (root / "float", {"format": "awq"}),
        (root / "float", {"quantize": "w4a8", "weight_only": True}),
    ]:  # fmt: skip
        name = "weight_only" if "weight_only" in options else next(iter(options))
        with pytest.raises(ArgumentError) as said:
            terrazzo.load(folder, device="cpu", **options)
        assert said.value.argument == name, (folder, options)
    with pytest.raises(ArgumentError, match="format"):
        config = transformers.LlamaConfig.from_pretrained(root / "float")
        terrazzo.load(load_file(root / "float" / "model.safetensors"), config=config, format="awq", device="cpu")
    assert terrazzo.load(packed, lm_head="w4a16-g64", target="sm_90a", device="cpu").lm_head.format


def test_a_text_that_a_format_takes_nothing_from_is_refused(folders, tmp_path):
    text = torch.ones(1, 8, dtype=torch.long)
    with pytest.raises(ArgumentError, match="calibration"):
        quantize_folder(folders[0] / "float", tmp_path / "a", "fp8", device="cpu", calibration=text)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "w4a61-g128"}, "quantize = .*did you mean 'w4a16-g128'"),
        ({"lm_head": "W4A16"}, "lm_head = .*did you mean 'w4a16'"),
        ({"kv": "int4_channel46"}, "kv = .*did you mean 'int4_channel64'"),
        ({"kv": "int8/itn4"}, "kv = 'itn4'.*did you mean 'int4'"),
        ({"kv": ("int8", "bf16")}, "kv = 'bf16'.*did you mean 'bfloat16'"),
        ({"format": "aqw"}, "format = .*did you mean 'awq'"),
        ({"device": "gpu"}, "device = 'gpu': must be a device; pass 'cuda'"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_right_one(folders, options, words):
    with pytest.raises(ArgumentError, match=words):
        terrazzo.load(folders[0] / "float", **{"device": "cpu", **options})


def test_pairs_of_formats_are_taken_as_the_command_takes_them(folders):
    source = folders[0] / "float"
    for kv, formats in [("int8/int4", ("int8", "int4")), ("int4", ("int4_hadamard", "int4")), ("int8", ("int8",) * 2)]:
        assert terrazzo.load(source, kv=kv, device="cpu").model.formats == formats


def test_float_layers_of_a_quantized_folder_are_quantized(folders, tmp_path):
    """One projection is float beside 4-bit ones: `quantize` is for that one."""
    from terrazzo.nn import Dense, Linear

    from tests.integrations.test_transformers import write_awq

    folder, name = write_awq(tmp_path / "awq"), "model.layers.0.self_attn.o_proj"
    state = load_file(folder / "model.safetensors")
    state = {key: t for key, t in state.items() if not key.startswith(name)}
    save_file({**state, f"{name}.weight": torch.eye(128).half()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["o_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    kept, made = (terrazzo.load(folder, quantize=form, device="cpu") for form in (None, "w4a16-g128"))
    at = lambda model: model.decoder.layers[0].self_attn
    assert type(at(kept).o_proj) is Dense and type(at(made).o_proj) is Linear
    assert torch.equal(at(kept).qkv_proj.packed.words, at(made).qkv_proj.packed.words)


def test_a_packed_folder_may_be_written_over(folders, tmp_path):
    """What `terrazzo quantize` wrote leaves no weights behind that no index names, nor the note of its run."""
    root, said = folders
    place = tmp_path / "packed"
    shutil.copytree(root / "quantized", place)
    model = terrazzo.load(place, device="cpu")
    model.save_pretrained(place)
    assert {path.name for path in place.glob("*.safetensors*")} == {"model.safetensors"}
    assert not (place / "terrazzo_quantize.json").exists()
    again = terrazzo.load(place, device="cpu")
    assert terrazzo.generate(again, "Hi", chat=True, max_new_tokens=4) == said


def test_a_cast_is_what_the_config_of_its_folder_says(folders, tmp_path):
    model = terrazzo.load(folders[0] / "quantized", device="cpu")
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}[model.dtype]
    model.to(other).save_pretrained(tmp_path)
    again = terrazzo.load(tmp_path, device="cpu")
    tokens = torch.arange(3, 9)[None]
    assert again.dtype == other and torch.equal(again(tokens).logits, model(tokens).logits)


def test_another_embedding_is_refused_and_the_own_one_is_none(folders):
    model = terrazzo.load(folders[0] / "quantized", device="cpu")
    own = model.get_input_embeddings()
    model.set_input_embeddings(own)
    with pytest.raises(ArgumentError, match="must be the model's own"):
        model.set_input_embeddings(torch.nn.Embedding(*own.weight.shape))
    assert model.get_input_embeddings() is own


def test_a_lost_embedding_is_named_by_every_reader(folders, tmp_path):
    from terrazzo.cli import main

    shutil.copytree(folders[0] / "quantized", tmp_path / "m")
    (tmp_path / "m" / "model-rest.safetensors").unlink()
    with pytest.raises(ArgumentError, match="embed_tokens.weight.*get the missing shard"):
        terrazzo.load(tmp_path / "m", device="cpu")
    assert main(["compile", str(tmp_path / "m"), "--target", "sm_90a", "--dry-run"]) == 2


def test_a_run_that_made_no_layer_leaves_nothing_behind(folders, tmp_path):
    """W4Ax needs a target where no GPU is; with one, the same folder is taken."""
    options = dict(calibration=torch.arange(3, 35)[None], device="cpu")
    with pytest.raises(ArgumentError, match="target"):
        quantize_folder(folders[0] / "float", tmp_path / "made", "w4ax", **options)
    assert not list((tmp_path / "made").iterdir())
    quantize_folder(folders[0] / "float", tmp_path / "made", "w4ax", target="sm_90a", **options)
    assert terrazzo.load(tmp_path / "made", device="cpu")(torch.arange(3, 9)[None]).logits.isfinite().all()
