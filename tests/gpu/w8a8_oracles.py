"""The oracles of W8A8, for one case at a time.

    identity  rows of the unit matrix: y must be the weight's codes, bit for bit
    integer   int8 sums as int32 are exact; of e4m3 small integers and powers of two, every sum is a float32
    random    16-bit activations through the whole operator, inside the bound at every element

Each run writes into NaN (int32: garbage) between guard rows that must survive, and is repeated: same bits.

With TERRAZZO_TEST_TARGET=sm_80 the weights are packed for that target: kernels on mma.sync, through PTX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from oracles import TARGET, guarded
from terrazzo.lowering.targets import Target
from terrazzo.ops import quantized, w8a8
from terrazzo.ops.call import plans
from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations
from terrazzo.ops.w4a8.w8a8 import activations, op, reference

DEVICE = "cuda"
FORMS = {
    "int8": {},
    "int8 static": dict(input_scale=0.03),
    "int8 static zero": dict(input_scale=0.03, input_zero=-5),
    "int8 asymmetric": dict(asymmetric=True),
    "e4m3": dict(codes="e4m3"),
    "e4m3 static": dict(codes="e4m3", input_scale=0.02),
    "e4m3 blocks": dict(codes="e4m3", granularity="block"),
    "e4m3 blocks ue8m0": dict(codes="e4m3", granularity="block", ue8m0=True),
}


@dataclass(frozen=True)
class Spec:
    """A weight, in a form of `FORMS`."""

    n: int
    k: int
    form: str = "int8"
    bias: bool = False
    smooth: bool = False


@dataclass(frozen=True)
class Case:
    """One operator call: m tokens, "identity", "integer" or "random" activations."""

    spec: Spec
    m: int
    kind: str = "random"
    accumulate: str = "auto"
    seed: int = 0

    @property
    def out(self) -> str:
        """Kernels are few: a weight has one output dtype. Integer sums of int8 are int32."""
        if self.kind == "integer" and self.spec.form.startswith("int8"):
            return "int32"
        return ("float16", "bfloat16")[self.spec.n % 2]

    def requests(self) -> list:
        """Those of the case's weight with activations of every kind."""
        if not self.m:
            return []
        out, w = getattr(torch, ("float16", "bfloat16")[self.spec.n % 2]), packed(self.spec, "random")
        found = w8a8.weight_requests(w, self.m, out, accumulate=self.accumulate)
        found += w8a8.weight_requests(w, self.m, None, out_dtype=out, accumulate=self.accumulate, bias=False)
        if w.codes == "int8":
            found += w8a8.weight_requests(w, self.m, None, out_dtype=torch.int32)
        return found


@lru_cache
def canonical(spec: Spec, kind: str) -> w8a8.QuantizedWeight:
    """A weight on the GPU: quantized, or of codes and scales whose products are exact."""
    rng = torch.Generator().manual_seed(spec.n + spec.k)
    bias = torch.randint(-8, 8, (spec.n,), generator=rng).float() if spec.bias else None
    facts = dict(FORMS[spec.form])
    if kind == "random":
        smooth = torch.exp(torch.randn(spec.k, generator=rng) * 0.3).to(DEVICE) if spec.smooth else None
        dense = (torch.randn(spec.n, spec.k, generator=rng) * 0.05).to(DEVICE)
        return w8a8.quantize_weight(dense, **facts, smooth=smooth, bias=None if bias is None else bias.to(DEVICE))
    e4m3, block = facts.pop("codes", "int8") == "e4m3", facts.pop("granularity", "") == "block"
    shape = (-(-spec.n // 128), -(-spec.k // 128)) if block else (spec.n,)
    scales = 2.0 ** torch.randint(-3, 1, shape, generator=rng)
    codes = torch.randint(-4 if e4m3 else -128, 5 if e4m3 else 128, (spec.n, spec.k), generator=rng)
    codes = codes.float().to(torch.float8_e4m3fn) if e4m3 else codes.to(torch.int8)
    made = w8a8.QuantizedWeight.canonical(codes, scales, bias=None if kind == "identity" else bias, **facts)
    return made.to(DEVICE)


@lru_cache
def packed(spec: Spec, kind: str) -> w8a8.PackedWeight:
    return canonical(spec, kind).pack(target=TARGET)


def exact_activations(case: Case) -> QuantizedActivations | BlockQuantizedActivations:
    """Codes whose products with the weight's are exact sums."""
    rng, (m, k), w = torch.Generator().manual_seed(case.seed), (case.m, case.spec.k), packed(case.spec, case.kind)
    if case.kind == "identity":
        columns = torch.randperm(max(k, m), generator=rng)[:m]  # rows past K are zero
        values = (columns[:, None] == torch.arange(k)).float()
    else:
        most = 4 if w.codes == "e4m3" else 127
        values = torch.randint(-most, most + 1, (m, k), generator=rng).float()
    q = torch.nn.functional.pad(values, (0, -k % 16)).to(getattr(torch, quantized.CODES[w.codes])).to(DEVICE)
    if w.block:
        scales = 2.0 ** torch.randint(-2, 1, (-(-k // 128), -(-m // 4) * 4), generator=rng)
        scales[:, m:] = float("nan")
        return BlockQuantizedActivations(q, scales.to(DEVICE), (m, k), True)
    scales, zeros = torch.ones(m), None
    if activations.has_zeros(w):
        zeros = torch.randint(-128, 128, (m,), generator=rng, dtype=torch.int32).to(DEVICE)
        zeros = zeros * 0 if case.kind == "identity" else zeros
    return QuantizedActivations(q, scales.to(DEVICE), None, (m, k), zeros)


def launch(case: Case, x: object) -> torch.Tensor:
    """Two runs between guard rows: all of y and nothing else is written, and the bits repeat."""
    dtype, weight, runs = getattr(torch, case.out), packed(case.spec, case.kind), []
    poison = -77 if case.out == "int32" else float("nan")
    for _ in range(2):
        guarded = torch.full((case.m + 2, case.spec.n), poison, dtype=dtype, device=DEVICE)
        y = w8a8.gemm(x, weight, out=guarded[1:-1], out_dtype=dtype, accumulate=case.accumulate)
        for row in (guarded[0], guarded[-1]):
            assert bool((row == poison).all() if case.out == "int32" else row.isnan().all()), f"beside y; {case}"
        runs.append(y.contiguous())
    assert torch.equal(*(run.view(torch.uint8) for run in runs)), f"two runs differ; {case}"
    return runs[0]


def check(case: Case) -> None:
    weight = canonical(case.spec, case.kind)
    if case.kind != "random":
        made = exact_activations(case)
        y = launch(case, made)
        if case.out == "int32":
            ref = reference.accumulate(made, weight)
        else:
            ref = reference.gemm(made, weight).to(y.dtype)
        bad = y != ref
        assert not bool(bad.any()), f"{int(bad.sum())} of {bad.numel()} wrong, at {bad.nonzero()[:4].tolist()}; {case}"
        return
    rng = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randn(case.m, case.spec.k, generator=rng)
    x[:, torch.randperm(case.spec.k, generator=rng)[: max(1, case.spec.k // 256)]] *= 8  # outlier channels
    x = x.to(getattr(torch, case.out)).to(DEVICE)
    y = launch(case, x)
    if not case.m:
        return
    made = activations.on_cpu(x, packed(case.spec, case.kind))  # the quantizers' own tests hold these to the bit
    error = (y.double() - reference.gemm(made, weight)).abs()
    bad = ~(error <= reference.forward_error_bound(made, weight, y.dtype, accumulate=case.accumulate))
    assert not bool(bad.any()), f"{int(bad.sum())} of {bad.numel()} outside, at {bad.nonzero()[:4].tolist()}; {case}"


@dataclass(frozen=True)
class Grouped:
    """Experts of one form, `counts` of tokens for each; two rows before the first and after the last are of none."""

    spec: Spec
    counts: tuple[int, ...]
    accumulate: str = "auto"

    @property
    def m(self) -> int:
        return sum(self.counts) + 4

    @property
    def dtype(self) -> torch.dtype:
        return (torch.float16, torch.bfloat16)[self.spec.n % 2]

    def requests(self) -> list:
        w, device = self.experts()[0].pack(target=TARGET), Target.detect()
        at, dtype = Target.parse(TARGET or "sm_90a"), str(self.dtype).removeprefix("torch.")
        numerics = op.numerics_of(w.codes, w.block, activations.has_zeros(w), self.accumulate)
        found = []
        for out in (dtype, "int32") if w.codes == "int8" else (dtype,):
            bias = self.spec.bias and out != "int32"
            product = op.Facts(w.n, w.k, numerics=numerics, out_dtype=out, bias=bias, experts=len(self.counts))
            found.append(plans.plan(self.m, product, at, device).request)
        return [*found, activations.requests(w, self.m, dtype, at, device)]

    def experts(self) -> list[w8a8.QuantizedWeight]:
        made = []
        for e in range(len(self.counts)):
            rng = torch.Generator().manual_seed(e)
            dense = (torch.randn(self.spec.n, self.spec.k, generator=rng) * 0.05).to(DEVICE)
            bias = torch.randn(self.spec.n, generator=rng).to(DEVICE) if self.spec.bias else None
            made.append(w8a8.quantize_weight(dense, bias=bias, **FORMS[self.spec.form]))
        return made


def check_grouped(case: Grouped) -> None:
    """Each expert's rows are inside the bound of its product, or exact; all others stay; two runs give the same."""
    experts = case.experts()
    w = w8a8.GroupedWeight.stack([one.pack(target=TARGET) for one in experts])
    edges = torch.tensor([2, *case.counts]).cumsum(0)
    offsets, k = edges.int().to(DEVICE), case.spec.k
    x = torch.randn(case.m, k, generator=torch.Generator().manual_seed(case.m)).to(case.dtype).to(DEVICE)
    made = activations.run(x, w.stacked)
    outs = [case.dtype, *([torch.int32] if w.stacked.codes == "int8" else [])]
    for dtype in outs:
        poison, runs = -77 if dtype == torch.int32 else float("nan"), []
        for odd, given in enumerate((x, made) if dtype != torch.int32 else (made, made)):
            held = guarded(case.m, case.spec.n, dtype, poison, odd=bool(odd))
            w8a8.grouped_gemm(given, w, offsets, out=held[8:-8], out_dtype=dtype, accumulate=case.accumulate)
            runs.append(held)
        assert torch.equal(*(run.clone().view(torch.uint8) for run in runs)), f"two runs differ; {case}"
        y = held[8:-8]
        outside = torch.cat([held[:10], held[-10:]])
        assert bool((outside == poison).all() if dtype == torch.int32 else outside.isnan().all()), f"beside y; {case}"
        for e, one in enumerate(experts):
            rows = torch.arange(int(edges[e]), int(edges[e + 1]), device=DEVICE)
            if not len(rows):
                continue
            some = made.of_tokens(rows)
            if dtype == torch.int32:
                assert torch.equal(y[rows], reference.accumulate(some, one)), f"expert {e}; {case}"
                continue
            error = (y[rows].double() - reference.gemm(some, one)).abs()
            bound = reference.forward_error_bound(some, one, dtype, accumulate=case.accumulate)
            bad = ~(error <= bound)
            assert not bool(bad.any()), f"expert {e}: {int(bad.sum())} of {bad.numel()} outside; {case}"
