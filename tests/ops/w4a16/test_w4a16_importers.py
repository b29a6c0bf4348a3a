"""Golden layers of every checkpoint format are read exactly; wrong tensors are refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a16
from terrazzo.ops.checkpoints import Config

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(reversed(line.split()) for line in (DATA / "SHA256SUMS").read_text().splitlines())


def load(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict]:
    """(layer tensors, expected tensors, config) of a golden file."""
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        config = json.loads(file.metadata()["config"])
    layer = {key.removeprefix("layer."): t for key, t in tensors.items() if key.startswith("layer.")}
    return (
        layer,
        {key.removeprefix("expected."): t for key, t in tensors.items() if key.startswith("expected.")},
        config,
    )


def read(name: str, **changes) -> w4a16.QuantizedWeight:
    """Read a golden layer from its tensors with what its config states; `changes` replace tensors or options."""
    layer, _, raw = load(name)
    config = Config(raw).layer("layer")
    options = {"bits": config.bits, "group_size": config.group_size}
    if config.format == "awq":
        return w4a16.read_awq(**(layer | options | {"version": config.version} | changes))
    if config.format in ("gptq", "gptq_v2"):
        facts = {"version": config.format, "symmetric": config.symmetric, "desc_act": config.desc_act}
        return w4a16.read_gptq(**(layer | options | facts | changes))
    return w4a16.read_compressed_tensors(**(layer | options | {"symmetric": config.symmetric} | changes))


@pytest.mark.parametrize("file", sorted(GOLDEN))
def test_golden_file_is_unchanged(file):
    path = DATA / file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN[file]
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("name", sorted(Path(file).stem for file in GOLDEN if file != "awq_demo.safetensors"))
def test_golden_layer_is_read_exactly(name):
    weight, (layer, expected, _) = read(name), load(name)
    columns = torch.arange(weight.k) if weight.perm is None else weight.perm.long()
    assert torch.equal(weight.codes, expected["codes"][:, columns])
    scales = weight.scales.repeat_interleave(weight.group_size, 1)[:, : weight.k]
    zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
    zeros = zeros.repeat_interleave(weight.group_size, 1)[:, : weight.k]
    g_idx = layer.get("g_idx", layer.get("weight_g_idx", torch.arange(weight.k) // weight.group_size)).long()[columns]
    assert torch.equal(scales, expected["scales"][:, g_idx])
    assert torch.equal(zeros.to(torch.uint8), expected["zeros"][:, g_idx])
    assert torch.equal(weight.dequantize("exact"), expected["weight"])
    assert torch.equal(w4a16.pack(weight).dequantize("exact"), expected["weight"])


def test_demo_layer_is_read_exactly():
    weight, (_, _, config) = read("awq_demo"), load("awq_demo")
    digest = hashlib.sha256(weight.dequantize("exact").numpy().tobytes()).hexdigest()
    assert digest == config["expected_weight_sha256"]


def test_the_zero_point_traps():
    """v1 stores z - 1 in each nibble and 15 means 0 or 16; v2 stores z; wrapping leaves neighbours alone."""
    layer, expected, _ = load("gptq_asym")
    stored = torch.tensor([15, 7, 15, 0, 14, 3, 1, 8])
    word = sum(int(v) << (4 * i) for i, v in enumerate(stored))
    qzeros = layer["qzeros"].clone()
    qzeros[0, 0] = word - (1 << 32) if word >= 1 << 31 else word
    with pytest.warns(UserWarning, match="zero point 0 or 16; taken for 0"):
        wrapped = read("gptq_asym", qzeros=qzeros)
    assert wrapped.zeros[:8, 0].tolist() == [0, 8, 0, 1, 15, 4, 2, 9]
    with pytest.warns(UserWarning, match="taken for 16"):
        sixteen = read("gptq_asym", qzeros=qzeros, zero_overflow="16")
    assert sixteen.zeros[:8, 0].tolist() == [16, 8, 16, 1, 15, 4, 2, 9]
    assert torch.equal(w4a16.pack(sixteen).unpack().zeros, sixteen.zeros)
    assert read("gptq_asym", qzeros=qzeros, version="gptq_v2").zeros[:8, 0].tolist() == stored.tolist()
    assert torch.equal(wrapped.zeros[8:], expected["zeros"][8:])


def test_gptq_version_is_derived_only_where_the_tensors_tell():
    assert read("gptq_sym", version=None).symmetric
    layer, _, _ = load("gptq_sym")
    assert read("gptq_sym", version=None, qzeros=layer["qzeros"] + 0x11111111).symmetric
    with pytest.raises(ArgumentError, match="pass version='gptq' or 'gptq_v2'"):
        read("gptq_asym", version=None)


def test_symmetric_layers_may_lack_zero_points():
    layer, expected, _ = load("gptq_sym")
    assert torch.equal(read("gptq_sym", qzeros=None).dequantize(), expected["weight"])
    assert w4a16.read_awq(layer["qweight"].new_zeros(64, 16), None, layer["scales"][:1]).symmetric


def test_act_order_groups_of_unequal_size_are_split():
    """Groups of 64, 128 and 64 channels become four groups of 64; one short group goes last whatever its number."""
    layer, _, _ = load("gptq_act_order")
    g_idx = torch.tensor([0] * 64 + [1] * 128 + [3] * 64, dtype=torch.int32)[torch.randperm(256)]
    weight = read("gptq_act_order", g_idx=g_idx, group_size=None)
    assert weight.group_size == 64 and weight.scales.shape[1] == 4
    assert torch.equal(weight.scales, layer["scales"].T[:, [0, 1, 1, 3]])
    g_idx = torch.tensor([0] * 30 + [1] * 64 + [2] * 98 + [3] * 64, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="share a unit of 32, 64 or 128"):
        read("gptq_act_order", g_idx=g_idx, group_size=None)
    g_idx = torch.tensor([0] * 32 + [1] * 64 + [2] * 96 + [3] * 64, dtype=torch.int32)
    assert read("gptq_act_order", g_idx=g_idx, group_size=None).group_size == 32
    short = torch.tensor([0] * 40 + [1] * 64 + [2] * 64 + [3] * 88, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="unit"):
        read("gptq_act_order", g_idx=short, group_size=None)
    short = torch.tensor([0] * 8 + [1] * 120 + [2] * 64 + [3] * 64, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="unit"):
        read("gptq_act_order", g_idx=short, group_size=None)
    last = torch.tensor([0] * 50 + [1] * 206, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="unit"):
        read("gptq_act_order", g_idx=last, group_size=None)
    ragged = read("gptq_act_order_ragged")
    assert ragged.scales.shape[1] == 3 and ragged.group_size == 128


def test_a_short_group_is_moved_to_the_end():
    k, n = 160, 8
    g_idx = torch.tensor([0] * 32 + [1] * 64 + [2] * 64, dtype=torch.int32)
    scales = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float16).expand(3, n)
    weight = w4a16.read_gptq(torch.full((k // 8, n), 0x11111111, dtype=torch.int32), None, scales, g_idx)
    assert weight.group_size == 64 and weight.scales[0].tolist() == [2.0, 4.0, 1.0]
    assert torch.equal(weight.dequantize()[0], -7 * scales[:, 0][g_idx.long()])
    zeros = torch.tensor([[0x22222222], [0x33333333], [0x44444444]], dtype=torch.int32)
    weight = w4a16.read_gptq(
        torch.full((k // 8, n), 0x11111111, dtype=torch.int32), zeros, scales, g_idx, version="gptq_v2"
    )
    assert weight.zeros[0].tolist() == [3, 4, 2]
    expected = (1 - torch.tensor([2, 3, 4])) * scales[:, 0]
    assert torch.equal(weight.dequantize()[0], expected[g_idx.long()])


def test_compressed_tensors_ignores_an_unset_g_idx():
    _, expected, _ = load("ct_asym")
    unset = torch.full((256,), -1, dtype=torch.int32)
    assert torch.equal(read("ct_asym", weight_g_idx=unset).dequantize(), expected["weight"])


@pytest.mark.parametrize("groups", [1, 2])
def test_zero_points_of_any_stride(groups):
    """[G, 1] counts as contiguous with any stride. Layers of up to 8 rows, a Mixtral gate's, have such zero points."""
    scales, ones = torch.ones(8, groups).half(), torch.full((8,), 0x11111111, dtype=torch.int32)
    packed = w4a16.read_compressed_tensors(_words(8, 16 * groups), scales, ones[:groups][None], (8, 128 * groups))
    qzeros = ones.as_strided((groups, 1), (1, 3))
    gptq = w4a16.read_gptq(_words(16 * groups, 8), qzeros, scales.T, version="gptq_v2")
    assert bool((packed.zeros == 1).all()) and bool((gptq.zeros == 1).all())


@pytest.mark.parametrize("change", [lambda t: t.to("meta"), lambda t: t.to_sparse()], ids=["meta", "sparse"])
@pytest.mark.parametrize("name", ["awq", "gptq_act_order", "ct_asym", "ct_int8_zeros", "ct_act_order"])
def test_tensors_without_plain_data_are_refused(name, change):
    layer = load(name)[0]
    for leaf in set(layer) - {"weight_shape"}:
        with pytest.raises(ArgumentError) as caught:
            read(name, **{leaf: change(layer[leaf])})
        assert caught.value.argument == leaf


def test_scales_that_do_not_tell_the_group_size():
    """Two groups of K = 640 may be 512 and 128 channels, or 384 and 256; g_idx tells."""
    layer = _words(80, 8), None, torch.ones(2, 8).half()
    with pytest.raises(ArgumentError, match="group_size = None: .*does not tell it; pass what the checkpoint's config"):
        w4a16.read_gptq(*layer)
    with pytest.raises(ArgumentError, match="no usual group size .*; pass group_size"):
        w4a16.pack(torch.zeros(8, 640, dtype=torch.uint8), torch.ones(8, 2).half())
    assert w4a16.read_gptq(*layer, group_size=512).scales.shape == (8, 5)
    assert w4a16.read_gptq(*layer, torch.arange(640).int() // 512).scales.shape == (8, 5)


def test_bias_and_target_are_kept():
    layer, _, _ = load("awq")
    packed = w4a16.from_awq(**layer, bias=torch.arange(128.0).half(), target="sm_89")
    assert packed.target == "sm_89" and packed.bias[5] == 5


def _words(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


BAD = [
    # golden layer, what is changed, the argument that the message names, a piece of constraint or remedy
    ("awq", {"version": "gemv"}, "version", "export the model again with version='gemm'"),
    ("awq", {"version": "gemv_fast"}, "version", "gemv_fast"),
    ("awq", {"version": "marlin"}, "version", "marlin"),
    ("awq", {"bits": 3}, "bits", "quantize the model to 4 or 8 bits"),
    ("awq", {"group_size": 64}, "group_size", "K % group_size = 0"),
    ("awq", {"group_size": 96}, "group_size", "K = 256"),
    ("awq", {"group_size": -1}, "group_size", "-1 for one group"),
    ("awq", {"qweight": _words(256, 15)}, "qweight", r"int32 \[\*, 16\]"),
    ("awq", {"qweight": _words(256, 16).long()}, "qweight", "int32"),
    ("awq", {"qweight": None}, "qweight", "add the layer's tensor"),
    ("awq", {"qzeros": _words(1, 16)}, "qzeros", r"int32 \[2, 16\]"),
    ("awq", {"scales": torch.ones(2, 127).half()}, "scales", "multiple of 8"),
    ("awq", {"scales": torch.ones(2, 128).double()}, "scales", "f16, bf16 or f32"),
    ("awq", {"scales": None}, "scales", "add the layer's tensor"),
    ("awq", {"scales": torch.full((2, 128), float("nan")).half()}, "scales", "must be finite"),
    ("awq", {"scales": torch.full((2, 128), float("inf")).half()}, "scales", "must be finite"),
    ("awq", {"bias": torch.ones(127)}, "bias", r"float vector \[128\]"),
    ("gptq_sym", {"version": "marlin"}, "version", "before it was repacked"),
    ("gptq_sym", {"bits": 8}, "bits", "8 bits"),
    ("gptq_sym", {"qweight": _words(24, 128)}, "bits", "hold 3 bits"),
    ("gptq_sym", {"qweight": _words(64, 128)}, "bits", "hold 8 bits"),
    ("gptq_sym", {"qweight": _words(32, 120)}, "qweight", r"int32 \[\*, 128\]"),
    ("gptq_sym", {"version": "gptq_v2"}, "symmetric", "other GPTQ version"),
    ("gptq_v2_asym", {"symmetric": True}, "symmetric", "checkpoint_format"),
    ("gptq_asym", {"qzeros": None}, "qzeros", "needs its zero points"),
    ("gptq_asym", {"zero_overflow": "carry"}, "zero_overflow", "wrap"),
    ("gptq_act_order", {"desc_act": False}, "desc_act", "desc_act=None"),
    (
        "gptq_act_order",
        {"bits": 2},
        "bits",
        "hold 4 bits .*; state the bits .* or quantize the model to 2, 4 or 8 bits",
    ),
    ("gptq_act_order", {"g_idx": None}, "g_idx", "needs the group of each channel"),
    ("gptq_act_order", {"g_idx": _words(128)}, "bits", "8 bits"),
    ("gptq_act_order", {"g_idx": torch.full((256,), 4, dtype=torch.int32)}, "g_idx", "0..3"),
    ("gptq_act_order", {"g_idx": torch.zeros(256)}, "g_idx", r"int32 \[K\]"),
    ("gptq_act_order", {"g_idx": [0] * 256}, "g_idx", "= 'list'"),
    ("gptq_act_order", {"g_idx": _words(0)}, "g_idx", r"int32 \[256\]"),
    ("gptq_sym", {"group_size": 64}, "group_size", "K = 256 with 2 scales"),
    ("ct_sym", {"format": "nvfp4-pack-quantized"}, "format", "pack-quantized"),
    ("ct_sym", {"bits": 8}, "bits", "load it with w8a16"),
    ("ct_sym", {"weight_shape": (128, 128)}, "weight_shape", "8 bits"),
    ("ct_sym", {"weight_shape": (127, 256)}, "weight_shape", "N = 128"),
    ("ct_asym", {"weight_zero_point": None}, "weight_zero_point", "add the layer's weight_zero_point"),
    ("ct_asym", {"weight_zero_point": _words(128, 8)}, "weight_zero_point", r"int32 \[16, 8\]"),
    ("ct_asym", {"symmetric": True}, "symmetric", "symmetric=None"),
    ("ct_int8_zeros", {"weight_zero_point": torch.zeros(40, 3, dtype=torch.int8)}, "weight_zero_point", "int8"),
    ("ct_int8_zeros", {"weight_zero_point": torch.full((40, 2), 9, dtype=torch.int8)}, "weight_zero_point", "0..16"),
    ("ct_sym", {"weight_scale": torch.full((128, 2), float("nan"))}, "weight_scale", "must be finite"),
    ("ct_sym", {"weight_shape": 3}, "weight_shape", r"\(N, K\)"),
    ("ct_act_order", {"weight_g_idx": torch.full((256,), 2, dtype=torch.int32)}, "weight_g_idx", "0..1"),
    ("awq", {"bits": "4"}, "bits", "the number 4"),
    ("awq", {"bits": float("nan")}, "bits", "hold nan bits"),
    ("gptq_sym", {"bits": float("inf")}, "bits", "hold inf bits"),
    ("ct_sym", {"weight_shape": (128, float("inf"))}, "weight_shape", r"\(N, K\)"),
    ("awq", {"bias": torch.ones(128).double()}, "bias", r"vector \[128\] of float16 or bfloat16 or float32"),
    ("awq", {"group_size": "128"}, "group_size", "integer"),
    ("awq", {"version": None}, "version", "gemm"),
    ("ct_sym", {"weight_packed": _words(128, 32).to(torch.uint8)}, "weight_packed", "uint8"),
]


@pytest.mark.parametrize(("name", "changes", "argument", "words"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_input_names_argument_and_remedy(name, changes, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        read(name, **changes)
    assert caught.value.argument == argument
