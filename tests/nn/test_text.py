"""terrazzo.generate: texts in and out of a tiny folder, by the reference path on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import generation
from terrazzo.nn.text import Cut, Pieces
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


@pytest.fixture(scope="module")
def long(model):
    """A text whose last characters are plain ones."""
    made = terrazzo.generate(model, "abc", max_new_tokens=12)[0]
    assert made.index("$w-x") == 7
    return made


@pytest.mark.random
def test_a_cut_text_ends_before_the_first_stop_string_and_leaks_none_of_it(seed):
    draw = random.Random(seed)
    for _ in range(300):
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(12)))
        stops = ["".join(draw.choice("ab") for _ in range(draw.randrange(1, 5))) for _ in range(draw.randrange(4))]
        cut, told, at = Cut(stops), "", 0
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        wanted = text[: min(ends)[1]] if ends else text  # the stop string that is whole first
        while at < len(text):
            size = draw.randrange(1, 4)
            told += cut.push(text[at : at + size])
            at += size
            assert wanted.startswith(told), (text, stops, told)
        assert told + cut.rest() == wanted and cut.ended == (wanted != text)


def test_texts_end_before_a_stop_string(model, tokenizer, long):
    """Of a batch one text ends, the other goes on; pieces have none of the string, and its tokens are transformers'."""
    stop, told = "$w", ["", ""]

    def note(at, piece):
        told[at] += piece

    alone = terrazzo.generate(model, PROMPTS[1], max_new_tokens=12)
    found = terrazzo.generate(model, ["abc", PROMPTS[1]], max_new_tokens=12, stop=["nowhere", stop], stream=note)
    assert found == [long[:7], alone[0]] == told
    ids = tokenizer("abc", return_tensors="pt").input_ids
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    theirs = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **options)
    assert decoder_of(tokenizer)(theirs[0, ids.shape[1] :].tolist()) == long[:7] + stop


def test_a_stop_string_may_be_a_special_token(model, long, monkeypatch):
    """Decoded text leaves it out; here the tokenizer says that "$" is its number."""
    special = byte_tokenizer()
    monkeypatch.setattr(special, "get_added_vocab", lambda: {"<pad>": ord("$")})
    assert terrazzo.generate(model, "abc", max_new_tokens=12, stop="<pad>", tokenizer=special) == [long[:8]]


def test_texts_of_a_batch_with_a_failed_sequence_are_in_the_error(folder, model, tokenizer):
    import copy

    made = copy.deepcopy(model)
    made.decoder.embed_tokens.weight.data[ord("~")] = torch.nan
    alone = terrazzo.generate(model, "Hi", max_new_tokens=3)
    with pytest.raises(generation.NotFiniteError) as caught:
        terrazzo.generate(made, ["a~", "Hi"], max_new_tokens=3, temperature=0.5, top_k=1)
    assert caught.value.rows == [0] and caught.value.results == ["", *alone]
    given = tokenizer(["a~", "Hi"], return_tensors="pt").input_ids
    for how in (dict(do_sample=False), dict(do_sample=True, temperature=0.5, top_k=1)):
        with pytest.raises(generation.NotFiniteError) as caught:
            made.generate(given, max_new_tokens=3, attention_mask=torch.ones_like(given), **how)
        rows = caught.value.results[:, 2:].tolist()
        assert caught.value.rows == [0] and rows[0] == [256, 257, 257]
        assert decoder_of(tokenizer)(rows[1]) == alone[0]


@pytest.mark.parametrize(
    ("files", "passed", "ends"),
    [
        (dict(config={}), {}, [256]),  # Llama's class says 2, the tokenizer 256
        (dict(config=dict(eos_token_id=2)), {}, [2]), (dict(config=dict(eos_token_id=[5, 6])), {}, [5, 6]),
        (dict(config=dict(eos_token_id=7), generation_config=dict(temperature=0.5)), {}, [7]),
        (dict(config=dict(eos_token_id=7), generation_config=dict(eos_token_id=[8, 9])), {}, [8, 9]),
        (dict(config=dict(eos_token_id=None)), {}, [256]), (dict(config={}), dict(eos_token_id=11), [11]),
    ],
)  # fmt: skip
def test_end_tokens_are_those_that_the_folder_states_first(folder, tokenizer, tmp_path, files, passed, ends):
    """generation_config.json, config.json, the tokenizer; of `load` and of `from_pretrained`."""
    import json
    import shutil

    import transformers
    from terrazzo.nn import text

    shutil.copytree(folder, tmp_path / "f")
    stated = json.loads((folder / "config.json").read_text())
    stated.pop("eos_token_id")
    (tmp_path / "f" / "config.json").write_text(json.dumps(stated | files["config"]))
    (tmp_path / "f" / "generation_config.json").unlink()
    if "generation_config" in files:
        (tmp_path / "f" / "generation_config.json").write_text(json.dumps(files["generation_config"]))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "f")
    for name, value in passed.items():
        setattr(config, name, value)
    options = dict(config=config) if passed else {}
    loaded = terrazzo.load(tmp_path / "f", device="cpu", **options)
    assert text._ends(loaded, tokenizer) == ends
    if ends != [256]:  # transformers knows no tokenizer
        assert generation.end_tokens(loaded.generation_config.eos_token_id) == ends
    loaded.save_pretrained(tmp_path / "packed")
    assert text._ends(terrazzo.load(tmp_path / "packed", device="cpu"), tokenizer) == ends
    if not passed:
        from terrazzo.integrations.transformers import TerrazzoConfig

        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "f", quantization_config=TerrazzoConfig())
        assert text._ends(ours, tokenizer) == ends


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
        (dict(stop=""), "stop"), (dict(stop=[1]), "stop"), (dict(stop=["a", ""]), "stop"), (dict(min_p=2), "min_p"),
        (dict(repetition_penalty=-1.0), "repetition_penalty"), (dict(temperature=1e-45), "temperature"),
        (dict(max_tokens=4), "max_tokens.*did you mean max_new_tokens"),
        (dict(temprature=1.0), "temprature.*did you mean temperature"),
        (dict(stop_strings="x"), "stop_strings.*mean stop"), (dict(zzz=1), "zzz.*it has model, prompts"),
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
        (dict(input_ids=ONES.bool()), "input_ids"), (dict(input_ids=ONES.long().to("meta")), "input_ids.*on meta"),
        (dict(input_ids=[[1, 2]]), "input_ids = 'list'"), (dict(input_ids=torch.tensor(3)), "input_ids"),
        (dict(input_ids=ONES.long(), attention_mask=[[1, 1, 1]]), "attention_mask = 'list'"),
        (dict(input_ids=ONES.long()[:, :1], attention_mask=ONES[0]), r"attention_mask = 'torch.float32 \[3\]"),
        (dict(input_ids=ONES.long(), position_ids=ONES), "position_ids"),
    ],
)  # fmt: skip
def test_a_forward_without_tokens_of_a_batch_names_the_argument(model, given, named):
    with pytest.raises(ArgumentError, match=f"^{named}"):
        model(**given)


@pytest.mark.parametrize("kind", ["uint16", "uint8", "int16", "int32"])
def test_tokens_may_be_of_any_integers(model, kind):
    tokens = torch.tensor([[72, 105]])
    given = tokens.to(getattr(torch, kind))
    assert torch.equal(model(given).logits, model(tokens).logits)
    options = dict(max_new_tokens=2, do_sample=False)
    assert torch.equal(model.generate(given, **options), model.generate(tokens, **options))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(inputs=torch.tensor(3)), "inputs"), (dict(inputs=torch.tensor([3, 4])), "inputs"),
        (dict(inputs=ONES), "inputs"), (dict(inputs=[[3, 4]]), "inputs = 'list'"), (dict(input_ids=ONES), "input_ids"),
        (dict(inputs=ONES[:, :0].long()), "inputs"),
        (dict(inputs=ONES.long(), do_sample=True, temperature=1e-45), "temperature"),
        (dict(inputs=ONES.long(), eos_token_id=1 << 70), "eos_token_id"),
    ],
)  # fmt: skip
def test_what_generate_of_transformers_cannot_take_is_named(model, given, named):
    with pytest.raises(ArgumentError, match=f"^{named}"):
        model.generate(max_new_tokens=2, **given)


def test_prompts_padded_on_the_right_are_not_continued(model, tokenizer):
    pad = lambda *texts: tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right")
    for row, texts in enumerate([("Hi", "longer"), ("longer", "Hi"), ("longer", "longer", "Hi")]):
        with pytest.raises(ArgumentError, match=f"^attention_mask.*row {row}.*padding_side='left'"):
            model.generate(**pad(*texts), max_new_tokens=2)
    tokens, mask = pad("Hi", "longer").values()
    whole = model(tokens, attention_mask=mask).logits  # to score them is fine
    near = lambda a, b: torch.allclose(a, b, rtol=0.01, atol=0.01)  # torch sums in another order for other rows
    assert near(whole[0, :2], model(tokens[:1, :2]).logits[0]) and near(whole[1:], model(tokens[1:]).logits)


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
