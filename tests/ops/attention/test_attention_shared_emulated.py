"""Decode through shared memory and wgmma, run on the CPU from its CUDA text, against float64 inside the error bound."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from terrazzo.ablation import decode_shared, decode_shared_program
from terrazzo.lowering import compile_request
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention import op, reference
from terrazzo.ops.attention.device import PRIMITIVES
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import translated

from tests.gpu import attention_cases
from tests.gpu.attention_cases import Case

pytestmark = [
    pytest.mark.slow,  # of an ablation
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
SHIMS = r"""
struct real_half {
  uint16_t bits;
  real_half() = default;
  real_half(float f) : bits(narrow<false>(f)) {}
};
#define half_t real_half
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct half2 { uint16_t x, y; };
struct uint2 { uint x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static half2 __float22half2_rn(float2 v) { return {narrow<false>(v.x), narrow<false>(v.y)}; }
namespace tl {
struct MaxOp { static float of(float a, float b) { return max(a, b); } };
struct SumOp { static float of(float a, float b) { return a + b; } };
template <int> struct NamedBarrier {};
template <class Op, int N, int SCALE, int, class> struct AllReduce {
  static float run(float x) {
    for (int d = N / 2; d >= SCALE; d /= 2) x = Op::of(x, tz_xor_shuffle(x, d));
    return x;
  }
};
template <> inline bool tl_shuffle_elect<0>() { return threadIdx.x == 0; }
}
static unsigned tz_hfma2(unsigned a, unsigned b, unsigned c) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16)
    r |= (unsigned)narrow<false>(fmaf(widen<false>(a >> e), widen<false>(b >> e), widen<false>(c >> e))) << e;
  return r;
}
static void tz_u4_f16_magic(unsigned w, unsigned *out) {
  for (int o = 0; o < 4; ++o)
    out[o] = narrow<false>(w >> 4 * o & 15) | (unsigned)narrow<false>(w >> 4 * (o + 4) & 15) << 16;
}
"""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(attention_cases, "DEVICE", "cpu")
    attention_cases._built.cache_clear()
    yield
    attention_cases._built.cache_clear()


@pytest.mark.parametrize("splits", [2])
def test_decode_through_shared_memory(splits, tmp_path):
    case = Case(group=4, q_len=3, lengths=(200, 0, 2, 65), kv_heads=2)
    made = attention_cases.built(case)
    batch, heads = len(case.lengths), case.kv_heads * case.group
    source = cuda_text(decode_shared.request(Target.parse("sm_90a")))
    plain = PRIMITIVES["swizzled"].source  # host C++ as it is
    kernel = CpuKernel(translated(source, 0), [WGMMA, SHIMS, plain], decode_shared_program.THREADS, tmp_path)
    q = torch.randn(batch, case.q_len, heads, 128, generator=torch.Generator().manual_seed(1)).half()
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"))
    semaphores = torch.zeros(batch * case.kv_heads, dtype=torch.int32)
    nothing = torch.full((batch, case.kv_heads, splits, 16, 128), float("nan"))
    kernel(
        (splits, case.kv_heads, batch), Q=q, KV=made.pages, LEN=made.lengths, OP=nothing, LP=nothing[..., 0].clone(),
        SEM=semaphores, O=out, LSE=lse, scale=op.LOG2E / math.sqrt(128), b=batch, q_len=case.q_len, hq=heads,
        hk=case.kv_heads, page_words=made.pages.shape[2], s=splits,
    )  # fmt: skip
    expected, sums, _ = reference.decode(q, made, reference.Options())
    assert not semaphores.any()
    # keys and values are rounded to f16 once more than in `decode`
    assert float((out.double() - expected).abs().max()) < 4e-3 * float(expected.abs().max())
    off = torch.where(sums.isinf() & (lse == sums), 0.0, (lse.double() - sums).abs())
    assert float(off.max()) < 1e-2


def test_what_the_schedule_does_not_have_is_refused():
    for name, arguments in (("target", ("sm_80",)), ("block", ("sm_90a", 32)), ("stages", ("sm_90a", 64, 1))):
        with pytest.raises(ArgumentError, match=name):
            decode_shared.request(Target.parse(arguments[0]), *arguments[1:])


def test_its_operands_come_from_shared_memory():
    report = (compile_request(decode_shared.request(Target.parse("sm_90a"))) / "report.json").read_text()
    assert "HGMMA" in report and '"spill_stores": 0' in report
