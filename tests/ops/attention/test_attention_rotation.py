"""Rotated formats: rotation keeps scores, the clipped range is the best of its nine, wrong formats are refused."""

from __future__ import annotations

import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache import quantizer
from terrazzo.ops.attention.cache.cache import pack_cache
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.products.kv import FORMATS, HEAD_DIMS, KVFormat, get_format

ROTATED = [name for name, fmt in FORMATS.items() if fmt.rotation]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_rotation_is_the_hadamard_matrix_and_its_own_inverse(head_dim):
    numbers = torch.arange(head_dim)
    common = numbers[:, None] & numbers
    ones = sum(common >> bit & 1 for bit in range(8))
    matrix = (1.0 - 2.0 * (ones % 2)).double() / head_dim**0.5
    x = drawn(3, head_dim).double()
    assert torch.allclose(quantizer.rotated_exactly(x), x @ matrix, rtol=0, atol=1e-12)
    assert torch.allclose(quantizer.rotated_exactly(quantizer.rotated_exactly(x)), x, rtol=0, atol=1e-12)
    made = quantizer.rotate(x.float())
    assert made.dtype == torch.float16
    assert torch.allclose(made.double(), x @ matrix, rtol=2**-11, atol=1e-5)


def test_a_rotation_keeps_finite_values_finite():
    x = torch.full((1, 128), 6e4)
    assert quantizer.rotate(x)[0, 0] == quantizer.F16_MAX and not quantizer.rotate(x)[0, 1:].any()


@pytest.mark.parametrize("name", ROTATED)
def test_outliers_cost_a_rotated_format_less(name):
    x = drawn(64, 128)
    x[:, 5] *= 30
    plain = get_format(name.removesuffix("_hadamard"))
    errors = [
        float((quantizer.dequantize(quantizer.quantize(x, fmt), fmt) - x).square().mean())
        for fmt in (get_format(name), plain)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_the_clipped_range_has_the_least_error_of_all_nine():
    x = quantizer.rotate(drawn(200, 128) * torch.exp(drawn(200, 1, seed=1)))
    fmt = get_format("int2_hadamard")
    made = quantizer.encode(x, fmt)
    error = (quantizer.decoded(made, fmt) - x.double()).square().sum(-1)
    low, high = x.float().amin(-1), x.float().amax(-1)
    middle, half, least = (low + high) / 2, (high - low) / 2, None
    for outer in quantizer.CLIPS:
        part = half * (outer / quantizer.CLIP_STEPS)
        scale, zero = quantizer._parameters(middle - part, middle + part, 3)
        codes = quantizer._codes(x.float(), scale[:, None], zero[:, None], 3)
        found = quantizer.decoded(quantizer.QuantizedBlock(codes, scale, zero), fmt)
        found = (found - x.double()).square().sum(-1)
        least = found if least is None else torch.minimum(least, found)
    assert bool((error <= 1.03 * least).all())  # the choice counts in steps of 1/48 of half a range
    assert float((made.scale.float() * 3 / (high - low)).mean()) < 0.95, "nothing was clipped"


def test_equal_values_are_stored_without_a_clip():
    x = torch.full((2, 64), 0.75).half()
    made = quantizer.encode(x, get_format("int2_hadamard"))
    assert torch.equal(made.zero, x[:, 0]) and not made.codes.any() and not made.scale.any()


@pytest.mark.parametrize("role", ["keys", "values"])
def test_a_rotated_cache_gives_back_the_tokens(role):
    k, v = drawn(2, 2, 50, 64), drawn(2, 2, 50, 64, seed=1)
    names = ("int4_hadamard", "int4") if role == "keys" else ("int4", "int4_hadamard")
    made = pack_cache(k, v, *names, residual=16)
    for b in range(2):
        for found, x in zip(made.dequantize(b, 1), (k, v)):
            assert float((found - x[b, 1]).square().mean()) < 0.02
            assert torch.allclose(found[48:], x[b, 1, 48:].double(), atol=6e-3), "the residual block is rotated, too"


def test_the_rotation_is_part_of_a_layouts_identity():
    names = {CacheLayout(k, v, 128).identity for k in ("int4", "int4_hadamard") for v in ("int4", "int4_hadamard")}
    assert len(names) == 4


def test_formats_that_cannot_be_rotated_or_clipped_are_refused():
    with pytest.raises(ArgumentError, match="rotation"):
        KVFormat("x", "u4", "channel", group=64, rotation="hadamard")
    with pytest.raises(ArgumentError, match="rotation"):
        KVFormat("x", "u4", "token", rotation="fourier")
    with pytest.raises(ArgumentError, match="clip"):
        KVFormat("x", "u4", "token", clip="mse")
    with pytest.raises(ArgumentError, match="power of two"):
        quantizer.quantize(torch.zeros(3, 48), "int4_hadamard")
