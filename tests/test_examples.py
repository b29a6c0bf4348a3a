"""Every example runs, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    expected = {
        "quantized_linear.py", "derive_a_layout.py", "ahead_of_time.py", "attention_block.py", "sm_scheduling.py",
        "generate.py", "between_products.py", "tile_w4a16.py", "tile_kv_decode.py",
    }  # fmt: skip
    assert {path.name for path in EXAMPLES} == expected


SLOW = ("ahead_of_time", "tile_w4a16", "tile_kv_decode")  # which compile for two targets


WITH_ARGUMENTS = ("generate",)


def run(example: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TERRAZZO_CACHE_DIR": os.environ.get("TERRAZZO_CACHE_DIR") or str(folder / "cache")}
    command = [sys.executable, str(example), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(it, id=it.stem, marks=[pytest.mark.slow] * (it.stem in SLOW))
        for it in EXAMPLES
        if it.stem not in WITH_ARGUMENTS
    ],
)
def test_example(example, tmp_path):
    done = run(example, tmp_path)
    assert done.stdout.strip() and not list(tmp_path.glob("*.py"))


@pytest.mark.slow
def test_a_folder_in_text_out(tmp_path):
    """examples/generate.py on a tiny folder, its text beside that of the same calls here."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.append(str(ROOT / "tests" / "nn"))
    try:
        from tiny_text import write_folder
    finally:
        sys.path.pop()
    import terrazzo

    folder = write_folder(tmp_path / "tiny")
    done = run(ROOT / "examples" / "generate.py", tmp_path, str(folder), "Why is the sky blue?")
    model = terrazzo.load(folder, kv="int8")
    assert done.stdout == terrazzo.generate(model, "Why is the sky blue?", chat=True, max_new_tokens=64)[0] + "\n"


def test_the_readme_begins_with_three_lines():
    """Which tests/test_documents.py runs: no arguments, no ranks, and a chat model is asked as one."""
    first = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    lines = list(filter(None, first.splitlines()))
    assert len(lines) == 3 and "sys" not in first and "chat=True" in lines[2] and lines[2].startswith("print(")


def test_the_container_file_copies_what_there_is_and_compiles_what_a_config_states(tmp_path, capsys, monkeypatch):
    """No container engine is needed: its own words are run as far as they are ours."""
    from terrazzo.cli import main
    from terrazzo.integrations.engines.settings import Settings

    text = (ROOT / "examples" / "Containerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (?!--from)(.*) /src", text, re.MULTILINE) for path in line.split()]
    floors = [link.name for link in (ROOT / "terrazzo").iterdir() if link.is_symlink()]
    assert {"pyproject.toml", "README.md", "LICENSE", "terrazzo", *floors} == set(copied)
    assert all((ROOT / path).exists() for path in copied)
    config = dict(
        model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, quantization_config=dict(quant_method="awq", bits=4, group_size=128, zero_point=True),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = re.search(r"^RUN terrazzo (compile .*)$", text, re.MULTILINE)[1]
    for name, value in re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE):
        command = command.replace(f"${{{name}}}", value)
    words = command.replace("/model", str(tmp_path)).replace("/kernels", str(tmp_path / "kernels")).split()
    assert main([*words, "--dry-run", "--json"]) == 0
    assert "w4a16.stream_k" in json.loads(capsys.readouterr().out)["kernels"]
    stated = json.loads(re.search(r"TERRAZZO='(.*)'", text)[1])
    assert str(Settings.of(stated).bundle) == "/kernels"
    start = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])[2].replace("exec vllm", "printf '%s|'")
    given = {"PATH": os.environ["PATH"], "DTYPE": "float16", "MAX_TOKENS": "8192", "TERRAZZO": json.dumps(stated)}
    done = subprocess.run(
        ["/bin/sh", "-c", start, "vllm", "--port", "9"], env=given, capture_output=True, text=True, check=True
    )
    expected = ["serve", "/model", "--dtype", "float16", "--max-num-batched-tokens", "8192", "--additional-config"]
    assert done.stdout.split("|")[:-1] == [*expected, json.dumps(stated), "--port", "9"]
