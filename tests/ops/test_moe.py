"""Routing on the CPU: sorted, gathered and combined picks equal a loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import moe
from terrazzo.ops.w4a8.activations import QuantizedActivations

EXPERTS = 6


def picks(tokens: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Expert 2 gets nothing."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=rng)[:top_k] for _ in range(tokens)])
    return ids + (ids >= 2).long()


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (17, 2), (40, 5)])
def test_sorted_rows(tokens, top_k):
    ids = picks(tokens, top_k)
    routing = moe.sort_by_expert(ids, EXPERTS)
    assert routing.offsets.dtype == torch.int32 and routing.offsets[0] == 0 and routing.offsets[-1] == tokens * top_k
    for e in range(EXPERTS):
        rows = slice(int(routing.offsets[e]), int(routing.offsets[e + 1]))
        assert routing.tokens[rows].tolist() == (ids == e).any(1).nonzero().flatten().tolist()
    for t in range(tokens):
        assert routing.tokens[routing.positions[t]].tolist() == [t] * top_k


def test_a_layer_of_experts():
    tokens, top_k, k, n = 23, 3, 16, 8
    rng = torch.Generator().manual_seed(1)
    x, w = torch.randn(tokens, k, generator=rng), torch.randn(EXPERTS, n, k, generator=rng)
    gates, ids = torch.rand(tokens, top_k, generator=rng), picks(tokens, top_k, 3)
    routing = moe.sort_by_expert(ids, EXPERTS)
    rows, y = moe.gather(x, routing), torch.full((tokens * top_k, n), float("nan"))
    for e in range(EXPERTS):
        own = slice(int(routing.offsets[e]), int(routing.offsets[e + 1]))
        y[own] = rows[own] @ w[e].T
    expected = torch.stack([sum(gates[t, j] * (w[ids[t, j]] @ x[t]) for j in range(top_k)) for t in range(tokens)])
    torch.testing.assert_close(moe.combine(y, routing, gates), expected)


def test_picks_of_experts_elsewhere_belong_to_nobody_and_weigh_nothing():
    ids = torch.tensor([[0, -1], [EXPERTS, 1], [1, 0]])
    routing = moe.sort_by_expert(ids, EXPERTS)
    assert routing.offsets.tolist() == [1, 3, 5, 5, 5, 5, 5]
    y = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 4.0, float("nan")])[:, None].expand(6, 4)
    gates = torch.tensor([[0.5, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert moe.combine(y, routing, gates)[:, 0].tolist() == [0.5, 6.0, 6.0]


def test_quantized_activations_are_gathered_with_their_scales():
    x = QuantizedActivations(
        torch.arange(32, dtype=torch.int8).view(2, 16), torch.tensor([1.0, 2.0]), torch.tensor([3, 4]).int(), (2, 9)
    )
    routing = moe.sort_by_expert(torch.tensor([[1, 0], [0, 2]]), 3)
    rows = moe.gather(x, routing)
    assert routing.tokens.tolist() == [0, 1, 0, 1] and rows.shape == (4, 9) and rows.q.shape == (4, 16)
    assert rows.scales.tolist() == [1.0, 2.0, 1.0, 2.0] and rows.row_sums.tolist() == [3, 4, 3, 4]
    rows.check()


def test_nothing_is_read_back():
    """Every step works on tensors without values: a value that the host needed would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        routing = moe.sort_by_expert(torch.empty(7, 2, dtype=torch.int64), EXPERTS)
        y = moe.gather(torch.empty(7, 4), routing)
        assert moe.combine(y, routing, torch.empty(7, 2)).shape == (7, 4)


def test_refusals():
    routing = moe.sort_by_expert(torch.zeros(3, 2, dtype=torch.int64), EXPERTS)
    for call, argument in (
        (lambda: moe.sort_by_expert(torch.zeros(3, 2), EXPERTS), "expert_ids"),
        (lambda: moe.sort_by_expert(torch.zeros(3, dtype=torch.int64), EXPERTS), "expert_ids"),
        (lambda: moe.combine(torch.zeros(6, 4), routing, torch.zeros(3, 1)), "gates"),
        (lambda: moe.combine(torch.zeros(5, 4), routing, torch.zeros(3, 2)), "y"),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.argument == argument
