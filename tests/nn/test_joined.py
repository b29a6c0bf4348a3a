"""Joined layers and experts on the CPU: one product gives what the single ones give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from layers import K, act_order, mixed, weight, x
from terrazzo import nn
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.nn.generation import Sampling
from terrazzo.ops import moe, w4a8, w4a16, w4ax
from terrazzo.ops.grouped import GroupedWeight

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = (72, 40, 64)


def parts(family: str) -> list:
    """Three packed weights of different rows, some with a bias, some with zero points."""
    if family == "w4a16":
        made = [w4a16.quantize(weight(n, seed=n), group_size=64, symmetric=n == 40) for n in ROWS[:2]]
        return [*made, w4a16.quantize(weight(64), group_size=64, bias=torch.ones(64).half())]
    if family == "w4a16 act-order":
        return [act_order(n) for n in ROWS]
    smooth = torch.linspace(0.5, 2, K)
    if family == "w4a8":
        return [w4a8.quantize(weight(n, seed=n), smooth=smooth, bias=torch.ones(n)) for n in ROWS]
    if family == "w4a8-e4m3":
        return [w4a8.fp8.quantize(weight(n, seed=n), smooth=smooth) for n in ROWS]
    return [mixed(n=n, bias=n != 40) for n in ROWS]


@pytest.mark.parametrize("family", ["w4a16", "w4a16 act-order", "w4a8", "w4a8-e4m3", "w4ax"])
@torch.no_grad()
def test_a_joined_layer_is_its_parts(family):
    single = [nn.Linear(w) for w in parts(family)]
    joined = nn.QKVLinear.join(*single)
    assert joined.sizes == ROWS and joined.out_features == sum(ROWS) and "sizes=(72, 40, 64)" in repr(joined)
    for got, layer in zip(joined(x()), single):
        assert torch.equal(got, layer(x()))
    again = nn.QKVLinear.from_state(joined.state_dict(), sizes=ROWS)
    assert torch.equal(again.product(x()), joined.product(x()))


def test_layers_that_cannot_be_joined_are_refused_by_name():
    generator = torch.Generator().manual_seed(4)
    other = w4a16.pack(
        torch.randint(0, 16, (8, K), generator=generator), torch.ones(8, 7).half(), group_size=32,
        perm=torch.randperm(K, generator=generator),
    )  # fmt: skip
    own, magnitudes = w4a16.quantize(weight(), group_size=32), torch.ones(K)
    magnitudes[:150] = 9
    unlike = w4ax.quantize(weight(), w4ax.plan_blocks(magnitudes, ratio=0.5), target="sm_90a")
    for given, says in (
        ([act_order(), other], "perm"), ([own, act_order()], "perm"), ([own, w4a16.quantize(weight())], "group_size"),
        ([own, w4a16.quantize(weight(), group_size=32, scale_dtype=torch.bfloat16)], "scales"),
        ([own, w4a8.quantize(weight())], "one format"), ([mixed(), unlike], "permutation"),
        ([w4a8.quantize(weight()), w4a8.quantize(weight(), smooth=torch.ones(K) * 2)], "smooth"),
        ([own, w4a16.quantize(weight(k=64), group_size=32)], "codes"), ([], "list of weights"),
        ([torch.ones(8, K)], "packed or canonical"), ([Sampling()], "packed or canonical"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            nn.join(given)
    with pytest.raises(ArgumentError, match="add up"):
        nn.JoinedLinear(own, (1, 2))


def test_a_joined_layer_is_made_of_float_ones_and_empty():
    floats = [torch.nn.Linear(K, 64), torch.nn.Linear(K, 64, bias=False)]
    made = nn.GateUpLinear.from_float(floats, "w4a16-g64")
    assert made.sizes == (64, 64) and not bool(made.bias[64:].any())
    empty = nn.GateUpLinear.empty(K, (64, 64), "w4a16-g64", bias=True)
    empty.load_state_dict(made.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(empty.product(x()), made.product(x()))


HIDDEN, INNER, EXPERTS = 128, 64, 4
PLANS = {k: w4ax.plan_blocks(torch.arange(k) + 1.0, ratio=0.5) for k in (HIDDEN, INNER)}


def experts(family: str, symmetric: tuple[int, ...] = ()) -> tuple[list, list, list]:
    make = lambda n, k, e: {
        "w4a16": lambda: w4a16.quantize(weight(n, k, e), group_size=32, symmetric=e % 10 in symmetric),
        "w4a8": lambda: w4a8.quantize(weight(n, k, e)), "w4a8-e4m3": lambda: w4a8.fp8.quantize(weight(n, k, e)),
        "w4ax": lambda: w4ax.quantize(weight(n, k, e), PLANS[k], target="sm_90a"),
    }[family]()  # fmt: skip
    gates, ups = ([make(INNER, HIDDEN, 10 * part + e) for e in range(EXPERTS)] for part in (0, 1))
    return gates, ups, [make(HIDDEN, INNER, 20 + e) for e in range(EXPERTS)]


@pytest.mark.parametrize(
    ("family", "symmetric"), [("w4a16", ()), ("w4a16", (1, 3)), ("w4a8", ()), ("w4a8-e4m3", ()), ("w4ax", ())]
)
@torch.no_grad()
def test_experts_are_each_experts_layers_weighted(family, symmetric):
    gates, ups, downs = experts(family, symmetric)
    made = nn.Experts.stack(gates, ups, downs)
    tokens = x(7, HIDDEN)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1], [0, 1]])  # nobody asks for expert 3
    weights = torch.rand(7, 2)
    routing = moe.sort_by_expert(ids, EXPERTS)
    rows = torch.zeros(14, HIDDEN, dtype=torch.float16)
    for t in range(7):
        for slot in range(2):
            e = int(ids[t, slot])
            own = [nn.Linear(w[e]) for w in (gates, ups, downs)]
            both = torch.cat([own[0](tokens[t : t + 1]), own[1](tokens[t : t + 1])], dim=-1)
            rows[routing.positions[t, slot]] = own[2](products.gated(both, "silu", own[2]), tokens.dtype)[0]
    assert torch.equal(made(tokens, ids, weights), moe.combine(rows, routing, weights))
    assert len(made) == EXPERTS and "experts=4" in repr(made)


def test_experts_of_one_plan_are_made_of_float_ones():
    """Columns that are large in one expert alone are INT8 for all of them."""
    gate_up, down = torch.randn(3, 128, 256) / 50, torch.randn(3, 256, 64) / 50
    gate_up[1, :, 7] = 5
    made = nn.Experts.from_float(gate_up, down, "w4ax", target="sm_90a")
    assert str(made.gate_up_proj.format) == "w4ax-g128"
    order = made.gate_up_proj.packed.stacked.permutation
    assert made.gate_up_proj.packed.stacked.blocks8 == 1 and 7 in order[128:]
    ids, gates = torch.tensor([[0, 2], [1, 0]]), torch.full((2, 2), 0.5)
    with torch.no_grad():
        y = made(torch.randn(2, 256).half(), ids, gates)
    assert y.shape == (2, 256) and bool(y.isfinite().all())


def test_a_state_of_experts_comes_back_and_another_is_refused():
    made, other = nn.Experts.stack(*experts("w4a16")), nn.Experts.stack(*experts("w4a16", (0, 1, 2, 3)))
    ids, gates = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    again = nn.Experts.stack(*experts("w4a16")).to("meta")
    again.load_state_dict(made.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(again(x(3, HIDDEN), ids, gates), made.half()(x(3, HIDDEN), ids, gates))
    with pytest.raises(ArgumentError, match="symmetric"):
        made.load_state_dict(other.state_dict())


def test_experts_that_have_no_product_are_refused_by_name():
    gates, ups, downs = experts("w4a16")
    with pytest.raises(ArgumentError, match="perm"):
        nn.Experts.stack([act_order(64, HIDDEN)] * 2, [act_order(64, HIDDEN)] * 2, downs[:2])
    with pytest.raises(ArgumentError, match="warpgroup"):
        nn.Experts.from_float(torch.randn(2, 64, 128), torch.randn(2, 128, 32), "w4ax", target="sm_80")
    with pytest.raises(ArgumentError, match="activation"):
        nn.Experts.stack(gates, ups, downs, "relu6")
    with pytest.raises(ArgumentError, match="down"):
        nn.Experts.stack(gates, ups, downs[:3])
    with pytest.raises(ArgumentError, match="GroupedWeight"):
        nn.GroupedLinear(gates[0])
    assert len(GroupedWeight.stack(gates)) == EXPERTS


def test_attention_of_other_sizes_is_refused():
    qkv = nn.QKVLinear.join(*(w4a16.quantize(weight(n, 128)) for n in (128, 64, 64)))
    out = nn.Linear(w4a16.quantize(weight(128, 128)))
    nn.Attention(qkv, out, heads=2, kv_heads=1, head_dim=64)
    for sizes in (dict(heads=4, kv_heads=1, head_dim=64), dict(heads=2, kv_heads=2, head_dim=64)):
        with pytest.raises(ArgumentError, match="qkv"):
            nn.Attention(qkv, out, **sizes)
    with pytest.raises(ArgumentError, match="out"):
        nn.Attention(qkv, nn.Linear(w4a16.quantize(weight(128, 64))), heads=2, kv_heads=1, head_dim=64)
