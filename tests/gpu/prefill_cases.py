"""Cases of prefill attention and the check that holds a kernel to its error bound. A failing case prints its line:

python tests/gpu/prefill_cases.py "Case('int4', 'int4', past=(100, 7), new=(40, 3))"
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, replace

import torch
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache import cache as caches
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import reference
from terrazzo.ops.attention.prefilling import prefill_op as op
from terrazzo.ops.attention.prefilling import prefill_reference
from terrazzo.schedules.attention_prefill import Prefill

if __package__:
    from tests.gpu import attention_cases
else:  # a script, or beside the tests of the GPU
    import attention_cases

TARGET = os.environ.get("TERRAZZO_TEST_TARGET")


@dataclass(frozen=True)
class Case:
    """One prefill call. past, new: tokens of each sequence; fresh: the new ones come as k and v. residual -1: the
    format's own. sharp multiplies q. schedule: (program, row_tiles, warps, stages), or () for the heuristic's, which
    targets without wgmma take in place of "shared". splits 0: the heuristic's, which has none with a schedule."""

    k: str = "int4"
    v: str = "int4"
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 4
    past: tuple[int, ...] = (100,)
    new: tuple[int, ...] = (50,)
    fresh: bool = False
    page: int = 0
    residual: int = -1
    sink_tokens: int = 0
    dtype: str = "float16"
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False
    sharp: float = 1.0
    seed: int = 0
    schedule: tuple = ()
    splits: int = 0
    target: str | None = TARGET

    @property
    def repro(self) -> str:
        return f'python tests/gpu/prefill_cases.py "{self!r}"'

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.k, self.v, self.head_dim, self.sink_tokens)

    @property
    def residual_tokens(self) -> int:
        return caches.residual_of(self.layout, None if self.residual < 0 else self.residual)

    def chosen(self) -> Prefill | None:
        able = self.schedule and (self.schedule[0] == "mma" or self.target in (None, "sm_90a"))
        return Prefill(*self.schedule) if able else None

    def requests(self) -> list:
        """The kernels that this case launches."""
        found = op.prefill_requests(
            self.layout, dtype=self.dtype, page=self.page, residual=self.residual_tokens, fresh=self.fresh,
            softcap=self.softcap > 0, sinks=self.sinks, schedule=self.chosen(), target=self.target,
        )  # fmt: skip
        parted = [it for it in found if "split" in dict(it.params) or it.name == "attention.prefill_merge"]
        if self.splits > 1:
            return parted + [it for it in found if it.name in ("attention.new_tokens", "attention.write")]
        return found if not (self.chosen() or self.splits) else [it for it in found if it not in parted]


@dataclass
class Inputs:
    """What a case passes to `prefill`."""

    q: torch.Tensor
    cache: caches.PackedCache
    cu_seqlens: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    options: reference.Options

    @property
    def most_new(self) -> int:
        return int(self.cu_seqlens.diff().max())


def inputs(case: Case) -> Inputs:
    """Storage past the lengths is overwritten with what a recycled page may hold."""
    held = case.past if case.fresh else tuple(p + n for p, n in zip(case.past, case.new))
    at = attention_cases.Case(
        case.k, case.v, case.head_dim, case.kv_heads, lengths=held, page=case.page, residual=case.residual,
        sink_tokens=case.sink_tokens, seed=case.seed,
    )  # fmt: skip
    made = attention_cases.built(at)
    device = attention_cases.DEVICE
    new = torch.tensor(case.new, dtype=torch.int32)
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)]).to(device)
    lengths = torch.tensor(case.past, dtype=torch.int32) + new
    made = replace(made, lengths=lengths.to(device), max_length=int(lengths.max()))
    rng = torch.Generator().manual_seed(case.seed + 1)
    dtype, heads = getattr(torch, case.dtype), case.kv_heads * case.group
    q = (torch.randn(sum(case.new), heads, case.head_dim, generator=rng) * case.sharp).to(dtype).to(device)
    fresh = torch.randn(2, sum(case.new), case.kv_heads, case.head_dim, generator=rng).to(dtype).to(device)
    sinks = (torch.randn(heads, generator=rng) * 2).to(device) if case.sinks else None
    options = reference.Options(softcap=case.softcap, window=case.window, sinks=sinks)
    return Inputs(q, made, cu, *((fresh[0], fresh[1]) if case.fresh else (None, None)), options)


def judge(case: Case, given: Inputs, y: torch.Tensor, lse: torch.Tensor) -> float:
    """The worst error as a share of its bound; AssertionError where it is beyond it."""
    expected, sums, bound = prefill_reference.prefill(
        given.q, given.cache, given.cu_seqlens, given.options, given.k, given.v
    )
    error = (y.double() - expected).abs()
    bad = ~(error <= bound)  # NaN counts as bad
    worst = float((error / bound.clamp(min=1e-30)).nan_to_num(9e9).max()) if error.numel() else 0.0
    if bool(bad.any()):
        where = bad.nonzero()
        some = [f"{w} {float(y[tuple(w)]):.5g} for {float(expected[tuple(w)]):.5g}" for w in where[:6].tolist()]
        count = f"{len(where)} of {y.numel()} elements outside the bound, worst {worst:.3g} times it"
        raise AssertionError(f"{count}: {'; '.join(some)}\n  {case.repro}")
    off = torch.where(sums.isinf() & (lse == sums), 0.0, (lse.double() - sums).abs())
    slack = 3e-3 * (1 + case.sharp) * (1 + sums.abs().nan_to_num(posinf=0) / 16)
    assert bool((off <= slack).all()), f"lse is off by {float(off.nan_to_num(9e9).max()):.3g}\n  {case.repro}"
    return worst


def run(case: Case) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Two launches into poisoned memory, which must agree in every bit."""
    given = inputs(case)
    runs = []
    for _ in range(2):
        guarded = torch.full((given.q.shape[0] + 2, *given.q.shape[1:]), float("nan"), dtype=given.q.dtype).to(
            given.q.device
        )
        lse = torch.full(given.q.shape[:2], float("nan"), device=given.q.device)
        y = entry.prefill(
            given.q, given.cache, given.cu_seqlens, given.most_new, k=given.k, v=given.v, out=guarded[1:-1], lse=lse,
            softcap=case.softcap, window=case.window, sinks=given.options.sinks, schedule=case.chosen(),
            splits=case.splits or None, target=case.target,
        )  # fmt: skip
        assert guarded[0].isnan().all() and guarded[-1].isnan().all(), f"beside the output was written; {case.repro}"
        runs.append((y, lse))
    for a, b in zip(*runs):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"two runs differ; {case.repro}"
    return given, *runs[0]


def check(case: Case) -> None:
    """Every element inside the error bound, and the log-sum-exp; AssertionError names the case."""
    try:
        found = run(case)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n  {case.repro}") from error
    judge(case, *found)


def fuzz(count: int, pool: list[Case]) -> list[Case]:
    """Seeded cases that need no kernels but those of `pool`."""
    rng = random.Random(2026)
    cases = []
    for i in range(count):
        base = pool[i % len(pool)]
        longest, chunk = rng.choice((40, 300, 1500, 4000)), rng.choice((1, 20, 64, 130, 513))
        batch = rng.randint(1, 5)
        cases.append(
            replace(
                base, group=rng.choice((1, 2, 4, 7, 8)), kv_heads=rng.choice((1, 2, 3)), seed=rng.randint(1, 3),
                past=tuple(rng.choice((0, rng.randint(0, longest), longest)) for _ in range(batch)),
                new=(rng.randint(1, chunk), *(rng.choice((0, rng.randint(0, chunk), chunk)) for _ in range(batch - 1))),
                window=rng.choice((0, 0, 0, 17, 500)), sharp=rng.choice((0.5, 1.0, 4.0)),
            )
        )  # fmt: skip
    return cases


if __name__ == "__main__":
    check(eval(sys.argv[1], {"Case": Case}))
    print("ok")
