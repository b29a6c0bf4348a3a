"""Keys that are turned on their way into the cache, run on the CPU from the CUDA text: the bits of both operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import EARLY, LDMATRIX, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.report import KernelReport
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import rope_writing, write_program, writing
from terrazzo.ops.rope import reference
from terrazzo.ops.rope.op import Call
from terrazzo.ops.tiles import heads as heads_in_lanes
from terrazzo.ops.tiles.cuda.attention import PRIMITIVES
from terrazzo.ops.tiles.cuda.rows import HEADS, ROW_OUTPUTS
from terrazzo.ops.tiles.cuda.writing import CLIPPING
from test_attention_write_emulated import SHIMS

from tests.gpu import attention_write_cases
from tests.gpu.attention_write_cases import Case

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
MORE_SHIMS = r"""
struct uint4 { unsigned x, y, z, w; }; struct float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static void tz_stream16(void *to, const void *p) { memcpy(to, p, 16); }
template <bool BF16, int> static void tz_row_values(float *v, const void *x_, const void *) {
  const unsigned *x = (const unsigned *)x_;
  for (int i = 0; i < 8; ++i) v[i] = widen<BF16>(x[i / 2] >> 16 * (i & 1));
}
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static float __shfl_xor_sync(unsigned, float x, int mask) { return tz_xor_shuffle(x, mask); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
"""
CASES = {  # case of storing, query heads of a kv head, how heads are turned
    "int4": (Case(old=(0, 5, 61), new=(1, 1, 1), page=32), 2, {}),
    "some tokens": (Case("int8", "int4", head_dim=64, old=(3, 14), new=(3, 3)), 1, dict(layout="interleaved")),
    "bfloat16, qk-norm": (
        Case("int4_hadamard", "int4", dtype="bfloat16", old=(30,), new=(1,), page=32, residual=0), 3,
        dict(norm="llama"),
    ),
    "residual": (Case("int4_channel64", "int4", old=(63, 20), new=(1, 1), page=64), 4, dict(rotary_dim=64)),
}  # fmt: skip
QUICK = ("int4",)


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_new_tokens_are_turned_and_stored(name, tmp_path):
    case, group, changes = CASES[name]
    dim, kv, new = case.head_dim, case.heads, case.new[0]
    kind = dict(rotary_dim=dim, layout="neox", norm="none", numerics="model") | changes
    heads, count, dtype = group * kv, len(case.old) * new, getattr(torch, case.dtype)
    x, rng = attention_write_cases.values(replace(case, seed=3)).clamp(-8, 8), torch.Generator().manual_seed(1)
    fresh = [slice(old, old + new) for old in case.old]
    k, v = (torch.cat([part[b, :, rows].transpose(0, 1) for b, rows in enumerate(fresh)]) for part in x)
    q = torch.randn(count, heads, dim, generator=rng).to(dtype)
    qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1).contiguous()
    angles = torch.rand(count, kind["rotary_dim"] // 2, generator=rng) * 6
    cos, sin = angles.cos(), angles.sin()
    weights = [(torch.rand(dim, generator=rng) + 0.5).to(dtype) for _ in range(2)]
    given = weights if kind["norm"] != "none" else [None, None]
    facts = (heads, kv, dim, kind["rotary_dim"], kind["layout"], kind["norm"], 1e-5, kind["numerics"])
    q_turned, k_turned = reference.apply_rope(Call(qkv, cos, sin, None, *given, *facts))
    turned = x.clone()
    for b, rows in enumerate(fresh):
        turned[0, b, :, rows] = k_turned[b * new : (b + 1) * new].transpose(0, 1)
    made = attention_write_cases.built(case, case.old, x)
    wanted = attention_write_cases.built(case, case.lengths, turned)
    made.lengths.copy_(wanted.lengths)
    rope = dict(rotary_dim=kind["rotary_dim"], rope=kind["layout"], norm=kind["norm"], numerics=kind["numerics"])
    request = rope_writing.request(
        made.layout, case.dtype, made.page_size, made.residual_tokens, **rope, target=Target.parse("sm_90a")
    )
    warps = write_program.chunk_warps(made.residual_tokens)
    sources = [EARLY, LDMATRIX, SHIMS, PRIMITIVES["codes"].source, CLIPPING.source, MORE_SHIMS]
    sources += [ROW_OUTPUTS, HEADS]
    kernel = CpuKernel(cuda_text(request), sources, warps * 32, tmp_path)
    zero, table = torch.zeros(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    residual = zero if made.residual is None else made.residual
    pages = table if made.block_table is None else made.block_table
    starts = torch.arange(len(case.old) + 1, dtype=torch.int32) * new
    kernel.allocation(residual)
    for late in (made.lengths, qkv):  # until the kernel waits, it sees what the one ahead has not written yet
        kernel.late(late, late * 3 // 2 if late.dtype == torch.int32 else torch.zeros_like(late))
    out = torch.full((count * heads + 1, dim), float("nan"), dtype=dtype)
    per, touched = write_program.shares(kv * len(case.old), new, warps, 132)
    flat, pitch = qkv.view(-1), qkv.shape[1]
    for index, (first, blocks) in enumerate(writing.launches(new, warps * 16, made.residual_tokens)):
        groups, rows = -(-kv * len(case.old) // per), 0 if index else count * heads
        units = warps * (32 // heads_in_lanes.lanes_of(dim))
        kernel(
            (blocks * groups + -(-rows // units), 1, 1), X=flat, COS=cos, SIN=sin, QW=weights[0], KW=weights[1], Q=out,
            K=flat[heads * dim :], V=flat[(heads + kv) * dim :], CU=starts, LEN=made.lengths, KV=made.pages,
            TABLE=pages, RES=residual, SLOT=torch.arange(len(case.old), dtype=torch.int32), SK=torch.zeros(1, 1),
            SV=torch.zeros(1, 1), k_token=pitch, k_head=dim, v_token=pitch, v_head=dim, first=first, blocks=blocks,
            groups=groups, per=per, touched=touched, q_token=pitch, heads=heads, q_rows=rows, eps=1e-5, hk=kv,
            page_words=made.pages.shape[2], most=pages.shape[1], rh=residual.shape[1], res_words=residual.shape[2],
            skd=1, svd=1, b=len(case.old), b1=len(case.old) + 1, slots=residual.shape[0], width=cos.shape[1],
        )  # fmt: skip
    assert bool(out[-1].isnan().all())
    off = float((out[:-1].view(count, heads, dim) != q_turned).float().mean())
    assert off <= (0 if kind["norm"] == "none" else 1e-3)
    if kind["norm"] == "none":
        attention_write_cases.compare(made, wanted)
    else:  # the last bit of a mean may move a code
        assert float((made.pages != wanted.pages).float().mean()) <= 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["fp8", "int8_static"])
def test_machine_code_of_static_formats_spills_nothing(fmt):
    kind = dict(rotary_dim=128, rope="neox", norm="none", numerics="fused", target=Target.parse("sm_90a"))
    request = rope_writing.request(CacheLayout(fmt, fmt, 128), "float16", 128, 0, **kind)
    report = KernelReport.read(compile_request(request) / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
