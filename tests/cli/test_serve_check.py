"""`terrazzo serve-check`: what is printed of a folder, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
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


@pytest.mark.parametrize("stated", [{}, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}])
def test_layers_that_a_config_alone_states_are_all_counted(capsys, tmp_path, stated):
    """As vLLM joins them: qkv, o, gate_up and down; three layers have dense ones of the latter, four have experts."""
    config = dict(
        model_type="qwen3_moe", hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=7, mlp_only_layers=[0, 2, 4], num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    code, out, _ = run(capsys, "serve-check", str(tmp_path), "--target", "sm_90a", "--json")
    counts = {(row["leaf"], row["experts"]): row["count"] for row in json.loads(out)["kinds"]}
    mlps = {(name, experts): 4 if experts else 3 for name in ("gate_up_proj", "down_proj") for experts in (0, 4)}
    assert code == 0 and counts == {("qkv_proj", 0): 7, ("o_proj", 0): 7, **mlps}
    assert json.loads(out)["layers"] == 28 and json.loads(out)["terrazzo"] == (28 if stated else 0)


def of_bytes(folder, dynamic: bool, weights: dict) -> str:
    """A folder of one int8 layer of compressed-tensors whose activations are int8 too."""
    acts = {"num_bits": 8, "type": "int", "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts}
    stated = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    tensors = {"weight": torch.ones(256, 256, dtype=torch.int8), "weight_scale": torch.ones(256, 1)}
    tensors |= {} if dynamic else {"input_scale": torch.ones(1)}
    save_file({f"model.layers.0.mlp.down_proj.{name}": t for name, t in tensors.items()}, folder / "a.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": stated}))
    return str(folder)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("weights", "reason"),
    [({}, "vLLM quantizes the activations"), ({"actorder": "group", "dynamic": True}, "weights are quantized dynamic")],
    ids=["read", "skipped"],
)
def test_layers_of_bytes_have_a_reason_each(capsys, tmp_path, dynamic, weights, reason):
    code, out, _ = run(capsys, "serve-check", of_bytes(tmp_path, dynamic, weights), "--target", "sm_90a")
    assert code == 0 and f"down_proj: {reason}" in out and "0 of 1 layers run on terrazzo" in out


@pytest.mark.parametrize("command", ["serve-check", "compile"])
def test_a_folder_that_terrazzo_packed_is_named_as_such(capsys, tmp_path, command):
    folder = of_bytes(tmp_path, True, {})
    stated = {"quantization_config": {"quant_method": "terrazzo", "version": 1, "kv": ["bfloat16", "bfloat16"]}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    code, _, err = run(capsys, command, folder, "--target", "sm_90a")
    assert code == 2 and "Terrazzo packed these layers" in err and "terrazzo.prepare" in err and err.count("\n") == 1


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


def packed_folder(path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    import terrazzo

    from tests.nn.tiny_text import write_folder

    model = terrazzo.load(write_folder(path / "float"), quantize="w4a16-g64", kv="int8", device="cpu")
    model.save_pretrained(path / "p")
    return path / "p"


def test_a_packed_folder_is_compiled_and_for_vllm_refused_with_what_to_do(capsys, tmp_path):
    """The kernels are those of the loaded model, though no weight is read."""
    import terrazzo
    from terrazzo.nn.preparing import kernel_requests

    folder = packed_folder(tmp_path)
    model = terrazzo.load(folder, device="cpu")
    wanted = kernel_requests(model, [1, 16], target="sm_90a")
    arguments = ("compile", str(folder), "--target", "sm_90a", "--dry-run")
    code, out, _ = run(capsys, *arguments, "--m", "1,16", "--json")
    counts = {}
    for request in wanted:
        counts[request.name] = counts.get(request.name, 0) + 1
    assert code == 0 and json.loads(out)["kernels"] == counts
    code, out, _ = run(capsys, *arguments, "--m", "1,16", "--kv", "none", "--json")
    assert code == 0 and not [name for name in json.loads(out)["kernels"] if name.startswith("attention")]
    code, out, _ = run(capsys, *arguments, "--m", "1,16", "--kv", "int4", "--json")
    wanted = kernel_requests(model, [1, 16], kv=("int4_hadamard", "int4"), target="sm_90a")
    assert code == 0 and json.loads(out)["total"] == len(wanted)
    code, out, _ = run(capsys, *arguments, "--m", "1,16", "--tensor-parallel", "2", "--json")
    share = terrazzo.load(folder, device="cpu", tensor_parallel=(0, 2))
    assert code == 0 and json.loads(out)["total"] == len(kernel_requests(share, [1, 16], target="sm_90a"))
    code, _, err = run(capsys, *arguments, "--numerics", "post")
    assert code == 2 and "--numerics" in err and "packed by Terrazzo" in err
    code, _, err = run(capsys, "serve-check", str(folder))
    assert code == 2 and "vLLM does not" in err and "compressed-tensors" in err and err.count("\n") == 1
