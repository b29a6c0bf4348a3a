"""The vLLM plug-in without vLLM: what is taken and why not, tensors to packed weights, products, kernels to compile."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from terrazzo.integrations import vllm as plugin
from terrazzo.integrations.engines import kernels, weights
from terrazzo.integrations.engines.engine import Engine
from terrazzo.integrations.engines.settings import Settings
from terrazzo.integrations.engines.weights import Stored, Wanted
from terrazzo.integrations.vllm.names import CHECKER
from terrazzo.lowering.errors import ArgumentError, BundleError, CompileError
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a8, w4a16
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.weight_only import reference

from tests.integrations import vllm_double, vllm_folders
from tests.ops.checkpoints.checkpoint_folders import stored, words

H100 = Target.parse("nvidia/nvidia-h100")
LAYER = Wanted(
    n=128, k=256, full_k=256, group_size=64, zero_points=False, act_order=False, dtype="float16", activations="16",
    weight="uint4b8",
)  # fmt: skip
weights.register_operators()


# -- what is taken -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", [32, 64, 128, 256, 96])
@pytest.mark.parametrize("activations", ["16", "int8"])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
def test_usual_layers_are_taken(group, activations, target):
    k = 288 if group == 96 else 256
    wanted = replace(LAYER, k=k, full_k=k, group_size=group, activations=activations)
    assert wanted.refusal(Target.parse(target)) is None and wanted.refusal(None) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(weight="uint8b128"), "4-bit integers"),
        (dict(weight="uint4"), "without zero points"),
        (dict(dtype="float32"), "float16 and bfloat16"),
        (dict(activations="int4"), "there are int8 and e4m3"),
        (dict(act_order=True), "act-order"),
        (dict(group_size=16), "groups of 16"),
        (dict(group_size=80), "groups of 80"),
        (dict(activations="e4m3", zero_points=True, weight="uint4"), "zero points"),
        (dict(experts=8, n=96), "multiples of 64"),
    ],
)
def test_others_are_left_to_vllm_with_a_reason(change, said):
    assert said in replace(LAYER, **change).refusal(H100)


@pytest.mark.parametrize(
    ("activations", "experts", "target", "taken"),
    [("e4m3", 0, "sm_80", False), ("e4m3", 0, "sm_89", True), ("e4m3", 0, "sm_90a", True),
     ("16", 8, "sm_80", True), ("16", 8, "sm_90a", True), ("int8", 8, "sm_89", True), ("e4m3", 8, "sm_86", False)],
)  # fmt: skip
def test_instructions_decide(activations, experts, target, taken):
    reason = replace(LAYER, activations=activations, experts=experts).refusal(Target.parse(target))
    assert (reason is None) == taken and (taken or "has no" in reason)


def test_settings_are_read_and_others_refused():
    assert Settings.of(None) == Settings.of({}) == Settings() == Settings.of(SimpleNamespace())
    assert Settings.of({"terrazzo": {"requantize": True, "workers": 3}}) == Settings(requantize=True, workers=3)
    for bad, said in (
        ({"requantise": True}, "requantise"),
        ({"requantize": 1}, "true or false"),
        ({"workers": 0}, "a number of processes"),
        ({"workers": True}, "a number of processes"),
        ({"bundle": 3}, "a path"),
        ({"strict": True}, "needs a bundle"),
        ("on", "must be an object"),
    ):
        with pytest.raises(ArgumentError, match=said):
            Settings.of({"terrazzo": bad})


# -- registering -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("version", "module"),
    [("0.25.1", None), ("0.26.0", "v0_26"), ("0.27.1rc1", "v0_26"), ("0.28.0", "v0_33"), ("0.33.0", "v0_33"),
     ("0.34.0", None), ("1.0", None)],
)  # fmt: skip
def test_releases_have_modules(version, module):
    assert plugin.module_of(version) == module


def test_without_vllm_nothing_happens(monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda name: None)
    monkeypatch.setattr(plugin, "_registered", [])
    plugin.register()
    assert plugin._registered == [] and "terrazzo.integrations.vllm.experts" not in sys.modules


def test_an_unknown_release_is_said(monkeypatch, caplog):
    monkeypatch.setattr(plugin, "_version", lambda name: "0.40.0")
    monkeypatch.setattr(plugin, "_registered", [])
    with caplog.at_level(logging.WARNING, "vllm.terrazzo"):
        plugin.register()
    assert "does not know vLLM 0.40.0" in caplog.text and plugin._registered == []


@pytest.fixture
def engine(monkeypatch):
    return vllm_double.install(monkeypatch)


@pytest.fixture
def linear(engine):
    return importlib.import_module("terrazzo.integrations.vllm.linear")


@pytest.fixture
def kernel(linear):
    """Of a release whose layers may have act-order."""
    return type("TerrazzoLinearKernel", (linear.LinearKernel,), {"act_order": staticmethod(lambda c: c.has_g_idx)})


def test_the_kernel_stands_first_and_once(engine, linear, kernel):
    linear.register(kernel)
    again = type("TerrazzoLinearKernel", (linear.LinearKernel,), {})
    linear.register(again)
    assert engine.kernels[vllm_double.PlatformEnum.CUDA] == [kernel, vllm_double.Machete]
    assert engine.kernels[vllm_double.PlatformEnum.CPU] == [kernel]


def config_of(n: int, k: int, weight: str, **more) -> vllm_double.MPLinearLayerConfig:
    facts = dict(act_type=torch.float16, group_size=64, zero_points=weight == "uint4") | more
    return vllm_double.MPLinearLayerConfig((k, n), (k, n), weight, **facts)


def test_vllm_hears_why_a_layer_is_declined(engine, kernel):
    assert kernel.can_implement(config_of(64, 256, "uint4b8")) == (True, None)
    assert "act-order" in kernel.can_implement(config_of(64, 256, "uint4b8", has_g_idx=True))[1]
    engine.config = vllm_double.engine_config(linear=False)
    assert "is false" in kernel.can_implement(config_of(64, 256, "uint4b8"))[1]
    engine.config = vllm_double.engine_config(cpu=False)
    assert "NVIDIA" in kernel.can_implement(config_of(64, 256, "uint4b8"))[1]
    engine.config = vllm_double.engine_config(nonsense=1)
    with pytest.raises(ArgumentError, match="nonsense"):
        kernel.can_implement(config_of(64, 256, "uint4b8"))


def loaded(convention: str, seed: int = 0) -> tuple[torch.nn.Module, dict, torch.Tensor]:
    """(layer as vLLM's loader leaves it, names and config of the kernel, float64 weight)."""
    tensors, weight = stored(convention, seed, 64, 256, 64)
    make, layer = vllm_double.parameter, torch.nn.Module()
    if convention in ("pack", "pack_asym", "w4a8_pack"):
        held = dict(weight_packed=make(tensors["weight_packed"], 0, 1), weight_scale=make(tensors["weight_scale"]))
        if "weight_zero_point" in tensors:
            held["weight_zero_point"] = make(tensors["weight_zero_point"], 0, 0)
        names = ("weight_packed", "weight_scale", "weight_zero_point")
        facts = dict(weight="uint4" if convention == "pack_asym" else "uint4b8")
    elif convention == "int":
        both = make(tensors["weight"], 0)
        held = dict(weight=both, weight_packed=both, weight_scale=make(tensors["weight_scale"]))
        names, facts = ("weight_packed", "weight_scale", None), dict(weight="int4")
    elif convention == "gptq_sym":
        held = dict(qweight=make(tensors["qweight"], 1, 0), scales=make(tensors["scales"], 1))
        names, facts = ("qweight", "scales", "qzeros"), dict(weight="uint4b8")
    else:  # AWQ, whose words vLLM has turned before
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        plain = lambda t: torch.stack([(t >> (4 * at)) & 15 for at in order], -1).flatten(-2)  # [.., columns]
        held = dict(qweight=make(words(plain(tensors["qweight"]).T.contiguous()).T.contiguous(), 1, 0))
        held |= dict(scales=make(tensors["scales"], 1), qzeros=make(words(plain(tensors["qzeros"])), 1, 1))
        names, facts = ("qweight", "scales", "qzeros"), dict(weight="uint4")
    for name, each in held.items():
        layer.register_parameter(name, each)
    return layer, dict(names=names, **facts), weight


@pytest.mark.parametrize("convention", ["pack", "pack_asym", "gptq_sym", "awq"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_loaded_layer_multiplies_as_its_values_say(kernel, convention, traced):
    layer, facts, weight = loaded(convention)
    made = kernel(config_of(64, 256, facts["weight"]), *facts["names"])
    made.process_weights_after_loading(layer)
    x = torch.randn(5, 256, dtype=torch.float16)
    bias = torch.randn(64, dtype=torch.float16)
    call = lambda x: made.apply_weights(layer, x, bias)
    y = (torch.compile(call, fullgraph=True, backend="eager") if traced else call)(x)
    exact = x.double() @ weight.T + bias.double()
    assert (y.double() - exact).abs().max() < 2e-3 * exact.abs().max()
    assert torch.equal(y, reference.forward(x, _packed(made, layer), bias))


def _packed(made, layer):
    _, n, k, group, scale_dtype, symmetric, layout, target = made.facts
    tensors = getattr(layer, made.w_q_name), getattr(layer, made.w_s_name)
    return w4a16.PackedWeight(*tensors, n, k, group, scale_dtype, symmetric, layout, None, None, target or None)


@pytest.mark.parametrize(("convention", "activations"), [("int", "int"), ("w4a8_pack", "int"), ("w4a8_pack", "float")])
def test_layers_with_bytes_run_on_bytes(kernel, convention, activations):
    """int-quantized says so by its type; pack-quantized beside the layer, where vLLM asks for 16 bits."""
    layer, facts, weight = loaded(convention)
    made = kernel(config_of(64, 256, facts["weight"]), *facts["names"])
    if convention == "w4a8_pack":
        layer._humming_input_quant_config = dict(num_bits=8, type=activations, strategy="token")
    made.process_weights_after_loading(layer)
    assert made.facts[0] == ("w4a8" if activations == "int" else "w4a8_fp8")
    x = torch.randn(5, 256, dtype=torch.float16)
    y = made.apply_weights(layer, x)
    exact = x.double() @ weight.T
    assert (y.double() - exact).norm() / exact.norm() < (0.02 if activations == "int" else 0.05)
    assert "weight" not in dict(layer.named_parameters()) or layer.weight is layer.weight_packed


def test_scales_that_two_levels_cannot_hold_leave_the_weights_as_they_are(engine, kernel, caplog):
    layer, facts, weight = loaded("pack")
    layer._humming_input_quant_config = dict(num_bits=8, type="int", strategy="token")
    made = kernel(config_of(64, 256, facts["weight"]), *facts["names"])
    with caplog.at_level(logging.WARNING, "vllm.terrazzo"):
        made.process_weights_after_loading(layer)
    assert made.facts[0] == "w4a16" and "run in w4a16" in caplog.text
    engine.config = vllm_double.engine_config(requantize=True)
    layer, facts, weight = loaded("pack")
    layer._humming_input_quant_config = dict(num_bits=8, type="int", strategy="token")
    made = kernel(config_of(64, 256, facts["weight"]), *facts["names"])
    made.process_weights_after_loading(layer)
    assert made.facts[0] == "w4a8"
    x = torch.randn(5, 256, dtype=torch.float16)
    exact = x.double() @ weight.T
    assert (made.apply_weights(layer, x).double() - exact).norm() / exact.norm() < 0.1


def test_kernels_are_compiled_for_the_activations_that_a_config_states(engine, linear):
    scheme = lambda kind: {"input_activations": kind and SimpleNamespace(num_bits=8, type=kind)}
    for schemes, expected in (
        ({}, "16"),
        ({"Linear": scheme(None)}, "16"),
        ({"Linear": scheme("int")}, "int8"),
        ({"Linear": scheme("float"), "RoutedExperts": scheme("float")}, "e4m3"),
        ({"Linear": scheme("int"), "re:.*down": scheme(None)}, "16"),
        ({"Linear": scheme("int"), "re:.*down": scheme("float")}, "16"),
    ):
        engine.config.quant_config = SimpleNamespace(target_scheme_map=schemes)
        assert linear.VLLM.likely(LAYER).activations == expected
    engine.config = None
    assert linear.VLLM.likely(LAYER) == LAYER


def test_activations_of_another_kind_stay_in_16_bits(kernel):
    layer, facts, _ = loaded("pack")
    layer._humming_input_quant_config = dict(num_bits=8, type="int", strategy="group")
    made = kernel(config_of(64, 256, facts["weight"]), *facts["names"])
    made.process_weights_after_loading(layer)
    assert made.facts[0] == "w4a16"


def test_words_along_the_other_side_are_refused(kernel):
    layer, facts, _ = loaded("pack")
    layer.weight_packed.packed_dim = 0
    made = kernel(config_of(64, 256, facts["weight"]), *facts["names"])
    with pytest.raises(ArgumentError, match="packed along input features"):
        made.process_weights_after_loading(layer)


@pytest.fixture
def floats(engine):
    return importlib.import_module("terrazzo.integrations.vllm.floats")


def test_mxfp4_layers_multiply_as_their_values_say(floats):
    torch.manual_seed(0)
    halves, scales = (
        torch.randint(0, 256, (64, 128), dtype=torch.uint8),
        torch.randint(118, 124, (64, 8), dtype=torch.uint8),
    )
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = vllm_double.parameter(halves), vllm_double.parameter(scales)
    layer.params_dtype = torch.bfloat16
    made = floats.TerrazzoMxFp4LinearKernel(SimpleNamespace(activation_quant_key=None))
    made.process_weights_after_loading(layer)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack([halves & 15, halves >> 4], -1).flatten(1).long()
    weight = table[codes & 7] * (1 - 2 * (codes >> 3)) * (2.0 ** (scales.double() - 127)).repeat_interleave(32, 1)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    exact = x.double() @ weight.T
    assert (made.apply_weights(layer, x).double() - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_weights_multiply_as_their_values_say(floats, blocks):
    torch.manual_seed(0)
    codes = torch.randn(128, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(*((1, 2) if blocks else (128, 1))) + 0.5
    layer = torch.nn.Module()
    layer.weight = vllm_double.parameter(codes if blocks else codes.t())
    setattr(layer, "weight_scale_inv" if blocks else "weight_scale", vllm_double.parameter(scales))
    layer.orig_dtype = torch.bfloat16
    made = floats.TerrazzoFp8WeightLinearKernel(SimpleNamespace())
    made.process_weights_after_loading(layer)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1) if blocks else scales
    x, bias = torch.randn(5, 256, dtype=torch.bfloat16), torch.randn(128, dtype=torch.bfloat16)
    exact = x.double() @ (codes.double() * spread.double()).T + bias.double()
    assert (made.apply_weights(layer, x, bias).double() - exact).abs().max() < 0.01 * exact.abs().max()


def test_float_kernels_stand_first_and_say_why_not(engine, floats):
    known = sys.modules["vllm.model_executor.kernels.linear"]
    for _ in range(2):
        floats.register()
    for found in (known._POSSIBLE_MXFP4_KERNELS, known._POSSIBLE_WFP8A16_KERNELS):
        assert len(found[vllm_double.PlatformEnum.CUDA]) == 2
        assert found[vllm_double.PlatformEnum.CUDA][1] is vllm_double.Machete
    assert floats.TerrazzoMxFp4LinearKernel.is_supported() == (True, None)
    engine.config = vllm_double.engine_config(cpu=False)
    assert "NVIDIA" in floats.TerrazzoMxFp4LinearKernel.is_supported()[1]


# -- experts -----------------------------------------------------------------------------------------------------------
def stack(convention: str, experts: int = 3) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made = [stored(convention, seed, 128, 256, 64) for seed in range(experts)]
    names = made[0][0]
    return {name: torch.stack([tensors[name] for tensors, _ in made]) for name in names}, torch.stack(
        [weight for _, weight in made]
    )


@pytest.mark.parametrize("convention", ["awq", "gptq_sym", "pack", "pack_asym", "int", "w4a8_pack"])
def test_stacked_experts_are_those_that_are_packed_one_by_one(convention):
    t, weight = stack(convention)
    eight = convention in ("int", "w4a8_pack")
    if convention == "awq":
        stored_ = weights.from_awq(t["qweight"], t["scales"], t["qzeros"])
        alone = [w4a16.from_awq(t["qweight"][e], t["qzeros"][e], t["scales"][e]) for e in range(3)]
    elif convention == "gptq_sym":
        stored_ = weights.from_gptq(t["qweight"], t["scales"])
        alone = [w4a16.from_gptq(t["qweight"][e], None, t["scales"][e]) for e in range(3)]
    else:
        codes = t["weight"] if convention == "int" else t["weight_packed"]
        zeros = t.get("weight_zero_point")
        flat = lambda tensor: None if tensor is None else tensor.flatten(0, 1)
        stored_ = Stored(flat(codes), flat(t["weight_scale"]), flat(zeros))
        read = w4a8.from_compressed_tensors if eight else w4a16.from_compressed_tensors
        alone = [read(codes[e], t["weight_scale"][e], None if zeros is None else zeros[e]) for e in range(3)]
    wanted = replace(
        LAYER, experts=3, zero_points=convention in ("awq", "pack_asym"), activations="int8" if eight else "16",
        weight="uint4" if convention in ("awq", "pack_asym") else "uint4b8",
    )  # fmt: skip
    grouped, reason = weights.pack_experts(stored_, wanted)
    assert reason == ""
    grouped.check()
    expected = GroupedWeight.stack(alone)
    for mine, theirs in zip(weights.tensors_of(grouped.stacked), weights.tensors_of(expected.stacked)):
        assert torch.equal(mine, theirs)
    assert torch.allclose(grouped[1].dequantize().double(), weight[1], rtol=2e-3, atol=1e-3)


# -- kernels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activations", ["16", "int8", "e4m3"])
def test_every_step_up_to_the_largest_has_its_kernel(activations):
    wanted = replace(LAYER, n=1024, k=1024, full_k=1024, activations=activations, group_size=128)
    found = set(kernels.requests_of(wanted, True, False, 300, H100))
    for m in (1, 2, 3, 7, 16, 17, 33, 64, 100, 255, 300):
        if activations == "16":
            facts = dict(group_size=128, symmetric=True, scale_dtype="float16")
            needed = w4a16.kernel_requests(1024, 1024, m=m, target=H100, **facts)
        else:
            kind = "e4m3" if activations == "e4m3" else "auto"
            needed = w4a8.kernel_requests(1024, 1024, m=m, target=H100, group_size=128, dequantization=kind)
        assert set(needed) <= found, m


@pytest.mark.parametrize("convention", ["pack", "pack_asym", "int"])
def test_a_packed_weight_asks_for_the_kernels_that_its_layer_did(convention):
    """Those that are compiled while weights are read are those that the layer waits for."""
    tensors, _ = stored(convention, 0, 128, 256, 64)
    zeros = tensors.get("weight_zero_point")
    codes = tensors["weight" if convention == "int" else "weight_packed"]
    wanted = replace(
        LAYER, zero_points=zeros is not None, activations="int8" if convention == "int" else "16",
        weight={"pack": "uint4b8", "pack_asym": "uint4", "int": "int4"}[convention],
    )  # fmt: skip
    packed, reason = weights.pack(Stored(codes, tensors["weight_scale"], zeros), wanted)
    assert reason == ""
    before = kernels.requests_of(wanted, zeros is None, False, 64, H100)
    assert kernels.requests_of_packed(packed, "float16", False, 64, H100) == before
    biased = kernels.requests_of_packed(packed, "float16", True, 64, H100)
    assert biased != before and len(biased) == len(before)


def test_experts_have_kernels_and_quantizers():
    wanted = replace(LAYER, experts=8, activations="int8", group_size=64)
    names = {request.name for request in kernels.requests_of(wanted, False, False, 64, H100, 2)}
    assert names == {"w4a8.grouped", "w4a8.quantize_rows"}


class FakePool:
    """Compiles when it is told to."""

    most = 2

    def __init__(self, done, workers=None):
        self.done, self.todo, self.closed = done, [], False

    def submit(self, request):
        self.todo.append(request)

    def close(self):
        self.closed = True


def test_kernels_are_compiled_once_and_waited_for(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(kernels, "CompilePool", FakePool)
    monkeypatch.setattr(kernels, "is_ready", lambda request: False)
    found = kernels.requests_of(LAYER, True, False, 8, H100)
    compiling = kernels.Compiling(Settings())
    with caplog.at_level(logging.INFO, "terrazzo"):
        compiling.want(found)
        compiling.want(found)
    assert compiling.pool.todo == found and caplog.text.count("compiling") == 1
    pool = compiling.pool
    for request in found[1:]:
        pool.done(request, tmp_path)
    pool.done(found[0], CompileError("no such instruction"))
    with pytest.raises(CompileError, match="no such instruction"):
        compiling.wait(found)
    compiling.wait(found[1:])
    assert pool.closed and compiling.pool is None


def test_without_a_compiler_only_what_is_compiled_is_taken(engine, linear, kernel, monkeypatch, caplog):
    monkeypatch.setattr(linear.VLLM, "target", lambda: H100)
    monkeypatch.setattr(kernels, "CompilePool", FakePool)
    monkeypatch.setattr(kernels, "compiler", lambda: SimpleNamespace(missing=("tilelang",)))
    ready = False
    monkeypatch.setattr(kernels, "is_ready", lambda request: ready)
    with caplog.at_level(logging.WARNING, "vllm.terrazzo"):
        taken, reason = kernel.can_implement(config_of(64, 256, "uint4b8"))
    assert not taken and "tilelang is missing" in reason and "pip install" in reason
    assert "vLLM's own kernels" in caplog.text
    ready = True
    assert kernel.can_implement(config_of(64, 256, "uint4b8")) == (True, None)


class Served(Engine):
    """An engine on an H100 that captures steps of 4 and 8 tokens."""

    settings, most_tokens, captured = lambda self: Settings(), lambda self: 16, lambda self: [4, 8]
    target, unserved = lambda self: H100, lambda self, how: None


def test_experts_are_launched_once_for_each_captured_size(monkeypatch):
    monkeypatch.setattr(kernels, "is_ready", lambda request: True)
    engine, launched, asked, waited = Served("it", logging.getLogger("terrazzo")), [], [], []
    monkeypatch.setattr(kernels.Compiling, "wait", lambda self, requests: waited.extend(requests))
    tensors, _ = stack("awq")
    stored = weights.from_awq(*(tensors[name] for name in ("qweight", "scales", "qzeros")))
    asked_for = replace(LAYER, experts=3, zero_points=True, weight="uint4")
    grouped, gate = weights.pack_experts(stored, asked_for)[0], lambda name: asked.append(name) or []
    for _ in range(2):
        facts = ("float16", False, 2)
        engine.hold_experts([grouped, grouped], Settings(), gate, launched.append, facts)
    assert sorted(launched) == [1, 4, 8] and asked == ["w4a16"] * 4
    wanted = kernels.requests_of_packed(grouped.stacked, "float16", False, 16, H100, 3, 2)
    assert wanted and set(waited) == set(wanted)


def test_strict_compiles_nothing(monkeypatch):
    monkeypatch.setattr(kernels, "is_ready", lambda request: False)
    compiling = kernels.Compiling(Settings())
    compiling.settings = Settings(strict=True, bundle="there")
    with pytest.raises(BundleError, match="not in bundle there"):
        compiling.want(kernels.requests_of(LAYER, True, False, 8, H100))
    assert compiling.pool is None


# -- serve-check -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "name", "operator", "leaves"),
    [
        ("tiny-llama", "awq", "w4a16", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("tiny-llama", "w4a8", "w4a8", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("tiny-mixtral", "w4a16", "w4a16", {"qkv_proj", "o_proj", "w13", "w2"}),
        ("tiny-qwen3-moe", "gptq", "w4a16", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
    ],
)
def test_a_folder_says_what_would_run(tmp_path, shape, name, operator, leaves):
    packed, plain = vllm_folders.write(tmp_path, shape, name)
    rows = CHECKER.check(packed, H100)
    assert {row.leaf for row in rows} == leaves and {row.operator for row in rows} == {operator}
    assert [row.count for row in rows] == [2] * 4
    assert all(row.operator for row in CHECKER.check(packed, Target.parse("sm_80"))), "experts run on mma.sync, too"
    found = [(row.count, row.operator, "not quantized" in row.reason) for row in CHECKER.check(plain, H100)]
    assert found == [(2, "", True)] * 4
