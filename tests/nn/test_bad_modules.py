"""What modules are made of is checked: an error names the argument, the value and the remedy."""

from __future__ import annotations

import pytest
import torch
from terrazzo import nn
from terrazzo.integrations import transformers as functions
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.generation import generate
from terrazzo.ops import w4a16

W = w4a16.quantize(torch.randn(64, 128))
SQUARE = w4a16.quantize(torch.randn(128, 128))
FLOATS = torch.randn(2, 64, 128)
QKV = nn.QKVLinear(w4a16.quantize(torch.randn(256, 128)), (128, 64, 64))
HEADS = dict(heads=2, kv_heads=1, head_dim=64)
EXPERTS = nn.Experts.from_float(torch.randn(2, 128, 64), FLOATS.transpose(1, 2)[:, :64, :64].contiguous())

CASES = {
    "fewer ups than gates": ("ups", lambda: nn.Experts.stack([W, W], [W], [W, W])),
    "fewer downs than gates": ("downs", lambda: nn.Experts.stack([W, W], [W, W], [W])),
    "gates that are one": ("gates", lambda: nn.Experts.stack(W, [W], [W])),
    "no expert": ("gate_up", lambda: nn.Experts.of_packed([], [])),
    "no expert of w4ax": ("gate_up", lambda: nn.Experts.from_float(FLOATS[:0], FLOATS[:0], "w4ax", target="sm_90a")),
    "experts by name": ("gate_up", lambda: nn.Experts.from_float({"a": 1}, FLOATS)),
    "down that is no stack": ("down", lambda: nn.Experts.from_float(FLOATS, torch.tensor(3.0))),
    "parts that are no weights": ("parts", lambda: nn.join([1, 2])),
    "sizes that are one number": ("sizes", lambda: nn.JoinedLinear(W, 64)),
    "sizes below zero": ("sizes", lambda: nn.JoinedLinear(W, (96, -32))),
    "a part that is text": ("source", lambda: nn.QKVLinear.from_float("qkv")),
    "parts of two K": ("source", lambda: nn.QKVLinear.from_float([torch.randn(64, 128), torch.randn(64, 64)])),
    "parts of two dtypes": ("source", lambda: nn.QKVLinear.from_float([FLOATS[0], FLOATS[1].half()])),
    "sizes of an empty layer": ("sizes", lambda: nn.GateUpLinear.empty(128, True)),
    "features of an empty layer": ("out_features", lambda: nn.Linear.empty(128, 0)),
    "a state that is a layer": ("state", lambda: nn.Linear.from_state(nn.Linear(W))),
    "a prefix that is none": ("prefix", lambda: nn.Linear.from_state({}, 3)),
    "heads that are no number": ("heads", lambda: nn.Attention(QKV, nn.Linear(W), heads="2", kv_heads=1, head_dim=64)),
    "qkv that is a weight": ("qkv", lambda: nn.Attention(W, nn.Linear(W), **HEADS)),
    "out that is none": ("out", lambda: nn.Attention(QKV, None, **HEADS)),
    "norms side by side": ("norms", lambda: nn.Attention(QKV, nn.Linear(SQUARE), **HEADS, norms=torch.ones(64, 2))),
    "too many sinks": ("sinks", lambda: nn.Attention(QKV, nn.Linear(SQUARE), **HEADS, sinks=torch.ones(3))),
    "an activation that is a list": ("activation", lambda: nn.MLP(QKV, nn.Linear(W), [])),
    "a router of one row": ("router", lambda: nn.SparseMLP(torch.ones(2), EXPERTS, 1, True)),
    "more picks than experts": ("top_k", lambda: nn.SparseMLP(torch.ones(2, 64), EXPERTS, 3, True)),
    "a bias for other experts": (
        "router_bias", lambda: nn.SparseMLP(torch.ones(2, 64), EXPERTS, 1, True, router_bias=torch.ones(3)),
    ),
    "a norm of True channels": ("weight", lambda: nn.RMSNorm(True)),
    "a norm of a matrix": ("weight", lambda: nn.RMSNorm(torch.ones(4, 4))),
    "rates that are a list": ("rates", lambda: nn.Rotary([1.0])),
    "a base below zero": ("base", lambda: nn.Rotary.of_base(64, -1.0)),
    "a head of text": ("head_dim", lambda: nn.Rotary.of_base("64")),
    "an embedding of integers": ("embedding", lambda: nn.Decoder(torch.ones(4, 4).long(), [], nn.RMSNorm(4), [])),
    "no model": ("model", lambda: generate(torch.device("cpu"), [[1]])),
    "a model of transformers that is none": ("model", lambda: functions.new_cache(1.5, 1, 16)),
    "a module to pack that is none": ("model", lambda: functions.pack(range(3), "w4a16-g128")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_modules_are_made_of_is_checked(name):
    argument, call = CASES[name]
    with pytest.raises(ArgumentError, match=rf"^{argument} = ") as caught:
        call()
    assert caught.value.argument == argument and caught.value.remedy
