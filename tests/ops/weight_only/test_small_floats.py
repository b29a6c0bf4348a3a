"""MXFP4, NVFP4 and FP8 weights on the CPU: importers against formulas of the files' writers; forms, quantizers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.ops import fp8, mxfp4, nvfp4, weights
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.weight_only import reference

LUT = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """transformers' formula: a table for each half of a byte, then ldexp by the scale less 127. [..., K]."""
    out = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]))
    out[..., 0::2], out[..., 1::2] = LUT[blocks & 0x0F], LUT[blocks >> 4]
    out = np.ldexp(out, scales.astype(np.int64)[..., None] - 127)
    return out.reshape(*out.shape[:-2], -1)


def mxfp4_tensors(*rows: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*rows, k // 32, 16), dtype=np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(rng.integers(100, 130, (*rows, k // 32), dtype=np.uint8))


def test_compressed_tensors_mxfp4_is_what_its_writer_means():
    blocks, scales = mxfp4_tensors(70, k=96)
    w = mxfp4.from_compressed_tensors(blocks.reshape(70, 48), scales, bias=torch.ones(70))
    assert torch.equal(w.dequantize(), torch.from_numpy(mxfp4_values(blocks.numpy(), scales.numpy())))
    assert torch.equal(w.bias, torch.ones(70)) and (w.n, w.k) == (70, 96)


def nvfp4_layer(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Packed codes [N, K/2], every e4m3 scale but NaN [N, K/16], amax / 2688, and the weight in float64: modelopt's and
    compressed-tensors' formulas, a table for each half of a byte, times the scale of 16, times that of the tensor."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = torch.from_numpy(rng.permutation(np.resize(np.arange(127, dtype=np.uint8), n * k // 16)).reshape(n, -1))
    scales = scales.view(torch.float8_e4m3fn)
    whole = float(np.float32(0.0173))
    weight = np.empty((n, k))
    weight[:, 0::2], weight[:, 1::2] = LUT[packed & 0x0F], LUT[packed >> 4]
    weight *= np.repeat(scales.double().numpy(), 16, axis=1) * whole
    return torch.from_numpy(packed), scales, whole, torch.from_numpy(weight)


def test_nvfp4_of_both_writers_is_what_they_mean():
    """The same bytes; compressed-tensors stores the reciprocal of modelopt's scale of the tensor."""
    packed, scales, whole, weight = nvfp4_layer(70, 96)
    w = nvfp4.from_modelopt(packed, scales, torch.tensor(whole), bias=torch.ones(70))
    assert torch.equal(w.dequantize(), weight) and torch.equal(w.bias, torch.ones(70)) and (w.n, w.k) == (70, 96)
    reciprocal = torch.tensor([1 / whole])
    w = nvfp4.from_compressed_tensors(packed, scales, reciprocal)
    torch.testing.assert_close(w.dequantize(), weight, rtol=2.0**-23, atol=0)
    power = nvfp4.from_compressed_tensors(packed, scales, torch.tensor([64.0]))
    assert torch.equal(power.dequantize(), nvfp4.from_modelopt(packed, scales, torch.tensor([1 / 64])).dequantize())


def test_nvfp4_scales_below_and_at_zero_mean_what_they_say():
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 8)
    scales = torch.tensor([[1.5, -1.5, 0.0, -0.0, 2.0**-9, 448.0, -448.0, -(2.0**-9)]] * 4).to(torch.float8_e4m3fn)
    factors = torch.tensor([1.0, 0.3, 2.0**-20, 1e4])
    exact = torch.tensor(LUT).repeat(4, 8) * scales.double().repeat_interleave(16, 1) * factors.double()[:, None]
    w = nvfp4.pack(codes, scales, factors)
    assert torch.equal(w.dequantize(), exact) and torch.equal(w.unpack().dequantize(), exact)
    assert torch.equal(w.unpack().factors, factors)


def test_every_nvfp4_scale_is_packed_and_read_back():
    scales = torch.arange(1, 127, dtype=torch.uint8).view(126, 1)
    w = nvfp4.pack(torch.full((126, 16), 2, dtype=torch.uint8), scales)
    assert torch.equal(w.unpack().scales, scales)
    assert torch.equal(w.dequantize()[:, 0], scales.view(torch.float8_e4m3fn).double()[:, 0])


def test_a_word_of_nvfp4_scales_holds_two_groups_of_two_rows():
    scales = torch.randint(1, 127, (64, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    record = nvfp4.pack(torch.ones(64, 128, dtype=torch.uint8), scales).params[1, 0]  # of k 64 to 127
    words = record.view(torch.int32).long() & 0xFFFFFFFF
    for warp, g, word in ((0, 0, 0), (2, 5, 1), (3, 7, 0)):
        held = int(words[(warp * 8 + g) * 2 + word])
        for odd in range(2):
            for half, row in enumerate((warp * 16 + g, warp * 16 + g + 8)):
                byte = held >> (4 + 16 * half) & 255
                exact = (8 + byte % 8) * 2.0 ** (byte // 8 - 24)
                assert exact == float(scales[row, 4 + 2 * word + odd].view(torch.float8_e4m3fn))
            held = (held << 8 | held >> 24) & 0xFFFFFFFF


def test_nvfp4_is_the_nearest_code_of_its_scales():
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * 0.02
    w = nvfp4.quantize_weight(x)
    each = w.scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)[:, :200] * float(w.factors[0])
    table = torch.tensor(LUT).unique() * each[..., None]
    nearest = (table - x.double()[..., None]).abs().amin(-1)
    assert bool(((w.dequantize() - x.double()).abs() <= nearest * 1.0001 + 1e-12).all())
    assert (w.dequantize() - x).square().mean() < mxfp4.quantize_weight(x).dequantize().sub(x).square().mean()
    assert torch.equal(nvfp4.quantize(torch.zeros(4, 64)).dequantize(), torch.zeros(4, 64).double())


def _nvfp4(**changes):
    packed, scales, whole, _ = nvfp4_layer(4, 32)
    given = dict(weight=packed, weight_scale=scales, weight_scale_2=torch.tensor(whole)) | changes
    return nvfp4.from_modelopt(**given)


@pytest.mark.parametrize("gate_up", [None, "halves", "interleaved"])
def test_gpt_oss_experts_are_what_their_writer_means(gate_up):
    blocks, scales = mxfp4_tensors(3, 6, k=64)
    bias = torch.arange(18.0).view(3, 6)
    w = mxfp4.from_gpt_oss(blocks, scales, bias, gate_up=gate_up)
    values = torch.from_numpy(mxfp4_values(blocks.numpy(), scales.numpy()))
    order = [0, 2, 4, 1, 3, 5] if gate_up == "interleaved" else list(range(6))
    for e in range(3):
        assert torch.equal(w[e].dequantize(), values[e, order]) and torch.equal(w[e].bias, bias[e, order])


@pytest.mark.parametrize(
    "shape, form", [((), "tensor"), ((1,), "tensor"), ((130,), "rows"), ((130, 1), "rows"), ((2, 3), "blocks")]
)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_layers_are_what_their_writers_mean(shape, form, name):
    rng = torch.Generator().manual_seed(1)
    weight = (torch.randn(130, 300, generator=rng) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=rng) + 0.1
    w = fp8.from_checkpoint(weight, **{name: scales})
    each = scales.view(-1, 1) if form == "rows" else scales
    if form == "blocks":
        each = scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(w.dequantize(), weight.double() * each.double())
    assert w.group_size == (128 if form == "blocks" else 300)


def test_scales_of_blocks_may_be_bfloat16_or_e8m0():
    weight = torch.ones(128, 256).to(torch.float8_e4m3fn)
    for scales in (torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16), torch.tensor([[126, 128]], dtype=torch.uint8)):
        given = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        w = fp8.from_checkpoint(weight, weight_scale_inv=given)
        assert torch.equal(w.dequantize()[0, ::128], torch.tensor([0.5, 2.0]).double())


@pytest.mark.parametrize("n, k", [(1, 16), (63, 32), (130, 96), (64, 576), (65, 300)])
def test_packing_loses_nothing(n, k):
    rng = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    scales = torch.randint(80, 140, (n, -(-k // 32)), generator=rng, dtype=torch.uint8)
    w = mxfp4.pack(codes, scales)
    back = w.unpack()
    assert torch.equal(back.codes, codes) and torch.equal(back.dequantize(), w.dequantize())
    used = (torch.nn.functional.pad(codes & 7, (0, -k % 32)) != 0).view(n, -1, 32).any(-1)
    assert torch.equal(back.scales[used], scales[used])
    small = torch.randint(1, 127, (n, -(-k // 16)), generator=rng, dtype=torch.uint8)
    made = nvfp4.QuantizedWeight.canonical(
        codes, small, weight="nvfp4", group_size=16, factors=torch.rand(n, generator=rng) + 0.1
    )
    back = made.pack().unpack()
    assert (
        torch.equal(back.codes, codes) and torch.equal(back.scales, small) and torch.equal(back.factors, made.factors)
    )
    bytes_ = torch.randint(0, 127, (n, k), generator=rng, dtype=torch.uint8)
    for group in (k, 128):
        made = fp8.QuantizedWeight.canonical(
            bytes_, torch.rand(n, -(-k // group), generator=rng), weight="fp8", group_size=group
        )
        back = made.pack().unpack()
        assert torch.equal(back.codes, bytes_) and torch.equal(back.scales, made.scales)


def test_exponents_of_a_row_far_apart():
    """All codes, groups 30, 126 and 200 powers of two below the row's largest, and rows near both ends."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(8, 10)[:, :160]
    scales = torch.tensor([[127, 97, 1, 0, 127], [254, 224, 128, 54, 254], [0] * 5, [252] * 5] * 2, dtype=torch.uint8)
    w = mxfp4.pack(codes, scales)
    exact = torch.tensor(LUT).repeat(8, 10) * 2.0 ** (scales.double().repeat_interleave(32, 1) - 127)
    floor = exact.abs().amax(1, keepdim=True) * 2.0**-127
    assert bool(((w.dequantize() - exact).abs() <= floor).all())
    assert torch.equal(w.dequantize()[:, :64], exact[:, :64])
    half = w.dequantize("exact", torch.float16)
    assert bool(((half - exact).abs() <= 2.0**-25 * 2.0 ** (scales.amax(1, keepdim=True).double() - 127)).all())


BAD = {
    "codes": lambda: mxfp4.pack(torch.full((4, 32), 16, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)),
    "scales": lambda: mxfp4.pack(torch.zeros(4, 32, dtype=torch.uint8), torch.full((4, 1), 255, dtype=torch.uint8)),
    "weight_scale": lambda: mxfp4.from_compressed_tensors(
        torch.zeros(4, 16, dtype=torch.uint8), torch.full((4, 1), 255, dtype=torch.uint8)
    ),
    "weight_packed": lambda: mxfp4.from_compressed_tensors(torch.zeros(4, 16), torch.zeros(4, 1, dtype=torch.uint8)),
    "blocks": lambda: mxfp4.from_gpt_oss(torch.zeros(2, 4, 1, 8, dtype=torch.uint8), torch.zeros(2, 4, 1)),
    "gate_up": lambda: mxfp4.from_gpt_oss(*mxfp4_tensors(2, 4, k=32), gate_up="both"),
    "weight": lambda: fp8.from_checkpoint(torch.full((4, 4), torch.nan).to(torch.float8_e4m3fn), torch.ones(())),
    "weight (dtype)": lambda: fp8.from_checkpoint(torch.ones(4, 4).to(torch.float8_e5m2), torch.ones(())),
    "weight_scale (negative)": lambda: fp8.from_checkpoint(torch.ones(4, 4).to(torch.float8_e4m3fn), -torch.ones(())),
    "weight_scale (none)": lambda: fp8.from_checkpoint(torch.ones(4, 4).to(torch.float8_e4m3fn)),
    "weight_scale_inv": lambda: fp8.from_checkpoint(
        torch.ones(4, 4).to(torch.float8_e4m3fn), weight_scale_inv=torch.ones(2, 2)
    ),
    "weight_scale (swizzled)": lambda: _nvfp4(weight_scale=torch.zeros(512).to(torch.float8_e4m3fn)),
    "weight_scale (bytes)": lambda: _nvfp4(weight_scale=torch.zeros(4, 2, dtype=torch.uint8)),
    "weight_scale (NaN)": lambda: _nvfp4(weight_scale=torch.full((4, 2), torch.nan).to(torch.float8_e4m3fn)),
    "weight_scale_2": lambda: _nvfp4(weight_scale_2=torch.tensor(0.0)),
    "weight_scale_2 (infinite)": lambda: _nvfp4(weight_scale_2=torch.tensor(torch.inf)),
    "weight_global_scale": lambda: nvfp4.from_compressed_tensors(*nvfp4_layer(4, 32)[:2], torch.tensor([-1.0])),
    "factors": lambda: nvfp4.pack(*(torch.ones(4, k, dtype=torch.uint8) for k in (16, 1)), torch.ones(3)),
    "bias": lambda: mxfp4.pack(*(torch.zeros(4, k, dtype=torch.uint8) for k in (32, 1)), bias=torch.ones(3)),
    "granularity": lambda: fp8.quantize(torch.ones(4, 4), granularity="row"),
    "group_size": lambda: mxfp4.kernel_requests(64, 64, group_size=64, target="sm_90a"),
    "numerics": lambda: mxfp4.gemm(torch.ones(1, 32), mxfp4.quantize(torch.ones(4, 32)), numerics="post"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    with pytest.raises(ArgumentError) as caught:
        BAD[name]()
    assert caught.value.argument == name.partition(" ")[0]


def test_mxfp4_rounds_to_nearest_even_and_takes_the_better_scale():
    halfway = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0] + [0.0] * 22])
    w = mxfp4.quantize_weight(halfway)
    assert torch.equal(w.dequantize()[0, :10].float(), torch.tensor([6.0, 0, 1, 1, 2, 2, 4, 4, 0, -4]))
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=rng)
    found = (mxfp4.quantize_weight(x).dequantize() - x).square().sum()
    for more in (0, 1):  # each published rule alone
        exponent = torch.floor(torch.log2(x.view(64, 8, 32).abs().amax(-1))) - 2 + more
        scaled = x.view(64, 8, 32) / 2.0 ** exponent[..., None]
        table = torch.tensor(LUT[:8]).float()
        near = table[(scaled.abs()[..., None] - table).abs().argmin(-1)] * scaled.sign() * 2.0 ** exponent[..., None]
        assert found <= (near.view(64, 256) - x).square().sum() + 1e-6


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_fp8_is_the_nearest_code_of_amax_scales(granularity):
    x = torch.randn(200, 260, generator=torch.Generator().manual_seed(0))
    w = fp8.quantize_weight(x, granularity=granularity)
    error = (w.dequantize() - x).abs()
    scale = w.scales.repeat_interleave(w.group_size, 1)[:, :260].double()
    assert bool((error <= torch.maximum(x.abs().double() * 2.0**-4, scale * 2.0**-10) * 1.001).all())
    assert w.scales.unique().numel() == {"tensor": 1, "channel": 200, "block": 6}[granularity]
    zeros = fp8.quantize(torch.zeros(4, 64), granularity=granularity)
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 64).double())


@pytest.mark.parametrize(
    "make", [mxfp4.quantize, nvfp4.quantize, fp8.quantize, lambda w: fp8.quantize(w, granularity="block")]
)
def test_a_packed_weight_is_saved_and_loaded(make, tmp_path):
    w = make(torch.randn(70, 96, generator=torch.Generator().manual_seed(3)))
    w.save(tmp_path / "w.safetensors")
    back = mxfp4.PackedWeight.load(tmp_path / "w.safetensors")
    assert type(back) is type(w) and torch.equal(back.dequantize(), w.dequantize()) and back.weight == w.weight
    assert weights.kind(back) == f"{w.weight}.PackedWeight"
    stacked = GroupedWeight.stack([w, w])
    stacked.save(tmp_path / "e.safetensors")
    assert torch.equal(GroupedWeight.load(mxfp4.PackedWeight, tmp_path / "e.safetensors")[1].words, w.words)
    with pytest.raises(LayoutMismatchError):
        w.check_layout("another")


@pytest.mark.parametrize("make", [mxfp4.quantize, nvfp4.quantize, fp8.quantize])
def test_a_graph_has_one_node_for_a_product(make):
    w = make(torch.randn(32, 64, generator=torch.Generator().manual_seed(3)), bias=torch.ones(32))
    x = torch.randn(3, 64).bfloat16()
    call = torch.compile(lambda x: mxfp4.gemm(x, w), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(x), reference.forward(x, w))
    grouped = GroupedWeight.stack([w, w])
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    call = torch.compile(lambda x: mxfp4.grouped_gemm(x, grouped, offsets), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(x), reference.forward(x, w))


def folder(tmp_path, tensors: dict[str, torch.Tensor], config: dict) -> str:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return str(tmp_path)


def compressed(form: str, **stated) -> dict:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **stated}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


NAME = "model.layers.0.mlp.down_proj"


def test_folders_of_compressed_tensors_mxfp4(tmp_path):
    blocks, scales = mxfp4_tensors(64, k=64)
    tensors = {f"{NAME}.weight_packed": blocks.reshape(64, 32), f"{NAME}.weight_scale": scales}
    config = compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)
    path = folder(tmp_path, tensors, config)
    model = mxfp4.load_model(path)
    assert torch.equal(model.layers[NAME].dequantize(), torch.from_numpy(mxfp4_values(blocks.numpy(), scales.numpy())))
    from terrazzo.ops import w4a16

    assert "mxfp4" in w4a16.load_model(path).skipped[NAME]


NVFP4 = {
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "config.json"),
    "hf_quant_config": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        "hf_quant_config.json",
    ),
    "mixed": (
        {
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {NAME: {"quant_algo": "NVFP4", "group_size": 16}},
            }
        },
        "hf_quant_config.json",
    ),
    "tensor_group": (
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16), "config.json",
    ),
    "group": (compressed("nvfp4-pack-quantized", num_bits=4, strategy="group", group_size=16), "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NVFP4)
def test_folders_of_nvfp4(tmp_path, kind):
    packed, scales, whole, weight = nvfp4_layer(64, 64)
    config, file = NVFP4[kind]
    if kind.endswith("group"):
        tensors = {"weight_packed": packed, "weight_global_scale": torch.tensor([1 / whole])}
        tensors["input_global_scale"] = torch.tensor([3.0])
    else:
        tensors = {"weight": packed, "weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.1)}
    tensors = {f"{NAME}.{leaf}": t for leaf, t in (tensors | {"weight_scale": scales}).items()}
    path = folder(tmp_path, tensors, config if file == "config.json" else {})
    if file != "config.json":
        (tmp_path / file).write_text(json.dumps(config))
    model = nvfp4.load_model(path)
    assert not model.skipped
    torch.testing.assert_close(model.layers[NAME].dequantize(), weight, rtol=2.0**-23, atol=0)
    from terrazzo.ops.model_layers import of_folder

    ((found, _),) = of_folder(path).kinds.items()
    assert (found.operator, found.n, found.k, found.group_size) == ("nvfp4", 64, 64, 16)


@pytest.mark.parametrize("more", ["pre_quant_scale", "svdquant_lora_a"])
def test_nvfp4_with_more_than_its_scales_is_refused_by_name(tmp_path, more):
    packed, scales, whole, _ = nvfp4_layer(64, 64)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(whole), more: torch.ones(64)}
    algorithm = "NVFP4_AWQ" if more == "pre_quant_scale" else "NVFP4_SVD"
    for stated, said in (("NVFP4", more), (algorithm, algorithm)):
        config = {"quant_method": "modelopt", "quant_algo": stated}
        path = folder(tmp_path, {f"{NAME}.{leaf}": t for leaf, t in tensors.items()}, config)
        model = nvfp4.load_model(path)
        assert not model.layers and any(said in reason for reason in model.skipped.values())


@pytest.mark.parametrize(
    "kind", ["float-quantized channel", "float-quantized tensor", "fp8 block", "fp8 tensor", "fbgemm"]
)
def test_folders_of_fp8(tmp_path, kind):
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    tensors, each = {f"{NAME}.weight": weight}, torch.full((130, 1), 0.5)
    if kind == "fp8 block":
        tensors[f"{NAME}.weight_scale_inv"] = torch.full((2, 2), 0.5)
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    elif kind == "fp8 tensor":
        tensors |= {f"{NAME}.weight_scale": torch.tensor(0.5), f"{NAME}.input_scale": torch.tensor(0.1)}
        config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    elif kind == "fbgemm":
        tensors[f"{NAME}.weight_scale"] = each
        config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    else:
        strategy = kind.partition(" ")[2]
        tensors[f"{NAME}.weight_scale"] = each if strategy == "channel" else torch.tensor([0.5])
        config = compressed("float-quantized", num_bits=8, strategy=strategy)
    model = fp8.load_model(folder(tmp_path, tensors, config))
    assert not model.skipped, model.report()
    assert torch.equal(model.layers[NAME].dequantize(), weight.double() * 0.5)
    assert torch.equal(fp8.read_layer(tmp_path).dequantize(), weight.double() * 0.5)


def test_what_fp8_configs_leave_out_is_skipped(tmp_path):
    tensors = {
        "lm_head.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "lm_head.weight_scale": torch.ones(()),
        "a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(()),
    }  # fmt: skip
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    model = fp8.load_model(folder(tmp_path, tensors, config))
    assert list(model.layers) == ["a"] and "modules_to_not_convert" in model.skipped["lm_head"]
    model = fp8.load_model(folder(tmp_path, tensors, config | {"weight_block_size": [64, 64]}))
    assert "64" in model.skipped["a"] or "weight_block_size" in model.skipped["a"]
