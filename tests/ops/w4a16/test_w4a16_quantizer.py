"""quantize(): better than plain rounding, near the best possible on normal weights, exact on representable ones."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a16
from terrazzo.ops.quantizers import rows


def weight(n=96, k=512, seed=0, dtype=torch.float16) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=rng) * 0.02
    w[torch.rand(n, k, generator=rng) < 0.005] *= 8  # outliers, the reason for clipping
    return w.to(dtype)


def error(w: torch.Tensor, quantized: w4a16.QuantizedWeight) -> float:
    return float((w.double() - quantized.dequantize("post")).square().mean() / w.double().square().mean())


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_searched_clipping_beats_plain_rounding(group, symmetric):
    w = weight()
    plain = w4a16.quantize_weight(w, group_size=group, symmetric=symmetric, clip_steps=1)
    searched = w4a16.quantize_weight(w, group_size=group, symmetric=symmetric)
    assert searched.symmetric == symmetric and searched.group_size == (512 if group == -1 else group)
    assert error(w, searched) < 0.97 * error(w, plain)
    per_group = [
        (w.double() - q.dequantize("post")).view(96, -1, searched.group_size).square().sum(-1)
        for q in (searched, plain)
    ]
    assert (per_group[0] <= per_group[1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_normal_weight_reaches_the_best_uniform_quantizer(symmetric):
    """Max (1960): 16 uniform levels lose 0.01154 of a normal variable's power; an integer zero point costs
    3 % of that; small groups adapt and lose less."""
    w = torch.randn(64, 8192, generator=torch.Generator().manual_seed(1))
    whole, small = (
        w4a16.quantize_weight(w, group_size=g, symmetric=symmetric, scale_dtype=torch.float32) for g in (-1, 32)
    )
    assert error(w, whole) < 1.04 * 0.01154
    assert error(w, small) < 0.75 * 0.01154


@pytest.mark.parametrize("symmetric", [False, True])
def test_representable_weights_are_recovered_exactly(symmetric):
    rng = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (32, 256), generator=rng)
    codes[:, ::64], codes[:, 1::64] = 0, 15
    zeros = None if symmetric else torch.randint(0, 16, (32, 4), generator=rng)
    original = w4a16.QuantizedWeight.canonical(
        codes, 2.0 ** torch.randint(-9, -3, (32, 4), generator=rng).float(), zeros
    )
    w = original.dequantize("post").float()
    # Both ends of the grid occur: symmetric, the exact scale is the ratio 7/8 of the search, the third of nine.
    again = w4a16.quantize_weight(w, group_size=64, symmetric=symmetric, clip_steps=9, clip_min=0.5)
    assert torch.equal(again.dequantize("post").float(), w)


@pytest.mark.parametrize("k", [96, 100, 333, 2880])
def test_ragged_groups(k):
    w = weight(7, k, seed=k)
    whole = k // 128 * 128
    quantized = w4a16.quantize_weight(w, group_size=128)
    assert quantized.codes.shape == w.shape and error(w, quantized) < 0.04
    if 0 < whole < k:
        first = w4a16.quantize_weight(w[:, :whole].contiguous(), group_size=128)
        assert torch.equal(quantized.codes[:, :whole], first.codes)


def test_zero_tiny_and_constant_groups():
    w = torch.zeros(4, 128)
    w[1], w[2], w[3] = 1e-30, 0.25, -3.0
    for symmetric in (False, True):
        quantized = w4a16.quantize_weight(w, group_size=64, symmetric=symmetric)
        torch.testing.assert_close(quantized.dequantize("post"), w.double(), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "dtype", "remedy"),
    [(1e-8, torch.float16, "torch.bfloat16"), (5e-7, torch.float16, "torch.float32"), (1e-36, torch.float32, "up")],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_too_small_for_their_dtype_are_refused(size, dtype, remedy, symmetric):
    w = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ArgumentError, match=f"scale_dtype = .*too coarse.*{remedy}"):
        w4a16.quantize(w * size, scale_dtype=dtype, symmetric=symmetric)
    held = w4a16.quantize_weight(w * max(size, 1e-5), scale_dtype=torch.bfloat16, symmetric=symmetric)
    assert error(w * max(size, 1e-5), held) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_weights_that_scales_can_hold_are_taken(dtype):
    w = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * 2e-5
    assert error(w, w4a16.quantize_weight(w, scale_dtype=dtype)) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scale_dtype_follows_the_weight(dtype):
    assert w4a16.quantize_weight(weight(dtype=dtype)).scales.dtype == (
        torch.float16 if dtype == torch.float32 else dtype
    )
    assert w4a16.quantize(weight(dtype=dtype), scale_dtype=torch.float32).scale_dtype == "float32"


def test_chunks_do_not_matter(monkeypatch):
    w = weight()
    whole = w4a16.quantize(w, bias=torch.ones(96))
    monkeypatch.setitem(rows._CHUNK, "cpu", 2 * 7 * 512)
    parts = w4a16.quantize(w, bias=torch.ones(96))
    assert torch.equal(whole.words, parts.words) and torch.equal(whole.params, parts.params) and parts.bias is not None


@pytest.mark.parametrize("symmetric", [False, True])
def test_importance_moves_the_error_to_channels_that_count_less(symmetric):
    w, importance = weight(k=500).float(), torch.rand(500, generator=torch.Generator().manual_seed(3)) ** 4
    output_error = lambda made: float(((made.dequantize("post") - w.double()).square() * importance).sum())
    options = dict(group_size=64, symmetric=symmetric)
    plain, weighted = (w4a16.quantize_weight(w, importance=i, **options) for i in (None, importance))
    assert output_error(weighted) < 0.95 * output_error(plain)
    ones = w4a16.quantize_weight(w, importance=torch.ones(500), **options)
    assert torch.equal(ones.codes, plain.codes) and torch.equal(ones.scales, plain.scales)


@pytest.mark.parametrize(
    ("changes", "argument", "words"),
    [
        ({"weight": torch.zeros(8)}, "weight", "N, K"),
        ({"weight": torch.zeros(8, 8, dtype=torch.int8)}, "weight", "float tensor"),
        ({"weight": [[1.0]]}, "weight", "nn.Linear.weight"),
        ({"weight": torch.full((8, 64), float("nan"))}, "weight", "finite"),
        ({"group_size": 16}, "group_size", "use 128"),
        ({"scale_dtype": torch.float64}, "scale_dtype", "use torch.float16"),
        ({"weight": torch.full((8, 64), 3e6), "scale_dtype": torch.float16}, "scale_dtype", "cannot hold"),
        ({"symmetric": "no"}, "symmetric", "True or False"),
        ({"clip_steps": 0}, "clip_steps", "1 for no search"),
        ({"clip_min": 0.0}, "clip_min", "use the default"),
        ({"importance": torch.ones(5)}, "importance", "512"),
    ],
)
def test_bad_input_names_argument_and_remedy(changes, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        w4a16.quantize(**({"weight": weight()} | changes))
    assert caught.value.argument == argument
