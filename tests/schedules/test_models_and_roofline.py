"""The table of models, and the roofline's arithmetic."""

from __future__ import annotations

import pytest
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.schedules.models import MEASURED, MODELS, get_model, shapes
from terrazzo.schedules.roofline import weight_only_gemm

# Published configurations: hidden size, intermediate size, query heads, key/value heads, head dimension.
CONFIGS = {
    "llama-1-30b": (6656, 17920, 52, 52, 128),
    "llama-2-7b": (4096, 11008, 32, 32, 128),
    "llama-2-13b": (5120, 13824, 40, 40, 128),
    "llama-2-70b": (8192, 28672, 64, 8, 128),
    "llama-3-8b": (4096, 14336, 32, 8, 128),
    "llama-3-70b": (8192, 28672, 64, 8, 128),
    "mistral-7b": (4096, 14336, 32, 8, 128),
    "mixtral-8x7b": (4096, 14336, 32, 8, 128),
    "qwen2-72b": (8192, 29568, 64, 8, 128),
    "qwen3-8b": (4096, 12288, 32, 8, 128),
    "qwen3-32b": (5120, 25600, 64, 8, 128),
    "yi-34b": (7168, 20480, 56, 8, 128),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_follow_from_the_configuration(name):
    hidden, ffn, heads, kv_heads, dim = CONFIGS[name]
    layers = {layer.name: (layer.n, layer.k) for layer in get_model(name)}
    assert layers == {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "o": (hidden, heads * dim),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }
    assert {layer.count for layer in get_model(name)} == ({1, 8} if name == "mixtral-8x7b" else {1})


def test_every_measured_model_has_a_published_configuration():
    assert set(MEASURED) == set(CONFIGS) and set(CONFIGS) < set(MODELS)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama-3.2-1b", {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}),
        ("qwen2.5-7b", {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}),
        ("qwen3-4b", {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}),
        ("gemma-3-4b", {"qkv": (4096, 2560), "o": (2560, 2048), "gate_up": (20480, 2560), "down": (2560, 10240)}),
        ("phi-4", {"qkv": (7680, 5120), "o": (5120, 5120), "gate_up": (35840, 5120), "down": (5120, 17920)}),
        ("qwen3-30b-a3b", {"qkv": (5120, 2048), "o": (2048, 4096), "gate_up": (1536, 2048), "down": (2048, 768)}),
    ],
)
def test_layers_of_other_models(name, layers):
    found = get_model(name)
    assert {layer.name: (layer.n, layer.k) for layer in found} == layers
    assert {layer.count for layer in found} == ({1, 128} if "a3b" in name else {1})
    assert {layer.name for layer in found if layer.bias} == ({"qkv"} if name.startswith("qwen2.5") else set())


def test_shapes_are_merged():
    found = shapes(["llama-3-8b", "mistral-7b", "qwen3-8b"])
    assert len(found) == 6
    assert found[6144, 4096] == ["llama-3-8b.qkv", "mistral-7b.qkv", "qwen3-8b.qkv"]
    with pytest.raises(ArgumentError, match="did you mean 'llama-3-8b'"):
        shapes(["lama-3-8b"])


def test_roofline_of_a_gemv_is_the_memory():
    target, nbytes = Target.parse("sm_90a"), 28672 * 4096 // 2 + 28672 * 32 * 3
    roof = weight_only_gemm(target, 1, 28672, 4096, nbytes, 0.625, gb_s=4300)
    assert roof.bound == "load" and roof.us == roof.load_us
    assert roof.load_us == pytest.approx((nbytes + 2 * (28672 + 4096)) / 4300e3)


def test_roofline_of_a_large_batch_is_the_tensor_core():
    target = Target.parse("sm_90a")
    roof = weight_only_gemm(target, 8192, 28672, 4096, 28672 * 4096 // 2, 1.625)
    assert roof.bound == "mma" and roof.us == pytest.approx(2 * 8192 * 28672 * 4096 / 989.5e6)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_decoding_grows_with_the_token_tiles(arch):
    target = Target.parse(arch)
    one, two = (weight_only_gemm(target, m, 4096, 4096, 1, 1.0) for m in (256, 257))
    assert two.dequant_us == 2 * one.dequant_us > 0
    assert weight_only_gemm(target, 64, 4096, 4096, 1, 50.0).bound == "dequant"
