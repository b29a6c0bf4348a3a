"""Which file a tensor is read from: the index is the authority, and what it cannot answer for is named."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
import torch
from checkpoint_folders import AWQ, GPTQ, LAYER, stored, tensors, write
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.loading import load
from terrazzo.ops import model_layers, w4a16
from terrazzo.ops.checkpoints import Checkpoint, patterns
from terrazzo.ops.checkpoints.patterns import matches

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def indexed(tmp_path, held, shards):
    return write(tmp_path / "m", held, AWQ, shards)


def test_the_shard_that_the_index_names_is_read(tmp_path):
    held = tensors("awq")
    folder = indexed(tmp_path, held, dict.fromkeys(held, A))
    save_file({name: torch.zeros_like(t) for name, t in held.items()}, folder / B)  # later in the order of names
    weight_map = dict.fromkeys(held, A) | {"other.weight": B}
    save_file({"other.weight": torch.ones(2), **{n: torch.zeros_like(t) for n, t in held.items()}}, folder / B)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(w4a16.load_layer(folder, LAYER).dequantize("post"), stored("awq")[1])


@pytest.mark.parametrize("convention", ["awq", "gptq_sym"])
def test_words_without_a_config_are_of_the_format_whose_shapes_they_have(tmp_path, convention):
    model = w4a16.load_model(write(tmp_path, tensors(convention)))
    assert list(model.layers) == [LAYER], model.skipped
    assert torch.equal(w4a16.load_layer(tmp_path, LAYER).dequantize("post"), stored(convention)[1])


def test_what_no_shard_holds_is_named(tmp_path):
    held = tensors("awq") | {"model.norm.weight": torch.ones(4)}
    folder = indexed(tmp_path, held, dict.fromkeys(held, A))
    weight_map = dict.fromkeys(held, A) | {f"{LAYER}.bias": A, "lm_head.weight": A}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = w4a16.load_model(folder)
    assert not model.layers and f"'{LAYER}.bias' to {A}, which does not hold it" in model.skipped[LAYER]
    assert "which does not hold it" in model.skipped["lm_head"]
    with pytest.raises(ArgumentError, match="which does not hold it"):
        w4a16.load_layer(folder, LAYER)


def test_what_the_index_does_not_name_is_named(tmp_path):
    """A bias that lies beside a layer in its shard may belong to it, or be a leftover."""
    held, extra = tensors("awq", "a", "b"), {"a.bias": torch.ones(64).half(), "x.weight": torch.ones(3)}
    folder = indexed(tmp_path, held | extra, dict.fromkeys(held | extra, A))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(held, A)}))
    save_file({"y": torch.ones(1)}, folder / "consolidated.safetensors")
    model = w4a16.load_model(folder)
    assert list(model.layers) == ["b"] and "the index does not name" in model.skipped["a"]
    assert "the index does not name" in model.skipped["x"]
    assert model.skipped["consolidated.safetensors"] == "a file that the index does not name"


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    held = tensors("awq", "a", "b")
    folder = write(tmp_path / "m", held, AWQ)
    save_file({"a.scales": torch.ones(2, 64).half()}, folder / "patch.safetensors")
    model = w4a16.load_model(folder)
    assert list(model.layers) == ["b"] and "model.safetensors and patch.safetensors both hold" in model.skipped["a"]
    with pytest.raises(ArgumentError, match="both hold 'a.scales'"):
        w4a16.load_layer(folder, "a")


@pytest.mark.parametrize(
    ("held", "remedy"),
    [
        ("pytorch_model.bin", "save_pretrained writes safetensors files"),
        ("model-q4_0.gguf", "GGUF's formats are not read"),
        ("adapter_config.json", "merge the adapter into its model"),
        ("README.md", "download it first"),
    ],
)
def test_a_folder_without_safetensors_files_says_what_to_do_with_those_it_has(tmp_path, held, remedy):
    (tmp_path / held).write_text("{}")
    for read, name in ((Checkpoint, "path"), (load, "source")):  # the latter misses config.json first
        with pytest.raises(ArgumentError) as said:
            read(tmp_path)
        assert said.value.argument == name and remedy in said.value.remedy


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_folder_with_one_bad_shard_serves_the_whole_layers(tmp_path, damage):
    held = tensors("awq", "a", "b", "c")
    shards = {name: B if name.startswith("b.") or name == "c.qzeros" else A for name in held}
    folder = indexed(tmp_path, held, shards)
    (folder / B).unlink()
    if damage == "cut":
        (folder / B).write_bytes(b"\x10" * 40)
    model = w4a16.load_model(folder)
    assert list(model.layers) == ["a"]
    why = f"{B} is not there" if damage == "gone" else f"{B} must be a readable safetensors file"
    again = "get it again, into the folder of its index" if damage == "gone" else "download the file again"
    named = model_layers.of_folder(folder).skipped  # what `terrazzo compile` and `serve-check` print
    for name in "bc":
        with pytest.raises(ArgumentError) as said:
            w4a16.load_layer(folder, name)
        assert said.value.remedy == "get the checkpoint's files again"
        for text in (model.skipped[name], named[name], str(said.value)):
            assert why in text and again in text and "another format" not in text
    assert torch.equal(w4a16.load_layer(folder, "a").dequantize("post"), stored("awq")[1])
    (folder / A).unlink()
    with pytest.raises(ArgumentError, match="no file that it names can be read"):
        w4a16.load_model(folder)


def test_vectors_that_change_a_layer_are_seen(tmp_path):
    """AutoAWQ's ScaledActivation divides the input of the layer behind an activation function; a bias does not."""
    names = "h.0.mlp.fc_in", "h.0.mlp.fc_out", "h.1.mlp.fc_out"
    held = tensors("awq", names[1])
    square = stored("awq", k=256, n=256)[0] | {"bias": torch.ones(256).half()}
    held |= {f"{names[2]}.{leaf}": t for leaf, t in square.items()}
    held |= {f"{names[0]}.{leaf}": t for leaf, t in stored("awq", k=128, n=256)[0].items()}
    held |= {"h.0.mlp.act.scales": torch.ones(256).half(), "h.0.ln.weight": torch.ones(128)}
    folder = write(tmp_path, held, AWQ)
    model = w4a16.load_model(folder)
    assert sorted(model.layers) == [names[0], names[2]]
    assert "'h.0.mlp.act.scales' divides the activations" in model.skipped[names[1]]
    assert set(model.skipped) == {names[1], "h.0.mlp.act.scales", "h.0.ln"}
    with pytest.raises(ArgumentError, match="divides the activations"):
        w4a16.load_layer(folder, names[1])


@pytest.mark.parametrize("leaf", ["k_proj.k_scale", "v_proj.v_scale", "q_proj.q_scale", "k_proj.output_scale"])
def test_scales_of_a_cache_are_none_of_the_layer_whose_name_they_bear(tmp_path, leaf):
    """ModelOpt and Quark write them so; the same leaves of other layers are a reason."""
    name, scale = f"model.layers.0.self_attn.{leaf.partition('.')[0]}", torch.ones(())
    folder = write(tmp_path / "own", tensors("awq", name) | {f"model.layers.0.self_attn.{leaf}": scale}, AWQ)
    alone = write(tmp_path / "alone", tensors("awq", name), AWQ)
    assert torch.equal(w4a16.read_layer(folder, name).codes, w4a16.read_layer(alone, name).codes)
    other = write(tmp_path / "other", tensors("awq", LAYER) | {f"{LAYER}.{leaf.partition('.')[2]}": scale}, AWQ)
    with pytest.raises(ArgumentError, match="is not read"):
        w4a16.read_layer(other, LAYER)


@pytest.mark.parametrize("extra", ["input_scale", "lora_A.weight", "R4_input.weight", "pre_quant_scale", "weight"])
@pytest.mark.parametrize("convention", ["awq", "gptq", "pack"])
def test_a_tensor_behind_a_layers_name_that_is_not_read_is_a_reason(tmp_path, convention, extra):
    held = tensors(convention, "a.b", "a.bc") | {f"a.b.{extra}": torch.ones(64)}
    format = {"pack": "compressed_tensors"}.get(convention, convention)
    folder = write(tmp_path, held, None)
    layers = {layer.name: layer for layer in w4a16.iter_layers(folder, format=format)}
    assert layers["a.bc"].weight is not None and layers["a.b"].weight is None
    assert f"its tensor {extra!r} is not read" in layers["a.b"].skipped
    assert {f"a.b.{extra}", f"a.b.{extra}".removesuffix(".weight")} & (set(layers) - {"a.b"})
    with pytest.raises(ArgumentError, match="is not read: it may change what the layer means"):
        w4a16.load_layer(folder, "a.b", format=format)


@pytest.mark.parametrize(
    "shard",
    ["../m.safetensors", "/etc/m.safetensors", "a/../../m.safetensors", "..\\m.safetensors", "C:\\m.safetensors", "",
     "a\0b", "x" * 5000, ".."],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_only(tmp_path, shard):
    held = tensors("awq")
    folder = indexed(tmp_path, held, dict.fromkeys(held, A))
    save_file(held, tmp_path / "m.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(held, A) | {"z": shard}})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ArgumentError):
        w4a16.load_model(folder)


def test_shards_in_folders_of_the_folder(tmp_path):
    held = tensors("awq")
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    indexed(tmp_path, held, dict.fromkeys(held, f"sub/{A}"))
    assert LAYER in w4a16.load_model(folder).layers


@pytest.mark.parametrize("whole", [True, False])
def test_links_of_the_hugging_face_cache_are_followed(tmp_path, whole):
    """models--x--y/snapshots/<revision>/<file> -> ../../blobs/<hash>, and a folder of links into the cache."""
    held, repository = tensors("awq"), tmp_path / "hub" / "models--x--y"
    made = indexed(tmp_path, held, dict.fromkeys(held, A))
    snapshot = repository / "snapshots" / "0123" if whole else tmp_path / "local"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(made.iterdir())):
        blob = repository / "blobs" / f"{i:064}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot) if whole else blob)
    assert torch.equal(w4a16.load_layer(snapshot, LAYER).dequantize("post"), stored("awq")[1])


@pytest.mark.parametrize("name", [A, "model.safetensors.index.json", "config.json"])
def test_links_that_leave_the_folder_are_refused(tmp_path, name):
    held = tensors("awq")
    folder = indexed(tmp_path, held, dict.fromkeys(held, A))
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ArgumentError, match="link that leaves its folder.*copy the file"):
        w4a16.load_layer(folder, LAYER)


def test_what_is_no_file_is_not_opened(tmp_path):
    folder = write(tmp_path / "m", tensors("awq"), AWQ)
    more = folder / "more.safetensors"
    places = (os.mkfifo, os.mkdir, lambda at: at.symlink_to(at.name), lambda at: at.symlink_to("nowhere"))
    for put in places:
        put(more)
        with pytest.raises(ArgumentError, match="more.safetensors"):
            w4a16.load_model(folder)
        more.rmdir() if put is os.mkdir else more.unlink()
    assert LAYER in w4a16.load_model(folder).layers


def test_several_indices_are_told_apart(tmp_path):
    held = tensors("awq")
    folder = indexed(tmp_path, held, dict.fromkeys(held, A))
    own = folder / "model.safetensors.index.json"
    for name in ("model.fp16", "model.int4"):
        (folder / f"{name}.safetensors.index.json").write_bytes(own.read_bytes())
    assert LAYER in w4a16.load_model(folder).layers
    own.unlink()
    with pytest.raises(ArgumentError, match="has 2 indices: .*pass the path of one index"):
        w4a16.load_model(folder)
    assert LAYER in w4a16.load_model(folder / "model.int4.safetensors.index.json").layers


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"a":' * 200_000, '{"quantization_config": ' + "[" * 90 + "]" * 90 + "}", "9" * 5000, "{", "\xff",
     '{"weight_map": {"a": ' + "9" * 5000 + "}}", '{"quantization_config": {"bits": ' + "9" * 5000 + "}}"],
    ids=["deep list", "deep object", "deep inside", "digits", "cut", "no json", "digits inside", "digits of bits"],
)  # fmt: skip
def test_json_of_any_kind_is_refused_by_name(tmp_path, name, text):
    held = tensors("awq")
    folder = indexed(tmp_path, held, dict.fromkeys(held, A))
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError, match=f"{name}': must"):
        w4a16.load_model(folder)


@pytest.mark.parametrize("name", ["a" * 3000, "\ud800", "a\0b", "x" * 300])
def test_paths_and_names_of_any_kind(tmp_path, name):
    with pytest.raises(ArgumentError):
        w4a16.load_model(name)
    folder = write(tmp_path / "m", tensors("awq"), AWQ)
    with pytest.raises(ArgumentError, match="is no quantized layer"):
        w4a16.load_layer(folder, name)


def test_names_sort_by_their_numbers(tmp_path):
    names = ["h.10.a", "h.9.a", "h.²", "h.010", "h.10", "h." + "9" * 400]
    model = w4a16.load_model(write(tmp_path, tensors("awq", *names), AWQ))
    order = list(model.layers)
    assert order.index("h.9.a") < order.index("h.10.a") < order.index("h." + "9" * 400) and len(order) == 6


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="longer than 1000 characters"):
        w4a16.load_model(write(tmp_path, {"a" * 1001: torch.ones(1)}, AWQ))


def test_tensors_are_loaded_one_layer_at_a_time(tmp_path, monkeypatch):
    loaded = []
    real = Checkpoint.tensor
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda self, name, device="cpu": loaded.append(name) or real(self, name, device)
    )
    folder = write(tmp_path, tensors("gptq", "a", "b") | {"lm_head.weight": torch.ones(2, 2)}, GPTQ)
    layers = w4a16.iter_layers(folder)
    assert not loaded and next(layers).name == "a"
    assert {name.partition(".")[0] for name in loaded} == {"a"} and len(loaded) == 4


PATTERNS = ["(a+)+$", "(.*)*x", "(.*a){30}", "(?i)(A|a)*b", "(?:(?:a?){30})*c"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_that_backtrack_for_years_take_no_time(tmp_path, pattern):
    name, began = "a" * 200, time.perf_counter()
    assert not matches(pattern, name + "!") or pattern == "(.*a){30}"
    layer = f"{name}!"
    configs = (
        ("pack", {"quant_method": "compressed-tensors", "ignore": [f"re:{pattern}"]}),
        ("gptq_sym", GPTQ | {"sym": True, "dynamic": {f"-:{pattern}": {}}}),
        ("auto_round_sym", {"quant_method": "auto-round", "sym": True, "extra_config": {pattern: {"bits": 4}}}),
    )
    for i, (convention, config) in enumerate(configs):
        folder = write(tmp_path / str(i), tensors(convention, layer), config)
        assert len(w4a16.load_model(folder, select=pattern).skipped) <= 1
    assert time.perf_counter() - began < 60  # on a busy machine; backtracking would take years


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+\1$",
        "(?>a+)+b" if hasattr(os, "login_tty") else r"(a*)*\1",
        "(" * 500,
        "a" * 5000,
        "(?:a{900}){900}",
    ],
)
def test_patterns_that_cannot_be_bounded_are_refused(pattern):
    with pytest.raises(ArgumentError, match="pattern = "):
        matches(pattern, "a" * 100)


@pytest.mark.parametrize("pattern", ["(?:up){e<=1}_proj", "mod.{i}", "(up){e}", "[[:alpha:]]+", "a[:digit:]"])
def test_what_readers_take_for_different_things_is_refused(pattern):
    """`re`, which exporters' own readers use, takes them for letters; `regex` for errors that a match may have."""
    with pytest.raises(ArgumentError, match="letters to some readers"):
        matches(pattern, "model.layers.0.up_proj")


@pytest.mark.parametrize("pattern", [r".*layers\.[0-9]{1,2}\..*", r"a{,3}model", r".*\{x}|model", "[{}]|model"])
def test_counts_and_escaped_braces_are_followed(pattern):
    assert matches(pattern, "model.layers.0.up_proj") is bool(re.match(pattern, "model.layers.0.up_proj"))


def test_a_pattern_that_takes_too_long_is_refused_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    with pytest.raises(ArgumentError, match=r"pattern = '\(a\|aa\)\+\$': takes longer than 0.1 s on the name 'aaa"):
        matches("(a|aa)+$", "a" * 200 + "!")


@pytest.mark.parametrize(
    ("pattern", "name", "search", "found"),
    [
        (r"re.*proj$", "re.x.proj", False, True),
        (r".*\.(?:a|b).*(?:c|d).*e.*f", "x.a.c.e.f", False, True),
        (r".*\.(?:a|b).*(?:c|d).*e.*f", "x.q.c.e.f", False, False),
        (r"(?:.*x){3,}$", "axbxcx", False, True),
        (r"(?:.*x){4,}$", "axbxcx", False, False),
        (r"(.*)+(?<=b)(?=c)c$", "aabc", False, True),
        (r"(.*)+\bmlp\b", "a.mlp.b", True, True),
        (r"(?:(?!x).)*$", "abx", False, False),
    ],
)
def test_what_is_matched(pattern, name, search, found):
    assert matches(pattern, name, search=search) is found
