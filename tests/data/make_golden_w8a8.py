"""Writes the golden W8A8 layers of the folder w8a8/ by compressed-tensors, and what its own linear layer makes of x.

    python tests/data/make_golden_w8a8.py     # needs compressed-tensors 0.20; rewrites the files; the same bytes again

It imports nothing from terrazzo. A file holds tensors as llm-compressor saves them under "layer.", and as metadata the
config group. "x" is bfloat16 [M, K]; "expected.y" float64 [M, N] is the product of what `fake_quantize` makes of x and
of the weight, in float32 each.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import (
    compute_dynamic_scales_and_zp,
    dequantize,
    fake_quantize,
    quantize,
)
from safetensors.torch import save_file

HERE = Path(__file__).parent / "w8a8"
N, K, M = 48, 256, 5
CHANNEL = dict(num_bits=8, type="int", strategy="channel", symmetric=True)
TOKEN = dict(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
TENSOR = dict(num_bits=8, type="int", strategy="tensor", symmetric=True, dynamic=False)
FLOAT = dict(type="float")
KINDS = {
    "int8_token": (CHANNEL, TOKEN),
    "int8_token_asymmetric": (CHANNEL, TOKEN | {"symmetric": False}),
    "int8_static": (CHANNEL, TENSOR),
    "int8_static_asymmetric": (CHANNEL, TENSOR | {"symmetric": False}),
    "fp8_token": (CHANNEL | FLOAT, TOKEN | FLOAT),
    "fp8_static": (CHANNEL | FLOAT | {"strategy": "tensor"}, TENSOR | FLOAT),
    "fp8_block": (
        CHANNEL | FLOAT | {"strategy": "block", "block_structure": [128, 128]},
        TOKEN | FLOAT | {"strategy": "group", "group_size": 128},
    ),
}
"""Name -> weights and input_activations of a config group."""


def blocks(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each 128 x 128."""
    rows = [part.split(128, 1) for part in weight.split(128, 0)]
    return torch.stack([torch.stack([block.abs().amax() for block in row]) for row in rows])


def layer(seed: int, weights: dict, acts: dict) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=rng) * 0.05
    x = (torch.randn(M, K, generator=rng) * torch.rand(M, 1, generator=rng) * 4 + 0.3).bfloat16()
    args, to = QuantizationArgs(**weights), QuantizationArgs(**acts)
    most = 448.0 if weights["type"] == "float" else 127.5
    high = {"channel": weight.abs().amax(1, keepdim=True), "tensor": weight.abs().amax().reshape(1)}
    high["block"] = blocks(weight)
    scale = high[weights["strategy"]] / most
    codes = quantize(weight, scale, None, args, dtype=args.pytorch_dtype())
    made = {"layer.weight": codes, "layer.weight_scale": scale}
    if acts["dynamic"]:
        own, zero = compute_dynamic_scales_and_zp(x[None].float(), to, torch.nn.Linear(1, 1))  # of a batch
    else:
        low, top = x.float().min(), x.float().max()
        own, zero = torch.maximum(-low, top) / most, None
        if not acts["symmetric"]:
            own = (top - low) / 255
            zero = torch.clamp((-128 - low / own).round(), -128, 127).to(torch.int8)
            made["layer.input_zero_point"] = zero.reshape(1)
        made["layer.input_scale"] = own.reshape(1)
    meant = fake_quantize(x[None].float(), own, zero, to)[0]
    made |= {"x": x, "expected.y": meant.double() @ dequantize(codes, scale, None, args).double().T}
    return {name: t.contiguous() for name, t in made.items()}


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    sums = []
    for seed, (name, (weights, acts)) in enumerate(KINDS.items()):
        file, stated = HERE / f"{name}.safetensors", {"weights": weights, "input_activations": acts}
        save_file(layer(seed, weights, acts), file, {"group": json.dumps(stated)})
        sums.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    (HERE / "SHA256SUMS").write_text("".join(sorted(sums, key=lambda line: line[66:])))
