"""Cases of storing new tokens by a slot mapping: pages that hold anything, rows in any order, some that are padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.writing import reference_writing

from tests.gpu import attention_write_cases
from tests.gpu.attention_write_cases import Case

PADDING = 5
"""Rows of a case that are not stored: their slots are -1, smaller, or behind the pages."""


@dataclass(frozen=True)
class Slots:
    """A case with pages and without f16 tokens. order: of its tokens, "turn" or "any"; slots: dtype of the mapping."""

    case: Case
    order: str = "any"
    slots: str = "int64"


def mapping(cache: PackedCache, case: Case) -> torch.Tensor:
    """The slot of each new token, in turn."""
    found = []
    for b, (old, new) in enumerate(zip(case.old, case.new)):
        tokens = torch.arange(old, old + new)
        found.append(cache.block_table[b].cpu().long()[tokens // case.page] * case.page + tokens % case.page)
    return torch.cat(found)


def prepare(slots: Slots, garbage: bool) -> tuple[PackedCache, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(cache, what its pages must become, rows of keys and of values, their slots); rows of padding are NaN. The pages
    hold what an append by page table would be merged into, or `garbage`, of which all but the new tokens must stay."""
    case = slots.case
    made, wanted, rows, _ = attention_write_cases.prepare(case)
    where, rng = mapping(made, case), torch.Generator().manual_seed(case.seed + 1)
    if garbage:
        low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        made.pages.copy_(torch.randint(low, high, made.pages.shape, generator=rng, dtype=torch.int32))
        wanted.pages.copy_(made.pages)
        reference_writing.store_slots(wanted, *rows, where)
    order = torch.randperm(len(where), generator=rng) if slots.order == "any" else torch.arange(len(where))
    cut = sorted(torch.randint(0, len(where) + 1, (PADDING,), generator=rng).tolist())
    parts = order.tensor_split(torch.tensor(cut))
    padding = torch.tensor([-1, -(1 << 20), -1, len(made.pages) * case.page, 1 << 30])
    mapped = torch.cat([x for i, part in enumerate(parts) for x in (where[part], padding[i : i + 1])])
    rows = [
        torch.cat([x for part in parts for x in (r[part], torch.full_like(r[:1], float("nan")))])[: len(mapped)]
        for r in rows
    ]
    return made, wanted.pages, rows, mapped.to(getattr(torch, slots.slots))


CASES = {
    "int4": Slots(Case(page=16, old=(0, 5, 61), new=(40, 3, 20))),
    "int8 keys": Slots(Case("int8", "int4", page=32, head_dim=64, old=(0, 5, 16), new=(33, 1, 16)), "turn", "int32"),
    "one token": Slots(Case("int8", "int8", page=32, heads=3, old=(31, 5, 16, 0), new=(1, 1, 1, 1), dtype="bfloat16")),
    "rotated keys": Slots(
        Case("int4_hadamard", "int4", residual=0, page=32, old=(0, 5, 30), new=(17, 3, 9), dtype="bfloat16")
    ),
    "rotated, in turn": Slots(Case("int4_hadamard", "int4", residual=0, page=16, old=(7,), new=(60,)), "turn"),
    "int2": Slots(Case("int2_hadamard", "int2_hadamard", residual=0, head_dim=64, page=16, old=(5, 16), new=(3, 20))),
    "float16": Slots(Case("float16", "float16", page=16, head_dim=64, old=(3, 14), new=(20, 3))),
    "bfloat16": Slots(Case("bfloat16", "bfloat16", page=16, old=(5,), new=(19,), dtype="bfloat16"), "turn"),
    "static": Slots(Case("int8_static", "fp8", page=16, old=(5, 0), new=(9, 17))),
    "head_dim 256": Slots(Case("int8", "int4", page=16, head_dim=256, heads=1, old=(30,), new=(9,))),
}
