"""Errors speak the command line's words, and say what was most likely meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from terrazzo.cli import main
from terrazzo.command_line import closest
from terrazzo.lowering.targets import Target


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "cache"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("compile", "--shape", "64x64", "--target", "sm_90"), "did you mean 'sm_90a'?"),
        (("compile", "--shape", "64x64", "--target", "h100"), "did you mean 'nvidia/nvidia-h100'?"),
        (("compile", "--model", "lama-3-8b", "--target", "sm_90a"), "did you mean 'llama-3-8b'?"),
        (("compile", "--model", "Llama-3-8B", "--target", "sm_90a"), "did you mean 'llama-3-8b'?"),
        (("compile", "--shape", "64x64", "--op", "w4a6", "--target", "sm_90a"), "did you mean 'w4a16'?"),
        (("compile", "--shape", "64x64", "--numerics", "post-", "--target", "sm_90a"), "did you mean 'post'?"),
        (("ops", "--target", "sm90a"), "did you mean 'sm_90a'?"),
        (("ops", "--op", "atention"), "did you mean 'attention'?"),
        (("layout", "marlin"), "did you mean 'marlin_u4'?"),
        (("demo", "--targets", "sm_80,sm_98"), "did you mean 'sm_89'?"),
        (("bench", "--model", "mistral"), "did you mean 'mistral-7b'?"),
        (("tune", "--op", "w4a16-grouped", "--dry-run"), "did you mean 'w4a16_grouped'?"),
        (("tune", "--model", "qwen3-8", "--dry-run"), "did you mean 'qwen3-8b'?"),
        (("tune", "explain", "--shape", "64x64", "--target", "sm_9a"), "did you mean 'sm_90a'?"),
        (("compil",), "did you mean 'compile'?"),
        (("cache", "lst"), "did you mean 'list'?"),
        (("tune", "exprt"), "did you mean 'export'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_misspelt_name_is_answered_with_the_right_one(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert err.count("\n") == 1 and words in err
    assert "(" not in err.replace("(32, 64, 128)", ""), "calls of the library are no words of the command line"


@pytest.mark.parametrize("word", ["", " ", "x", "gpt-9", "zzzzzz"])
def test_nothing_is_meant_by_what_resembles_nothing(word):
    assert closest(word, ["llama-3-8b", "qwen3-8b"]) is None


def test_help_of_tune_shows_what_run_takes(capsys):
    _, group, _ = run(capsys, "tune", "--help")
    _, own, _ = run(capsys, "tune", "run", "--help")
    options = [line.split()[0] for line in own.splitlines() if line.startswith("  --")]
    assert len(options) > 20 and all(f"  {option}" in group for option in options)


def test_a_group_longer_than_k_is_said_to_be_one_group(capsys, monkeypatch):
    monkeypatch.setattr("terrazzo.building.Build.run", lambda self: [])
    given = ("compile", "--target", "sm_90a", "--m", "1", "--json")
    _, out, err = run(capsys, *given, "--shape", "100x100", "--shape", "256x128")
    assert "100x100: K is below the group of 128, so its kernels have one group of K" in err and "256x128" not in err
    json.loads(out)
    assert "one group" not in run(capsys, *given, "--shape", "100x100", "--group", "K")[2]


@pytest.mark.parametrize(
    "arguments", [("compile", "--shape", "64x64"), ("tune", "explain", "--op", "w4a16", "--shape", "128x128")]
)
def test_a_verb_that_looks_for_a_gpu_says_where_there_is_none(capsys, monkeypatch, arguments):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith("terrazzo: --target is needed: no CUDA device can be seen")
    assert "as --target sm_90a" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--format", "w4a17"), "--format w4a17: must be one of"),
        (("--format", "w4a16_g128"), "did you mean 'w4a16-g128'?"),
        (("--kv", "int4_hadamrd"), "'int4_hadamrd' is no format of keys or values: did you mean 'int4_hadamard'?"),
        (("--kv", "int4/int8/int2"), "must be one format or a pair"),
        (("--tokens", "7"), "--tokens is of the text that --calibration names"),
        (("--kv", "fp8"), "--calibration: kv='fp8' needs to see keys and values"),
        (("--target", "sm_90"), "'sm_90' is no target: did you mean 'sm_90a'?"),
        ((), "is no folder with a config.json"),
    ],
)
def test_bad_input_to_quantize_is_one_line(capsys, tmp_path, arguments, words):
    model = tmp_path / "model"
    model.mkdir()
    if arguments[:1] == ("--kv",):
        (model / "config.json").write_text('{"model_type": "llama"}')
    code, out, err = run(capsys, "quantize", str(model), "-o", str(tmp_path / "out"), *arguments)
    assert code == 2 and not out and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("most,shape", [(6, (1, 6)), (600, (1, 512)), (1100, (2, 512)), (None, (4, 512))])
def test_quantize_reads_so_many_tokens_of_the_text(capsys, monkeypatch, tmp_path, most, shape):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.nn.tiny_text import write_folder

    write_folder(tmp_path / "model")
    capsys.readouterr()  # bars of transformers
    (tmp_path / "text").write_text("abcdef" * 400)
    asked = []
    monkeypatch.setattr("terrazzo.nn.quantizing.quantize_folder", lambda *given, **options: asked.append(options) or {})
    monkeypatch.setattr("terrazzo.commands_quantize._method_of", lambda folder: "packed")
    given = ("quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--calibration", str(tmp_path / "text"))
    code, _, err = run(capsys, *given, *(("--tokens", str(most)) if most else ()), "--json")
    (text,) = [options["calibration"] for options in asked]
    assert code == 0 and not err and text.shape == shape
    assert bytes(text.flatten().tolist()) == (b"abcdef" * 400)[: text.numel()]


def test_compile_without_anything_to_compile_asks_for_that_first(capsys):
    code, _, err = run(capsys, "compile")
    assert code == 2 and "name a FOLDER, a --model or a --shape" in err


def test_compile_takes_the_gpu_of_this_machine(capsys, monkeypatch):
    found = Target.parse("nvidia/nvidia-a100")
    monkeypatch.setattr(Target, "detect", staticmethod(lambda device=None: found))
    code, out, _ = run(capsys, "compile", "--shape", "256x256", "--m", "1", "--dry-run", "--json")
    assert code == 0 and json.loads(out)["target"] == "sm_80"


@pytest.mark.parametrize("arguments", [("info",), ("ops",), ("layout",), ("tune", "--help"), ("compile", "--help")])
def test_tables_fit_a_hundred_columns(capsys, arguments):
    assert max(map(len, run(capsys, *arguments)[1].splitlines())) <= 100


def test_rows_of_kernels_fit_a_hundred_columns(capsys, monkeypatch):
    from terrazzo.building import print_kernels

    params = {f"parameter_{at}": at for at in range(40)}
    facts = {
        "registers": 168,
        "smem_static": 0,
        "smem_dynamic": 200_000,
        "spill_stores": 0,
        "spill_loads": 0,
        "note": "",
    }
    row = {
        "kernel": "attention.prefill_shared",
        "target": "sm_90a",
        "tensor_instructions": {"HGMMA.64x128x16.F32": 512},
    }
    failed = {
        "kernel": "w4a16.stream_k",
        "target": "sm_90a",
        "params": {"n": 1},
        "error": "it for sm_90a: " + "why " * 60,
    }
    print_kernels([row | facts | {"params": params}, row | facts | {"params": params | {"parameter_3": 7}}, failed])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert "parameter_3=7" in said and "FAILED" in said and said.count("why") == 60  # nothing is cut


@pytest.mark.parametrize("verb", ["list", "clear", "verify"])
def test_a_cache_that_is_a_file_is_an_error(capsys, private_cache, verb):
    private_cache.write_text("no folder")
    code, out, err = run(capsys, "cache", verb)
    assert (code, out) == (2, "") and f"{private_cache} is a file" in err and "TERRAZZO_CACHE_DIR" in err
    assert private_cache.read_text() == "no folder"


def test_a_cache_that_cannot_be_cleared_says_so(capsys, private_cache, monkeypatch):
    from terrazzo.lowering import cache

    (cache.room(cache.VERSION, "kernels") / ("0" * 64)).mkdir()

    def refuse(path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    code, out, err = run(capsys, "cache", "clear")
    assert (code, out) == (2, "") and "cannot be cleared" in err and "read-only" in err and err.count("\n") == 1
    monkeypatch.undo()


def shell(tmp_path, text: str) -> subprocess.CompletedProcess:
    env = os.environ | {"TERRAZZO_CACHE_DIR": str(tmp_path), "TERRAZZO": f"{sys.executable} -m terrazzo"}
    return subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "text,code",
    [
        ("$TERRAZZO layout w4a16 >&-", 0),
        ("$TERRAZZO layout >&-", 0),
        ("$TERRAZZO layout nope >&- 2>&-", 2),
        ("$TERRAZZO layout w4a16 <&- >&- 2>&-", 0),
        ("$TERRAZZO layout --json | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", (0, 141)),
        ("$TERRAZZO layout >/dev/full", 2),
        ("$TERRAZZO layout --json >/dev/full", 2),
        ("unset PYTHONUNBUFFERED; $TERRAZZO layout >/dev/full", 2),
    ],
)
def test_a_closed_output_is_no_traceback(tmp_path, text, code):
    done = shell(tmp_path, text)
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.count("\n") <= 1


def test_a_full_output_adds_no_line_to_an_error(tmp_path):
    """What was printed before the error is refused only when the command ends."""
    (tmp_path / "verb.py").write_text(
        "from terrazzo import cli\n"
        "def verb(**_):\n"
        "    print('a part')\n"
        "    raise cli.TerrazzoError('no')\n"
        "cli.layout.callback = verb\n"
        "raise SystemExit(cli.main(['layout']))\n"
    )
    done = shell(tmp_path, f"unset PYTHONUNBUFFERED; {sys.executable} {tmp_path}/verb.py >/dev/full")
    assert (done.returncode, done.stderr) == (2, "terrazzo: no\n")
