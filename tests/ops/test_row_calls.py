"""Operators on rows (norm, activation, rope) without a GPU: transformers' formulas, requests, traces, refusals."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import activation, launching, norm, quantized, rope, row_calls
from terrazzo.ops.activation import op as activation_op
from terrazzo.ops.norm import op as norm_op
from terrazzo.ops.norm import torch_op as norm_torch_op
from terrazzo.ops.rope import op as rope_op
from terrazzo.ops.w4a8 import reference as w4a8_reference
from torch._subclasses.fake_tensor import FakeTensorMode

K = 256
HEADS = dict(heads=2, kv_heads=1, head_dim=64)


def x(*size: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- formulas, as transformers 5 writes them ---------------------------------------------------------------------------
def llama_norm(h, weight, eps):
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(h.dtype)


def gemma_norm(h, weight, eps):
    wide = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(h)


def gpt_oss_norm(h, weight, eps):
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(h.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("style", "formula"), [("llama", llama_norm), ("gemma", gemma_norm), ("gpt_oss", gpt_oss_norm)]
)
def test_model_numerics_are_those_of_transformers_norms(style, formula, dtype):
    h, weight, delta = x(5, K, dtype=dtype), x(K, dtype=dtype, seed=1), x(5, K, dtype=dtype, seed=2)
    assert torch.equal(norm.rms_norm(h, weight, style=style, numerics="model"), formula(h, weight, 1e-6))
    residual, post = h.clone(), x(K, dtype=dtype, seed=3)
    options = dict(style=style, numerics="model", post_weight=post, post_eps=1e-5)
    y = norm.fused_add_rms_norm(delta, residual, weight, **options)
    wanted = h + formula(delta, post, 1e-5)
    assert torch.equal(residual, wanted) and torch.equal(y, formula(wanted, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_numerics_are_those_of_transformers_activations(dtype):
    both = x(5, 2 * K, dtype=dtype) * 3
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(activation.act_and_mul(both, numerics="model"), torch.nn.functional.silu(gate) * up)
    tanh = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.equal(activation.act_and_mul(both, activation="gelu_tanh", numerics="model"), tanh)
    gate, up = both[..., ::2], both[..., 1::2]  # GptOssExperts
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    wanted = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    options = dict(activation="swiglu_oai", layout="interleaved", numerics="model")
    assert torch.equal(activation.act_and_mul(both, **options), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_numerics_are_those_of_transformers_rotary_positions(dtype):
    heads, kv_heads, dim = 4, 2, 64
    qkv, angles = x(6, (heads + 2 * kv_heads) * dim, dtype=dtype), torch.rand(6, dim // 2) * 6
    table = angles.cos(), angles.sin()
    q = qkv[:, : heads * dim].view(6, heads, dim)

    def rotate_half(t):
        return torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), dim=-1)

    cos, sin = (torch.cat([t, t], dim=-1).to(dtype)[:, None] for t in table)
    facts = dict(heads=heads, kv_heads=kv_heads, head_dim=dim, numerics="model")
    assert torch.equal(rope.apply_rope(qkv, *table, **facts)[0], q * cos + rotate_half(q) * sin)
    longer = [torch.cat([t, t]) for t in table]  # rows that no token has are not read
    assert torch.equal(rope.apply_rope(qkv, *longer, **facts)[0], rope.apply_rope(qkv, *table, **facts)[0])
    order = torch.tensor([3, 3, 0, 5, 1, 2])
    assert torch.equal(
        rope.apply_rope(qkv, *table, positions=order, **facts)[1],
        rope.apply_rope(qkv, *(t[order] for t in table), **facts)[1],
    )


# -- codes -------------------------------------------------------------------------------------------------------------
def test_codes_of_tokens_are_the_quantizers():
    h, weight, smooth = x(7, K), x(K, seed=1), torch.rand(K) + 0.5
    made = norm.rms_norm(h, weight, quant="int8", smooth=smooth)
    q, scales, sums = w4a8_reference.quantize_activations(h, smooth, weight, 1e-6)
    assert torch.equal(made.q, q) and torch.equal(made.row_sums, sums)
    torch.testing.assert_close(made.scales, scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("quant", quantized.QUANTS)
def test_codes_and_scales_are_near_what_they_stand_for(quant):
    h, weight = x(6, 264) * 4, x(264, seed=1)
    y = norm.rms_norm(h, weight, numerics="model").float()
    options = [False, True] if "block" in quant else [False]
    for column_scales in options:
        made = norm.rms_norm(h, weight, quant=quant, column_scales=column_scales)
        assert made.q.shape == (6, 272) and not made.q[:, 264:].float().any() and made.codes == quant[:4]
        limit = 0.02 if quant.startswith("int8") else 0.07
        blocks = made.dequantize().split(128, dim=1) if "block" in quant else [made.dequantize()]
        for seen, wanted in zip(blocks, y.split(128, dim=1) if "block" in quant else [y]):
            assert bool(((seen - wanted).abs() <= limit * wanted.abs().amax(1, keepdim=True)).all())


def test_a_router_gets_y_beside_the_codes():
    h, weight, smooth = x(3, K), x(K, seed=1), torch.rand(K) + 0.5
    codes, y = norm.rms_norm(h, weight, quant="int8", also_plain=True, smooth=smooth)
    assert torch.equal(y, norm.rms_norm(h, weight))
    torch.testing.assert_close(codes.dequantize() * smooth, y.float(), rtol=0.05, atol=0.06)


def test_rows_of_an_expert_take_its_smooth_vector():
    both, smooth = x(6, 2 * K), torch.rand(3, K) + 0.5
    offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    made = activation.act_and_mul(both, smooth=smooth, expert_offsets=offsets, quant="int8")
    for rows, expert in ((slice(0, 2), 0), (slice(2, 6), 2)):
        own = activation.act_and_mul(both[rows], smooth=smooth[expert], quant="int8")
        assert torch.equal(made.q[rows], own.q) and torch.equal(made.scales[rows], own.scales)


# -- requests and traces -----------------------------------------------------------------------------------------------
def test_few_kernels_serve_all_numbers_of_tokens():
    assert len(norm.kernel_requests(4096, target="sm_90a", quant="int8")) == 2
    assert len(norm.kernel_requests(4096, target="sm_90a", m=range(1, 200))) == 1
    assert len(activation.kernel_requests(14336, target="sm_80", quant="int8")) == 2
    assert len(rope.kernel_requests(128, target="sm_90a")) == 1
    with pytest.raises(ArgumentError, match="e4m3"):
        norm.kernel_requests(4096, target="sm_80", quant="e4m3")
    folded = dict(norm.kernel_requests(4096, target="sm_90a", quant="int8", smooth=True, m=1)[0].params)
    assert folded["weight"] == "float32" and not folded["smooth"]


class Asked(Exception):
    """In place of a launch: its only argument is the request."""


@pytest.mark.parametrize("target", ["sm_80", None])
@pytest.mark.parametrize("m", [1, 17, 264, 265, 1000])
def test_requests_are_those_that_calls_on_this_gpu_launch(monkeypatch, m, target):
    """A program of sm_80 is compiled for, and its rows shared out on, the newer GPU that runs it."""

    def ask(request, *rest):
        raise Asked(request)

    here = Target.parse("nvidia/nvidia-h100")
    monkeypatch.setattr(Target, "detect", staticmethod(lambda device=None: here))
    monkeypatch.setattr(launching, "detect", lambda index: here)
    at = Target.parse(target)
    monkeypatch.setattr(launching, "targets", lambda *args: (at, here))
    monkeypatch.setattr(launching, "warm_kernel", ask)
    rows, table = x(m, 4096), torch.rand(m, 64)
    normed = rows, rows.clone(), rows[0], None, None, 1e-5, 1e-5, "llama", "int8", "fused", False, False, target
    gated = rows, None, None, "silu", "gate_up", 1.702, None, None, "fused", False, target
    turned = rows, table, table, None, None, None, 28, 2, 128, 128, "neox", "none", 1e-5, "fused", target
    for op, given, requests in (
        (norm_op, normed, norm.kernel_requests(4096, target=target, quant="int8")),
        (activation_op, gated, activation.kernel_requests(2048, target=target)),
        (rope_op, turned, rope.kernel_requests(128, target=target)),
    ):
        with pytest.raises(Asked) as asked:
            op.run(op.Call(*given), new=True)
        assert asked.value.args[0] in requests


def test_calls_are_one_node_of_a_graph():
    weight, table = x(K, seed=1), torch.rand(4, 32)

    def layer(delta, residual, both, qkv):
        q = norm.fused_add_rms_norm(delta, residual, weight, quant="int8")
        h = activation.act_and_mul(both)
        return q.q, q.scales, h, *rope.apply_rope(qkv, table, table, heads=2, kv_heads=1, head_dim=64)

    given = lambda: (x(4, K), x(4, K, seed=2), x(4, 2 * K), x(4, 256))
    own, traced = given(), given()
    expected, made = layer(*own), torch.compile(layer, fullgraph=True, backend="eager")(*traced)
    assert all(map(torch.equal, expected, made)) and torch.equal(own[1], traced[1])
    fake = torch.export.export(_Layer(weight), (x(4, K),))
    assert "terrazzo.rms_norm" in str(fake.graph)


def test_fake_tensors_of_a_gpu_need_none(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(launching, "detect", lambda index: pytest.fail("asks for the GPU"))
    with FakeTensorMode():
        h, table = torch.empty(4, K, dtype=torch.float16), torch.empty(4, 32)
        found = (
            norm.fused_add_rms_norm(h, torch.empty_like(h), h[0]), activation.act_and_mul(h),
            *rope.apply_rope(h, table, table, **HEADS),
        )  # fmt: skip
    assert [tuple(y.shape) for y in found] == [(4, K), (4, K // 2), (4, 2, 64), (4, 1, 64)]


class _Layer(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, h):
        return norm.rms_norm(h, self.weight, quant="int8").q


# -- refusals ----------------------------------------------------------------------------------------------------------
REFUSED = {
    "x: a list": ("x", lambda: norm.rms_norm([1.0], x(K))),
    "x: float32": ("x", lambda: norm.rms_norm(torch.rand(2, K), x(K))),
    "x: no columns": ("x", lambda: norm.rms_norm(x(2, 0), x(0))),
    "x: odd rows": ("x", lambda: norm.rms_norm(x(2, 12), x(12))),
    "x: a gradient": ("x", lambda: norm.rms_norm(x(2, K).requires_grad_(), x(K))),
    "weight: short": ("weight", lambda: norm.rms_norm(x(2, K), x(K - 8))),
    "weight: none": ("weight", lambda: norm.rms_norm(x(2, K), None)),
    "weight: another dtype": ("weight", lambda: norm.rms_norm(x(2, K), x(K).bfloat16())),
    "weight: float32 as models round": ("weight", lambda: norm.rms_norm(x(2, K), x(K).float(), numerics="model")),
    "eps": ("eps", lambda: norm.rms_norm(x(2, K), x(K), eps=-1.0)),
    "style": ("style", lambda: norm.rms_norm(x(2, K), x(K), style="layer")),
    "numerics": ("numerics", lambda: norm.rms_norm(x(2, K), x(K), numerics="exact")),
    "quant": ("quant", lambda: norm.rms_norm(x(2, K), x(K), quant="int4")),
    "quant: a list": ("quant", lambda: norm.rms_norm(x(2, K), x(K), quant=["int8"])),
    "column_scales": ("column_scales", lambda: norm.rms_norm(x(2, K), x(K), quant="int8", column_scales=True)),
    "column_scales: a number": (
        "column_scales", lambda: norm.rms_norm(x(2, K), x(K), quant="int8_block128", column_scales=1)
    ),
    "also_plain": ("also_plain", lambda: norm.rms_norm(x(2, K), x(K), also_plain=True)),
    "smooth: long": ("smooth", lambda: norm.rms_norm(x(2, K), x(K), smooth=torch.ones(K + 1), quant="int8")),
    "smooth, no codes": (
        "smooth", lambda: norm.rms_norm(x(2, K), x(K), smooth=torch.ones(K), numerics="model")
    ),
    "residual: itself": ("residual", lambda: norm.fused_add_rms_norm(*[x(2, K)] * 2, x(K))),
    "residual: others' tokens": ("residual", lambda: norm.fused_add_rms_norm(x(2, K), x(3, K), x(K))),
    "residual: apart": ("residual", lambda: norm.fused_add_rms_norm(x(2, K), x(2, 2 * K)[:, ::2], x(K))),
    "post_weight": (
        "post_weight", lambda: norm.fused_add_rms_norm(x(2, K), x(2, K, seed=1), x(K), post_weight=x(K).float())
    ),
    "gate and up": ("x", lambda: activation.act_and_mul(x(2, 17))),
    "activation": ("activation", lambda: activation.act_and_mul(x(2, K), activation="relu")),
    "layout": ("layout", lambda: activation.act_and_mul(x(2, K), layout="up")),
    "alpha": ("alpha", lambda: activation.act_and_mul(x(2, K), alpha=float("nan"))),
    "limit": ("limit", lambda: activation.act_and_mul(x(2, K), limit=0)),
    "offsets: long": (
        "expert_offsets", lambda: activation.act_and_mul(x(2, K), expert_offsets=torch.zeros(3, dtype=torch.long))
    ),
    "offsets: of one tensor": (
        "expert_offsets", lambda: activation.act_and_mul(x(2, K), expert_offsets=torch.zeros(1, dtype=torch.int32))
    ),
    "smooth of experts": ("smooth", lambda: activation.act_and_mul(x(2, K), smooth=torch.ones(3, K // 2))),
    "head_dim": ("head_dim", lambda: rope_of(head_dim=40)),
    "rotary_dim": ("rotary_dim", lambda: rope_of(rotary_dim=72)),
    "heads": ("heads", lambda: rope_of(heads=-1)),
    "qkv: narrow": ("qkv", lambda: rope_of(heads=9)),
    "rope's layout": ("layout", lambda: rope_of(layout="gptj")),
    "cos: short": ("cos", lambda: rope_of(table=torch.rand(2, 32))),
    "cos: narrow": ("cos", lambda: rope_of(table=torch.rand(4, 31))),
    "cos: float16": ("cos", lambda: rope_of(table=torch.rand(4, 32).half())),
    "sin: short": ("sin", lambda: rope.apply_rope(x(4, 256), *map(torch.rand, (4, 3), (32, 32)), **HEADS)),
    "positions: floats": ("positions", lambda: rope_of(positions=torch.zeros(4))),
    "positions: few": ("positions", lambda: rope_of(positions=torch.zeros(3, dtype=torch.long))),
    "q_weight: none": ("q_weight", lambda: rope_of(norm="llama")),
    "k_weight: no norm": ("k_weight", lambda: rope_of(k_weight=x(64))),
}  # fmt: skip


def rope_of(table: torch.Tensor | None = None, **changes):
    table = torch.rand(4, 32) if table is None else table
    return rope.apply_rope(x(4, 256), table, table, **HEADS | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named(name):
    argument, call = REFUSED[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument and re.search(r"\w", str(caught.value))


@pytest.fixture
def launched(monkeypatch):
    """A GPU that is pretended, and the arguments of launches on it; calls with good operands were made."""
    calls = []
    kernel = SimpleNamespace(launcher=lambda index: lambda *args: calls.append(args))
    target = Target.parse("nvidia/nvidia-h100")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(row_calls, "ready", {})
    monkeypatch.setattr(launching, "detect", lambda index: target)
    monkeypatch.setattr(launching, "targets", lambda *args: (target, target))
    monkeypatch.setattr(launching, "warm_kernel", lambda *args: kernel)
    monkeypatch.setattr(launching, "argument", lambda tensor: tensor)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    for _ in range(2):
        for h in (x(2, K), x(K)):
            norm.rms_norm(h, x(K))
            norm.rms_norm(h, x(K).float())
            norm.rms_norm(h, x(K), quant="int8", also_plain=True)
            norm.rms_norm(h, x(K), quant="int8_block128", column_scales=True)
            norm.fused_add_rms_norm(h, h.clone(), x(K), post_weight=x(K))
        norm.fused_add_rms_norm(x(2, K), x(2, K, seed=1), x(K))
        activation.act_and_mul(x(2, K))
        activation.act_and_mul(x(2, K), expert_offsets=offsets)
        rope_of()
        rope_of(positions=torch.zeros(4, dtype=torch.long))
        rope_of(norm="llama", q_weight=x(64), k_weight=x(64))
    return calls


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named_where_good_input_was_launched(name, launched):
    count, known = len(launched), len(row_calls.ready)
    assert (count, known) == (32, 11), "an equal call finds what the first one left"
    argument, call = REFUSED[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument and (len(launched), len(row_calls.ready)) == (count, known)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("eps", lambda value: norm.rms_norm(x(2, K), x(K), eps=value)),
        (
            "eps",
            lambda value: norm.fused_add_rms_norm(x(2, K), x(2, K, seed=1), x(K), post_eps=value, post_weight=x(K)),
        ),
        ("alpha", lambda value: activation.act_and_mul(x(2, K), alpha=value)),
        ("limit", lambda value: activation.act_and_mul(x(2, K), limit=value)),
        ("eps", lambda value: rope_of(eps=value)),
    ],
)
def test_a_number_of_numpy_is_refused_where_an_equal_one_was_launched(argument, call, launched):
    call(7.0)
    for _ in range(2):
        with pytest.raises(ArgumentError) as caught:
            call(np.float32(7.0))
        assert caught.value.argument == argument


def test_other_rows_of_a_bucket_find_the_same_kernel(launched):
    known = len(row_calls.ready)
    for rows in (1, 5, 16):
        norm.rms_norm(x(rows, K), x(K))
        activation.act_and_mul(x(rows, K))
    assert len(row_calls.ready) == known
    norm.rms_norm(x(17, K), x(K))
    assert len(row_calls.ready) == known + 1
    assert norm.rms_norm(x(0, K), x(K)).shape == (0, K)


def test_an_unknown_target_names_the_operators_rows(launched, monkeypatch):
    named = []
    monkeypatch.setattr(launching, "targets", lambda target, device, argument: named.append(argument) or 1 / 0)
    for call in (lambda: norm.rms_norm(x(40, K), x(K)), lambda: rope_of(heads=1)):
        with pytest.raises(ZeroDivisionError):
            call()
    assert named == ["x", "qkv"]


def test_a_node_takes_a_residual_that_is_x(launched):
    h, weight = x(2, K), x(K)
    norm_torch_op.fused_add_rms_norm(h, h, weight, None, None, 1e-6, 1e-6, "llama", "", "fused", False, False)
    read, written, *_ = launched[-1]
    assert written.data_ptr() == h.data_ptr() != read.data_ptr() and torch.equal(read, h)


def test_one_target_has_no_conversion_to_e4m3():
    quantized.check_codes_on(Target.parse("sm_89"), "e4m3_block128")
    with pytest.raises(ArgumentError, match="quant"):
        quantized.check_codes_on(Target.parse("sm_80"), "e4m3")
