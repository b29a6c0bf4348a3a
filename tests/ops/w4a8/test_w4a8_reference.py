"""The oracle of W4A8 against second formulas, and its error bound against a simulated kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from terrazzo.layouts.emulate import emulate_w4a8
from terrazzo.lowering.errors import LayoutError
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import reference
from terrazzo.ops.w4a8.format import unit_layout


def tokens(m=5, k=320, seed=0, dtype=torch.float16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_activations_by_hand():
    x = torch.tensor([[127.0, 63.5, -0.5, 1.5, -127.0], [0, 0, 0, 0, 0], [2.0**-130, 0, 0, 0, 0]])
    q, scales, sums = reference.quantize_activations(x)
    assert q.tolist() == [[127, 64, 0, 2, -127], [0] * 5, [0] * 5]  # half to even
    assert scales.tolist() == [1.0, 1.0, 1.0] and sums.tolist() == [66, 0, 0]


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_activations_are_within_half_a_step(smooth, norm):
    x = tokens(7, 333)
    rng = torch.Generator().manual_seed(1)
    s = torch.rand(333, generator=rng) + 0.5 if smooth else None
    g = torch.randn(333, generator=rng).half() if norm else None
    q, scales, sums = reference.quantize_activations(x, s, g, eps=1e-5)
    wanted = x.double()
    if norm:
        wanted = wanted / (wanted.square().mean(1, keepdim=True) + 1e-5).sqrt() * g.double()
    if smooth:
        wanted = wanted / s.double()
    error = (q.double() * scales.double()[:, None] - wanted).abs()
    assert (error <= 0.5001 * scales.double()[:, None]).all()
    assert torch.equal(q.abs().amax(1), torch.full((7,), 127, dtype=torch.int8))
    assert torch.equal(sums, q.int().sum(1).int())


def test_broken_rows_show():
    x = tokens(3, 64)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    q, scales, _ = reference.quantize_activations(x)
    assert scales[0].isnan() and scales[1].isinf() and scales[2].isfinite() and not q[:2].any()


def test_the_product_is_the_plain_one():
    weight = w4a8.quantize_weight(torch.randn(40, 320, generator=torch.Generator().manual_seed(2)))
    q, scales, _ = reference.quantize_activations(tokens())
    acc = reference.accumulate(q, weight)
    assert np.array_equal(acc.numpy(), q.numpy().astype(np.int64) @ weight.bytes().numpy().astype(np.int64).T)
    y = reference.gemm(q, scales, weight, torch.ones(40))
    dense = (q.double() * scales.double()[:, None]) @ reference.dequantize(weight).T + 1
    torch.testing.assert_close(y, dense, rtol=1e-12, atol=1e-9)
    assert torch.equal(reference.accumulate(q, weight.pack()), acc)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_correct_epilogue_stays_inside_the_bound_and_a_wrong_sum_does_not(dtype, bias):
    weight = w4a8.quantize_weight(torch.randn(64, 2048, generator=torch.Generator().manual_seed(3)))
    b = torch.randn(64) if bias else None
    q, scales, _ = reference.quantize_activations(tokens(16, 2048, 4))
    ref = reference.gemm(q, scales, weight, b)
    bound = reference.forward_error_bound(ref, dtype, b)

    def kernel(acc):  # either order of the scales
        for first, second in ((weight.channel_scales, scales[:, None]), (scales[:, None], weight.channel_scales)):
            y = acc.float() * first * second
            yield ((y if b is None else y + b).to(dtype).double() - ref).abs() <= bound

    acc = reference.accumulate(q, weight)
    assert all(inside.all() for inside in kernel(acc))
    lost = weight.bytes()[:, -1:].T.int() * q[:, -1:].int()  # one product is missing
    wrong = lost != 0
    limit = 0.5 if dtype == torch.float16 else 0.05
    assert all((~inside[wrong]).float().mean() > limit for inside in kernel(acc - lost))


def test_the_emulation_refuses_what_it_cannot_compute():
    words, unit = w4a8.quantize(torch.randn(64, 128)).words.numpy(), unit_layout(64)
    for x, n, options, name in (
        (np.zeros((1, 129)), 64, {}, "x"),
        (np.zeros((1, 128)), 65, {}, "x"),
        (np.zeros((1, 128)), 64, {"dequantization": "vadd4"}, "dequantization"),
        (np.full((1, 128), 1 << 24), 64, {}, "x"),
    ):
        with pytest.raises(LayoutError) as caught:
            emulate_w4a8(x, words, unit, n=n, **options)
        assert caught.value.argument == name
