"""`terrazzo serve-check`: what is printed of a folder, and what is refused."""

from __future__ import annotations

import json

import pytest
from terrazzo.cli import main

from tests.integrations import vllm_folders


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_layers_are_counted_and_reasons_said(capsys, tmp_path):
    packed, plain = map(str, vllm_folders.write(tmp_path, "tiny-mixtral", "w4a16"))
    code, out, _ = run(capsys, "serve-check", packed, "--target", "sm_90a")
    assert code == 0 and "8 of 8 layers run on terrazzo (sm_90a)" in out
    code, out, _ = run(capsys, "serve-check", packed, "--target", "sm_89")
    assert code == 0 and "8 of 8 layers run on terrazzo (sm_89)" in out
    code, out, _ = run(capsys, "serve-check", packed, "--target", "sm_90a", "--tensor-parallel", "2", "--json")
    said = json.loads(out)
    sizes = {row["leaf"]: (row["n"], row["k"], row["experts"]) for row in said["kinds"]}
    assert said["layers"] == said["terrazzo"] == 8
    assert sizes == {"qkv_proj": (256, 256, 0), "o_proj": (256, 128, 0), "w13": (256, 256, 4), "w2": (256, 128, 4)}
    code, out, _ = run(capsys, "serve-check", plain)
    assert code == 0 and "0 of" in out and "not quantized" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "Missing argument"), (("nowhere",), "does not exist"), ((".", "--target", "sm_1"), "sm_1")],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "serve-check", *arguments)
    assert code == 2 and said in err and err.count("\n") == 1
    code, _, err = run(capsys, "serve-check", str(tmp_path))
    assert code == 2 and err.count("\n") == 1  # an empty folder
