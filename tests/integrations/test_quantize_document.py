"""The commands of docs/quantize.md, from a 16-bit folder to a served one, on a tiny model.

`TERRAZZO_TEST_QUANTIZER` and `TERRAZZO_TEST_VLLM_CPU` name interpreters (CONTRIBUTING.md): the first command of the
page, which installs 2 GB, is the only one that is not run.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import terrazzo
import transformers
from terrazzo.integrations.llm_compressor import INSTALL
from terrazzo.nn.quantizing import quantize_folder

from tests.integrations.published_reader import ANSWER
from tests.nn.tiny_text import VOCABULARY, byte_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quantize.md").read_text(encoding="utf-8")
QUANTIZER, VLLM = "TERRAZZO_TEST_QUANTIZER", "TERRAZZO_TEST_VLLM_CPU"
MODEL = "Llama-3.1-8B-Instruct"
START_S = 900
named = lambda *names: pytest.mark.skipif(
    any(name not in os.environ for name in names), reason=f"{' or '.join(names)} names no interpreter (CONTRIBUTING.md)"
)


def commands(after: str) -> list[str]:
    """The indented lines that follow a line of the page."""
    block = PAGE.split(after, 1)[1].split("\n\n", 2)[1]
    return [line.strip() for line in block.splitlines()]


def write_model(folder: Path, dtype: torch.dtype) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCABULARY, eos_token_id=256, pad_token_id=257, bos_token_id=None,
        initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def program(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def home(tmp_path, monkeypatch) -> dict[str, str]:
    """The environment of a user with the page's model and text, in a working directory that is their home."""
    write_model(tmp_path / MODEL, torch.bfloat16)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    program(tmp_path / "bin" / "terrazzo", f'PYTHONPATH={ROOT} exec {sys.executable} -m terrazzo "$@"')
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG", "TERRAZZO"))}
    return kept | {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def say(command: str, home: dict[str, str]) -> str:
    done = subprocess.run(command, shell=True, cwd=home["HOME"], env=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def test_the_page_has_the_lines_that_the_error_says():
    setup = commands("set up what quantizes, once for a machine:")
    assert setup == [line.removesuffix(" &&") for line in INSTALL.splitlines()]
    assert len(setup) + len(commands("Then, for vLLM:")) == len(setup) + len(commands("for Terrazzo:")) == 4


@pytest.mark.slow
@pytest.mark.timeout(2400)
@named(QUANTIZER)
def test_four_commands_end_in_an_endpoint(home, tmp_path):
    program(tmp_path / "quantizer" / "bin" / "python", f'exec {os.environ[QUANTIZER]} "$@"')
    _, name = commands("set up what quantizes, once for a machine:")
    assert "llmcompressor 0.14" in say(name, home)
    quantize, serve = commands("Then, for vLLM:")
    assert "14 layers in small, compressed-tensors" in say(quantize, home)
    again, generate = commands("for Terrazzo:")
    assert again == quantize
    assert say(f"{generate} --max-new-tokens 4", home)
    pack, chat = commands("makes one of a published folder, as a cache:")
    assert "packed for terrazzo.load" in say(pack, home) and chat == "terrazzo chat packed/"
    say(pack.split(" -o ")[0].replace("pack", "serve-check") + " --target sm_90a", home)
    (w4a8,) = re.findall(r"terrazzo quantize small/ .*", PAGE)
    assert "down_proj" in say(w4a8.replace("packed/", "w4a8/"), home)
    wanted = torch.log_softmax(terrazzo.load(tmp_path / "small", device="cpu")(PROMPT).logits[0, -1].float(), -1)
    if VLLM not in os.environ:
        pytest.skip(f"{VLLM} names no interpreter: the folder is not served")
    for token, value in _served(serve, home).items():
        assert wanted[token] == pytest.approx(value, abs=0.1)


PROMPT = torch.tensor([list(b"The quick brown")])


def _served(command: str, home: dict[str, str]) -> dict[int, float]:
    """Log-probabilities of the token behind PROMPT, by the server that a command starts."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    vllm = Path(os.environ[VLLM]).with_name("vllm")
    tiny = f"--host 127.0.0.1 --port {port} --max-model-len 128 --enforce-eager"
    site = Path(home["HOME"]) / "site"  # its command asks for the version of a package "vllm", and vllm-cpu is none
    (site / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (site / "vllm-0.32.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    program(Path(home["HOME"]) / "bin" / "vllm", f'PYTHONPATH={site} exec {vllm} "$@" {tiny}')
    more = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    log = Path(home["HOME"]) / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            f"exec {command}", shell=True, cwd=home["HOME"], env=home | more, stdout=out, stderr=out
        )
        try:
            end = time.monotonic() + START_S
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None and time.monotonic() < end, log.read_text()[-6000:]
                time.sleep(1)
            asked = {"model": "small/", "prompt": PROMPT[0].tolist(), "max_tokens": 1, "temperature": 0, "logprobs": 5,
                     "return_tokens_as_token_ids": True}  # fmt: skip
            chat = {"model": "small/", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 2}
            said = _ask(f"http://127.0.0.1:{port}/v1/completions", asked)
            assert _ask(f"http://127.0.0.1:{port}/v1/chat/completions", chat)["choices"][0]["message"]["role"]
        finally:
            server.terminate()
            server.wait(timeout=120)
    (found,) = said["choices"][0]["logprobs"]["top_logprobs"]
    return {int(token.removeprefix("token_id:")): value for token, value in found.items()}


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=10).status == 200
    except (OSError, urllib.error.URLError):
        return False


def _ask(url: str, data: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(data).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=300).read())


WIDE = ("w4a16-g64", "w4a16-g128-sym", "w8a16", "fp8", "fp8-g128", "mxfp4", "nvfp4")
BYTES = ("w8a8", "w8a8-e4m3-g128", "w4a8-e4m3-g64")
FORMATS = dict.fromkeys(WIDE, 0.03) | dict.fromkeys(BYTES, 0.2)
"""Format -> how far logits in bfloat16 may be apart: activations of 8 bits are rounded otherwise."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [pytest.param(name, marks=named(name)) for name in (QUANTIZER, VLLM)])
def test_transformers_and_compressed_tensors_read_what_is_written(tmp_path, name):
    """0.19 and 0.17, which these environments have."""
    source = write_model(tmp_path / "float", torch.bfloat16)
    for form in FORMATS:
        quantize_folder(source, tmp_path / form, form, device="cpu")
    asked = {"folders": [str(tmp_path / form) for form in FORMATS], "tokens": PROMPT.tolist()}
    reader = str(ROOT / "tests" / "integrations" / "published_reader.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([os.environ[name], "-I", reader], input=json.dumps(asked), capture_output=True, text=True,
                          check=False, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    said = json.loads([line for line in done.stdout.splitlines() if line.startswith(ANSWER)][-1].removeprefix(ANSWER))
    assert said["versions"]["compressed_tensors"].startswith({QUANTIZER: "0.19", VLLM: "0.17"}[name])
    for form, most in FORMATS.items():
        answer = said["folders"][str(tmp_path / form)]
        assert "logits" in answer, (form, answer)
        read, wanted = (
            torch.tensor(answer["logits"]),
            terrazzo.load(tmp_path / form, device="cpu")(PROMPT).logits.float(),
        )
        assert (read - wanted).norm() < most * wanted.norm(), form
