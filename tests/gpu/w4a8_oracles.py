"""The oracles of W4A8, for one case at a time. A failing case prints the line that runs it alone:

    python tests/gpu/w4a8_oracles.py "Case(Spec(257, 203, 64), 33, 'int32', kind='integer', seed=7)"

identity    rows of the unit matrix as quantized activations: y must be the weight, int32 bit for bit
integer     random int8 activations: the int32 sums equal the exact product; scaled outputs lie inside the bound
random      16-bit activations through the whole operator: codes as the reference's, y inside the forward error bound

Each run writes into poisoned memory between guard rows that must survive, and is repeated: same bits. Set
TERRAZZO_TEST_TARGET=sm_80 to pack for another target and run its kernels (JIT-compiled PTX on a newer GPU).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from oracles import TARGET, check_equal, explain
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import reference

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"
KINDS = ("identity", "integer", "random")
IDENTITY_LAUNCHES = 24
GARBAGE = -77


@dataclass(frozen=True)
class Spec:
    """A weight; every byte 0..255 occurs in it before the flip."""

    n: int
    k: int
    group: int = 64
    bias: bool = False
    smooth: bool = False

    def __str__(self) -> str:
        extras = ("bias",) * self.bias + ("smooth",) * self.smooth
        return "-".join((f"n{self.n}", f"k{self.k}", f"g{self.group}", *extras))


@dataclass(frozen=True)
class Case:
    """One operator call.

    Attributes:
        kind: one of KINDS. dtype: of 16-bit activations. seed: makes the data.
        strided: 16-bit activations are columns of a wider tensor, not aligned. bias: dtype of one given in the call.
    """

    spec: Spec
    m: int
    out: str = "float16"
    dequantization: str = "auto"
    pipeline: str = "auto"
    kind: str = "random"
    dtype: str = "float16"
    seed: int = 0
    strided: bool = False
    bias: str = ""

    @property
    def repro(self) -> str:
        env = f"TERRAZZO_TEST_TARGET={TARGET} " if TARGET else ""
        return f'{env}python tests/gpu/w4a8_oracles.py "{self!r}"'

    @property
    def options(self) -> dict:
        import torch

        return {
            "out_dtype": getattr(torch, self.out),
            "dequantization": self.dequantization,
            "pipeline": self.pipeline,
        }

    def requests(self) -> list:
        """The kernels that this case launches."""
        import torch

        if not self.m:
            return []
        dtype = getattr(torch, self.dtype) if self.kind == "random" else None
        bias = True if self.bias else None
        return w4a8.weight_requests(packed(self.spec, 0), self.m, dtype, bias=bias, **self.options)

    def given_bias(self) -> torch.Tensor | None:
        """Of the call, in place of the weight's own."""
        import torch

        if not self.bias:
            return None
        rng = torch.Generator().manual_seed(self.seed + 2)
        return torch.randn(self.spec.n, generator=rng).to(getattr(torch, self.bias)).to(DEVICE)


@lru_cache(maxsize=128)
def canonical(spec: Spec, seed: int) -> w4a8.QuantizedWeight:
    """The weight of a spec, on the GPU."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    shape = (spec.n, -(-spec.k // spec.group))
    scales = torch.randint(1, 17, shape, generator=rng)
    offsets = (torch.rand(shape, generator=rng) * (256 - 15 * scales)).int()
    return w4a8.QuantizedWeight.canonical(
        torch.randint(0, 16, (spec.n, spec.k), generator=rng, dtype=torch.uint8),
        scales,
        offsets,
        torch.exp(torch.randn(spec.n, generator=rng) * 0.5 - 8),
        group_size=spec.group,
        smooth=torch.exp(torch.randn(spec.k, generator=rng) * 0.5) if spec.smooth else None,
        bias=torch.randn(spec.n, generator=rng) if spec.bias else None,
    ).to(DEVICE)


@lru_cache(maxsize=128)
def packed(spec: Spec, seed: int) -> w4a8.PackedWeight:
    return canonical(spec, seed).pack(target=TARGET)


def activations(q: torch.Tensor, scales: torch.Tensor) -> w4a8.QuantizedActivations:
    """Quantized activations of codes int8 [M, K]."""
    import torch

    k = q.shape[1]
    whole = torch.nn.functional.pad(q, (0, -k % 16)).contiguous()
    return w4a8.QuantizedActivations(whole, scales, q.sum(1, dtype=torch.int32), tuple(q.shape))


def launch(case: Case, x: torch.Tensor | w4a8.QuantizedActivations) -> torch.Tensor:
    """Two runs into poisoned memory; checks that all of y and nothing else is written, and that the bits repeat."""
    import torch

    dtype, weight = getattr(torch, case.out), packed(case.spec, case.seed)
    poison = GARBAGE if dtype == torch.int32 else float("nan")
    poisoned = lambda t: (t == GARBAGE if dtype == torch.int32 else t.isnan()).all()
    bias, runs = case.given_bias(), []
    for _ in range(2):
        guarded = torch.full((x.shape[0] + 2, case.spec.n), poison, dtype=dtype, device=DEVICE)
        y = w4a8.gemm(x, weight, bias=bias, out=guarded[1:-1], **case.options)
        assert y.data_ptr() == guarded[1:-1].data_ptr(), f"out= was not used; {case.repro}"
        assert poisoned(guarded[0]) and poisoned(guarded[-1]), f"rows beside the output were written; {case.repro}"
        runs.append(y)
    assert torch.equal(runs[0].view(torch.int16), runs[1].view(torch.int16)), f"two runs differ; {case.repro}"
    return runs[0]


def compare(case: Case, what: str, y: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> None:
    """int32: equal to the exact product. Else zero mismatches against float64, inside the forward error bound."""
    import torch

    weight = canonical(case.spec, case.seed)
    if case.out == "int32":
        return check_equal(case, what, y, reference.accumulate(q, weight))
    given = case.given_bias()
    bias = weight.bias if given is None else given
    ref = reference.gemm(q, scales, weight, given)
    bad = ~((y.double() - ref).abs() <= reference.forward_error_bound(ref, getattr(torch, case.out), bias))
    assert not bool(bad.any()), explain(case, f"{what}: outside the forward error bound", y, ref, bad)


def identity(case: Case) -> None:
    """Every launch multiplies `m` rows of the unit matrix; together they cover K, or what IDENTITY_LAUNCHES allows."""
    import torch

    k, m = case.spec.k, case.m
    starts = list(range(0, k, m))
    if len(starts) > IDENTITY_LAUNCHES:
        pick = torch.randperm(len(starts) - 2, generator=torch.Generator().manual_seed(case.seed)) + 1
        starts = [0, *sorted(starts[i] for i in pick[: IDENTITY_LAUNCHES - 2].tolist()), starts[-1]]
    for start in starts:
        columns = torch.arange(start, start + m, device=DEVICE)
        q = (columns[:, None] == torch.arange(k, device=DEVICE)).to(torch.int8)  # rows past K are zero
        scales = torch.ones(m, device=DEVICE)
        compare(case, "weight", launch(case, activations(q, scales)), q, scales)


def integer(case: Case) -> None:
    import torch

    rng = torch.Generator().manual_seed(case.seed + 1)
    q = torch.randint(-127, 128, (case.m, case.spec.k), generator=rng, dtype=torch.int8).to(DEVICE)
    scales = torch.exp(torch.randn(case.m, generator=rng) - 4).to(DEVICE)
    y = launch(case, activations(q, scales))
    if case.m:
        compare(case, "product", y, q, scales)


def random(case: Case) -> None:
    import torch

    rng = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randn(case.m, case.spec.k, generator=rng)
    x[:, torch.randperm(case.spec.k, generator=rng)[: max(1, case.spec.k // 256)]] *= 8  # outlier channels
    x = x.to(getattr(torch, case.dtype)).to(DEVICE)
    x = torch.nn.functional.pad(x, (1, 2))[:, 1:-2] if case.strided else x
    y = launch(case, x)
    if case.m:
        q, scales, _ = reference.quantize_activations(x, canonical(case.spec, case.seed).smooth)
        compare(case, "operator", y, q, scales)


def check(case: Case) -> None:
    """Run the case's oracle; AssertionError tells where, by how much, and how to run it alone."""
    try:
        {"identity": identity, "integer": integer, "random": random}[case.kind](case)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n  {case.repro}") from error


if __name__ == "__main__":
    check(eval(sys.argv[1], {"Case": Case, "Spec": Spec}))
    print("ok")
