"""INT8 weights on the GPU: the oracles of tests/gpu/oracles.py, and experts.

With TERRAZZO_TEST_TARGET=sm_80 the weights are packed for that target, and its kernels run through PTX.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracles import DEVICE, KINDS, TARGET, Case, Spec, canonical, check, guarded, run_all
from terrazzo.lowering.targets import Target
from terrazzo.ops import w8a16
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a16 import reference
from terrazzo.ops.weight_only import op

BF16, F32 = "bfloat16", "float32"
SPECS = (
    Spec(320, 1056, -1, symmetric=True, dtype=BF16, bias=True, weight="u8"),
    Spec(320, 1056, -1, symmetric=True, weight="u8"),
    Spec(320, 1056, 128, dtype=BF16, weight="u8"),
    Spec(256, 512, 32, symmetric=True, dtype=BF16, weight="u8"),
    Spec(130, 576, 64, bias=True, weight="u8"),
    Spec(257, 203, 32, act_order=True, weight="u8"),
    Spec(256, 512, 64, scale=F32, weight="u8"),
)
MS, FEW_MS = (1, 3, 8, 16, 50, 128, 300), (2, 16, 40, 200)
TESTED = SPECS if TARGET is None else (SPECS[0], SPECS[4])
TOKENS = MS if TARGET is None else FEW_MS


def products(spec: Spec, kind: str) -> tuple[Case, ...]:
    return tuple(Case(spec, m, kind=kind, seed=1) for m in TOKENS)


@dataclass(frozen=True)
class Experts:
    """Four weights [256, 512], and tokens of all of them together."""

    symmetric: bool
    m: int = 40

    @property
    def spec(self) -> Spec:
        group = -1 if self.symmetric else 64
        return Spec(256, 512, group, symmetric=self.symmetric, dtype=BF16, weight="u8")

    def requests(self) -> list:
        if TARGET is not None:
            return op.experts_requests(self.made()[1], self.m, BF16)
        spec = self.spec
        facts = dict(group_size=64 if spec.group > 0 else spec.k, symmetric=spec.symmetric, m=self.m)
        return w8a16.grouped_requests(spec.n, spec.k, 4, scale_dtype=BF16, dtype=BF16, target=Target.detect(), **facts)

    def made(self) -> tuple[list, GroupedWeight]:
        """Canonical weights of four experts, and their stack."""
        experts = [canonical(self.spec, False, seed) for seed in range(4)]
        return experts, GroupedWeight.stack([one.pack(target=TARGET) for one in experts])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "cases", [pytest.param(products(spec, kind), id=f"{spec}-{kind}") for spec in TESTED for kind in KINDS]
)
def test_products_are_those_of_the_oracles(cases):
    run_all(check, cases)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("cases", [(Experts(True),), (Experts(False),)], ids=("symmetric", "zeros"))
def test_experts(cases):
    (case,) = cases
    spec, m = case.spec, case.m
    experts, w = case.made()
    x = torch.randn(m, spec.k, generator=torch.Generator().manual_seed(m)).to(DEVICE, torch.bfloat16)
    offsets = torch.tensor([0, 5, 5, m - 9, m], dtype=torch.int32, device=DEVICE)
    held = [guarded(m, spec.n, x.dtype, float("nan"), odd=odd) for odd in (False, True)]
    outs = [each[8:-8] for each in held]
    for out in outs:
        w8a16.grouped_gemm(x, w, offsets, out=out)
    assert torch.equal(*outs) and all(bool(each[[*range(8), *range(-8, 0)]].isnan().all()) for each in held)
    for e, one in enumerate(experts):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        expected, bound = reference.gemm(x[rows], one, "exact"), reference.forward_error_bound(x[rows], one, "exact")
        assert bool(((outs[0][rows].double() - expected).abs() <= bound).all()), e
