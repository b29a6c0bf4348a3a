"""Cases of decode attention and the check that holds a kernel to its error bound. A failing case prints its line:

python tests/gpu/attention_cases.py "Case('int4', 'int4', lengths=(100, 7), q_len=2)"
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache import cache as caches
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout, residual_layout
from terrazzo.ops.attention.decoding import op, reference
from terrazzo.ops.products.kv import get_format
from terrazzo.schedules import attention as schedules

if TYPE_CHECKING:
    from terrazzo.ops.attention.cache.cache import PackedCache

TARGET = os.environ.get("TERRAZZO_TEST_TARGET")
DEVICE = "cuda"
QUERY_SIDE = ("group", "q_len", "dtype", "splits", "softcap", "window", "sinks", "sharp", "style", "target", "balanced")


@dataclass(frozen=True)
class Case:
    """One decode call. residual -1: the format's own; splits 0: the heuristic's; sharp multiplies q.

    style: the schedule of "few" long sequences, of "many" short ones, whatever the case's own sizes are, so that cases
    share kernels; "warpgroups" for rows on wgmma ("many" for targets without); or the one that is "chosen" for its
    sizes. target: another than the GPU's own. balanced: splits follow the lengths; with the style "chosen" the schedule
    is what such kernels have, else the style's.
    """

    k: str = "int4"
    v: str = "int4"
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 4
    q_len: int = 1
    lengths: tuple[int, ...] = (300,)
    page: int = 0
    residual: int = -1
    sink_tokens: int = 0
    dtype: str = "float16"
    splits: int = 0
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False
    sharp: float = 1.0
    seed: int = 0
    style: str = "few"
    target: str | None = TARGET
    balanced: bool = False

    @property
    def repro(self) -> str:
        return f'python tests/gpu/attention_cases.py "{self!r}"'

    @property
    def rows(self) -> int:
        return self.q_len * self.group

    @property
    def on_wgmma(self) -> bool:
        return self.style == "warpgroups" and self.target in (None, "sm_90a")

    @property
    def kernel(self) -> tuple:
        """What tells this case's kernels, one for each size of cluster, from others."""
        facts = (self.k, self.v, self.head_dim, self.page, self.residual, self.dtype, self.softcap > 0, self.sinks)
        facts += (self.sink_tokens,)
        groups = -(-min(self.rows, 64) // 16) if self.on_wgmma else self.rows > 8 and self.head_dim <= 128
        return (*facts, groups, self.style, self.target, self.balanced)

    def schedule(self) -> schedules.Decode | None:
        """The schedule that `style` names; None leaves it to the operator."""
        if self.style == "chosen":
            return None
        if self.on_wgmma:
            groups = -(-min(self.rows, 64) // 16)
            bits = get_format(self.k).bits + get_format(self.v).bits
            warps = 8 if groups <= 2 and bits * self.head_dim <= 2048 else 4
            return schedules.WarpgroupDecode(2 * groups, warps, 4, 3 if bits * self.head_dim <= 4096 else 2, 1)
        batch, tokens = {"few": (1, 131072), "many": (64, 4096), "warpgroups": (64, 4096)}[self.style]
        layout = CacheLayout(self.k, self.v, self.head_dim)
        residual = caches.residual_of(layout, None if self.residual < 0 else self.residual)
        problem = op.problem_of(layout, batch, 8, 8 if self.rows <= 8 else 16, tokens, self.page, residual)
        return schedules.choose(problem, launch.current_targets(self.target)[0])

    def plan(self) -> op.Plan:
        """What this case launches."""
        layout = CacheLayout(self.k, self.v, self.head_dim, self.sink_tokens)
        residual = caches.residual_of(layout, None if self.residual < 0 else self.residual)
        target, device = launch.current_targets(self.target)
        seen = min(self.tokens, self.window + self.q_len - 1) if self.window else self.tokens
        return op.plan(
            layout, len(self.lengths), self.kv_heads, self.rows, seen, dtype=self.dtype, page=self.page,
            residual=residual, softcap=self.softcap > 0, sinks=self.sinks, target=target, device=device,
            schedule=self.schedule(), splits=self.splits, balanced=self.balanced,
        )  # fmt: skip

    def options(self, splits: int | None = None) -> dict:
        """The options of `decode` that name this case's kernel."""
        return dict(
            splits=splits or self.splits or None, balanced=self.balanced, schedule=self.schedule(), target=self.target
        )

    def requests(self) -> list:
        """The kernels that this case launches."""
        return [self.plan().request]

    @property
    def tokens(self) -> int:
        """Tokens that the storage of a sequence holds."""
        unit = self.page or max(get_format(self.k).group, 16)
        return -(-max(*self.lengths, 1) // unit) * unit + unit


def static(fmt: str, heads: int, head_dim: int) -> torch.Tensor | None:
    """f32 scales [heads, D] of a static format, else None."""
    if get_format(fmt).scaling != "static":
        return None
    step = 0.03 if get_format(fmt).bias else 0.02
    return step * (1 + torch.arange(heads * head_dim, device=DEVICE).reshape(heads, head_dim) % 7 / 8)


def built(case: Case) -> PackedCache:
    """The packed cache of a case; cases that differ in their queries alone share it."""
    plain = {f.name: f.default for f in fields(Case) if f.name in QUERY_SIDE}
    return _built(replace(case, **plain))


@lru_cache(maxsize=8)
def _built(case: Case) -> PackedCache:
    """Storage past the lengths is overwritten with what a recycled page may hold."""
    rng = torch.Generator().manual_seed(case.seed)
    shape = (2, len(case.lengths), case.kv_heads, case.tokens, case.head_dim)
    x = torch.randn(shape, generator=rng) * torch.exp(torch.randn(1, 1, shape[2], 1, shape[4], generator=rng) / 2)
    x = (x + torch.randn(2, 1, shape[2], 1, shape[4], generator=rng)).to(DEVICE)
    pages = len(case.lengths) * (case.tokens // case.page) if case.page else 0
    made = caches.pack_cache(
        x[0], x[1], case.k, case.v, lengths=torch.tensor(case.lengths), page_size=case.page,
        residual=None if case.residual < 0 else case.residual, sink_tokens=case.sink_tokens,
        k_static=static(case.k, case.kv_heads, case.head_dim), v_static=static(case.v, case.kv_heads, case.head_dim),
        permutation=torch.randperm(pages, generator=rng) if pages else None,
    )  # fmt: skip
    poison(made)
    return made


def poison(made: PackedCache) -> None:
    """NaN into the f16 storage of tokens past each length: keys, values, parameters, and the residual block."""
    layout, n = made.layout, made.residual_tokens
    room = (made.page_size or 0) * (0 if made.block_table is None else made.block_table.shape[1])
    room = room or made.pages.shape[2] // layout.block_words * layout.block_tokens
    for b, length in enumerate(made.lengths.tolist()):
        packed = layout.packed(length, n)
        if (n or packed % 16) and not layout.k.group and packed < room:  # the tile that the packed tokens end in
            page, at = (b, packed) if made.block_table is None else (
                int(made.block_table[b, packed // made.page_size]), packed % made.page_size
            )  # fmt: skip
            word = at // 16 * layout.tile_words
            tile = made.pages[page, :, word : word + layout.tile_words]
            spoil(tile, layout, packed % 16)
        if n and length % 16:
            slot_layout = residual_layout(layout)
            word = length // 16 % (n // 16 + 1) * slot_layout.tile_words  # behind them lie the first tokens
            spoil(made.residual[b, :, word : word + slot_layout.tile_words], slot_layout, length % 16)


def spoil(tile: torch.Tensor, layout, kept: int) -> None:
    """Tokens `kept`.. of a tile [heads, words] become NaN where they are floats."""
    k, v = layout.unpack(tile.reshape(-1, 1, layout.block_words))
    for part, fmt in ((k, layout.k), (v, layout.v)):
        if fmt.scaling == "none":
            part.codes[:, kept:] = 0x7FFF
        if fmt.scaling == "token":
            part.scale[:, kept:] = float("nan")
            part.zero[:, kept:] = float("nan")
    tile.copy_(layout.pack(k, v).reshape(tile.shape))


def run(case: Case, splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, reference.Options]:
    """(q, out, lse) of two launches into poisoned memory, which must agree in every bit."""
    made = built(case)
    rng = torch.Generator().manual_seed(case.seed + 1)
    heads = case.kv_heads * case.group
    q = torch.randn(len(case.lengths), case.q_len, heads, case.head_dim, generator=rng) * case.sharp
    q = q.to(getattr(torch, case.dtype)).to(DEVICE)
    sinks = (torch.randn(heads, generator=rng) * 2).to(DEVICE) if case.sinks else None
    runs = []
    for _ in range(2):
        guarded = torch.full((q.shape[0] + 2, *q.shape[1:]), float("nan"), dtype=q.dtype, device=DEVICE)
        lse = torch.full(q.shape[:3], float("nan"), device=DEVICE)
        y = entry.decode(
            q,
            made,
            out=guarded[1:-1],
            lse=lse,
            softcap=case.softcap,
            window=case.window,
            sinks=sinks,
            **case.options(splits),
        )
        assert guarded[0].isnan().all() and guarded[-1].isnan().all(), f"beside the output was written; {case.repro}"
        runs.append((y, lse))
    for a, b in zip(*runs):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"two runs differ; {case.repro}"
    options = reference.Options(softcap=case.softcap, window=case.window, sinks=sinks)
    return q, *runs[0], options


def check(case: Case) -> None:
    """Every element inside the forward error bound, and the log-sum-exp; AssertionError names the case."""
    try:
        q, y, lse, options = run(case)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n  {case.repro}") from error
    expected, sums, bound = reference.decode(q, built(case), options)
    error = (y.double() - expected).abs()
    bad = ~(error <= bound)  # NaN counts as bad
    if bool(bad.any()):
        where = bad.nonzero()
        some = [f"{w} {float(y[tuple(w)]):.5g} for {float(expected[tuple(w)]):.5g}" for w in where[:6].tolist()]
        worst = float((error / bound).nan_to_num(9e9).max())
        raise AssertionError(
            f"{len(where)} of {y.numel()} elements outside the bound, worst {worst:.3g} times it: {'; '.join(some)}\n"
            f"  {case.repro}"
        )
    off = torch.where(sums.isinf() & (lse == sums), 0.0, (lse.double() - sums).abs())
    slack = reference.lse_error_bound(q, built(case), options)
    assert bool((off <= slack).all()), f"lse is off by {float(off.nan_to_num(9e9).max()):.3g}\n  {case.repro}"


FUZZ_KERNELS = 40


def fuzz(count: int, pool: list[Case]) -> list[Case]:
    """Seeded cases that need no kernels but FUZZ_KERNELS of those of `pool`, each as one CTA for a sequence and in
    clusters of one size."""
    rng = random.Random(2026)
    bases = list({case.kernel: case for case in pool if case.style != "chosen"}.values())
    bases = [bases[i * len(bases) // FUZZ_KERNELS] for i in range(FUZZ_KERNELS)] if len(bases) > FUZZ_KERNELS else bases
    sizes = [(q_len, group) for q_len in (1, 2, 3, 4, 8) for group in (1, 2, 4, 7, 8, 12)]
    splits, cases = (2, 3, 4, 8, 16, 5, 32), []
    for i in range(count):
        base = bases[i % len(bases)]
        fits = [(q, g) for q, g in sizes if replace(base, q_len=q, group=g).kernel == base.kernel]
        q_len, group = rng.choice([*fits, *(size for size in fits if size[0] == 1)])
        longest = rng.choice((40, 300, 1200, 3000))
        cases.append(
            replace(
                base, q_len=q_len, group=group, kv_heads=rng.choice((1, 2, 3)),
                lengths=tuple(rng.choice((0, rng.randint(0, longest), longest)) for _ in range(rng.randint(1, 6))),
                splits=0 if base.balanced else rng.choice((1, splits[i % len(bases) % 7])),
                window=rng.choice((0, 0, 0, 17, 500)),
                sharp=rng.choice((0.5, 1.0, 4.0)), seed=rng.randint(1, 3),
            )
        )  # fmt: skip
    return cases


if __name__ == "__main__":
    check(eval(sys.argv[1], {"Case": Case}))
    print("ok")
