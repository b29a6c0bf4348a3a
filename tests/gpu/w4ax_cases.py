"""What W4Ax tests on the GPU share: random weights and activations, launches into poisoned memory, comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from terrazzo.ops import launching, w4ax
from terrazzo.ops.w4ax import activations, reference

DEVICE = HOME = "cuda"
"""Where kernels run, and where references are computed (tests/gpu/sanitized.py: on the CPU)."""


@dataclass(frozen=True)
class Spec:
    """A random weight: codes -8..7, a permutation unless all blocks are of one kind; `scales` as the quantizer has."""

    n: int
    k: int
    ratio: float
    bias: bool = False
    scales: str = "block"

    @lru_cache(maxsize=32)  # noqa: B019  a handful of weights for the session
    def build(self) -> w4ax.QuantizedWeight:
        rng = torch.Generator().manual_seed(self.n * 31 + self.k)
        plan = w4ax.plan_blocks(torch.rand(self.k, generator=rng) + 0.1, ratio=self.ratio)
        codes = torch.randint(-8, 8, (self.n, plan.padded), generator=rng).masked_fill(plan.order() < 0, 0)
        scales, channel = torch.exp(torch.randn(self.n, plan.blocks, generator=rng) * 0.5 - 4).bfloat16(), None
        if self.scales == "two_level":
            channel = scales[:, 0].float() / 8
            scales = channel[:, None] * torch.randint(1, 17, scales.shape, generator=rng)
        return w4ax.QuantizedWeight.canonical(
            codes, scales, k=self.k, blocks8=plan.blocks8, permutation=plan.permutation,
            bias=torch.randn(self.n, generator=rng) if self.bias else None, channel_scales=channel,
        ).to(HOME)  # fmt: skip

    @lru_cache(maxsize=64)  # noqa: B019
    def packed(self, arch: str) -> w4ax.PackedWeight:
        return self.build().pack(target=arch).to(DEVICE)


@dataclass(frozen=True)
class Case:
    """Launches of one weight. `launches`: how many must give the same bits."""

    spec: Spec
    ms: tuple[int, ...]
    out: str = "float32"
    arch: str = "sm_90a"
    launches: int = 2

    def requests(self) -> list:
        w = self.spec.packed(self.arch)
        return w4ax.weight_requests(w, self.ms, out_dtype=getattr(torch, self.out))


def needs(arch: str) -> None:
    if arch == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")


def codes(weight: w4ax.QuantizedWeight, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes that use the whole range of their blocks, and scales. For two-level weights they are as bytes hold them:
    times a factor of their block, scales the same in all blocks of a precision."""
    rng = torch.Generator().manual_seed(seed)
    limit = reference.limits(weight.blocks, weight.blocks8).int().repeat_interleave(128)
    q = torch.randint(-127, 128, (m, weight.codes.shape[1]), generator=rng)
    q = torch.where(limit == 7, q % 15 - 7, q).to(torch.int8)
    scales = torch.exp(torch.randn(m, weight.blocks, generator=rng) * 0.3 - 3)
    if weight.two_level:
        high = weight.blocks - weight.blocks8
        factor = torch.randint(1, 19, (m, high, 1), generator=rng)
        q[:, : high * 128] = (q[:, : high * 128].view(m, high, 128) * factor).view(m, -1)
        scales[:, :high], scales[:, high:] = scales[:, :1].clone(), scales[:, -1:].clone()
    return q.to(HOME), scales.to(HOME)


def quantized(q: torch.Tensor, scales: torch.Tensor, w: w4ax.PackedWeight) -> w4ax.QuantizedActivations:
    """`codes` as activations for `w`, whose form their scales have. Native s4 holds no product with a factor."""
    if w.two_level and w.native:
        high = (w.blocks - w.blocks8) * 128
        q = torch.cat([q[:, :high].clamp(-7, 7), q[:, high:]], dim=1)
    return activations.from_codes(q.to(DEVICE), scales.to(DEVICE), w, activations.default_granularity(w))


def launch(case: Case, x: w4ax.QuantizedActivations, w: w4ax.PackedWeight) -> torch.Tensor:
    """Runs into poisoned memory; all of y and nothing else is written, and the bits repeat."""
    dtype, first = getattr(torch, case.out), None
    for _ in range(case.launches):
        guarded = torch.full((x.m + 2, w.n), float("nan"), dtype=dtype, device=DEVICE)
        y = w4ax.gemm(x, w, out=guarded[1:-1], out_dtype=dtype)
        assert guarded[0].isnan().all() and guarded[-1].isnan().all(), "rows beside the output were written"
        first = y.clone() if first is None else first
        assert torch.equal(first.view(torch.int16), y.view(torch.int16)), "two runs differ"
    slots = launching._pools[w.words.device].semaphores
    assert not slots.any(), "semaphores are not zero"
    return first


def compare(y: torch.Tensor, ref: torch.Tensor, bound: torch.Tensor, where: str) -> None:
    bad = ~((y.double() - ref).abs() <= bound)
    if bool(bad.any()):
        rows, columns = bad.nonzero(as_tuple=True)
        some = [(r, c, float(y[r, c]), float(ref[r, c])) for r, c in list(zip(rows.tolist(), columns.tolist()))[:6]]
        spans = f"rows {int(rows.min())}..{int(rows.max())}, columns {int(columns.min())}..{int(columns.max())}"
        raise AssertionError(f"{int(bad.sum())} of {y.numel()} wrong ({spans}): {some}; {where}")


def product(case: Case) -> None:
    """Every M of the case: y inside its bound, all of it and nothing else written, the same bits in every launch."""
    weight, w = case.spec.build(), case.spec.packed(case.arch)
    for m in case.ms:
        q, scales = codes(weight, m, m)
        x = quantized(q, scales, w)
        q = x.codes().to(HOME)
        y = launch(case, x, w)
        ref = reference.gemm(q, scales, weight)
        bound = reference.forward_error_bound(q, scales, weight, y.dtype)
        compare(y.to(HOME), ref, bound, f"{case}, M = {m}")
