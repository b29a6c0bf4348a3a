"""Linear layers of published models: what benchmarks measure, what `terrazzo compile --model` compiles.

Shapes are (N, K) = (output features, input features) of the fused layers that serving engines run, one GPU, no tensor
parallelism (specs.md F).
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError


@dataclass(frozen=True)
class Layer:
    """One linear layer: y[M, n] = x[M, k] w[n, k]^T. `count` such layers stand side by side (experts)."""

    name: str
    n: int
    k: int
    count: int = 1


def _model(hidden: int, qkv: int, attention: int, gate_up: int, ffn: int, experts: int = 1) -> tuple[Layer, ...]:
    return (
        Layer("qkv", qkv, hidden),
        Layer("o", hidden, attention),
        Layer("gate_up", gate_up, hidden, experts),
        Layer("down", hidden, ffn, experts),
    )


MODELS: dict[str, tuple[Layer, ...]] = {
    "llama-1-30b": _model(6656, 19968, 6656, 35840, 17920),
    "llama-2-7b": _model(4096, 12288, 4096, 22016, 11008),
    "llama-2-13b": _model(5120, 15360, 5120, 27648, 13824),
    "llama-2-70b": _model(8192, 10240, 8192, 57344, 28672),
    "llama-3-8b": _model(4096, 6144, 4096, 28672, 14336),
    "llama-3-70b": _model(8192, 10240, 8192, 57344, 28672),
    "mistral-7b": _model(4096, 6144, 4096, 28672, 14336),
    "mixtral-8x7b": _model(4096, 6144, 4096, 28672, 14336, experts=8),
    "qwen2-72b": _model(8192, 10240, 8192, 59136, 29568),
    "qwen3-8b": _model(4096, 6144, 4096, 24576, 12288),
    "qwen3-32b": _model(5120, 10240, 8192, 51200, 25600),
    "yi-34b": _model(7168, 9216, 7168, 40960, 20480),
}


def get_model(name: str) -> tuple[Layer, ...]:
    """The layers of a model.

    Raises:
        ArgumentError: a name that is not in MODELS.
    """
    if name not in MODELS:
        raise ArgumentError("model", name, "is not in the table of models", f"use one of {', '.join(MODELS)}")
    return MODELS[name]


def shapes(models: list[str] | tuple[str, ...]) -> dict[tuple[int, int], list[str]]:
    """Distinct (N, K) of some models, in order of appearance -> the layers that have it, "llama-3-8b.qkv"."""
    found: dict[tuple[int, int], list[str]] = {}
    for model in models:
        for layer in get_model(model):
            found.setdefault((layer.n, layer.k), []).append(f"{model}.{layer.name}")
    return found
