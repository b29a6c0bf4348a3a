"""Layers with 4-bit weights in the place of nn.Linear: of a float model, and of a checkpoint; moved, saved and loaded.

    python examples/quantized_linear.py

Runs the kernel where there is a GPU, elsewhere its definition in torch.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import terrazzo
import torch
from safetensors.torch import load_file, save_file
from torch import nn

Linear, w4a16 = terrazzo.nn.Linear, terrazzo.ops.w4a16


def quantize_linears(model: nn.Module, format: str = "w4a16-g128") -> list[str]:
    """Replace every nn.Linear of a float model, on its own device; the names of those replaced."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in found.items():
        model.set_submodule(name, Linear.from_float(linear, format))
    return list(found)


def load_linears(model: nn.Module, folder: Path, device: str) -> dict[str, str]:
    """Replace the layers that a Hugging Face folder (AWQ, GPTQ, compressed-tensors) has in 4 bits.

    Returns what it has not, with the reason: embeddings and the like, for model.load_state_dict(..., strict=False).
    """
    left = {}
    for layer in w4a16.iter_layers(folder, device=device):
        if layer.weight is None:
            left[layer.name] = layer.skipped
        else:
            model.set_submodule(layer.name, Linear(layer.weight))
    return left


def small_model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256, bias=False)).to(device, torch.float16)


def write_checkpoint(model: nn.Sequential, folder: Path) -> None:
    """A stand-in for a download: compressed-tensors "pack-quantized", signed codes plus 8, eight to a word along K."""
    tensors, shifts = {"embed.weight": torch.zeros(16, 256, dtype=torch.float16)}, 4 * torch.arange(8)
    for name in ("0", "2"):
        linear = model.get_submodule(name)
        made = w4a16.quantize_weight(linear.weight, symmetric=True).to("cpu")
        words = (made.codes.view(made.n, -1, 8).long() << shifts).sum(-1).to(torch.int32)
        shape = torch.tensor([made.n, made.k])
        tensors |= {f"{name}.weight_packed": words, f"{name}.weight_scale": made.scales, f"{name}.weight_shape": shape}
        tensors |= {} if linear.bias is None else {f"{name}.bias": linear.bias.detach().cpu()}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    float_model = small_model(device)
    x = torch.randn(4, 256, device=device, dtype=torch.float16)
    wanted = float_model(x)

    model = small_model(device)
    model.load_state_dict(float_model.state_dict())
    for name in quantize_linears(model):
        print(f"{name}: {model.get_submodule(name)!r}")
    y = model(x)
    error = (y.float() - wanted.float()).norm() / wanted.float().norm()
    print(f"y is {list(y.shape)} {y.dtype}, {error:.1%} from the float model, on {device}")
    assert error < 0.2

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.safetensors"
        save_file(model.state_dict(), path)  # with format and layout of each weight
        with torch.device("meta"):
            twin = nn.Sequential(Linear.empty(256, 512, bias=True), nn.SiLU(), Linear.empty(512, 256))
        twin.load_state_dict(load_file(path), assign=True)
        assert torch.equal(twin.to(device)(x), y)
        print(f"saved and loaded with its layout's identity: {twin[0].packed.layout}")

        folder = Path(place) / "a-model-W4A16"
        folder.mkdir()
        write_checkpoint(float_model, folder)
        loaded = small_model(device)
        for name, reason in load_linears(loaded, folder, device).items():
            print(f"left to load_state_dict: {name}: {reason}")
        assert (loaded(x).float() - wanted.float()).norm() / wanted.float().norm() < 0.2


if __name__ == "__main__":
    main()
