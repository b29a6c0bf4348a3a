"""Loaders of the operator families: one implementation, the same right values, devices as torch names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_folders import AWQ, DYNAMIC, KINDS, LAYER, compressed, stored, tensors, write
from safetensors import safe_open
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import moe, w4a8, w4a16, w4ax, weights
from terrazzo.ops.attention import KVCache, pack_cache
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.kv import get_format
from terrazzo.ops.w4a8 import fp8

QSERVE = Path(__file__).parents[2] / "data" / "w4a8"


@pytest.mark.parametrize("kind", KINDS)
def test_every_convention_is_read_as_it_means(tmp_path, kind):
    convention, config, family = KINDS[kind]
    held, weight = stored(convention)
    names = [LAYER, LAYER.replace("down", "up")]
    folder = write(tmp_path, {f"{name}.{leaf}": t.clone() for name in names for leaf, t in held.items()}, config)
    wanted = weight.float() if family is w4a16 else weight
    model = family.load_model(folder)
    assert list(model.layers) == names and not model.skipped
    for made in (*model.layers.values(), family.load_layer(folder, LAYER, target="sm_90a")):
        found = made.dequantize("post").float() if family is w4a16 else made.dequantize()
        assert isinstance(made, family.PackedWeight) and torch.equal(found, wanted)
    canonical = family.read_layer(folder, LAYER)
    assert isinstance(canonical, family.QuantizedWeight)
    assert [layer.name for layer in family.iter_layers(folder, select="up_proj", packed=False)] == names[1:]


def qserve(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with safe_open(QSERVE / f"{name}.safetensors", framework="pt") as file:
        held = {key: file.get_tensor(key) for key in file.keys()}
    return tuple({k.removeprefix(p): t for k, t in held.items() if k.startswith(p)} for p in ("layer.", "expected."))


@pytest.mark.parametrize("name", ["qserve_g128", "qserve_g64", "qserve_channel"])
@pytest.mark.parametrize("config", [None, {"quant_method": "qoq", "wbits": 4}, {"quant_method": "qserve", "w_bit": 4}])
def test_folders_of_qserve(tmp_path, name, config):
    held, expected = qserve(name)
    folder = write(tmp_path, {f"{LAYER}.{leaf}": t for leaf, t in held.items()} | {"norm": torch.ones(3)}, config)
    model = w4a8.load_model(folder)
    assert list(model.layers) == [LAYER] and list(model.skipped) == ["norm"]
    assert torch.equal(model.layers[LAYER].dequantize(), expected["weight"])
    assert torch.equal(w4a8.load_layer(folder, format="qserve").dequantize(), expected["weight"])
    assert w4a16.load_model(folder).skipped[LAYER] == "stored as qserve, which w4a16 does not read"
    wrong = {"quant_method": "qserve", "w_bit": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps({"quantization_config": wrong}))
    assert ("group_size = 32" in w4a8.load_model(folder).skipped.get(LAYER, "")) == (name != "qserve_channel")


def test_free_group_scales_are_fitted_by_load_model_too(tmp_path):
    folder = write(tmp_path, tensors("pack"), compressed(DYNAMIC))
    assert "pass requantize=True" in w4a8.load_model(folder).skipped[LAYER]
    with pytest.raises(ArgumentError, match="pass requantize=True"):
        w4a8.load_layer(folder)
    assert LAYER in w4a8.load_model(folder, requantize=True).layers


def test_act_order_of_compressed_tensors_is_w4a16s(tmp_path):
    held = tensors("pack") | {f"{LAYER}.weight_g_idx": torch.randperm(256).int() // 128}
    folder = write(tmp_path, held, compressed(actorder="group"))
    assert w4a16.load_layer(folder).perm is not None
    for family in (w4a8, fp8):
        assert "actorder" in family.load_model(folder).skipped[LAYER]
    unset = held | {f"{LAYER}.weight_g_idx": torch.full((256,), -1, dtype=torch.int32)}
    assert LAYER in fp8.load_model(write(tmp_path / "unset", unset, compressed())).layers


def test_strict_raises_for_what_cannot_be_read_and_passes_what_is_left_out(tmp_path):
    held = tensors("pack", "a", "lm_head") | {"a.input_scale": torch.ones(1)}
    folder = write(tmp_path, held, compressed())
    assert not w4a16.load_model(folder).layers
    assert w4a16.load_model(folder, select="lm_head", strict=True).skipped == {"lm_head": "ignore lists 'lm_head'"}
    with pytest.raises(ArgumentError, match="'input_scale' is not read"):
        w4a16.load_model(folder, strict=True)
    with pytest.raises(ArgumentError, match="ignore lists 'lm_head'"):
        w4a16.load_layer(folder, "lm_head")


def as_cpu(monkeypatch, *meant) -> None:
    """Where torch sees no GPU, some names of devices mean the CPU."""
    real = weights.device_of
    cpu = lambda device: any(type(device) is type(other) and device == other for other in meant)
    monkeypatch.setattr(weights, "device_of", lambda d: torch.device("cpu") if cpu(d) else real(d))


@pytest.mark.parametrize("device", [0, torch.device("cuda"), "cuda", torch.device("cuda", 0), "cuda:0"])
def test_devices_as_torch_names_them(tmp_path, monkeypatch, device):
    as_cpu(monkeypatch, device)
    for kind, (convention, config, family) in KINDS.items():
        folder = write(tmp_path / kind, tensors(convention), config)
        assert list(family.load_model(folder, device=device).layers) == [LAYER]
        packed = family.load_layer(folder, device=device)
        packed.to(device).save(tmp_path / "w.safetensors")
        assert type(packed).load(tmp_path / "w.safetensors", device).device.type == "cpu"
        assert family.read_layer(folder, device=device).to(device).codes.device.type == "cpu"
    stacked = GroupedWeight.stack([packed] * 2).to(device)
    stacked.save(tmp_path / "e.safetensors")
    assert len(GroupedWeight.load(type(packed), tmp_path / "e.safetensors", device)) == 2
    w4ax.ActivationStatistics.empty(8, device=device).save(tmp_path / "s.safetensors")
    assert w4ax.ActivationStatistics.load(tmp_path / "s.safetensors", device).k == 8
    cache = KVCache("int4", "int4", kv_heads=1, head_dim=64, pages=2, device=device)
    assert cache.pages.device.type == "cpu"
    assert pack_cache(*torch.randn(2, 1, 1, 128, 64), "int4", "int4").to(device).pages.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where torch sees no GPU")
@pytest.mark.parametrize("device", [0, 1, 2**70, -1, True, "cuda:7", 0.0, None, [0], "", torch.float16, 1000])
def test_devices_that_are_not_there_are_refused_by_name(tmp_path, device):
    folder = write(tmp_path, tensors("awq"), AWQ)
    for call in (w4a16.load_model, w4a16.load_layer, w4a8.load_model, fp8.load_layer):
        with pytest.raises(ArgumentError, match="device = "):
            call(folder, device=device)


def test_the_index_of_a_gpu_means_that_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert weights.device_of(1) == torch.device("cuda", 1) and weights.device_of("cuda").index is None
    for beyond in (2, "cuda:2", torch.device("cuda", 2)):
        with pytest.raises(ArgumentError, match="device = 'cuda:2': torch sees 2 CUDA devices"):
            weights.device_of(beyond)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert weights.device_name(torch.device("cuda")) == "cuda:1" and weights.device_name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 64), (2, 64)])
def test_scales_of_a_whole_tensor_or_head_are_repeated(shape):
    """k_scale and v_scale of a checkpoint's layer are [] or [1]."""
    scales = torch.rand(shape) * 0.1 + 0.05
    x = torch.randn(2, 1, 2, 128, 64)
    made = pack_cache(*x, "fp8", "int8_static", k_static=scales, v_static=scales.half())
    whole = scales.expand(2, 64).contiguous() if scales.numel() > 1 else scales.reshape(()).expand(2, 64).contiguous()
    full = pack_cache(*x, "fp8", "int8_static", k_static=whole, v_static=whole.half().float())
    assert torch.equal(made.pages, full.pages) and torch.equal(made.k_static, whole)
    made.check()
    made.check_values()
    sizes = dict(kv_heads=2, head_dim=64, pages=4, layers=3, device="cpu")
    cache = KVCache("fp8", "fp8", **sizes, k_static=torch.rand(3, 1, 1) + 0.1, v_static=torch.tensor(0.5))
    assert [tuple(s.shape) for s in cache.static] == [(3, 2, 64)] * 2
    for wrong in (torch.ones(64), torch.ones(2), torch.ones(3, 64), torch.ones(2, 1, 1)):
        with pytest.raises(ArgumentError, match="k_static = .*must be float"):
            KVCache("fp8", "fp8", **sizes, k_static=wrong, v_static=torch.tensor(0.5))


ODD = {
    "sparse": lambda: torch.ones(64, 128).to_sparse(),
    "csr": lambda: torch.eye(64).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)], layout=torch.jagged),
    "meta": lambda: torch.ones(64, 128, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(64, 128), 0.1, 0, torch.qint8),
}
if torch.backends.mkldnn.is_available():
    ODD["onednn"] = lambda: torch.ones(64, 128).to_mkldnn()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_other_layouts_are_refused_by_name(kind):
    odd = ODD[kind]()
    good, statistics = torch.ones(64, 128), w4ax.ActivationStatistics.empty(128)
    codes, scales = torch.ones(64, 128, dtype=torch.uint8), torch.ones(64, 1).half()
    calls = [
        *(lambda q=family.quantize: q(odd) for family in (w4a16, w4a8, fp8)),
        lambda: w4a16.pack(odd, scales),
        lambda: w4a16.pack(codes, odd),
        lambda: w4a16.pack(codes, scales, bias=odd),
        lambda: w4a16.quantize(good, bias=odd),
        lambda: w4a8.quantize(good, smooth=odd),
        lambda: w4a8.search_smooth(odd, good),
        lambda: statistics.observe(odd),
        lambda: w4ax.plan_blocks(odd),
        lambda: KVCache("fp8", "int4", kv_heads=1, head_dim=64, pages=2, device="cpu", k_static=odd),
        lambda: pack_cache(odd, odd, "int4", "int4"),
        *([] if kind == "meta" else [lambda: moe.sort_by_expert(odd, 4)]),
    ]
    for read, names in (
        (w4a16.read_awq, ("qweight", "qzeros", "scales")),
        (w4a16.read_gptq, ("qweight", "qzeros", "scales", "g_idx")),
        (w4a16.read_compressed_tensors, ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")),
        (w4a8.read_compressed_tensors, ("weight", "weight_scale", "weight_zero_point")),
    ):
        convention = {"read_awq": "awq", "read_gptq": "gptq_sym"}.get(read.__name__)
        held = stored(convention or ("pack_asym" if "weight_packed" in names else "int"))[0]
        calls += [lambda r=read, h=held | {name: odd}: r(**h) for name in names]
    for call in calls:
        with pytest.raises(ArgumentError):
            call()


def test_what_is_no_weight_format_or_count_is_refused():
    for family in (w4a16, w4a8, w4ax):
        for wrong in (5, None, "w", torch.ones(4, 4)):
            with pytest.raises(ArgumentError, match="weight = "):
                family.dequantize(wrong)
    with pytest.raises(ArgumentError, match="role = 'x': must be 'keys' or 'values'"):
        get_format("int4", "x")
    for name in (5, None, ["int4"], "int3"):
        with pytest.raises(ArgumentError, match="k_format = "):
            get_format(name)
    for steps in (2**31, 10**30, 0, 1.5, True):
        with pytest.raises(ArgumentError, match="steps = "):
            w4a8.search_smooth(torch.ones(4, 128), torch.ones(8, 128), steps=steps)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_sym", "pack", "pack_asym", "w4a8_int", "w4a8_pack", "fp8"])
def test_groups_of_96_are_cut_into_32_and_16_is_refused_by_name(tmp_path, kind):
    convention, config, family = KINDS[kind]
    for group in (96, 16):
        held, weight = stored(convention, k=288, group=group)
        stated = json.loads(json.dumps(config).replace('"group_size": 128', f'"group_size": {group}'))
        folder = write(tmp_path / str(group), {f"{LAYER}.{leaf}": t for leaf, t in held.items()}, stated)
        model = family.load_model(folder)
        if group == 16:
            assert "group_size = 16" in model.skipped[LAYER] and "NVFP4" in model.skipped[LAYER]
            continue
        made = model.layers[LAYER]
        found = made.dequantize("post") if family is w4a16 else made.dequantize()
        assert made.group_size == 32 and torch.equal(found.double(), weight)
