"""Golden W4A8 layers are read exactly (or fitted, and by how much); wrong tensors are refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a8

DATA = Path(__file__).parents[2] / "data" / "w4a8"
GOLDEN = dict(reversed(line.split()) for line in (DATA / "SHA256SUMS").read_text().splitlines())
NAMES = sorted(Path(file).stem for file in GOLDEN)


def load(name: str):
    """(layer tensors, expected tensors, config) of a golden file."""
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        config = json.loads(file.metadata()["config"])
    parts = [{k.removeprefix(p): t for k, t in tensors.items() if k.startswith(p)} for p in ("layer.", "expected.")]
    return *parts, config


def read(name: str, **changes) -> w4a8.QuantizedWeight:
    layer, _, config = load(name)
    if config["format"] == "qserve":
        return w4a8.read_qserve(**(layer | changes))
    options = {"group_size": config["group_size"], "requantize": not config["exact"]}
    return w4a8.read_compressed_tensors(**(layer | options | changes))


@pytest.mark.parametrize("file", sorted(GOLDEN))
def test_golden_file_is_unchanged(file):
    assert hashlib.sha256((DATA / file).read_bytes()).hexdigest() == GOLDEN[file]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ct_group"])
def test_golden_layer_is_read_exactly(name):
    weight, (_, expected, _) = read(name), load(name)
    assert torch.equal(weight.dequantize(), expected["weight"])
    assert torch.equal(w4a8.pack(weight).dequantize(), expected["weight"])
    if "bytes" in expected:
        assert torch.equal(weight.bytes(), expected["bytes"])


@pytest.mark.parametrize("groups", [1, 3])
def test_rows_of_one_scale_are_exact_whatever_it_is(groups):
    """Pruned rows have scale 0."""
    codes = torch.randint(-8, 8, (6, 384), dtype=torch.int8)
    scale = torch.tensor([0.5, 0.0, -0.25, 1.0, -3.0, 0.0])[:, None].expand(6, groups).half()
    weight = w4a8.read_compressed_tensors(codes, scale)
    assert torch.equal(weight.dequantize(), codes.double() * scale[:, :1].double())
    assert torch.equal(w4a8.pack(weight).dequantize(), weight.dequantize())


def test_free_group_scales_are_fitted_only_on_request():
    expected = load("ct_group")[1]["weight"]
    with pytest.raises(ArgumentError, match="pass requantize=True"):
        read("ct_group", requantize=False)
    error = lambda weight: float((weight.dequantize() - expected).square().sum() / expected.square().sum())
    fitted, plain = error(read("ct_group")), error(w4a8.quantize_weight(expected.float(), group_size=128))
    assert fitted < 0.5 * plain and fitted < 1.5e-3  # far below the 8e-3 of one 4-bit rounding


def test_requantizing_what_wraps_in_qserve_itself():
    layer = load("qserve_g128")[0]
    with pytest.raises(ArgumentError, match="protective range"):
        read("qserve_g128", s2_scales=torch.full_like(layer["s2_scales"], 16))
    with pytest.raises(ArgumentError, match="s2_scales = 17"):
        read("qserve_g128", s2_scales=torch.full_like(layer["s2_scales"], 17))
    again = read("qserve_g128", s2_scales=torch.full_like(layer["s2_scales"], 16), requantize=True)
    assert again.bytes().abs().max() <= 127 and again.group_size == 128


def test_groups_without_scale_hold_one_value():
    layer, expected, _ = load("qserve_g64")
    weight = read("qserve_g64", s2_scales=torch.zeros_like(layer["s2_scales"]))
    zeros = layer["s2_zeros"].view(3, 8, 4).permute(2, 1, 0).reshape(32, 3)
    assert torch.equal(weight.bytes(), zeros.repeat_interleave(64, 1)) and (weight.scales == 1).all()
    assert expected["bytes"].shape == weight.codes.shape


def test_large_groups_are_repeated():
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (32, 512), generator=rng, dtype=torch.int8)
    scales = 2.0 ** torch.randint(0, 3, (32, 2), generator=rng).float()
    weight = w4a8.read_compressed_tensors(codes, scales)
    assert weight.group_size == 128 and weight.scales.shape == (32, 4)
    assert torch.equal(weight.dequantize(), codes.double() * scales.double().repeat_interleave(256, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_whole_multiples_of_a_number_that_no_group_needs_to_have(dtype):
    """Rows of 8 and 9 eighths, and whatever sixteen multiples are drawn; those without a common number are refused."""
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (64, 512), generator=rng, dtype=torch.int8)
    multiples = torch.randint(1, 17, (64, 4), generator=rng)
    multiples[0] = torch.tensor([8, 9, 9, 8])
    multiples[1] = torch.tensor([15, 16, 15, 14])
    scales = (multiples * torch.tensor([1.0, 0.75, 2.0**-9, 13.0]).repeat(16)[:, None]).to(dtype)
    weight = w4a8.read_compressed_tensors(codes, scales)
    assert torch.equal(weight.dequantize(), codes.double() * scales.double().repeat_interleave(128, 1))
    scales[7, 2] = scales[7, 1] * 1.0625
    scales[7, 3] = scales[7, 1] * 1.5
    with pytest.raises(ArgumentError, match="whole multiples 1..16 of one number"):
        w4a8.read_compressed_tensors(codes, scales)


def test_zero_points_that_leave_a_byte_are_named():
    codes, zeros = torch.full((4, 128), 7, dtype=torch.int8), torch.full((4, 2), -8, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="weight_zero_point = .codes of zero points 0..0 times up to 16"):
        w4a8.read_compressed_tensors(codes, torch.tensor([[1.0, 16.0]]).expand(4, 2), zeros)


def test_zero_points_of_compressed_tensors():
    rng = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(-8, 8, shape, generator=rng, dtype=torch.int8) for shape in ((16, 128), (16, 1)))
    scales = torch.rand(16, 1, generator=rng) + 0.1
    packed = w4a8.from_compressed_tensors(codes, scales, zeros, bias=torch.ones(16), target="sm_89")
    assert torch.equal(packed.dequantize(), (codes - zeros).double() * scales.double())
    assert packed.target == "sm_89" and packed.bias.sum() == 16
    assert w4a8.from_qserve(**load("qserve_channel")[0], target="sm_80").target == "sm_80"


def test_a_row_without_scale_is_zero():
    layer = load("qserve_channel")[0]
    scales, zeros = layer["s1_scales"].clone(), layer["s1_szeros"].clone()
    scales[3] = zeros[3] = 0
    weight = read("qserve_channel", s1_scales=scales, s1_szeros=zeros)
    assert not weight.dequantize()[3].any() and torch.equal(weight.bytes()[4:], read("qserve_channel").bytes()[4:])


def test_zero_points_of_few_rows():
    """[1, G] zero points seen as [G, 1] count as contiguous with any stride."""
    words, zeros = torch.zeros(8, 32, dtype=torch.int32), torch.full((1, 2), 0x11111111, dtype=torch.int32)
    weight = w4a8.read_compressed_tensors(words, torch.ones(8, 2).half(), zeros, (8, 256))
    assert bool((weight.dequantize() == -1).all())


@pytest.mark.parametrize("name", ["qserve_g64", "qserve_channel", "ct_channel", "ct_channel_packed"])
@pytest.mark.parametrize("change", [lambda t: t.to("meta"), lambda t: t.to_sparse(), lambda t: "x"])
def test_what_is_no_plain_tensor_is_refused(name, change):
    layer = load(name)[0]
    for leaf in set(layer) - {"weight_shape"}:
        bad = change(layer[leaf])
        named = "format" if leaf == "weight" and not isinstance(bad, torch.Tensor) else leaf
        with pytest.raises(ArgumentError) as caught:
            read(name, **{leaf: bad})
        assert caught.value.argument == named


@pytest.mark.parametrize("name", ["qserve_g64", "qserve_channel", "ct_channel", "ct_channel_packed"])
def test_arrays_do_for_tensors(name):
    layer = load(name)[0]
    arrays = {leaf: tensor.numpy() for leaf, tensor in layer.items() if leaf != "weight_shape"}
    assert torch.equal(read(name, **arrays).dequantize(), read(name).dequantize())


@pytest.mark.parametrize("name", ["qserve_g64", "qserve_channel", "ct_channel", "ct_channel_packed"])
def test_arrays_of_numpy_are_read_as_tensors_are(name):
    """Through DLPack, each leaf for itself."""
    layer, weight = load(name)[0], read(name)
    for leaf, value in layer.items():
        if isinstance(value, torch.Tensor) and leaf != "weight_shape":
            assert torch.equal(read(name, **{leaf: value.numpy()}).dequantize(), weight.dequantize()), leaf


_INT8 = torch.zeros(64, 128, dtype=torch.int8)
BAD = [
    ("qserve_g128", {"qweight": _INT8.int()}, "qweight", "int8"),
    ("qserve_g128", {"qweight": _INT8[:60]}, "qweight", "multiples of 32"),
    ("qserve_g128", {"s1_scales": torch.ones(63)}, "s1_scales", r"\[64\]"),
    ("qserve_g128", {"s1_scales": torch.full((64,), float("inf"))}, "s1_scales", "finite"),
    ("qserve_g128", {"s2_scales": None}, "s2_scales", "pass all tensors"),
    ("qserve_g128", {"s2_scales": None, "s2_zeros": None}, "s2_scales", "pass all tensors"),
    ("qserve_g128", {"s2_zeros": torch.zeros(1, 64, dtype=torch.int8)}, "s2_zeros", r"int8 \[2, 64\]"),
    ("qserve_channel", {"s1_szeros": torch.zeros(31).half()}, "s1_szeros", r"\[32\]"),
    ("qserve_channel", {"s1_scales": torch.ones(32), "s1_szeros": torch.full((32,), 200.0)}, "s1_szeros", "200 of"),
    ("qserve_channel", {"s1_scales": torch.ones(32), "s1_szeros": torch.full((32,), -1.0)}, "s1_szeros", r"0\.\.15"),
    ("qserve_channel", {"s1_scales": torch.ones(32), "s1_szeros": torch.full((32,), 7.4)}, "s1_szeros", "whole"),
    ("qserve_channel", {"s1_scales": torch.zeros(32), "s1_szeros": torch.full((32,), 0.5)}, "s1_szeros", "of scale 0"),
    ("ct_channel", {"weight": torch.tensor(1).char(), "weight_shape": (1, 1)}, "weight", "int8"),
    ("ct_channel", {"format": "pack-quantized"}, "format", "int-quantized stores int8"),
    ("ct_channel", {"weight": None}, "format", "pass the layer's weight"),
    ("ct_channel", {"weight": torch.full((40, 203), 8, dtype=torch.int8)}, "weight", "-8..7"),
    ("ct_channel", {"weight_scale": torch.ones(40, 2).half()}, "weight_scale", "no usual group size"),
    ("ct_channel", {"weight_zero_point": torch.zeros(40, 1)}, "weight_zero_point", "int8"),
    ("ct_channel", {"weight_zero_point": np.zeros((40, 1))}, "weight_zero_point", "int8"),
    ("ct_channel", {"weight_shape": (40, 200)}, "weight_shape", "203"),
    ("ct_channel", {"weight": [[1]]}, "format", "the weight is list"),
    ("ct_channel_packed", {"weight": torch.zeros(24, 3, 2, dtype=torch.int32)}, "weight", "int32"),
    ("ct_group_whole", {"weight_scale": -torch.arange(1.0, 121.0).view(24, 5).half()}, "weight_scale", "positive"),
    ("ct_channel", {"symmetric": True, "weight_zero_point": torch.ones(40, 1, dtype=torch.int8)}, "symmetric", "None"),
    ("ct_channel_packed", {"weight_shape": (24, 64)}, "weight_shape", "8 bits"),
    ("ct_group_whole", {"weight_scale": torch.rand(24, 5).half() + 0.1}, "weight_scale", "requantize=True"),
]


@pytest.mark.parametrize(("name", "changes", "argument", "words"), BAD)
def test_bad_input_names_argument_and_remedy(name, changes, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        read(name, **changes)
    assert caught.value.argument == argument
