"""GPTQ, AWQ and AutoRound by llm-compressor in an environment of its own, and what is said where that is not there.

`TERRAZZO_TEST_QUANTIZER` names the interpreter of one (CONTRIBUTING.md); without it, tests that quantize are skipped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
import transformers
from terrazzo.cli import main
from terrazzo.integrations import llm_compressor
from terrazzo.integrations.llm_compressor_program import ANSWER
from terrazzo.lowering.errors import ArgumentError, ToolchainError
from terrazzo.lowering.settings import COMPILER, QUANTIZER
from terrazzo.nn.quantizing import quantize_folder

from tests.nn.tiny_text import VOCABULARY, byte_tokenizer

PYTHON = "TERRAZZO_TEST_QUANTIZER"
TEXT = torch.randint(0, 256, (16, 48), generator=torch.Generator().manual_seed(5))
CPU = {"device": "cpu"}
RELEASES = {"llmcompressor": "0.14.0.1", "compressed-tensors": "0.19.0", "transformers": "5.17.0", "torch": "2.13.0"}
real = pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter (see CONTRIBUTING.md)")


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for named in (QUANTIZER, COMPILER):
        monkeypatch.delenv(named.variable, raising=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("float") / "model")


def write_model(folder: Path, experts: bool = False) -> Path:
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, head_dim=64,
                 num_key_value_heads=1, vocab_size=VOCABULARY, eos_token_id=256, pad_token_id=257,
                 bos_token_id=None, initializer_range=0.2)  # fmt: skip
    torch.manual_seed(0)
    if experts:
        config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)
        transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).half().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def interpreter(tmp_path):
    """A program that answers as another environment's interpreter: releases, and lines to a run."""

    def made(releases=RELEASES, answers=(), code: int = 0, name: str = "python") -> str:
        path = tmp_path / name
        told = "\n".join(answers)
        path.write_text(
            f"#!{sys.executable}\nimport sys\nif '-c' in sys.argv:\n    print({json.dumps(releases)!r})\nelse:\n"
            f"    sys.stdin.read()\n    print({told!r})\n    sys.exit({code})\n"
        )
        path.chmod(0o755)
        return str(path)

    return made


# -- the environment ---------------------------------------------------------------------------------------------------
def test_without_an_environment_the_error_says_the_two_lines(source, tmp_path, capsys):
    with pytest.raises(ToolchainError) as error:
        llm_compressor.quantize_folder(source, tmp_path / "out", "w4a16-g64-sym", "gptq", calibration=TEXT)
    lines = str(error.value).splitlines()
    assert lines[1:] == llm_compressor.INSTALL.splitlines() and len(lines) == 3
    assert "pip install 'llmcompressor==0.14.*'" in lines[1] and lines[2].startswith("terrazzo config quantizer ")
    assert not (tmp_path / "out").exists()
    text = tmp_path / "text"
    text.write_text("some text " * 100)
    words = ["quantize", str(source), "-o", str(tmp_path / "out"), "--method", "gptq", "--format", "w4a16-g64-sym"]
    assert main([*words, "--calibration", str(text)]) == 2
    assert "terrazzo config quantizer ~/quantizer/bin/python" in capsys.readouterr().err
    assert main(words) == 2 and "--calibration FILE" in capsys.readouterr().err
    assert main(["config", "quantizer"]) == 0 and llm_compressor.INSTALL in capsys.readouterr().out


def test_it_is_named_shown_and_forgotten_beside_the_compiler(interpreter, tmp_path, capsys, monkeypatch):
    python = interpreter()
    COMPILER.keep("/some/python")
    assert main(["config", "quantizer", python]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{python}, named by {tmp_path}") and "llmcompressor 0.14.0.1" in said
    assert json.loads(QUANTIZER.file().read_text()) == {"compiler": "/some/python", "quantizer": python}
    monkeypatch.setenv(QUANTIZER.variable, "")
    assert QUANTIZER.find() is None
    monkeypatch.delenv(QUANTIZER.variable)
    assert main(["config", "quantizer", "--unset"]) == 0 and COMPILER.find()[0] == "/some/python"
    assert QUANTIZER.find() is None
    COMPILER.keep(None)
    assert not QUANTIZER.file().exists()


@pytest.mark.parametrize(
    ("releases", "said"),
    [({"llmcompressor": "0.13.0"}, "has llm-compressor 0.13.0, and 0.14 is what runs"), ({}, "has no llm-compressor")],
)
def test_another_environment_is_refused_and_not_kept(interpreter, releases, said):
    with pytest.raises(ToolchainError, match=said):
        llm_compressor.set_quantizer(interpreter(releases))
    for absent in ("/absent/python", "python"):
        with pytest.raises(ToolchainError, match="no absolute path of a program|cannot be asked"):
            llm_compressor._probe(absent)
    assert not QUANTIZER.file().exists()


def test_a_configuration_that_others_may_write_names_no_quantizer(interpreter):
    llm_compressor.set_quantizer(interpreter())
    QUANTIZER.file().chmod(0o666)
    with pytest.raises(ToolchainError, match="others than this user may write it"):
        llm_compressor.quantizer()
    assert "others than this user" in llm_compressor.report()["problem"]


# -- what is asked for -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(format="w4a8"), "format = 'w4a8-g64': has scales of two levels.*w4a16-g128-sym.*--format w4a8-g64"),
        (dict(format="w4ax"), "format = 'w4ax-g128': has scales of two levels"),
        (dict(format="mxfp4-e4m3"), "format = 'mxfp4-e4m3-g32': has no form in compressed-tensors, which gptq writes"),
        (dict(format="nf4"), "format = 'nf4-g64': has no form in compressed-tensors.*; name one that has"),
        (dict(calibration=None), "calibration = None: gptq needs to see activations"),
        (dict(method="spin"), "method = 'spin': must be one of"),
    ],
)
def test_what_it_cannot_make_is_refused_first(source, tmp_path, asked, said):
    given = dict(format="w4a16-g64-sym", method="gptq", calibration=TEXT) | asked
    with pytest.raises(ArgumentError, match=said):
        llm_compressor.quantize_folder(source, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_quantized_source_is_refused(source, tmp_path, interpreter, monkeypatch):
    monkeypatch.setenv(QUANTIZER.variable, interpreter())
    quantize_folder(source, tmp_path / "four", "w4a16-g64", **CPU)
    with pytest.raises(ArgumentError, match="source = .*has quantized layers already"):
        llm_compressor.quantize_folder(tmp_path / "four", tmp_path / "out", "w8a8", "gptq", calibration=TEXT)


def test_what_only_a_packed_folder_holds_is_refused_by_the_command(source, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("some text " * 100)
    words = ["quantize", str(source), "-o", str(tmp_path / "out"), "--method", "awq", "--calibration", str(text)]
    for more in (["--kv", "int8"], ["--target", "sm_90a"]):
        assert main([*words, *more]) == 2
        assert f"{more[0]} is of packed folders, which --method awq does not write" in capsys.readouterr().err
    assert main([*words, "--write", "packed"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--method awq writes compressed-tensors and no packed folder; leave --write out" in said


@pytest.mark.parametrize("answers", [[], [f'{ANSWER}{{"layer": 1, "errors": {{"a": 0.1}}}}'], ["the reason"]])
def test_a_process_that_fails_says_why_and_leaves_no_folder_behind(source, tmp_path, interpreter, monkeypatch, answers):
    monkeypatch.setenv(QUANTIZER.variable, interpreter(answers=answers, code=7))
    out, seen = tmp_path / "out", []
    with pytest.raises(ToolchainError, match="ended with 7") as error:
        llm_compressor.quantize_folder(
            source, out, "w4a16-g64-sym", "gptq", calibration=TEXT, progress=lambda *done: seen.append(done)
        )
    assert ("the reason" in str(error.value)) == ("the reason" in answers)
    assert seen == [(1, 2)] * any(answer.startswith(ANSWER) for answer in answers)
    assert list(out.iterdir()) == []
    quantize_folder(source, out, "w4a16-g64", **CPU)  # another method takes the empty folder


@pytest.mark.parametrize(
    "answer",
    ["{bad", "[]", "null", '"done"', '{"layer": null}', '{"layer": -1, "errors": {}}', '{"errors": {"a": 0.1}}',
     '{"layer": 1, "errors": [1]}', '{"layer": 1, "errors": {"a": "0.1"}}',
     '{"layer": 1, "errors": {"a": 1%s}}' % ("0" * 400), '{"done": 1, "errors": {"a": 0.1}}'],
)  # fmt: skip
@pytest.mark.parametrize("told", [True, False])
def test_an_answer_of_another_form_is_refused_by_name(source, tmp_path, interpreter, monkeypatch, answer, told):
    python = interpreter(answers=[f"{ANSWER}{answer}", f'{ANSWER}{{"done": true, "errors": {{"a": 0.1}}}}'])
    monkeypatch.setenv(QUANTIZER.variable, python)
    more = {"progress": lambda *done: None} if told else {}
    with pytest.raises(
        ToolchainError, match=f"{python} gave an answer that is none, .*set the environment up"
    ) as error:
        llm_compressor.quantize_folder(source, tmp_path / "out", "w4a16-g64-sym", "gptq", calibration=TEXT, **more)
    assert answer[:50] in str(error.value) and list((tmp_path / "out").iterdir()) == []


def test_an_error_that_is_no_number_names_its_layer(source, tmp_path, interpreter, monkeypatch):
    python = interpreter(answers=[f'{ANSWER}{{"layer": 1, "errors": {{"a": 0.1, "b": NaN}}}}'])
    monkeypatch.setenv(QUANTIZER.variable, python)
    with pytest.raises(ToolchainError, match=f"{python} made no numbers of b; repair the checkpoint"):
        llm_compressor.quantize_folder(source, tmp_path / "out", "w4a16-g64-sym", "gptq", calibration=TEXT)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no file of weights"),
        ({"model.safetensors": "x"}, "no config.json"),
        ({"model.safetensors": "x", "config.json": "{bad"}, "a config.json that cannot be read"),
        ({"model.safetensors": "x", "config.json": "[]"}, "a config.json without quantization_config"),
        ({"model.safetensors": "x", "config.json": '{"quantization_config": {}}'}, "model.safetensors, which cannot"),
    ],
)
def test_a_run_that_is_done_without_its_files_is_refused_by_name(
    source, tmp_path, interpreter, monkeypatch, files, said
):
    python = interpreter(answers=[f'{ANSWER}{{"done": true, "errors": {{"a": 0.1}}}}'])
    put = f"    import json; out = json.load(sys.stdin)['out']\n    for name, text in {files!r}.items():\n"
    put += "        open(f'{out}/{name}', 'w').write(text)\n"
    program = Path(python).read_text(encoding="utf-8").replace("    sys.stdin.read()\n", put)
    Path(python).write_text(program, encoding="utf-8")
    monkeypatch.setenv(QUANTIZER.variable, python)
    with pytest.raises(ToolchainError, match=f"{python} said that it is done, and wrote {said}.*set the environment"):
        llm_compressor.quantize_folder(source, tmp_path / "out", "w4a16-g64-sym", "gptq", calibration=TEXT)
    assert list((tmp_path / "out").iterdir()) == []


# -- real runs ---------------------------------------------------------------------------------------------------------
def run(folder: Path, out: Path, form: str, method: str, **options) -> dict[str, float]:
    os.environ[QUANTIZER.variable] = os.environ[PYTHON]
    try:
        return llm_compressor.quantize_folder(folder, out, form, method, calibration=TEXT, **CPU, **options)
    finally:
        del os.environ[QUANTIZER.variable]


def outputs_off(folder: Path, source: Path) -> float:
    """How far the logits of a folder are from the float model's, over their norm."""
    wanted = terrazzo.load(source, **CPU)(TEXT[:4]).logits.double()
    return float((terrazzo.load(folder, **CPU)(TEXT[:4]).logits.double() - wanted).norm() / wanted.norm())


@real
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("form", "method"),
    [("w4a16-g64-sym", "gptq"), ("w4a16-g64", "gptq"), ("w8a8", "gptq"), ("nvfp4", "gptq"), ("w4a16-g64-sym", "awq"),
     ("w4a16-g64-sym", "autoround")],
)  # fmt: skip
def test_a_method_writes_a_folder_that_load_reads(source, tmp_path, form, method):
    out, seen = tmp_path / "out", []
    more = {"iterations": 2} if method == "autoround" else {}
    errors = run(source, out, form, method, progress=lambda *done: seen.append(done), **more)
    assert len(errors) == 14 and all(0.001 < error < 0.3 for error in errors.values())
    assert seen[0] == (1, 2) and seen[-1] == (2, 2)
    assert {path.name for path in out.iterdir()} >= {"tokenizer.json", "chat_template.jinja", "config.json"}
    assert not (out / llm_compressor.SCRATCH).exists()
    model = terrazzo.load(out, **CPU)
    assert type(model.decoder.layers[1].mlp.down_proj).__name__ == "Linear"
    assert outputs_off(out, source) < 0.6
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert run(source, out, form, method, **more) == errors
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")} == before
    with pytest.raises(ArgumentError, match="method was"):
        quantize_folder(source, out, form, **CPU)


@real
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gptq_is_nearer_on_its_text_than_rounding_and_becomes_w4a8(source, tmp_path):
    run(source, tmp_path / "gptq", "w4a16-g128-sym", "gptq")
    quantize_folder(source, tmp_path / "rtn", "w4a16-g128-sym", **CPU, options={"clip_steps": 1})
    assert outputs_off(tmp_path / "gptq", source) < outputs_off(tmp_path / "rtn", source)
    errors = quantize_folder(tmp_path / "gptq", tmp_path / "w4a8", "w4a8-g128", **CPU)
    assert len(errors) == 8 and 0.001 < max(errors.values()) < 0.06  # rows of one group are exact
    assert terrazzo.load(tmp_path / "w4a8", **CPU)(TEXT[:1]).logits.isfinite().all()


@real
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_experts_are_calibrated_and_written_one_by_one(tmp_path):
    source = write_model(tmp_path / "experts", experts=True)
    errors = run(source, tmp_path / "out", "w4a16-g64-sym", "gptq")
    assert {f"model.layers.{i}.mlp.experts.{e}.down_proj" for i in range(2) for e in range(4)} <= set(errors)
    assert terrazzo.load(tmp_path / "out", **CPU)(TEXT[:1]).logits.isfinite().all()
