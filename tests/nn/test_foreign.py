"""What a model's folder can make us do: its Python runs where it is asked for, and its files are errors of ours."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import sys
import time

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mutation  # noqa: E402
import terrazzo  # noqa: E402
from terrazzo import cli  # noqa: E402
from terrazzo.integrations import transformers as integration  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn import foreign, loading, reading  # noqa: E402
from terrazzo.nn.quantizing import quantize_folder  # noqa: E402
from tiny_text import write_folder  # noqa: E402
from transformers import dynamic_module_utils  # noqa: E402

CODE = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizerFast
(Path({place!r}) / "ran").touch()
class Config(LlamaConfig):
    model_type = "llama"
class Tokenizer(PreTrainedTokenizerFast):
    "Of the folder's own."
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny, tmp_path):
    """The files of a tiny model, which a test may change."""
    return shutil.copytree(tiny, tmp_path / "model")


def change(file, **fields):
    """Set fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def coded(folder, tmp_path, monkeypatch):
    """A function that puts Python code into the folder, and what the code leaves when it ran."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def put(what):
        (folder / f"{what}_of_mine.py").write_text(CODE.format(place=str(tmp_path)))
        if what == "config":
            change(folder / "config.json", model_type="llama_of_mine", auto_map={"AutoConfig": "config_of_mine.Config"})
        else:
            own = {"AutoTokenizer": ["tokenizer_of_mine.Tokenizer", None]}
            change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=own)
        return tmp_path / "ran"

    return put


@pytest.fixture(params=["y\n", ""], ids=["yes", "silent"])
def answers(request, monkeypatch):
    """Standard input that says yes, or nothing at all, and stays open: nobody may read it."""
    ours, theirs = os.pipe()
    os.write(theirs, request.param.encode() * 20)
    with open(ours, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        before = time.monotonic()
        yield
        assert time.monotonic() - before < 12, "somebody waited for an answer"
        os.close(theirs)
        assert os.read(ours, 1000).decode() == request.param * 20, "somebody read an answer"


def calls(folder, tmp_path):
    """Everything that reads a config or a tokenizer of a folder."""
    text = tmp_path / "text"
    text.write_text("some text")
    return {
        "config": [
            lambda: loading.load(folder, device="cpu"),
            lambda: quantize_folder(folder, tmp_path / "out", "w4a16-g128", device="cpu"),
            lambda: integration.config_of(folder),
        ],
        "tokenizer": [
            lambda: terrazzo.generate(folder, "Hi", max_new_tokens=1, load=dict(device="cpu")),
            lambda: foreign.tokenizer_of(folder),
        ],
    }


@pytest.mark.parametrize("what", ["config", "tokenizer"])
def test_a_models_python_runs_only_where_it_is_asked_for(folder, coded, answers, tmp_path, what):
    ran = coded(what)
    for call in calls(folder, tmp_path)[what]:
        with pytest.raises(ArgumentError, match="runs with trust_remote_code=True, or --trust-remote-code"):
            call()
    assert not ran.exists()


@pytest.mark.parametrize("what", ["config", "tokenizer"])
def test_the_command_runs_no_python_of_a_model(folder, coded, answers, tmp_path, capsys, what):
    ran, text = coded(what), tmp_path / "text"
    text.write_text("some text")
    words = ["quantize", str(folder), "-o", str(tmp_path / "out"), "--device", "cpu", "--calibration", str(text)]
    assert cli.main(words) == 2 and "--trust-remote-code" in capsys.readouterr().err
    assert not ran.exists()


def test_python_of_a_model_runs_for_those_who_ask(folder, coded, tmp_path):
    ran = coded("tokenizer")
    facts = dict(max_new_tokens=1, trust_remote_code=True, load=dict(device="cpu"))
    (text,) = terrazzo.generate(folder, "Hi", **facts)
    assert isinstance(text, str) and ran.exists()
    ran.unlink()
    coded("config")
    change(folder / "config.json", model_type="llama")
    with pytest.raises(ArgumentError, match="is no class of transformers"):
        loading.load(folder, device="cpu", trust_remote_code=True)
    assert ran.exists()
    with pytest.raises(ArgumentError, match="trust_remote_code = 'no'"):
        loading.load(folder, device="cpu", trust_remote_code="no")


def test_code_that_is_not_needed_is_left_alone(folder, coded):
    """A published folder may have code for old releases of transformers, beside an architecture that is known."""
    ran = coded("config")
    change(folder / "config.json", model_type="llama")
    assert loading.load(folder, device="cpu").config.model_type == "llama" and not ran.exists()


OPENED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "loop"])
def test_what_is_no_file_is_named_and_not_waited_for(folder, monkeypatch, name, kind):
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked"))
    place = folder / name
    place.unlink(missing_ok=True)
    {
        "pipe": os.mkfifo, "folder": os.mkdir, "dangling": lambda at: at.symlink_to("nowhere"),
        "loop": lambda at: at.symlink_to(name),
    }[kind](place)  # fmt: skip
    with pytest.raises(ArgumentError, match=name):
        reading.read_config(folder, None)
    with pytest.raises(ArgumentError, match=name):
        foreign.tokenizer_of(folder)


def test_files_that_fill_the_memory_are_not_opened(folder):
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ArgumentError, match="tokenizer.json.*1099511627776 bytes"):
        foreign.tokenizer_of(folder)


BROKEN = {
    "two values": b'{"model_type": "llama", "model_type": "qwen2"}',
    "deep": b"[" * 100_000, "objects": b'{"a":' * 100_000, "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "latin": '{"a": "é"}'.encode("latin-1"), "mark": b"\xef\xbb\xbf{}", "list": b"[]", "empty": b"", "cut": b'{"a": ',
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_json_that_is_none_is_named(folder, kind):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_bytes(BROKEN[kind])
    with pytest.raises(ArgumentError, match="config.json"):
        reading.read_config(folder, None)
    with pytest.raises(ArgumentError, match="generation_config.json"):
        reading.generation_config(folder)
    with pytest.raises(ArgumentError, match="tokenizer"):
        foreign.tokenizer_of(folder)


def test_a_name_that_is_there_twice_with_one_value_is_read(folder):
    file = folder / "config.json"
    file.write_text(file.read_text(encoding="utf-8").replace("{", '{"model_type": "llama", ', 1), encoding="utf-8")
    assert reading.read_config(folder, None)[1].model_type == "llama"


def test_damaged_tokenizers_are_refused_or_read(folder, tries):
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer_config.json")
    good = {name: json.loads((folder / name).read_text()) for name in names}
    good["tokenizer.json"]["model"]["vocab"] = dict(list(good["tokenizer.json"]["model"]["vocab"].items())[-60:])
    whole = {name: (folder / name).read_bytes() for name in names}
    refused = 0
    for random in tries(200):
        name = random.choice(names)
        for each, data in whole.items():
            (folder / each).write_bytes(data)
        (folder / name).write_bytes(mutation.text(mutation.value(good[name], random), random))

        def read():
            found = foreign.tokenizer_of(folder)
            foreign.text_of(found, foreign.tokens_of(found, "Hi, ñ"))

        refused += not mutation.survives(read)
    assert refused > 20


def test_damaged_generation_configs_are_refused_or_read(folder, tries):
    file = folder / "generation_config.json"
    good = json.loads(file.read_text()) | {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "do_sample": True}
    good["eos_token_id"] = [256, 257]
    refused = 0
    for random in tries(200):
        file.write_bytes(mutation.text(mutation.value(good, random), random))
        refused += not mutation.survives(lambda: reading.generation_config(folder))
    assert refused > 20
