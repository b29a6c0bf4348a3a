"""The generated kernels that store by slot mapping, run on the CPU from their CUDA text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import EARLY, LDMATRIX, VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention.writing import reference_writing, slot_write_program, slot_writing
from terrazzo.ops.attention.writing.turned_macros import SOURCES as TURNING
from terrazzo.ops.rope import reference
from terrazzo.ops.rope.op import Call
from terrazzo.ops.tiles import heads as heads_in_lanes
from terrazzo.ops.tiles.cuda.attention import PRIMITIVES
from terrazzo.ops.tiles.cuda.writing import CLIPPING, SLOTS
from test_attention_write_emulated import SHIMS
from test_rope_append_emulated import MORE_SHIMS

from tests.gpu import slot_cases
from tests.gpu.attention_write_cases import Case
from tests.gpu.slot_cases import CASES, Slots

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
FLIP = r"""
template <int N> static void tz_flip(void *p, const void *v) {
  if ((uintptr_t)p % (4 * N)) { fprintf(stderr, "misaligned words\n"); abort(); }
  for (int i = 0; i < N; ++i) __atomic_fetch_xor((unsigned *)p + i, ((const unsigned *)v)[i], __ATOMIC_RELAXED);
}
"""
SOURCES = [EARLY, LDMATRIX, VOTES, SHIMS, PRIMITIVES["codes"].source, CLIPPING.source, SLOTS.source, FLIP]


@pytest.mark.parametrize("name", cases(CASES, ("rotated keys",)))
def test_tokens_are_stored_where_the_mapping_says_and_no_other_bit_changes(name, tmp_path):
    slots = CASES[name]
    case = slots.case
    made, _, _, mapped = slot_cases.prepare(slots, False)
    request = slot_writing.request(made.layout, case.dtype, case.page, slots.slots, target=Target.parse("sm_90a"))
    kernel = CpuKernel(cuda_text(request), SOURCES, slot_write_program.WARPS * 32, tmp_path)
    for garbage in (False, True):
        made, wanted, rows, mapped = slot_cases.prepare(slots, garbage)
        for sms in (132, 1):  # a token for each warp, and several: a second call changes nothing
            ctas, per = slot_write_program.launch(len(mapped), case.heads, sms)
            static = [torch.zeros(1, 1) if s is None else s for s in (made.k_static, made.v_static)]
            kernel(
                (ctas, 1, 1), K=rows[0], V=rows[1], MAP=mapped, KV=made.pages, SK=static[0], SV=static[1],
                k_token=rows[0].stride(0), k_head=case.head_dim, v_token=rows[1].stride(0), v_head=case.head_dim,
                tokens=len(mapped), ctas=ctas, per=per, room=len(made.pages) * case.page, hk=case.heads,
                page_words=made.pages.shape[2], skd=static[0].shape[1], svd=static[1].shape[1],
            )  # fmt: skip
            wrong = (made.pages != wanted).nonzero()
            assert not len(wrong), f"{len(wrong)} words, {wrong[:4].tolist()}, garbage {garbage}, {per} for each warp"


def test_rows_and_slots_of_the_kernel_ahead_are_read_once_it_has_ended(tmp_path):
    slots = replace(CASES["rotated keys"], order="turn")
    case = slots.case
    made, wanted, rows, mapped = slot_cases.prepare(slots, True)
    request = slot_writing.request(made.layout, case.dtype, case.page, slots.slots, target=Target.parse("sm_90a"))
    kernel = CpuKernel(cuda_text(request), SOURCES, slot_write_program.WARPS * 32, tmp_path)
    for x in (mapped, made.pages, *rows):
        kernel.late(x, torch.zeros_like(x))
    ctas, per = slot_write_program.launch(len(mapped), case.heads, 132)
    none = torch.zeros(1, 1)
    kernel(
        (ctas, 1, 1), K=rows[0], V=rows[1], MAP=mapped, KV=made.pages, SK=none, SV=none, k_token=rows[0].stride(0),
        k_head=case.head_dim, v_token=rows[1].stride(0), v_head=case.head_dim, tokens=len(mapped), ctas=ctas, per=per,
        room=len(made.pages) * case.page, hk=case.heads, page_words=made.pages.shape[2], skd=1, svd=1,
    )  # fmt: skip
    assert torch.equal(made.pages, wanted)


TURNED = {  # case of storing, query heads of a kv head, how heads are turned
    "positions": (Slots(Case(page=16, old=(0, 5), new=(3, 18))), 2, dict(positions="int64")),
    "qk-norm, rows of tables": (
        Slots(Case("int4_hadamard", "int4", dtype="bfloat16", old=(30,), new=(5,), page=32, residual=0), slots="int32"),
        3, dict(norm="llama"),
    ),
    "partly": (
        Slots(Case("int8", "int4", head_dim=64, old=(3, 14), new=(3, 3), page=16), "turn"), 1,
        dict(rotary_dim=32, layout="interleaved", positions="int32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(TURNED, ("positions",)))
def test_new_tokens_are_turned_and_stored_by_slot(name, tmp_path):
    slots, group, changes = TURNED[name]
    case = slots.case
    made, _, rows, mapped = slot_cases.prepare(slots, True)
    dim, kv, count, dtype = case.head_dim, case.heads, len(mapped), getattr(torch, case.dtype)
    kind = dict(rotary_dim=dim, layout="neox", norm="none", numerics="model", positions="none") | changes
    heads, rng = group * kv, torch.Generator().manual_seed(1)
    q = torch.randn(count, heads, dim, generator=rng).to(dtype)
    k, v = (r.clamp(-8, 8) for r in rows)
    qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1).contiguous()
    places = torch.arange(count) if kind["positions"] == "none" else torch.randperm(count + 9, generator=rng)[:count]
    if kind["positions"] != "none":
        places[:2] = torch.tensor([1 << 20, -3])  # outside of the tables: the nearest row
    angles = torch.rand(count + 9, kind["rotary_dim"] // 2, generator=rng) * 6
    cos, sin = angles.cos(), angles.sin()
    weights = [(torch.rand(dim, generator=rng) + 0.5).to(dtype) for _ in range(2)]
    given = weights if kind["norm"] != "none" else [None, None]
    facts = (heads, kv, dim, kind["rotary_dim"], kind["layout"], kind["norm"], 1e-5, kind["numerics"])
    turned = Call(qkv, cos, sin, places.clamp(0, count + 8), *given, *facts)
    q_turned, k_turned = reference.apply_rope(turned)
    wanted = replace(made, pages=made.pages.clone())
    reference_writing.store_slots(wanted, k_turned, v, mapped)
    rope = {name: kind[name] for name in ("rotary_dim", "norm", "numerics", "positions")} | {"rope": kind["layout"]}
    target = Target.parse("sm_90a")
    request = slot_writing.request(made.layout, case.dtype, case.page, slots.slots, target=target, **rope)
    kernel = CpuKernel(cuda_text(request), [*SOURCES, MORE_SHIMS, *TURNING], slot_write_program.WARPS * 32, tmp_path)
    out = torch.full((count * heads + 1, dim), float("nan"), dtype=dtype)
    ctas, per = slot_write_program.launch(count, kv, 132)
    units = slot_write_program.WARPS * (32 // heads_in_lanes.lanes_of(dim))
    flat, pitch, none = qkv.view(-1), qkv.shape[1], torch.zeros(1, 1)
    table = (
        torch.zeros(1, dtype=torch.int32)
        if kind["positions"] == "none"
        else places.to(getattr(torch, kind["positions"]))
    )
    for late in (mapped, qkv):
        kernel.late(late, torch.zeros_like(late))
    kernel(
        (ctas - -count * heads // units, 1, 1), X=flat, POS=table, COS=cos, SIN=sin, QW=weights[0], KW=weights[1],
        Q=out, K=flat[heads * dim :], V=flat[(heads + kv) * dim :], MAP=mapped, KV=made.pages, SK=none, SV=none,
        k_token=pitch, k_head=dim, v_token=pitch, v_head=dim, tokens=count, ctas=ctas, per=per,
        room=len(made.pages) * case.page, q_token=pitch, heads=heads, q_rows=count * heads, eps=1e-5, hk=kv,
        page_words=made.pages.shape[2], skd=1, svd=1, width=cos.shape[1], p=len(cos),
    )  # fmt: skip
    stored = ~q_turned.isnan().flatten(1).any(1)  # a row of padding may hold anything
    assert bool(out[-1].isnan().all())
    off = float((out[:-1].view(count, heads, dim) != q_turned)[stored].float().mean())
    assert off <= (0 if kind["norm"] == "none" else 1e-3)
    wrong = float((made.pages != wanted.pages).float().mean())
    assert wrong <= (0 if kind["norm"] == "none" else 2e-2)  # the last bit of a mean may move a code
