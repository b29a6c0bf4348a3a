"""terrazzo.generate: texts in and out of a tiny folder, by the reference path on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import generation
from terrazzo.nn.text import Pieces
from tiny_text import byte_tokenizer, write_folder

ONES = torch.ones(1, 3)
PROMPTS = ["Hi", "déjà vu \N{GRINNING FACE}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder):
    return terrazzo.load(folder, device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def decoder_of(tokenizer):
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 and 한국어", "\N{GRINNING FACE}\N{WAVING HAND SIGN}x"])
def test_no_piece_breaks_a_character(tokenizer, text):
    pieces, told = Pieces(decoder_of(tokenizer)), []
    for token in tokenizer.encode(text):
        told.append(pieces.push(token))
    assert "".join(told) == text and pieces.rest() == ""
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(told)
    assert [piece for piece in told if piece] == list(text)


def test_pieces_joined_are_the_text_whatever_the_tokens(tokenizer):
    """Models may write bytes that are no characters, and end inside of one."""
    draw, decode = random.Random(0), decoder_of(tokenizer)
    for _ in range(50):
        tokens = [draw.randrange(258) for _ in range(draw.randrange(1, 20))]
        pieces = Pieces(decode)
        assert "".join([*map(pieces.push, tokens), pieces.rest()]) == decode(tokens)


def test_texts_are_those_of_the_loop_over_tokens(model, tokenizer):
    tokens = generation.generate(
        model, [tokenizer.encode(text) for text in PROMPTS], max_new_tokens=6, eos_token_id=256
    )
    told = ["", ""]

    def note(at, piece):
        told[at] += piece

    found = terrazzo.generate(model, PROMPTS, max_new_tokens=6, stream=note, progress=False)
    assert found == [decoder_of(tokenizer)(t.tolist()) for t in tokens] == told
    assert terrazzo.generate(model, PROMPTS[1], max_new_tokens=6) == found[1:]


def test_a_folder_is_loaded_and_its_text_printed_as_it_comes(folder, capsys):
    (text,) = terrazzo.generate(folder, "Hi", max_new_tokens=3, stream=True, load=dict(device="cpu"))
    assert capsys.readouterr().out == text + "\n"


def test_a_bar_shows_loading_and_tokens(folder, capsys):
    terrazzo.generate(str(folder), "Hi", max_new_tokens=2, progress=True, load=dict(device="cpu"))
    said = capsys.readouterr().err
    assert "loading" in said and "generating" in said
    terrazzo.generate(folder, "Hi", max_new_tokens=2, load=dict(device="cpu"))
    assert capsys.readouterr().err == ""  # no terminal, no bar


def test_a_listener_ends_it_and_a_seed_fixes_what_is_drawn(model):
    seen = []
    terrazzo.generate(model, "Hi", max_new_tokens=50, stream=lambda at, piece: seen.append(piece) or True)
    assert len(seen) <= 2  # one that ends it, and what was unfinished behind it
    draw = lambda seed: terrazzo.generate(model, PROMPTS, max_new_tokens=8, temperature=1.5, top_k=50, seed=seed)
    assert draw(1) == draw(1) != draw(2)


def test_an_end_token_of_the_generation_config_ends_the_text(model, monkeypatch):
    first = terrazzo.generate(model, ["Hi"], max_new_tokens=1)
    row = generation.generate(model, [[72, 105]], max_new_tokens=4)[0].tolist()
    monkeypatch.setattr(model.generation_config, "eos_token_id", [row[0]])
    assert terrazzo.generate(model, ["Hi"], max_new_tokens=4) == first


def test_a_chat_template_is_put_around_prompts(model, tokenizer):
    plain = terrazzo.generate(model, "[user] Hi\n", max_new_tokens=3)
    assert terrazzo.generate(model, "Hi", max_new_tokens=3, chat=True) == plain
    assert terrazzo.generate(model, [{"role": "user", "content": "Hi"}], max_new_tokens=3, chat=True) == plain
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ArgumentError, match="chat"):
        terrazzo.generate(model, "Hi", chat=True, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(prompts=[]), "prompts"), (dict(prompts=[[1, 2]]), "prompts"), (dict(prompts=3), "prompts"),
        (dict(prompts=""), "prompts"), (dict(prompts=b"x"), "prompts"), (dict(stream="yes"), "stream"),
        (dict(prompts="\ud800"), "prompts"), (dict(temperature=1.0, seed=1.5), "seed"),
        (dict(prompts=["a", "b"], stream=True), "stream"), (dict(temperature=-1.0), "temperature"),
        (dict(max_new_tokens=0), "max_new_tokens"), (dict(tokenizer=3), "tokenizer"),
        (dict(load=dict(kv="int8")), "load"), (dict(model=3), "model"), (dict(model="nowhere"), "source"),
    ],
)  # fmt: skip
def test_bad_calls_name_the_argument(model, given, named):
    with pytest.raises(ArgumentError, match=f"^{named}"):
        terrazzo.generate(**{"model": model, "prompts": "Hi", **given})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "input_ids = 'neither'"), (dict(input_ids=ONES.long(), inputs_embeds=ONES), "input_ids = 'both'"),
        (dict(input_ids=ONES), "input_ids = 'torch.float32"), (dict(input_ids=ONES[0].long()), "input_ids"),
        (dict(input_ids=ONES[:, :0].long()), "input_ids"), (dict(inputs_embeds=ONES), "inputs_embeds"),
    ],
)  # fmt: skip
def test_a_forward_without_tokens_of_a_batch_names_the_argument(model, given, named):
    with pytest.raises(ArgumentError, match=f"^{named}"):
        model(**given)


def test_prompts_padded_on_the_right_are_not_continued(model, tokenizer):
    pad = lambda *texts: tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right")
    for row, texts in enumerate([("Hi", "longer"), ("longer", "Hi"), ("longer", "longer", "Hi")]):
        with pytest.raises(ArgumentError, match=f"^attention_mask.*row {row}.*padding_side='left'"):
            model.generate(**pad(*texts), max_new_tokens=2)
    tokens, mask = pad("Hi", "longer").values()
    whole = model(tokens, attention_mask=mask).logits  # to score them is fine
    assert torch.equal(whole[0, :2], model(tokens[:1, :2]).logits[0]) and torch.equal(
        whole[1:], model(tokens[1:]).logits
    )


def test_of_a_mask_of_all_tokens_so_far_the_newest_columns_are_used(model):
    tokens, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :3] = 0
    whole = model(tokens, attention_mask=mask).logits[:, 5:]
    held = model(tokens[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    rest = model(tokens[:, 5:], attention_mask=mask, past_key_values=held).logits
    assert torch.allclose(rest, whole, rtol=0.01, atol=0.01) and bool((rest[1].abs().amax(1) > 0).all())


def test_a_model_without_a_folder_needs_a_tokenizer(folder, model, tokenizer):
    import transformers

    state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    bare = terrazzo.load(state, config=transformers.LlamaConfig.from_pretrained(folder).__class__(
        **{**transformers.LlamaConfig.from_pretrained(folder).to_dict(), "_name_or_path": ""}), device="cpu",
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="tokenizer"):
        terrazzo.generate(bare, "Hi")
    assert terrazzo.generate(bare, "Hi", max_new_tokens=2, tokenizer=tokenizer)
