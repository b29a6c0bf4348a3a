"""The generated append and pack kernels, run on the CPU from their CUDA text: every bit is what quantizer.py makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import EARLY, LDMATRIX, CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention.writing import ring_write_program, write_program, writing
from terrazzo.ops.tiles.cuda.attention import PRIMITIVES
from terrazzo.ops.tiles.cuda.writing import CLIPPING

from tests.gpu import attention_write_cases
from tests.gpu.attention_write_cases import CASES, Case

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
SHIMS = r"""
template <class T, class F> static T as(F x) { T r; memcpy(&r, &x, 4); return r; }
static unsigned __float_as_uint(float x) { return as<unsigned>(x); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdividef(float a, float b) { return a / b; }
static void *tz_row16(const void *p, int row, int pitch, int at) {
  return (uint16_t *)p + ((long long)row * pitch + at); }
template <int N> static void tz_store(void *p, const void *v) {
  if ((uintptr_t)p % (4 * N)) { fprintf(stderr, "misaligned store\n"); abort(); }
  memcpy(p, v, 4 * N);
}
static unsigned tz_xor_word(unsigned x, int mask) { return as<unsigned>(tz_xor_shuffle(as<float>(x), mask)); }
template <class F> static unsigned halves(unsigned a, unsigned b, F f) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16) r |= (unsigned)narrow<false>(f(widen<false>(a >> e), widen<false>(b >> e))) << e;
  return r;
}
static unsigned tz_hadd2(unsigned a, unsigned b) { return halves(a, b, [](float x, float y) { return x + y; }); }
static unsigned tz_hsub2(unsigned a, unsigned b) { return halves(a, b, [](float x, float y) { return x - y; }); }
static unsigned tz_excess(unsigned a, unsigned b) {
  return halves(a, b, [](float x, float y) { return x > y ? x - y : 0; }); }
template <bool BF16> static unsigned tz_min2(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16) r |= (widen<BF16>(b >> e) < widen<BF16>(a >> e) ? b : a) & 0xFFFFu << e;
  return r;
}
template <bool BF16> static unsigned tz_max2(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16) r |= (widen<BF16>(b >> e) > widen<BF16>(a >> e) ? b : a) & 0xFFFFu << e;
  return r;
}
"""


def emulate(case: Case, folder, target: str = "sm_90a", times: int = 1, sms: int = 132) -> None:
    """All launches of a case on the CPU; few `sms` give CTAs more pairs."""
    made, wanted, rows, starts = attention_write_cases.prepare(case)
    request = writing.write_request(made, case.dtype, Target.parse(target))
    source = cuda_text(request)
    ring = writing.slides(made.layout, made.residual_tokens)
    warps = ring_write_program.WARPS if ring else write_program.chunk_warps(made.residual_tokens)
    kernel = CpuKernel(
        source, [EARLY, LDMATRIX, SHIMS, PRIMITIVES["codes"].source, CLIPPING.source], warps * 32, folder
    )
    zero, table = torch.zeros(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    static = [torch.zeros(1, 1) if s is None else s.contiguous() for s in (made.k_static, made.v_static)]
    residual = zero if made.residual is None else made.residual
    kernel.allocation(residual)
    if request.target.supports("pdl"):  # until the kernel waits, it sees what the one ahead has not written yet
        for x in (made.lengths, starts, *(r for r in rows if r.is_contiguous())):
            kernel.late(x, x * 3 // 2 if x.dtype == torch.int32 else torch.zeros_like(x))
    pages = table if made.block_table is None else made.block_table
    names = ("phase" if ring else "first", "blocks", "groups", "per", "tiles" if ring else "touched")
    for _ in range(times):
        for scalars in writing.grids(made.layout, made.residual_tokens, case.heads * len(case.old), max(case.new), sms):
            launched = dict(zip(names, scalars))
            kernel(
                (launched["blocks"] * launched["groups"], 1, 1), K=rows[0], V=rows[1], CU=starts, LEN=made.lengths,
                KV=made.pages, TABLE=pages, RES=residual, SLOT=torch.arange(len(case.old), dtype=torch.int32),
                SK=static[0], SV=static[1], k_token=rows[0].stride(0), k_head=case.head_dim, v_token=rows[1].stride(0),
                v_head=case.head_dim, **launched, hk=case.heads, page_words=made.pages.shape[2],
                most=pages.shape[1], rh=residual.shape[1], res_words=residual.shape[2], skd=static[0].shape[1],
                svd=static[1].shape[1], b=len(case.old), b1=len(case.old) + 1,
                slots=residual.shape[0],
            )  # fmt: skip
    attention_write_cases.compare(made, wanted)


USUAL = ("rotated", "ring, first tokens")
FEW = ("channel", "residual", "channel 128", "one token")  # on one SM: several pairs for a CTA


@pytest.mark.parametrize("name", cases([name for name in CASES if "many" not in name], USUAL))  # those take a GPU
def test_new_tokens_are_stored_as_the_quantizer_stores_them(name, tmp_path):
    emulate(CASES[name], tmp_path, sms=1 if name in FEW else 132)


@pytest.mark.slow
def test_a_repeated_append_writes_the_same_bits(tmp_path):
    """Also where the new tokens complete a block and begin the next one."""
    case = replace(CASES["channel"], old=(60, 63, 120), new=(8, 2, 8), heads=2)
    emulate(case, tmp_path, target="sm_80", times=2)


@pytest.mark.slow
def test_a_repeated_append_to_a_ring_writes_the_same_bits(tmp_path):
    """Also where a tile is packed, and the next one begun."""
    case = Case("int4", "int4", residual=32, old=(31, 30, 120, 15), new=(16, 3, 16, 2), sink_tokens=16, head_dim=64)
    emulate(case, tmp_path, target="sm_80", times=2)
