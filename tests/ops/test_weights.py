"""What every weight does: it moves, it is saved and loaded, and it says what is wrong with a file."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a8, w4a16, w4ax
from terrazzo.ops.w4a8 import fp8

N, K = 64, 128


def quantized(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None):
    if name == "w4ax":
        scores = torch.arange(1.0, weight.shape[1] + 1).flip(0)
        return w4ax.quantize(weight, w4ax.plan_blocks(scores, ratio=0.5), bias=bias, target="sm_90a")
    return {"w4a16": w4a16, "w4a8": w4a8, "fp8": fp8}[name].quantize(weight, bias=bias)


NAMES = ("w4a16", "w4a8", "fp8", "w4ax")


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_layer_is_quantized_without_its_graph(name):
    """nn.Linear's parameters require gradients; a weight that kept the graph would keep the float weight alive."""
    layer = torch.nn.Linear(K, N)
    w = quantized(name, layer.weight, layer.bias)
    held = [t for t in vars(w).values() if isinstance(t, torch.Tensor)]
    assert len(held) >= 3 and not any(t.requires_grad for t in held)
    assert not w.dequantize().requires_grad and torch.equal(w.bias, layer.bias)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_moves_between_devices_and_never_changes_its_bytes(name):
    w = quantized(name, torch.randn(N, 2 * K))
    assert w.to("meta").words.is_meta and torch.equal(w.to("cpu").words, w.words)
    for bad in (torch.float16, "gpu", None):
        with pytest.raises(ArgumentError, match="device = .*must be a device"):
            w.to(bad)
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="device = 'cuda': torch sees no CUDA device"):
            w.to("cuda")


@pytest.mark.parametrize("name", NAMES)
def test_files_of_any_operator(name, tmp_path):
    w, path = quantized(name, torch.randn(N, 2 * K), torch.ones(N)), tmp_path / "w.safetensors"
    w.save(path)
    again, first = type(w).load(path), path.read_bytes()
    assert torch.equal(again.words, w.words) and torch.equal(again.bias, w.bias)
    again.save(path)  # equal weights make equal bytes, and modes are those of the umask
    other = tmp_path / "plain"
    other.touch()
    assert path.read_bytes() == first and path.stat().st_mode == other.stat().st_mode
    other.unlink()
    for bad in (tmp_path / "no" / "w", tmp_path):
        with pytest.raises(ArgumentError, match="path = .*cannot be written"):
            w.save(bad)
    assert [item.name for item in tmp_path.iterdir()] == ["w.safetensors"]
    with pytest.raises(ArgumentError, match="device"):
        type(w).load(path, device="gpu")


@pytest.mark.parametrize("path", [None, 5, b"w", "a\0b", ["w"]])
def test_what_is_no_path_is_refused(path):
    w = quantized("w4a16", torch.randn(N, K))
    for call in (w.save, w4a16.PackedWeight.load, w4ax.BlockPlan.load, w4a16.load_layer, w4a16.load_model):
        with pytest.raises(ArgumentError, match="path = "):
            call(path)


def test_names_of_files(tmp_path):
    w, longest = quantized("w4a16", torch.randn(N, K)), tmp_path / ("w" * 255)
    w.save(longest)
    assert torch.equal(w4a16.PackedWeight.load(longest).words, w.words)
    for bad in ("", "/", tmp_path / ("w" * 256), longest / "w"):
        with pytest.raises(ArgumentError, match="path = .*name a file in a folder"):
            w.save(bad)
    assert [item.name for item in tmp_path.iterdir()] == [longest.name]


def altered(path, tensors: dict | None = None, **facts):
    """The file with other tensors or other metadata; None removes."""
    with safe_open(path, "pt") as file:
        meta = file.metadata()
    kept = load_file(path) | (tensors or {})
    stated = {k: v for k, v in (json.loads(meta["weight"]) | facts).items() if v is not None}
    other = path.with_name("other.safetensors")
    meta["weight"] = facts["raw"] if "raw" in facts else json.dumps(stated)
    save_file({k: t for k, t in kept.items() if t is not None}, other, metadata=meta)
    return other


@pytest.mark.parametrize(
    ("words", "tensors", "facts"),
    [
        ("not those that save writes", {}, {"raw": "{"}),
        ("not those that save writes", {}, {"raw": "[1]"}),
        ("not those that save writes", {}, {"extra": 1}),
        ("not those that save writes", {}, {"n": None}),
        ("not those that save writes", {"params": None}, {}),
        ("not those that save writes", {"more": torch.zeros(1)}, {}),
        ("n = '64': must be a positive integer", {}, {"n": "64"}),
        ("group_size = 0: must be a positive integer", {}, {"group_size": 0}),
        ("group_size = 100: must be one of", {}, {"group_size": 100}),
        ("scale_dtype = 'int8'", {}, {"scale_dtype": "int8"}),
        ("not those that save writes", {}, {"raw": "[" * 100_000}),
        ("not those that save writes", {}, {"raw": '{"n": ' + "9" * 5000 + "}"}),
        ("bias = 5: must be torch.Tensor", {"bias": None}, {"bias": 5}),
        ("words = 5: must be torch.Tensor in the file", {"words": None}, {"words": 5}),
        ("symmetric = 1: must be bool", {}, {"symmetric": 1}),
        ("layout = .*must be str", {}, {"layout": ["w4a16"]}),
        ("target = .*must be str", {}, {"target": {"sm": 90}}),
        ("words = .*must be contiguous", {}, {"n": 10**30}),
        (r"words = 'int32 \[\]'", {"words": torch.zeros((), dtype=torch.int32)}, {}),
        ("params = .*must be finite", {"params": torch.full((1, 1, 192), 0xFF, dtype=torch.uint8)}, {}),
        ("words = .*must be contiguous", {}, {"n": 640}),
        ("bias = .*must be contiguous", {}, {"n": 63}),
        ("bias = .*must be contiguous", {"bias": torch.zeros(3)}, {}),
        ("perm = .*must be contiguous", {"perm": torch.arange(3, dtype=torch.int32)}, {}),
        ("perm = .*must be a permutation", {"perm": torch.full((K,), 999, dtype=torch.int32)}, {}),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, words, tensors, facts):
    path = tmp_path / "w.safetensors"
    quantized("w4a16", torch.randn(N, K), torch.zeros(N)).save(path)
    with pytest.raises(ArgumentError, match=words):
        w4a16.PackedWeight.load(altered(path, tensors, **facts))


def test_a_damaged_w4ax_file_is_refused_by_name(tmp_path):
    path, w = tmp_path / "w.safetensors", quantized("w4ax", torch.randn(N, 2 * K))
    w.save(path)
    for words, tensors, facts in (
        ("blocks8 = 9", {}, {"blocks8": 9}),
        ("k = 0", {}, {"k": 0}),
        ("permutation = 'not one'", {"permutation": torch.zeros(2 * K, dtype=torch.int32)}, {}),
        ("order = 'other'", {}, {"order": "other"}),
        ("bias", {"bias": torch.zeros(N + 1)}, {}),
    ):
        with pytest.raises(ArgumentError, match=words):
            w4ax.PackedWeight.load(altered(path, tensors, **facts))


@pytest.mark.parametrize("name", ["w4a8", "fp8", "w4ax"])
def test_values_that_no_weight_has_are_refused(tmp_path, name):
    path, w = tmp_path / "w.safetensors", quantized(name, torch.randn(N, 2 * K))
    if name != "w4ax":
        w = dataclasses.replace(w, smooth=torch.ones(2 * K))
    w.save(path)
    for field, values in (("channel_scales", [float("nan"), float("inf")]), ("smooth", [float("nan"), 0.0, -1.0])):
        if (held := getattr(w, field, None)) is None:
            continue
        for value in values:
            with pytest.raises(ArgumentError, match=f"{field} = "):
                type(w).load(altered(path, {field: held.clone().fill_(value)}))


@pytest.mark.parametrize("name", ["w4a16_symmetric", "w4a8", "fp8", "w4ax"])
def test_scales_in_words_that_no_weight_has_are_refused(tmp_path, name):
    path, weight = tmp_path / "w.safetensors", torch.randn(N, 2 * K)
    w = w4a16.quantize(weight, symmetric=True) if name == "w4a16_symmetric" else quantized(name, weight)
    w.save(path)
    field = "params" if name == "w4a16_symmetric" else "words"
    broken = getattr(w, field).clone().fill_(255 if field == "params" else -1)
    with pytest.raises(ArgumentError, match=f"{field} = "):
        type(w).load(altered(path, {field: broken}))


@pytest.mark.parametrize(
    ("words", "tensors", "facts"),
    [
        ("maximum = 0", {"maximum": torch.zeros(2, 8)}, {}),
        ("maximum = 'negative", {"maximum": torch.full((8,), float("nan"))}, {}),
        ("squares = .*float64", {"squares": torch.zeros(8)}, {}),
        ("squares = 'negative", {"squares": torch.full((8,), -1.0, dtype=torch.float64)}, {}),
        ("tokens = -1", {}, {"tokens": -1}),
        ("tokens = 'x'", {}, {"tokens": "x"}),
        ("percentile = 2.0", {}, {"percentile": 2.0}),
        ("percentile = 0.9: .*with a histogram", {"histogram": None}, {}),
        ("histogram = .*int32", {"histogram": torch.zeros(8, 3, dtype=torch.int32)}, {}),
        ("not those that save writes", {"maximum": None}, {}),
    ],
)
def test_statistics_that_are_none_are_refused_by_name(tmp_path, words, tensors, facts):
    path = tmp_path / "s.safetensors"
    w4ax.ActivationStatistics.empty(8, percentile=0.9).observe(torch.ones(3, 8)).save(path)
    assert w4ax.ActivationStatistics.load(path).tokens == 3
    with pytest.raises(ArgumentError, match=words):
        w4ax.ActivationStatistics.load(altered(path, tensors, **facts))


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ArgumentError, match="must be a readable safetensors file"):
            w4a16.PackedWeight.load(path)


def test_codes_without_data_are_refused():
    codes, scales = torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 1).half()
    for bad in (None, "codes", codes.to("meta"), codes.to_sparse()):
        with pytest.raises(ArgumentError, match="codes = "):
            w4a16.pack(bad, scales)
    with pytest.raises(ArgumentError, match="is packed already"):
        w4a16.pack(w4a16.pack(codes, scales))
    assert torch.equal(w4a16.pack(codes.to(torch.uint16), scales).unpack().codes, codes)
    with pytest.raises(ArgumentError, match="weight = 'w4a16.QuantizedWeight'"):
        w4a8.pack(w4a16.QuantizedWeight.canonical(codes, scales))
    w = w4a16.pack(codes, scales)
    with pytest.raises(ArgumentError, match="group_size = True"):
        dataclasses.replace(w, group_size=True).check_facts()
