"""Cases of storing new tokens, and what the cache must hold afterwards. A failing case prints its line:

python tests/gpu/attention_write_cases.py "Case('int4', 'int4', old=(5,), new=(3,))"
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache import cache as caches
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.writing import writing

TARGET = os.environ.get("TERRAZZO_TEST_TARGET")
DEVICE = "cpu"
"""Where caches are made and compared."""


@dataclass(frozen=True)
class Case:
    """Sequences that hold `old` tokens each and get `new` more. residual -1: the format's own; pitch: values between
    the rows of two tokens."""

    k: str = "int4"
    v: str = "int4"
    head_dim: int = 128
    heads: int = 2
    old: tuple[int, ...] = (0, 5, 16, 61)
    new: tuple[int, ...] = (40, 3, 1, 70)
    page: int = 0
    residual: int = -1
    dtype: str = "float16"
    pitch: int = 0
    seed: int = 0
    sink_tokens: int = 0
    target: str | None = TARGET

    @property
    def repro(self) -> str:
        return f'python tests/gpu/attention_write_cases.py "{self!r}"'

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.old, self.new))

    @property
    def room(self) -> int:
        """Tokens that the storage of a sequence holds."""
        unit = self.page or max(128, self.residual)
        return -(-max(self.lengths) // unit) * unit

    def requests(self) -> list:
        """The kernels that this case launches."""
        target, device = launch.current_targets(self.target)
        layout = caches.CacheLayout(self.k, self.v, self.head_dim, self.sink_tokens)
        residual = caches.residual_of(layout, None if self.residual < 0 else self.residual)
        return [writing.write_kernel(layout, self.dtype, self.page, residual, target, device)]


def static(fmt: str, heads: int, head_dim: int) -> torch.Tensor | None:
    """f32 scales [heads, D] of a static format, else None."""
    known = caches.CacheLayout(fmt if fmt in ("int8_static", "fp8") else "float16", "float16", 64).k
    if known.scaling != "static":
        return None
    return 0.03 * (1 + torch.arange(heads * head_dim, device=DEVICE).reshape(heads, head_dim) % 7 / 8)


def built(case: Case, lengths: tuple[int, ...], x: torch.Tensor) -> PackedCache:
    """The cache that holds the first `lengths` tokens of x [2, B, H, T, D]."""
    pages = len(case.old) * (case.room // case.page) if case.page else 0
    return caches.pack_cache(
        x[0], x[1], case.k, case.v, lengths=torch.tensor(lengths), page_size=case.page,
        residual=None if case.residual < 0 else case.residual, sink_tokens=case.sink_tokens,
        k_static=static(case.k, case.heads, case.head_dim), v_static=static(case.v, case.heads, case.head_dim),
        permutation=torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed)) if pages else None,
    )  # fmt: skip


def values(case: Case) -> torch.Tensor:
    """Keys and values [2, B, H, room, D] with ranges of many sizes, equal values, zeros of both signs and outliers."""
    rng = torch.Generator().manual_seed(case.seed)
    x = torch.randn(2, len(case.old), case.heads, case.room, case.head_dim, generator=rng)
    x = x * torch.exp2(torch.randint(-12, 6, (*x.shape[:4], 1), generator=rng))
    x[:, :, 0, ::7] = 0.375
    x[:, :, 0, 1::7] = x[:, :, 0, 1::7].relu() * -torch.sign(x[:, :, -1, 1::7])
    x[..., 2::9, 3] = 6e4
    return x.to(getattr(torch, case.dtype)).to(DEVICE)


def prepare(case: Case) -> tuple[PackedCache, PackedCache, list[torch.Tensor], torch.Tensor]:
    """(cache whose lengths count the new tokens, what it must become, rows of new keys and values, their starts)."""
    x = values(case)
    made, wanted = built(case, case.old, x), built(case, case.lengths, x)
    made.lengths.copy_(wanted.lengths)
    rows = [
        torch.cat([part[b, :, old : old + new].transpose(0, 1) for b, (old, new) in enumerate(zip(case.old, case.new))])
        for part in x
    ]
    if case.pitch:  # rows with gaps, as slices of a fused projection have
        rows = [torch.nn.functional.pad(r.flatten(1), (0, case.pitch))[:, : r[0].numel()].view(r.shape) for r in rows]
    starts = torch.tensor([0, *torch.tensor(case.new).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    return made, wanted, rows, starts


def compare(made: PackedCache, wanted: PackedCache, where: str = "") -> None:
    """Every word of the pages and every token; AssertionError says what differs."""
    wrong = (made.pages != wanted.pages).nonzero()
    assert not len(wrong), f"{len(wrong)} of {made.pages.numel()} words differ, first {wrong[:4].tolist()}; {where}"
    for b in range(len(made.lengths)):
        for h in range(made.kv_heads):
            for mine, theirs in zip(made.dequantize(b, h), wanted.dequantize(b, h)):
                assert torch.equal(mine.view(torch.int64), theirs.view(torch.int64)), f"tokens of {b}, {h}; {where}"


def check(case: Case) -> None:
    """The new tokens are stored as the quantizer stores them, and a second call changes nothing."""
    made, wanted, rows, starts = prepare(case)
    made, rows, starts = made.to("cuda"), [r.cuda() for r in rows], starts.cuda()
    repeats = 2 if max(case.new) <= writing.ONE_LAUNCH or not made.residual_tokens else 1
    for _ in range(repeats):
        if len(set(case.new)) == 1:
            shape = (len(case.new), case.new[0], *rows[0].shape[1:])
            entry.append(made, *(r.unflatten(0, shape[:2]) for r in rows), target=case.target)
        else:
            entry.store(made, *rows, starts, max(case.new), target=case.target)
    compare(made.to("cpu"), wanted, case.repro)


MANY = range(70)  # sequences: CTAs with more than one pair
CASES = {
    "int4": Case(),
    "int8 pages": Case("int8", "int4", page=32, pitch=64),
    "one token": Case("int8", "int4", page=32, heads=3, old=(31, 5, 16, 0, 63), new=(1, 1, 1, 1, 1)),
    "int2": Case("int2", "int2", head_dim=64),
    "rotated keys": Case("int4_hadamard", "int4", residual=0, page=32, old=(0, 5, 61), new=(40, 3, 70)),
    "rotated": Case(
        "int2_hadamard", "int2_hadamard", residual=0, head_dim=64, old=(5, 16), new=(3, 20), dtype="bfloat16"
    ),
    "rotated 256": Case("int2_hadamard", "int4_hadamard", residual=0, head_dim=256, old=(30,), new=(9,), heads=1),
    "rotated, many": Case(
        "int4_hadamard",
        "int4",
        residual=0,
        heads=8,
        old=tuple(i * 5 % 67 for i in MANY),
        new=tuple(1 for _ in MANY),
        page=128,
    ),
    "rotated, residual": Case(
        "int2_hadamard", "int4", residual=64, old=(0, 63, 60, 130), new=(8, 1, 8, 8), page=64, dtype="bfloat16"
    ),
    "float16": Case("float16", "float16", page=16),
    "bfloat16": Case("bfloat16", "bfloat16", dtype="bfloat16"),
    "bfloat16 rows": Case("int4", "int8", dtype="bfloat16", head_dim=256),
    "bfloat16 from float16": Case("bfloat16", "int4", head_dim=64),
    "static": Case("int8_static", "fp8"),
    "fp8": Case("fp8", "int8_static", head_dim=64, dtype="bfloat16"),
    "residual": Case("int4", "int8", residual=64, old=(0, 63, 60, 130), new=(8, 1, 8, 8), page=64),
    "residual bfloat16": Case(residual=32, old=(3, 31), new=(100, 2), dtype="bfloat16"),
    "ring": Case(residual=128, old=(127, 112, 0, 300), new=(1, 16, 5, 7), page=128),
    "ring, first tokens": Case(
        "int2_hadamard", "int2_hadamard", head_dim=64, residual=48, old=(0, 47, 30), new=(16, 2, 1), sink_tokens=16
    ),
    "ring, prefill": Case("int8", "int4", residual=64, old=(0, 5, 90), new=(200, 70, 17), sink_tokens=16, page=64),
    "smallest ring": Case("fp8", "int4", residual=16, old=(0, 15, 30), new=(16, 3, 1), sink_tokens=16),
    "ring, many": Case(
        "int4_hadamard",
        "int4",
        heads=8,
        residual=128,
        old=tuple(i * 7 % 290 for i in MANY),
        new=tuple(1 for _ in MANY),
        page=128,
        sink_tokens=16,
    ),
    "channel": Case("int4_channel64", "int4", old=(63, 0, 60, 127, 16), new=(1, 64, 8, 3, 5), page=64),
    "channel, many": Case(
        "int4_channel64", "int4", heads=8, old=tuple(i * 7 % 130 for i in MANY), new=tuple(1 for _ in MANY), page=64
    ),
    "int4, many": Case(heads=8, old=tuple(i * 5 % 67 for i in MANY), new=tuple(1 for _ in MANY)),
    "channel prefill": Case("int4_channel32", "int2", old=(0, 17), new=(150, 99), head_dim=64),
    "channel 128": Case("int2_channel128", "int2", old=(120, 0), new=(8, 300)),
    "channel 256": Case("int4_channel32", "int4", head_dim=256, old=(30,), new=(70,), dtype="bfloat16"),
}

if __name__ == "__main__":
    check(eval(sys.argv[1], {"Case": Case}))
    print("ok")
