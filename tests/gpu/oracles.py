"""The three oracles of W4A16 and W8A16, for one case at a time. A failing case prints the line that runs it alone:

    python tests/gpu/oracles.py "Case(Spec(257, 203, 64, act_order=True), 33, 'exact', 'random', seed=7)"

identity    rows of the unit matrix: y must be the decoded weight, bit for bit
integer     small integers and power-of-two scales: every partial sum is exact in f32; y is the rounded product
random      normal data: every element inside the forward error bound, and the rms error as small as one rounding

Each run writes into an output poisoned with NaN, between guard rows that must stay NaN, and is repeated: same bits.
Set TERRAZZO_TEST_TARGET=sm_80 to pack for another target and run its kernels (JIT-compiled PTX on a newer GPU).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from terrazzo.ops import w4a16
from terrazzo.ops.products.codes import get_codes
from terrazzo.ops.products.table import of_codes
from terrazzo.ops.products.ways import numerics_of
from terrazzo.ops.w4a16 import reference

if TYPE_CHECKING:
    import torch

TARGET = os.environ.get("TERRAZZO_TEST_TARGET")
DEVICE = "cuda"
KINDS = ("identity", "integer", "random")
IDENTITY_LAUNCHES = 48
"""Small M covers only this many slices of the unit matrix: the first, the last, and a seeded choice between them."""

SIZES = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 1500))
"""Ranges of M whose kernels differ (the last has several): tests choose a form for each weight and range."""


def bucket(m: int) -> int:
    """Index into SIZES."""
    return sum(m > most for _, most in SIZES[:-1])


def guarded(m: int, n: int, dtype: torch.dtype, blank: float, *, rows: int = 8, odd: bool = False) -> torch.Tensor:
    """[m + 2 rows, n] of `blank` on the GPU, whose middle [rows:-rows] is an output.

    `odd`: all of it begins one element behind a multiple of 16 bytes; products are then written aside and copied."""
    import torch

    size = (m + 2 * rows) * n
    return torch.full((size + 1,), blank, dtype=dtype, device=DEVICE)[odd : odd + size].view(-1, n)


RMS_ELEMENTS = 256
"""Fewer output elements than this say nothing about the rms value."""


@dataclass(frozen=True)
class Spec:
    """A weight. group -1: one group over K; scale "": scales of the activation dtype; weight: name of the format."""

    n: int
    k: int
    group: int = 128
    symmetric: bool = False
    dtype: str = "float16"
    scale: str = ""
    bias: bool = False
    act_order: bool = False
    weight: str = "u4"

    def __str__(self) -> str:
        extras = ("sym" if self.symmetric else "zeros",) + ("bias",) * self.bias + ("perm",) * self.act_order
        dtypes = tuple(
            {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[d] for d in (self.dtype, self.scale_dtype)
        )
        return "-".join(
            (f"n{self.n}", f"k{self.k}", f"g{self.k if self.group == -1 else self.group}", *dtypes, *extras)
        )

    @property
    def scale_dtype(self) -> str:
        return self.scale or self.dtype

    @property
    def numerics(self) -> tuple[str, ...]:
        """The numerics that are defined for these dtypes."""
        return numerics_of(get_codes(self.weight)) if self.scale_dtype == self.dtype else ("post",)

    @property
    def module(self) -> ModuleType:
        """The public names of its operator."""
        return import_module(f"terrazzo.ops.{of_codes(self.weight).record}")


@dataclass(frozen=True)
class Case:
    """One operator call. `kind` is one of KINDS; `seed` makes the data (the weight's too)."""

    spec: Spec
    m: int
    numerics: str = "auto"
    kind: str = "random"
    seed: int = 0

    @property
    def repro(self) -> str:
        env = f"TERRAZZO_TEST_TARGET={TARGET} " if TARGET else ""
        return f'{env}python tests/gpu/oracles.py "{self!r}"'

    def requests(self) -> list:
        """The kernels that this case launches."""
        import torch

        weight = packed(self.spec, self.kind == "integer", 0)
        return (
            list(w4a16.weight_requests(weight, self.m, getattr(torch, self.spec.dtype), self.numerics))
            if self.m
            else []
        )

    def resolved(self) -> str:
        """The numerics that "auto" stands for here."""
        found = (
            {dict(request.params)["numerics"] for request in self.requests()}
            if self.numerics == "auto"
            else {self.numerics}
        )
        assert len(found) == 1, f"one call must have one numerics, not {sorted(found)}"
        return found.pop()


@lru_cache(maxsize=256)
def canonical(spec: Spec, integer: bool, seed: int) -> w4a16.QuantizedWeight:
    """The weight of a spec, on the GPU; `integer`: power-of-two scales and an integer bias."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    groups = 1 if spec.group == -1 else -(-spec.k // spec.group)
    shape = (spec.n, groups)
    scales = (
        2.0 ** -torch.randint(0, 4, shape, generator=rng)
        if integer
        else torch.exp(torch.randn(shape, generator=rng) * 0.5 - 4)
    )
    bias = torch.randint(-9, 10, (spec.n,), generator=rng).float() if integer else torch.randn(spec.n, generator=rng)
    codes, zeros = (16, 17) if spec.weight == "u4" else (256, 256)
    return spec.module.QuantizedWeight.canonical(
        torch.randint(0, codes, (spec.n, spec.k), generator=rng, dtype=torch.uint8).to(DEVICE),
        scales.to(getattr(torch, spec.scale_dtype)),
        None if spec.symmetric else torch.randint(0, zeros, shape, generator=rng),
        group_size=spec.group,
        perm=torch.randperm(spec.k, generator=rng) if spec.act_order else None,
        bias=bias.to(getattr(torch, spec.dtype)).to(DEVICE) if spec.bias else None,
    )


@lru_cache(maxsize=256)
def packed(spec: Spec, integer: bool, seed: int) -> w4a16.PackedWeight:
    return canonical(spec, integer, seed).pack(target=TARGET)


def launch(case: Case, x: torch.Tensor, weight: w4a16.PackedWeight) -> torch.Tensor:
    """Two runs into poisoned memory; checks that all of y and nothing else is written, and that the bits repeat."""
    import torch

    runs = []
    for _ in range(2):
        guarded = torch.full((x.shape[0] + 2, case.spec.n), float("nan"), dtype=x.dtype, device=x.device)
        y = w4a16.gemm(x, weight, out=guarded[1:-1], numerics=case.numerics)
        assert y.data_ptr() == guarded[1:-1].data_ptr(), f"out= was not used; {case.repro}"
        assert guarded[0].isnan().all() and guarded[-1].isnan().all(), (
            f"rows beside the output were written; {case.repro}"
        )
        runs.append(y)
    assert torch.equal(runs[0].view(torch.int16), runs[1].view(torch.int16)), f"two runs differ; {case.repro}"
    return runs[0]


def explain(case: Case, what: str, y: torch.Tensor, ref: torch.Tensor, bad: torch.Tensor) -> str:
    """Where and by how much, then the line that runs the case alone."""
    rows, columns = bad.nonzero(as_tuple=True)
    worst = [
        f"[{r}, {c}] {float(y[r, c]):.6g} for {float(ref[r, c]):.6g}"
        for r, c in list(zip(rows.tolist(), columns.tolist()))[:8]
    ]
    span = f"rows {rows.min()}..{rows.max()}, columns {columns.min()}..{columns.max()}"
    return f"{what}: {len(rows)} of {y.numel()} elements ({span}): {'; '.join(worst)}\n  {case.repro}"


def check_equal(case: Case, what: str, y: torch.Tensor, ref: torch.Tensor) -> None:
    bad = ~(y == ref)
    assert not bool(bad.any()), explain(case, what, y, ref, bad)


def check_bound(case: Case, x: torch.Tensor, y: torch.Tensor, weight: w4a16.QuantizedWeight) -> None:
    """Zero mismatches against the float64 product, and an rms error of at most one rounding of the rms value."""
    numerics = case.resolved()
    ref, bound = reference.gemm(x, weight, numerics), reference.forward_error_bound(x, weight, numerics)
    error = (y.double() - ref).abs()
    bad = ~(error <= bound)  # NaN counts as bad
    assert not bool(bad.any()), explain(case, "outside the forward error bound", y, ref, bad)
    if y.numel() < RMS_ELEMENTS:
        return
    rms, limit = (
        error.square().mean().sqrt(),
        {"float16": 2.0**-11, "bfloat16": 2.0**-8}[case.spec.dtype] * ref.square().mean().sqrt(),
    )
    assert rms <= limit, (
        f"rms error {float(rms):.3g} exceeds one rounding of the rms value, {float(limit):.3g}; {case.repro}"
    )


def identity(case: Case) -> None:
    """Every launch multiplies `m` rows of the unit matrix; together they cover K, or what IDENTITY_LAUNCHES allows."""
    import torch

    weight, dtype = canonical(case.spec, False, case.seed), getattr(torch, case.spec.dtype)
    numerics, k, m = case.resolved(), case.spec.k, case.m
    decoded = weight.dequantize(
        numerics, dtype
    ).T.float()  # exact: (q - z) s has at most 16 significant bits for 16-bit scales
    if weight.bias is not None:
        decoded = decoded + weight.bias.float()
    starts = list(range(0, k, m))
    if len(starts) > IDENTITY_LAUNCHES:
        middle = (
            torch.randperm(len(starts) - 2, generator=torch.Generator().manual_seed(case.seed))[: IDENTITY_LAUNCHES - 2]
            + 1
        )
        starts = [0, *sorted(starts[i] for i in middle.tolist()), starts[-1]]
    for start in starts:
        columns = torch.arange(start, start + m, device=DEVICE)
        x = (columns[:, None] == torch.arange(k, device=DEVICE)).to(dtype)  # rows past K are zero
        y = launch(case, x, packed(case.spec, False, case.seed))
        if (
            case.spec.scale_dtype == "float32"
        ):  # the kernel rounds an f32 product first: two roundings, no single right answer
            check_bound(case, x, y, weight)
            continue
        blank = torch.zeros(m, case.spec.n, device=DEVICE) + (0 if weight.bias is None else weight.bias.float())
        inside = (columns < k)[:, None]
        check_equal(case, "decoded weight", y, torch.where(inside, decoded[columns.clamp(max=k - 1)], blank).to(dtype))


def integer(case: Case) -> None:
    """|sum| stays under 2^24 units of the smallest scale even with operands 128 + q, so no f32 sum rounds."""
    import torch

    weight, dtype = canonical(case.spec, True, case.seed), getattr(torch, case.spec.dtype)
    rng = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randint(-3, 4, (case.m, case.spec.k), generator=rng).to(dtype).to(DEVICE)
    y = launch(case, x, packed(case.spec, True, case.seed))
    check_equal(case, "integer product", y, reference.gemm(x, weight, case.resolved()).to(dtype) if case.m else y)


def random(case: Case) -> None:
    import torch

    weight, dtype = canonical(case.spec, False, case.seed), getattr(torch, case.spec.dtype)
    rng = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randn(case.m, case.spec.k, generator=rng)
    x[:, torch.randperm(case.spec.k, generator=rng)[: max(1, case.spec.k // 256)]] *= (
        8  # outlier channels, as real activations have
    )
    x = x.to(dtype).to(DEVICE)
    y = launch(case, x, packed(case.spec, False, case.seed))
    if case.m:
        check_bound(case, x, y, weight)


def check(case: Case) -> None:
    """Run the case's oracle; AssertionError tells where, by how much, and how to run it alone."""
    try:
        {"identity": identity, "integer": integer, "random": random}[case.kind](case)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n  {case.repro}") from error


def run_all(check, cases) -> None:
    """All cases, then one report of those that failed."""
    failures = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n" + "\n".join(failures)


if __name__ == "__main__":
    check(eval(sys.argv[1], {"Case": Case, "Spec": Spec}))
    print("ok")
