"""Layers with 4-bit weights in the place of nn.Linear: of a float model, and of a checkpoint; moved, saved and loaded.

    python examples/quantized_linear.py

Runs the kernel where there is a GPU; elsewhere it checks the packed weights instead.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import terrazzo
import torch
from safetensors.torch import save_file
from torch import nn

w4a16 = terrazzo.ops.w4a16


class QuantizedLinear(nn.Module):
    """y = x w^T + b for x [..., K] in float16 or bfloat16, w in 4-bit codes with one scale for each 128 channels.

    The weight's tensors are buffers, so that .to(), .half() and state_dict() know them.
    """

    TENSORS = ("words", "params", "perm", "bias")

    def __init__(self, packed: w4a16.PackedWeight) -> None:
        super().__init__()
        self.packed = packed
        for name in self.TENSORS:
            self.register_buffer(name, getattr(packed, name))

    def _apply(self, fn, recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)  # .to(), .cuda(), .half(): the buffers may be other tensors now
        self.packed = replace(self.packed, **{name: getattr(self, name) for name in self.TENSORS})
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return w4a16.gemm(x, self.packed)


def quantize_linears(model: nn.Module, group_size: int = 128) -> list[str]:
    """Replace every nn.Linear of a float model, on its own device; the names of those replaced."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in found.items():
        packed = w4a16.quantize(linear.weight, group_size=group_size, bias=linear.bias)
        model.set_submodule(name, QuantizedLinear(packed))
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
            model.set_submodule(layer.name, QuantizedLinear(layer.weight))
    return left


def small_model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512, bias=False)).to(device, torch.float16)


def write_checkpoint(model: nn.Sequential, folder: Path) -> None:
    """A stand-in for a download: compressed-tensors "pack-quantized", signed codes plus 8, eight to a word along K."""
    tensors, shifts = {"embed.weight": torch.zeros(16, 512, dtype=torch.float16)}, 4 * torch.arange(8)
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
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    float_model = small_model(device)

    model = small_model(device)
    model.load_state_dict(float_model.state_dict())
    for name in quantize_linears(model):
        packed, weight = model.get_submodule(name).packed, float_model.get_submodule(name).weight.detach()
        error = (packed.dequantize().float() - weight.float()).norm() / weight.float().norm()
        print(f"{name}: {packed!r}: {packed.nbytes} bytes for {weight.numel() * 2} in f16, {error:.1%} from it")
        assert error < 0.12

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "layer.safetensors"
        model[0].packed.save(path)
        again = w4a16.PackedWeight.load(path, device=device)
        assert torch.equal(again.words, model[0].words)
        print(f"saved and loaded with its layout's identity: {again.layout}")

        folder = Path(place) / "a-model-W4A16"
        folder.mkdir()
        write_checkpoint(float_model, folder)
        loaded = small_model(device)
        for name, reason in load_linears(loaded, folder, device).items():
            print(f"left to load_state_dict: {name}: {reason}")

    twin = small_model(device)
    quantize_linears(twin)
    twin.load_state_dict(model.state_dict())
    twin = twin.to("cpu").to(device)
    assert torch.equal(twin[2].packed.words, model[2].words) and torch.equal(twin[0].packed.bias, model[0].bias)

    if device == "cpu":
        print("no GPU here: the kernel was not run")
        return
    x = torch.randn(4, 512, device=device, dtype=torch.float16)
    with torch.no_grad():
        y, wanted = model(x), float_model(x)
        assert torch.equal(twin(x), y)
        error = (loaded(x).float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 0.2
    print(f"ran on {torch.cuda.get_device_name()}: y is {list(y.shape)} {y.dtype}")


if __name__ == "__main__":
    main()
