"""`terrazzo generate` and `terrazzo chat` of a folder that the command itself packed."""

from __future__ import annotations

import io

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
from terrazzo.cli import main

from tests.nn.tiny_text import write_folder

CPU = ("--device", "cpu", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A 16-bit folder, and what `terrazzo quantize` makes of it."""
    root = tmp_path_factory.mktemp("generate")
    source, packed = write_folder(root / "float"), root / "packed"
    assert main(["quantize", str(source), "-o", str(packed), "--format", "w4a16-g64", "--device", "cpu"]) == 0
    return source, packed


@pytest.fixture(scope="module")
def model(folders):
    return terrazzo.load(folders[1], device="cpu")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_prompt_is_answered_in_the_chat_template_unless_it_is_declined(capsys, folders, model):
    says = {chat: terrazzo.generate(model, "Hi", chat=chat, max_new_tokens=6)[0] for chat in (True, False)}
    assert says[True] != says[False]
    for options, chat in (((), True), (("--chat",), True), (("--no-chat",), False)):
        code, out, _ = run(capsys, "generate", folders[1], "Hi", *CPU, *options)
        assert (code, out) == (0, says[chat] + "\n")


def test_options_reach_loading_and_sampling(capsys, folders):
    source, _ = folders
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 3}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    loading = ("--quantize", "w4a16-g64", "--kv", "int8/int4", "--dtype", "bf16")
    code, out, _ = run(capsys, "generate", source, "Hi", *CPU, *words, *loading)
    own = terrazzo.load(source, device="cpu", quantize="w4a16-g64", kv=("int8", "int4"), dtype=torch.bfloat16)
    assert (code, out[:-1]) == (0, terrazzo.generate(own, "Hi", chat=True, max_new_tokens=6, **options)[0])


def test_without_a_seed_draws_differ(capsys, folders):
    hot = ("--temperature", "3", "--device", "cpu", "--max-new-tokens", "12")
    assert len({run(capsys, "generate", folders[1], "Hi", *hot)[1] for _ in range(3)}) > 1


def test_a_prompt_comes_from_standard_input(capsys, folders, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    code, out, _ = run(capsys, "generate", folders[1], "-", *CPU)
    assert (code, out) == (0, terrazzo.generate(model, "Hi", chat=True, max_new_tokens=6)[0] + "\n")


def test_a_chat_remembers_begins_anew_and_ends(capsys, folders, model, monkeypatch):
    say = lambda messages: terrazzo.generate(model, messages, chat=True, max_new_tokens=6)[0]
    user = lambda text: {"role": "user", "content": text}
    system = [{"role": "system", "content": "Be kind."}]
    first = say([*system, user("Hi")])
    second = say([*system, user("Hi"), {"role": "assistant", "content": first}, user("And?")])
    anew = say([*system, user("And?")])
    assert len({first, second, anew}) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd?\n/new\nAnd?\n/exit\nnot said\n"))
    code, out, _ = run(capsys, "chat", folders[1], *CPU, "--system", "Be kind.")
    assert (code, out) == (0, f"{first}\n{second}\n{anew}\n")


def test_a_message_that_does_not_fit_is_left_out_of_the_talk(capsys, folders, model, monkeypatch):
    answer = terrazzo.generate(model, "Hi", chat=True, max_new_tokens=6)[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 4000 + "\nHi"))
    code, out, err = run(capsys, "chat", folders[1], *CPU)
    assert (code, out) == (0, answer + "\n") and "positions" in err and "/new begins again" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--quantize", "w4a16-g64"), "--quantize w4a16-g64: is for float layers, and all of the folder are quantized"),
        (("--kv", "itn8"), "did you mean 'int8'?"),
        (("--temperature", "-1"), "'--temperature': -1.0 is not in the range"),
        (("--max-new-tokens", "99999"), "positions"),
        (("--device", "gpu"), "--device gpu: must be a device"),
    ],
)
def test_bad_input_is_one_line(capsys, folders, arguments, words):
    code, out, err = run(capsys, "generate", folders[1], "Hi", "--device", "cpu", *arguments)
    told = [line for line in err.splitlines() if not line.startswith("layer ")]
    assert (code, out, len(told)) == (2, "", 1) and words in told[0]


def test_what_lacks_a_tokenizer_or_a_template_is_said_before_weights_are_read(capsys, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("terrazzo.nn.loading.load", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    code, _, err = run(capsys, "generate", tmp_path, "Hi")
    assert code == 2 and "tokenizer" in err and err.count("\n") == 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    code, _, err = run(capsys, "chat", tmp_path)
    assert code == 2 and "has no chat template" in err and err.count("\n") == 1
