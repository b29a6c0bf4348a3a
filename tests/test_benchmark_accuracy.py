"""benchmarks.accuracy: what is scored, how it is compared, and a simulation that computes what the operators define."""

from __future__ import annotations

import argparse
import math
from types import SimpleNamespace

import pytest
import torch
from terrazzo import nn
from terrazzo.ops.attention import pack_cache
from terrazzo.ops.attention.decoding import reference
from terrazzo.ops.products.kv import get_format

from benchmarks import accuracy, accuracy_data, outliers, simulated, tasks, train_small


def test_every_token_behind_the_first_is_scored_once():
    tokens, length = 37, 8
    scored = [first + at for first, begin in accuracy.windows(tokens, length, 100) for at in range(begin, length)]
    assert scored == list(range(1, 36))


def test_losses_are_those_of_the_scored_tokens():
    ids = torch.randint(0, 11, (30,))
    table, other = torch.randn(11, 11), torch.randn(11, 11)
    losses, none, kept = accuracy.window_scores(lambda rows, first: table[rows[:, first:]], ids, 8, 4, batch=3)
    cuts = [(first + begin, first + 8) for first, begin in accuracy.windows(30, 8, 4)]
    wanted = [torch.nn.functional.cross_entropy(table[ids[a - 1 : b - 1]], ids[a:b]).item() for a, b in cuts]
    assert losses == pytest.approx(wanted) and not none
    _, apart, _ = accuracy.window_scores(lambda rows, first: other[rows[:, first:]], ids, 8, 4, 3, kept)
    p, q = table.half().float().softmax(-1), other.softmax(-1)
    by_token = (p * (p / q).log()).sum(-1)
    assert apart == pytest.approx([by_token[ids[a - 1 : b - 1]].mean().item() for a, b in cuts], rel=1e-4)


class Words:
    """A tokenizer of MARKS and words."""

    names = (*tasks.MARKS, *("\u0120" + "".join(chr(97 + x) for x in divmod(i, 26)) for i in range(tasks.WORDS)))

    def __len__(self) -> int:
        return len(self.names)

    def convert_ids_to_tokens(self, ids):
        return [self.names[i] for i in ids]

    def convert_tokens_to_ids(self, names):
        return [self.names.index(name) for name in names]


@pytest.mark.parametrize(("task", "length"), tasks.EVALUATED.values())
def test_answers_follow_from_what_stands_before_them(task, length):
    made = tasks.Tasks(Words())
    rows = made.make(task, 3, length, torch.Generator().manual_seed(5))
    assert rows.tokens.shape[1] <= length
    for row in rows.tokens.tolist():
        words = [token - len(tasks.MARKS) for token in row]
        at = words.index(tasks.MARKS.index("<is>") - len(tasks.MARKS))
        for places in rows.answers.tolist():
            said = [words[place] for place in places]
            if task == "copy":
                assert said == words[1:at]
            elif task == "lookup":
                pairs = {tuple(words[i : i + 2]): words[i + 2 : i + 4] for i in range(1, at, 4)}
                assert len(pairs) == (at - 1) // 4  # no key twice
                assert said == pairs[tuple(words[places[0] - 2 : places[0]])]
            else:
                stack = []
                for word in words[1:at]:
                    if word < tasks.KINDS:
                        stack.append(word)
                    else:
                        assert stack.pop() + tasks.KINDS == word
                assert said == [kind + tasks.KINDS for kind in reversed(stack)]
    labels = rows.labels()
    answers = rows.answers.flatten()
    assert torch.equal(labels[:, answers], rows.tokens[:, answers]) and (labels != -100).sum() == 3 * len(answers)


def test_an_item_is_right_if_all_of_its_answer_is():
    made = tasks.Tasks(Words())
    rows = made.make("lookup", 2, 96, torch.Generator().manual_seed(1))
    first = int(rows.answers.min()) - 1
    logits = torch.nn.functional.one_hot(rows.tokens[:, first + 1 :], len(Words())).float()
    logits = torch.cat([logits, logits[:, :1]], 1)
    assert tasks.exact(logits, rows, first) == 1
    logits[1, int(rows.answers[3, 1]) - 1 - first] *= -1
    assert tasks.exact(logits, rows, first) == 1 - 1 / (2 * tasks.ASKED)


@torch.no_grad()
def test_outliers_leave_the_function_as_it_was():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.randint(64, (2, 9))
    before = model(ids).logits
    outliers.add_outliers(model)
    assert (model(ids).logits - before).abs().max() < 1e-5
    gain = model.model.layers[0].input_layernorm.weight
    assert (gain > 19.9).sum() == 2 and gain.max() <= 100


def test_sources_are_held_out_by_file_and_hashed_with_their_names(tmp_path):
    for index in range(64):
        (tmp_path / f"m{index:02d}.py").write_text(f"x = {index}\n")
    trained, held, digest = train_small.python_sources(tmp_path)
    assert len(trained) == 62 and held == ["x = 31\n", "x = 63\n"]
    (tmp_path / "m00.py").rename(tmp_path / "a.py")
    assert train_small.python_sources(tmp_path)[2] != digest


def test_ratios_are_paired():
    found = accuracy.compare([1.1, 3.1, 2.1], [1.0, 3.0, 2.0])
    assert found["ratio"] == pytest.approx(math.exp(0.1), abs=1e-4) and found["error"] == pytest.approx(0, abs=1e-5)
    assert accuracy.compare([1.0, 1.4], [1.0, 1.0])["error"] == pytest.approx(math.exp(0.2) * 0.2, abs=1e-4)


@pytest.mark.parametrize("text", ["f16", "f16+int4", "f16+int4/int4/int4", "+int4/int4"])
def test_rows_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write weights"):
        accuracy.parse_row(text)


def test_a_row_may_name_the_format_of_the_head():
    assert accuracy.parse_row("f16^w4a16-g64+int8/int4") == ("f16^w4a16-g64", "int8", "int4")
    embedding = torch.nn.Embedding(96, 128).half()
    model = SimpleNamespace(lm_head=torch.nn.Linear(128, 96, bias=False).half(), embed_tokens=embedding)
    model.lm_head.weight = embedding.weight  # tied
    before = embedding.weight.detach().clone()
    accuracy.quantize_head(model, "w4a16-g64")
    wanted = nn.Linear.from_float(before, "w4a16-g64").packed.dequantize().half()
    assert torch.equal(model.lm_head.weight, wanted) and torch.equal(embedding.weight, before)


@pytest.mark.parametrize(
    ("k", "v"), [("int4", "int4"), ("int4_channel32", "int4"), ("float16", "int8"), ("int2_hadamard", "int4")]
)
def test_simulated_attention_is_a_decode_of_every_token(k, v):
    """Each row against the oracle over a cache of the tokens up to it, around full blocks above all."""
    torch.manual_seed(0)
    q, keys, values = (torch.randn(1, heads, 150, 64).half() for heads in (4, 2, 2))
    module = SimpleNamespace(simulated_cache=(get_format(k), get_format(v, "values")))
    y, _ = simulated.simulated_attention(module, q, keys, values, None)
    for at in (0, 1, 30, 31, 32, 62, 63, 64, 127, 128, 143, 149):
        cache = pack_cache(keys[:, :, : at + 1], values[:, :, : at + 1], k, v)
        wanted = reference.decode(q[:, :, at : at + 1].transpose(1, 2), cache)[0][:, 0]
        assert (y[:, at].double() - wanted).abs().max() < 2e-3


@pytest.mark.parametrize("name", ["w4a16-g32", "w4a8-g64", "w4a8-e4m3-g128", "w4ax"])
def test_simulated_products_are_those_of_the_layer(name):
    torch.manual_seed(1)
    options = {"target": "sm_90a"} if name == "w4ax" else {}
    layer = nn.Linear.from_float(torch.randn(72, 256) / 16, name, bias=torch.randn(72), **options)
    x = torch.randn(5, 256).half()
    y, simulation = layer(x).float(), simulated.SimulatedLinear(layer.packed)(x).float()
    assert (y - simulation).abs().max() <= 2**-9 * y.abs().max()


@pytest.mark.parametrize("name", ["w4a8-g64", "w4ax"])
@torch.no_grad()
def test_simulated_models_have_the_loaded_layers(name):
    """Joined layers keep the plan, smooth vector and scales that one product has."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from terrazzo.nn.loading import load

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).half().eval()
    loaded = load(model.state_dict(), config=config, device="cpu", quantize=name, target="sm_90a")
    assert simulated.simulate_linears(model, loaded) == 14
    for theirs, ours in zip(model.model.layers, loaded.decoder.layers):
        x = torch.randn(5, 256).half()
        attention = [getattr(theirs.self_attn, f"{part}_proj")(x) for part in "qkv"]
        mlp = [theirs.mlp.gate_proj(x), theirs.mlp.up_proj(x)]
        for parts, joined in ((attention, ours.self_attn.qkv_proj), (mlp, ours.mlp.gate_up_proj)):
            wanted = joined.product(x)
            assert (torch.cat(parts, -1).float() - wanted.float()).abs().max() <= 2**-9 * wanted.abs().max()
    only = simulated.SimulatedLinear(loaded.decoder.layers[0].mlp.down_proj.packed, activations=False)
    x = torch.randn(3, 512).half()
    y = x.double() @ loaded.decoder.layers[0].mlp.down_proj.packed.dequantize().double().T
    assert (only(x).double() - y).abs().max() <= 2**-10 * y.abs().max()


def test_what_a_model_was_trained_on_is_never_held_out():
    text = "".join(chr(97 + i % 26) for i in range(103))
    assert train_small.trained_on(text) + train_small.held_out(text) == text
    assert len(train_small.held_out(text)) == 20


def test_archives_give_the_folder_again(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    (folder / "gguf").mkdir(parents=True)
    (folder / "gguf" / "__init__.py").write_text("x = 1\n")
    (folder / "gguf-0.19.0.dist-info").mkdir()
    (folder / "gguf-0.19.0.dist-info" / "METADATA").write_text("Version: 0.19.0\n")
    monkeypatch.setattr(accuracy_data, "DIGESTS", {})
    for name in ("model.gguf", "news.txt", "novel.txt", "speeches.txt"):
        (folder / name).write_bytes(name.encode() * 501)
        accuracy_data.DIGESTS[name] = accuracy_data._digest(folder / name)
    made = accuracy_data.pack(folder, tmp_path / "packed")
    again = accuracy_data.unpack(tmp_path / "again", tmp_path / "packed")
    assert len(made) == 2 and (again / "gguf" / "__init__.py").is_file()
    assert (again / "gguf-0.19.0.dist-info" / "METADATA").is_file()
    assert all((again / name).read_bytes() == (folder / name).read_bytes() for name in accuracy_data.DIGESTS)


def test_other_weights_than_those_that_were_measured_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"others")
    with pytest.raises(accuracy_data.DataError, match="SHA-256"):
        accuracy_data.check(tmp_path / "model.gguf")
