"""terrazzo.load of W8A8 folders: activations as the folder states them, beside compressed-tensors' own numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from terrazzo import nn  # noqa: E402
from terrazzo.lowering.errors import ArgumentError  # noqa: E402
from terrazzo.nn.loading import load  # noqa: E402
from terrazzo.ops import stored_layers  # noqa: E402
from terrazzo.ops.checkpoints import Checkpoint  # noqa: E402
from terrazzo.ops.w4a8.w8a8.format import PackedWeight  # noqa: E402
from terrazzo.ops.weight_only.byte_integers import PackedWeight as Integers  # noqa: E402
from terrazzo.ops.weight_only.format import PackedWeight as Floats  # noqa: E402

from tests.nn.test_loading_published import SIZES, TOKENS, names  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "w8a8"
GOLDEN = dict(reversed(line.split()) for line in (DATA / "SHA256SUMS").read_text().splitlines())
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(weights: dict, acts: dict, format: str) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


KINDS = {
    "fp8_block": BLOCKS,
    "fp8_static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8_token": compressed(CHANNEL | {"type": "float"}, TOKEN | {"type": "float"}, "float-quantized"),
    "int8_token": compressed(CHANNEL, TOKEN, "int-quantized"),
    "int8_static": compressed(CHANNEL, TENSOR, "int-quantized"),
    "int8_asymmetric": compressed(CHANNEL, TOKEN | {"symmetric": False}, "int-quantized"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_layer_multiplies_as_compressed_tensors_does(name, tmp_path):
    """Its dynamic symmetric int8 scale is max / 127.5, an engine's max / 127: half a step of each value apart."""
    file = DATA / name
    assert hashlib.sha256(file.read_bytes()).hexdigest() == GOLDEN[name]
    with safe_open(file, "pt") as opened:
        group = json.loads(opened.metadata()["group"])
    tensors = load_file(file)
    x, expected = tensors.pop("x"), tensors.pop("expected.y")
    save_file(tensors, tmp_path / "model.safetensors")
    format = "float-quantized" if name.startswith("fp8") else "int-quantized"
    stated = compressed(group["weights"], group["input_activations"], format)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    checkpoint = Checkpoint(tmp_path)
    operator = stored_layers.operator_of(checkpoint.layers()["layer"], checkpoint.layer("layer"))
    assert operator == "w8a8"
    weight = stored_layers.FAMILIES[operator].read(checkpoint, "layer", torch.device("cpu"))
    y = nn.Linear(weight.pack())(x).double()
    off = (y - expected).norm() / expected.norm()
    assert off < (0.01 if name == "int8_token.safetensors" else 2.0**-8), off


def layer(kind: str, seed: int, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors of a layer, the float64 weight that they mean)."""
    rng = torch.Generator().manual_seed(seed)
    made = {} if "static" not in kind else {"input_scale": torch.tensor(0.02 if kind.startswith("int8") else 0.01)}
    if kind.startswith("int8"):
        codes, scales = torch.randint(-127, 128, (n, k), generator=rng).to(torch.int8), torch.rand(n, 1, generator=rng)
        scales = (scales + 0.5) * 2.0**-10
        return made | {"weight": codes, "weight_scale": scales}, codes.double() * scales.double()
    codes = (torch.randn(n, k, generator=rng) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = {"fp8_block": (n // 128, k // 128), "fp8_static": (), "fp8_token": (n, 1)}[kind]
    scales = (torch.rand(shape, generator=rng) + 0.5) * 2.0**-11
    spread = scales.double()
    if kind == "fp8_block":
        spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
    name = "weight_scale_inv" if kind == "fp8_block" else "weight_scale"
    return made | {"weight": codes, name: scales}, codes.double() * spread


def quantized(kind: str, x: torch.Tensor) -> torch.Tensor:
    """What a layer multiplies: x to codes and back, by the formulas of engines."""
    if kind == "int8_static":
        return (x / 0.02).round().clamp(-128, 127) * 0.02
    if kind == "fp8_static":
        return (x / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01
    if kind == "int8_asymmetric":
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        zero = (-low / scale).round() - 128
        return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale
    parts = x.unflatten(-1, (-1, 128)) if kind == "fp8_block" else x.unsqueeze(-2)
    if kind == "int8_token":
        scale = parts.abs().amax(-1, keepdim=True) / 127
        return ((parts / scale).round() * scale).flatten(-2)
    scale = parts.abs().amax(-1, keepdim=True) / 448
    return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def folder(path: Path, kind: str, more: dict[str, torch.Tensor] | None = None):
    """Write a folder; the float32 model that it means, whose linear layers multiply quantized activations."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    held = {name: w.half() for name, w in model.state_dict().items() if ".layers." not in name or "norm" in name}
    meant = {name: w.float() for name, w in held.items()}
    for seed, (name, size) in enumerate(names(0).items()):
        tensors, weight = layer(kind, seed, *size)
        held |= {f"{name}.{leaf}": t for leaf, t in tensors.items()}
        meant[f"{name}.weight"] = weight.float()
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: (quantized(kind, args[0]),))
    model.load_state_dict(meant)
    path.mkdir(exist_ok=True)
    save_file(held | (more or {}), path / "model.safetensors")
    written = config.to_dict() | {"dtype": "float16", "quantization_config": KINDS[kind]}
    (path / "config.json").write_text(json.dumps(written))
    return model


def packed_of(model) -> list:
    return [module.packed for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_folder_is_loaded_with_the_activations_that_it_states(kind, tmp_path):
    """Logits up to 16-bit rounding, and the few codes that this turns; 16-bit activations are further away."""
    exact = folder(tmp_path, kind)(TOKENS).logits
    loaded = load(tmp_path, device="cpu", kv="float16")
    assert {type(w) for w in packed_of(loaded)} == {PackedWeight} and len(packed_of(loaded)) == 4
    assert {w.input_scale is not None for w in packed_of(loaded)} == {"static" in kind}
    got = loaded(TOKENS).logits.float()
    off = float((got - exact).norm() / exact.norm())
    assert off < 0.03, off
    loaded.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", device="cpu", kv="float16")
    assert torch.equal(again(TOKENS).logits.float(), got)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_weight_only_leaves_activations_in_16_bits(kind, tmp_path):
    model = folder(tmp_path, kind)
    for name in names(0):
        model.get_submodule(name)._forward_pre_hooks.clear()
    exact = model(TOKENS).logits
    loaded = load(tmp_path, device="cpu", kv="float16", weight_only=True)
    assert {type(w) for w in packed_of(loaded)} == {Integers if kind.startswith("int8") else Floats}
    assert float((loaded(TOKENS).logits.float() - exact).norm() / exact.norm()) < 0.03


def test_a_target_without_e4m3_instructions_multiplies_16_bit_activations(tmp_path):
    folder(tmp_path, "fp8_block")
    assert {type(w) for w in packed_of(load(tmp_path, device="cpu", target="sm_80"))} == {Floats}
    assert {type(w) for w in packed_of(load(tmp_path, device="cpu", target="sm_90a"))} == {PackedWeight}


def test_joined_layers_take_the_largest_of_their_static_scales(tmp_path):
    name = "model.layers.0.self_attn.k_proj.input_scale"
    folder(tmp_path, "fp8_static", {name: torch.tensor(0.5)})
    loaded = load(tmp_path, device="cpu")
    scales = [w.input_scale for w in packed_of(loaded)]
    assert sorted(scales) == pytest.approx([0.01, 0.01, 0.01, 0.5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_format_leaves_the_activations_as_they_are_stated(kind, tmp_path):
    folder(tmp_path, kind)
    format = KINDS[kind]["quant_method"].replace("-", "_")
    loaded, named = (load(tmp_path, device="cpu", format=name) for name in (None, format))
    for one, other in zip(packed_of(loaded), packed_of(named), strict=True):
        assert type(one) is type(other) is PackedWeight
        assert (one.input_scale, one.input_zero, one.asymmetric) == (
            other.input_scale, other.input_zero, other.asymmetric,
        )  # fmt: skip


def test_joined_layers_of_unlike_zero_points_are_loaded_in_16_bits_only(tmp_path):
    at = "model.layers.0.self_attn"
    zero = lambda name: torch.tensor(4 if name == f"{at}.k_proj" else 3, dtype=torch.int8)
    folder(tmp_path, "int8_static", {f"{name}.input_zero_point": zero(name) for name in names(0)})
    config = tmp_path / "config.json"
    written = json.loads(config.read_text())
    written["quantization_config"]["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    config.write_text(json.dumps(written))
    with pytest.raises(ArgumentError, match=f"input_zero_point = .*{at}.q_proj to {at}.v_proj.*weight_only=True"):
        load(tmp_path, device="cpu")
    assert {type(w) for w in packed_of(load(tmp_path, device="cpu", weight_only=True))} == {Integers}


def test_an_unusable_static_scale_is_refused_with_its_layer(tmp_path):
    name = "model.layers.0.mlp.down_proj"
    folder(tmp_path, "fp8_static", {f"{name}.input_scale": torch.tensor(0.0)})
    with pytest.raises(ArgumentError, match=f"input_scale = 0.0: .*{name}.*weight_only=True"):
        load(tmp_path, device="cpu")


def test_weight_only_comes_too_late_for_a_packed_folder(tmp_path):
    folder(tmp_path, "int8_token")
    load(tmp_path, device="cpu").save_pretrained(tmp_path / "packed")
    with pytest.raises(ArgumentError, match="weight_only = True: the folder's weights are packed"):
        load(tmp_path / "packed", device="cpu", weight_only=True)


def test_only_a_bool_asks_for_weight_only(tmp_path):
    with pytest.raises(ArgumentError, match="weight_only"):
        load(folder(tmp_path, "fp8_block") and tmp_path, device="cpu", weight_only="fp8")
