"""The W4A16 programs on `cuda_on_cpu`: 16-bit values as C++ types, converters as C++ text, and launches."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import torch
from cuda_on_cpu import RESIDENT, VOTES, CpuKernel, cuda_text
from terrazzo.layouts.converters import CONVERTERS, get_converter
from terrazzo.lowering.request import KernelRequest
from terrazzo.ops.linear import multistage, small_batch, stream_k
from terrazzo.ops.linear.sizes import shapeless
from terrazzo.ops.tiles.cuda.experts import EXPERT_SEARCH, EXPERT_TABLE
from terrazzo.ops.tiles.cuda.tiles import RAGGED
from terrazzo.ops.weight_only.integers import PackedWeight
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.multistage import launch_sizes
from terrazzo.schedules.problem import Gemm
from test_w4a8_emulated import EXTRA
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import translated

from tests.gpu.oracles import Spec

SHIMS = r"""
struct float4 { float x, y, z, w; }; struct uint2 { unsigned x, y; }; struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <bool BF16> struct Sixteen {
  uint16_t bits;
  Sixteen() = default;
  explicit Sixteen(float v) : bits(narrow<BF16>(v)) {}
  operator float() const { return widen<BF16>(bits); }
};
typedef Sixteen<false> f16; typedef Sixteen<true> bf16;
template <bool BF16> static unsigned both(Sixteen<BF16> a, Sixteen<BF16> b) { return a.bits | (unsigned)b.bits << 16; }
static unsigned __pack_half2(f16 a, f16 b) { return both(a, b); }
static unsigned __pack_nv_bfloat162(bf16 a, bf16 b) { return both(a, b); }
template <bool BF16> static uint16_t round_once(double exact) {
  if (!BF16) { _Float16 h = (_Float16)exact; uint16_t v; memcpy(&v, &h, 2); return v; }
  float f = (float)exact;
  if (f != f || f == INFINITY || f == -INFINITY || f == exact) return narrow<true>(f);
  uint32_t u; memcpy(&u, &f, 4);  // to odd, so that the second rounding sees what the first one lost
  if (fabs((double)f) > fabs(exact)) --u;
  u |= 1; memcpy(&f, &u, 4);
  return narrow<true>(f);
}
template <bool BF16> static unsigned fma2(unsigned a, unsigned b, unsigned c) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16)
    r |= (unsigned)round_once<BF16>((double)widen<BF16>(a >> e) * widen<BF16>(b >> e) + widen<BF16>(c >> e)) << e;
  return r;
}
static void tz_lds64(void *out, const void *p) { memcpy(out, p, 8); }
static unsigned half_twice(unsigned a, int half) { return (a >> 16 * half & 0xffff) * 0x10001u; }
static void tz_prefetch_line(const void *) {}
static unsigned tz_lds16_at(const void *p, int i) { return ((const uint16_t *)p)[i]; }
static unsigned permuted(unsigned a, unsigned b, unsigned s) {
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = __byte_perm(a, b, s >> 4 * i & 7) & 255;
    r |= (s >> 4 * i & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return r;
}
static unsigned sub2(unsigned a, unsigned b) { return fma2<false>(b, 0xbc00bc00u, a); }
static unsigned mul2(unsigned a, unsigned b) { return fma2<false>(a, b, 0x80008000u); }
static void tz_addcg4(void *r, const void *p) { for (int i = 0; i < 4; ++i) ((float *)r)[i] += ((const float *)p)[i]; }
"""
TILES = r"""
template <int ROWS> static void tma_halves(const TensorMap *map, Barrier &bar, void *to, int col, int row) {
  tma_tile<ROWS>(map, bar, to, 2 * col, row);
}
"""


def on_cpu(name: str) -> str:
    """The text of a converter with its inline PTX as C++."""
    register, text = r'"r"\(([^)]*)\)', get_converter(name).device_source
    lop3 = rf'asm\("lop3[^"]*, 0xea;" : "=r"\(([^)]*)\) : {register}, "n"\(([^)]*)\), {register}\);'
    text = re.sub(lop3, r"\1 = (\2) & \3 | \4;", text)
    text = re.sub(lop3.replace("0xea", "0x6a"), r"\1 = (\2) & \3 ^ \4;", text)
    two = rf'asm\("(sub|mul)\.rn\.f16x2[^"]*" : "=r"\(([^)]*)\) : {register}, {register}\);'
    text = re.sub(two, r"\2 = \g<1>2(\3, \4);", text)
    permute = r'asm\("prmt[^"]*" : "=r"\((\w+)\) : "r"\((\w+)\), "r"\((\w+)\), "r"\((\w+)\)\);'
    text = re.sub(permute, r"\1 = permuted(\2, \3, \4);", text)
    three = rf'asm\("fma\.rn\.(b?)f16x2[^"]*" : "=r"\(([^)]*)\) : {register}, {register}, {register}\);'
    text = re.sub(three, lambda at: f"{at[2]} = fma2<{'true' if at[1] else 'false'}>({at[3]}, {at[4]}, {at[5]});", text)
    given = f"{register}, {register}, {register}"
    half = rf'asm\("{{.*{{([lh]),[lh]}}; fma\.rn\.(b?)f16x2[^"]*" : "=r"\(([^)]*)\) : {given}\);'

    def halved(at: re.Match) -> str:
        kind = "true" if at[2] else "false"
        return f"{at[3]} = fma2<{kind}>({at[4]}, half_twice({at[5]}, {int(at[1] == 'h')}), {at[6]});"

    text = re.sub(half, halved, text)
    assert "asm" not in text, text
    return text


PATIENCE = "int patience = 200;"
"""How often a warp looks whether the CTAs that part a tile with it have come: until then a few CTAs compute theirs."""
MOST_THREADS = 8000  # at once: ThreadSanitizer knows 8128
GUARD = 8  # rows in front of y and behind it that nobody may write


def whole_words(k: int) -> int:
    """Columns of x whose rows are whole 16 bytes, as TMA wants them."""
    return -(-k // 8) * 8


class Program:
    """A program of ops/w4a16 for weights of a Spec, compiled for the CPU; each call is one launch that returns y.

    Args:
        schedule: of schedules.stream_k, small_batch or multistage.
        experts: of the grouped program, else 0. weight: name of its format.
        generic: a kernel of no shape, or of small_batch of no n; `spec` of another one may take its place.
    """

    def __init__(
        self, program, schedule, spec: Spec, numerics: str, folder: Path, *, target="sm_90a", experts=0, weight="u4",
        generic=False,
    ):  # fmt: skip
        self.schedule, self.spec, self.experts, self.generic = schedule, spec, experts, generic
        self.dtype = getattr(torch, spec.dtype)
        self.k = spec.k if program is multistage else whole_words(spec.k)
        params = dict(
            n=spec.n, k=self.k, group=0 if spec.group in (-1, spec.k) else spec.group, symmetric=spec.symmetric,
            scale_dtype=spec.scale_dtype, dtype=spec.dtype, bias=spec.bias, numerics=numerics, weight=weight,
            **schedule.params(),
        )  # fmt: skip
        name = program.__name__.rpartition(".")[2]
        if experts:
            name, params["experts"] = "grouped", experts
        configs = program.PASS_CONFIGS
        if generic:
            params = small_batch.of_any_rows(params) if program is small_batch else shapeless(params)
        request = KernelRequest(f"w4a16.{name}", f"{program.__name__}:build", tuple(params.items()), target, configs)
        source = cuda_text(request)
        extra, once = re.subn(r"int patience = \d+;", PATIENCE, EXTRA)
        assert once == 1
        shims = [extra, SHIMS]
        if target == "sm_90a":
            shims = [WGMMA, extra.replace("typedef unsigned char uchar;", ""), SHIMS, TILES]
        if program is stream_k:
            source = translated(source, schedule.block_tokens).replace("tma_tile<", "tma_halves<")
            source = re.sub(r"\bgrid\b", "ctas", source)
        if experts:
            shims += [VOTES, EXPERT_SEARCH if program is multistage else EXPERT_TABLE]
        if program is multistage:
            shims.append(RAGGED)
        source = re.sub(r"\bbfloat16_t\b", "bf16", re.sub(r"\bhalf_t\b", "f16", source))
        shims += [on_cpu(name) for name in CONVERTERS if f"tz_{name}(" in source]
        threads = schedule.warpgroups * 128 + 128 if program is stream_k else schedule.warps * 32
        cluster = schedule.cluster if program is stream_k else 1
        if getattr(schedule, "joined", False):
            cluster = PAIR
        self.kernel = CpuKernel(source, shims, threads, folder, cluster)
        self.kernel.give(request)

    def of(self, spec: Spec, **changes) -> Program:
        """The same generic kernel for another weight; `changes` of the schedule come with the launch."""
        other = copy.copy(self)
        other.spec, other.schedule, other.k = spec, replace(self.schedule, **changes), whole_words(spec.k)
        return other

    def _launch(self, grid, x: torch.Tensor, packed: PackedWeight, workspace, semaphores, **more) -> torch.Tensor:
        n, bias = self.spec.n, packed.bias
        x = torch.nn.functional.pad(x, (0, self.k - x.shape[1])).contiguous()
        y = torch.full((len(x) + 2 * GUARD, n), float("nan"), dtype=self.dtype)
        sem = torch.zeros(semaphores, dtype=torch.int32)
        tensors = dict(
            X=x, X_desc=torch.tensor([x.data_ptr(), len(x), 2 * self.k]), W=packed.words, P=packed.params,
            B=torch.zeros(1, dtype=self.dtype) if bias is None else bias, Y=y[GUARD:], SEM=sem,
            WS=torch.full(workspace, float("nan")),
        )  # fmt: skip
        if self.generic:
            more |= dict(n=n, k=self.k, words=len(packed.words), blocks=packed.words.shape[1], bias=len(tensors["B"]))
        self.kernel(grid, **tensors, **more, m=len(x))
        assert not sem.any(), "a semaphore is not zero"
        assert y[:GUARD].isnan().all() and y[-GUARD:].isnan().all(), "rows beside y were written"
        return y[GUARD:-GUARD]

    def stream_k(self, x: torch.Tensor, packed: PackedWeight, ctas: int, last: int | torch.Tensor, resident=RESIDENT):
        """`last`: how many tiles are shared, or with experts their int32 offsets [E + 1]. `resident`: CTAs at once."""
        s = self.schedule
        self.kernel.resident = max(min(resident, MOST_THREADS // self.kernel.threads), s.cluster)
        space = (ctas, s.cta_blocks, s.block_tokens // 8, 128, 4)
        return self._launch((ctas, 1, 1), x, packed, space, (ctas, s.flags), ctas=ctas, sk=last, parts=last)

    def small_batch(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        s = self.schedule
        return self._launch((s.kc, s.nc, 1), x, packed, *s.workspace(packed.words.shape[1] * 64), nc=s.nc)

    def multistage(self, x: torch.Tensor, packed: PackedWeight, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """`offsets`: of experts, int32 [E + 1]."""
        s, problem = self.schedule, Gemm(self.spec.n, self.k, 1, 64, experts=self.experts)
        space, flags = launch_sizes(s, problem, len(x))
        return self._launch(
            (s.tiles(problem, len(x)), s.kc, 1), x, packed, space, flags, tiles=flags[0], offsets=offsets
        )
