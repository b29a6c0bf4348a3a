"""The generated decode kernels, run on the CPU from their CUDA text, against float64 inside the error bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import EARLY, LDMATRIX, VOTES, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention.cache.launch import LOG2E
from terrazzo.ops.attention.decoding import op, reference
from terrazzo.ops.attention.decoding.codes import Codes
from terrazzo.ops.tiles.cuda.attention import PRIMITIVES
from terrazzo.schedules.attention import Decode, WarpgroupDecode
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import translated

from tests.gpu import attention_cases
from tests.gpu.attention_cases import Case

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(attention_cases, "DEVICE", "cpu")
    attention_cases._built.cache_clear()
    yield
    attention_cases._built.cache_clear()


def emulate(
    case: Case,
    schedule: Decode,
    splits: int,
    folder,
    target: str = "sm_90a",
    stale: int | None = None,
    shares: int = 0,
    own: tuple[int, ...] = (),
    codes: Codes | None = None,
    more: tuple[str, ...] = (),
):
    """(q, out, lse, options) of one launch on the CPU. Until the kernel waits for the one ahead, it sees lengths that
    are `stale` too large, pages in another order, and no queries. own: how many of their q_len tokens, the last ones,
    the sequences of a ragged batch have; all other rows of the result are NaN. codes: what is made of the output, whose
    primitives are `more`."""
    made = attention_cases.built(case)
    layout = made.layout
    batch, heads = len(case.lengths), case.kv_heads * case.group
    chosen = op.plan(
        layout, batch, case.kv_heads, case.q_len * case.group, case.tokens, dtype=case.dtype, page=case.page,
        residual=made.residual_tokens, softcap=case.softcap > 0, sinks=case.sinks, target=Target.parse(target),
        schedule=schedule, splits=splits, shares=shares, ragged=bool(own), coding=codes and codes.coding,
    )  # fmt: skip
    source = cuda_text(chosen.request)
    names = {layout.k.converter.name, layout.v.converter.name} - {"bf16_bf16"} | {"f16_f16"}
    converters = [
        EARLY,
        LDMATRIX,
        VOTES,
        PRIMITIVES["places"].source,
        "template <int N> static void tz_store(void *p, const void *v) { memcpy(p, v, 4 * N); }\n",
    ]
    converters += [get_converter(name).device_source for name in sorted(names | {layout.k.converter.name})]
    converters += more
    if isinstance(schedule, WarpgroupDecode):
        source = translated(source, 0)
        converters.insert(1, WGMMA)
    kernel = CpuKernel(source, converters, schedule.warps * 32, folder, chosen.cluster)
    rng = torch.Generator().manual_seed(case.seed + 1)
    q = torch.randn(batch, case.q_len, heads, case.head_dim, generator=rng) * case.sharp
    q = q.to(getattr(torch, case.dtype))
    sinks = torch.randn(heads, generator=rng) * 2 if case.sinks else torch.zeros(1)
    y = case.kv_heads * chosen.row_groups
    dense, has = q, torch.ones(q.shape[:2], dtype=torch.bool)
    starts = torch.tensor([0, *own]).cumsum(0).int()
    if own:
        has = torch.arange(case.q_len) >= case.q_len - torch.tensor(own)[:, None]
        q = torch.cat([q[has], torch.full_like(q[0, :1], float("nan"))])[None]  # the last row is nobody's
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"))
    zero, table = torch.zeros(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    static = [torch.zeros(1, 1) if s is None else s.contiguous() for s in (made.k_static, made.v_static)]
    residual, pages = zero if made.residual is None else made.residual, made.block_table
    semaphores = torch.zeros(batch * (y * chosen.cluster + bool(codes)), dtype=torch.int32)
    coded = dict(zip(("XQ", "XS", "XR", "SM"), codes.arguments())) if codes else {}
    tensors = {
        "Q": q, "KV": made.pages, "TABLE": table if pages is None else pages, "LEN": made.lengths, "RES": residual,
        "SLOT": torch.arange(batch, dtype=torch.int32), "SK": static[0], "SV": static[1], "SINK": sinks,
        "OP": torch.full((1 if shares else batch, y, chosen.partials, chosen.rows, case.head_dim), float("nan")),
        "LP": torch.full((1 if shares else batch, y, chosen.partials, chosen.cluster * chosen.rows), float("nan")),
        "SEM": semaphores, "O": out, "LSE": lse, **({"CU": starts} if own else {}), **coded,
    }  # fmt: skip
    scalars = {
        "scale": LOG2E / math.sqrt(case.head_dim), "cap": case.softcap * LOG2E, "window": case.window,
        "b": batch, "q_len": case.q_len, "hq": heads, "hk": case.kv_heads, "page_words": made.pages.shape[2],
        "most": 1 if pages is None else pages.shape[1], "rh": residual.shape[1], "res_words": residual.shape[2],
        "pages": made.pages.shape[0], "skd": static[0].shape[1], "svd": static[1].shape[1],
        "y": y, "p": chosen.partials, "slots": residual.shape[0],
        **({"most_new": case.q_len, "n": q.shape[1], "b1": batch + 1} if own else {}),
        **({"k": heads * case.head_dim, "n_scales": coded["XS"].numel()} if codes else {}),
    }  # fmt: skip
    kernel.allocation(made.pages)
    if made.residual is not None:
        kernel.allocation(made.residual)
    if stale is not None:
        kernel.late(tensors["LEN"], tensors["LEN"] + stale)
        kernel.late(q, torch.full_like(q, float("nan")))
        if pages is not None:
            kernel.late(tensors["TABLE"], tensors["TABLE"].flip(1) * 3 - 1)
    kernel((chosen.places, y, 1) if shares else (splits, y, batch), **tensors, **scalars)
    assert not semaphores.any()
    if own:
        assert out[0, -1].isnan().all() and lse[0, -1].isnan().all()
        whole = torch.full_like(dense, float("nan")), torch.full(dense.shape[:3], float("nan"))
        for made, packed in zip(whole, (out, lse)):
            made[has] = packed[0, :-1]
        q, (out, lse) = dense, whole
    return q, out, lse, reference.Options(softcap=case.softcap, window=case.window, sinks=sinks if case.sinks else None)


RAGGED = (300, 0, 1, 129, 15)
SMALL = Decode(1, 4, 2, 3, 1)
ONE = Decode(1, 4, 1, 3, 1)
CASES = {
    "float16": (Case("float16", "float16", lengths=RAGGED), ONE, 2),
    "int8": (Case("int8", "int8", lengths=RAGGED), ONE, 3),
    "int4": (Case("int4", "int4", lengths=RAGGED), SMALL, 1),
    "int4 splits": (Case("int4", "int4", lengths=(700, 300), sharp=4.0), SMALL, 5),
    "int4 many splits": (Case("int4", "int4", lengths=(700, 300, 0), sinks=True), Decode(1, 2, 1, 3, 1), 21),
    "int4 channel": (Case("int4_channel128", "int4", lengths=(300, 0, 1, 128, 900)), ONE, 2),
    "group of four warps": (Case("int4_channel128", "int4", lengths=(300, 0, 1, 128, 900)), ONE, 8),
    "group of two warps, pages": (
        Case("int4_channel64", "int4", lengths=(300, 64, 200), page=64, window=90), SMALL, 6
    ),
    "two clusters": (Case("int4", "int4", lengths=(700, 300), group=7, sinks=True), Decode(1, 2, 1, 3, 1), 16),
    "two clusters of 16 rows": (
        Case("int4", "int2", lengths=(700, 30), q_len=3, head_dim=64), Decode(2, 1, 1, 3, 1, ahead=0), 16
    ),
    "int2 channel": (Case("int2_channel64", "int2", lengths=(300, 63, 600)), Decode(1, 2, 2, 3, 1), 2),
    "int2": (Case("int2", "int2", lengths=RAGGED), SMALL, 2),
    "paged": (Case("int4", "int8", lengths=RAGGED, page=64, group=7), SMALL, 2),
    "paged channel": (Case("int4_channel32", "int4", lengths=RAGGED, page=64), Decode(1, 4, 2, 3, 1, ahead=0), 2),
    "pages of many stages": (
        Case("int4_channel32", "int4", lengths=(1300, 520), page=32, head_dim=64, kv_heads=1),
        Decode(1, 1, 1, 3, 1, ahead=0), 1,
    ),
    "float16, three CTAs of an SM": (
        Case("float16", "float16", lengths=(700, 300, 0), page=128), Decode(1, 3, 1, 3, 3), 4
    ),
    "float16, four CTAs of an SM": (Case("float16", "float16", lengths=(900, 16, 5)), Decode(1, 2, 1, 3, 4), 7),
    "float16, 16 rows in two CTAs of an SM": (
        Case("float16", "float16", q_len=4, lengths=(700, 300, 4)), Decode(2, 4, 1, 3, 2), 3
    ),
    "bfloat16": (Case("bfloat16", "bfloat16", lengths=RAGGED, dtype="bfloat16"), ONE, 2),
    "bfloat16 queries": (Case("int4", "int4", lengths=RAGGED, dtype="bfloat16"), SMALL, 2),
    "static": (Case("int8_static", "int8_static", lengths=RAGGED), ONE, 2),
    "fp8": (Case("fp8", "fp8", lengths=RAGGED), ONE, 2),
    "16 rows": (Case("int4", "int4", group=4, q_len=4, lengths=(300, 3, 0)), Decode(2, 2, 2, 3, 1), 2),
    "16 rows shared": (Case("int4", "int4", group=4, q_len=4, lengths=(300, 3, 0)), Decode(2, 2, 2, 3, 1, True), 2),
    "16 rows of four tiles": (
        Case("int4", "int4", group=4, q_len=4, lengths=(700, 3, 0), page=128, window=400), Decode(2, 2, 4, 2, 1), 4
    ),
    "16 rows of four tiles, channels": (
        Case("int4_channel128", "int4", group=4, q_len=3, lengths=(700, 129)), Decode(2, 2, 4, 2, 1), 2
    ),
    "16 rows of four tiles, 2 bits": (
        Case("int2_channel64", "int2", group=8, q_len=2, lengths=(700, 64), dtype="bfloat16", softcap=9.0, sinks=True),
        Decode(2, 3, 4, 2, 1), 3
    ),
    "16 rows of int8": (Case("int8", "int4", group=4, q_len=4, lengths=(500, 3)), Decode(2, 2, 2, 2, 1), 2),
    "two stages": (Case("int4_channel128", "int4", page=128, lengths=(1100, 129)), Decode(1, 4, 2, 2, 1), 2),
    "40 rows shared": (
        Case("int4_channel64", "int2", group=8, q_len=5, lengths=(200, 4), window=90), Decode(2, 2, 2, 2, 1, True), 2
    ),
    "no pipeline": (Case("int2", "int4", lengths=(150, 7)), Decode(1, 2, 2, 1, 1), 2),
    "storage ends inside a stage": (Case("int2", "int2", lengths=(257, 1)), Decode(1, 2, 4, 2, 1), 2),
    "one warp": (Case("int4", "int4", lengths=(150, 7)), Decode(1, 1, 2, 3, 1), 2),
    "40 rows": (Case("int4_channel64", "int4", group=8, q_len=5, lengths=(200, 4)), Decode(2, 2, 1, 3, 1), 2),
    "head_dim 64": (Case("int4", "int2", head_dim=64, lengths=RAGGED), SMALL, 2),
    "head_dim 256": (Case("int8", "int4", head_dim=256, lengths=RAGGED), ONE, 2),
    "residual": (Case("int4", "int4", residual=64, lengths=RAGGED), SMALL, 2),
    "options": (
        Case("int4", "int4", softcap=5.0, window=33, sinks=True, lengths=(300, 0, 7), q_len=2), SMALL, 2
    ),
    "window": (Case("int4_channel64", "int4", window=100, lengths=(500, 130), q_len=3), SMALL, 2),
    "rotated keys": (Case("int4_hadamard", "int4", residual=0, lengths=(300, 15), q_len=4), Decode(2, 2, 2, 3, 1), 2),
    "rotated, residual block": (
        Case("int2_hadamard", "int2_hadamard", lengths=(90, 15, 0), residual=64, head_dim=64, dtype="bfloat16"),
        Decode(1, 2, 2, 2, 1), 2
    ),
    "ring": (
        Case("int4", "int4", residual=128, lengths=(300, 0, 127, 128, 15), page=64, q_len=3), Decode(1, 2, 4, 2, 1), 2
    ),
    "ring, first tokens": (
        Case(
            "int2_hadamard", "int2_hadamard", residual=48, lengths=(300, 20, 47, 48), sink_tokens=16, head_dim=64,
            window=200, softcap=5.0,
        ), SMALL, 2
    ),
    "smallest ring, first tokens": (
        Case("int4", "int8", residual=16, lengths=(64, 16, 15), sink_tokens=16, head_dim=64), ONE, 1
    ),
    "rotated, rows in shared memory": (
        Case("int4_hadamard", "int2_hadamard", residual=0, group=4, q_len=4, lengths=(300, 3), softcap=5.0, sinks=True),
        Decode(2, 2, 2, 3, 1, True), 2
    ),
    "rotated, head_dim 256": (
        Case("int4_hadamard", "int4_hadamard", residual=0, head_dim=256, lengths=(70,), kv_heads=1), ONE, 1
    ),
}  # fmt: skip
WIDE = WarpgroupDecode(2, 8, 4, 3, 1)
NARROW = WarpgroupDecode(2, 4, 4, 2, 1)
CASES |= {
    "warpgroups of int2": (Case("int2", "int2", group=16, lengths=RAGGED), WIDE, 2),
    "warpgroups of int4, pages": (
        Case("int4", "int4", group=3, q_len=4, page=64, lengths=(300, 0, 1, 64, 129), sharp=4.0), WIDE, 3
    ),
    "warpgroup channels": (
        Case("int4_channel128", "int4", group=16, kv_heads=1, lengths=(900, 0, 1, 128, 300)), WIDE, 2
    ),
    "warpgroups that share a channel group": (
        Case("int4_channel128", "int4", group=16, kv_heads=1, lengths=(896, 127, 300)),
        WarpgroupDecode(2, 16, 4, 2, 1), 3
    ),
    "warpgroup channels, options, pages": (
        Case(
            "int4_channel64", "int2", group=5, q_len=3, page=64, lengths=(400, 64, 63, 7, 135), softcap=5.0, sinks=True,
            window=70,
        ), WIDE, 2  # of 135 tokens the first row sees the last one of a group, and those behind it
    ),
    "warpgroup channels of 2 bits, bfloat16 queries": (
        Case("int2_channel64", "int4", group=9, kv_heads=1, lengths=(300, 63), dtype="bfloat16"), NARROW, 1
    ),
    "warpgroups of int8": (Case("int8", "int4", group=8, q_len=2, lengths=RAGGED), WIDE, 2),
    "warpgroups of float16": (Case("float16", "float16", group=16, kv_heads=1, lengths=RAGGED), NARROW, 2),
    "warpgroups of bfloat16": (
        Case("bfloat16", "bfloat16", group=16, kv_heads=1, lengths=RAGGED, dtype="bfloat16"), NARROW, 2
    ),
    "warpgroups of fp8": (Case("fp8", "fp8", group=16, kv_heads=1, lengths=RAGGED), WIDE, 2),
    "warpgroups of static int8": (Case("int8_static", "int8_static", group=16, lengths=RAGGED), NARROW, 2),
    "warpgroups, residual block": (
        Case("int4", "int4", group=16, residual=64, lengths=(300, 0, 1, 64, 127), dtype="bfloat16"), WIDE, 2
    ),
    "warpgroups, large residual block": (
        Case("int4", "int4", group=16, residual=128, lengths=(380, 127, 128, 15), page=128, dtype="bfloat16"), WIDE, 1
    ),
    "warpgroups, head_dim 64": (Case("int4", "int4", head_dim=64, group=16, lengths=RAGGED), WIDE, 2),
    "warpgroups, head_dim 256": (
        Case("int8", "int4", head_dim=256, group=16, kv_heads=1, lengths=RAGGED), NARROW, 2
    ),
    "warpgroups, int2 of head_dim 256": (
        Case("int2", "int2", head_dim=256, group=16, kv_heads=1, lengths=RAGGED), NARROW, 1
    ),
    "warpgroups, 28 rows": (
        Case("int4", "int4", group=7, q_len=4, lengths=(300, 3, 0)), WarpgroupDecode(4, 4, 4, 3, 1), 2
    ),
    "warpgroups, 64 rows": (
        Case("int2", "int4", group=8, q_len=8, kv_heads=1, lengths=(200, 5)), WarpgroupDecode(8, 4, 4, 3, 1), 1
    ),
    "warpgroups, two groups of 48 rows": (
        Case("int4_channel128", "int4", group=16, q_len=5, kv_heads=1, lengths=(300, 4), window=200),
        WarpgroupDecode(6, 4, 4, 2, 1), 2
    ),
    "warpgroups, two clusters": (
        Case("int4", "int2", group=16, kv_heads=1, lengths=(1500, 300), sinks=True), NARROW, 16
    ),
    "warpgroups, rotated": (
        Case("int4_hadamard", "int2_hadamard", residual=0, group=16, kv_heads=1, lengths=(300, 15, 0)), WIDE, 2
    ),
    "warpgroups, rotated, residual block, bfloat16 queries": (
        Case("int4_hadamard", "int4", group=3, q_len=4, kv_heads=1, lengths=(130, 15), residual=64, dtype="bfloat16"),
        NARROW, 1
    ),
    "warpgroups, ring, first tokens": (
        Case(
            "int4_hadamard", "int4", group=16, kv_heads=1, residual=128, lengths=(300, 130, 20, 250), sink_tokens=16,
            head_dim=64,
        ), NARROW, 2
    ),
    "three warpgroups": (Case("int2", "int2", group=16, lengths=(700, 130)), WarpgroupDecode(2, 12, 4, 2, 1), 1),
    "four warpgroups, storage ends inside a stage": (
        Case("int2", "int2", group=16, lengths=(257, 1)), WarpgroupDecode(2, 16, 4, 2, 1), 1
    ),
}  # fmt: skip


EARLY_CASES = {  # case, schedule, splits, tokens too many
    "nothing changed": (Case("int4", "int4", lengths=(700, 300, 0)), replace(SMALL, ahead=4), 5, 0),
    "longer": (Case("int4", "int4", lengths=(700, 1, 300)), replace(SMALL, ahead=4), 3, 1 << 30),
    "shorter": (Case("int2", "int2", lengths=(257, 1)), Decode(1, 2, 4, 2, 1, ahead=1), 2, -250),
    "other pages": (Case("int4_channel32", "int4", lengths=RAGGED, page=64, window=90), replace(SMALL, ahead=5), 2, 0),
    "all stale": (Case("int4", "int4", lengths=(700, 0, 300), page=64, residual=64), replace(SMALL, ahead=2), 5, 90),
    "ring, all stale": (
        Case("int4", "int4", lengths=(300, 0, 150), page=64, residual=32, sink_tokens=16, head_dim=64),
        replace(SMALL, ahead=1), 2, 70
    ),
    "no length at all": (Case("int8", "int8", lengths=(90, 700), window=500), replace(ONE, ahead=3), 2, -(1 << 31)),
    "no pipeline": (Case("int4", "int4", lengths=(90, 300), page=64), Decode(1, 2, 2, 1, 1, ahead=3), 2, 200),
    "16 rows": (Case("int4", "int2", lengths=(300, 3), q_len=4), Decode(2, 2, 2, 3, 1, True, 3), 2, 60),
    "warpgroups, longer": (
        Case("int4", "int4", group=16, lengths=(700, 1, 300)), replace(WIDE, stages=4, ahead=4), 1, 1 << 30
    ),
    "warpgroups, shorter": (Case("int2", "int2", group=16, lengths=(257, 1)), WIDE, 1, -250),
    "warpgroups, other pages": (
        Case("int4_channel64", "int4", group=16, lengths=(300, 64, 1), page=64, window=90), replace(WIDE, ahead=2), 1, 0
    ),
    "warpgroups, all stale": (
        Case("int4", "int4", group=12, lengths=(700, 0, 300), page=64, residual=64), replace(WIDE, ahead=2), 3, 90
    ),
    "warpgroups, no length at all": (
        Case("int8", "int8", group=16, kv_heads=1, lengths=(90, 700), window=500), NARROW, 2, -(1 << 31)
    ),
}  # fmt: skip
BALANCED = {  # case, schedule, shares, tokens that are seen too many before the wait
    "one long sequence": (Case("int4", "int4", lengths=(300, 1500, 0, 1)), Decode(1, 1, 2, 2, 1), 7, 0),
    "channels, pages, sinks": (
        Case("int4_channel64", "int2", lengths=(0, 900, 64, 130), page=64, sinks=True, group=7),
        Decode(1, 2, 2, 2, 2), 5, 0
    ),
    "window and residual block": (
        Case("int4", "int4", lengths=(1400, 70, 600), residual=64, window=400, q_len=2), Decode(1, 1, 1, 3, 1), 9, 0
    ),
    "16 rows": (Case("float16", "float16", lengths=(700, 3, 200), q_len=4), Decode(2, 2, 1, 2, 1), 4, 0),
    "16 rows of head_dim 64": (
        Case("int4_channel64", "int4", head_dim=64, lengths=(1200, 3, 200), q_len=4), Decode(2, 4, 2, 3, 4), 5, 0
    ),
    "130 sequences": (
        Case("int2", "int2", head_dim=64, kv_heads=1, lengths=(*[5] * 60, 900, *[33] * 68, 400)),
        Decode(1, 1, 2, 2, 1), 6, 0
    ),
    "fewer tokens than a share is worth": (Case("int8", "int4", lengths=(60, 90)), Decode(1, 2, 1, 2, 1), 40, 0),
    "others before the wait": (
        Case("int4", "int4", lengths=(0, 900, 64, 130), page=64), Decode(1, 1, 2, 2, 2, ahead=3), 12, 70
    ),
    "none before the wait": (
        Case("int4", "int4", lengths=(900, 64, 130), window=600), Decode(1, 1, 2, 2, 2, ahead=2), 6, -(1 << 31)
    ),
    "far too many before the wait": (
        Case("int8", "int8", lengths=(90, 700), kv_heads=1), Decode(1, 2, 1, 3, 1), 4, 1 << 30
    ),
}  # fmt: skip
OWN = {  # case, schedule, splits, shares, new tokens of each sequence
    "one to four tokens, pages": (
        Case("int4", "int4", q_len=4, lengths=(300, 2, 65, 0, 129, 134), page=64, window=100), Decode(2, 2, 2, 3, 1),
        2, 0, (1, 4, 3, 2, 0, 4),  # of 134 tokens the first row sees the last one of a stage, and those behind it
    ),
    "groups of rows that only some have": (
        Case("int4_channel64", "int4", group=8, q_len=5, lengths=(200, 4, 64), head_dim=64), Decode(2, 2, 1, 3, 1), 2,
        0, (1, 3, 5),
    ),
    "two clusters": (
        Case("int4", "int2", q_len=8, lengths=(700, 30, 300), head_dim=64, kv_heads=1), Decode(2, 1, 1, 3, 1, ahead=2),
        16, 0, (2, 8, 0),
    ),
    "splits in proportion to lengths": (
        Case(
            "int4_hadamard", "int4", q_len=3, lengths=(900, 64, 130), residual=64, head_dim=64, sinks=True, window=400
        ),
        Decode(2, 1, 1, 3, 1, ahead=1), 0, 6, (3, 1, 2),
    ),
    "warpgroups": (
        Case("int4", "int4", group=4, q_len=8, kv_heads=1, lengths=(300, 3, 130, 20)), NARROW, 2, 0, (1, 8, 0, 5),
    ),
}  # fmt: skip
USUAL = (
    "one to four tokens, pages",
    "channels, pages, sinks",
    "warpgroup channels, options, pages",
    "ring, first tokens",
)
"""Each program, with what the other cases have one by one."""


@pytest.mark.parametrize("name", cases(CASES, USUAL))
def test_decode(name, tmp_path):
    case, schedule, splits = CASES[name]
    judge(case, *emulate(case, schedule, splits, tmp_path))


@pytest.mark.parametrize("name", cases(EARLY_CASES, USUAL))
def test_what_is_read_early_may_be_stale(name, tmp_path):
    case, schedule, splits, stale = EARLY_CASES[name]
    judge(case, *emulate(case, schedule, splits, tmp_path, stale=stale))


@pytest.mark.parametrize("name", cases(BALANCED, USUAL))
def test_splits_in_proportion_to_lengths(name, tmp_path):
    case, schedule, shares, stale = BALANCED[name]
    judge(case, *emulate(case, schedule, 0, tmp_path, shares=shares, stale=stale))


@pytest.mark.parametrize("name", cases(OWN, USUAL))
def test_each_sequence_has_new_tokens_of_its_own(name, tmp_path):
    case, schedule, splits, shares, own = OWN[name]
    q, y, lse, options = emulate(case, schedule, splits, tmp_path, shares=shares, own=own)
    absent = torch.arange(case.q_len) < case.q_len - torch.tensor(own)[:, None]
    expected, sums, _ = reference.decode(q, attention_cases.built(case), options, bounded=False)
    assert y[absent].isnan().all() and lse[absent].isnan().all()
    y[absent], lse[absent] = expected[absent].to(y.dtype), sums[absent].float()
    judge(case, q, y, lse, options)


@pytest.mark.slow
def test_decode_with_cp_async(tmp_path):
    case = Case("int4_channel64", "int4", lengths=(300, 63, 0), page=128)
    judge(case, *emulate(case, SMALL, 4, tmp_path, target="sm_80"))


def judge(case, q, y, lse, options):
    expected, sums, bound = reference.decode(q, attention_cases.built(case), options)
    error = (y.double() - expected).abs()
    worst = float((error / bound.clamp(min=1e-30)).nan_to_num(9e9).max())
    print(f"worst error {worst:.3f} of the bound, {float(error.max()):.2e}")
    assert bool((error <= bound).all()), (
        f"{int((~(error <= bound)).sum())} of {error.numel()}, {worst:.3g} times the bound"
    )
    off = torch.where(sums.isinf() & (lse == sums), 0.0, (lse.double() - sums).abs())
    assert bool((off <= reference.lse_error_bound(q, attention_cases.built(case), options)).all()), float(off.max())
