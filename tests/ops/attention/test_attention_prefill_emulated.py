"""The generated prefill kernels, run on the CPU from their CUDA text, against float64 inside the error bound."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from cuda_on_cpu import CpuKernel, cuda_text
from emulated_cases import cases
from terrazzo.layouts.converters import get_converter
from terrazzo.lowering import compile_request
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.attention.cache.launch import LOG2E
from terrazzo.ops.attention.cache.quantizer import quantize, rotate
from terrazzo.ops.attention.prefilling import new_tokens_program, prefill_merge
from terrazzo.ops.attention.prefilling import prefill_op as op
from terrazzo.ops.attention.prefilling.prefill_stages import plain_layout
from wgmma_on_cpu import SHIMS as WGMMA
from wgmma_on_cpu import STMATRIX, TURNS, translated

from tests.gpu import attention_cases, prefill_cases
from tests.gpu.prefill_cases import Case

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


def new_pages(case: Case, given) -> torch.Tensor:
    """What `store` leaves of k and v in pages of 64 tokens; other storage is poisoned."""
    cache = op.fresh_cache(given.cache, given.cu_seqlens, len(given.q), given.most_new)
    cache.pages.fill_(-1)
    layout = plain_layout(given.cache.layout)
    for b, new in enumerate(case.new):
        first = int(given.cu_seqlens[b])
        for i in range(-(-new // 64)):
            rows = slice(first + 64 * i, first + min(64 * (i + 1), new))
            parts = [
                torch.nn.functional.pad(x[rows].float(), (0, 0, 0, 0, 0, 64 - (rows.stop - rows.start)))
                for x in (given.k, given.v)
            ]
            packed = layout.pack(*(
                quantize(x.transpose(0, 1), f) for x, f in zip(parts, (layout.k_format, layout.v_format))
            ))  # fmt: skip
            cache.pages[int(cache.block_table[b, i])] = packed.reshape(case.kv_heads, -1)
    return cache.pages


def images(case: Case, given) -> torch.Tensor:
    """What the kernel that lays out new tokens leaves of k and v; other storage is poisoned."""
    layout = plain_layout(given.cache.layout)
    pages = op.fresh_pages(given.cache, len(given.q)).fill_(-1)
    for b, new in enumerate(case.new):
        first = int(given.cu_seqlens[b])
        for i in range(-(-new // 64)):
            rows = slice(first + 64 * i, first + min(64 * (i + 1), new))
            for part, (x, fmt) in enumerate(((given.k, layout.k), (given.v, layout.v))):
                dtype = getattr(torch, fmt.operand)
                x = rotate(x[rows]) if fmt.rotation else x[rows]
                x = x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
                x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 64 - len(x)))
                pieces = x.transpose(0, 1).reshape(case.kv_heads, 64, case.head_dim // 64, 8, 8).transpose(1, 2)
                swizzled = torch.arange(8) ^ (torch.arange(64) % 8)[:, None]  # piece c of row r lies at c ^ (r % 8)
                pieces = pieces.gather(3, swizzled[None, None, :, :, None].expand(pieces.shape)).contiguous()
                half = pages.shape[2] // 2
                at = first // 64 + b + i
                pages[at, :, part * half : (part + 1) * half] = pieces.view(torch.int32).reshape(case.kv_heads, half)
    return pages


def serialized(instructions: dict[str, int]) -> None:
    """ptxas gives each wgmma a fence of its own where it cannot overlap them; nothing else warns."""
    products = sum(n for name, n in instructions.items() if name.startswith("HGMMA"))
    if products:
        assert instructions["WARPGROUP.ARRIVE"] <= products // 4, instructions


def merge(request, folder, results, cu_seqlens, sinks, out, lse) -> None:
    """The sum of partial results, on the CPU."""
    folder.mkdir()
    kernel = CpuKernel(cuda_text(request), [SHIMS], prefill_merge.THREADS, folder)
    blocks = -(-out.numel() // 4 // prefill_merge.THREADS)
    tensors = {"OP": results[0], "LP": results[1], "CU": cu_seqlens, "SINK": sinks, "O": out, "LSE": lse}
    scalars = dict(parts=len(results[0]), n=len(out), hq=out.shape[1], b1=len(cu_seqlens), blocks=blocks)
    kernel((blocks, 1, 1), **tensors, **scalars)


def emulate(case: Case, folder, target: str = "sm_90a", parts: int = 1) -> float:
    """One launch on the CPU; the worst error as a share of its bound. parts: CTAs that share a tile's tokens."""
    given = prefill_cases.inputs(case)
    made, batch, heads = given.cache, len(case.new), case.kv_heads * case.group
    chosen = op.plan(
        case.layout, dtype=case.dtype, page=case.page, residual=made.residual_tokens, fresh=case.fresh,
        softcap=case.softcap > 0, sinks=case.sinks, target=Target.parse(target), schedule=case.chosen(),
        split=parts > 1,
    )  # fmt: skip
    made_in = compile_request(chosen.request)
    serialized(json.loads((made_in / "report.json").read_text()).get("instructions") or {})
    source = (made_in / "kernel.cu").read_text()
    names = [name for name in ALL_CONVERTERS if f"tz_{name}(" in source]
    params = dict(chosen.request.params)
    wgmma = not chosen.request.name.endswith("_mma")
    if wgmma:
        source = translated(source, 0)
    kernel = CpuKernel(
        source,
        [*([WGMMA, COPY, TURNS, STMATRIX] if wgmma else []), SHIMS, *map(on_cpu, names)],
        params["warps"] * 32 + 128 * wgmma,
        folder,
    )
    zero, table = torch.zeros(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    static = [torch.zeros(1, 1) if s is None else s.contiguous() for s in (made.k_static, made.v_static)]
    residual = zero if made.residual is None else made.residual
    new = (images if wgmma else new_pages)(case, given) if case.fresh else zero
    pages = table if made.block_table is None else made.block_table
    out, lse = torch.full_like(given.q, float("nan")), torch.full(given.q.shape[:2], float("nan"))
    results, sinks = (out, lse), given.options.sinks if case.sinks else torch.zeros(1)
    if parts > 1:
        results = tuple(torch.full((parts, *x.shape), float("nan")) for x in (out, lse))
    tiles = -(-given.most_new * case.group // chosen.rows) * parts
    tensors = {
        "Q": given.q, "KV": made.pages, "TABLE": pages, "LEN": made.lengths, "CU": given.cu_seqlens, "RES": residual,
        "SLOT": torch.arange(batch, dtype=torch.int32), "NEW": new, "SK": static[0], "SV": static[1],
        "SINK": sinks, "O": results[0], "LSE": results[1],
    }  # fmt: skip
    scalars = {
        "scale": LOG2E / math.sqrt(case.head_dim), "cap": case.softcap * LOG2E,
        "window": case.window, "tiles": tiles, "b": batch, "b1": batch + 1, "n": len(given.q), "hq": heads,
        "hk": case.kv_heads, "page_words": made.pages.shape[2], "most": pages.shape[1], "rh": residual.shape[1],
        "res_words": residual.shape[2], "nh": new.shape[1], "new_words": new.shape[2], "skd": static[0].shape[1],
        "svd": static[1].shape[1], "parts": parts,
    }  # fmt: skip
    kernel((case.kv_heads, tiles, batch), **tensors, **scalars)
    if parts > 1:
        merge(chosen.merge, folder / "merge", results, given.cu_seqlens, sinks, out, lse)
    return prefill_cases.judge(case, given, out, lse)


SHIMS = r"""
template <class F> static unsigned halves(unsigned a, unsigned b, F f) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16) r |= (unsigned)narrow<false>(f(widen<false>(a >> e), widen<false>(b >> e))) << e;
  return r;
}
static unsigned sub2(unsigned a, unsigned b) { return halves(a, b, [](float x, float y) { return x - y; }); }
static unsigned mul2(unsigned a, unsigned b) { return halves(a, b, [](float x, float y) { return x * y; }); }
static void *tz_at8(const void *p, int at) { return (char *)p + at; }
template <int N> static void tz_store(void *p, const void *v) { memcpy(p, v, 4 * N); }
static unsigned tz_hfma2(unsigned a, unsigned b, unsigned c) {
  unsigned r = 0;
  for (int e = 0; e < 32; e += 16)
    r |= (unsigned)narrow<false>((double)widen<false>(a >> e) * widen<false>(b >> e) + widen<false>(c >> e)) << e;
  return r;
}
"""
COPY = r"""
static void tz_copy16(void *d, const void *p) { memcpy(d, p, 16); }
static void tz_opaque(void *) {}
static void tz_ldmatrix4(void *out, const void *p) {
  if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned ldmatrix\n"); abort(); }
  uint32_t row[4]; memcpy(row, p, 16);
  meet(row, 4, (uint32_t *)out, 4, [](Meeting &w) {
    for (int l = 0; l < 32; ++l) for (int r = 0; r < 4; ++r) w.out[l][r] = w.in[r * 8 + l / 4][l % 4];
  });
}
"""


def on_cpu(converter: str) -> str:
    """The text of a converter with its inline PTX as C++."""
    text = get_converter(converter).device_source
    lop3 = r'asm\("lop3[^"]*, (0x[ea6]{2});" : "=r"\(([^)]*)\) : "r"\(([^)]*)\), "n"\(([^)]*)\), "r"\(([^)]*)\)\);'
    text = re.sub(lop3, lambda m: f"{m[2]} = ({m[3]}) & {m[4]} {'|' if m[1] == '0xea' else '^'} {m[5]};", text)
    pair = r'asm\("(sub|mul)\.rn\.f16x2[^"]*" : "=r"\(([^)]*)\) : "r"\(([^)]*)\), "r"\(([^)]*)\)\);'
    made = re.sub(pair, lambda m: f"{m[2]} = {m[1]}2({m[3]}, {m[4]});", text)
    assert "asm" not in made, made
    return made


ALL_CONVERTERS = (
    *("f16_f16", "bf16_bf16", "u8_f16_subnormal", "u4_f16_subnormal", "u2_f16_separable", "e4m3_f16_moved"),
    *("u8_f16", "u4_f16_magic", "u2_f16_magic", "e4m3_f16"),
)
MMA = ("mma", 2, 4, 2)
SHARED = ("shared", 8, 8, 2, 3)
RAGGED = dict(past=(150, 0, 37, 64), new=(40, 3, 0, 1))
CASES = {
    "int4": Case("int4", "int4", **RAGGED, schedule=MMA),
    "shared int4": Case("int4", "int4", **RAGGED, schedule=("shared", 8, 4, 3, 2)),
    "shared float16": Case("float16", "float16", **RAGGED, schedule=SHARED),
    "shared channel": Case("int4_channel128", "int2", past=(300, 100, 0), new=(30, 40, 9), schedule=SHARED),
    "shared static": Case("int8_static", "fp8", past=(100,), new=(70,), schedule=SHARED),
    "shared bfloat16": Case("bfloat16", "bfloat16", past=(100,), new=(70,), dtype="bfloat16", schedule=SHARED),
    "shared fresh": Case(
        "int4_channel64", "int4", past=(150, 0), new=(90, 20), fresh=True, window=70, sinks=True, schedule=SHARED
    ),
    "shared fresh bfloat16": Case(
        "int4", "int4", past=(0, 64, 70), new=(70, 130, 1), fresh=True, dtype="bfloat16", schedule=("shared", 8, 12, 4)
    ),
    "shared options": Case(
        "int4", "int2", head_dim=64, past=(150, 0), new=(40, 20), softcap=5.0, window=33, sinks=True, sharp=3.0,
        page=48, schedule=("shared", 8, 12, 4),
    ),
    "shared head_dim 256": Case("int8", "int4", head_dim=256, past=(100,), new=(20,), schedule=("shared", 8, 4, 2)),
    "float16": Case("float16", "float16", **RAGGED, schedule=MMA),
    "int8": Case("int8", "int8", **RAGGED, schedule=MMA),
    "int2 paged": Case("int2", "int2", **RAGGED, page=48, group=7, schedule=MMA),
    "channel": Case("int4_channel128", "int4", past=(300, 100, 0), new=(30, 40, 9), schedule=MMA),
    "channel paged": Case("int2_channel32", "int4", past=(100,), new=(70,), page=64, schedule=MMA),
    "fresh": Case("int4", "int8", past=(100, 0, 33), new=(70, 20, 1), fresh=True, schedule=MMA),
    "fresh channel": Case("int4_channel64", "int4", past=(100, 63), new=(70, 20), fresh=True, schedule=MMA),
    "fresh bfloat16": Case("int4", "int4", past=(100,), new=(70,), fresh=True, dtype="bfloat16", schedule=MMA),
    "bfloat16": Case("bfloat16", "bfloat16", past=(100,), new=(70,), dtype="bfloat16", schedule=MMA),
    "static": Case("int8_static", "int8_static", past=(100,), new=(70,), schedule=MMA),
    "fp8": Case("fp8", "fp8", past=(100,), new=(70,), schedule=MMA),
    "residual": Case("int4", "int4", residual=64, past=(150, 30), new=(40, 20), schedule=MMA),
    "options": Case(
        "int4", "int4", past=(150, 0), new=(40, 20), softcap=5.0, window=33, sinks=True, sharp=3.0, schedule=MMA
    ),
    "fresh options": Case(
        "int4_channel64", "int4", past=(150, 0), new=(90, 20), fresh=True, window=70, sinks=True, schedule=MMA
    ),
    "rotated": Case("int4_hadamard", "int2_hadamard", residual=0, past=(100, 0), new=(20, 3), fresh=True, schedule=MMA),
    "shared rotated": Case(
        "int4_hadamard", "int2_hadamard", residual=0, past=(100, 0), new=(40, 3), fresh=True, dtype="bfloat16",
        schedule=SHARED,
    ),
    "ring, first tokens": Case(
        "int4", "int4", residual=64, past=(150, 30), new=(40, 20), sink_tokens=16, head_dim=64, window=170,
        schedule=("mma", 4, 4, 3),
    ),
    "shared ring, first tokens": Case(
        "int4_hadamard", "int2_hadamard", residual=64, past=(150, 80), new=(40, 20), sink_tokens=16, head_dim=64,
        fresh=True, schedule=("shared", 8, 4, 3, 2),
    ),
    "shared rotated keys, residual block": Case(
        "int4_hadamard", "int4", past=(150, 30), new=(40, 20), residual=64, head_dim=64, schedule=("shared", 8, 4, 3, 2)
    ),
    "head_dim 64": Case("int4", "int2", head_dim=64, **RAGGED, schedule=("mma", 4, 4, 3)),
    "head_dim 256": Case("int8", "int4", head_dim=256, past=(100,), new=(20,), schedule=("mma", 1, 4, 2)),
}  # fmt: skip
USUAL = ("shared options",)


@pytest.mark.parametrize("name", cases(CASES, USUAL))
def test_prefill(name, tmp_path):
    print(f"worst error {emulate(CASES[name], tmp_path):.3f} of the bound")


SPLIT = {  # case, parts
    "parts that some rows do not have": (Case("int4", "int4", **RAGGED, schedule=MMA), 5),
    "shared, new tokens, ring, first tokens": (
        Case(
            "int4_hadamard", "int2_hadamard", residual=64, past=(150, 80), new=(40, 20), sink_tokens=16, head_dim=64,
            fresh=True, schedule=("shared", 8, 4, 3, 2),
        ), 3
    ),
    "ring, first tokens, window, sinks": (
        Case(
            "int4", "int4", residual=64, past=(300, 30), new=(20, 3), sink_tokens=16, head_dim=64, window=170,
            sinks=True, softcap=5.0, schedule=("mma", 4, 4, 3),
        ), 4
    ),
    "shared channels, bfloat16": (
        Case("int4_channel64", "int4", past=(300, 0), new=(30, 9), dtype="bfloat16", sinks=True, schedule=SHARED), 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(SPLIT, ("parts that some rows do not have",)))
def test_parts_of_the_past_add_up_to_the_whole(name, tmp_path):
    case, parts = SPLIT[name]
    print(f"worst error {emulate(case, tmp_path, parts=parts):.3f} of the bound")


NEW = {  # head_dim, dtype of k and v, the cache's format
    "f16": (128, "float16", "int4"),
    "bf16 to f16": (64, "bfloat16", "int8"),
    "bf16": (128, "bfloat16", "bfloat16"),
    "widest": (256, "float16", "int4"),
    "rotated": (128, "bfloat16", "int4_hadamard"),
}


@pytest.mark.parametrize("name", cases(NEW, ("rotated",)))
def test_new_tokens_are_laid_out(name, tmp_path):
    """Images of ragged sequences, of rows that lie apart, and nothing beside them."""
    head_dim, dtype, fmt = NEW[name]
    case = Case(fmt, fmt, head_dim=head_dim, past=(0, 5, 0, 64), new=(70, 0, 64, 3), fresh=True, dtype=dtype)
    given = prefill_cases.inputs(case)
    given.k[0, 0, :2] = 60000.0  # 2^16 in bfloat16: beyond float16
    wanted, new = images(case, given), op.fresh_pages(given.cache, len(given.q)).fill_(-1)
    chosen = op.plan(
        case.layout, dtype=dtype, page=0, residual=given.cache.residual_tokens, fresh=True, softcap=False, sinks=False,
        target=Target.parse("sm_90a"),
    )  # fmt: skip
    source = cuda_text(chosen.new_tokens)
    kernel = CpuKernel(source, [ROWS], new_tokens_program.THREADS, tmp_path)
    apart = [torch.cat([x, torch.full_like(x, float("nan"))], -1) for x in (given.k, given.v)]
    pitches = {
        name + of: n
        for name, n in (("token", 2 * case.kv_heads * head_dim), ("head", 2 * head_dim))
        for of in ("", "_1")
    }
    kernel(
        (case.kv_heads, 2, len(case.new)), K=apart[0], V=apart[1], CU=given.cu_seqlens, NEW=new, hk=case.kv_heads,
        **pitches, stages=2, batch=len(case.new),
    )  # fmt: skip
    assert torch.equal(new, wanted)


ROWS = r"""
static void *tz_row16(const void *p, int row, int pitch, int at) {
  return (uint16_t *)p + ((long long)row * pitch + at); }
template <int N> static void tz_store(void *p, const void *v) { memcpy(p, v, 4 * N); }
template <bool BF16> static unsigned tz_clamp2(float lo, float hi) {
  const float top = BF16 ? 3.3895313892515355e38f : 65504.f;
  auto one = [&](float x) { return (unsigned)(uint16_t)narrow<BF16>(fminf(fmaxf(x, -top), top)); };
  return one(lo) | one(hi) << 16;
}
"""
