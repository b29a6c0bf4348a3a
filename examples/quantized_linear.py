"""A drop-in linear layer with 4-bit weights: quantize, pack, replace, save and load.

    python examples/quantized_linear.py

Runs the kernel where there is a GPU; elsewhere it checks the packed weight instead.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import terrazzo
import torch
from torch import nn

w4a16 = terrazzo.ops.w4a16


class QuantizedLinear(nn.Module):
    """y = x w^T + b for x [..., K] in float16 or bfloat16, w in 4-bit codes with one scale for each 128 channels."""

    def __init__(self, weight: w4a16.PackedWeight) -> None:
        super().__init__()
        self.weight = weight

    @classmethod
    def from_linear(cls, linear: nn.Linear, group_size: int = 128) -> QuantizedLinear:
        """Quantize a float layer on its own device."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(w4a16.quantize(linear.weight.detach(), group_size=group_size, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return w4a16.gemm(x, self.weight)


def quantize_linears(model: nn.Module, group_size: int = 128) -> list[str]:
    """Replace every nn.Linear of a model in place; returns the names of those replaced."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, QuantizedLinear.from_linear(getattr(owner, leaf), group_size))
    return names


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512, bias=False)).to(device, torch.float16)
    dense = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    print("quantized:", ", ".join(quantize_linears(model)))

    for layer, weight in zip((model[0], model[2]), dense):
        packed = layer.weight
        restored = packed.dequantize("exact")
        error = (restored.float() - weight.float()).norm() / weight.float().norm()
        print(f"{packed!r}: {packed.nbytes} bytes for {weight.numel() * 2} in f16, {error:.1%} from the float weight")
        assert error < 0.12

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.safetensors"
        model[0].weight.save(path)
        again = w4a16.PackedWeight.load(path, device=device)
        assert torch.equal(again.words, model[0].weight.words)
        print(f"saved and loaded with its layout's identity: {again.layout}")

    if device == "cpu":
        print("no GPU here: the kernel was not run")
        return
    x = torch.randn(4, 512, device=device, dtype=torch.float16)
    hidden = torch.nn.functional.silu(w4a16.gemm(x, model[0].weight))
    y = model(x)
    assert torch.equal(y, w4a16.gemm(hidden, model[2].weight))
    print(f"ran on {torch.cuda.get_device_name()}: y is {list(y.shape)} {y.dtype}")


if __name__ == "__main__":
    main()
