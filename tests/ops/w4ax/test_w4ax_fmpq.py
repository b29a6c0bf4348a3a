"""FMPQ: statistics, outliers, permutation, folding, and what they do to the error of a layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4ax
from terrazzo.ops.w4ax import reference
from terrazzo.ops.w4ax.fmpq import PADDING


def activations(tokens: int, k: int, outliers: int, seed: int = 0, times: float = 40.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=rng)
    x[:, torch.randperm(k, generator=rng)[:outliers]] *= times
    return x


def statistics_of(x: torch.Tensor, **options) -> w4ax.ActivationStatistics:
    return w4ax.ActivationStatistics.empty(x.shape[-1], **options).observe(x)


def test_statistics_are_the_same_however_they_are_streamed(tmp_path):
    x = activations(300, 200, 5)
    x[7, 11] = 1e4
    whole = statistics_of(x, percentile=0.99)
    parts = [statistics_of(part, percentile=0.99) for part in (x[:100], x[100:140].view(2, 20, 200), x[140:140])]
    rest = statistics_of(x[140:], percentile=0.99)
    merged = parts[0].merge(statistics_of(x[100:140], percentile=0.99)).merge(rest)
    assert merged.tokens == 300 and torch.equal(merged.magnitude, whole.magnitude)
    assert torch.equal(merged.maximum, x.abs().amax(0))
    torch.testing.assert_close(merged.mean_square, x.square().mean(0), rtol=1e-5, atol=0)
    exact = x.abs().sort(dim=0).values[297 - 1]  # 99 % of 300 values
    assert bool((whole.magnitude >= exact).all() and (whole.magnitude <= exact * 2**0.126).all())
    assert whole.magnitude[11] < 100 < whole.maximum[11]
    whole.save(tmp_path / "s.safetensors")
    back = w4ax.ActivationStatistics.load(tmp_path / "s.safetensors")
    assert back.tokens == 300 and back.percentile == 0.99 and torch.equal(back.magnitude, whole.magnitude)


def test_statistics_refuse():
    statistics = w4ax.ActivationStatistics.empty(8)
    for bad in (torch.ones(3, 9), torch.full((2, 8), float("nan")), torch.ones(2, 8, dtype=torch.int32)):
        with pytest.raises(ArgumentError) as error:
            statistics.observe(bad)
        assert error.value.argument == "x"
    with pytest.raises(ArgumentError):
        w4ax.ActivationStatistics.empty(8, percentile=1.0)
    with pytest.raises(ArgumentError):
        statistics.merge(w4ax.ActivationStatistics.empty(9))


@given(
    k=st.integers(1, 700), outliers=st.integers(0, 300), seed=st.integers(0, 99),
    limits=st.sampled_from([{}, {"floor": 1}, {"ceiling": 0}, {"ratio": 0.25}, {"ratio": 1.0}, {"ratio": 0.0}]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_a_plan_permutes_and_gathers(k, outliers, seed, limits):
    x = activations(16, k, min(outliers, k), seed)
    statistics = statistics_of(x)
    plan = w4ax.plan_blocks(statistics, **limits)
    order = plan.order()
    assert plan.padded == len(order) == -(-k // 128) * 128
    assert torch.equal(order[order >= 0].sort().values, torch.arange(k)) and (order[order < 0] == PADDING).all()
    assert torch.equal(plan.restore(plan.arrange(x)), x)
    c, first8 = statistics.magnitude, (plan.blocks - plan.blocks8) * 128
    low, high = order[:first8], order[first8:]
    if plan.blocks8 and len(low[low >= 0]):
        assert c[high[high >= 0]].min() >= c[low[low >= 0]].max()  # INT8 blocks hold the largest channels
    for half in (low, high):
        channels = half[half >= 0]
        assert (channels.diff() > 0).all()  # stable
    if not limits:
        assert plan.blocks8 == -(-int(plan.outliers.sum()) // 128)
        assert not plan.outliers[low[low >= 0]].any()
    elif "ratio" in limits:
        assert plan.blocks8 == int(limits["ratio"] * plan.blocks + 0.5)
    elif "floor" in limits:
        assert plan.blocks8 >= 1
    else:
        assert plan.blocks8 == 0 and plan.permutation is None


def test_outliers_by_threshold():
    c = torch.full((384,), 2.0)
    c[5], c[130], c[300], c[301] = 12.01, 40.0, 12.0, 0.0
    plan = w4ax.plan_blocks(c)
    assert plan.threshold == 12.0 and plan.outliers.nonzero().flatten().tolist() == [5, 130]
    assert plan.blocks8 == 1 and plan.precisions() == (4, 4, 8) and plan.ratio == 1 / 3
    assert {5, 130, 300} <= set(plan.order()[256:].tolist())  # the rest of the block takes the next largest
    assert w4ax.plan_blocks(c, tau=30).blocks8 == 0
    assert w4ax.plan_blocks(torch.zeros(256)).blocks8 == 0


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"tau": 0.0}, "tau"),
        ({"floor": 4}, "floor"),
        ({"floor": 2, "ceiling": 1}, "floor"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": 0.5, "floor": 1}, "ratio"),
    ],
)
def test_a_plan_refuses(options, argument):
    with pytest.raises(ArgumentError) as error:
        w4ax.plan_blocks(torch.ones(384), **options)
    assert error.value.argument == argument
    with pytest.raises(ArgumentError):
        w4ax.plan_blocks(torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize("k", [512, 333])
def test_permuted_and_blocked_equals_dequantized_exactly(k):
    """With scales that are powers of two every product and sum is exact in float64."""
    rng = torch.Generator().manual_seed(k)
    plan = w4ax.plan_blocks(statistics_of(activations(8, k, 9)))
    power = lambda *shape: torch.exp2(torch.randint(-6, 3, shape, generator=rng).float())
    codes = torch.randint(-8, 8, (20, plan.padded), generator=rng).masked_fill(plan.order() < 0, 0)
    weight = w4ax.QuantizedWeight.canonical(
        codes, power(20, plan.blocks), k=k, blocks8=plan.blocks8, permutation=plan.permutation
    )
    limit = reference.limits(plan.blocks, plan.blocks8).int().repeat_interleave(128)
    q = torch.randint(-127, 128, (6, plan.padded), generator=rng).clamp(-limit, limit).masked_fill(plan.order() < 0, 0)
    scales = power(6, plan.blocks)
    x = plan.restore(q.double() * scales.double().repeat_interleave(128, dim=1))  # in the order of the input
    sums = reference.block_sums(q.to(torch.int8), weight).double()
    blocked = torch.einsum("bmn,mb,nb->mn", sums, scales.double(), weight.scales.double())
    assert torch.equal(blocked, x @ weight.dequantize().T)
    assert torch.equal(blocked, reference.gemm(q.to(torch.int8), scales, weight))
    found, found_scales = reference.quantize_activations(
        x.float(), blocks8=plan.blocks8, permutation=plan.permutation, granularity="static", static_scales=scales[0]
    )
    assert torch.equal(found[0], q[0].to(torch.int8)) and torch.equal(found_scales[0], scales[0])


def test_planted_outliers_cost_half_of_all_4_bit():
    x, rng = activations(256, 512, 9), torch.Generator().manual_seed(1)
    weight = torch.randn(96, 512, generator=rng)
    statistics = statistics_of(x)
    plan = w4ax.plan_blocks(statistics)
    assert plan.blocks8 == 1
    made = w4ax.report(statistics, plan, weight, x, importance=statistics.mean_square)
    assert made.outliers == 9 and made.touched == 3 and made.macs4 == 0.75
    assert made.errors["w4a4"] >= 1.5 * made.errors["w4ax"]
    assert max(made.errors["w4"], made.errors["w4a8"]) <= made.errors["w4ax"]
    assert w4ax.report(statistics, plan, weight, x.view(16, 16, 512), importance=statistics.mean_square) == made
    assert "9 above" in str(made) and "1 (25.0%)" in str(made)


def test_a_report_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    x = activations(64, 300, 3)
    statistics = statistics_of(x)
    made = w4ax.report(statistics, w4ax.plan_blocks(statistics), torch.randn(16, 300), x)
    made.plot(tmp_path / "layer.png")
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_folding_replaces_the_gather():
    """down(silu(gate) * up): the producers' rows take the order, the activations then need none."""
    rng = torch.Generator().manual_seed(3)
    h, k = 64, 256
    gate, up, down = (
        torch.randn(k, h, generator=rng),
        torch.randn(k, h, generator=rng),
        torch.randn(40, k, generator=rng),
    )
    up[[3, 77, 140]] *= 50
    x = torch.randn(32, h, generator=rng)
    act = lambda g, u: torch.nn.functional.silu(x @ g.T) * (x @ u.T)
    plan = w4ax.plan_blocks(statistics_of(act(gate, up)))
    assert plan.permutation is not None and plan.blocks8 == 1
    folded = act(*w4ax.fold(plan, gate, up))
    assert plan.folded().permutation is None and plan.folded().blocks8 == 1
    torch.testing.assert_close(folded, plan.arrange(act(gate, up)))
    gathered, kept = (w4ax.quantize_weight(down, plan, folded=f) for f in (False, True))
    assert kept.permutation is None and torch.equal(kept.codes, gathered.codes)
    a = reference.quantize_activations(folded, blocks8=1)
    b = reference.quantize_activations(plan.restore(folded), blocks8=1, permutation=plan.permutation)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    ragged = w4ax.plan_blocks(torch.linspace(1, 20, 200), floor=1)
    with pytest.raises(ArgumentError, match="multiple of 128"):
        w4ax.fold(ragged, torch.ones(200, 2))
    with pytest.raises(ArgumentError):
        w4ax.fold(plan, torch.ones(255, 2))


def test_plans_are_saved(tmp_path):
    for c in (torch.linspace(1, 50, 300), torch.ones(300)):
        plan = w4ax.plan_blocks(c)
        plan.save(tmp_path / "plan.safetensors")
        back = w4ax.BlockPlan.load(tmp_path / "plan.safetensors")
        assert torch.equal(back.order(), plan.order()) and torch.equal(back.outliers, plan.outliers)
        assert (back.k, back.blocks8, back.threshold) == (plan.k, plan.blocks8, plan.threshold)
    with pytest.raises(ArgumentError):
        w4ax.PackedWeight.load(tmp_path / "plan.safetensors")


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"permutation": torch.arange(100, dtype=torch.int32)}, "permutation"),
        ({"permutation": torch.full((384,), 999, dtype=torch.int32)}, "permutation"),
        ({"permutation": torch.arange(384).float()}, "permutation"),
        ({"k": 0}, "k"),
        ({"k": 512}, "outliers"),
        ({"blocks8": 4}, "blocks8"),
        ({"outliers": torch.zeros(300)}, "outliers"),
    ],
)
def test_damaged_plans_are_refused(tmp_path, changes, argument):
    plan = w4ax.plan_blocks(torch.linspace(50, 1, 300), ratio=0.5)
    dataclasses.replace(plan, **changes).save(tmp_path / "plan.safetensors")
    with pytest.raises(ArgumentError) as caught:
        w4ax.BlockPlan.load(tmp_path / "plan.safetensors")
    assert caught.value.argument == argument
