"""The oracle: each numerics against its definition in numpy, and the error bound against simulated kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.w4a16 import QuantizedWeight, pack, reference
from terrazzo.ops.weight_only import decoding

N, K, G = 48, 320, 64


def layer(dtype: torch.dtype, seed: int = 0, symmetric: bool = False, group: int = G) -> QuantizedWeight:
    rng = torch.Generator().manual_seed(seed)
    groups = -(-K // group)
    scales = torch.exp(torch.randn(N, groups, generator=rng) * 0.6 - 4.8).to(dtype)
    zeros = None if symmetric else torch.randint(0, 17, (N, groups), generator=rng)
    return QuantizedWeight.canonical(torch.randint(0, 16, (N, K), generator=rng), scales, zeros, group_size=group)


def columns(weight: QuantizedWeight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, z, s) as float64 [N, K], by an index per column."""
    group = np.arange(K) // weight.group_size
    zeros = np.full(weight.scales.shape, 8) if weight.zeros is None else weight.zeros.numpy()
    return weight.codes.numpy().astype(float), zeros[:, group].astype(float), weight.scales.double().numpy()[:, group]


def test_exact_and_fused_round_as_half_instructions_do():
    """numpy rounds each float16 operation once: exact is sub, mul; fused is an fma, exact in float64."""
    weight = layer(torch.float16)
    q, z, s = columns(weight)
    exact = (q - z).astype(np.float16) * s.astype(np.float16)
    assert np.array_equal(weight.dequantize("exact").numpy(), exact)
    offset = (-z).astype(np.float16) * s.astype(np.float16)
    fused = (q * s + offset.astype(float)).astype(np.float16)
    assert np.array_equal(weight.dequantize("fused").numpy(), fused)
    assert np.array_equal(weight.dequantize("post").numpy(), (q - z) * s)
    assert 0.05 < (fused != exact).mean() < 0.6  # TurboMind's rounding is another one (specs.md B.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_is_the_correctly_rounded_weight(dtype):
    weight = layer(dtype)
    assert torch.equal(weight.dequantize("exact"), weight.dequantize("post").to(dtype))
    assert (
        weight.dequantize("fused").double() - weight.dequantize("post")
    ).abs().max() <= 2.0**-8 * 16 * weight.scales.max()


@pytest.mark.parametrize("numerics", ["exact", "fused", "post"])
def test_act_order_is_undone(numerics):
    weight, perm = layer(torch.float16), torch.randperm(K, generator=torch.Generator().manual_seed(1))
    shuffled = QuantizedWeight.canonical(weight.codes, weight.scales, weight.zeros, group_size=G, perm=perm)
    assert torch.equal(shuffled.dequantize(numerics)[:, perm], weight.dequantize(numerics))
    x = torch.randn(3, K).half()
    args = (x, shuffled, numerics)
    torch.testing.assert_close(
        reference.gemm(*args), reference.gemm(x[:, perm], weight, numerics), rtol=1e-12, atol=1e-12
    )
    bound, other = reference.forward_error_bound(*args), reference.forward_error_bound(x[:, perm], weight, numerics)
    torch.testing.assert_close(bound, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("group", "steps", "sums"), [(32, 2, 16), (128, 8, 4), (512, 32, 4)])
def test_the_bound_counts_the_sums_of_groups(group, steps, sums):
    """As its derivation says: T steps of a group, and A = 2 G + splits + 5 for G sums, at least one for each 128 k."""
    weight = QuantizedWeight.canonical(
        torch.ones(8, 512).int(), torch.ones(8, 512 // group).half(), None, group_size=group
    )
    x = torch.ones(1, 512).half()
    x[:, ::2] = -1  # so that y is 0, and no share of its rounding
    bound = lambda splits: reference.forward_error_bound(x, weight, "post", splits=splits)[0, 0].item()
    each = (bound(1064) - bound(64)) / 1000
    assert round(bound(64) / each) == 20 * steps + 2 * sums + 64 + 5


def kernel(x: torch.Tensor, weight: QuantizedWeight, numerics: str, splits: int, bias=None) -> torch.Tensor:
    """A kernel in float32: k16 steps in order, `splits` partial sums added in order, each operation rounded."""
    q, z, s = (torch.from_numpy(a) for a in columns(weight))
    x32, out = x.float(), torch.zeros(len(x), N)
    chunk = -(-K // weight.group_size // splits) * weight.group_size if weight.group_size < K else K
    for lo in range(0, K, chunk):
        part = torch.zeros(len(x), N)
        for k in range(lo, min(lo + chunk, K), weight.group_size):
            hi, acc = min(k + weight.group_size, K), torch.zeros(len(x), N)
            w = weight.dequantize(numerics, x.dtype).float() if numerics != "post" else None
            b = reference.POST_BIAS[str(x.dtype)[6:]]
            xsum = torch.zeros(len(x), 1)
            for step in range(k, hi, 16):
                part_k = slice(step, min(step + 16, hi))
                operand = (q[:, part_k] + b).float() if numerics == "post" else w[:, part_k]
                acc = acc + x32[:, part_k] @ operand.T
                xsum = xsum + x32[:, part_k].sum(1, keepdim=True)
            part = part + (s[:, k].float() * (acc - (z[:, k] + b).float() * xsum) if numerics == "post" else acc)
        out = out + part
    return (out if bias is None else out + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numerics", ["exact", "fused", "post"])
@pytest.mark.parametrize("group", [32, 64, K])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_correct_kernel_stays_inside_the_bound_and_a_wrong_one_does_not(dtype, numerics, group, splits):
    weight, bias = layer(dtype, group=group), torch.randn(N).to(dtype)
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(2)).to(dtype)
    ref, bound = reference.gemm(x, weight, numerics, bias), reference.forward_error_bound(x, weight, numerics, bias)
    y = kernel(x, weight, numerics, splits, bias)
    assert ((y.double() - ref).abs() <= bound).all()
    off_by_one = QuantizedWeight.canonical(weight.codes ^ 1, weight.scales, weight.zeros, group_size=group)
    assert ((kernel(x, off_by_one, numerics, splits, bias).double() - ref).abs() > bound).float().mean() > 0.5
    zero_shifted = QuantizedWeight.canonical(
        weight.codes, weight.scales, (weight.zeros.int() + 1).clamp(max=16), group_size=group
    )
    assert ((kernel(x, zero_shifted, numerics, splits, bias).double() - ref).abs() > bound).float().mean() > 0.5


def test_the_bound_is_tight_enough_to_mean_something():
    """At K = 4096 it allows a few percent of the output's typical size; bf16 post (operands 128 + q) is the loosest."""
    rng = torch.Generator().manual_seed(0)
    codes, x = torch.randint(0, 16, (32, 4096), generator=rng), torch.randn(16, 4096, generator=rng)
    for dtype, limit in ((torch.float16, 0.03), (torch.bfloat16, 0.07)):
        weight = QuantizedWeight.canonical(codes, torch.full((32, 32), 0.01).to(dtype))
        for numerics in ("exact", "post"):
            bound = reference.forward_error_bound(x.to(dtype), weight, numerics)
            assert (bound / reference.gemm(x.to(dtype), weight, numerics).std()).median() < limit


@pytest.mark.parametrize(
    ("arguments", "argument", "words"),
    [
        (("best", "float16", "float16"), "numerics", "use 'auto'"),
        (("exact", "float32", "float32"), "dtype", "convert x"),
        (("exact", "float16", "bfloat16"), "numerics", "use numerics='post'"),
        (("fused", "bfloat16", "float32"), "numerics", "they are float32"),
    ],
)
def test_numerics_are_checked(arguments, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        decoding.check_numerics(*arguments)
    assert caught.value.argument == argument


def test_numerics_that_every_pair_takes():
    for numerics in ("auto", "post"):
        for dtype in decoding.ACTIVATION_DTYPES:
            for scale in ("float16", "bfloat16", "float32"):
                decoding.check_numerics(numerics, dtype, scale)


def test_dequantize_refuses_what_is_undefined():
    weight = layer(torch.float32)
    with pytest.raises(ArgumentError, match="post"):
        weight.dequantize("exact")
    with pytest.raises(ArgumentError, match="depends on the problem"):
        weight.dequantize("auto")
    assert pack(weight).dequantize("post").dtype == torch.float64
