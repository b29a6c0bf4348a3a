"""The oracles of W4A8 on e4m3, for one case at a time.

    exact     one-hot or small integer activations, factors that are powers of two: every sum is a float32
    random    16-bit activations through the whole operator, inside the bound; all together within 1 % of the product

Each run writes into NaN between guard rows that must survive, and is repeated: same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from terrazzo.ops import mxfp4_fp8, mxfp4_mxfp8, w4a8
from terrazzo.ops.w4a8 import fp8, fp8_reference, mxfp8

DEVICE = "cuda"
HOME = "cuda"
"""Where references are computed: the sanitizer watches kernels of ours alone."""


@dataclass(frozen=True)
class Spec:
    n: int
    k: int
    group: int = 128
    bias: bool = False
    smooth: bool = False
    mxfp4: bool = False
    groups: bool = False
    """MXFP8 activations."""


@dataclass(frozen=True)
class Case:
    """One operator call: m tokens, output dtype, "one-hot", "integer" or "random" activations."""

    spec: Spec
    m: int
    kind: str = "random"
    seed: int = 0

    @property
    def out(self) -> str:
        """Kernels are few: a weight has one output dtype."""
        return ("float16", "bfloat16")[self.spec.n % 2]

    def requests(self) -> list:
        dtype = getattr(torch, self.out)
        return w4a8.weight_requests(packed(self.spec, self.kind == "random"), self.m, dtype) if self.m else []


@lru_cache
def canonical(spec: Spec, free: bool) -> fp8.QuantizedWeight:
    """A weight where references are computed; its scales are free, or powers of two."""
    rng = torch.Generator().manual_seed(spec.n)
    shape = (spec.n, -(-spec.k // spec.group))
    if spec.mxfp4:
        return mxfp4_weight(spec, free, rng)
    factors = torch.randn(shape, generator=rng) if free else 2.0 ** torch.randint(-2, 2, shape, generator=rng)
    channels = torch.exp(torch.randn(spec.n, generator=rng) * 0.5 - 5) if free else torch.full((spec.n,), 2.0**-6)
    return fp8.QuantizedWeight.canonical(
        torch.randint(-8, 8, (spec.n, spec.k), generator=rng),
        factors.half(),
        channels,
        group_size=spec.group,
        smooth=torch.exp(torch.randn(spec.k, generator=rng) * 0.5) if spec.smooth else None,
        bias=torch.randint(-8, 8, (spec.n,), generator=rng).float() if spec.bias else None,
    ).to(HOME)


def mxfp4_weight(spec: Spec, free: bool, rng: torch.Generator) -> mxfp4_fp8.QuantizedWeight:
    """Scales of a row 39 binades apart, the larger ones seldom; or four binades."""
    shape = (spec.n, -(-spec.k // 32))
    scales = torch.randint(119, 122, shape, generator=rng)
    if free:
        scales = torch.randint(80, 120, shape, generator=rng).where(torch.rand(shape, generator=rng) < 0.3, scales - 3)
    codes = torch.randint(0, 16, (spec.n, spec.k), generator=rng, dtype=torch.uint8)
    bias = torch.randint(-8, 8, (spec.n,), generator=rng).float() if spec.bias else None
    family = mxfp4_mxfp8 if spec.groups else mxfp4_fp8
    made = family.QuantizedWeight.canonical(codes, scales.to(torch.uint8), weight="mxfp4", group_size=32, bias=bias)
    return made.to(HOME)


@lru_cache
def packed(spec: Spec, free: bool) -> fp8.PackedWeight:
    return canonical(spec, free).pack().to(DEVICE)


def launch(case: Case, x: torch.Tensor | w4a8.QuantizedActivations) -> torch.Tensor:
    """Two runs into NaN between guard rows: all of y and nothing else is written, and the bits repeat."""
    dtype, weight, runs = getattr(torch, case.out), packed(case.spec, case.kind == "random"), []
    for _ in range(2):
        guarded = torch.full((case.m + 2, case.spec.n), float("nan"), dtype=dtype, device=DEVICE)
        y = w4a8.gemm(x, weight, out=guarded[1:-1], out_dtype=dtype)
        assert y.data_ptr() == guarded[1:-1].data_ptr(), f"out= was not used; {case}"
        assert bool((guarded[0].isnan() & guarded[-1].isnan()).all()), f"rows beside the output were written; {case}"
        runs.append(y)
    assert torch.equal(runs[0].view(torch.int16), runs[1].view(torch.int16)), f"two runs differ; {case}"
    return runs[0]


def exact(case: Case) -> None:
    rng = torch.Generator().manual_seed(case.seed)
    m, k = case.m, case.spec.k
    if case.kind == "one-hot":
        columns = torch.randperm(max(k, m), generator=rng)[:m]  # rows past K are zero
        values = (columns[:, None] == torch.arange(k)).float()
    else:
        values = torch.randint(-4, 5, (m, k), generator=rng).float()
    q = torch.nn.functional.pad(values, (0, -k % 16)).to(torch.float8_e4m3fn).to(DEVICE)
    if case.spec.groups:
        scales = torch.randint(125, 129, (m, -(-k // 32)), generator=rng, dtype=torch.uint8).to(DEVICE)
        x = mxfp8.MXActivations.of(q[:, :k], scales)
        scales = x.token_scales()
    else:
        scales = (2.0 ** torch.randint(-3, 1, (m,), generator=rng)).to(DEVICE)
        x = w4a8.QuantizedActivations(q, scales, None, (m, k))
    y = launch(case, x).to(HOME)
    ref = fp8_reference.gemm(q[:, :k].to(HOME), scales.to(HOME), canonical(case.spec, False))
    bad = y != ref.float().to(y.dtype)
    assert not bool(bad.any()), f"{int(bad.sum())} of {bad.numel()} wrong, first {bad.nonzero()[:4].tolist()}; {case}"


def within(case: Case) -> None:
    rng = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randn(case.m, case.spec.k, generator=rng)
    x[:, torch.randperm(case.spec.k, generator=rng)[: max(1, case.spec.k // 256)]] *= 8  # outlier channels
    x, weight = x.to(getattr(torch, case.out)), canonical(case.spec, True)
    y, x = launch(case, x.to(DEVICE)).to(HOME), x.to(HOME)
    if not case.m:
        return
    if case.spec.groups:
        made = mxfp8.reference(x)
        q, scales = made.q[:, : case.spec.k], made.token_scales()
    else:
        q, scales = fp8_reference.quantize_activations(x, getattr(weight, "smooth", None))
    ref = fp8_reference.gemm(q, scales, weight)
    error = (y.double() - ref).abs()
    bad = ~(error <= fp8_reference.forward_error_bound(q, scales, weight, y.dtype))
    assert not bool(bad.any()), f"{int(bad.sum())} of {bad.numel()} outside, first {bad.nonzero()[:4].tolist()}; {case}"
    assert error.norm() <= 1e-2 * ref.norm(), f"off by {float(error.norm() / ref.norm()):.2e} of the product; {case}"


def check(case: Case) -> None:
    within(case) if case.kind == "random" else exact(case)
