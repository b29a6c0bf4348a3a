"""Modules with W8A8 weights: products, states, joined layers, shards."""

from __future__ import annotations

import pytest
import torch
from terrazzo import nn
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.joined import join
from terrazzo.ops import w8a8

FORMATS = ("w8a8", "w8a8-e4m3", "w8a8-e4m3-g128")


def layer(format: str, n: int = 192, k: int = 256, **options) -> tuple[torch.nn.Linear, nn.Linear]:
    torch.manual_seed(n)
    dense = torch.nn.Linear(k, n).bfloat16()
    return dense, nn.Linear.from_float(dense, format, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_a_linear_layer_and_its_state(format):
    dense, made = layer(format)
    x = torch.randn(3, 256).bfloat16()
    y, expected = made(x), dense(x).detach()
    assert float((y - expected).float().norm() / expected.float().norm()) < 0.06
    assert str(made.format).startswith(format)
    again = nn.Linear.from_state(made.state_dict())
    empty = nn.Linear.empty(256, 192, format, bias=True, dtype=torch.bfloat16)
    empty.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(again(x), y) and torch.equal(empty(x), y)


@pytest.mark.parametrize("format", FORMATS)
def test_joined_layers_and_shards_mean_the_same(format):
    parts = [layer(format, n)[1] for n in (64, 128)]
    both = join([part.packed for part in parts])
    whole = torch.cat([part.packed.dequantize() for part in parts])
    assert torch.equal(both.dequantize(), whole)
    if not both.block:  # rows of 96 begin inside of 16
        rows = [both.shard(rank, 2).dequantize() for rank in range(2)]
        assert torch.equal(torch.cat(rows), whole)
    columns = [both.shard(rank, 2, 1) for rank in range(2)]
    assert torch.equal(torch.cat([shard.dequantize() for shard in columns], 1), whole)
    assert columns[0].bias is not None and columns[1].bias is None
    for shard in columns:
        shard.check_sizes()
        if format == "w8a8":  # sums of rows are those of what a rank has
            assert torch.equal(shard.scales[1, : shard.n], shard.unpack().codes.sum(1).float())


def test_blocks_that_begin_inside_of_a_warps_rows_are_refused():
    weight = w8a8.quantize_weight(torch.randn(200, 256), codes="e4m3", granularity="block")
    with pytest.raises(ArgumentError, match="scales"):
        weight.shard(1, 2).pack()
    with pytest.raises(ArgumentError, match="scales"):
        join([weight, weight])


def test_static_layers_with_other_scales_are_not_joined():
    pair = [layer("w8a8", 64, input_scale=scale)[1].packed for scale in (0.1, 0.2)]
    with pytest.raises(ArgumentError, match="input_scale"):
        join(pair)


@pytest.mark.parametrize("options", [{}, dict(input_scale=0.05), dict(asymmetric=True)])
def test_a_norm_in_front_makes_what_the_layer_multiplies(options):
    from terrazzo.nn.norm import RMSNorm

    for format in FORMATS[: 1 if options else 3]:
        _, made = layer(format, **options)
        norm = RMSNorm(torch.rand(256).bfloat16() + 0.5, 1e-6)
        h = torch.randn(5, 256).bfloat16()
        x, _ = norm.before(made, h)
        y, expected = made(x), made(norm(h))
        assert float((y.float() - expected.float()).norm() / expected.float().norm()) < 0.03, format


@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_a_mixture(format):
    """Two tokens, one of which goes to an expert that no other has, beside the layers in float."""
    rng = torch.Generator().manual_seed(2)
    gate_up, down = (torch.randn(3, *size, generator=rng) * 0.1 for size in ((256, 128), (128, 128)))
    made = nn.Experts.from_float(gate_up, down, format)
    x, ids = torch.randn(5, 128, generator=rng).bfloat16(), torch.tensor([[0, 2], [0, 1], [2, 0], [0, 2], [2, 0]])
    gates = torch.rand(5, 2, generator=rng)
    expected = torch.zeros(5, 128)
    for t in range(5):
        for slot in range(2):
            gate, up = (gate_up[ids[t, slot]] @ x[t].float()).chunk(2)
            expected[t] += gates[t, slot] * (down[ids[t, slot]] @ (torch.nn.functional.silu(gate) * up))
    y = made(x, ids, gates)
    assert float((y.float() - expected).norm() / expected.norm()) < 0.08
    shards = [made.gate_up_proj.packed.shard(rank, 2, parts=(128, 128)) for rank in range(2)]
    whole = made.gate_up_proj.packed[1].dequantize()
    halves = [shard[1].dequantize() for shard in shards]
    assert torch.equal(torch.cat([half[:64] for half in halves] + [half[64:] for half in halves]), whole)


@pytest.mark.parametrize("n, k", [(128, 128), (192, 64), (1, 128), (256, 256), (64, 129)])
def test_blocks_that_hold_all_of_a_row_are_scales_of_rows(n, k):
    made = nn.Linear.from_float(torch.randn(n, k), "w8a8-e4m3-g128")
    empty = nn.Linear.empty(k, n, "w8a8-e4m3-g128")
    empty.load_state_dict(made.state_dict(), assign=True)
    codes = torch.randn(n, k).to(torch.float8_e4m3fn)
    published = w8a8.QuantizedWeight.canonical(codes, torch.rand(-(-n // 128), -(-k // 128)) + 0.5)
    assert made.packed.block == empty.packed.block == published.pack().block == (k > 128)
