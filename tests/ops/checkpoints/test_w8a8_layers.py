"""W8A8 layers of folders as exporters write them: tensors by hand, configs of compressed-tensors, fp8 and modelopt."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import fp8, model_layers, model_requests, stored_layers, w8a8, w8a16
from terrazzo.ops.checkpoints import Checkpoint, loaders
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_requests import Weights
from terrazzo.ops.w4a8.w8a8 import activations as w8a8_activations

N, K = 300, 256
RNG = torch.Generator().manual_seed(5)
INT8 = torch.randint(-128, 128, (N, K), generator=RNG, dtype=torch.int8)
E4M3 = (torch.randn(N, K, generator=RNG) * 20).to(torch.float8_e4m3fn)
ROWS = torch.rand(N, 1, generator=RNG) + 0.5
BLOCKS = torch.rand(3, 2, generator=RNG) + 0.5
STATIC = {"input_scale": torch.tensor([0.25])}
BY_ROW, BY_BLOCK = {"weight_scale": ROWS}, {"weight_scale_inv": BLOCKS}


def compressed(weights: dict, acts: dict | None, format: str) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float"}
KINDS = {  # tensors, config, what the weight says of activations
    "int8 by token": ({"weight": INT8, **BY_ROW}, compressed(CHANNEL, TOKEN, "int-quantized"), (None, 0, False)),
    "int8 static": (
        {"weight": INT8, **BY_ROW, **STATIC},
        compressed(CHANNEL, TENSOR, "int-quantized"),
        (0.25, 0, False),
    ),
    "int8 static with a zero point": (
        {"weight": INT8, **BY_ROW, **STATIC, "input_zero_point": torch.tensor([-9], dtype=torch.int8)},
        compressed(CHANNEL, TENSOR | {"symmetric": False}, "int-quantized"),
        (0.25, -9, False),
    ),
    "int8 asymmetric by token": (
        {"weight": INT8, **BY_ROW},
        compressed(CHANNEL, TOKEN | {"symmetric": False}, "int-quantized"),
        (None, 0, True),
    ),
    "int8 by tensor": (
        {"weight": INT8, "weight_scale": torch.tensor([0.5])},
        compressed(CHANNEL | {"strategy": "tensor"}, TOKEN, "int-quantized"),
        (None, 0, False),
    ),
    "float-quantized by token": (
        {"weight": E4M3, **BY_ROW},
        compressed(FLOAT | {"strategy": "channel"}, TOKEN | {"type": "float"}, "float-quantized"),
        (None, 0, False),
    ),
    "float-quantized static": (
        {"weight": E4M3, "weight_scale": torch.tensor([0.5]), **STATIC},
        compressed(FLOAT | {"strategy": "tensor"}, TENSOR | {"type": "float"}, "float-quantized"),
        (0.25, 0, False),
    ),
    "float-quantized blocks": (
        {"weight": E4M3, "weight_scale": BLOCKS},
        compressed(
            FLOAT | {"strategy": "block", "block_structure": [128, 128]},
            TOKEN | {"type": "float", "strategy": "group", "group_size": 128},
            "float-quantized",
        ),
        (None, 0, False),
    ),
    "fp8 static": (
        {"weight": E4M3, "weight_scale": torch.tensor(0.5), **STATIC},
        {"quant_method": "fp8", "activation_scheme": "static"},
        (0.25, 0, False),
    ),
    "fp8 dynamic, whose static scale is left": (
        {"weight": E4M3, "weight_scale": torch.tensor(0.5), **STATIC},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        (None, 0, False),
    ),
    "fp8 blocks": (
        {"weight": E4M3, **{"weight_scale_inv": BLOCKS.bfloat16()}},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        (None, 0, False),
    ),
    "fbgemm": (
        {"weight": E4M3, **BY_ROW},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": None},
        (None, 0, False),
    ),
    "modelopt": (
        {"weight": E4M3, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        (0.25, 0, False),
    ),
}


def written(folder, tensors: dict, config: dict):
    save_file({f"layer.{name}": t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def meant(tensors: dict) -> torch.Tensor:
    """float64 [N, K]: the weight that a layer's tensors mean."""
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv")).double()
    if scale.ndim == 2 and scale.shape != (N, 1):
        scale = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)
    return tensors["weight"].double() * scale


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_is_what_its_tensors_mean(name, tmp_path):
    tensors, config, activations = KINDS[name]
    tensors = tensors | {"bias": torch.randn(N)}
    weight = w8a8.read_layer(written(tmp_path, tensors, config), "layer")
    assert torch.equal(weight.dequantize(), meant(tensors)) and torch.equal(weight.bias, tensors["bias"])
    assert (weight.input_scale, weight.input_zero, weight.asymmetric) == activations
    assert w8a8.load_layer(tmp_path, "layer").block == ("blocks" in name)
    assert not w8a8.load_model(tmp_path).skipped


def launched(w: w8a8.PackedWeight) -> set:
    """What a packed weight's calls of bfloat16 launch."""
    facts = dict(codes=w.codes, block=w.block, zeros=w.asymmetric or w.input_zero != 0, bias=w.bias is not None)
    facts |= dict(static=w.input_scale is not None, ue8m0=w.ue8m0, dtype="bfloat16", target="sm_90a")
    return set(w8a8.kernel_requests(w.n, w.k, **facts))


@pytest.mark.parametrize("name", [*KINDS, "fp8 blocks of one column"])
def test_kernels_of_a_folder_are_those_that_its_layers_launch(name, tmp_path):
    tensors, config, _ = KINDS[name.removesuffix(" of one column")]
    if name not in KINDS:
        tensors = {"weight": E4M3[:, :128], "weight_scale_inv": BLOCKS[:, :1]}
    folder = written(tmp_path, tensors, config)
    model = model_requests.of_folder(folder, Weights(operator="w8a8", dtype="bfloat16"))
    found = set(model_requests.plan(model, Serving(Target.parse("sm_90a"), "bfloat16")).requests)
    assert launched(w8a8.load_layer(folder, "layer")) <= found and not model.layers.skipped


@pytest.mark.parametrize("name", KINDS)
def test_a_folders_layers_multiply_what_its_config_states(name, tmp_path):
    (kind,) = model_layers.of_folder(written(tmp_path, *KINDS[name][:2])).kinds
    assert kind.operator == ("w8a8" if "int8" in name else "w8a8_fp8")
    assert kind.static == (KINDS[name][2][0] is not None)


NO_ACTIVATIONS = compressed(CHANNEL, None, "int-quantized")
GROUPS = compressed(CHANNEL | {"strategy": "group", "group_size": 128}, TOKEN, "int-quantized")


@pytest.mark.parametrize(
    ("tensors", "config", "target", "operator"),
    [
        (KINDS["int8 by token"][0], NO_ACTIVATIONS, None, "w8a16"),
        ({"weight": INT8, "weight_scale": torch.rand(N, 2) + 0.5}, GROUPS, None, "w8a16"),
        (*KINDS["fp8 static"][:2], "sm_80", "fp8"),
        (*KINDS["fp8 blocks"][:2], "sm_86", "fp8"),
        (KINDS["fbgemm"][0], KINDS["fbgemm"][1] | {"activation_scale_ub": 1200.0}, None, "fp8"),
        ({"weight": E4M3, **BY_ROW}, compressed(FLOAT | {"strategy": "channel"}, None, "float-quantized"), None, "fp8"),
    ],
)
def test_activations_stay_in_16_bits_where_no_kernel_or_no_config_has_them_in_8(
    tensors, config, target, operator, tmp_path
):
    at = None if target is None else Target.parse(target)
    (kind,) = model_layers.of_folder(written(tmp_path, tensors, config), target=at).kinds
    assert kind.operator == operator


@pytest.mark.parametrize("name", ["int8 static", "int8 asymmetric by token", "fp8 static", "fp8 blocks"])
def test_a_config_without_files_says_how_bytes_are_made(name, tmp_path):
    stated = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(stated | {"quantization_config": KINDS[name][1]}))
    model = model_requests.of_folder(tmp_path, Weights())
    expected = ("w8a8" if "int8" in name else "w8a8_fp8", "static" in name, "asymmetric" in name)
    assert {(kind.operator, kind.static, kind.zeros) for kind in model.layers.kinds} == {expected}
    assert model_requests.plan(model, Serving(Target.parse("sm_90a"), model.dtype)).requests


@pytest.mark.parametrize("operator", ["w4ax", "w8a8_fp8"])
def test_an_operator_that_reads_no_stored_layers_is_refused_by_name(operator, tmp_path):
    with pytest.raises(ArgumentError, match=f"op = '{operator}': reads no stored layers"):
        model_layers.of_folder(written(tmp_path, *KINDS["int8 static"][:2]), operator)


def test_a_bound_of_the_activations_scales_is_refused_by_name(tmp_path):
    tensors, config, _ = KINDS["fbgemm"]
    folder = written(tmp_path, tensors, config | {"activation_scale_ub": 1200.0})
    with pytest.raises(ArgumentError, match="activation_scale_ub"):
        w8a8.read_layer(folder, "layer")
    assert "bounds the scales" in next(iter(w8a8.load_model(folder).skipped.values()))
    assert torch.equal(fp8.read_layer(folder, "layer").dequantize(), meant(tensors))  # 16-bit activations


POWERS = torch.tensor([[2.0**-9, 2.0**-14], [1.0, 2.0**3], [2.0**-20, 0.5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("stated", ["ue8m0", "UE8M0"])
def test_scales_of_activations_are_powers_of_two_where_a_config_says_so(stated, dtype, tmp_path):
    """As DeepSeek-V3.1 states them; its weights are exact, however their scales are stored."""
    config = KINDS["fp8 blocks"][1] | {"scale_fmt": stated}
    folder = written(tmp_path, {"weight": E4M3, "weight_scale_inv": POWERS.to(dtype)}, config)
    weight = w8a8.read_layer(folder, "layer")
    assert weight.ue8m0 and torch.equal(weight.dequantize(), meant({"weight": E4M3, "weight_scale": POWERS}))
    w = w8a8.load_layer(folder, "layer")
    made = w8a8_activations.run(torch.randn(3, K).bfloat16(), w)
    assert bool((torch.frexp(made.scales[:, :3])[0] == 0.5).all())
    model = model_requests.of_folder(folder, Weights(operator="w8a8", dtype="bfloat16"))
    found = set(model_requests.plan(model, Serving(Target.parse("sm_90a"), "bfloat16")).requests)
    assert launched(w) <= found
    assert torch.equal(fp8.read_layer(folder, "layer").dequantize(), weight.dequantize())


def test_powers_of_two_beside_scales_of_rows_are_refused_by_name(tmp_path):
    tensors, config, _ = KINDS["fp8 static"]
    config = config | {"scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    with pytest.raises(ArgumentError, match="scale_fmt = 'ue8m0': rounds scales of blocks of 128"):
        w8a8.read_layer(written(tmp_path, tensors, config), "layer")


@pytest.mark.parametrize("field", ["scale_fmt", "activation_scheme", "fmt"])
def test_an_fp8_field_is_obeyed_or_refused_or_says_nothing(field, tmp_path):
    tensors, config, _ = KINDS["fp8 blocks"]
    model = w8a8.load_model(written(tmp_path, tensors, config | {field: "another"}))
    assert f"{field} is 'another'" in next(iter(model.skipped.values()))
    for value in ("", None, config.get(field, "").upper()):
        weight = w8a8.read_layer(written(tmp_path, tensors, config | {field: value}), "layer")
        assert torch.equal(weight.dequantize(), meant(tensors)) and weight.input_scale is None


ACTIVATIONS = {
    "token": TOKEN, "static": TENSOR, "static by token": TENSOR | {"strategy": "token"},
    "tensor": TOKEN | {"strategy": "tensor"}, "group": TOKEN | {"strategy": "group", "group_size": 128},
    "group of 64": TOKEN | {"strategy": "group", "group_size": 64}, "local": TOKEN | {"dynamic": "local"},
    "asymmetric": TOKEN | {"symmetric": False},
}  # fmt: skip
MULTIPLIED = {(rows, acts) for rows in ("tensor", "channel") for acts in ("token", "static")} | {("block", "group")}


@pytest.mark.parametrize("weights", ["tensor", "channel", "block"])
@pytest.mark.parametrize("acts", ACTIVATIONS)
def test_float_activations_are_quantized_only_as_a_kernel_does_it(weights, acts, tmp_path):
    """All others stay in 16 bits where a model is loaded, and W8A8 refuses them."""
    scale = {"tensor": torch.tensor([0.5]), "channel": ROWS, "block": BLOCKS}[weights]
    config = compressed(FLOAT | {"strategy": weights}, ACTIVATIONS[acts] | {"type": "float"}, "float-quantized")
    folder = written(tmp_path, {"weight": E4M3, "weight_scale": scale, **STATIC}, config)
    (kind,) = model_layers.of_folder(folder).kinds
    if (weights, acts) in MULTIPLIED:
        assert kind.operator == "w8a8_fp8" and w8a8.read_layer(folder, "layer").input_scale == (
            0.25 if acts == "static" else None
        )
        return
    assert kind.operator == "fp8"
    with pytest.raises(ArgumentError, match="no kernel of W8A8 multiplies"):
        w8a8.read_layer(folder, "layer")


def test_static_activations_of_fp8_blocks_stay_in_16_bits(tmp_path):
    tensors, config, _ = KINDS["fp8 blocks"]
    folder = written(tmp_path, tensors | STATIC, config | {"activation_scheme": "static"})
    (kind,) = model_layers.of_folder(folder).kinds
    assert kind.operator == "fp8"
    with pytest.raises(ArgumentError, match="no kernel of W8A8 multiplies"):
        w8a8.read_layer(folder, "layer")


@pytest.mark.parametrize(
    ("name", "leaf", "value"),
    [
        *(("fp8 static", "input_scale", value) for value in (0.0, float("nan"), -1.0, [0.1, 0.2], None)),
        ("int8 static with a zero point", "input_zero_point", 131),
        ("int8 static with a zero point", "input_zero_point", None),
        ("int8 static", "input_zero_point", 3),
        ("int8 static", "input_scale", None),
    ],
)
def test_unusable_static_activations_are_refused_with_their_layer_and_the_remedy(name, leaf, value, tmp_path):
    tensors, config, _ = KINDS[name]
    tensors = {key: tensor for key, tensor in tensors.items() if key != leaf}
    folder = written(tmp_path, tensors if value is None else tensors | {leaf: torch.tensor(value)}, config)
    with pytest.raises(ArgumentError, match=rf"^{leaf} = .*layer 'layer'.*weight_only=True"):
        w8a8.read_layer(folder, "layer")


def test_fp8_layers_stay_weight_only_where_that_is_asked_for(tmp_path):
    tensors, config, _ = KINDS["fp8 static"]
    made = fp8.read_layer(written(tmp_path, tensors, config), "layer")
    assert torch.equal(made.dequantize(), meant(tensors))


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({"weight": INT8, **BY_ROW}, compressed(CHANNEL, TENSOR, "int-quantized"), "input_scale"),
        ({"weight": E4M3, **BY_ROW}, {"quant_method": "fp8", "activation_scheme": "static"}, "input_scale"),
        (
            {"weight": INT8, **BY_ROW, "weight_zero_point": torch.ones(N, 1, dtype=torch.int8)},
            compressed(CHANNEL, TOKEN, "int-quantized"),
            "weight_zero_point",
        ),
        (
            {"weight": INT8, "weight_scale": torch.rand(N, 2) + 0.5},
            compressed(CHANNEL | {"strategy": "group", "group_size": 128}, TOKEN, "int-quantized"),
            "weight_scale",
        ),
        (
            {"weight": INT8, **BY_ROW, "input_scale": torch.rand(2)},
            compressed(CHANNEL, TENSOR, "int-quantized"),
            "input_scale",
        ),
        (
            {"weight": INT8, **BY_ROW},
            compressed(CHANNEL, TOKEN | {"num_bits": 4}, "int-quantized"),
            "activations are quantized otherwise than by w8a8.*weight_only=True",
        ),
    ],
)
def test_what_no_kernel_computes_is_refused_by_name(tensors, config, said, tmp_path):
    with pytest.raises(ArgumentError, match=said):
        w8a8.read_layer(written(tmp_path, tensors, config), "layer")


def test_int8_layers_with_activations_of_4_bits_are_read_where_these_stay_in_16_bits(tmp_path):
    tensors = {"weight": INT8, **BY_ROW}
    folder = written(tmp_path, tensors, compressed(CHANNEL, TOKEN | {"num_bits": 4}, "int-quantized"))
    config = Checkpoint(folder).layer("layer")
    chosen = [stored_layers.operator_of("int_quantized", config, weight_only=it) for it in (False, True)]
    assert chosen == ["w8a8", "w8a16"]
    weight = w8a16.FAMILY.read(Checkpoint(folder), "layer", "cpu")
    assert torch.equal((weight.codes.double() - 128) * weight.scales.double(), meant(tensors))


def test_remedies_name_operators_that_read_such_layers():
    for convention, operators in loaders.READERS.items():
        for operator in operators:
            assert convention in stored_layers.FAMILIES[operator].readers
    conventions = {it for family in stored_layers.FAMILIES.values() for it in family.readers}
    assert conventions == set(loaders.READERS)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("int8")])
def test_w8a16_leaves_activations_in_16_bits_whatever_is_stated_of_them(name, tmp_path):
    tensors, config, _ = KINDS[name]
    folder = written(tmp_path, tensors, config)
    weight = w8a16.read_layer(folder, "layer")
    assert torch.equal((weight.codes.double() - 128) * weight.scales.double(), meant(tensors))
    assert not w8a16.load_model(folder).skipped
