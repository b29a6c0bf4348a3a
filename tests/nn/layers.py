"""Layers of every family for tests: small, of odd sizes, with all optional tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from terrazzo.nn import Linear
from terrazzo.ops import fp8, mxfp4, mxfp4_fp8, mxfp4_mxfp8, nvfp4, w4a8, w4a16, w4ax, w8a16

N, K = 72, 200


def weight(n: int = N, k: int = K, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5


def act_order(n: int = N, k: int = K, group: int = 32) -> Any:
    generator = torch.Generator().manual_seed(1)
    groups = -(-k // group)
    return w4a16.pack(
        torch.randint(0, 16, (n, k), generator=generator),
        (torch.rand(n, groups, generator=generator) / 100 + 0.01).half(),
        torch.randint(0, 16, (n, groups), generator=generator),
        group_size=group,
        perm=torch.randperm(k, generator=torch.Generator().manual_seed(2)),
        bias=torch.randn(n, generator=generator).half(),
    )


def mixed(scales: str = "two_level", n: int = N, k: int = K, bias: bool = True) -> Any:
    magnitudes = torch.ones(k)
    magnitudes[::9] = 30.0
    plan = w4ax.plan_blocks(magnitudes, ratio=0.5)
    return w4ax.quantize(weight(n, k), plan, target="sm_90a", scales=scales, bias=torch.ones(n) if bias else None)


SMOOTH = torch.linspace(0.5, 2, K)
BIAS = torch.linspace(-1, 1, N)
PACKED: dict[str, Callable[[], Any]] = {
    "w4a16-g32": lambda: w4a16.quantize(weight(), group_size=32, bias=BIAS.half()),
    "w4a16-g64-sym": lambda: w4a16.quantize(weight(), group_size=64, symmetric=True),
    "w4a16-g128": lambda: w4a16.quantize(weight(), scale_dtype=torch.bfloat16),
    "w4a16-gK": lambda: w4a16.quantize(weight(), group_size=-1, scale_dtype=torch.float32),
    "w4a16 act-order": act_order,
    "mxfp4": lambda: mxfp4.quantize(weight(), bias=BIAS.half()),
    "mxfp4-e4m3": lambda: mxfp4_fp8.quantize(weight(), bias=BIAS.half()),
    "mxfp4-mxfp8": lambda: mxfp4_mxfp8.quantize(weight(), bias=BIAS.half()),
    "nvfp4": lambda: nvfp4.quantize(weight(), bias=BIAS.half()),
    "w8a16-gK-sym": lambda: w8a16.quantize(weight(), bias=BIAS.half()),
    "w8a16-g64": lambda: w8a16.quantize(weight(), group_size=64, symmetric=False),
    "fp8": lambda: fp8.quantize(weight()),
    "fp8-g128": lambda: fp8.quantize(weight(), granularity="block"),
    "w4a8-g64": lambda: w4a8.quantize(weight(), smooth=SMOOTH, bias=BIAS),
    "w4a8-g32": lambda: w4a8.quantize(weight(), group_size=32),
    "w4a8-e4m3-g128": lambda: w4a8.fp8.quantize(weight(), smooth=SMOOTH, bias=BIAS.half()),
    "w4ax-g128": mixed,
    "w4ax block scales": lambda: mixed("block"),
}


def layer(name: str) -> Linear:
    return Linear(PACKED[name]())


def x(m: int = 5, k: int = K, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(3)).to(dtype)
