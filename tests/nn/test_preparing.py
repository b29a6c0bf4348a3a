"""Kernels of a model's layers, named and compiled before the first call."""

from __future__ import annotations

import pytest
import torch
from small_model import SmallModel
from terrazzo import nn as tnn
from terrazzo import prepare
from terrazzo.lowering import Target, parallel
from terrazzo.lowering.errors import ArgumentError, CompileError
from terrazzo.nn.dense import Dense
from terrazzo.nn.preparing import kernel_requests
from terrazzo.ops import w4a8, w4a16, w4ax, w8a8
from terrazzo.ops.w4a8 import activations
from terrazzo.ops.w4a8.w8a8 import op as w8a8_op

AT = {"target": "sm_90a"}


def layers() -> torch.nn.Sequential:
    make = lambda n, k, form, **more: tnn.Linear.from_float(torch.randn(n, k), form, **more)
    return torch.nn.Sequential(
        make(128, 256, "w4a16-g64", bias=torch.randn(128)), make(128, 256, "w4a16-g64", bias=torch.randn(128)),
        torch.nn.ReLU(), make(256, 128, "w4a8-g64"),
    )  # fmt: skip


def test_they_are_those_that_the_operators_name():
    facts = dict(group_size=64, symmetric=False, scale_dtype="float16")
    wanted = set(w4a16.kernel_requests(128, 256, m=[1, 64], bias=True, **facts, **AT))
    wanted |= set(w4a8.kernel_requests(256, 128, group_size=64, m=[1, 64], **AT))
    found = kernel_requests(layers(), [1, 64], **AT)
    assert wanted <= set(found) and len(found) == len(set(found))
    assert {it.name for it in set(found) - wanted} == {"w4a8.quantize_rows"}


@pytest.mark.parametrize(
    ("form", "options", "facts"),
    (
        ("w8a8", {}, {"codes": "int8"}),
        ("w8a8-e4m3", {}, {"codes": "e4m3"}),
        ("w8a8-e4m3-g128", {}, {"codes": "e4m3", "block": True}),
        ("w8a8", {"smooth": torch.ones(256), "bias": torch.ones(128)}, {"smooth": True, "bias": True}),
        ("w8a8", {"input_scale": 0.1, "input_zero": 3}, {"static": True, "zeros": True}),
    ),
)
def test_layers_of_bytes_have_their_own_kernels(form, options, facts):
    layer = tnn.Linear.from_float(torch.randn(128, 256), form, **options)
    wanted = w8a8.kernel_requests(128, 256, **facts, m=[1, 64], dtype="float16", **AT)
    assert wanted and set(kernel_requests(layer, [1, 64], **AT)) == set(wanted)


def test_every_number_of_tokens_has_the_kernels_of_one_and_more():
    model = layers()[:1]
    assert set(kernel_requests(model, 1, **AT)) < set(kernel_requests(model, None, **AT))


def test_the_dtype_follows_scales_unless_it_is_said():
    model = tnn.Linear.from_float(torch.randn(64, 128), "w4a16-g64", scale_dtype=torch.bfloat16)
    assert {dict(it.params)["dtype"] for it in kernel_requests(model, 64, **AT)} == {"bfloat16"}
    assert {dict(it.params)["dtype"] for it in kernel_requests(model, 64, dtype=torch.float16, **AT)} == {"float16"}


def test_attention_and_experts_of_a_model_are_among_them():
    qkv = tnn.QKVLinear.from_float([torch.randn(n, 128) for n in (128, 64, 64)])
    out = tnn.Linear.from_float(torch.randn(128, 128))
    block = tnn.Attention(qkv, out, heads=2, kv_heads=1, head_dim=64)
    experts = tnn.Experts.from_float(torch.randn(4, 256, 128), torch.randn(4, 128, 128))
    model = torch.nn.ModuleList([block, tnn.SparseMLP(torch.randn(4, 128), experts, 2, True)])
    names = lambda **more: {it.name for it in kernel_requests(model, 4, **AT, **more)}
    assert "w4a16.grouped" in names() and not any(name.startswith("attention") for name in names())
    assert {"attention.decode", "attention.write"} <= names(kv=("int4", "int4"))


@pytest.mark.parametrize(
    ("form", "options", "numerics", "quantizer"),
    (
        ("w8a8", {}, "s8", ("w4a8.quantize_rows", None)),
        ("w8a8-e4m3", {}, "promoted", ("w4a8.quantize_rows", None)),
        ("w8a8-e4m3-g128", {}, "block", ("w8a8.quantize_bytes", "e4m3_block128")),
        ("w8a8", {"input_scale": 0.1}, "s8", ("w8a8.quantize_bytes", "int8_static")),
        ("w8a8", {"input_scale": 0.1, "input_zero": 3}, "s8_zeros", ("w8a8.quantize_bytes", "int8_static")),
        ("w8a8", {"asymmetric": True}, "s8_zeros", ("w8a8.quantize_bytes", "int8_asymmetric")),
        ("w8a8-e4m3", {"input_scale": 0.1}, "promoted", ("w8a8.quantize_bytes", "e4m3_static")),
    ),
)
def test_experts_of_bytes_have_their_own_kernels(form, options, numerics, quantizer):
    experts = tnn.Experts.from_float(torch.randn(4, 512, 256), torch.randn(4, 256, 256), form, **options)
    found = [(it.name, dict(it.params)) for it in kernel_requests(experts, [1, 64], **AT)]
    products = {facts["dequantization"] for name, facts in found if name == "w8a8.grouped"}
    assert products == {numerics}
    assert {(name, facts.get("form")) for name, facts in found if name != "w8a8.grouped"} == {quantizer}
    assert {facts["gain"] for name, facts in found if name != "w8a8.grouped"} == {False}


@pytest.mark.parametrize("options", ({}, {"input_scale": 0.1, "input_zero": 3}, {"asymmetric": True}))
def test_experts_of_bytes_have_kernels_for_each_number_of_tokens_that_they_meet(options):
    """Rows are quantized before their routing by gate and up, and behind it by down."""
    experts = tnn.Experts.from_float(torch.randn(4, 512, 256), torch.randn(4, 256, 256), "w8a8", **options)
    model, at = tnn.SparseMLP(torch.randn(4, 256), experts, 2, True), Target.parse("sm_90a")
    found, sizes, zeros = kernel_requests(model, 200, **AT), ((512, 256), (256, 256)), bool(options)
    static = "input_scale" in options
    facts = dict(codes="int8", zeros=zeros, out_dtype="float16", m=400, **AT)
    wanted = [it for n, k in sizes for it in w8a8.grouped_requests(n, k, 4, **facts)]
    own = dict(codes="int8", block=False, zeros=zeros, static=static, dtype="float16", target=at)
    wanted += w8a8_op.quantizers(256, m=(200, 400), **own)
    assert set(found) == set(wanted)


def test_experts_of_one_block_along_k_have_kernels_of_blocks():
    """Half of K = 256 is 128, the size of a block; no rows."""
    make = lambda n: w8a8.quantize(torch.randn(n, 256), codes="e4m3", granularity="block").shard(0, 2, 1)
    experts = tnn.Experts.of_packed([make(256)] * 4, [make(128)] * 4)
    found = kernel_requests(experts, [1, 64], **AT)
    assert {facts["dequantization"] for it in found if "dequantization" in (facts := dict(it.params))} == {"block"}
    assert {it.name for it in found} == {"w8a8.grouped", "w8a8.quantize_bytes"}


def test_layers_and_experts_of_mixed_bits_have_the_kernels_of_their_own_plan():
    """Three of four blocks are INT8; gate and up quantize tokens, down what they give, behind their routing."""
    plan = w4ax.plan_blocks(torch.arange(512) + 1.0, ratio=0.75)
    packed = lambda n: w4ax.quantize(torch.randn(n, 512), plan, **AT)
    facts = dict(blocks8=3, dtype="float16", **AT)
    layer, wanted = tnn.Linear(packed(64)), set()
    for norm in (False, True):
        wanted |= set(w4ax.kernel_requests(64, 512, m=[1, 64], norm=norm, permuted=bool(layer.packed.order), **facts))
    assert set(kernel_requests(layer, [1, 64], **AT)) == wanted
    experts = tnn.Experts.of_packed([packed(1024)] * 4, [packed(512)] * 4)
    model = tnn.SparseMLP(torch.randn(4, 512), experts, 2, True)
    found = kernel_requests(model, 200, **AT)
    own = {it for it in found if it.name == "w4ax.grouped"}
    asked = dict(m=400, blocks8=3, out_dtype="float16", **AT)
    assert own == {it for n in (1024, 512) for it in w4ax.grouped_requests(n, 512, 4, **asked)}
    rows = [dict(it.params) for it in found if it not in own]
    assert {row["blocks8"] for row in rows} == {3} and {row["warps"] for row in rows} == {4}


def test_steps_of_a_decoder_of_mixed_bits_need_no_sum_and_no_gate_of_their_own():
    found = kernel_requests(SmallModel(weights="w4ax").decoder, [1, 64], kv=("float16", "float16"), **AT)
    fronts = {dict(it.params).get("front", "none") for it in found if it.name == "w4ax.quantize_blocks"}
    assert fronts == {"none", "residual", "silu"}
    assert not [it for it in found if it.name == "activation.act_and_mul"]
    assert len([it for it in found if it.name == "norm.rms_norm"]) <= 2  # of the last norm


def test_experts_of_four_bits_have_quantizers_for_rows_ahead_of_their_routing_and_behind():
    experts = tnn.Experts.from_float(torch.randn(4, 512, 256), torch.randn(4, 256, 256), "w4a8-g64")
    model = tnn.SparseMLP(torch.randn(4, 256), experts, 2, True)
    facts = dict(dtype="float16", gain=False, norm=False, target=Target.parse("sm_90a"))
    ahead, behind = (activations.plan(m, 256, **facts) for m in (200, 400))
    assert ahead != behind and {ahead, behind} <= set(kernel_requests(model, 200, **AT))


@pytest.mark.parametrize(
    ("weights", "norms", "gate"),
    (
        ("w4a16-g32", {(False, "none"), (True, "none")}, "none"),
        ("w4a8-g64", {(False, "int8"), (True, "int8"), (True, "none")}, "int8"),
        ("w8a8-e4m3", {(False, "e4m3"), (True, "e4m3"), (True, "none")}, "e4m3"),
    ),
)
def test_what_stands_between_products_is_named_by_the_layer_behind_it(weights, norms, gate):
    """The first norm adds nothing, the last one stands before no layer."""
    model = SmallModel(("int4", "int4"), weights).decoder
    made = kernel_requests(model, [1, 64], kv=("int4", "int4"), **AT)
    named = lambda name: [dict(it.params) for it in made if it.name == name]
    assert {(it["residual"], it["output"]) for it in named("norm.rms_norm")} == norms
    assert {it["output"] for it in named("activation.act_and_mul")} == {gate}
    assert {"rope.apply_rope", "attention.rope_append"} <= {it.name for it in made}
    assert not {it.name for it in kernel_requests(model, 1, **AT)} & {"attention.rope_append"}, "no cache, no writing"


@pytest.mark.parametrize(
    ("model", "tokens", "dtype", "match"),
    (
        (torch.nn.Linear(2, 2), 1, None, "model = 'Linear': must hold layers of terrazzo.nn"),
        (None, "many", None, "m = 'many'"),
        (None, -1, None, "m = -1"),
        (None, 1, torch.float32, "dtype = 'float32': must be one of"),
    ),
)
def test_what_cannot_be_prepared_is_refused(model, tokens, dtype, match):
    with pytest.raises(ArgumentError, match=match):
        kernel_requests(model or layers()[:1], tokens, dtype=dtype, **AT)


def test_prepare_compiles_all_of_them_at_once_and_says_what_failed(monkeypatch, tmp_path):
    seen = []

    def fake(requests, workers=None, progress=None, **_):
        seen.append((list(requests), workers))
        return [CompileError("nvcc fails") if "quantize" in it.name else tmp_path for it in requests]

    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel, "compile_many", fake)
    model = layers()
    made = prepare(model[:2], (n for n in (1, 64)), workers=3, quiet=True, **AT)
    assert made == kernel_requests(model[:2], [1, 64], **AT) and set(seen[0][0]) == set(made) and seen[0][1] == 3
    with pytest.raises(CompileError, match=r"\d of \d kernels cannot be compiled, the first: nvcc fails"):
        prepare(model[3:], 64, quiet=True, **AT)


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: kernel_requests(None, [1], **AT), "model = 'NoneType'.*must be a torch.nn.Module"),
        (lambda: prepare(None, [1], **AT), "model = 'NoneType'.*must be a torch.nn.Module"),
        (lambda: prepare(layers(), [], **AT), "tokens = .*must be one number of tokens or more"),
        (lambda: prepare(layers(), 1.5, **AT), "must be a number of tokens"),
        (lambda: kernel_requests(layers(), [1], kv="int4", **AT), "kv = 'int4'.*must be two formats"),
        (lambda: kernel_requests(layers(), [1], kv=("int4",), **AT), "kv = .*must be two formats"),
        (lambda: kernel_requests(layers(), [1], kv=("int4", 4), **AT), "kv = .*must be two formats"),
    ),
)
def test_arguments_that_name_nothing_are_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_numbers_of_tokens_may_come_from_an_iterator():
    model = layers()[:1]
    assert kernel_requests(model, iter([1, 64]), **AT) == kernel_requests(model, [1, 64], **AT)


def test_a_model_of_16_bits_has_the_kernels_of_its_attention_and_of_what_stands_between():
    dense = lambda n, k, *sizes: Dense(torch.randn(n, k).half(), sizes=sizes)
    qkv, both = dense(256, 128, 128, 64, 64), dense(512, 128, 256, 256)
    block = tnn.Attention(qkv, dense(128, 128), heads=2, kv_heads=1, head_dim=64)
    norm = lambda: tnn.RMSNorm(torch.ones(128).half())
    layer = tnn.DecoderLayer(block, tnn.MLP(both, dense(128, 256)), norm(), norm())
    model = tnn.Decoder(torch.randn(16, 128).half(), [layer], norm(), [tnn.Rotary.of_base(64)])
    names = {it.name for it in kernel_requests(model, [1, 64], kv=("int8", "int8"), **AT)}
    assert {"attention.decode", "attention.write"} <= names and any(name.startswith("norm") for name in names), names
