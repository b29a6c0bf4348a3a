"""What users do with a torch module, done with a loaded model: it works, or is refused before anything changes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.causal import class_of
from terrazzo.nn.loading import load
from tiny_text import VOCABULARY, write_folder

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder):
    return load(folder, device="cpu", quantize="w4a8-g64", kv="int8")


def saved(model):
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it)), "torch.save": saved}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_the_model(model, way):
    wanted = model(IDS).logits
    made = COPIES[way](model)
    assert type(made) is type(model) and torch.equal(made(IDS).logits, wanted)
    made.lm_head.weight.zero_()
    assert torch.equal(model(IDS).logits, wanted), "the copy has tensors of its own"


def test_a_pickle_is_read_where_no_model_was_made_yet(model):
    held = pickle.dumps(model)
    class_of.cache_clear()
    made = pickle.loads(held)
    assert type(made).__name__ == "TerrazzoLlamaForCausalLM" and torch.equal(made(IDS).logits, model(IDS).logits)


def test_a_state_goes_from_one_model_into_another(model, folder):
    other = load(folder, device="cpu", quantize="w4a8-g64", kv="int8")
    for tensor in other.state_dict().values():
        if tensor.is_floating_point():
            tensor.zero_()
    held = io.BytesIO()
    torch.save(model.state_dict(), held)
    held.seek(0)
    assert not torch.equal(other(IDS).logits, model(IDS).logits)
    other.load_state_dict(torch.load(held))
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_a_model_moves_between_16_bit_dtypes_and_refuses_others_whole(model):
    assert model.bfloat16()(IDS).logits.dtype == torch.bfloat16
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for change in (model.float, model.double, lambda: model.to(torch.float32)):
        with pytest.raises(ArgumentError, match="dtype = 'float.*16 bits|dtype = 'float.*float16 or bfloat16"):
            change()
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    assert model.half()(IDS).logits.dtype == torch.float16
    assert model.to("meta").device.type == "meta"


def test_another_number_of_tokens_is_refused_before_anything_changes(model):
    wanted = model(IDS).logits
    assert model.resize_token_embeddings() is model.resize_token_embeddings(VOCABULARY) is model.get_input_embeddings()
    for tokens in (VOCABULARY + 8, VOCABULARY - 8):
        with pytest.raises(ArgumentError, match=f"new_num_tokens = {tokens}: must be {VOCABULARY}"):
            model.resize_token_embeddings(tokens)
    assert model.config.vocab_size == VOCABULARY and torch.equal(model(IDS).logits, wanted)


@pytest.mark.parametrize("name", ["_hf_hook", "_old_forward"])
def test_hooks_that_offload_weights_are_refused(model, name):
    """As `accelerate.cpu_offload` and `dispatch_model` set them on a model, before they move any weight."""
    with pytest.raises(ArgumentError, match="accelerate's hooks.*one device"):
        setattr(model, name, object())
    assert not hasattr(model, name)


def test_accelerate_is_refused_before_it_moves_a_weight(model):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is no dependency")
    wanted = model(IDS).logits
    with pytest.raises(ArgumentError, match="accelerate's hooks"):
        accelerate.cpu_offload(model)
    assert torch.equal(model(IDS).logits, wanted)


def test_autocast_leaves_the_decoder_its_dtype_and_asks_the_head_for_its_own(model):
    wanted = model(IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(IDS)
    assert wanted.logits.dtype == torch.float16 and made.logits.dtype == torch.bfloat16
    assert (made.logits.float() - wanted.logits.float()).abs().max() < 2**-6 * wanted.logits.abs().max()
