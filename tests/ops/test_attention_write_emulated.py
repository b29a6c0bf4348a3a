"""The generated append and pack kernels, run on the CPU from their CUDA text: every bit is what quantizer.py makes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from cuda_on_cpu import CpuKernel
from terrazzo.lowering import compile_request
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention import cache as caches
from terrazzo.ops.attention import write_program, writing
from terrazzo.ops.attention.device import PRIMITIVES

from tests.gpu import attention_cases

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
SHIMS = r"""
template <class T, class F> static T as(F x) { T r; memcpy(&r, &x, 4); return r; }
static unsigned __float_as_uint(float x) { return as<unsigned>(x); }
static float __fdiv_rn(float a, float b) { return a / b; }
static void tz_syncwarp() { __syncwarp(); }
static void *tz_row16(const void *p, int row, int pitch, int at) {
  return (uint16_t *)p + ((long long)row * pitch + at); }
template <int N> static void tz_store(void *p, const void *v) {
  if ((uintptr_t)p % (4 * N)) { fprintf(stderr, "misaligned store\n"); abort(); }
  memcpy(p, v, 4 * N);
}
static unsigned tz_xor_word(unsigned x, int mask) { return as<unsigned>(tz_xor_shuffle(as<float>(x), mask)); }
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
template <bool TRANS> static void ldmatrix(void *out, const void *p) {
  uint32_t in[4]; memcpy(in, p, 16);
  if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned ldmatrix\n"); abort(); }
  meet(in, 4, (uint32_t *)out, 4, [](Meeting &w) {
    for (int l = 0; l < 32; ++l) for (int j = 0; j < 4; ++j) {
      uint32_t r = 0;
      for (int e = 0; e < 2; ++e) {
        int row = TRANS ? l % 4 * 2 + e : l / 4, col = TRANS ? l / 4 : l % 4 * 2 + e;
        r |= (w.in[j * 8 + row][col / 2] >> 16 * (col % 2) & 0xFFFF) << 16 * e;
      }
      w.out[l][j] = r;
    }
  });
}
static void tz_ldmatrix4(void *out, const void *p) { ldmatrix<false>(out, p); }
static void tz_ldmatrix4_trans(void *out, const void *p) { ldmatrix<true>(out, p); }
"""


@dataclass(frozen=True)
class Case:
    """Sequences that hold `old` tokens each and get `new` more. residual -1: the format's own."""

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


def built(case: Case, lengths, x, room: int):
    """The cache that holds the first `lengths` tokens of x [2, B, H, T, D], with room for `room` of them."""
    pages = len(case.old) * (-(-room // case.page)) if case.page else 0
    static = [attention_cases.static(f, case.heads, case.head_dim) for f in (case.k, case.v)]
    return caches.pack_cache(
        x[0], x[1], case.k, case.v, lengths=torch.tensor(lengths), page_size=case.page,
        residual=None if case.residual < 0 else case.residual, k_static=static[0], v_static=static[1],
        permutation=torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed)) if pages else None,
    )  # fmt: skip


def values(case: Case, room: int) -> torch.Tensor:
    """Keys and values [2, B, H, room, D] with ranges of many sizes, equal values, zeros of both signs and outliers."""
    rng = torch.Generator().manual_seed(case.seed)
    x = torch.randn(2, len(case.old), case.heads, room, case.head_dim, generator=rng)
    x = x * torch.exp2(torch.randint(-12, 6, (*x.shape[:3], room, 1), generator=rng))
    x[:, :, 0, ::7] = 0.375
    x[:, :, 0, 1::7] = x[:, :, 0, 1::7].relu() * -torch.sign(x[:, :, 1, 1::7])
    x[..., 2::9, 3] = 6e4
    return x.to(getattr(torch, case.dtype))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(attention_cases, "DEVICE", "cpu")


def emulate(case: Case, folder, target: str = "sm_90a", times: int = 1) -> None:
    lengths = tuple(a + b for a, b in zip(case.old, case.new))
    unit = case.page or max(128, case.residual)
    room = -(-max(lengths) // unit) * unit
    x = values(case, room)
    made, wanted = built(case, case.old, x, room), built(case, lengths, x, room)
    request = writing.write_request(made, case.dtype, Target.parse(target))
    source = (compile_request(request) / "kernel.cu").read_text()
    warps = write_program.chunk_warps(made.residual_tokens)
    kernel = CpuKernel(source, [SHIMS, PRIMITIVES["codes"].source], warps * 32, folder)
    made.lengths.copy_(wanted.lengths)
    rows = [
        torch.cat([part[b, :, old : old + new].transpose(0, 1) for b, (old, new) in enumerate(zip(case.old, case.new))])
        for part in x
    ]
    if case.pitch:  # rows with gaps, as slices of a fused projection have
        rows = [torch.nn.functional.pad(r.flatten(1), (0, case.pitch))[:, : r[0].numel()].view(r.shape) for r in rows]
    zero, table = torch.zeros(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    static = [torch.zeros(1, 1) if s is None else s.contiguous() for s in (made.k_static, made.v_static)]
    residual = zero if made.residual is None else made.residual
    pages = table if made.block_table is None else made.block_table
    cu = torch.tensor([0, *torch.tensor(case.new).cumsum(0).tolist()], dtype=torch.int32)
    for _ in range(times):
        for first, blocks in writing.launches(max(case.new), warps * 16, made.residual_tokens):
            kernel(
                (blocks, case.heads, len(case.old)), K=rows[0], V=rows[1], CU=cu, LEN=made.lengths, KV=made.pages,
                TABLE=pages, RES=residual, SLOT=torch.arange(len(case.old), dtype=torch.int32), SK=static[0],
                SV=static[1], k_token=rows[0].stride(0), k_head=case.head_dim, v_token=rows[1].stride(0),
                v_head=case.head_dim, first=first, blocks=blocks, hk=case.heads, page_words=made.pages.shape[2],
                most=pages.shape[1], rh=residual.shape[1], res_words=residual.shape[2], skd=static[0].shape[1],
                svd=static[1].shape[1], b=len(case.old), b1=len(case.old) + 1,
            )  # fmt: skip
    assert torch.equal(made.pages, wanted.pages), describe(made, wanted)
    for b in range(len(case.old)):
        for h in range(case.heads):
            for mine, theirs in zip(made.dequantize(b, h), wanted.dequantize(b, h)):
                assert torch.equal(mine.view(torch.int64), theirs.view(torch.int64)), (b, h)


def describe(made, wanted) -> str:
    wrong = (made.pages != wanted.pages).nonzero()
    return f"{len(wrong)} of {made.pages.numel()} words differ, first {wrong[:4].tolist()}; {made.layout}"


CASES = {
    "int4": Case(),
    "int8 pages": Case("int8", "int4", page=32, pitch=64),
    "int2": Case("int2", "int2", head_dim=64),
    "float16": Case("float16", "float16", page=16),
    "bfloat16": Case("bfloat16", "bfloat16", dtype="bfloat16"),
    "bfloat16 rows": Case("int4", "int8", dtype="bfloat16", head_dim=256),
    "bfloat16 from float16": Case("bfloat16", "int4", head_dim=64),
    "static": Case("int8_static", "fp8"),
    "fp8": Case("fp8", "int8_static", head_dim=64, dtype="bfloat16"),
    "residual": Case("int4", "int8", residual=64, old=(0, 63, 60, 130), new=(8, 1, 8, 8), page=64),
    "residual bfloat16": Case(residual=32, old=(3, 31), new=(100, 2), dtype="bfloat16"),
    "channel": Case("int4_channel64", "int4", old=(63, 0, 60, 127, 16), new=(1, 64, 8, 3, 5), page=64),
    "channel prefill": Case("int4_channel32", "int2", old=(0, 17), new=(150, 99), head_dim=64),
    "channel 128": Case("int2_channel128", "int2", old=(120, 0), new=(8, 300)),
    "channel 256": Case("int4_channel32", "int4", head_dim=256, old=(30,), new=(70,), dtype="bfloat16"),
}
USUAL = ("int4", "channel", "bfloat16 rows")
ALL = "TERRAZZO_EMULATE_ALL"


@pytest.mark.parametrize("name", CASES)
def test_new_tokens_are_stored_as_the_quantizer_stores_them(name, tmp_path):
    if name not in USUAL and not os.environ.get(ALL):
        pytest.skip(f"10 s each: set {ALL}=1")
    emulate(CASES[name], tmp_path)


def test_a_repeated_append_writes_the_same_bits(tmp_path):
    """Also where the new tokens complete a block and begin the next one."""
    case = replace(CASES["channel"], old=(60, 63, 120), new=(8, 2, 8), heads=2)
    emulate(case, tmp_path, target="sm_80", times=2)
