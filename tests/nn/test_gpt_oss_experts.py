"""gpt-oss's experts from their published tensors to the sum of their outputs, against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from terrazzo import nn
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a16, w8a16
from terrazzo.ops.grouped import GroupedWeight

E, HIDDEN, INNER, TOKENS = 4, 64, 96, 9
LUT = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def published(n: int, k: int, seed: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(blocks [E, N, K/32, 16], scales [E, N, K/32], bias [E, N]), and the weights in float64."""
    rng = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (E, n, k // 32, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(122, 125, (E, n, k // 32), generator=rng, dtype=torch.uint8)
    bias = torch.randn(E, n, generator=rng).bfloat16()
    values = torch.stack([LUT[(blocks & 15).long()], LUT[(blocks >> 4).long()]], -1).flatten(-2)
    return (blocks, scales, bias), (values * 2.0 ** (scales.double()[..., None] - 127)).flatten(-2)


@pytest.mark.parametrize(("activations", "most"), [(None, 0.02), ("e4m3", 0.05)])
def test_experts_give_what_gpt_oss_means(activations, most):
    """Rows 2 i are gates and 2 i + 1 ups; biases before the bound of 7, which both ends of up reach."""
    (gate_up, both), (down, back) = published(2 * INNER, HIDDEN, 1), published(HIDDEN, INNER, 2)
    experts = nn.Experts.from_gpt_oss(gate_up, down, activations=activations)
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=rng).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=rng)[:2] for _ in range(TOKENS)])
    shares = torch.rand(TOKENS, 2, generator=rng)
    wanted, reached = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64), set()
    for token in range(TOKENS):
        for share, e in zip(shares[token].double(), ids[token]):
            h = both[e] @ x[token].double() + gate_up[2][e].double()
            gate, up = h[0::2], h[1::2]
            ends = {"gate": gate > 7, "up": up > 7, "down": up < -7}
            reached |= {end for end, there in ends.items() if bool(there.any())}
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            wanted[token] += share * (back[e] @ h + down[2][e].double())
    assert reached == {"gate", "up", "down"}
    got = experts(x, ids, shares).double()
    assert (got - wanted).norm() < most * wanted.norm()
    halves = nn.Experts(experts.gate_up_proj.packed, experts.down_proj.packed)  # SiLU is another function
    assert (halves(x, ids, shares).double() - wanted).norm() > 0.1 * wanted.norm()


def test_gpt_oss_tensors_that_do_not_fit_are_refused_by_name():
    (gate_up, _), (down, _) = published(2 * INNER, HIDDEN, 1), published(HIDDEN, INNER, 2)
    with pytest.raises(ArgumentError, match="down"):
        nn.Experts.from_gpt_oss(gate_up, gate_up)
    with pytest.raises(ArgumentError, match="scales"):
        nn.Experts.from_gpt_oss((gate_up[0], gate_up[1][:, :-1], gate_up[2]), down)
    with pytest.raises(ArgumentError, match="activations = 'int8': must be None or \"e4m3\""):
        nn.Experts.from_gpt_oss(gate_up, down, activations="int8")


@pytest.mark.parametrize("family", [w4a16, w8a16])
def test_experts_of_which_one_has_zero_points_keep_their_numbers(family):
    weight = lambda n, k, seed: torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / 8
    make = lambda n, k: [
        family.quantize(weight(n, k, e), group_size=32, symmetric=e == 0, scale_dtype=torch.float16) for e in range(2)
    ]
    gate_up, down = make(2 * INNER, HIDDEN), make(HIDDEN, INNER)
    experts = nn.Experts.of_packed(gate_up, down)
    for stack, parts in ((experts.gate_up_proj.packed, gate_up), (experts.down_proj.packed, down)):
        assert isinstance(stack, GroupedWeight)
        for e, part in enumerate(parts):
            assert torch.equal(stack[e].dequantize(), part.dequantize())
