"""The program that quantizes activations: its machine code, and its CUDA text run on the CPU against the reference."""

from __future__ import annotations

import re

import pytest
import torch
from cuda_on_cpu import CpuKernel
from emulated_cases import Compiled, cases
from terrazzo.lowering import KernelReport
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops.linear.quantize import quantize_rows
from terrazzo.ops.tiles.cuda.text import PRIMITIVES
from terrazzo.ops.w4a8 import activations, fp8_reference, reference
from terrazzo.schedules import quantize_rows as quantize_rows_schedules

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]
# (target, M of the bucket, K, dtype, gain, norm): a warp for each row, few and many rows, K that ends inside 16; gains
# that are read twice; e4m3
CASES = {
    "rows of a warp": ("sm_90a", 600, 520, "float16", False, True),
    "few rows": ("sm_90a", 3, 1000, "bfloat16", True, True),
    "many rows": ("sm_90a", 600, 4096, "float16", False, False),
    "many rows, gain": ("sm_90a", 600, 2888, "bfloat16", True, False),
    "long rows, gain": ("sm_90a", 600, 20000, "bfloat16", True, False),
    "longest": ("sm_90a", 600, 65536, "float16", True, True),
    "sm_80": ("sm_80", 600, 28672, "bfloat16", True, True),
    "e4m3": ("sm_90a", 600, 520, "bfloat16", True, True),
    "rows in turns": ("sm_90a", 600, 1000, "float16", True, True),
}
QUICK = ("many rows, gain", "rows in turns")
CASES["rows in turns, e4m3"] = ("sm_90a", 600, 536, "bfloat16", True, False)
TURNS = quantize_rows_schedules.QuantizeRows(2, 1, 2, 64, 16, 16, True)
"""Of "rows in turns": a CTA on each SM, so that some of them have two rows."""
EMULATED = [name for name in CASES if name not in ("longest", "sm_80")]

SHIMS = r"""
struct float4 { float x, y, z, w; }; struct uint2 { unsigned x, y; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float4 __ldg(const float4 *p) { float4 v; memcpy(&v, p, 16); return v; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static void cudaTriggerProgrammaticLaunchCompletion() {}
static void cudaGridDependencySynchronize() {}
static void tz_prefetch(const void *p, int bytes) {  // reads what it names, so that a wrong address is seen
  if (((uintptr_t)p | bytes) & 15) { fprintf(stderr, "misaligned prefetch\n"); abort(); }
  for (int i = 0; i < bytes; i += 16) (void)*((const volatile char *)p + i);
}
static int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
  return c;
}
template <class F> static unsigned reduced(unsigned x, F join) {
  uint32_t out;
  meet(&x, 1, &out, 1, [&](Meeting &w) {
    uint32_t all = w.in[0][0]; for (int l = 1; l < 32; ++l) all = join(all, w.in[l][0]);
    for (int l = 0; l < 32; ++l) w.out[l][0] = all; });
  return out;
}
static unsigned __reduce_max_sync(unsigned, unsigned x) {
  return reduced(x, [](unsigned a, unsigned b) { return a > b ? a : b; }); }
static int __reduce_add_sync(unsigned, int x) { return reduced(x, [](unsigned a, unsigned b) { return a + b; }); }
static float __shfl_xor_sync(unsigned, float x, int mask) { return tz_xor_shuffle(x, mask); }
static float __fmul_rn(float a, float b) { return a * b; }
static unsigned e4m3(float f) {  // half to even, beyond 448 to 448
  float a = fabsf(f); unsigned sign = std::signbit(f) ? 128 : 0; int e;
  if (f != f) return 127;
  if (a >= 448 || a == 0) return sign | (a ? 126 : 0);
  frexpf(a, &e); e = std::max(e - 1, -6);
  return sign | (unsigned)nearbyintf(ldexpf(a, 3 - e)) + (e + 6) * 8;
}
static float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <bool BF16> static unsigned max_half(unsigned a, unsigned b) {  // magnitudes; NaN becomes the canonical one
  unsigned infinity = BF16 ? 0x7f80 : 0x7c00;
  return a > infinity || b > infinity ? 0x7fff : std::max(a, b);
}
template <bool BF16> static unsigned max_pair(unsigned a, unsigned b) {
  return max_half<BF16>(a & 0xffff, b & 0xffff) | max_half<BF16>(a >> 16, b >> 16) << 16;
}
"""


def request(case: tuple):
    arch, m, k, dtype, gain, norm = case
    name = next(name for name, known in CASES.items() if known is case)
    target, schedule = Target.parse(arch), TURNS if "turns" in name else None
    codes = "e4m3" if "e4m3" in name else "int8"
    return activations.plan(m, k, dtype=dtype, gain=gain, norm=norm, target=target, codes=codes, schedule=schedule)


@pytest.fixture(scope="module")
def compiled():
    return Compiled(lambda name: request(CASES[name]), QUICK)


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_machine_code(compiled, name):
    report = KernelReport.read(compiled[name] / "report.json")
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    params = dict(request(CASES[name]).params)
    vectors, resident = params["vectors"], params["resident"]
    assert report.registers <= 65536 // resident
    if not report.instructions:
        pytest.skip(report.note)
    assert report.count(r"LDG\.E\.128") == params["gain"] * 2 * vectors * (2 if vectors > 4 else 1)
    assert report.count("UBLKPF") == (params["ahead"] > 0) + (params["later"] > 0)
    assert (params["ahead"] > 0) == (name not in ("few rows", "sm_80"))
    assert report.count(r"LDG\.E\.NA\.128") == vectors == report.count(r"STG\.E\.64")
    if not params["gain"] and not params["norm"]:  # pairs of values, and of pairs
        assert report.count(r"VHMNMX\.NAN") == 2 * vectors and report.count(r"FMNMX\.NAN") == 1
    assert report.count(r"IDP\.4A") == (0 if "e4m3" in name else 2 * vectors)  # and x is read once
    assert report.count(r"F2FP.*E4M3") == (4 * vectors if "e4m3" in name else 0)
    assert not report.count("F2I") and not report.count("I2F") and not report.count("FRND")


def primitives() -> str:
    """The named primitives with their asm statements in plain C."""
    text = PRIMITIVES["rows"].source
    text, loads = re.subn(r'asm volatile\("ld\.global\.L1.*?"l"\(p\)\);', "memcpy(r, p, 16);", text, flags=re.DOTALL)
    largest = r'asm\("max\.NaN\.f32.*?"\+f"\((.*?)\) : "f"\((.*?)\)\);'
    text, maxima = re.subn(largest, r"\1 = max_nan(\1, \2);", text)
    pairs = r'asm\("max\.NaN\.(b?)f16x2.*?"\+r"\((.*?)\) : "r"\((.*?)\)\);'
    text, packed = re.subn(
        pairs, lambda it: f"{it[2]} = max_pair<{'true' if it[1] else 'false'}>({it[2]}, {it[3]});", text
    )
    late = r'asm volatile\("ld\.global\.v4.*?"memory"\);'
    text, gains = re.subn(late, "memcpy(g + i, (const float *)p + i, 16);", text, flags=re.DOTALL)
    assert (loads, maxima, packed, gains) == (1, 2, 2, 1)
    pair = r'asm\("cvt\.rn\.satfinite\.e4m3x2.*?"=h"\((.*?)\) : "f"\((.*?)\), "f"\((.*?)\)\);'
    floats, pairs = re.subn(pair, r"\1 = e4m3(\2) << 8 | e4m3(\3);", PRIMITIVES["e4m3_rows"].source, flags=re.DOTALL)
    assert pairs == 1
    return text + floats


@pytest.mark.parametrize("name", cases(EMULATED, QUICK))
def test_the_cuda_text_computes_the_reference(compiled, name, tmp_path):
    _, _, k, dtype, gain, norm = CASES[name]
    params = dict(request(CASES[name]).params)
    source = (compiled[name] / "kernel.cu").read_text()
    kernel = CpuKernel(source, [SHIMS, primitives()], 32 * params["warps"] * params["rows"], tmp_path)
    turns, sms = params["persistent"], Target.parse("sm_90a").sms
    rng, m = torch.Generator().manual_seed(k), sms + 6 if turns else 6
    x = torch.randn(m, k, generator=rng).to(getattr(torch, dtype))
    columns = k - 3 if norm else k  # a row may end in padding, which the mean does not count
    x[1], x[2, :: k // 3], x[4, columns - 1], x[5, 0] = 0, 40.0, float("nan"), float("inf")
    x[:, columns:] = 0
    smooth = torch.rand(k, generator=rng) + 0.2 if gain else None
    weight = torch.randn(k, generator=rng) if norm else None
    factor = reference.activation_gain(smooth, weight) if gain else torch.zeros(1)
    if norm and not gain:  # RMSNorm with a weight of ones: no gain
        weight = torch.ones(k)
    e4m3 = "e4m3" in name
    out = torch.full((m + 1, activations.padded(k)), 99, dtype=torch.int8)
    scales, sums = torch.full((m + 1,), 7.0), torch.full((m + 1,), 99, dtype=torch.int32)
    values = {"X": x, "G": factor, "Q": out, "XS": scales, "RS": sums, "eps": 1e-5, "columns": float(columns), "m": m}
    kernel((sms if turns else -(-m // params["rows"]), 1, 1), **values)
    smooth, weight = (v if v is None else v[:columns] for v in (smooth, weight))
    module = fp8_reference if e4m3 else reference
    q, expected, *expected_sums = module.quantize_activations(x[:, :columns], smooth, weight, 1e-5)
    q, good = q.view(torch.int8), [0, 1, 2, 3, *range(6, m)]
    padding = out[good, columns:].view(torch.float8_e4m3fn).float() if e4m3 else out[good, columns:]  # -0 is 0
    assert torch.equal(out[good, :columns], q[good]) and not padding.any() and (out[m] == 99).all()
    assert sums[m] == 99 and scales[m] == 7
    assert bool((sums == 99).all()) if e4m3 else torch.equal(sums[good], expected_sums[0][good])
    assert scales[4].isnan() and not scales[5].isfinite()
    if norm:
        torch.testing.assert_close(scales[good], expected[good], rtol=2e-6, atol=0)
    else:
        assert torch.equal(scales[good], expected[good])


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"k": 12}, "k"),
        ({"dtype": "float32"}, "dtype"),
        ({"warps": 1}, "warps"),
        ({"rows": 2}, "warps"),
        ({"ahead": 17}, "ahead"),
        ({"later": -1}, "later"),
    ],
)
def test_a_program_that_cannot_hold_a_row_is_refused(changes, argument):
    params = dict(request(CASES["many rows"]).params) | changes
    with pytest.raises(ArgumentError) as caught:
        quantize_rows.build(Target.parse("sm_90a"), **params)
    assert caught.value.argument == argument


def test_two_waits_do_not_share_memory(compiled):
    """The reduction's values and the row sum's lie apart: a warp may be at the second while another reads the first."""
    source = (compiled["many rows, gain"] / "kernel.cu").read_text()
    calls = source[source.index("extern __shared__") :]
    offsets = re.findall(r"tz_row_(?:reduce|sum)<.*&\(shared\[(\d+)\]", calls)
    warps = dict(request(CASES["many rows, gain"]).params)["warps"]
    assert offsets == ["0", str(2 * warps)]
