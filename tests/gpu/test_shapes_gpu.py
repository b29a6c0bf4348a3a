"""Weights of random sizes, each through kernels that know none: integer data, whose product has one right value.

The sizes share some dozen kernels, so that a case takes milliseconds: 600 of each operator, 2,400 with
TERRAZZO_FUZZ_CASES=2400. Data are made on the GPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from terrazzo.lowering import Target, compile_many
from terrazzo.ops import fp8, w4a8, w4a16

CASES = int(os.environ.get("TERRAZZO_FUZZ_CASES", 600))
"""Random weights."""
TOKENS = (33, 48, 64, 65, 96, 128, 129, 200, 256, 300, 500, 700)


@dataclass(frozen=True)
class Case:
    """A weight [n, k] and m tokens."""

    n: int
    k: int
    m: int
    bias: bool
    seed: int


def cases(seed: int) -> list[Case]:
    """Sizes spread evenly over their logarithms."""
    draw = random.Random(seed)
    sized = lambda least, most: int(least * (most / least) ** draw.random())
    # rows of 16 bytes and others alike
    width = lambda: draw.choice((1, 1, 8, 64)) * sized(1, 90)
    return [Case(width(), sized(128, 6000) // 8 * 8, draw.choice(TOKENS), draw.random() < 0.5, i) for i in range(CASES)]


def integers(low: int, high: int, shape: tuple[int, ...], random_: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=random_, device="cuda")


def w4a16_weight(case: Case, rng: torch.Generator) -> w4a16.QuantizedWeight:
    groups = -(-case.k // 128)
    return w4a16.QuantizedWeight.canonical(
        integers(0, 16, (case.n, case.k), rng).to(torch.uint8),
        (2.0 ** -integers(0, 3, (case.n, groups), rng)).half(),
        integers(0, 17, (case.n, groups), rng),
        group_size=128,
        bias=integers(-9, 10, (case.n,), rng).half() if case.bias else None,
    )


def w4a8_weight(case: Case, rng: torch.Generator) -> w4a8.QuantizedWeight:
    groups = -(-case.k // 64)
    scales = integers(1, 17, (case.n, groups), rng)
    offsets = (torch.rand(case.n, groups, generator=rng, device="cuda") * (256 - 15 * scales)).int()
    return w4a8.QuantizedWeight.canonical(
        integers(0, 16, (case.n, case.k), rng).to(torch.uint8),
        scales,
        offsets,
        2.0 ** -integers(6, 9, (case.n,), rng),
        group_size=64,
        bias=integers(-9, 10, (case.n,), rng).float() if case.bias else None,
    )


def check(case: Case, gemm: Callable[[torch.Tensor], object], exact: torch.Tensor) -> None:
    """Two launches into poisoned memory give the product, and leave the rows around it."""
    for _ in range(2):
        whole = torch.full((case.m + 16, case.n), float("nan"), dtype=torch.float16, device="cuda")
        gemm(whole[8:-8])
        assert torch.equal(whole[8:-8], exact.half()), case
        assert bool(whole[:8].isnan().all()) and bool(whole[-8:].isnan().all()), case


def compiled(every: list[Case], named) -> None:
    """The kernels of all cases, which are few."""
    requests = list(dict.fromkeys(request for case in every for request in named(case)))
    assert {request.name.partition(".")[2] for request in requests} == {"stream_k"} and len(requests) < 80
    compile_many(requests)


def test_w4a16_is_right_for_weights_of_any_size(seed):
    every, target = cases(seed), Target.detect()
    facts = dict(symmetric=False, scale_dtype="float16", target=target)
    size = lambda case: dict(group_size=min(128, case.k), m=case.m, bias=case.bias)
    compiled(every, lambda case: w4a16.kernel_requests(case.n, case.k, **size(case), **facts))
    for case in every:
        rng = torch.Generator("cuda").manual_seed(case.seed)
        weight, x = w4a16_weight(case, rng), integers(-2, 3, (case.m, case.k), rng).half()
        exact = x.double() @ weight.dequantize().double().T
        exact += weight.bias.double() if case.bias else 0
        packed = weight.pack()
        check(case, lambda out, x=x, packed=packed: w4a16.gemm(x, packed, out=out), exact)


def test_w4a8_is_right_for_weights_of_any_size(seed):
    every, target = cases(seed + 1), Target.detect()
    size = lambda case: dict(group_size=64, m=case.m, bias=case.bias)
    compiled(every, lambda case: w4a8.kernel_requests(case.n, case.k, **size(case), dtype=None, target=target))
    for case in every:
        rng = torch.Generator("cuda").manual_seed(case.seed)
        weight, codes = w4a8_weight(case, rng), integers(-2, 3, (case.m, case.k), rng).to(torch.int8)
        exact = codes.double() @ weight.bytes().double().T * weight.channel_scales.double()
        exact += weight.bias.double() if case.bias else 0
        whole = torch.nn.functional.pad(codes, (0, -case.k % 16)).contiguous()
        sums, scales = codes.sum(1, dtype=torch.int32), torch.ones(case.m, device="cuda")
        x = w4a8.QuantizedActivations(whole, scales, sums, tuple(codes.shape))
        packed = weight.pack()
        check(case, lambda out, x=x, packed=packed: w4a8.gemm(x, packed, out=out), exact)


def test_fp8_is_right_for_weights_of_any_size(seed):
    every, target = cases(seed + 2), Target.detect()
    facts = dict(dtype="float16", target=target)
    size = lambda case: dict(group_size=case.k, m=case.m, bias=case.bias)
    compiled(every, lambda case: fp8.kernel_requests(case.n, case.k, **size(case), **facts))
    for case in every:
        rng = torch.Generator("cuda").manual_seed(case.seed)
        codes, x = integers(-4, 5, (case.n, case.k), rng).float(), integers(-2, 3, (case.m, case.k), rng).half()
        scales, bias = 2.0 ** -integers(0, 3, (case.n,), rng), integers(-9, 10, (case.n,), rng).half()
        exact = x.double() @ codes.double().T * scales.double() + (bias.double() if case.bias else 0)
        packed = fp8.pack(codes.to(torch.float8_e4m3fn), scales, bias=bias if case.bias else None)
        check(case, lambda out, x=x, packed=packed: fp8.gemm(x, packed, out=out), exact)
