"""Weights of MXFP4, NVFP4, FP8 and NF4 on the GPU: unit vectors and integers bit for bit, random data in the bound."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from oracles import guarded
from terrazzo.lowering.request import KernelRequest
from terrazzo.ops import fp8, mxfp4, nf4, nvfp4
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.weight_only import op, reference
from terrazzo.ops.weight_only.format import QuantizedWeight

torch = pytest.importorskip("torch")
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """A weight [n, k] of a format, and numbers of tokens; `experts` of them where there are some."""

    weight: str
    group: int  # 0: one scale for a row
    dtype: str
    ms: tuple[int, ...]
    n: int = 320
    k: int = 1056
    target: str | None = None
    experts: int = 0
    bias: bool = False
    folded: bool = False  # scales in the activations' dtype

    def made(self, kind: str, seed: int = 0) -> QuantizedWeight:
        """Uniform codes; `kind` "exact": powers of two as scales, near each other, so that sums of integers are."""
        rng = torch.Generator().manual_seed(seed)
        group = self.group or self.k
        groups = -(-self.k // group)
        bias = torch.randint(-4, 5, (self.n,), generator=rng).to(getattr(torch, self.dtype)) if self.bias else None
        if self.weight == "mxfp4":
            codes = torch.randint(0, 16, (self.n, self.k), generator=rng, dtype=torch.uint8)
            spread = 3 if kind == "exact" else 20
            scales = torch.randint(0, spread, (self.n, groups), generator=rng) + 127 - spread
            scales += torch.randint(-3, 3, (self.n, 1), generator=rng)
            made = QuantizedWeight.canonical(codes, scales.to(torch.uint8), weight="mxfp4", group_size=32, bias=bias)
        elif self.weight == "nvfp4":
            codes = torch.randint(0, 16, (self.n, self.k), generator=rng, dtype=torch.uint8)
            factors = 2.0 ** torch.randint(-12, -6, (self.n,), generator=rng)
            if kind == "exact":
                scales = 2.0 ** torch.randint(-1, 3, (self.n, groups), generator=rng)
                scales *= 1 - 2 * torch.randint(0, 2, (self.n, groups), generator=rng)
            else:  # every e4m3 number above 0 and 0 itself
                scales = torch.randint(0, 127, (self.n, groups), generator=rng, dtype=torch.uint8)
                scales, factors = scales.view(torch.float8_e4m3fn), 1e-3 * torch.rand(self.n, generator=rng) + 1e-5
            facts = dict(weight="nvfp4", group_size=16, bias=bias, factors=factors)
            made = QuantizedWeight.canonical(codes, scales.to(torch.float8_e4m3fn), **facts)
        elif self.weight == "nf4":
            codes = torch.randint(0, 16, (self.n, self.k), generator=rng, dtype=torch.uint8)
            scales = 0.1 * torch.rand(self.n, groups, generator=rng) - 0.01
            if kind == "exact":  # of rows alike: values have 11 bits and five exponents
                scales = 2.0 ** torch.randint(-6, 3, (self.n, 1), generator=rng).expand(-1, groups)
            scales = scales.to(getattr(torch, self.dtype)) if self.folded else scales
            made = QuantizedWeight.canonical(codes, scales, weight="nf4", group_size=64, bias=bias)
        else:
            codes = torch.randint(0, 128, (self.n, self.k), generator=rng, dtype=torch.uint8)
            codes = codes.clamp(48, 80) if kind == "exact" else codes.clamp(max=126)
            codes |= torch.randint(0, 2, (self.n, self.k), generator=rng, dtype=torch.uint8) << 7
            if kind == "exact":
                scales = 2.0 ** torch.randint(-3, 1, (self.n, groups), generator=rng)
            else:
                scales = 0.01 * torch.rand(self.n, groups, generator=rng)
            scales = scales.to(getattr(torch, self.dtype)) if self.folded else scales
            made = QuantizedWeight.canonical(codes, scales, weight="fp8", group_size=group, bias=bias)
        return made.to(DEVICE)

    def requests(self) -> list[KernelRequest]:
        w = self.made("exact").pack(target=self.target)
        if not self.experts:
            return op.weight_requests(w, self.ms, getattr(torch, self.dtype))
        return op.experts_requests(GroupedWeight.stack([w] * self.experts), self.ms, self.dtype)

    def __str__(self) -> str:
        parts = (
            self.weight,
            f"g{self.group or 'K'}",
            self.dtype,
            self.target or "",
            f"e{self.experts}"[: self.experts],
        )
        return "-".join(part for part in (*parts, "folded" * self.folded) if part)


FORMS = [("mxfp4", 32), ("nvfp4", 16), ("fp8", 0), ("fp8", 128), ("nf4", 64)]
MS = (1, 3, 8, 16, 50, 128, 300)
CASES = [Case(*form, dtype, MS) for form in FORMS for dtype in ("bfloat16", "float16")]
CASES += [
    Case(*form, dtype, MS, folded=True) for form in (("fp8", 128), ("nf4", 64)) for dtype in ("bfloat16", "float16")
]
CASES += [Case(*form, "bfloat16", (2, 16, 40, 200), n=130, k=576, target="sm_80", bias=True) for form in FORMS]
SIZES = dict(n=256, k=512, experts=4)
EXPERTS = [Case(*form, "bfloat16", (40,), **SIZES, target=at) for form in FORMS for at in (None, "sm_80")]
GEMMS = {"mxfp4": mxfp4.gemm, "nvfp4": nvfp4.gemm, "fp8": fp8.gemm, "nf4": nf4.gemm}


def launched(case: Case, x, w, **more):
    """y of a launch into NaN, the same as of a second one."""
    outs = [torch.full((len(x), case.n), float("nan"), dtype=x.dtype, device=DEVICE) for _ in range(2)]
    for out in outs:
        GEMMS[case.weight](x, w, out=out, **more)
    assert torch.equal(*outs), "two runs differ"
    return outs[0]


def numerics(w) -> str:
    return "post" if w.scale_dtype == "float32" else "exact"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("cases", [pytest.param((case,), id=str(case)) for case in CASES])
def test_unit_vectors_read_the_weight(cases):
    (case,) = cases
    w = case.made("exact")
    packed, dense = w.pack(target=case.target), w.dequantize(numerics(w), getattr(torch, case.dtype))
    bias = 0 if w.bias is None else w.bias.double()
    for m in case.ms:
        at = torch.randperm(case.k, generator=torch.Generator().manual_seed(m))[:m]
        x = torch.zeros(m, case.k, dtype=getattr(torch, case.dtype), device=DEVICE)
        x[torch.arange(m), at] = 1
        assert torch.equal(launched(case, x, packed), (dense[:, at.to(DEVICE)].T + bias).to(x.dtype)), m


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("cases", [pytest.param((case,), id=str(case)) for case in CASES])
def test_integers_and_random_data(cases):
    (case,) = cases
    dtype, rng = getattr(torch, case.dtype), torch.Generator().manual_seed(5)
    for kind in ("exact", "random"):
        w = case.made(kind, 1)
        packed = w.pack(target=case.target)
        for m in case.ms:
            x = (
                torch.randint(-2, 3, (m, case.k), generator=rng)
                if kind == "exact"
                else torch.randn(m, case.k, generator=rng)
            )
            x = x.to(DEVICE, dtype)
            y, expected = launched(case, x, packed), reference.gemm(x, w, numerics(w))
            if kind == "exact":
                assert torch.equal(y, expected.to(dtype)), (kind, m)
            bound = reference.forward_error_bound(x, w, numerics(w))
            assert bool(((y.double() - expected).abs() <= bound).all()), (kind, m)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("cases", [pytest.param((case,), id=str(case)) for case in EXPERTS])
def test_experts(cases):
    (case,) = cases
    experts = [case.made("random", seed) for seed in range(case.experts)]
    w = GroupedWeight.stack([one.pack(target=case.target) for one in experts])
    for m in case.ms:
        x = torch.randn(m, case.k, generator=torch.Generator().manual_seed(m)).to(DEVICE, getattr(torch, case.dtype))
        offsets = torch.tensor([0, 5, 5, m - 9, m], dtype=torch.int32, device=DEVICE)
        held = [guarded(m, case.n, x.dtype, float("nan"), odd=odd) for odd in (False, True)]
        outs = [each[8:-8] for each in held]
        for out in outs:
            mxfp4.grouped_gemm(x, w, offsets, out=out)
        assert torch.equal(*outs) and all(bool(each[[*range(8), *range(-8, 0)]].isnan().all()) for each in held)
        for e, one in enumerate(experts):
            rows = slice(int(offsets[e]), int(offsets[e + 1]))
            expected = reference.gemm(x[rows], one, numerics(one))
            bound = reference.forward_error_bound(x[rows], one, numerics(one))
            assert bool(((outs[0][rows].double() - expected).abs() <= bound).all()), e
