"""One number of a config.json costs neither time nor memory: it is held against plain bounds and the tensors."""

from __future__ import annotations

import json
import shutil
import time

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mutation  # noqa: E402
import terrazzo  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import architectures, causal, reading  # noqa: E402
from terrazzo.nn.quantizing import quantize_folder  # noqa: E402
from terrazzo.ops import model_requests  # noqa: E402
from tiny_text import write_folder  # noqa: E402

SECONDS = 5
SIZES = (
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_labels",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def state(folder, **fields):
    """Write the folder's config with other fields."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refused(call, match):
    before = time.monotonic()
    with pytest.raises(ArgumentError, match=match):
        call()
    assert time.monotonic() - before < SECONDS


@pytest.mark.parametrize("number", [900, 100_000, 2**31, 2**63, 10**30, -(10**30)])
@pytest.mark.parametrize("name", SIZES)
def test_a_number_that_no_tensor_backs_is_refused_at_once(folder, tmp_path, name, number):
    state(folder, **{name: number})
    if (name, number) == ("num_labels", 900):  # which the model does not have, and no text model uses
        assert terrazzo.load(folder, device="cpu").config.num_labels == number
        return
    refused(lambda: terrazzo.load(folder, device="cpu"), "config|must be")
    refused(lambda: quantize_folder(folder, tmp_path / "out", "w4a16-g128", device="cpu"), "config|must be")


@pytest.mark.parametrize("number", [100_000, 2**31, 10**30])
@pytest.mark.parametrize(
    "name", [name for name in SIZES if name not in ("num_hidden_layers", "vocab_size", "num_labels")]
)
def test_a_config_alone_has_plain_bounds(folder, name, number):
    (folder / "model.safetensors").unlink()
    state(folder, **{name: number})
    alone = lambda: model_requests.of_folder(folder, model_requests.Weights())
    if number == 100_000 and name.endswith("_size"):
        assert alone().architecture.heads == 2
    else:
        refused(alone, name)


ODD = {
    "no text model": dict(text_config={}),
    "rotary numbers": dict(rope_parameters={"full_attention": 5}),
    "yarn": dict(rope_parameters={"rope_type": "yarn", "factor": float("inf"), "rope_theta": 1e4}),
    "rotary NaN": dict(rope_parameters={"rope_type": "linear", "factor": float("nan"), "rope_theta": 1e4}),
    "end token": dict(eos_token_id=2**63),
    "end tokens": dict(eos_token_id=[256, "x"]),
    "a huge end token of several": dict(eos_token_id=[256, 10**30]),
    "eps": dict(rms_norm_eps=float("nan")),
    "negative eps": dict(rms_norm_eps=-1.0),
    "heads": dict(num_key_value_heads=3),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_field_that_is_no_such_thing_is_named(folder, kind):
    (folder / "generation_config.json").unlink()
    state(folder, **ODD[kind])
    refused(lambda: terrazzo.load(folder, device="cpu"), "config|rope|eos_token_id|eps|heads|key_value")


def test_damaged_configs_are_refused_or_make_a_model(tiny, folder, tries):
    """What is accepted writes text, and the same text unless a field says otherwise."""
    file = folder / "config.json"
    good = json.loads(file.read_text())
    usual = terrazzo.generate(tiny, "Hi", max_new_tokens=1, load=dict(device="cpu"))

    def written():
        return terrazzo.generate(folder, "Hi", max_new_tokens=1, load=dict(device="cpu"))

    texts = []
    for random in tries(60):
        file.write_bytes(mutation.text(mutation.value(good, random), random))
        mutation.survives(lambda: texts.append(written()))
    assert not texts or usual in texts  # of 60 some 3 to 12 are taken, and most of these say the same


SMALL = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=64, vocab_size=300,
)  # fmt: skip
SPARSE = dict(num_experts_per_tok=2, num_local_experts=4, num_experts=4)


def test_damaged_configs_of_every_architecture_are_refused_or_obeyed(tmp_path, tries):
    """Both with transformers, up to the model on meta, and alone, as `terrazzo compile` reads them."""
    good = {}
    for kind in architectures.MODELS:
        facts = SPARSE if kind in ("mixtral", "qwen3_moe", "gpt_oss") else {}
        good[kind] = json.loads(
            transformers.AutoConfig.for_model(kind, **SMALL, **facts).to_json_string(use_diff=False)
        )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    good["yarn"] = good["llama"] | {"rope_parameters": yarn}

    def built():
        config = reading.read_config(tmp_path, None)[1]
        shape, made = architectures.shape_of(config), causal.skeleton(config)
        taken.append((len(made.model.layers), len(causal.rotaries_of(made, shape)), shape.layers))

    taken, alone = [], []
    for random in tries(60):
        damaged = mutation.value(good[random.choice(sorted(good))], random)
        (tmp_path / "config.json").write_bytes(mutation.text(damaged, random))
        mutation.survives(built)
        mutation.survives(lambda: alone.append(model_requests.of_folder(tmp_path, model_requests.Weights())))
    assert len(taken) > 5 and all(layers == stated for layers, _, stated in taken) and len(alone) > 5


def test_layers_without_experts_are_a_list(tmp_path):
    for value in (5, "x", {"a": 1}):
        config = SMALL | SPARSE | {"model_type": "qwen3_moe", "mlp_only_layers": value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ArgumentError, match="mlp_only_layers"):
            model_requests.of_folder(tmp_path, model_requests.Weights())
