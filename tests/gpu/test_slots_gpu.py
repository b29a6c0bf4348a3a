"""Storing by slot mapping on the GPU: the oracle's bits, in any order, captured, and turned on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from attention_write_cases import TARGET, Case
from slot_cases import CASES, Slots, prepare
from terrazzo.lowering.errors import CaptureError
from terrazzo.ops import attention, rope
from terrazzo.ops.attention.cache import launch
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import reference_writing, slot_writing


@pytest.fixture(autouse=True)
def compiled_first(gpu, compiled) -> None:
    """Kernels of all selected cases are compiled together, up front."""


@dataclass(frozen=True)
class Stored:
    """A case, and its kernel."""

    slots: Slots
    garbage: bool = True

    def requests(self) -> list:
        case = self.slots.case
        target, device = launch.current_targets(TARGET)
        layout = CacheLayout(case.k, case.v, case.head_dim)
        return [slot_writing.request(layout, case.dtype, case.page, self.slots.slots, target=target, device=device)]


MANY = {
    "decode": Slots(Case("int8", "int4", heads=8, page=128, old=tuple(i * 5 % 67 for i in range(70)), new=(1,) * 70)),
    "prompt": Slots(Case("int4_hadamard", "int4", residual=0, heads=8, page=16, old=(0, 9), new=(1500, 900)), "turn"),
    "mixed": Slots(Case(heads=8, page=64, old=(0, 9, *range(40)), new=(700, 300, *[1] * 40), dtype="bfloat16"), "turn"),
    "shuffled": Slots(Case(heads=8, page=64, old=(0, 9), new=(700, 300))),
}
EVERY = [pytest.param((Stored(slots),), id=name) for name, slots in (CASES | MANY).items()]


@pytest.mark.parametrize("cases", EVERY)
def test_tokens_are_stored_where_the_mapping_says_and_no_other_bit_changes(cases):
    for garbage in (False, True):
        made, wanted, rows, mapped = prepare(cases[0].slots, garbage)
        made, rows, mapped = made.to("cuda"), [r.cuda() for r in rows], mapped.cuda()
        for _ in range(2):  # a second call changes nothing
            attention.store_slots(made, *rows, mapped, target=TARGET)
            assert torch.equal(made.pages.cpu(), wanted)


CAPTURED = [pytest.param((Stored(MANY["mixed"]),), id="mixed")]


@pytest.mark.parametrize("cases", CAPTURED)
def test_a_replay_stores_by_the_mapping_of_its_time(cases):
    slots = cases[0].slots
    made, wanted, rows, mapped = prepare(slots, True)
    start, made, rows, mapped = made.pages.cuda(), made.to("cuda"), [r.cuda() for r in rows], mapped.cuda()
    fixed = [torch.zeros_like(x) for x in (*rows, mapped)]
    fixed[2].fill_(-1)
    attention.store_slots(made, *fixed, target=TARGET)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = torch.cuda.memory_allocated()  # a graph of torch has memory of its own for its random numbers
        attention.store_slots(made, *fixed, target=TARGET)
        assert torch.cuda.memory_allocated() == held
    for order in (torch.arange(len(mapped)), torch.randperm(len(mapped))):
        made.pages.copy_(start)
        for to, x in zip(fixed, (*rows, mapped)):
            to.copy_(x[order.cuda()])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made.pages.cpu(), wanted)


@pytest.mark.parametrize("cases", [(Stored(replace(MANY["mixed"], slots="int32")),)], ids=["int32"])
def test_a_cold_kernel_is_no_part_of_a_capture(cases):
    made, _, rows, mapped = prepare(cases[0].slots, True)
    made, rows, mapped = made.to("cuda"), [r.cuda() for r in rows], mapped.cuda()
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention.store_slots(made, *rows, mapped, target=TARGET)


@dataclass(frozen=True)
class Turned:
    """New tokens that are turned and stored by slot, beside the operators that do the same."""

    slots: Slots
    norm: str = "none"
    positions: str = "int64"
    heads: int = 8

    def requests(self) -> list:
        case = self.slots.case
        target, device = launch.current_targets(TARGET)
        layout, kind = CacheLayout(case.k, case.v, case.head_dim), (case.dtype, case.page, self.slots.slots)
        turned = dict(rotary_dim=case.head_dim, rope="neox", norm=self.norm, numerics="fused", positions=self.positions)
        return [
            slot_writing.request(layout, *kind, target=target, device=device, **turned),
            *rope.kernel_requests(
                case.head_dim, dtype=case.dtype, norm=self.norm, positions=self.positions, target=target
            ),
        ]


TURNED = [
    Turned(MANY["mixed"]),
    Turned(CASES["rotated keys"], norm="llama"),
    Turned(CASES["int8 keys"], positions="int32"),
    Turned(CASES["bfloat16"], positions="none"),
]


@pytest.mark.parametrize("cases", [(case,) for case in TURNED])
def test_turning_and_storing_at_once_has_the_bits_of_both_operators(cases):
    turned = cases[0]
    case = turned.slots.case
    made, _, rows, mapped = prepare(turned.slots, True)
    count, heads, dtype = len(mapped), turned.heads * case.heads, getattr(torch, case.dtype)
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(count, heads, case.head_dim, generator=rng).to(dtype)
    qkv = torch.cat([x.flatten(1) for x in (q, *(r.clamp(-8, 8) for r in rows))], dim=1).cuda()
    angles = torch.rand(count + 9, case.head_dim // 2, generator=rng).cuda() * 6
    tables, facts = (angles.cos(), angles.sin()), {}
    if turned.positions != "none":
        places = torch.randperm(count + 9, generator=rng)[:count].to(getattr(torch, turned.positions))
        facts["positions"] = places.cuda()
    if turned.norm != "none":
        vectors = [(torch.rand(case.head_dim, generator=rng) + 0.5).to(dtype).cuda() for _ in range(2)]
        facts |= dict(norm=turned.norm, q_weight=vectors[0], k_weight=vectors[1])
    sizes = dict(heads=heads, kv_heads=case.heads, head_dim=case.head_dim)
    q_turned, k_turned = rope.apply_rope(qkv, *tables, **sizes, **facts, target=TARGET)
    wanted = replace(made, pages=made.pages.clone())
    reference_writing.store_slots(wanted, k_turned.cpu(), rows[1].clamp(-8, 8), mapped)
    made = made.to("cuda")
    for _ in range(2):
        found = attention.rope_append(
            made, qkv, *tables, heads=heads, slot_mapping=mapped.cuda(), **facts, target=TARGET
        )
        stored = ~q_turned.isnan().flatten(1).any(1)
        assert torch.equal(found[stored], q_turned[stored])
        assert torch.equal(made.pages.cpu(), wanted.pages)
